#include "torch/non_finite.h"

#include "base/result.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

namespace cohort::nn {

namespace {

struct Record {
  std::int64_t parameter = 0;
  std::int64_t index = 0;
  double value = 0;
  std::array<char, 256> host = {};  // the end of a longer name is left out
};

}  // namespace

// By a minimum and a broadcast: in those, ranks that have joined take part without a word.
std::optional<FirstNonFinite> first_of_all_ranks(Communicator& comm, const std::optional<LocalNonFinite>& mine) {
  constexpr std::int64_t kNone = std::numeric_limits<std::int64_t>::max();
  std::int64_t first = mine ? static_cast<std::int64_t>(mine->bucket) * comm.size() + comm.rank() : kNone;
  comm.all_reduce(std::span(&first, 1), {.op = ReduceOp::Min}).wait();
  if (first == kNone) return std::nullopt;
  const int root = static_cast<int>(first % comm.size());

  Record record;
  if (root == comm.rank()) {
    record.parameter = mine->parameter;
    record.index = mine->element.index;
    record.value = mine->element.value;
    const std::string& host = comm.host();
    std::memcpy(record.host.data(), host.data(), std::min(host.size(), record.host.size() - 1));
  }
  comm.broadcast(Buffer(&record, static_cast<std::int64_t>(sizeof record), DType::UInt8), {.root = root}).wait();
  return FirstNonFinite{.rank = root,
                        .host = record.host.data(),
                        .parameter = static_cast<int>(record.parameter),
                        .index = record.index,
                        .value = record.value};
}

NonFiniteElement element_of(std::int64_t index, at::IntArrayRef sizes, double value) {
  NonFiniteElement element{.index = index, .position = std::vector<std::int64_t>(sizes.size()), .value = value};
  for (std::size_t d = sizes.size(); d-- > 0; index /= sizes[d]) element.position[d] = index % sizes[d];
  return element;
}

void throw_non_finite(const Communicator& comm, NonFiniteGradient gradient, at::IntArrayRef sizes) {
  const double value = gradient.element.value;
  std::string what = std::isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
  if (std::isfinite(value)) what = fmt::format("{}, which is infinite as the type that it is sent as", value);
  ErrorContext where;
  where.rank = comm.rank();
  where.host = comm.host();
  where.peer = gradient.rank;
  where.operation = "DistributedDataParallel";
  std::string message = fmt::format(
      "the gradients of step {0} are not finite -- rank {1} ({2}), parameter '{3}' of [{4}], element {5} at [{6}] -- "
      "it "
      "is {7}, the first one found -- go on with the next batch (gradients are undefined now, on all ranks), or look "
      "at "
      "rank {1}'s batch and loss and at the learning rate",
      gradient.step, gradient.rank, gradient.host, gradient.parameter, fmt::join(sizes.vec(), ", "),
      gradient.element.index, fmt::join(gradient.element.position, ", "), what);
  throw NonFiniteError(message, std::move(where), std::move(gradient));
}

}  // namespace cohort::nn
