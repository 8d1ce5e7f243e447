// Helpers for carrying out an operation: factors and averages of integers, which the communicator leaves to its
// callers; neutral elements, which a rank that has joined contributes to reductions (both pure, any thread); and GPU
// streams.
#pragma once

#include "comm/gpu/driver.h"
#include "horovod/named/request.h"

#include <cohort/buffer.h>

#include <cstdint>
#include <map>
#include <vector>

namespace cohort::named {

/// Returns whether integers are scaled, or averaged over only some ranks. Then the communicator only adds them up.
bool by_hand(const Signature& common, bool skips_ranks) noexcept;

/// Divides by `divisor` (at least 1), rounding toward zero as the core's average does.
void divide(Buffer data, std::int64_t divisor);

/// Multiplies by `factor`, which is finite, and divides by `divisor`, in double precision; rounds toward zero, and to
/// the nearest value that the type holds. Does nothing if both are 1.
void scale(Buffer data, double factor, std::int64_t divisor = 1);

/// Fills `to` with the neutral element of `op`: negative zero for sums of floating types (x + -0 is x to the bit, even
/// if x is -0), infinities for minima and maxima, one, all bits. An Average counts as a Sum. The type has to support
/// `op`. The element is neutral after multiplication by `prescale`: 1 for products, not 0 for Min, Max.
void fill_neutral(Buffer to, ReduceOp op, double prescale = 1);

// The engine's thread calls the communicator later than the program requests an operation, when the program's stream
// may have more work. So the position in the stream is marked at the request, and the communicator gets a stream of the
// engine, which waits for the marks. Marks are made on any thread, streams used on the engine's.

/// Marks of the work queued so far on the streams of a request's GPU memory; none for host memory. `rank`: the calling
/// rank, for messages. Throws Unavailable, InvalidArgument.
using Marks = std::vector<comm::cuda::MarkPtr>;
Marks marks_of(const Request& request, int rank);
/// Throws InvalidArgument while the stream is captured into a graph.
void refuse_capture(const comm::cuda::Gpu& gpu, comm::cuda::Stream stream, const Request& request, int rank);

/// The engine's streams, one for each GPU that is used.
class GpuStreams {
 public:
  GpuStreams() = default;
  ~GpuStreams();
  GpuStreams(const GpuStreams&) = delete;
  GpuStreams& operator=(const GpuStreams&) = delete;
  /// Returns the GPU's stream, which waits for the marks.
  comm::cuda::Stream after(int gpu, const Marks& marks);

 private:
  std::map<int, comm::cuda::Stream> streams_;
};

/// Returns the number of GPUs that this process sees; 0 without a driver.
int gpu_count() noexcept;
/// Returns NCCL's version number, 23007 for 2.30.7; 0 if NCCL cannot be loaded.
int nccl_version();

}  // namespace cohort::named
