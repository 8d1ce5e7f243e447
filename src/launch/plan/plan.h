// The plan of a job: which host runs which ranks and processes of other roles; and which of the job's launchers this
// one is. Pure functions over plain data; nothing here starts anything or asks the system, so that a plan can be made,
// printed and tested anywhere.
#pragma once

#include "base/result.h"
#include "launch/plan/job_spec.h"
#include "launch/processes.h"
#include "net/address.h"
#include "net/secret.h"
#include "rendezvous/detect.h"

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// No launcher was told its rank: the launcher at the endpoint is 0, the others are numbered as they come.
inline constexpr int kRankAsTheyCome = -1;

/// Role of this launcher where `cohort run` is started on each host of one job (by hand as torchrun is, by srun, in
/// pods): which of the launchers it is, and where they meet. The launcher of node rank 0 supervises, the others are its
/// agents. It is an error if a launcher's environment says that there are several launchers but nothing joins them into
/// one job, since each would train on its own.
struct NodeRole {
  int rank = 0;   ///< rank of this launcher, its host's index in the job; or kRankAsTheyCome
  int count = 1;  ///< number of launchers
  int least = 0;  ///< minimum number of launchers to begin and to go on; 0: all
  /// Address at which the launcher of rank 0 listens. Nullopt: launchers find each other through `step`.
  std::optional<net::Address> master;
  std::optional<rendezvous::Detected> step;  ///< for Slurm: the step in which each task is a launcher
  std::string id;                            ///< the same for all launchers; empty: none given
  std::string source;                        ///< for messages
  bool described = false;        ///< the environment describes all launchers, so none can be left out (pods)
  std::string secret_file = {};  ///< empty: no file is named
  // Set at rank 0 when it has the meeting address.
  std::optional<net::Secret> secret = {};
  std::uint16_t port = 0;
  std::string join = {};  ///< command to type on each other node; empty: Slurm starts them
};

/// How agents come to be on other hosts. Hand: somebody runs `cohort agent --join` there. Launcher: somebody runs
/// `cohort run` there, too, as the launcher of another node. Owner: the process that the job belongs to has agents
/// started, which report their host and how many ranks they take.
enum class StartMethod { Ssh, Slurm, Mpi, Hand, Launcher, Owner };

/// Returns true if an agent reports its host and how many ranks it takes.
constexpr bool says_itself(StartMethod method) {
  return method == StartMethod::Launcher || method == StartMethod::Owner;
}

/// Returns true if agents on other hosts come by themselves, without a command of ours.
constexpr bool comes_by_itself(StartMethod method) { return method == StartMethod::Hand || says_itself(method); }

/// A host of a job: what it may run and, after `make_plan`, what it runs.
struct PlannedHost {
  std::string name;   ///< for messages
  int slots = 1;      ///< how many ranks it takes
  bool local = true;  ///< this process is on this host
  /// Hosts with the same value are parts of one host, each with an agent of its own, and are adjacent in the plan;
  /// empty: a host by itself.
  std::string part_of = {};
  /// GPUs of its agent, as CUDA_VISIBLE_DEVICES names them; in a plan, of all parts of its host. Empty: not known.
  std::vector<std::string> devices = {};
  int component = -1;  ///< component of a heterogeneous Slurm job, for srun; -1: none
  // The processes of this host.
  int index = 0;       ///< index of its agent
  int first_rank = 0;  ///< its ranks are consecutive
  int ranks = 0;
  // The whole host, of which this may be a part.
  int machine = 0;      ///< GROUP_RANK
  int first_local = 0;  ///< LOCAL_RANK of its first rank
  int local_ranks = 0;  ///< LOCAL_WORLD_SIZE
  // Processes besides its ranks.
  int first_server = 0;  ///< its servers are consecutive
  int servers = 0;
  bool evaluator = false;

  /// Number of processes of all roles.
  int processes() const noexcept { return ranks + servers + (evaluator ? 1 : 0); }
};

/// The hosts, how the others are reached, and which processes run where. Before `make_plan`, `hosts` lists those that
/// may run something; empty: this host, with as many ranks as are wanted.
struct Plan {
  std::vector<PlannedHost> hosts = {};  ///< in a plan: the hosts with processes; those without ranks come last
  /// Hosts for servers, each up to its slots; they may have ranks, too. Empty: the hosts that have ranks.
  std::vector<PlannedHost> server_hosts = {};
  StartMethod method = StartMethod::Ssh;
  std::optional<NodeRole> node = {};  ///< set if this command launches one of several nodes
  std::string note = {};              ///< for the user: names of the same host, idle nodes
  int world_size = 0;
  int servers = 0;
  bool evaluator = false;
  int machines = 0;       ///< number of machines that have ranks
  int least = 0;          ///< ranks with which an elastic job goes on; 0: not elastic
  int spares = 0;         ///< how many of its last ranks begin as spares
  bool may_grow = false;  ///< other hosts may come while the job runs

  Roles roles() const noexcept { return {world_size, servers, evaluator}; }
};

/// Highest number of processes; catches a mistyped number.
inline constexpr int kMostProcesses = 65536;

/// Returns COHORT_SHARES for `--shares`, by this plan's ranks: a number for a host is spread evenly over its ranks.
Result<std::string> shares_by_rank(const Plan& plan, const std::string& shares);

/// Returns how many ranks all these hosts take.
int sum_of_slots(const std::vector<PlannedHost>& hosts);

/// Fills the hosts in order, each up to its slots. Errors (InvalidArgument): no process asked for, too many for the
/// slots (the message says how many there are), a host named twice. Servers and evaluator (`spec`) take no slots.
/// Servers fill `server_hosts` in order, too (`spec.servers` 0: all their slots); if none are named, they are spread
/// evenly over the hosts that have ranks. The evaluator is on rank 0's host.
Result<Plan> make_plan(Plan plan, int processes, const JobSpec& spec = {});

/// Returns the processes of a host by their numbers in `Plan::roles`, in the order in which its agent starts them.
std::vector<int> processes_of(const Plan& plan, const PlannedHost& host);

/// Returns the processes of the agent with this host index: of all its orders, including ended ones.
std::vector<int> processes_on(const Plan& plan, int index);

/// Returns true if there are hosts other than this one.
bool goes_elsewhere(const Plan& plan);

/// Returns the time limit for agents to report and workers to run.
std::chrono::milliseconds start_timeout_of(const JobSpec& spec, const Plan& plan);

/// Returns the host of each process.
std::vector<std::string> hosts_of_processes(const Plan& plan);

/// Returns "4 processes on 1 host (vm: ranks 0-3)" or "4 processes and 2 servers on 1 host (vm: ...)".
std::string to_string(const Plan& plan);

/// Returns this launcher's role: nullopt if it is the only one; a count of 1 if it is told so, on this host.
/// InvalidArgument: options without meaning, or launchers that cannot be one job; the message says what to use instead.
Result<std::optional<NodeRole>> choose_node(const JobSpec& spec, const rendezvous::Environment& environment);

/// torchrun's default ports, if --master-addr or --rdzv-endpoint gives only a host.
inline constexpr std::uint16_t kDefaultMasterPort = 29500;
inline constexpr std::uint16_t kDefaultEndpointPort = 29400;

}  // namespace cohort::launch
