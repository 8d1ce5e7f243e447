#include "comm/arguments.h"

#include "base/result.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

namespace cohort::comm {
namespace {

constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

template <class... Args>
[[noreturn]] void refuse(const Subject& subject, fmt::format_string<Args...> format, Args&&... args) {
  refuse_argument(subject, fmt::format(format, std::forward<Args>(args)...));
}

std::size_t alignment_of(DType dtype) noexcept { return is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype); }

std::uintptr_t address(const void* data) noexcept { return reinterpret_cast<std::uintptr_t>(data); }

void check_tag(const Subject& subject, int tag) {
  if (tag < 0) refuse(subject, "the tag is {}; tags are from 0", tag);
}

}  // namespace

void refuse_argument(const Subject& subject, std::string_view why) {
  ErrorContext context;
  context.rank = subject.rank();
  context.host = subject.impl.placement().host;
  context.operation = name_of(subject.kind);
  context.cause = why;
  const std::string message = fmt::format("{}: {} -- rank {} ({})", context.operation, why, context.rank, context.host);
  throw Error(ErrorCode::InvalidArgument, message, std::move(context));
}

void check_buffer(const Subject& subject, std::string_view name, const ConstBuffer& buffer) {
  if (static_cast<int>(buffer.dtype) >= kDTypeCount) {
    refuse(subject, "{} has the unknown dtype {}", name, static_cast<int>(buffer.dtype));
  }
  if (buffer.count < 0) refuse(subject, "{} has a count of {}", name, buffer.count);
  if (buffer.count > std::numeric_limits<std::int64_t>::max() / 16) {
    refuse(subject, "{} has {} elements, more than any memory", name, buffer.count);
  }
  if (buffer.data == nullptr && buffer.count > 0) {
    refuse(subject, "{} is null, with a count of {}", name, buffer.count);
  }
  if (const std::size_t alignment = alignment_of(buffer.dtype); address(buffer.data) % alignment != 0) {
    refuse(subject, "{} is not aligned to {} bytes, as {} has to be", name, alignment, to_string(buffer.dtype));
  }
  if (buffer.device.type != DeviceType::CPU) refuse(subject, "{} is on a device that is not supported", name);
}

void check_same_type(const Subject& subject, const ConstBuffer& input, const Buffer& output) {
  if (input.dtype != output.dtype) {
    refuse(subject, "the input is {} and the output {}", to_string(input.dtype), to_string(output.dtype));
  }
}

void check_apart(const Subject& subject, const ConstBuffer& input, const Buffer& output, const void* in_place) {
  if (input.count == 0 || output.count == 0 || input.data == in_place) return;
  const auto in = address(input.data);
  const auto out = address(output.data);
  if (in < out + output.bytes() && out < in + input.bytes()) refuse(subject, "input and output overlap in part");
}

void check_reduction(const Subject& subject, DType dtype, ReduceOp op, double prescale, double postscale) {
  if (static_cast<int>(op) >= kReduceOpCount) refuse(subject, "unknown reduction {}", static_cast<int>(op));
  if (!supports(dtype, op)) refuse(subject, "{} has no {}", to_string(dtype), to_string(op));
  if (prescale == 1 && postscale == 1) return;
  if (!is_scalable(dtype)) {
    refuse(subject, "scaling needs floating-point or complex elements, not {}", to_string(dtype));
  }
  if (!std::isfinite(prescale) || !std::isfinite(postscale)) {
    refuse(subject, "the scales are {} and {}; they have to be finite", prescale, postscale);
  }
}

void check_weight(const Subject& subject, DType dtype, ReduceOp op, double weight) {
  if (op != ReduceOp::Average) {
    refuse(subject, "a weight goes with ReduceOp::Average only, not with {}", to_string(op));
  }
  if (!is_scalable(dtype)) {
    refuse(subject, "a weighted average needs floating-point or complex elements, not {}", to_string(dtype));
  }
  if (!std::isfinite(weight) || weight < 0) {
    refuse(subject, "the weight is {}; it has to be finite and >= 0", weight);
  }
}

void check_wire_dtype(const Subject& subject, DType dtype, ReduceOp op, DType wire) {
  if (wire == dtype) return;
  if (wire != DType::BFloat16 || dtype != DType::Float32) {
    refuse(subject, "{} cannot travel as {}; float32 can as bfloat16", to_string(dtype), to_string(wire));
  }
  if (op != ReduceOp::Sum && op != ReduceOp::Average) {
    refuse(subject, "bfloat16 between hosts goes with sums and averages, not with {}", to_string(op));
  }
}

void check_timeout(const Subject& subject, const std::optional<std::chrono::milliseconds>& timeout) {
  if (!timeout) return;
  if (timeout->count() <= 0 || *timeout > kLongestTimeout) {
    refuse(subject, "a timeout of {} ms has no meaning (from 1 ms to a year)", timeout->count());
  }
}

void check_root(const Subject& subject, int root) {
  if (root < 0 || root >= subject.size()) refuse(subject, "the root is {} in a world of {}", root, subject.size());
}

void check_peer(const Subject& subject, int peer, int tag) {
  if (peer < 0 || peer >= subject.size()) refuse(subject, "the peer is {} in a world of {}", peer, subject.size());
  if (peer == subject.rank()) refuse(subject, "the peer is this rank itself");
  check_tag(subject, tag);
}

void check_any_source(const Subject& subject, int tag) {
  if (subject.size() == 1) refuse(subject, "in a world of one there is nobody to receive from");
  check_tag(subject, tag);
}

void check_parts(const Subject& subject, std::string_view whole_name, std::int64_t whole, std::string_view part_name,
                 std::int64_t part) {
  if (whole < part || whole / subject.size() != part || whole % subject.size() != 0) {
    refuse(subject, "{} has {} elements, which is not {} parts of {}'s {}", whole_name, whole, subject.size(),
           part_name, part);
  }
}

std::int64_t check_counts(const Subject& subject, std::string_view name, std::span<const std::int64_t> counts) {
  if (counts.size() != static_cast<std::size_t>(subject.size())) {
    refuse(subject, "{} has {} entries in a world of {}", name, counts.size(), subject.size());
  }
  std::int64_t sum = 0;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    if (counts[rank] < 0) refuse(subject, "{} has {} for rank {}", name, counts[rank], rank);
    if (counts[rank] > std::numeric_limits<std::int64_t>::max() / 16 - sum) {
      refuse(subject, "{} add up to more than any memory", name);
    }
    sum += counts[rank];
  }
  return sum;
}

void check_counts(const Subject& subject, std::string_view name, std::span<const std::int64_t> counts,
                  std::string_view of, std::int64_t total) {
  const std::int64_t sum = check_counts(subject, name, counts);
  if (sum != total) refuse(subject, "{} add up to {}, and {} has {} elements", name, sum, of, total);
}

void check_own_count(const Subject& subject, std::span<const std::int64_t> counts, std::string_view of,
                     std::int64_t count) {
  const std::int64_t own = counts[static_cast<std::size_t>(subject.rank())];
  if (own != count) refuse(subject, "{} has {} elements where the counts have {} for this rank", of, count, own);
}

void check_ranks(const Subject& subject, std::span<const int> ranks) {
  if (ranks.empty()) refuse(subject, "a group of no ranks");
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  for (std::size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] < 0 || sorted[i] >= subject.size()) {
      refuse(subject, "rank {} of the group is not in a world of {}", sorted[i], subject.size());
    }
    if (i > 0 && sorted[i] == sorted[i - 1]) refuse(subject, "rank {} is twice in the group", sorted[i]);
  }
}

}  // namespace cohort::comm
