#include <cohort/finite.h>

#include "base/result.h"
#include "comm/kernels/finite.h"

namespace cohort {

namespace {

template <class T>
std::optional<std::int64_t> first(const void* data, std::int64_t parts, T limit) {
  const auto count = static_cast<std::size_t>(parts);
  const std::size_t at = comm::first_reaching(static_cast<const T*>(data), count, limit);
  return at == count ? std::nullopt : std::optional(static_cast<std::int64_t>(at));
}

}  // namespace

std::optional<std::int64_t> first_non_finite(ConstBuffer data, const FiniteOptions& options) {
  if (data.count < 0) raise(ErrorCode::InvalidArgument, "first_non_finite: {} elements", data.count);
  if (options.wire_dtype && *options.wire_dtype != DType::BFloat16) {
    raise(ErrorCode::InvalidArgument, "first_non_finite: wire_dtype {} -- only bfloat16 is ever on the wire",
          to_string(*options.wire_dtype));
  }
  switch (data.dtype) {
    case DType::Float16: return first(data.data, data.count, comm::kInfiniteFloat16);
    case DType::BFloat16: return first(data.data, data.count, comm::kInfiniteBFloat16);
    case DType::Float32:
      return first(data.data, data.count, options.wire_dtype ? comm::kInfiniteAsBFloat16 : comm::kInfiniteFloat32);
    case DType::Float64: return first(data.data, data.count, comm::kInfiniteFloat64);
    case DType::Complex64:
    case DType::Complex128: {
      const auto part = data.dtype == DType::Complex64 ? first(data.data, 2 * data.count, comm::kInfiniteFloat32)
                                                       : first(data.data, 2 * data.count, comm::kInfiniteFloat64);
      return part ? std::optional(*part / 2) : std::nullopt;
    }
    default: return std::nullopt;
  }
}

}  // namespace cohort
