#include <cohort/torch/tensor.h>

#include "base/result.h"
#include "torch/reducer.h"
#include "train/gradients/non_finite.h"

#include <cohort/torch/finite.h>

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

namespace cohort {
namespace {

// Keeps tensors alive until the operation over their memory has finished.
Work keep_until_done(Work work, std::vector<at::Tensor> tensors) {
  work.on_done([kept = std::move(tensors)] {});
  return work;
}

std::string shape_text(const at::Tensor& tensor) {
  std::string text = "[";
  for (std::int64_t d = 0; d < tensor.dim(); ++d) text += fmt::format("{}{}", d > 0 ? ", " : "", tensor.size(d));
  return text + "]";
}

void require_plain(const at::Tensor& tensor) {
  if (!tensor.defined()) raise(ErrorCode::InvalidArgument, "collective on an undefined tensor");
  if (tensor.layout() != at::kStrided || !tensor.is_contiguous()) {
    raise(ErrorCode::InvalidArgument,
          "collective on a tensor of shape {} that is not dense and contiguous -- use .contiguous() (and copy the "
          "result back)",
          shape_text(tensor));
  }
}

// Uses Int8 for GPU memory: NCCL gets no uint8 between hosts, since a program may load uint8 as code.
Buffer as_bytes(const at::Tensor& tensor) {
  const Device device = buffer_device(tensor);
  return {tensor.data_ptr(), static_cast<std::int64_t>(tensor.nbytes()),
          device.type == DeviceType::CPU ? DType::UInt8 : DType::Int8, device};
}

// Broadcasts tensors of one GPU in place, all in one operation, for which the current stream waits.
void broadcast_on_gpu(Communicator& comm, const std::vector<at::Tensor>& tensors, int root) {
  std::vector<at::Tensor> flat;
  std::vector<Buffer> buffers;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() == 0) continue;
    flat.push_back(tensor.detach().contiguous());
    buffers.push_back(as_bytes(flat.back()));
  }
  if (buffers.empty()) return;
  keep_until_done(comm.broadcast(buffers, {.root = root}), flat).synchronize(buffers.front().device);
  std::size_t at = 0;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.nbytes() == 0) continue;
    const at::Tensor& sent = flat[at++];
    if (sent.data_ptr() != tensor.data_ptr()) tensor.variable_data().copy_(sent);
  }
}

// Sends the bytes of all tensors as one stream, through one staging buffer, so that neither their number nor their
// types matter.
void broadcast_on_host(Communicator& comm, const std::vector<at::Tensor>& tensors, std::size_t total,
                       const BroadcastParametersOptions& options) {
  const std::size_t chunk = std::min(options.chunk_bytes, total);
  const Memory staging = comm.allocate(chunk);
  auto* const stage = static_cast<char*>(staging.data());
  const bool is_root = comm.rank() == options.root;

  struct Piece {
    char* data;
    std::size_t bytes;
  };
  std::vector<Piece> pieces;
  std::size_t filled = 0;
  const auto send = [&] {
    if (filled == 0) return;
    if (is_root) {
      std::size_t at = 0;
      for (const Piece& piece : pieces)
        std::memcpy(stage + std::exchange(at, at + piece.bytes), piece.data, piece.bytes);
    }
    comm.broadcast(Buffer(stage, static_cast<std::int64_t>(filled), DType::UInt8), {.root = options.root}).wait();
    if (!is_root) {
      std::size_t at = 0;
      for (const Piece& piece : pieces)
        std::memcpy(piece.data, stage + std::exchange(at, at + piece.bytes), piece.bytes);
    }
    pieces.clear();
    filled = 0;
  };

  std::vector<std::pair<at::Tensor, at::Tensor>> write_back;  // (tensor, its contiguous copy)
  for (const at::Tensor& tensor : tensors) {
    at::Tensor flat = tensor.detach();
    if (!flat.is_contiguous()) {
      flat = flat.contiguous();
      if (!is_root) write_back.emplace_back(tensor, flat);
    }
    auto* data = static_cast<char*>(flat.data_ptr());
    for (std::size_t left = flat.nbytes(); left > 0;) {
      const std::size_t bytes = std::min(left, chunk - filled);
      pieces.push_back({data, bytes});
      data += bytes;
      left -= bytes;
      filled += bytes;
      if (filled == chunk) send();
    }
    if (flat.data_ptr() != tensor.data_ptr() && is_root) write_back.emplace_back(tensor, flat);  // keeps `flat` alive
  }
  send();
  if (is_root) return;
  for (auto& [tensor, flat] : write_back) tensor.detach().copy_(flat);
}

}  // namespace

DType to_dtype(at::ScalarType type) {
  switch (type) {
    case at::kFloat: return DType::Float32;
    case at::kDouble: return DType::Float64;
    case at::kHalf: return DType::Float16;
    case at::kBFloat16: return DType::BFloat16;
    case at::kChar: return DType::Int8;
    case at::kShort: return DType::Int16;
    case at::kInt: return DType::Int32;
    case at::kLong: return DType::Int64;
    case at::kByte: return DType::UInt8;
    case at::kBool: return DType::Bool;
    case at::kComplexFloat: return DType::Complex64;
    case at::kComplexDouble: return DType::Complex128;
    default: break;
  }
  raise(ErrorCode::InvalidArgument,
        "collectives do not know tensors of type {} -- convert it first, e.g. with .to(at::kFloat)",
        at::toString(type));
}

DType dtype_of(const at::Tensor& tensor) { return to_dtype(tensor.scalar_type()); }

at::ScalarType to_scalar_type(DType dtype) {
  switch (dtype) {
    case DType::Float32: return at::kFloat;
    case DType::Float64: return at::kDouble;
    case DType::Float16: return at::kHalf;
    case DType::BFloat16: return at::kBFloat16;
    case DType::Int8: return at::kChar;
    case DType::Int16: return at::kShort;
    case DType::Int32: return at::kInt;
    case DType::Int64: return at::kLong;
    case DType::UInt8: return at::kByte;
    case DType::Bool: return at::kBool;
    case DType::Complex64: return at::kComplexFloat;
    case DType::Complex128: return at::kComplexDouble;
    case DType::UInt16:
    case DType::UInt32:
    case DType::UInt64: break;
  }
  raise(ErrorCode::InvalidArgument, "libtorch 1.13 has no tensors of type {}", to_string(dtype));
}

Buffer to_buffer(const at::Tensor& tensor) {
  require_plain(tensor);
  return {tensor.data_ptr(), tensor.numel(), dtype_of(tensor), buffer_device(tensor)};
}

at::Tensor empty_in(Communicator& comm, at::IntArrayRef sizes, at::ScalarType type) {
  std::int64_t elements = 1;
  for (const std::int64_t size : sizes) elements *= size;
  if (elements == 0) return at::empty(sizes, type);
  const Memory memory = comm.allocate(static_cast<std::size_t>(elements) * size_of(to_dtype(type)));
  return at::from_blob(
      memory.data(), sizes, [memory](void*) {}, at::TensorOptions().dtype(type));
}

Work all_reduce(Communicator& comm, const at::Tensor& tensor, const AllReduceOptions& options) {
  return keep_until_done(comm.all_reduce(to_buffer(tensor), options), {tensor});
}

Work broadcast(Communicator& comm, const at::Tensor& tensor, const BroadcastOptions& options) {
  require_plain(tensor);
  return keep_until_done(comm.broadcast(as_bytes(tensor), options), {tensor});
}

at::Tensor all_gather(Communicator& comm, const at::Tensor& tensor, const AllGatherOptions& options) {
  require_plain(tensor);
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), comm.size());
  at::Tensor output = at::empty(sizes, tensor.options().requires_grad(false));
  comm.all_gather(as_bytes(tensor), as_bytes(output), options).wait();
  return output;
}

Work reduce_scatter(Communicator& comm, const at::Tensor& input, const at::Tensor& output,
                    const ReduceScatterOptions& options) {
  const Buffer in = to_buffer(input);
  const Buffer out = to_buffer(output);
  return keep_until_done(comm.reduce_scatter(in, out, options), {input, output});
}

void broadcast_parameters(Communicator& comm, const std::vector<at::Tensor>& all,
                          const BroadcastParametersOptions& options) {
  if (options.chunk_bytes == 0) raise(ErrorCode::InvalidArgument, "broadcast_parameters: chunk_bytes is 0");
  std::vector<at::Tensor> here;
  std::map<int, std::vector<at::Tensor>> on_gpus;
  std::size_t total = 0;
  for (const at::Tensor& tensor : all) {
    if (!tensor.defined() || tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument, "broadcast_parameters: a tensor is undefined or not dense");
    }
    if (const Device device = buffer_device(tensor); device.type != DeviceType::CPU) {
      on_gpus[device.index].push_back(tensor);
    } else {
      here.push_back(tensor);
      total += tensor.nbytes();
    }
  }
  if (comm.size() == 1) return;
  const at::NoGradGuard no_grad;
  for (const auto& [gpu, tensors] : on_gpus) broadcast_on_gpu(comm, tensors, options.root);
  if (total > 0) broadcast_on_host(comm, here, total, options);
}

namespace {

// Asks libtorch for the stream's handle, which versions from 2.9 on return.
template <class Guard>
void* handle_of(const Guard& guard, const c10::Stream& stream, at::Device gpu) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  }
  // c10::cuda::CUDAStream::stream() const, in libc10_cuda, which a program without CUDA does not load. A CUDAStream
  // consists only of a c10::Stream.
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

std::optional<NonFiniteElement> first_non_finite(const at::Tensor& tensor, const FiniteOptions& options) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) {
    raise(ErrorCode::InvalidArgument, "first_non_finite: the tensor is undefined or not dense -- use .to_dense()");
  }
  const at::Tensor values = tensor.detach().cpu().contiguous();
  const DType dtype = dtype_of(values);
  const auto index = first_non_finite({values.data_ptr(), values.numel(), dtype}, options);
  if (!index) return std::nullopt;
  const at::Tensor element = values.view({-1})[*index];
  double value = 0;
  if (at::isComplexType(values.scalar_type())) {
    const auto number = element.item<c10::complex<double>>();
    value = std::isfinite(number.real()) ? number.imag() : number.real();
  } else {
    value = element.item<double>();
  }
  return NonFiniteElement{.index = *index, .position = step::position_of(*index, tensor.sizes()), .value = value};
}

}  // namespace cohort
