// What the engine needs of GPUs. A communicator takes a stream as it is when it is called, on the engine's thread, and
// by then the program has given it more. So marks are taken when an operation is asked for, and the communicator is
// given a stream of the engine's own, which waits for them. Marks: any thread; streams: the engine's.
#pragma once

#include "comm/gpu/driver.h"
#include "train/named/request.h"

#include <map>
#include <vector>

namespace cohort::named {

/// What the streams of a request's memory have so far; none of the host's. Throws Unavailable, InvalidArgument.
using Marks = std::vector<comm::cuda::MarkPtr>;
Marks marks_of(const Request& request);

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

/// How many GPUs this process sees; 0 where there is no driver.
int gpu_count() noexcept;
/// As NCCL numbers its versions, 2.30.7 is 23007; 0 where there is none that can be loaded.
int nccl_version();

}  // namespace cohort::named
