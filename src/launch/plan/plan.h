// The plan of a job: which rank, and which process of another role, runs where; and of several launchers of one job,
// which this one is. Pure functions over plain data; nothing here starts anything or asks the system, so that a plan
// can be made, printed and tested anywhere.
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

/// No launcher was told which one it is: the one at the endpoint is 0, the others are numbered as they come.
inline constexpr int kRankAsTheyCome = -1;

/// Role of this launcher where `cohort run` is started on each host of one job (by hand as torchrun is, by srun, in
/// pods): which of the launchers it is, and where they meet. The one of node rank 0 supervises, the others are its
/// agents. If a launcher's environment says that there are several of us and nothing joins them into one job, that is
/// an error: each would train on its own.
struct NodeRole {
  int rank = 0;   ///< of this launcher, its host's index in the job; or kRankAsTheyCome
  int count = 1;  ///< of launchers
  int least = 0;  ///< with so many the job begins, if no others come, and goes on; 0: all
  /// Address at which the launcher of rank 0 listens. Nullopt: launchers find each other through `step`.
  std::optional<net::Address> master;
  std::optional<rendezvous::Detected> step;  ///< of Slurm's, each of whose tasks is one of the launchers
  std::string id;                            ///< the same for all of them; empty: not said
  std::string source;                        ///< for messages
  bool described = false;                    ///< by an environment in which no launcher can be left out (pods)
  std::string secret_file = {};              ///< empty: none is named
  // Set at rank 0 once it has the meeting address.
  std::optional<net::Secret> secret = {};
  std::uint16_t port = 0;
  std::string join = {};  ///< what has to be typed on each other node; empty: nothing, Slurm starts them
};

/// How agents come to be on other hosts. By hand: somebody runs `cohort agent --join` there. Launcher: somebody runs
/// `cohort run` there, too, as the launcher of another node. Owner: the process that the job belongs to has agents
/// started, which say themselves where they are and how many ranks they take.
enum class StartMethod { Ssh, Slurm, Mpi, Hand, Launcher, Owner };

/// An agent says where it is and how many ranks it takes.
constexpr bool says_itself(StartMethod method) {
  return method == StartMethod::Launcher || method == StartMethod::Owner;
}

/// Agents on other hosts come by themselves, at no command of ours.
constexpr bool comes_by_itself(StartMethod method) { return method == StartMethod::Hand || says_itself(method); }

/// A host of a job: what it may take, and, once `make_plan` has placed them, what it runs.
struct PlannedHost {
  std::string name;   ///< for messages
  int slots = 1;      ///< how many ranks it takes
  bool local = true;  ///< it is the one that this process is on
  /// Several with the same one are parts of one host, each with an agent of its own, and stand beside each other;
  /// empty: it is a host by itself.
  std::string part_of = {};
  /// GPUs that it brings along, as CUDA_VISIBLE_DEVICES names them; in a plan those of all its parts. Empty: nobody
  /// said.
  std::vector<std::string> devices = {};
  int component = -1;  ///< of a heterogeneous Slurm job, which srun has to be told; -1: of none
  // Processes that it runs.
  int index = 0;       ///< of its agent
  int first_rank = 0;  ///< its ranks are consecutive
  int ranks = 0;
  // The host that it is, or is a part of.
  int machine = 0;      ///< GROUP_RANK
  int first_local = 0;  ///< LOCAL_RANK of its first rank
  int local_ranks = 0;  ///< LOCAL_WORLD_SIZE
  // Beside its ranks.
  int first_server = 0;  ///< its servers are consecutive
  int servers = 0;
  bool evaluator = false;

  /// Number of processes of all roles.
  int processes() const noexcept { return ranks + servers + (evaluator ? 1 : 0); }
};

/// Which hosts there are, how others are reached, and what runs where. Before `make_plan` the hosts are those that may
/// run something; empty: this one, and as many ranks as are wanted.
struct Plan {
  std::vector<PlannedHost> hosts = {};  ///< in a plan those that run something; those without ranks come last
  /// Hosts for servers, each up to its slots. They may have ranks, too. Empty: the hosts that have ranks.
  std::vector<PlannedHost> server_hosts = {};
  StartMethod method = StartMethod::Ssh;
  std::optional<NodeRole> node = {};  ///< this command is the launcher of one of several nodes
  std::string note = {};              ///< for the user: which names are one host, which nodes are idle
  int world_size = 0;
  int servers = 0;
  bool evaluator = false;
  int machines = 0;       ///< that have ranks
  int least = 0;          ///< ranks with which an elastic job goes on; 0: it is not elastic
  int spares = 0;         ///< of its ranks, the last so many begin as no members
  bool may_grow = false;  ///< hosts may come while it runs, also other ones than this

  Roles roles() const noexcept { return {world_size, servers, evaluator}; }
};

/// More than anyone has meant so far; catches a mistyped number.
inline constexpr int kMostProcesses = 65536;

/// Returns COHORT_SHARES for `--shares` of this plan's ranks: numbers per host are spread evenly over its ranks.
Result<std::string> shares_by_rank(const Plan& plan, const std::string& shares);

/// How many ranks all of them take.
int sum_of_slots(const std::vector<PlannedHost>& hosts);

/// Fills the hosts in order, each up to its slots. Errors (InvalidArgument): no process asked for, too many for the
/// slots (the message says how many there are), a host named twice. Of `spec` only which servers there are, and whether
/// an evaluator: they take no slots. Servers fill `server_hosts` likewise (`spec.servers` 0: as many as there are
/// slots), and are spread evenly over the hosts that have ranks where none are named; the evaluator is on rank 0's.
Result<Plan> make_plan(Plan plan, int processes, const JobSpec& spec = {});

/// The processes of a host, in the order in which its agent starts them: by their numbers in `Plan::roles`.
std::vector<int> processes_of(const Plan& plan, const PlannedHost& host);

/// The processes of an agent, by its host's index: those of all its orders, including ended ones.
std::vector<int> processes_on(const Plan& plan, int index);

/// There are hosts other than this one.
bool goes_elsewhere(const Plan& plan);

/// For agents to report and workers to run.
std::chrono::milliseconds start_timeout_of(const JobSpec& spec, const Plan& plan);

/// The host of each process.
std::vector<std::string> hosts_of_processes(const Plan& plan);

/// "4 processes on 1 host (vm: ranks 0-3)", "4 processes and 2 servers on 1 host (vm: ranks 0-3, servers 0-1)".
std::string to_string(const Plan& plan);

/// Nullopt: this launcher is the only one. A count of 1: it is to be so, on this host. InvalidArgument: options that
/// have no meaning, or several launchers that cannot be one job; the message has the command to use instead.
Result<std::optional<NodeRole>> choose_node(const JobSpec& spec, const rendezvous::Environment& environment);

/// torchrun's, where only a host is given: of --master, and of --rdzv-endpoint.
inline constexpr std::uint16_t kDefaultMasterPort = 29500;
inline constexpr std::uint16_t kDefaultEndpointPort = 29400;

}  // namespace cohort::launch
