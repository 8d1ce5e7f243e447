// The command line of `cohort run`, with its variables and its file, as one value. The parser
// (programs/cohort/run_options.cpp) fills it; all parts from the plan to the agents read it. Plain data; any thread.
#pragma once

#include "launch/plan/program.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

/// How `cohort run` starts agents on other hosts.
enum class Starter {
  Auto,  ///< srun within a Slurm allocation, else ssh
  Ssh,
  Slurm,
  Mpi,
  Hand,   ///< somebody runs `cohort agent --join` on each host
  Local,  ///< every host is this one, to try out a job of many hosts
};

enum class Binding {
  None,  ///< the kernel places ranks as it likes
  Core,  ///< each rank is bound to a share of adjacent cores
};

enum class PrefixStyle {
  None,  ///< bytes pass unchanged; with several ranks a line at a time
  Rank,  ///< "host:3 | text"
  Full,  ///< "12:04:31.250 host:3 err | text"
  Json,  ///< an event for each line (announcer.h), all on stdout
};

/// When equal lines of several ranks are shown as one.
enum class Collapse {
  Auto,  ///< Always on a terminal, else Never
  Always,
  Never,
};

struct HealthLimits {
  std::chrono::seconds stopped_notice{5};  ///< a stopped (SIGSTOP) rank or agent is named after this time
  std::chrono::seconds stopped_end{60};    ///< a stopped one ends the job after this time; 0: never
  bool elastic = false;                    ///< the others may go on without a rank that was stopped for `stopped_end`
  std::chrono::seconds absent{3};          ///< how long a world waits for a rank that has ended; 0: for ever
  std::chrono::seconds deadlock{10};       ///< ends the job if no rank moves this long; 0: never
  std::chrono::seconds away_notice{30};    ///< an awaited rank is named after this time, then at doubled intervals
  std::chrono::seconds stall{1800};        ///< an awaited rank ends the job after this time; 0: never
  int slow_steps = 8;                      ///< steps of a window
  int slow_windows = 3;                    ///< consecutive slow windows after which a rank is named
  std::chrono::seconds slow_least{3};      ///< their least duration, as other processes may use the core
  double slow_factor = 1.5;                ///< a window is slow above this multiple of the ranks' median
};

struct StepLimits {
  std::chrono::seconds no_step{600};  ///< time without a step after which a warning is due; 0: never
  double slow_factor = 2;             ///< a window is slow above this multiple of the earlier median
  int windows = 3;                    ///< consecutive slow windows; an evaluation makes only one slow
  int window_steps = 10;              ///< least number of steps in a window
  std::chrono::seconds window{1};
  std::size_t warm_windows = 5;  ///< windows that the median needs
};

/// Default time for hosts to come, the same as Horovod's.
inline constexpr std::chrono::seconds kElasticTimeout{600};

/// Options of a job that goes on with fewer ranks.
struct ElasticSpec {
  int least = 0;                         ///< minimum number of ranks; 0: the job is not elastic
  int most = 0;                          ///< maximum number of ranks; 0: no limit
  std::optional<int> most_changes = {};  ///< limit of membership changes in the whole job; nullopt: none
  int spares = 0;                        ///< ranks beyond `most` that run and wait to be members
  std::string script = {};               ///< lists the available hosts; empty: the hosts at the start
  int slots_per_host = 0;                ///< slots of hosts that the list gives no number; 0: 1
  /// Time for which a host is not used after a worker has failed on it: first the shorter time, at most the longer;
  /// nullopt: for ever.
  std::optional<std::pair<std::chrono::seconds, std::chrono::seconds>> cooldown = {};
  std::optional<std::chrono::seconds> timeout = {};  ///< time to wait for `least` ranks; nullopt: kElasticTimeout
  explicit operator bool() const noexcept { return least > 0; }
};

/// Returns how long a rank of such a job waits to be a member; a spare may wait as long as the job runs.
inline std::chrono::seconds patience_of(const ElasticSpec& elastic) {
  const std::chrono::seconds timeout = elastic.timeout.value_or(kElasticTimeout);
  return elastic.spares > 0 ? std::max<std::chrono::seconds>(timeout, std::chrono::hours(24 * 365)) : timeout;
}

/// Default for the longest silence of a host.
inline constexpr std::chrono::milliseconds kHostTimeout{3000};

struct JobSpec {
  // Processes and hosts.
  std::optional<int> processes = {};  ///< -np; 0: auto
  std::string nproc_per_node = {};    ///< as typed
  std::string hosts = {};             ///< "a:4,b:4"
  std::string host_file = {};
  int nodes = 0;     ///< uses only this many hosts, the first ones; 0: all
  int per_node = 0;  ///< slots of each host; 0: as in the list, else 1
  Starter starter = Starter::Auto;
  std::vector<std::string> ssh = {"ssh"};  ///< the user's own ssh command with options
  std::string remote_cohort = {};          ///< path of the command on other hosts; empty: as here
  std::string network = {};
  bool sync = false;  ///< copies the working folder to the other hosts first
  std::vector<std::string> sync_excludes = {};
  std::string secret_file = {};                           ///< for agents started by hand, and for several launchers
  std::uint16_t listen = 0;                               ///< port for agents started by hand; 0: the system chooses
  std::chrono::milliseconds host_timeout = kHostTimeout;  ///< a host silent for longer is lost
  Binding bind = Binding::None;
  std::string shares = {};  ///< "measured", or a number for each host or rank; empty: even, or COHORT_SHARES
  int servers = 0;
  bool colocated = false;  ///< one server on each host that has ranks, instead of `servers`
  /// Hosts of servers, written as `hosts`; or "component N" for all nodes of a component of a heterogeneous Slurm job.
  /// Nodes of the allocation that are named here have no ranks, unless `hosts` or the file names them, too.
  std::string server_hosts = {};

  // Options for a launcher on each node, as typed. Those not given are taken from torchrun's variables (PET_NNODES,
  // ...), if set.
  std::string nnodes = {};
  std::string node_rank = {};
  std::string master_addr = {};  ///< HOST
  std::string master_port = {};
  std::string rdzv_endpoint = {};  ///< HOST[:PORT]
  std::string rdzv_backend = {};
  std::string rdzv_id = {};
  bool standalone = false;

  // The program.
  ProgramRequest program = {};
  std::optional<ProgramRequest> server_program = {};  ///< program of the servers; nullopt: `program`
  std::optional<ProgramRequest> evaluator = {};       ///< nullopt: no evaluator
  bool as_horovod = false;  ///< programs that import horovod get Cohort's package of that name, and HOROVOD_RANK etc.
  bool tf_config = false;   ///< programs of tf.distribute get TF_CONFIG
  std::vector<std::string> environment = {};  ///< "NAME=value" for the workers

  // Output and files.
  PrefixStyle prefix = PrefixStyle::Rank;
  std::string shown_ranks = {};  ///< "0,3-5"; empty: all. Logs are kept for every rank
  Collapse collapse = Collapse::Auto;
  bool page = false;                    ///< serves a page for browsers while the job runs
  bool quiet = false;                   ///< print only what the ranks print, and failures
  bool json = false;                    ///< everything on stdout, as events (announcer.h)
  std::string run_folder = {};          ///< empty: runs/<UTC time>-<program>-<id>
  bool keep_logs = true;                ///< keeps the ranks' output in files
  std::vector<std::string> track = {};  ///< destinations of the run record during the run, as for `cohort export --to`
  bool trace = false;                   ///< keeps the ranks' events in the run's folder

  // Limits and restarts.
  std::optional<std::chrono::milliseconds> timeout = {};        ///< time limit of the whole job
  std::optional<std::chrono::milliseconds> start_timeout = {};  ///< see `start_timeout_of`
  std::chrono::milliseconds grace = std::chrono::seconds(5);    ///< time between asking ranks to end and killing them
  /// The same time if ranks save on SIGTERM; also for the other ranks, once one has ended with kRequeueStatus.
  std::chrono::milliseconds preempt_grace = std::chrono::seconds(30);
  /// Time for the evaluator to end after training: it may have to load and evaluate the last checkpoint.
  std::chrono::milliseconds evaluator_grace = std::chrono::seconds(300);
  HealthLimits health = {};     ///< limits of waiting before a rank is named or the job ended
  StepLimits steps = {};        ///< limits of step times before a warning
  std::string on_warning = {};  ///< shell command that gets warnings; empty: none
  int server_restarts = 0;      ///< restarts of failed servers in the whole job
  int lost_servers = 0;         ///< failed servers without which the job goes on
  int max_restarts = 0;         ///< restarts of all ranks after one has failed
  ElasticSpec elastic = {};

  // Options of this command only.
  bool show_config = false;
  bool dry_run = false;
  std::vector<std::string> command_line = {};  ///< for the run record

  // Options for programs that start this command.
  /// A process without which the job has no purpose: its end ends the job.
  std::optional<int> owner_pid = {};
  std::string owner_folder = {};  ///< private to the owner; removed if the owner ends first
  int agents = 0;                 ///< number of agents that the owner starts; 0: none
  /// With `agents`: descriptor to which the data for them is written; closed after that.
  std::optional<int> invitation_fd = {};

  /// Origins of options that the command line does not give: "COHORT_RUN_GRACE" or "job.toml:3".
  std::map<std::string, std::string, std::less<>> origins = {};
  /// Returns "; --grace is from job.toml:3", for errors; else an empty text.
  std::string origin_of(std::string_view option) const {
    const auto found = origins.find(option);
    return found == origins.end() ? std::string() : "; " + found->first + " is from " + found->second;
  }
  bool names_hosts() const { return !hosts.empty() || !host_file.empty() || nodes != 0; }
};

}  // namespace cohort::launch
