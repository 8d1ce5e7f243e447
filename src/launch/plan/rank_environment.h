// The environment of a rank: the variables that identify the rank, those that are sent to another host, and its
// processors and port. Pure but for PortLease; any thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::launch {

/// Returns true for variables of one host or one login (HOME, TMPDIR, DISPLAY, SSH_..., GPUs given by a scheduler).
bool belongs_to_host(std::string_view name);

/// `own` is the agent's environment. Variables that belong to a host come from there, unless `travelled` sets them.
Environment environment_there(const Environment& travelled, const Environment& own);

/// Returns the processors of each of `ranks` ranks: whole cores if there are enough, else processors. Fails with
/// InvalidArgument if some rank would have none.
Result<std::vector<std::vector<int>>> share_cores(const std::vector<std::vector<int>>& cores, int ranks);

/// Returns the number of compute threads for each of `ranks` ranks that share these cores; at least 1.
int threads_of(int cores, int ranks);

using PortRange = std::pair<std::uint16_t, std::uint16_t>;  ///< first and last

/// Returns the ports above 10000 that are neither ephemeral nor reserved, as ranges. `ephemeral` and `reserved` are the
/// texts of net.ipv4.ip_local_port_range ("32768\t60999") and ip_local_reserved_ports ("8080,9000-9010").
std::vector<PortRange> usable_ports(std::string_view ephemeral, std::string_view reserved);

/// A TCP port for a job's own use, such as MASTER_PORT or a port in TF_CONFIG. It is outside the range from which the
/// system gives ports to anyone, and it is locked against other jobs on this host for as long as the lease lives. The
/// lock is a name in the kernel's abstract socket namespace, so it leaves no file and ends with its holder. All users
/// of the host share these names as they share the ports: a user who blocks others by taking names could as well take
/// the ports. Not thread-safe.
class PortLease {
 public:
  /// Takes a free port, searching from a position that `seed` decides. Fails with Unavailable if no port is free.
  static Result<PortLease> take(std::uint64_t seed);
  /// Leases this port, in any range. Fails with Unavailable if it is taken.
  static Result<PortLease> of(std::uint16_t port);
  std::uint16_t port() const noexcept { return port_; }

 private:
  PortLease(std::uint16_t port, sys::UniqueFd lock) : port_(port), lock_(std::move(lock)) {}
  std::uint16_t port_;
  sys::UniqueFd lock_;
};

struct JobFacts {
  std::string job_id;
  std::string run_folder;
  std::string store;  ///< host:port
  std::string master_address;
  std::uint16_t master_port = 0;
  /// HOST:PORT of each rank and server, for TF_CONFIG; empty: TF_CONFIG is not set.
  std::vector<std::string> tf_addresses = {};
  std::string log_folder;  ///< empty: no logs
  int restart = 0;         ///< how often the job has been started again
  int max_restarts = 0;
  int first_worker = 0;                                         ///< elastic job: the COHORT_WORKER of its rank 0
  std::optional<std::chrono::seconds> elastic = {};             ///< elastic job: how long the job waits for hosts
  bool servers_may_die = false;                                 ///< the job goes on after a server's death
  std::chrono::seconds host_timeout = std::chrono::seconds(0);  ///< 0: as in the ranks' environment
};

/// Returns "NAME=value" for the variables that torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, GROUP_RANK,
/// TORCHELASTIC_RUN_ID, ...; names and meanings are torch.distributed.elastic's, local_elastic_agent.py) and for those
/// that cohort::init reads. `rank` is a rank of the plan.
std::vector<std::string> rank_environment(const Plan& plan, const PlannedHost& host, int rank, const JobFacts& facts);

/// Returns the variables of a process of another role, by its number in `Plan::roles`: those that cohort::role() reads,
/// and the address of the job. No variable of a rank is among them.
std::vector<std::string> other_environment(const Plan& plan, const PlannedHost& host, int process,
                                           const JobFacts& facts);
/// Removes variables that such a process must not inherit from the job's caller: it would take itself for a rank.
void remove_rank_variables(Environment& environment);

/// Returns TensorFlow's TF_CONFIG for one process, by its number in `roles`: ranks are workers; if there are servers,
/// rank 0 is the chief, as ParameterServerStrategy needs it, and servers are ps.
std::string tf_config(const Roles& roles, const std::vector<std::string>& addresses, int process);

/// Returns the variables that horovodrun sets for programs: HOROVOD_RANK, HOROVOD_LOCAL_RANK, HOROVOD_CROSS_RANK, ...
/// (names and meanings are Horovod's, runner/gloo_run.py, except its rendezvous, which does not exist here).
std::vector<std::string> horovod_environment(const Plan& plan, const PlannedHost& host, int rank);

}  // namespace cohort::launch
