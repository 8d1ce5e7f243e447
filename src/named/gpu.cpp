#include "named/gpu.h"

#include "comm/cuda/nccl.h"

namespace cohort::named {

using comm::cuda::Gpu;
using comm::cuda::Nccl;
using comm::cuda::Stream;

Marks marks_of(const Request& request) {
  Marks marks;
  const Device device = device_of(request);
  if (device.type == DeviceType::CPU) return marks;
  Gpu& gpu = Gpu::at(device.index);
  marks.push_back(gpu.mark(device.stream));
  for (const Device& other : {request.input.device, request.output.device}) {
    if (other.type != DeviceType::CPU && other.stream != device.stream) marks.push_back(gpu.mark(other.stream));
  }
  return marks;
}

GpuStreams::~GpuStreams() {
  for (const auto& [gpu, stream] : streams_) Gpu::at(gpu).end_stream(stream);
}

Stream GpuStreams::after(int gpu, const Marks& marks) {
  Gpu& on = Gpu::at(gpu);
  auto found = streams_.find(gpu);
  if (found == streams_.end()) found = streams_.emplace(gpu, on.make_stream()).first;
  for (const auto& mark : marks) on.put_after(found->second, *mark);
  return found->second;
}

int gpu_count() noexcept { return Gpu::count().value_or(0); }

int nccl_version() {
  const Result<Nccl>& found = Nccl::find();
  return found ? found->version : 0;
}

}  // namespace cohort::named
