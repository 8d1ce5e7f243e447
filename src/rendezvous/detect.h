// detect: determines the identity of a process from its launcher's variables in the environment. Pure functions over a
// map of variables; each launcher has a row in one table (launchers.cpp). Any thread.
// Launch warnings: possible mistakes in how a process was started, which are reported, but not refused. Pure; any
// thread.
#pragma once

#include "base/env.h"
#include "base/result.h"
#include "net/address.h"

#include <cohort/role.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

using Environment = env::Map;

/// Returns this process's variables, but no empty ones, except CUDA_VISIBLE_DEVICES, which hides all GPUs if empty. In
/// SageMaker's containers without its toolkit, adds the variables that it would have set (`add_resource_config`).
Environment current_environment();

/// Places at which the ranks of a detected world can meet.
enum class Meeting {
  None,      ///< a world of one
  JobStore,  ///< at COHORT_STORE, with the secret at COHORT_SECRET_FD
  Master,    ///< at MASTER_ADDR, MASTER_PORT (env://)
  Address,   ///< at `Detected::address`, where rank 0 may listen
  Launcher,  ///< on one host by a name from `Detected::job`; on several by the launcher's key-value space
};

/// Possible mistakes in how the process was started.
enum class LaunchWarning {
  None,
  Script,  ///< a batch script or its shell, not one of the job's tasks
  Hosts,   ///< a world only on this host, within a job of several hosts
  Gpus,    ///< one process, although the environment names several GPUs
};

struct Detected {
  std::string launcher;  ///< a name in the table, e.g. "torchrun"; empty if there is none
  int rank = 0;
  int size = 1;
  /// Only workers are ranks of the launcher's world; others have rank 0 of 1.
  Role role = Role::Worker;
  std::optional<int> number;  ///< number within its role, for a worker its rank; unset if not given
  int workers = 1;            ///< number of workers; 0 for an evaluator, if it is not known
  int servers = 0;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::optional<int> node_rank;
  std::optional<int> nodes;
  Meeting meeting = Meeting::None;
  net::Address address;            ///< Meeting::Address
  std::string job;                 ///< identifies this job (step); empty if no variable does
  std::vector<std::string> hosts;  ///< hosts in the launcher's order, if it names them
  bool alone = false;              ///< COHORT_ALONE=1
  bool elastic = false;  ///< the job's membership decides the rank; the numbers here may be from an earlier epoch
  std::string source;    ///< for messages: "RANK=1, WORLD_SIZE=4 (torchrun)"
  LaunchWarning warning = LaunchWarning::None;
  std::string note;  ///< a possible mistake, for a warning
};

/// Returns the identity that the innermost launcher gives. Fails with InvalidArgument, naming the variables and values,
/// if they are invalid or disagree, or if a world of one would be formed although a launcher meant several processes.
Result<Detected> detect(const Environment& environment);
/// Like `detect`, for a process that wants to be a rank: fails for a parameter server.
Result<Detected> detect_rank(const Environment& environment);

/// Names of sizes that only PMIx's library knows: code that asks the library adds them to the environment.
inline constexpr std::string_view kPmixJobSize = "pmix.job.size";
inline constexpr std::string_view kPmixLocalSize = "pmix.local.size";
/// True if only PMIx's library knows the sizes of the innermost launcher (prterun).
bool needs_pmix_keys(const Environment& environment);

/// A launcher's statement about the number of processes.
struct SizeClaim {
  std::string launcher;
  std::string claim;  ///< "WORLD_SIZE=4"
  int size = 1;
};
/// Returns the statements of all recognised launchers, that of the innermost first.
std::vector<SizeClaim> size_claims(const Environment& environment);

/// Fails with InvalidArgument if `size` is 1 although a launcher meant several processes. `source`: origin of `size`.
Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source);

/// Sets `warning` and `note` of a result of `detect`: at most one warning, and only for the first rank of a host.
void note_warning(const Environment& environment, Detected& detected);

/// The number of GPUs that the environment gives this process, and the variable that says so. CUDA_VISIBLE_DEVICES
/// takes precedence over SM_NUM_GPUS and SLURM_GPUS_ON_NODE, which describe the host. 0: no variable says so.
struct GpuClaim {
  int gpus = 0;
  std::string claim;  ///< "SM_NUM_GPUS=4"
};
GpuClaim gpus_claimed(const Environment& environment);

/// Counts devices as CUDA reads CUDA_VISIBLE_DEVICES: numbers and names (GPU-..., MIG-...), up to the first entry that
/// is neither (e.g. "-1", "NoDevFiles", "none", or empty).
int devices_named(std::string_view list);

}  // namespace cohort::rendezvous
