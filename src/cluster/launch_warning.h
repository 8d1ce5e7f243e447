// Launch warnings: what may be a mistake in how a process was started. It is told, not refused. Pure; any thread.
#pragma once

#include "cluster/detect.h"

namespace cohort::cluster {

/// Sets `warning` and `note` of what `detect` has found: at most one, and of a host's ranks only for the first.
void note_warning(const Environment& environment, Detected& detected);

/// How many GPUs this process is meant to use, as far as its environment says so, with the variable that does:
/// CUDA_VISIBLE_DEVICES counts before SM_NUM_GPUS and SLURM_GPUS_ON_NODE, which are about the host. 0: nothing says it.
struct GpuClaim {
  int gpus = 0;
  std::string claim;  ///< "SM_NUM_GPUS=4"
};
GpuClaim gpus_claimed(const Environment& environment);

/// As CUDA reads CUDA_VISIBLE_DEVICES: numbers and names (GPU-..., MIG-...), up to the first entry that is neither:
/// "-1", "NoDevFiles", "none", nothing.
int devices_named(std::string_view list);

}  // namespace cohort::cluster
