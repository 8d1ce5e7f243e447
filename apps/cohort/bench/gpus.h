// Which GPU a rank measures. Belongs to the rank's thread.
#pragma once

#include <cohort/communicator.h>

#include <array>
#include <string>

namespace cohort::app::bench {

struct RankGpu {
  int index = 0;                         ///< cuda:LOCAL_RANK; cuda:0 where the host's ranks are more than its GPUs
  std::array<unsigned char, 16> uuid{};  ///< tells it from all others
  std::string software;                  ///< "CUDA 12.4, 4 GPUs; NCCL 2.30.7 (PATH)", or why there is no NCCL
};

/// Throws Unavailable where this process has no driver or no GPU: what is missing.
void check_gpus();
/// Throws what `check_gpus` does.
RankGpu gpu_of(const Communicator& comm);
/// How many there are of all ranks'. All call it.
int different_gpus(Communicator& comm, const RankGpu& own);

}  // namespace cohort::app::bench
