// Identity of a process, as its launcher gives it in the environment. Pure functions over a map of variables; what
// launchers set is one table (launchers.cpp), a row for each. Any thread.
// Launch warnings: possible mistakes in how a process was started. They are reported, not refused. Pure; any thread.
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

/// The variables of this process; empty ones are left out, but for CUDA_VISIBLE_DEVICES, where that hides all GPUs. In
/// SageMaker's containers without its toolkit also what that would have set (`add_resource_config`).
Environment current_environment();

/// How the ranks of a detected world meet.
enum class Meeting {
  None,      ///< a world of one
  JobStore,  ///< at COHORT_STORE, with the secret at COHORT_SECRET_FD
  Master,    ///< at MASTER_ADDR, MASTER_PORT (env://)
  Address,   ///< at `Detected::address`, where rank 0 may listen
  Launcher,  ///< by a name of `Detected::job` on one host; through the launcher's own meeting place on several
};

/// Possible mistakes in how the process was started.
enum class LaunchWarning {
  None,
  Script,  ///< a batch script or its shell, and none of the job's tasks
  Hosts,   ///< a world on this host alone, within a job of several
  Gpus,    ///< one process, where the environment says several GPUs
};

struct Detected {
  std::string launcher;  ///< a name of the table, e.g. "torchrun"; empty if there is none
  int rank = 0;
  int size = 1;
  /// Only a worker is a rank of a world that the launcher means; others have rank 0 of 1.
  Role role = Role::Worker;
  std::optional<int> number;  ///< among those of its role; of a worker its rank. Not there where nobody says it
  int workers = 1;            ///< 0: an evaluator without that information
  int servers = 0;
  std::optional<int> local_rank;
  std::optional<int> local_size;
  std::optional<int> node_rank;
  std::optional<int> nodes;
  Meeting meeting = Meeting::None;
  net::Address address;            ///< Meeting::Address
  std::string job;                 ///< equal for this job's (step's) processes and no others; empty if nothing says it
  std::vector<std::string> hosts;  ///< where the launcher names them, in its order
  bool alone = false;              ///< COHORT_ALONE=1
  bool elastic = false;  ///< of a job whose membership says who it is; the numbers here may be an earlier epoch's
  std::string source;    ///< for messages: "RANK=1, WORLD_SIZE=4 (torchrun)"
  LaunchWarning warning = LaunchWarning::None;
  std::string note;  ///< a possible mistake; worth a warning
};

/// The innermost launcher's word. Fails with InvalidArgument, naming the variables and both values, when they have no
/// meaning or disagree, and when a world of one would be formed although a launcher meant several.
Result<Detected> detect(const Environment& environment);
/// The same for a process that wants to be a rank: a parameter server is refused.
Result<Detected> detect_rank(const Environment& environment);

/// Names of the sizes that only PMIx's library gives, not the environment; code that asks the library adds them.
inline constexpr std::string_view kPmixJobSize = "pmix.job.size";
inline constexpr std::string_view kPmixLocalSize = "pmix.local.size";
/// True if the innermost launcher is one of which only PMIx's library knows the sizes (prterun).
bool needs_pmix_keys(const Environment& environment);

/// A launcher's statement about the number of processes.
struct SizeClaim {
  std::string launcher;
  std::string claim;  ///< "WORLD_SIZE=4"
  int size = 1;
};
/// Statements of all launchers that are recognised, the innermost first.
std::vector<SizeClaim> size_claims(const Environment& environment);

/// InvalidArgument if `size` is 1 although a launcher meant several. `source` says where the 1 comes from.
Result<void> refuse_unmeant_world_of_one(const Environment& environment, int size, const std::string& source);

/// Sets `warning` and `note` of what `detect` has found: at most one, and of a host's ranks only for the first.
void note_warning(const Environment& environment, Detected& detected);

/// How many GPUs this process is meant to use, as far as its environment says so, with the variable that does:
/// CUDA_VISIBLE_DEVICES counts before SM_NUM_GPUS and SLURM_GPUS_ON_NODE, which are about the host. 0: nothing says it.
struct GpuClaim {
  int gpus = 0;
  std::string claim;  ///< "SM_NUM_GPUS=4"
};
GpuClaim gpus_claimed(const Environment& environment);

/// Counts devices as CUDA reads CUDA_VISIBLE_DEVICES: numbers and names (GPU-..., MIG-...), up to the first entry that
/// is neither: "-1", "NoDevFiles", "none", nothing.
int devices_named(std::string_view list);

}  // namespace cohort::rendezvous
