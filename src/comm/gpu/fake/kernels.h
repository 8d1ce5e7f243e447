// For tests: our kernels, compiled for the host, which the fake driver runs by their names. Any thread.
#pragma once

#include "comm/gpu/fold_kernels.h"

#include <cstddef>

namespace cohort::comm::cuda {

struct PretendedKernel {
  const char* name;
  void (*run)(const FoldArguments& job, unsigned long long own, unsigned long long threads);
  std::size_t part;  ///< bytes of one of the units that it counts
  bool folds;        ///< it writes as many bytes as it reads from each input; else 4 bytes
};
/// Returns null if no kernel has that name.
const PretendedKernel* fake_kernel(const char* name);

}  // namespace cohort::comm::cuda
