#include "torch/gpu.h"

#include "base/result.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include <dlfcn.h>

namespace cohort {

namespace {

// Where libtorch has a way to ask (2.9).
template <class Guard>
void* handle_of(const Guard& guard, const c10::Stream& stream, at::Device gpu) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  }
  // c10::cuda::CUDAStream::stream() const: of libc10_cuda, which a program without CUDA has not. A CUDAStream is a
  // c10::Stream, and nothing else.
  using Function = void* (*)(const void*);
  static const auto function = reinterpret_cast<Function>(::dlsym(RTLD_DEFAULT, "_ZNK3c104cuda10CUDAStream6streamEv"));
  if (function == nullptr) {
    raise(ErrorCode::Internal,
          "cannot tell the stream of {} -- libc10_cuda.so of this libtorch ({}) has no CUDAStream::stream() -- use the "
          "default stream around Cohort's calls",
          gpu.str(), TORCH_VERSION);
  }
  return function(&stream);
}

}  // namespace

void* current_stream(at::Device gpu) {
  const c10::impl::VirtualGuardImpl guard(gpu.type());
  const c10::Stream stream = guard.getStream(gpu);
  return stream.id() == 0 ? nullptr : handle_of(guard, stream, gpu);  // 0: the default stream
}

Device buffer_device(const at::Tensor& tensor) {
  const at::Device device = tensor.device();
  if (device.is_cpu()) return {};
  if (device.is_cuda()) return {DeviceType::CUDA, device.index(), current_stream(device)};
  raise(ErrorCode::InvalidArgument,
        "the tensor lies on {}, and Cohort moves the host's memory and CUDA's -- pass tensor.cpu()", device.str());
}

const char* device_text(const at::Tensor& tensor) { return tensor.is_cuda() ? " on cuda" : ""; }

}  // namespace cohort
