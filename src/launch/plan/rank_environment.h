// The variables that tell a worker who it is. Pure.
#pragma once

#include "launch/processes.h"
#include "launch/plan/plan.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::launch {

struct JobFacts {
  std::string job_id;
  std::string run_folder;
  std::string store;  ///< host:port
  std::string master_address;
  std::uint16_t master_port = 0;
  /// HOST:PORT of each rank and server, for TF_CONFIG; empty: none is set.
  std::vector<std::string> tf_addresses = {};
  std::string log_folder;  ///< empty: no logs
  int restart = 0;         ///< how often the job has been started again
  int max_restarts = 0;
  bool servers_may_die = false;                                 ///< the job goes on then
  std::chrono::seconds host_timeout = std::chrono::seconds(0);  ///< 0: what the ranks' environment says
};

/// "NAME=value": what torchrun sets (RANK, WORLD_SIZE, MASTER_ADDR, GROUP_RANK, TORCHELASTIC_RUN_ID, ...; names and
/// meanings are torch.distributed.elastic's, local_elastic_agent.py) and what cohort::join reads. `rank` is of the
/// plan.
std::vector<std::string> rank_environment(const Plan& plan, const PlannedHost& host, int rank, const JobFacts& facts);

/// Of a process of another role, by its number in `Plan::roles`: what cohort::role() reads, and where the job is.
/// Nothing of a rank.
std::vector<std::string> other_environment(const Plan& plan, const PlannedHost& host, int process,
                                           const JobFacts& facts);
/// What such a process must not inherit from whoever started the job: it would take itself for a rank.
void remove_rank_variables(Environment& environment);

/// The value of TensorFlow's TF_CONFIG for one process, by its number in `roles`: ranks are workers; where there are
/// servers, rank 0 is the chief, as ParameterServerStrategy has it, and servers are ps.
std::string tf_config(const Roles& roles, const std::vector<std::string>& addresses, int process);

/// What horovodrun sets for programs that read it: HOROVOD_RANK, HOROVOD_LOCAL_RANK, HOROVOD_CROSS_RANK, ... (names
/// and meanings are Horovod's, runner/gloo_run.py; not its rendezvous, which is not there).
std::vector<std::string> horovod_environment(const Plan& plan, const PlannedHost& host, int rank);

}  // namespace cohort::launch
