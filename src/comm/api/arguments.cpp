#include "comm/api/communicator_impl.h"

#include "base/result.h"
#include "comm/kernels/arrays.h"
#include "comm/kernels/codecs.h"

#include <cohort/digest.h>
#include <cohort/finite.h>

#include <fmt/format.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

namespace cohort::comm {
namespace {

constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

template <class... Args>
[[noreturn]] void refuse(const Caller& caller, fmt::format_string<Args...> format, Args&&... args) {
  refuse_argument(caller, fmt::format(format, std::forward<Args>(args)...));
}

std::size_t alignment_of(DType dtype) noexcept { return is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype); }

std::uintptr_t address(const void* data) noexcept { return reinterpret_cast<std::uintptr_t>(data); }

void check_tag(const Caller& caller, int tag) {
  if (tag < 0) refuse(caller, "the tag is {}; tags are from 0", tag);
}

}  // namespace

void refuse_argument(const Caller& caller, std::string_view why) {
  ErrorContext context;
  context.rank = caller.rank();
  context.host = caller.impl.placement().host;
  context.operation = name_of(caller.kind);
  context.cause = why;
  const std::string message = fmt::format("{}: {} -- rank {} ({})", context.operation, why, context.rank, context.host);
  throw Error(ErrorCode::InvalidArgument, message, std::move(context));
}

void check_buffer(const Caller& caller, std::string_view name, const ConstBuffer& buffer) {
  if (static_cast<int>(buffer.dtype) >= kDTypeCount) {
    refuse(caller, "{} has the unknown dtype {}", name, static_cast<int>(buffer.dtype));
  }
  if (buffer.count < 0) refuse(caller, "{} has a count of {}", name, buffer.count);
  if (buffer.count > std::numeric_limits<std::int64_t>::max() / 16) {
    refuse(caller, "{} has {} elements, more than any memory", name, buffer.count);
  }
  if (buffer.data == nullptr && buffer.count > 0) {
    refuse(caller, "{} is null, with a count of {}", name, buffer.count);
  }
  if (const std::size_t alignment = alignment_of(buffer.dtype); address(buffer.data) % alignment != 0) {
    refuse(caller, "{} is not aligned to {} bytes, as {} has to be", name, alignment, to_string(buffer.dtype));
  }
  if (buffer.device.type != DeviceType::CPU && buffer.device.type != DeviceType::CUDA)
    refuse(caller, "{} is on a device that is not supported", name);
}

void check_same_type(const Caller& caller, const ConstBuffer& input, const Buffer& output) {
  if (input.dtype != output.dtype) {
    refuse(caller, "the input is {} and the output {}", to_string(input.dtype), to_string(output.dtype));
  }
  const bool apart = input.device.type != output.device.type ||
                     (input.device.type == DeviceType::CUDA && input.device.index != output.device.index);
  if (apart && input.count > 0 && output.count > 0) {
    const auto place = [](const Device& device) {
      return device.type == DeviceType::CPU ? std::string("the host's memory") : fmt::format("cuda:{}", device.index);
    };
    refuse(caller, "the input is in {} and the output in {}", place(input.device), place(output.device));
  }
}

void check_apart(const Caller& caller, const ConstBuffer& input, const Buffer& output, const void* in_place) {
  if (input.count == 0 || output.count == 0 || input.data == in_place) return;
  const auto in = address(input.data);
  const auto out = address(output.data);
  if (in < out + output.bytes() && out < in + input.bytes()) refuse(caller, "input and output overlap in part");
}

void check_reduction(const Caller& caller, DType dtype, ReduceOp op, double prescale, double postscale) {
  if (static_cast<int>(op) >= kReduceOpCount) refuse(caller, "unknown reduction {}", static_cast<int>(op));
  if (!supports(dtype, op)) refuse(caller, "{} has no {}", to_string(dtype), to_string(op));
  if (prescale == 1 && postscale == 1) return;
  if (!is_scalable(dtype)) {
    refuse(caller, "scaling needs floating-point or complex elements, not {}", to_string(dtype));
  }
  if (!std::isfinite(prescale) || !std::isfinite(postscale)) {
    refuse(caller, "the scales are {} and {}; they have to be finite", prescale, postscale);
  }
}

void check_weight(const Caller& caller, DType dtype, ReduceOp op, double weight) {
  if (op != ReduceOp::Average) {
    refuse(caller, "a weight goes with ReduceOp::Average only, not with {}", to_string(op));
  }
  if (!is_scalable(dtype)) {
    refuse(caller, "a weighted average needs floating-point or complex elements, not {}", to_string(dtype));
  }
  if (!std::isfinite(weight) || weight < 0) {
    refuse(caller, "the weight is {}; it has to be finite and >= 0", weight);
  }
}

void check_wire_format(const Caller& caller, DType dtype, ReduceOp op, WireFormat format, const float* residual) {
  if (residual != nullptr && block_of(format) == 1)
    refuse(caller, "a residual goes with int8 and int4, not with {}", to_string(format));
  if (format == WireFormat::None) return;
  if (dtype != DType::Float32) {
    refuse(caller, "{} cannot travel as {}; only float32 has other formats", to_string(dtype), to_string(format));
  }
  if (op != ReduceOp::Sum && op != ReduceOp::Average) {
    refuse(caller, "{} between hosts goes with sums and averages, not with {}", to_string(format), to_string(op));
  }
}

void check_timeout(const Caller& caller, const std::optional<std::chrono::milliseconds>& timeout) {
  if (!timeout) return;
  if (timeout->count() <= 0 || *timeout > kLongestTimeout) {
    refuse(caller, "a timeout of {} ms has no meaning (from 1 ms to a year)", timeout->count());
  }
}

void check_root(const Caller& caller, int root) {
  if (root < 0 || root >= caller.size()) refuse(caller, "the root is {} in a world of {}", root, caller.size());
}

void check_peer(const Caller& caller, int peer, int tag) {
  if (peer < 0 || peer >= caller.size()) refuse(caller, "the peer is {} in a world of {}", peer, caller.size());
  if (peer == caller.rank()) refuse(caller, "the peer is this rank itself");
  check_tag(caller, tag);
}

void check_any_source(const Caller& caller, int tag) {
  if (caller.size() == 1) refuse(caller, "in a world of one there is nobody to receive from");
  check_tag(caller, tag);
}

void check_parts(const Caller& caller, std::string_view whole_name, std::int64_t whole, std::string_view part_name,
                 std::int64_t part) {
  if (whole < part || whole / caller.size() != part || whole % caller.size() != 0) {
    refuse(caller, "{} has {} elements, which is not {} parts of {}'s {}", whole_name, whole, caller.size(), part_name,
           part);
  }
}

std::int64_t check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts) {
  if (counts.size() != static_cast<std::size_t>(caller.size())) {
    refuse(caller, "{} has {} entries in a world of {}", name, counts.size(), caller.size());
  }
  std::int64_t sum = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    if (counts[rank] < 0) refuse(caller, "{} has {} for rank {}", name, counts[rank], rank);
    if (counts[rank] > std::numeric_limits<std::int64_t>::max() / 16 - sum) {
      refuse(caller, "{} add up to more than any memory", name);
    }
    sum += counts[rank];
  }
  return sum;
}

void check_counts(const Caller& caller, std::string_view name, std::span<const std::int64_t> counts,
                  std::string_view of, std::int64_t total) {
  const std::int64_t sum = check_counts(caller, name, counts);
  if (sum != total) refuse(caller, "{} add up to {}, and {} has {} elements", name, sum, of, total);
}

void check_own_count(const Caller& caller, std::span<const std::int64_t> counts, std::string_view of,
                     std::int64_t count) {
  const std::int64_t own = counts[static_cast<std::size_t>(caller.rank())];
  if (own != count) refuse(caller, "{} has {} elements where the counts have {} for this rank", of, count, own);
}

void check_ranks(const Caller& caller, std::span<const int> ranks) {
  if (ranks.empty()) refuse(caller, "a group of no ranks");
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= caller.size()) {
      refuse(caller, "rank {} of the group is not in a world of {}", sorted[i], caller.size());
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) refuse(caller, "rank {} is twice in the group", sorted[i]);
  }
}

}  // namespace cohort::comm

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
  switch (data.dtype) {
    case DType::Float16: return first(data.data, data.count, comm::kInfiniteFloat16);
    case DType::BFloat16: return first(data.data, data.count, comm::kInfiniteBFloat16);
    case DType::Float32:
      return first(data.data, data.count,
                   options.wire_format == WireFormat::BFloat16 ? comm::kInfiniteAsBFloat16 : comm::kInfiniteFloat32);
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

DigestKey make_digest_key() {
  std::random_device random;
  DigestKey key;
  for (std::size_t at = 0; at < key.size(); at += sizeof(std::uint32_t)) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(key.data() + at, &word, sizeof word);
  }
  return key;
}

Digest digest_of(ConstBuffer data, const DigestKey& key) {
  struct FreeMac {
    void operator()(EVP_MAC* mac) const noexcept { EVP_MAC_free(mac); }
    void operator()(EVP_MAC_CTX* context) const noexcept { EVP_MAC_CTX_free(context); }
  };
  // This is static, since looking up the algorithm takes longer than the digest of a small tensor.
  static const std::unique_ptr<EVP_MAC, FreeMac> poly1305(EVP_MAC_fetch(nullptr, "POLY1305", nullptr));
  const std::unique_ptr<EVP_MAC_CTX, FreeMac> context(poly1305 ? EVP_MAC_CTX_new(poly1305.get()) : nullptr);
  Digest digest{};
  std::size_t size = 0;
  if (context == nullptr || EVP_MAC_init(context.get(), key.data(), key.size(), nullptr) != 1 ||
      EVP_MAC_update(context.get(), static_cast<const unsigned char*>(data.data), data.bytes()) != 1 ||
      EVP_MAC_final(context.get(), reinterpret_cast<unsigned char*>(digest.data()), &size, sizeof digest) != 1) {
    raise(ErrorCode::Internal, "digest_of: OpenSSL's Poly1305 failed -- is this OpenSSL built without it?");
  }
  return digest;
}

}  // namespace cohort
