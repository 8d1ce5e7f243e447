#include "train/gradients/non_finite.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>

namespace cohort::gradients {
namespace {

struct Record {
  std::int64_t parameter = 0;
  std::int64_t index = 0;
  double value = 0;
  std::array<char, 256> host = {};  // a longer name is cut off
};

template <class T>
T load(const void* data, std::int64_t index) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(data) + static_cast<std::size_t>(index) * sizeof(T), sizeof(T));
  return value;
}

// Returns the value of an element that is not finite, or that is float32 and becomes infinite as bfloat16.
double value_at(const void* data, std::int64_t index, DType dtype) {
  switch (dtype) {
    case DType::Float64: return load<double>(data, index);
    case DType::BFloat16:
      return std::bit_cast<float>(static_cast<std::uint32_t>(load<std::uint16_t>(data, index)) << 16);
    case DType::Float16: {
      const auto bits = load<std::uint16_t>(data, index);
      if ((bits & 0x3FF) != 0) return std::numeric_limits<double>::quiet_NaN();
      return (bits & 0x8000) != 0 ? -std::numeric_limits<double>::infinity() : std::numeric_limits<double>::infinity();
    }
    default: return load<float>(data, index);
  }
}

/// The distance between consecutive elements of a dimension in memory, and in row-major order.
struct Stride {
  std::int64_t in_memory = 1;
  std::int64_t in_order = 1;
};

/// Returns the strides, the widest in memory first.
std::vector<Stride> strides_of(const Parameter& parameter) {
  std::vector<Stride> strides;
  std::int64_t in_order = 1;
  for (std::size_t d = parameter.sizes.size(); d-- > 0; in_order *= parameter.sizes[d]) {
    if (parameter.sizes[d] != 1) strides.push_back({parameter.strides[d], in_order});
  }
  std::stable_sort(strides.begin(), strides.end(),
                   [](const Stride& a, const Stride& b) { return a.in_memory > b.in_memory; });
  return strides;
}

/// Returns the row-major number of the element at this offset in memory.
std::int64_t index_of(std::int64_t offset, std::span<const Stride> strides) {
  std::int64_t index = 0;
  for (const Stride& stride : strides) {
    index += offset / stride.in_memory * stride.in_order;
    offset %= stride.in_memory;
  }
  return index;
}

}  // namespace

std::optional<NonFiniteElement> first_in(const void* gradient, const Parameter& parameter,
                                         const FiniteOptions& options) {
  const std::int64_t count = parameter.count();
  const std::vector<Stride> strides = strides_of(parameter);
  const bool in_order = std::all_of(strides.begin(), strides.end(),
                                    [](const Stride& stride) { return stride.in_memory == stride.in_order; });
  std::optional<std::int64_t> first;
  std::int64_t lies_at = 0;
  for (std::int64_t begin = 0; begin < count;) {
    const void* const rest =
        static_cast<const std::byte*>(gradient) + static_cast<std::size_t>(begin) * size_of(parameter.dtype);
    const auto found = first_non_finite(ConstBuffer(rest, count - begin, parameter.dtype), options);
    if (!found) break;
    const std::int64_t offset = begin + *found;
    const std::int64_t index = index_of(offset, strides);
    if (!first || index < *first) {
      first = index;
      lies_at = offset;
    }
    if (in_order || index == 0) break;  // no earlier element is possible; otherwise all have to be checked
    begin = offset + 1;
  }
  if (!first) return std::nullopt;
  return NonFiniteElement{.index = *first,
                          .position = step::position_of(*first, parameter.sizes),
                          .value = value_at(gradient, lies_at, parameter.dtype)};
}

// Uses a minimum and a broadcast, in which ranks that have joined take part automatically.
std::optional<NonFiniteGradient> first_of_all_ranks(step::Ranks& ranks, std::span<const Parameter> parameters,
                                                    const std::optional<LocalNonFinite>& mine, std::int64_t step) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::vector<std::int64_t> first = {mine ? static_cast<std::int64_t>(mine->bucket) * ranks.size() + ranks.rank()
                                          : kNone};
  ranks.run("all_reduce", first,
            [](Communicator& comm, auto span) { return comm.all_reduce(span, {.op = ReduceOp::Min}); });
  if (first[0] == kNone) return std::nullopt;
  const int root = static_cast<int>(first[0] % ranks.size());

  std::vector<Record> records(1);
  Record& record = records[0];
  if (root == ranks.rank()) {
    record.parameter = mine->parameter;
    record.index = mine->element.index;
    record.value = mine->element.value;
    const std::string& host = ranks.host();
    std::memcpy(record.host.data(), host.data(), std::min(host.size(), record.host.size() - 1));
  }
  ranks.run("broadcast", records, [&](Communicator& comm, std::span<Record> span) {
    return comm.broadcast(Buffer(span.data(), static_cast<std::int64_t>(span.size_bytes()), DType::UInt8),
                          {.root = root});
  });
  const Parameter& parameter = parameters[static_cast<std::size_t>(record.parameter)];
  return NonFiniteGradient{.rank = root,
                           .host = record.host.data(),
                           .parameter = parameter.name,
                           .element = {.index = record.index,
                                       .position = step::position_of(record.index, parameter.sizes),
                                       .value = record.value},
                           .step = step};
}

std::string text_of(const NonFiniteGradient& gradient, std::span<const std::int64_t> sizes) {
  const double value = gradient.element.value;
  std::string what = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (std::isfinite(value)) what = fmt::format("{:g}, which is infinite as the type that it is sent as", value);
  return fmt::format(
      "the gradients of step {0} are not finite -- rank {1} ({2}), parameter '{3}' of [{4}], element {5} at [{6}] -- "
      "it is {7}, the first one found -- go on with the next batch (gradients are undefined (None) now, on all ranks), "
      "or look at rank {1}'s batch and loss and at the learning rate",
      gradient.step, gradient.rank, gradient.host, gradient.parameter, fmt::join(sizes, ", "), gradient.element.index,
      fmt::join(gradient.element.position, ", "), what);
}

FiniteOptions FiniteSearch::finite_options(const step::Ranks& ranks) const {
  FiniteOptions options;
  if (ranks.local_size() < ranks.size()) options.wire_format = options_.wire_format;
  return options;
}

void FiniteSearch::look(std::size_t number, const step::Ranks& ranks) {
  if (!raises() || found_) return;
  const Bucket& bucket = buckets_[number];
  if (bucket.on_gpu()) return look_on_gpu(number);
  const FiniteOptions options = finite_options(ranks);
  for (const std::size_t position : bucket.large()) {
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    const void* const unread = unread_[parameter];
    if (unread != nullptr && looks_at_averages_) continue;
    const Buffer place = bucket.place(position);
    const void* const gradient = unread != nullptr ? unread : place.data;
    if (!first_non_finite(ConstBuffer(gradient, place.count, place.dtype), options)) continue;
    return note(number, parameter, gradient, options);
  }
  const auto found = first_non_finite(bucket.small(), options);
  if (!found) return;
  const std::size_t position = bucket.position_of(*found);
  note(number, static_cast<std::size_t>(bucket.members()[position]), bucket.place(position).data, options);
}

// The host waits for the GPU's result. Does not search for values that would be infinite only in the wire format.
void FiniteSearch::look_on_gpu(std::size_t number) {
  const Bucket& bucket = buckets_[number];
  if (autograd_.are_finite(bucket.members())) return;
  std::vector<std::size_t> positions(bucket.members().size());
  std::iota(positions.begin(), positions.end(), 0U);
  std::sort(positions.begin(), positions.end(),
            [&](std::size_t a, std::size_t b) { return bucket.offset(a) < bucket.offset(b); });
  for (const std::size_t position : positions) {
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    const std::vector<std::byte> values = autograd_.copy_to_host(parameter);
    if (auto found = first_in(values.data(), parameters_[parameter], {}))
      return note(number, parameter, *std::move(found));
  }
}

void FiniteSearch::look_again(const step::Ranks& ranks) {
  const std::size_t end = found_ ? found_->bucket + 1 : buckets_.size();
  const FiniteOptions options = finite_options(ranks);
  for (std::size_t number = 0; number < end; ++number) {
    for (const std::size_t position : buckets_[number].large()) {
      const auto parameter = static_cast<std::size_t>(buckets_[number].members()[position]);
      const Buffer place = buckets_[number].place(position);
      const void* const unread = unread_[parameter];
      if (unread == nullptr || !first_non_finite(ConstBuffer(unread, place.count, place.dtype), options)) continue;
      return note(number, parameter, unread, options);
    }
  }
}

void FiniteSearch::note(std::size_t bucket, std::size_t parameter, const void* gradient, const FiniteOptions& options) {
  note(bucket, parameter, first_in(gradient, parameters_[parameter], options).value());
}

void FiniteSearch::note(std::size_t bucket, std::size_t parameter, NonFiniteElement element) {
  found_ = LocalNonFinite{.bucket = bucket, .parameter = static_cast<int>(parameter), .element = std::move(element)};
}

void FiniteSearch::raise(step::Ranks& ranks, nn::ReducerStats& stats, std::int64_t step) {
  auto gradient = first_of_all_ranks(ranks, parameters_, std::exchange(found_, std::nullopt), step);
  if (!gradient) return;
  ++stats.non_finite_steps;
  autograd_.drop_all();
  ErrorContext where = ranks.where("DistributedDataParallel");
  where.peer = gradient->rank;
  const auto named = std::ranges::find(parameters_, gradient->parameter, &Parameter::name);
  const std::string text = text_of(*gradient, named->sizes);
  throw NonFiniteError(text, std::move(where), std::move(*gradient));
}

}  // namespace cohort::gradients
