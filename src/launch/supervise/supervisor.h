// `cohort run`: makes the plan, has an agent placed on every host, tells them what to start, shows the output, and ends
// the job as soon as anything in it has failed. It owns the job's store and its lock on MASTER_PORT. It touches workers
// only through their agents. RunOptions are what whoever starts a job wants of it, JobSetup is what it consists of:
// they look at this process and its files, and start nothing. One thread.
#pragma once

#include "launch/messages.h"
#include "launch/plan/plan.h"
#include "launch/plan/program.h"
#include "launch/plan/rank_environment.h"
#include "launch/processes.h"
#include "launch/show/output_view.h"
#include "launch/start/starter.h"
#include "launch/watch/health.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// The options of `cohort run` as values.
struct RunOptions {
  int processes = 0;  ///< 0: as many as there are usable cores
  ProgramRequest program;
  OtherRoles others = {};                             ///< servers and the evaluator
  std::optional<ProgramRequest> server_program = {};  ///< what servers run; nothing: the program
  std::optional<ProgramRequest> evaluator_program = {};
  std::string run_folder;                     ///< empty: runs/<UTC time>-<program>-<id>
  std::vector<std::string> environment = {};  ///< "NAME=value" for the workers
  Binding bind = Binding::None;
  PrefixStyle prefix = PrefixStyle::Rank;
  Collapse collapse = Collapse::Auto;
  std::string shown_ranks = {};                           ///< "0,3-5"; empty: all. The logs have every rank
  std::optional<std::chrono::milliseconds> timeout = {};  ///< for the whole job
  std::chrono::milliseconds start_timeout = std::chrono::seconds(30);  ///< for agents to report and workers to run
  std::chrono::milliseconds grace = std::chrono::seconds(5);           ///< between asking ranks to end and killing them
  /// For the evaluator to end once training is over: it may have to load and evaluate the last checkpoint.
  std::chrono::milliseconds evaluator_grace = std::chrono::seconds(300);
  /// Likewise where ranks save when SIGTERM asks them to; and for the others once one has ended with kRequeueStatus.
  std::chrono::milliseconds preempt_grace = std::chrono::seconds(30);
  /// Once the job is over: for a reader that has stopped reading to take a byte of the output that is left.
  std::chrono::milliseconds output_timeout = std::chrono::seconds(10);
  WatchLimits watch = {};               ///< when a job that does not go on is named, and ended
  std::string on_warning;               ///< a command of the shell that is told of warnings; empty: none
  int server_restarts = 0;              ///< how often a server that has failed is started again, in the whole job
  int lost_servers = 0;                 ///< without which the job goes on
  int max_restarts = 0;                 ///< how often all ranks are started again after one has failed
  bool keep_logs = true;                ///< the ranks' output, in files
  std::string output_folder;            ///< for those; empty: logs/ in the run's folder
  std::vector<std::string> track = {};  ///< where the run record goes meanwhile, as `cohort export --to` takes it
  bool as_horovod = false;  ///< programs that import horovod find Cohort's package of that name, and HOROVOD_RANK etc.
  bool tf_config = false;   ///< programs of tf.distribute find TF_CONFIG
  /// A process without which nobody wants the job: its end ends it.
  std::optional<int> owner_pid = {};
  std::vector<HostSlots> hosts = {};                                 ///< where; empty: this one
  RemoteOptions remote = {};                                         ///< how others are reached
  std::chrono::milliseconds host_timeout = std::chrono::seconds(3);  ///< a host that is silent so long is lost
  std::string owner_folder;  ///< private to the owner; removed if the owner ends first and can no longer do so
  /// This command is the launcher of one of several nodes. `hosts` are all nodes, each with as many slots as this one:
  /// the others say themselves how many they want.
  std::optional<NodeRole> node = {};
  /// The ranks' events are kept in the run's folder; once the job is over, this gets the folder.
  bool trace = false;
  std::function<void(const std::string&)> on_trace = {};
  /// Where agents come by the owner's doing: what they need to come is written there, and it is closed.
  std::optional<int> invitation_fd = {};
  bool quiet = false;                          ///< print only what the ranks print, and failures
  bool status = true;                          ///< a line below the output that says how the run is, on a terminal
  bool page = false;                           ///< and a page for browsers, as long as the job runs
  bool json = false;                           ///< everything on stdout, as events (announcer.h)
  std::vector<std::string> command_line = {};  ///< for the record
};

/// Exit statuses that are not a rank's.
inline constexpr int kTimeoutStatus = 124;
inline constexpr int kCannotStartStatus = 127;

/// Throws InvalidArgument where the hosts have too few places for the processes wanted.
void check_places(const RunOptions& options);

/// Runs the job to its end. Returns the exit status as a shell gives it: 0; the first failing rank's code, or 128 +
/// signal; kRequeueStatus once all have ended with it; 124 after `timeout`; 127 if the program could not be started;
/// 128 + signal if this process was told to end. Throws cohort::Error where nothing was started. Blocks signals and
/// adopts orphans for this process: call it from a process that does nothing else, before it has a second thread.
int run_job(const RunOptions& options);

/// The part of a job that `options.node` is: of rank 0 the job, once the others can find it; else this node's ranks, to
/// the job's end, whose exit status it returns. Likewise for the rest.
int run_node(RunOptions options);

/// What a job consists of, from the options of who starts it: plan, program, environment, limits; and the orders that
/// agents get.
struct JobSetup {
  Plan plan;
  Program program;
  std::vector<RoleProgram> programs = {};  ///< of roles that run something else
  Environment environment;                 ///< of the workers, without what differs between ranks
  Binding bind = Binding::None;
  bool as_horovod = false;
  bool trace = false;
  bool servers_again = false;            ///< one that fails may be started again
  std::vector<int> ignored = {};         ///< signals that our caller has us ignore
  std::vector<std::string> chosen = {};  ///< names of variables that go along to every host, whatever they are
  std::uint64_t open_files = 0;          ///< the limit that workers get: what it was before it was raised for ourselves
};

/// Throws InvalidArgument where the hosts do not have so many places.
Plan plan_of(const RunOptions& options);
/// Raises this process's limit of open files. Throws cohort::Error on options that cannot be met.
JobSetup set_up_job(const RunOptions& options);

/// Those of --ranks; empty: all. Throws cohort::Error where it names one that there is not.
std::vector<int> shown_ranks(const RunOptions& options, const Plan& plan);

/// There are hosts other than this one.
bool goes_elsewhere(const Plan& plan);
/// The executable of a process, by its number in the plan's Roles; of -1 the ranks'.
const std::string& program_of(const JobSetup& setup, int process);
/// What the agent of `host` is to start.
StartJob order_for(const JobSetup& setup, const PlannedHost& host, const JobFacts& facts);

/// Where `path` leads from the current folder.
std::string absolute_path(const std::string& path);

std::string random_hex(std::size_t bytes);

/// What `cohort run` would start, in words: the plan as a table, the exact command, and what each rank's environment
/// gets over that of the command. Starts nothing.
/// Whole lines. Throws cohort::Error on options that cannot be met, as `run_job` does.
std::string describe_job(const RunOptions& options);

}  // namespace cohort::launch
