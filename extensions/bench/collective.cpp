#include "bench/collective.h"

#include "shared/run_options.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>

namespace cohort::app::bench {
namespace {

std::vector<std::int64_t> growing_parts(std::int64_t elements, int ranks) {
  std::vector<std::int64_t> parts;
  const std::int64_t squares = std::int64_t{ranks} * ranks;
  // Computes quotient and remainder separately, so that the product stays in range.
  const auto until = [&](std::int64_t rank) {
    return elements / squares * rank * rank + elements % squares * rank * rank / squares;
  };
  for (int rank = 0; rank < ranks; ++rank) parts.push_back(until(rank + 1) - until(rank));
  return parts;
}

std::vector<std::int64_t> rotated(const std::vector<std::int64_t>& parts, int by) {
  std::vector<std::int64_t> out(parts);
  std::rotate(out.begin(), out.begin() + by, out.end());
  return out;
}

}  // namespace

const std::vector<Traits>& all_traits() {
  static const std::vector<Traits> kTraits = {
      {Collective::AllReduce, "all_reduce", true, false, true, true, true},
      {Collective::Reduce, "reduce", true, true, true, true, false},
      {Collective::Broadcast, "broadcast", false, true, true, false, false},
      {Collective::AllGather, "all_gather", false, false, true, true, true},
      {Collective::AllGatherV, "all_gather_v", false, false, true, true, true},
      {Collective::Gather, "gather", false, true, true, true, false},
      {Collective::Scatter, "scatter", false, true, true, true, false},
      {Collective::ReduceScatter, "reduce_scatter", true, false, true, true, true},
      {Collective::ReduceScatterV, "reduce_scatter_v", true, false, true, true, true},
      {Collective::AllToAll, "all_to_all", false, false, false, true, true},
      {Collective::AllToAllV, "all_to_all_v", false, false, false, true, true},
      {Collective::PingPong, "send_recv", false, false, false, true, true},
      {Collective::Exchange, "sendrecv", false, false, false, true, true},
      {Collective::Barrier, "barrier", false, false, true, false, true},
  };
  return kTraits;
}

const Traits& traits_of(Collective collective) { return all_traits()[static_cast<std::size_t>(collective)]; }

Shape shape_of(Collective collective, std::size_t bytes, DType dtype, int rank, int ranks) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  const auto all = static_cast<std::int64_t>(bytes) / element;
  const auto size = static_cast<std::size_t>(ranks);
  const auto own = static_cast<std::size_t>(rank);
  Shape shape;
  const auto with_parts = [&](std::vector<std::int64_t> parts) {
    shape.count = *std::max_element(parts.begin(), parts.end());
    for (std::size_t part = 0; part < own; ++part) shape.own_part += parts[part];
    shape.bytes = 0;
    for (const std::int64_t part : parts) shape.bytes += static_cast<std::size_t>(part * element);
    shape.input_parts = shape.output_parts = std::move(parts);
  };
  const std::vector<std::int64_t> equal(size, all / ranks);
  switch (collective) {
    case Collective::AllReduce:
    case Collective::Reduce:
    case Collective::Broadcast:
    case Collective::PingPong:
    case Collective::Exchange:
      shape.count = shape.input = shape.output = all;
      shape.bytes = static_cast<std::size_t>(all * element);
      return shape;
    case Collective::Barrier: return shape;
    case Collective::AllGather:
    case Collective::Gather:
    case Collective::AllGatherV:
      with_parts(collective == Collective::AllGatherV ? growing_parts(all, ranks) : equal);
      shape.input = shape.input_parts[own];
      shape.output = static_cast<std::int64_t>(shape.bytes) / element;
      return shape;
    case Collective::Scatter:
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV:
      with_parts(collective == Collective::ReduceScatterV ? growing_parts(all, ranks) : equal);
      shape.input = static_cast<std::int64_t>(shape.bytes) / element;
      shape.output = shape.input_parts[own];
      return shape;
    case Collective::AllToAll:
    case Collective::AllToAllV:
      // Rank a's part for rank b has size number a + b, so that each rank sends and receives every size once.
      with_parts(collective == Collective::AllToAllV ? rotated(growing_parts(all, ranks), rank) : equal);
      shape.input = shape.output = static_cast<std::int64_t>(shape.bytes) / element;
      return shape;
  }
  return shape;
}

double bus_factor(Collective collective, int ranks) {
  const double n = ranks;
  switch (collective) {
    case Collective::AllReduce: return 2 * (n - 1) / n;
    case Collective::AllGather:
    case Collective::AllGatherV:
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV:
    case Collective::Gather:
    case Collective::Scatter:
    case Collective::AllToAll:
    case Collective::AllToAllV: return (n - 1) / n;
    default: return 1;
  }
}

double touched_bytes(Collective collective, std::size_t bytes, int ranks, bool in_place) {
  const auto n = static_cast<double>(bytes);
  const double p = ranks;
  const double moved = in_place ? (p - 1) / p : 1;  // data that is in its place already is not moved
  switch (collective) {
    case Collective::AllReduce: return 2 * n;               // p n read, p n written
    case Collective::Reduce: return n + n / p;              // p n read, n written
    case Collective::Broadcast: return n;                   // n read, (p - 1) n written
    case Collective::AllGather:                             // n read, p n written
    case Collective::AllGatherV: return n / p + n * moved;  //
    case Collective::Gather:                                // n read, n written
    case Collective::Scatter: return 2 * n * moved / p;     //
    case Collective::ReduceScatter:                         // p n read, n written
    case Collective::ReduceScatterV: return n + n / p;      //
    case Collective::AllToAll:                              // p n read, p n written
    case Collective::AllToAllV: return 2 * n;               //
    case Collective::PingPong: return n;                    // n read, n written, by two
    case Collective::Exchange: return 2 * n;                // twice as much as PingPong
    case Collective::Barrier: return 0;
  }
  return 0;
}

namespace {

constexpr std::size_t kLargestSize = std::size_t{1} << 36;
constexpr std::size_t kMostSizes = 1000;
constexpr int kMostRanks = 1024;

template <class Enum>
std::vector<std::string> names_of(int count) {
  std::vector<std::string> names;
  for (int i = 0; i < count; ++i) names.emplace_back(to_string(static_cast<Enum>(i)));
  return names;
}

/// Parses a list of names with commas; "all" means every name.
template <class Enum>
Result<std::vector<Enum>> parse_names(const char* option, const std::string& text,
                                      const std::vector<std::string>& names) {
  std::vector<Enum> out;
  for (const std::string& word : split(text)) {
    if (word == "all") {
      out.clear();
      for (std::size_t i = 0; i < names.size(); ++i) out.push_back(static_cast<Enum>(i));
      return out;
    }
    const auto found = std::find(names.begin(), names.end(), word);
    if (found == names.end()) {
      return fail(ErrorCode::InvalidArgument, "{} '{}': choose from {}, or all", option, word, fmt::join(names, ", "));
    }
    out.push_back(static_cast<Enum>(found - names.begin()));
  }
  return out;
}

Result<std::vector<std::size_t>> parse_sizes(const Words& words) {
  std::vector<std::size_t> sizes;
  if (!words.sizes.empty()) {
    for (const std::string& word : split(words.sizes)) {
      const auto size = parse_size(word);
      if (!size) return tl::unexpected(size.error());
      sizes.push_back(*size);
    }
    return sizes;
  }
  const auto least = parse_size(words.least);
  const auto most = parse_size(words.most);
  if (!least) return tl::unexpected(least.error());
  if (!most) return tl::unexpected(most.error());
  char* end = nullptr;
  const double factor = std::strtod(words.factor.c_str(), &end);
  if (words.factor.empty() || *end != '\0' || !(factor > 1) || factor > 1e6) {
    return fail(ErrorCode::InvalidArgument, "-f {}: sizes have to grow; a number above 1 is wanted", words.factor);
  }
  if (*most < *least) {
    return fail(ErrorCode::InvalidArgument, "-e {} is less than -b {}: no size lies between", words.most, words.least);
  }
  for (std::size_t size = *least; size <= *most;) {
    sizes.push_back(size);
    if (sizes.size() > kMostSizes) {
      return fail(ErrorCode::InvalidArgument, "-f {} makes more than {} sizes -- choose a larger factor", words.factor,
                  kMostSizes);
    }
    size = std::max(size + 1, static_cast<std::size_t>(std::llround(static_cast<double>(size) * factor)));
  }
  return sizes;
}

Result<std::vector<Collective>> parse_collectives(const std::vector<std::string>& words) {
  std::vector<std::string> names;
  for (const Traits& traits : all_traits()) names.emplace_back(traits.name);
  return parse_names<Collective>("collective", words.empty() ? "all_reduce" : fmt::format("{}", fmt::join(words, ",")),
                                 names);
}

/// Moves the plan's buffers to GPUs for `--device cuda`.
Result<void> put_on_gpus(const Words& words, Plan& plan) {
  if (words.device != "cpu" && words.device != "cuda")
    return fail(ErrorCode::InvalidArgument, "--device '{}': choose from cpu, cuda", words.device);
  if (words.device == "cpu") {
    if (words.gpu_sums.empty()) return {};
    return fail(ErrorCode::InvalidArgument, "--gpu-sums {}: it is of GPUs' memory -- add --device cuda",
                words.gpu_sums);
  }
  if (words.memory != "arena") {
    return fail(ErrorCode::InvalidArgument, "--memory {}: with --device cuda the memory is the GPU's -- leave it out",
                words.memory);
  }
  if (plan.state == State::Cold) {
    return fail(ErrorCode::InvalidArgument,
                "--state cold: the caches of a GPU cannot be emptied from here -- hot and touched are to be had");
  }
  if (words.gpu_sums == "fast") {
    plan.gpu_sums = GpuSums::Fast;
  } else if (words.gpu_sums == "exact") {
    plan.gpu_sums = GpuSums::Exact;
  } else if (!words.gpu_sums.empty()) {
    return fail(ErrorCode::InvalidArgument, "--gpu-sums '{}': choose from fast, exact", words.gpu_sums);
  }
  plan.memories = {MemoryKind::Cuda};
  return {};
}

}  // namespace

Result<std::size_t> parse_size(const std::string& text) {
  std::string digits = text;
  int shift = 0;
  if (!digits.empty()) {
    switch (std::toupper(static_cast<unsigned char>(digits.back()))) {
      case 'K': shift = 10; break;
      case 'M': shift = 20; break;
      case 'G': shift = 30; break;
      default: break;
    }
    if (shift > 0) digits.pop_back();
  }
  const auto number = parse_integer<std::size_t>(digits);
  if (!number || *number == 0 || *number > kLargestSize >> shift) {
    return fail(ErrorCode::InvalidArgument,
                "'{}' is not a size: a number of bytes from 1 to 64G is wanted, such as 8, 4K or 64M", text);
  }
  return *number << shift;
}

Result<Plan> plan_of(const Words& words) {
  Plan plan;
  std::vector<State> states;
  std::optional<Error> error;  // the first error
  const auto take = [&error](auto parsed, auto& to) {
    if (parsed)
      to = *std::move(parsed);
    else if (!error)
      error = parsed.error();
  };
  take(parse_collectives(words.collectives), plan.collectives);
  take(parse_sizes(words), plan.sizes);
  take(parse_names<DType>("-d", words.dtypes, names_of<DType>(kDTypeCount)), plan.dtypes);
  take(parse_names<ReduceOp>("-o", words.ops, names_of<ReduceOp>(kReduceOpCount)), plan.ops);
  take(parse_names<MemoryKind>("--memory", words.memory == "both" ? "all" : words.memory, {"arena", "heap"}),
       plan.memories);
  take(parse_names<State>("--state", words.state, {"hot", "touched", "cold"}), states);
  if (error) return tl::unexpected(*error);
  if (states.size() != 1)
    return fail(ErrorCode::InvalidArgument, "--state {}: one of hot, touched and cold is wanted", words.state);
  plan.state = states.front();
  if (auto put = put_on_gpus(words, plan); !put) return tl::unexpected(put.error());

  const bool reduces = std::any_of(plan.collectives.begin(), plan.collectives.end(),
                                   [](Collective collective) { return traits_of(collective).reduces; });
  for (const DType dtype : plan.dtypes) {
    const bool some = std::any_of(plan.ops.begin(), plan.ops.end(), [&](ReduceOp op) { return supports(dtype, op); });
    if (reduces && !some) {
      return fail(ErrorCode::InvalidArgument, "-d {} -o {}: there is no such reduction of this type", to_string(dtype),
                  words.ops);
    }
  }
  return plan;
}

Result<std::vector<int>> parse_ranks(const std::string& text) {
  auto ranks = numbers_in(text, kMostRanks);
  if (ranks) return *std::move(ranks);
  return fail(ErrorCode::InvalidArgument, "-np {}: numbers of ranks from 1 to {} are wanted, such as 4 or 2,4,8", text,
              kMostRanks);
}

std::string_view to_string(MemoryKind kind) {
  switch (kind) {
    case MemoryKind::Arena: return "arena";
    case MemoryKind::Heap: return "heap";
    case MemoryKind::Cuda: return "cuda";
  }
  return "arena";
}

std::string_view to_string(State state) {
  switch (state) {
    case State::Hot: return "hot";
    case State::Touched: return "touched";
    case State::Cold: return "cold";
  }
  return "hot";
}

}  // namespace cohort::app::bench
