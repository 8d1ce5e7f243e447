// Folds on a GPU with the same bits as `fold` on the host (comm/kernels/fold.h), by kernels that the driver compiles at
// first use. One object for each GPU; it lives until the process ends. Any thread.
#pragma once

#include "comm/gpu/driver.h"
#include "comm/kernels/fold.h"

#include <cohort/buffer.h>

#include <array>
#include <cstdint>

namespace cohort::comm::cuda {

/// The kernels' PTX (fold_kernels.ptx).
extern const char* const kFoldKernels;

class FoldLauncher {
 public:
  /// Returns the GPU's launcher. The first call compiles the kernels, which takes a second or two, and runs each kernel
  /// once, so that no later launch has to wait for other work. Throws Unavailable, Internal.
  static FoldLauncher& on(Gpu& gpu);

  static constexpr std::size_t kMostInputs = 192;
  /// Folds GPU memory in the stream: one output, up to kMostInputs inputs. Ignores `stores` and `non_finite`. Throws
  /// Internal.
  void fold(const FoldJob& job, Stream stream) const;
  /// Sets the 4 bytes at `flag` to 1 if a value is NaN or infinite; else leaves them unchanged. Throws Internal.
  void look(const ConstBuffer& values, std::uint32_t* flag, Stream stream) const;

 private:
  explicit FoldLauncher(Gpu& gpu);
  void launch(void* kernel, const void* arguments, std::size_t bytes, Stream stream) const;

  Gpu& gpu_;
  std::array<std::array<void*, kReduceOpCount>, kDTypeCount> folds_{};
  std::array<void*, kDTypeCount> looks_{};
};

}  // namespace cohort::comm::cuda
