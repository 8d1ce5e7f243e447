// The role of this process in its job, as its launcher says: a worker, which is a rank of the world, or one of the
// processes beside the world: a parameter server, or the evaluator. Set by `cohort run --servers` and `--evaluator`,
// TF_CONFIG and DMLC_ROLE (docs/roles.md); anything else starts workers. Read from the environment, once per call; any
// thread.
#pragma once

#include <cstdint>

namespace cohort {

enum class Role : std::uint8_t {
  Worker = 0,     ///< a rank of the world, which may call `init`
  Server = 1,     ///< answers requests of workers, and is no rank
  Evaluator = 2,  ///< follows the training by its checkpoints, and is no rank
};

/// "worker", "server", "evaluator".
const char* to_string(Role role) noexcept;

/// Throws InvalidArgument if environment variables contradict each other, and names these; so do the functions below.
Role role();
/// Rank of a worker in the world, number of a server among the servers (from 0), or 0 for the evaluator.
int role_number();
/// Number of the world's ranks, for a process of any role; 1 without a launcher. 0 for an evaluator whose TF_CONFIG
/// does not describe the training.
int num_workers();
/// Number of servers, 0 if there are none.
int num_servers();

}  // namespace cohort
