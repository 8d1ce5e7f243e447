#include "train/gradients/virtual_ranks.h"

#include "base/permutation.h"
#include "base/result.h"
#include "comm/kernels/arrays.h"
#include "comm/kernels/fold.h"
#include "train/gradients/sharding.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <limits>
#include <numeric>
#include <type_traits>
#include <utility>

namespace cohort::gradients {

// ---------------------------------------------------------------------------------------------------- the tree

namespace {

/// The virtual rank at which the tree divides a range of at least two.
int middle_of(VirtualRange range) {
  return range.begin + static_cast<int>(std::bit_floor(static_cast<unsigned>(range.count() - 1)));
}

/// The smallest subtree that contains the range.
VirtualRange subtree_around(int virtual_ranks, VirtualRange range) {
  VirtualRange all{0, virtual_ranks};
  while (all.count() > 1) {
    const int middle = middle_of(all);
    if (range.end <= middle) {
      all.end = middle;
    } else if (range.begin >= middle) {
      all.begin = middle;
    } else {
      break;
    }
  }
  return all;
}

void append_subtrees(VirtualRange tree, VirtualRange block, std::vector<VirtualRange>& found) {
  if (tree.end <= block.begin || tree.begin >= block.end) return;
  if (tree.begin >= block.begin && tree.end <= block.end) return found.push_back(tree);
  const int middle = middle_of(tree);
  append_subtrees({tree.begin, middle}, block, found);
  append_subtrees({middle, tree.end}, block, found);
}

/// An expression of sums over ranks. A sum of two has the same bits in either order, so it has only one text.
struct Term {
  int lowest = 0;
  std::string text;
};
Term sum_of(Term a, Term b) {
  if (b.lowest < a.lowest) std::swap(a, b);
  return {a.lowest, "(" + a.text + "+" + b.text + ")"};
}
Term rank_term(int rank) { return {rank, std::to_string(rank)}; }

Term tree_over(std::span<const Term> terms) {
  if (terms.size() == 1) return terms.front();
  const std::size_t middle = std::bit_floor(terms.size() - 1);
  return sum_of(tree_over(terms.first(middle)), tree_over(terms.subspan(middle)));
}
Term ascending_over(std::span<const Term> terms) {
  return std::accumulate(terms.begin() + 1, terms.end(), terms.front(), sum_of);
}

/// The order of a Communicator's sum: fold.h, comm/hosts/sums.cpp.
Term order_of_sum(std::span<const int> hosts) {
  std::vector<std::vector<Term>> by_host;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    const auto host = static_cast<std::size_t>(hosts[rank]);
    if (by_host.size() <= host) by_host.resize(host + 1);
    by_host[host].push_back(rank_term(static_cast<int>(rank)));
  }
  std::vector<Term> sums;
  for (const std::vector<Term>& there : by_host)
    if (!there.empty()) sums.push_back(ascending_over(there));
  const bool by_tree = comm::order_over(static_cast<std::int64_t>(sums.size())) == comm::FoldOrder::Tree;
  return by_tree ? tree_over(sums) : ascending_over(sums);
}

/// The order of the tree, if each rank's block is one of its subtrees.
Term order_of_tree(VirtualRange tree, std::span<const VirtualRange> blocks) {
  const auto own = std::ranges::find(blocks, tree);
  if (own != blocks.end()) return rank_term(static_cast<int>(own - blocks.begin()));
  const int middle = middle_of(tree);
  return sum_of(order_of_tree({tree.begin, middle}, blocks), order_of_tree({middle, tree.end}, blocks));
}

}  // namespace

bool are_added(int virtual_ranks, VirtualRange left, VirtualRange right) {
  const VirtualRange both{left.begin, right.end};
  return left.end == right.begin && both.end <= virtual_ranks && subtree_around(virtual_ranks, both) == both &&
         middle_of(both) == left.end;
}

std::vector<VirtualRange> subtrees_of(int virtual_ranks, VirtualRange block) {
  std::vector<VirtualRange> found;
  append_subtrees({0, virtual_ranks}, block, found);
  return found;
}

bool sum_has_order_of_tree(int virtual_ranks, std::span<const int> hosts) {
  std::vector<VirtualRange> blocks;
  for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
    blocks.push_back(block_of(virtual_ranks, static_cast<int>(hosts.size()), static_cast<int>(rank)));
    if (subtrees_of(virtual_ranks, blocks.back()).size() != 1) return false;
  }
  return order_of_sum(hosts).text == order_of_tree({0, virtual_ranks}, blocks).text;
}

std::uint64_t virtual_seed(std::uint64_t seed, std::int64_t epoch, std::int64_t cursor, int virtual_rank) noexcept {
  std::uint64_t state = permutation::splitmix64(seed);
  for (const std::int64_t part : {epoch, cursor, std::int64_t{virtual_rank}})
    state = permutation::splitmix64(state + static_cast<std::uint64_t>(part));
  return state;
}

// ---------------------------------------------------------------------------------------------------- sums

float widen_float16(std::uint16_t bits) noexcept {
  const std::uint32_t sign = std::uint32_t{bits & 0x8000U} << 16, exponent = bits >> 10 & 0x1FU,
                      fraction = bits & 0x3FFU;
  if (exponent == 0) {
    const float value = static_cast<float>(fraction) * 0x1p-24F;
    return sign != 0 ? -value : value;
  }
  if (exponent == 0x1F) return std::bit_cast<float>(fraction != 0 ? 0x7FC00000U : sign | 0x7F800000U);
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

std::uint16_t narrow_to_float16(float value) noexcept {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = bits >> 16 & 0x8000U, size = bits & 0x7FFFFFFFU;
  if (size > comm::kInfiniteFloat32) return 0x7E00;
  if (size >= 0x477FF000U) return static_cast<std::uint16_t>(sign | 0x7C00U);  // rounds to an infinity
  if (size >= 0x38800000U)
    return static_cast<std::uint16_t>(sign | (size + 0xFFFU + (size >> 13 & 1U) - 0x38000000U) >> 13);
  const std::uint32_t exponent = size >> 23;
  if (exponent < 102) return static_cast<std::uint16_t>(sign);  // below half of the smallest denormal
  const std::uint32_t fraction = (size & 0x7FFFFFU) | 0x800000U, shift = 126 - exponent, half = 1U << (shift - 1);
  const std::uint32_t rest = fraction & ((1U << shift) - 1U);
  std::uint32_t rounded = fraction >> shift;
  if (rest > half || (rest == half && (rounded & 1U) != 0)) ++rounded;
  return static_cast<std::uint16_t>(sign | rounded);
}

namespace {

// Number of elements folded at a time, so that results between folds stay in the first-level cache.
constexpr std::int64_t kChunk = 1024;
using Chunk = std::array<double, kChunk>;  // of float32 or float64

bool is_half(DType dtype) { return dtype == DType::Float16 || dtype == DType::BFloat16; }
DType accumulated_as(DType dtype) { return dtype == DType::Float64 ? DType::Float64 : DType::Float32; }

template <class T>
T* moved(T* data, std::int64_t elements, DType dtype) {
  using Byte = std::conditional_t<std::is_const_v<T>, const std::byte, std::byte>;
  return static_cast<Byte*>(data) + elements * static_cast<std::int64_t>(size_of(dtype));
}

/// Folds one or two inputs.
void fold_chunk(DType dtype, std::span<const void* const> inputs, void* to, std::int64_t count, double scale,
                double postscale) {
  comm::FoldJob job;
  job.dtype = dtype;
  job.inputs = inputs;
  job.outputs = {&to, 1};
  job.count = count;
  if (scale != 1) job.scales = {&scale, 1};
  job.postscale = postscale;
  comm::fold(job);
}

void widen(DType dtype, const void* from, float* to, std::int64_t count) {
  const auto* const bits = static_cast<const std::uint16_t*>(from);
  if (dtype == DType::BFloat16) return comm::widen_from_bfloat16(bits, to, static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) to[i] = widen_float16(bits[i]);
}

void narrow(DType dtype, const float* from, void* to, std::int64_t count) {
  auto* const bits = static_cast<std::uint16_t*>(to);
  if (dtype == DType::BFloat16) return comm::narrow_to_bfloat16(from, bits, static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) bits[i] = narrow_to_float16(from[i]);
}

}  // namespace

void fold_partial_sums(int virtual_ranks, std::span<const PartialSum> sums, void* to, std::int64_t count, DType dtype,
                       double postscale) {
  const DType wide = accumulated_as(dtype);
  struct Held {
    VirtualRange range;
    const void* values;
  };
  std::vector<Chunk> chunks(sums.size() + 1);
  for (std::int64_t begin = 0; begin < count; begin += kChunk) {
    const std::int64_t length = std::min(kChunk, count - begin);
    std::vector<Held> held;
    for (const PartialSum& sum : sums) {
      held.push_back({sum.range, moved(sum.values, begin, wide)});
      while (held.size() > 1 && are_added(virtual_ranks, held[held.size() - 2].range, held.back().range)) {
        const Held right = held.back();
        held.pop_back();
        const void* const inputs[] = {held.back().values, right.values};
        void* const total = chunks[held.size()].data();
        fold_chunk(wide, inputs, total, length, 1, 1);
        held.back() = {{held.back().range.begin, right.range.end}, total};
      }
    }
    void* const scaled = is_half(dtype) ? chunks.front().data() : moved(to, begin, dtype);
    fold_chunk(wide, {&held.front().values, 1}, scaled, length, 1, postscale);
    if (is_half(dtype)) narrow(dtype, static_cast<const float*>(scaled), moved(to, begin, dtype), length);
  }
}

double weighted_mean(std::span<const double> values, std::span<const double> weights) {
  double total = 0;
  std::vector<double> products;
  for (std::size_t i = 0; i < values.size(); ++i) {
    total += weights[i];
    products.push_back(weights[i] == 0 ? 0 : weights[i] * values[i]);
  }
  if (total == 0) return std::numeric_limits<double>::quiet_NaN();
  const std::function<double(VirtualRange)> fold = [&](VirtualRange range) {
    if (range.count() == 1) return products[static_cast<std::size_t>(range.begin)];
    const double left = fold({range.begin, middle_of(range)});
    return left + fold({middle_of(range), range.end});
  };
  return fold({0, static_cast<int>(values.size())}) / total;
}

// ---------------------------------------------------------------------------------------------------- a rank's part

/// One or two operations of a bucket, and the functions to be called after each.
class VirtualRanks::Exchange {
 public:
  std::unique_ptr<step::Pending> first, second;
  std::function<void()> between;  // starts the second
  std::function<void()> after;

  void advance() {
    if (!first) return;
    std::exchange(first, nullptr)->wait();
    if (between) between();
  }
  void wait() {
    advance();
    if (second) std::exchange(second, nullptr)->wait();
    if (after) std::exchange(after, nullptr)();
  }
};

VirtualRanks::VirtualRanks(int virtual_ranks, std::shared_ptr<step::Ranks> ranks)
    : count_(virtual_ranks), ranks_(std::move(ranks)) {
  if (ranks_->size() > count_) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: virtual_ranks={} on {} ranks, of which some would have none -- start at most {} "
          "ranks, or train anew with more virtual ranks",
          count_, ranks_->size(), count_);
  }
  block_ = block_of(count_, ranks_->size(), ranks_->rank());
  sums_in_order_ = sum_has_order_of_tree(count_, ranks_->hosts());
}

void VirtualRanks::lay_out(std::size_t buckets) {
  drop();
  sums_.assign(buckets, {});
  spare_.assign(buckets, {});
  sent_.assign(buckets, {});
  received_.assign(buckets, {});
}

// The memory of sums is used again in the next step.
void VirtualRanks::set_aside_sums() {
  for (std::size_t number = 0; number < sums_.size(); ++number) {
    for (Sum& sum : sums_[number])
      if (sum.memory) spare_[number].push_back(std::move(sum.memory));
    sums_[number].clear();
  }
  open_.clear();
}

void VirtualRanks::drop() {
  set_aside_sums();
  weights_.clear();
  losses_.clear();
  begun_ = complete_ = false;
}

void VirtualRanks::begin_step() {
  if (complete_) drop();
  begun_ = true;
}

void VirtualRanks::end_part(double weight) {
  const bool last = is_last();
  weights_.push_back(weight);
  if (!last) return;
  complete_ = true;
  begun_ = false;
  set_aside_sums();
}

// Number of sums that the part under way completes, one after the other.
std::size_t VirtualRanks::merges(const std::vector<Sum>& sums) const {
  VirtualRange own{due(), due() + 1};
  std::size_t number = 0;
  while (number < sums.size() && are_added(count_, sums[sums.size() - 1 - number].range, own)) {
    own.begin = sums[sums.size() - 1 - number].range.begin;
    ++number;
  }
  return number;
}

// Adds the part under way to the sums that it completes. `to`: memory for the result, in the bucket's type, if this
// completes the last sum; else null.
void VirtualRanks::fold_in(std::size_t number, const Bucket& bucket, double weight, void* to, double postscale) {
  std::vector<Sum>& sums = sums_[number];
  const DType dtype = bucket.dtype(), wide = accumulated_as(dtype);
  const auto count = static_cast<std::int64_t>(bucket.bytes() / size_of(dtype));
  const std::size_t added = merges(sums);
  const std::size_t first = sums.size() - added;
  if (added == 0) {
    std::shared_ptr<std::byte[]> memory;
    if (to == nullptr && !spare_[number].empty()) {
      memory = std::move(spare_[number].back());
      spare_[number].pop_back();
    } else if (to == nullptr) {
      memory.reset(new std::byte[static_cast<std::size_t>(count) * size_of(wide)]);
    }
    sums.push_back({{due(), due() + 1}, std::move(memory)});
  }
  void* const result = to != nullptr ? to : sums[first].memory.get();
  const bool narrows = to != nullptr && is_half(dtype);
  Chunk chunk;
  const std::int64_t at_once = added == 0 && !is_half(dtype) && weight != 0 ? count : kChunk;  // all in one pass
  for (std::int64_t begin = 0; begin < count; begin += at_once) {
    const std::int64_t length = std::min(at_once, count - begin);
    void* const last = narrows ? chunk.data() : moved(result, begin, to != nullptr ? dtype : wide);
    const void* value = moved<const void>(bucket.memory().data(), begin, dtype);
    if (weight == 0) {
      std::memset(chunk.data(), 0, sizeof chunk);
      value = chunk.data();
    } else if (is_half(dtype)) {
      widen(dtype, value, reinterpret_cast<float*>(chunk.data()), length);
      value = chunk.data();
    }
    const double scale = weight == 0 ? 1 : weight;
    if (added == 0) {
      fold_chunk(wide, {&value, 1}, last, length, scale, postscale);
    } else if (scale != 1) {
      fold_chunk(wide, {&value, 1}, chunk.data(), length, scale, 1);
      value = chunk.data();
    }
    for (std::size_t i = 0; i < added; ++i) {
      const void* const inputs[] = {moved<const void>(sums[sums.size() - 1 - i].memory.get(), begin, wide), value};
      const bool ends = i + 1 == added;
      void* const total = ends ? last : chunk.data();
      fold_chunk(wide, inputs, total, length, 1, ends ? postscale : 1);
      value = total;
    }
    if (narrows) narrow(dtype, reinterpret_cast<const float*>(chunk.data()), moved(to, begin, dtype), length);
  }
  for (; sums.size() > first + 1; sums.pop_back()) spare_[number].push_back(std::move(sums.back().memory));
  sums[first].range.end = due() + 1;
}

void VirtualRanks::add(std::size_t number, const Bucket& bucket, double weight) {
  fold_in(number, bucket, weight, nullptr, 1);
}

std::unique_ptr<step::Pending> VirtualRanks::exchange(std::size_t number, const Bucket& bucket, double weight,
                                                      double total) {
  // Shared, since the reducer owns a Pending, and `advance` needs the exchange, too.
  struct Shared final : step::Pending {
    explicit Shared(std::shared_ptr<Exchange> one) : exchange(std::move(one)) {}
    void wait() override { exchange->wait(); }
    void synchronize(const Device& /*stream*/) override { wait(); }
    std::optional<bool> finite() const override { return std::nullopt; }
    std::shared_ptr<Exchange> exchange;
  };
  const double postscale = total == 0 ? 1 : 1 / total;
  std::shared_ptr<Exchange> started;
  if (ranks_->size() == 1) {
    fold_in(number, bucket, weight, bucket.memory().data(), postscale);
    started = std::make_shared<Exchange>();
  } else if (!sums_in_order_) {
    fold_in(number, bucket, weight, nullptr, 1);
    started = exchange_slices(number, bucket, postscale);
  } else if (!is_half(bucket.dtype())) {
    // A weight of 1 in a block of one leaves the values as they are.
    if (weight != 1 || block_.count() > 1) fold_in(number, bucket, weight, bucket.memory().data(), 1);
    started = sum_over_ranks(bucket, bucket.memory(), postscale);
  } else {
    fold_in(number, bucket, weight, nullptr, 1);
    const std::size_t bytes = bucket.bytes() / size_of(bucket.dtype()) * sizeof(float);
    if (!sent_[number]) sent_[number] = ranks_->allocate(std::max<std::size_t>(bytes, 1));
    std::memcpy(sent_[number].data(), sums_[number].front().memory.get(), bytes);
    started = sum_over_ranks(bucket, sent_[number], postscale);
  }
  open_.push_back(started);
  return std::make_unique<Shared>(std::move(started));
}

std::shared_ptr<VirtualRanks::Exchange> VirtualRanks::sum_over_ranks(const Bucket& bucket, Memory wide,
                                                                     double postscale) {
  const DType dtype = bucket.dtype();
  const auto count = static_cast<std::int64_t>(bucket.bytes() / size_of(dtype));
  auto exchange = std::make_shared<Exchange>();
  exchange->first = ranks_->start(
      "all_reduce",
      [&](Communicator& comm) {
        return comm.all_reduce(Buffer(wide.data(), count, accumulated_as(dtype)), {.postscale = postscale});
      },
      std::make_shared<const Memory>(wide));
  if (is_half(dtype)) {
    exchange->after = [wide, memory = bucket.memory(), count, dtype] {
      narrow(dtype, static_cast<const float*>(wide.data()), memory.data(), count);
    };
  }
  return exchange;
}

// Each rank gets its slice of all partial sums, adds them in the order of the tree, and sends the average to all.
std::shared_ptr<VirtualRanks::Exchange> VirtualRanks::exchange_slices(std::size_t number, const Bucket& bucket,
                                                                      double postscale) {
  const DType dtype = bucket.dtype(), wide = accumulated_as(dtype);
  const auto rank = static_cast<std::size_t>(ranks_->rank());
  auto counts = std::make_shared<const std::vector<std::int64_t>>(
      divide(static_cast<std::int64_t>(bucket.bytes() / size_of(dtype)), ranks_->size(), dtype));
  const std::int64_t own = (*counts)[rank];
  std::vector<VirtualRange> ranges;
  std::vector<std::int64_t> sends, receives;
  for (int from = 0; from < ranks_->size(); ++from) {
    const std::vector<VirtualRange> theirs = subtrees_of(count_, block_of(count_, ranks_->size(), from));
    ranges.insert(ranges.end(), theirs.begin(), theirs.end());
    receives.push_back(static_cast<std::int64_t>(theirs.size()) * own);
    sends.push_back(static_cast<std::int64_t>(sums_[number].size()) * (*counts)[static_cast<std::size_t>(from)]);
  }
  const auto sent = std::accumulate(sends.begin(), sends.end(), std::int64_t{0});
  const auto received = std::accumulate(receives.begin(), receives.end(), std::int64_t{0});
  const auto bytes_of = [&](std::int64_t elements) {
    return std::max<std::size_t>(static_cast<std::size_t>(elements) * size_of(wide), 1);
  };
  if (!sent_[number]) sent_[number] = ranks_->allocate(bytes_of(sent));
  if (!received_[number]) received_[number] = ranks_->allocate(bytes_of(received));
  const Memory out = sent_[number], in = received_[number], average = bucket.memory();
  auto* to = static_cast<std::byte*>(out.data());
  std::int64_t begin = 0, own_begin = 0;
  for (std::size_t owner = 0; owner < counts->size(); ++owner) {
    if (owner == rank) own_begin = begin;
    const std::size_t bytes = static_cast<std::size_t>((*counts)[owner]) * size_of(wide);
    for (const Sum& sum : sums_[number]) {
      if (bytes > 0) std::memcpy(to, moved<const void>(sum.memory.get(), begin, wide), bytes);
      to += bytes;
    }
    begin += (*counts)[owner];
  }
  auto exchange = std::make_shared<Exchange>();
  exchange->first = ranks_->start(
      "all_to_all",
      [&](Communicator& comm) {
        return comm.all_to_all_v(ConstBuffer(out.data(), sent, wide), sends, Buffer(in.data(), received, wide),
                                 receives);
      },
      std::make_shared<const std::pair<Memory, Memory>>(out, in));
  exchange->between = [&one = *exchange, ranks = ranks_, virtual_ranks = count_, ranges = std::move(ranges), counts, in,
                       average, own, own_begin, total = begin, dtype, wide, postscale] {
    std::vector<PartialSum> sums;
    for (std::size_t i = 0; i < ranges.size(); ++i)
      sums.push_back({ranges[i], moved<const void>(in.data(), static_cast<std::int64_t>(i) * own, wide)});
    void* const slice = moved(average.data(), own_begin, dtype);
    if (own > 0) fold_partial_sums(virtual_ranks, sums, slice, own, dtype, postscale);
    one.second = ranks->start(
        "all_gather",
        [&](Communicator& comm) {
          return comm.all_gather_v(ConstBuffer(slice, own, dtype), Buffer(average.data(), total, dtype), *counts);
        },
        std::make_shared<const Memory>(average));
  };
  return exchange;
}

void VirtualRanks::advance() {
  for (const std::shared_ptr<Exchange>& exchange : open_) exchange->advance();
}

std::optional<double> VirtualRanks::mean_loss(double loss, std::optional<double> coming) {
  const std::size_t ended = weights_.size();
  if (!coming && ended == 0)
    raise(ErrorCode::InvalidArgument, "mean_loss: no virtual rank has had its forward -- call it after the forward");
  const std::size_t position = coming ? ended : ended - 1;
  if (losses_.size() != position) {
    raise(ErrorCode::InvalidArgument,
          "mean_loss: virtual rank {} has {} -- call it once for each virtual rank, after its forward",
          block_.begin + static_cast<int>(position),
          losses_.size() > position ? "its loss already" : "one before it that has none");
  }
  losses_.push_back(loss);
  if (static_cast<int>(losses_.size()) < block_.count()) return std::nullopt;
  const auto all = static_cast<std::size_t>(count_);
  std::vector<double> table(2 * all);  // values, then weights; each is nonzero on one rank only, so sums are exact
  for (std::size_t i = 0; i < losses_.size(); ++i) {
    const std::size_t at = static_cast<std::size_t>(block_.begin) + i;
    const double weight = i < ended ? weights_[i] : *coming;
    table[at] = weight == 0 ? 0 : losses_[i];
    table[all + at] = weight;
  }
  ranks_->run("all_reduce", table, [](Communicator& comm, auto span) { return comm.all_reduce(span); });
  return weighted_mean(std::span(table).first(all), std::span(table).subspan(all));
}

}  // namespace cohort::gradients
