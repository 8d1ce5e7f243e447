#include "horovod/named/execution.h"

#include "comm/gpu/nccl.h"

#include <fmt/format.h>

#include <algorithm>
#include <complex>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <vector>

namespace cohort::named {
namespace {

/// Calls `body` with a value of the buffer's integer type.
template <class Body>
void as_integers(const Buffer& data, const Body& body) {
  switch (data.dtype) {
    case DType::Int8: return body(std::int8_t{});
    case DType::Int16: return body(std::int16_t{});
    case DType::Int32: return body(std::int32_t{});
    case DType::Int64: return body(std::int64_t{});
    case DType::UInt8: return body(std::uint8_t{});
    case DType::UInt16: return body(std::uint16_t{});
    case DType::UInt32: return body(std::uint32_t{});
    case DType::UInt64: return body(std::uint64_t{});
    default: return;
  }
}

/// Rounds toward zero, and clamps to the range of T, because converting a value outside of it is undefined in C++.
template <class T>
T to_integer(double value) noexcept {
  // As a double, the highest value may be rounded up by one, which is out of range and clamped as well.
  if (value >= static_cast<double>(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  if (value <= static_cast<double>(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  return static_cast<T>(value);
}

}  // namespace

bool by_hand(const Signature& common, bool skips_ranks) noexcept {
  if (is_scalable(common.dtype)) return false;
  return common.prescale != 1 || common.postscale != 1 || (common.op == ReduceOp::Average && skips_ranks);
}

void divide(Buffer data, std::int64_t divisor) {
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
    T* const values = static_cast<T*>(data.data);
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = static_cast<T>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
    }
  });
}

void scale(Buffer data, double factor, std::int64_t divisor) {
  if (factor == 1) {
    if (divisor != 1) divide(data, divisor);
    return;
  }
  as_integers(data, [&](auto kind) {
    using T = decltype(kind);
    T* const values = static_cast<T*>(data.data);
    const auto parts = static_cast<double>(divisor);
    // Divides rather than multiplying by a reciprocal, so that a sum that is divisible gives the exact quotient.
    for (std::int64_t i = 0; i < data.count; ++i) {
      values[i] = to_integer<T>(static_cast<double>(values[i]) * factor / parts);
    }
  });
}

namespace {

template <class T>
void fill(Buffer to, T value) {
  std::fill_n(static_cast<T*>(to.data), to.count, value);
}

/// Bit patterns of 16-bit floats.
struct HalfBits {
  std::uint16_t one, infinity;  // the highest bit is the sign
};

void fill_half(Buffer to, ReduceOp op, bool flipped, const HalfBits& bits) {
  constexpr unsigned kSign = 0x8000;
  const unsigned sign = flipped ? kSign : 0;
  switch (op) {
    case ReduceOp::Product: return fill(to, bits.one);
    case ReduceOp::Min: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ sign));
    case ReduceOp::Max: return fill(to, static_cast<std::uint16_t>(bits.infinity ^ kSign ^ sign));
    default: return fill(to, static_cast<std::uint16_t>(kSign ^ sign));
  }
}

template <class T>
void fill_float(Buffer to, ReduceOp op, bool flipped) {
  const T sign = flipped ? T{-1} : T{1};
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, sign * std::numeric_limits<T>::infinity());
    case ReduceOp::Max: return fill(to, -sign * std::numeric_limits<T>::infinity());
    default: return fill(to, -sign * T{0});
  }
}

template <class T>
void fill_complex(Buffer to, ReduceOp op, bool flipped) {
  // The product with (1, 0) is (a - 0 b, 0 a + b): exact for finite numbers but for the sign of zeros.
  const T zero = flipped ? T{0} : -T{0};
  fill(to, op == ReduceOp::Product ? std::complex<T>(1, 0) : std::complex<T>(zero, zero));
}

template <class T>
void fill_integer(Buffer to, ReduceOp op) {
  switch (op) {
    case ReduceOp::Product: return fill(to, T{1});
    case ReduceOp::Min: return fill(to, std::numeric_limits<T>::max());
    case ReduceOp::Max: return fill(to, std::numeric_limits<T>::min());
    case ReduceOp::BitAnd: return fill(to, static_cast<T>(~T{0}));
    default: return fill(to, T{0});
  }
}

void fill_bool(Buffer to, ReduceOp op) {
  const bool conjunction = op == ReduceOp::Product || op == ReduceOp::Min || op == ReduceOp::BitAnd;
  fill(to, static_cast<std::uint8_t>(conjunction ? 1 : 0));
}

}  // namespace

void fill_neutral(Buffer to, ReduceOp op, double prescale) {
  const bool flipped = prescale < 0;
  if (to.count == 0) return;
  switch (to.dtype) {
    case DType::Float32: return fill_float<float>(to, op, flipped);
    case DType::Float64: return fill_float<double>(to, op, flipped);
    case DType::Float16: return fill_half(to, op, flipped, {0x3C00, 0x7C00});
    case DType::BFloat16: return fill_half(to, op, flipped, {0x3F80, 0x7F80});
    case DType::Int8: return fill_integer<std::int8_t>(to, op);
    case DType::Int16: return fill_integer<std::int16_t>(to, op);
    case DType::Int32: return fill_integer<std::int32_t>(to, op);
    case DType::Int64: return fill_integer<std::int64_t>(to, op);
    case DType::UInt8: return fill_integer<std::uint8_t>(to, op);
    case DType::UInt16: return fill_integer<std::uint16_t>(to, op);
    case DType::UInt32: return fill_integer<std::uint32_t>(to, op);
    case DType::UInt64: return fill_integer<std::uint64_t>(to, op);
    case DType::Bool: return fill_bool(to, op);
    case DType::Complex64: return fill_complex<float>(to, op, flipped);
    case DType::Complex128: return fill_complex<double>(to, op, flipped);
  }
}

// --- GPU streams ---

using comm::cuda::Gpu;
using comm::cuda::Stream;

void refuse_capture(const Gpu& gpu, Stream stream, const Request& request, int rank) {
  gpu.refuse_capture(
      stream, [&] { return fmt::format("{} '{}' failed -- rank {}", name_of(request.kind), request.name, rank); });
}

Marks marks_of(const Request& request, int rank) {
  Marks marks;
  const Device device = device_of(request);
  if (device.type == DeviceType::CPU) return marks;
  std::vector<Stream> streams{device.stream};
  for (const Device& other : {request.input.device, request.output.device}) {
    if (other.type != DeviceType::CPU && other.stream != device.stream) streams.push_back(other.stream);
  }
  Gpu& gpu = Gpu::at(device.index);
  for (const Stream stream : streams) refuse_capture(gpu, stream, request, rank);
  for (const Stream stream : streams) marks.push_back(gpu.mark(stream));
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
  const auto& found = comm::cuda::Nccl::find();
  return found ? found->version : 0;
}

}  // namespace cohort::named
