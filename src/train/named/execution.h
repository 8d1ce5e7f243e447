// Helpers for carrying out an operation: factors and averages of integers, which the communicator leaves to its callers
// (integer types only); the contribution of a rank that has joined to reductions, elements that change no result (both
// pure, any thread); and GPUs' streams.
#pragma once

#include "comm/gpu/driver.h"
#include "train/named/request.h"

#include <cohort/buffer.h>

#include <cstdint>
#include <map>
#include <vector>

namespace cohort::named {

/// Integers that are to be scaled, or averaged over some of the ranks: they are added up, and finished here.
bool by_hand(const Signature& common, bool skips_ranks) noexcept;

/// Divides by `divisor` (at least 1), rounding toward zero as the core's average does.
void divide(Buffer data, std::int64_t divisor);

/// Multiplies by `factor`, which is finite, and divides by `divisor`, in double precision; rounds toward zero, and to
/// the nearest value that the type holds. Does nothing if both are 1.
void scale(Buffer data, double factor, std::int64_t divisor = 1);

/// Fills `to` with the neutral element of `op`: negative zero for sums of floating types (x + -0 is x to the bit, also
/// where x is -0), infinities for minima and maxima, one, all bits. Average: as Sum. The type has the reduction. It is
/// neutral once it has been multiplied by `prescale`, which is 1 for products and not 0 for minima and maxima.
void fill_neutral(Buffer to, ReduceOp op, double prescale = 1);

// A communicator takes a stream as it is when it is called, on the engine's thread, and by then the program has given
// it more. So marks are taken when an operation is asked for, and the communicator is given a stream of the engine's
// own, which waits for them. Marks: any thread; streams: the engine's.

/// Marks of the work queued so far on the streams of a request's GPU memory; none for host memory. `rank`: the calling
/// rank, for messages. Throws Unavailable, InvalidArgument.
using Marks = std::vector<comm::cuda::MarkPtr>;
Marks marks_of(const Request& request, int rank);

/// One for each GPU that is used.
class GpuStreams {
 public:
  GpuStreams() = default;
  ~GpuStreams();
  GpuStreams(const GpuStreams&) = delete;
  GpuStreams& operator=(const GpuStreams&) = delete;
  /// The GPU's, after the marks.
  comm::cuda::Stream after(int gpu, const Marks& marks);

 private:
  std::map<int, comm::cuda::Stream> streams_;
};

/// Number of GPUs that this process sees; 0 without a driver.
int gpu_count() noexcept;
/// NCCL's version number, 23007 for 2.30.7; 0 if none can be loaded.
int nccl_version();

}  // namespace cohort::named
