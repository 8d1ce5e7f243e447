// Folds on a GPU: what `fold` does on the host (comm/kernels/fold.h), to the bit, by kernels of ours that the driver
// compiles at their first use. One for each GPU, until the process ends. Any thread.
#pragma once

#include "comm/gpu/driver.h"
#include "comm/kernels/fold.h"

#include <cohort/buffer.h>

#include <array>
#include <cstdint>

namespace cohort::comm::cuda {

/// The kernels' text (fold_kernels.ptx).
extern const char* const kFoldKernels;

class FoldLauncher {
 public:
  /// Compiles them at first, for a second or two, and then has run each of them: so none waits for work of others
  /// later on. Throws Unavailable, Internal.
  static FoldLauncher& on(Gpu& gpu);

  static constexpr std::size_t kMostInputs = 192;
  /// Folds the GPU's memory, in the stream: one output, up to kMostInputs inputs; `stores` and `non_finite` are not
  /// looked at. Throws Internal.
  void fold(const FoldJob& job, Stream stream) const;
  /// Makes the 4 bytes at `flag` 1 where a value is NaN or infinite; else they stay as they are. Throws Internal.
  void look(const ConstBuffer& values, std::uint32_t* flag, Stream stream) const;

 private:
  explicit FoldLauncher(Gpu& gpu);
  void launch(void* kernel, const void* arguments, std::size_t bytes, Stream stream) const;

  Gpu& gpu_;
  std::array<std::array<void*, kReduceOpCount>, kDTypeCount> folds_{};
  std::array<void*, kDTypeCount> looks_{};
};

}  // namespace cohort::comm::cuda
