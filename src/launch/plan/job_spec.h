// The command line of `cohort run`, with its variables and its file, as one value, which the parser
// (programs/cohort/run_options.cpp) fills and everybody from the plan to the agents reads. Plain data; any thread.
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

/// How other hosts are reached.
enum class Starter {
  Auto,  ///< srun within a Slurm allocation, else ssh
  Ssh,
  Slurm,
  Mpi,
  Hand,   ///< somebody runs `cohort agent --join` on each
  Local,  ///< every host is this one: to see what a job of many hosts does
};

enum class Binding {
  None,  ///< the kernel places ranks as it likes
  Core,  ///< each rank keeps to a share of the cores, next to each other
};

enum class PrefixStyle {
  None,  ///< bytes pass as they are; with several ranks a line at a time
  Rank,  ///< "host:3 | text"
  Full,  ///< "12:04:31.250 host:3 err | text"
  Json,  ///< an event for each line (announcer.h), all of them for descriptor 1
};

/// When the same line from several ranks is shown as one.
enum class Collapse {
  Auto,  ///< on a terminal
  Always,
  Never,
};

struct HealthLimits {
  std::chrono::seconds stopped_notice{5};  ///< a rank that was stopped (SIGSTOP), or a host's agent, is named,
  std::chrono::seconds stopped_end{60};    ///< and ends the job; 0: never
  bool elastic = false;                    ///< the others may go on without a rank that was stopped so long
  std::chrono::seconds absent{3};          ///< a world of all ranks waits so long for one that has ended; 0: never
  std::chrono::seconds deadlock{10};       ///< nobody has moved for so long; 0: never ends a job
  std::chrono::seconds away_notice{30};    ///< a rank is named that others wait for, then at doubled intervals,
  std::chrono::seconds stall{1800};        ///< and ends the job; 0: never
  int slow_steps = 8;                      ///< of a window, and
  int slow_windows = 3;                    ///< so many, one after another, have to be slow for a rank to be named
  std::chrono::seconds slow_least{3};      ///< and as long: others may have had its core for a moment
  double slow_factor = 1.5;                ///< over the median of the ranks
};

struct StepLimits {
  std::chrono::seconds no_step{600};  ///< since the last one; 0: never told
  double slow_factor = 2;             ///< over the median of the windows before
  int windows = 3;                    ///< that have to be slow, one after another: an evaluation makes one so
  int window_steps = 10;              ///< at least, and
  std::chrono::seconds window{1};
  std::size_t warm_windows = 5;  ///< of which there has to be a median
};

/// As Horovod's.
inline constexpr std::chrono::seconds kElasticTimeout{600};

/// Options of a job that goes on with fewer ranks.
struct ElasticSpec {
  int least = 0;                         ///< ranks; 0: the job is not elastic
  int most = 0;                          ///< 0: no limit
  std::optional<int> most_changes = {};  ///< of its members, in the whole job
  int spares = 0;                        ///< that run and wait to be members, beyond `most`
  std::string script = {};               ///< names the hosts that there are; empty: they are those of the start
  int slots_per_host = 0;                ///< where it does not say how many; 0: 1
  /// For how long a host on which a worker has failed is not used again: from the first to the second; nothing: for
  /// ever.
  std::optional<std::pair<std::chrono::seconds, std::chrono::seconds>> cooldown = {};
  std::optional<std::chrono::seconds> timeout = {};  ///< for hosts to come, below `least`; nothing: kElasticTimeout
  explicit operator bool() const noexcept { return least > 0; }
};

/// For how long a rank of such a job waits to be a member: for a spare that may be as long as the job.
inline std::chrono::seconds patience_of(const ElasticSpec& elastic) {
  const std::chrono::seconds timeout = elastic.timeout.value_or(kElasticTimeout);
  return elastic.spares > 0 ? std::max<std::chrono::seconds>(timeout, std::chrono::hours(24 * 365)) : timeout;
}

/// Longest silence of a host, unless somebody wants it otherwise.
inline constexpr std::chrono::milliseconds kHostTimeout{3000};

struct JobSpec {
  // Processes and hosts.
  std::optional<int> processes = {};  ///< -np; 0: auto
  std::string nproc_per_node = {};    ///< as it was typed
  std::string hosts = {};             ///< "a:4,b:4"
  std::string host_file = {};
  int nodes = 0;     ///< the first so many of them; 0: all
  int per_node = 0;  ///< slots of each; 0: as the list says, else 1
  Starter starter = Starter::Auto;
  std::vector<std::string> ssh = {"ssh"};  ///< the command and options of the user's own
  std::string remote_cohort = {};          ///< path of the command there; empty: as here
  std::string network = {};
  bool sync = false;  ///< the working folder goes to the other hosts before
  std::vector<std::string> sync_excludes = {};
  std::string secret_file = {};  ///< of agents by hand, and of launchers that are several
  std::uint16_t listen = 0;      ///< where agents by hand come to; 0: a port of the system's choice
  std::chrono::milliseconds host_timeout = kHostTimeout;  ///< a host that is silent so long is lost
  Binding bind = Binding::None;
  std::string shares = {};  ///< "measured", or a number for each host or rank; empty: even, or as COHORT_SHARES says
  int servers = 0;
  bool colocated = false;  ///< one server on each host that has ranks, instead of that number
  /// Hosts of servers, as `hosts`; or "component N", all nodes of a component of a heterogeneous Slurm job. Those of
  /// the allocation have no ranks, unless `hosts` or the file names them, too.
  std::string server_hosts = {};

  // A launcher on each node, as typed. What is not is taken from torchrun's variables (PET_NNODES, ...), where there
  // are any.
  std::string nnodes = {};
  std::string node_rank = {};
  std::string master = {};       ///< HOST[:PORT]
  std::string master_addr = {};  ///< HOST
  std::string master_port = {};
  std::string rdzv_endpoint = {};  ///< HOST[:PORT]
  std::string rdzv_backend = {};
  std::string rdzv_id = {};
  bool standalone = false;

  // The program.
  ProgramRequest program = {};
  std::optional<ProgramRequest> server_program = {};  ///< what servers run; nothing: the program
  std::optional<ProgramRequest> evaluator = {};       ///< nothing: there is none
  bool as_horovod = false;  ///< programs that import horovod find Cohort's package of that name, and HOROVOD_RANK etc.
  bool tf_config = false;   ///< programs of tf.distribute find TF_CONFIG
  std::vector<std::string> environment = {};  ///< "NAME=value" for the workers

  // Output and what is kept.
  PrefixStyle prefix = PrefixStyle::Rank;
  std::string shown_ranks = {};  ///< "0,3-5"; empty: all. The logs have every rank
  Collapse collapse = Collapse::Auto;
  bool status = true;                   ///< a line below the output that says how the run is, on a terminal
  bool page = false;                    ///< and a page for browsers, as long as the job runs
  bool quiet = false;                   ///< print only what the ranks print, and failures
  bool json = false;                    ///< everything on stdout, as events (announcer.h)
  std::string run_folder = {};          ///< empty: runs/<UTC time>-<program>-<id>
  std::string output_folder = {};       ///< of the logs; empty: logs/ in the run's folder
  bool keep_logs = true;                ///< the ranks' output, in files
  std::vector<std::string> track = {};  ///< where the run record goes meanwhile, as `cohort export --to` takes it
  bool trace = false;                   ///< the ranks' events are kept in the run's folder

  // Limits and restarts.
  std::optional<std::chrono::milliseconds> timeout = {};        ///< for the whole job
  std::optional<std::chrono::milliseconds> start_timeout = {};  ///< see `start_timeout_of`
  std::chrono::milliseconds grace = std::chrono::seconds(5);    ///< between asking ranks to end and killing them
  /// Likewise where ranks save when SIGTERM asks them to; and for the others once one has ended with kRequeueStatus.
  std::chrono::milliseconds preempt_grace = std::chrono::seconds(30);
  /// For the evaluator to end once training is over: it may have to load and evaluate the last checkpoint.
  std::chrono::milliseconds evaluator_grace = std::chrono::seconds(300);
  /// Once the job is over: for a reader that has stopped reading to take a byte of the output that is left.
  std::chrono::milliseconds output_timeout = std::chrono::seconds(10);
  HealthLimits health = {};     ///< when a job that does not go on is named, and ended
  StepLimits steps = {};        ///< and when its steps are
  std::string on_warning = {};  ///< a command of the shell that is told of warnings; empty: none
  int server_restarts = 0;      ///< how often a server that has failed is started again, in the whole job
  int lost_servers = 0;         ///< without which the job goes on
  int max_restarts = 0;         ///< how often all ranks are started again after one has failed
  ElasticSpec elastic = {};

  // For this command only.
  bool show_config = false;
  bool check_build = false;
  bool dry_run = false;
  std::vector<std::string> command_line = {};  ///< for the record

  // For programs that start this command.
  /// A process without which nobody wants the job: its end ends it.
  std::optional<int> owner_pid = {};
  std::string owner_folder = {};  ///< private to the owner; removed if the owner ends first and can no longer do so
  int agents = 0;                 ///< so many come by themselves, by the owner's doing; 0: none do
  /// The data these agents need to come is written to this descriptor, which is then closed.
  std::optional<int> invitation_fd = {};

  /// Origins of options that the command line has not given: "COHORT_RUN_GRACE" or "job.toml:3".
  std::map<std::string, std::string, std::less<>> origins = {};
  /// "; --grace is from job.toml:3", for errors; else empty.
  std::string origin_of(std::string_view option) const {
    const auto found = origins.find(option);
    return found == origins.end() ? std::string() : "; " + found->first + " is from " + found->second;
  }
  bool names_hosts() const { return !hosts.empty() || !host_file.empty() || nodes != 0; }
};

}  // namespace cohort::launch
