#include "comm/engine/agreement.h"

#include "comm/kernels/fold.h"

#include <cohort/dtype.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <utility>

namespace cohort::comm {
namespace {

// Mixes bits by the finalizer of SplitMix64 (Steele, Lea, Flood 2014).
std::uint64_t mix(std::uint64_t x) noexcept {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

std::uint64_t digest(std::span<const std::int64_t> values) noexcept {
  std::uint64_t result = values.size();
  for (const std::int64_t value : values)
    result = mix(result + 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(value));
  return result;
}

std::string called(const Descriptor& d) {
  const std::string_view name = name_of(d.kind);
  const std::string_view type = cohort::to_string(d.dtype);
  // A tag has only 32 bits, a digest 64.
  const std::string grouped = d.detail == 0                ? std::string()
                              : d.detail == kComparisonTag ? ", to compare models and options"
                              : d.detail >> 32 == 0        ? fmt::format(", tag {:#x}", d.detail)
                                                           : fmt::format(", grouped as #{:08x}", d.detail >> 32);
  std::string scales;
  if (d.weighted) scales += ", weighted";
  if (d.wire_format != 0)
    scales += fmt::format(", {} between hosts", cohort::to_string(static_cast<WireFormat>(d.wire_format)));
  if (d.prescale != 1) scales += fmt::format(", prescale {}", d.prescale);
  if (d.postscale != 1) scales += fmt::format(", postscale {}", d.postscale);
  switch (d.kind) {
    case Kind::AllReduce:
    case Kind::ReduceScatter:
      return fmt::format("{}({}[{}], {}{}{})", name, type, d.count, cohort::to_string(d.op), scales, grouped);
    case Kind::Reduce:
      return fmt::format("{}({}[{}], {}{}, root {})", name, type, d.count, cohort::to_string(d.op), scales, d.root);
    case Kind::ReduceScatterV:
      return fmt::format("{}({}[{}], {}{}, counts #{:08x})", name, type, d.count, cohort::to_string(d.op), scales,
                         d.detail >> 32);
    case Kind::AllGatherV: return fmt::format("{}({}[{}], counts #{:08x})", name, type, d.count, d.detail >> 32);
    case Kind::GatherV:
    case Kind::ScatterV:
      return fmt::format("{}({}[{}], root {}, counts #{:08x})", name, type, d.count, d.root, d.detail >> 32);
    case Kind::AllToAllV: return fmt::format("{}({})", name, type);
    case Kind::AllGather:
    case Kind::AllToAll: return fmt::format("{}({}[{}]{})", name, type, d.count, grouped);
    case Kind::Broadcast:
    case Kind::Gather:
    case Kind::Scatter: return fmt::format("{}({}[{}], root {}{})", name, type, d.count, d.root, grouped);
    case Kind::Split: return d.detail == 0 ? "split()" : fmt::format("group(of ranks #{:08x})", d.detail >> 32);
    default: return fmt::format("{}()", name);
  }
}

}  // namespace

Descriptor describe(const Request& request) noexcept {
  Descriptor own;
  own.kind = request.kind;
  own.dtype = request.dtype;
  own.op = request.op;
  own.weighted = request.weighted ? 1 : 0;
  own.wire_format = static_cast<std::uint8_t>(request.wire_format) & 7;
  own.check_finite = request.finite_check ? 1 : 0;
  own.memory = static_cast<std::uint8_t>(request.memory) & 3;
  own.round = request.round != nullptr ? 1 : 0;
  own.root = request.root;
  own.weight = request.weight;
  own.prescale = request.prescale;
  own.postscale = request.postscale;
  switch (request.kind) {
    case Kind::Reduce:
    case Kind::Gather:
    case Kind::AllGather:
    case Kind::AllToAll: own.count = request.input_count; break;
    case Kind::Split:
      own.count = request.input_count;
      if (request.counts) own.detail = digest(request.counts->input);  // the ranks of a group given as a list
      break;
    case Kind::AllReduce:
    case Kind::Broadcast:
      own.count = request.output_count;
      own.detail = static_cast<std::uint32_t>(request.tag);
      if (request.counts) own.detail = digest(request.counts->input);  // counts of buffers carried out together
      break;
    case Kind::ReduceScatterV:
      own.count = request.input_count;
      own.detail = digest(request.counts->input);
      break;
    case Kind::AllGatherV:
      own.count = request.output_count;
      own.detail = digest(request.counts->input);
      break;
    case Kind::GatherV:
    case Kind::ScatterV:  // only the root has the whole buffer
      own.count = std::accumulate(request.counts->input.begin(), request.counts->input.end(), std::int64_t{0});
      own.detail = digest(request.counts->input);
      break;
    case Kind::AllToAllV: break;  // every rank has its own counts; they are compared as a matrix
    default: own.count = request.output_count; break;
  }
  if (request.group != 0) own.detail = mix(own.detail + request.group);
  return own;
}

Request request_to_serve(const Descriptor& agreed) noexcept {
  Request request;
  request.kind = agreed.kind;
  request.dtype = agreed.dtype;
  request.op = agreed.op;
  request.weighted = agreed.weighted != 0;
  request.wire_format = static_cast<WireFormat>(agreed.wire_format);
  request.prescale = agreed.prescale;
  request.postscale = agreed.postscale;
  request.root = agreed.root;
  request.input_count = request.output_count = agreed.count;
  return request;
}

std::uint64_t fingerprint_of(const Descriptor& d) noexcept {
  const std::uint64_t what = static_cast<std::uint64_t>(d.kind) | static_cast<std::uint64_t>(d.dtype) << 8 |
                             static_cast<std::uint64_t>(d.op) << 16 | static_cast<std::uint64_t>(d.weighted) << 24 |
                             static_cast<std::uint64_t>(d.wire_format) << 25 |
                             static_cast<std::uint64_t>(d.memory) << 28 | static_cast<std::uint64_t>(d.round) << 30 |
                             static_cast<std::uint64_t>(static_cast<std::uint32_t>(d.root)) << 32;
  std::uint64_t result = mix(what * 0x9E3779B97F4A7C15ull + static_cast<std::uint64_t>(d.count));
  if (d.detail != 0) result = mix(result + d.detail);
  if (d.prescale != 1 || d.postscale != 1) {
    result = mix(result + std::bit_cast<std::uint64_t>(d.prescale));
    result = mix(result + std::bit_cast<std::uint64_t>(d.postscale));
  }
  if (d.weight != 1) result = mix(result + std::bit_cast<std::uint64_t>(d.weight));
  return result;
}

std::uint64_t group_digest(std::span<const Request> requests) noexcept {
  std::uint64_t result = requests.size();
  for (const Request& request : requests) {
    Descriptor each = describe(request);
    each.weight = 1;  // ranks of a group may have different weights
    result = mix(result + 0x9E3779B97F4A7C15ull + fingerprint_of(each));
  }
  return result == 0 ? 1 : result;
}

bool agree(const Descriptor& a, const Descriptor& b) noexcept {
  return a.kind == b.kind && a.dtype == b.dtype && a.op == b.op && a.weighted == b.weighted &&
         a.wire_format == b.wire_format && a.memory == b.memory && a.round == b.round && a.root == b.root &&
         a.count == b.count && a.detail == b.detail && a.prescale == b.prescale && a.postscale == b.postscale;
}

bool are_uniform(const Descriptor& a, const Descriptor& b) noexcept {
  return a.kind != Kind::Joined && a.weight > 0 && a.weight == b.weight && agree(a, b);
}

std::string to_string(const Descriptor& d) { return called(d).append(name_of(static_cast<MemoryKind>(d.memory))); }

std::size_t inline_bytes(const Request& request, int ranks) noexcept {
  const std::size_t element = size_of(request.dtype);
  switch (request.kind) {
    case Kind::Scatter: {  // only the root has the input
      const std::size_t part = request.output_bytes();
      const std::size_t most = std::numeric_limits<std::size_t>::max() / static_cast<std::size_t>(ranks);
      return part > most ? most : part * static_cast<std::size_t>(ranks);
    }
    case Kind::ScatterV: {
      const auto& counts = request.counts->input;
      return static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})) * element;
    }
    case Kind::AllGatherV:
    case Kind::GatherV: {
      const auto& counts = request.counts->input;
      return static_cast<std::size_t>(*std::max_element(counts.begin(), counts.end())) * element;
    }
    case Kind::AllToAllV: return 0;  // sizes differ among ranks; the inline memory is used for the counts
    case Kind::Barrier: return 0;
    default: return request.input_bytes();
  }
}

namespace {

std::vector<int> first(int ranks) {
  std::vector<int> all(static_cast<std::size_t>(ranks));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

}  // namespace

Agreement::Agreement(int ranks) : brought(static_cast<std::size_t>(ranks)), everyone(first(ranks)) {}

void Agreement::settle_on(const Descriptor& own) {
  uniform = true;
  agreed = own;
  root = own.root;
  if (active.size() != everyone.size()) active = everyone;
}

void Agreement::settle() {
  uniform = false;
  active.clear();
  agreed = Descriptor{};
  agreed.kind = Kind::Joined;
  bool asked = false;
  for (const int rank : everyone) {
    const Descriptor& own = of(rank);
    if (own.kind == Kind::Joined) continue;
    asked = asked || own.check_finite != 0;
    if (active.empty()) agreed = own;
    active.push_back(rank);
  }
  agreed.check_finite = asked ? 1 : 0;
  const auto found = std::find(active.begin(), active.end(), agreed.root);
  if (!active.empty()) root = found != active.end() ? *found : active.front();
}

std::optional<Disagreement> Agreement::disagreement(int rank, const std::function<std::string(int)>& where) const {
  if (uniform) return std::nullopt;
  const auto differs = [&](int which) { return !agree(of(which), agreed); };
  if (const auto differing = std::count_if(active.begin(), active.end(), differs); differing > 0) {
    const int other = *std::find_if(active.begin(), active.end(), differs);
    const int reference = active.front();
    return Disagreement{
        fmt::format("rank {} brought {}{}, rank {} brought {}{}{}", other, to_string(of(other)), where(other),
                    reference, to_string(agreed), where(reference),
                    differing > 1 ? fmt::format(" ({} ranks differ from rank {})", differing, reference) : ""),
        differs(rank) || rank != reference ? reference : other, std::ranges::all_of(active, [this](int which) {
          const Kind kind = of(which).kind;
          const std::uint64_t detail = of(which).detail;
          return (kind == Kind::AllReduce || kind == Kind::Broadcast) && detail != 0 && detail != kComparisonTag;
        })};
  }
  const Kind kind = agreed.kind;
  const bool serves_joined = kind == Kind::AllReduce || kind == Kind::Broadcast || kind == Kind::Barrier;
  if (serves_joined || active.size() == everyone.size() || active.empty()) return std::nullopt;
  const int joined =
      *std::find_if(everyone.begin(), everyone.end(), [&](int which) { return of(which).kind == Kind::Joined; });
  return Disagreement{fmt::format("rank {} has joined (it has no more input), and {} needs something of every rank",
                                  joined, to_string(agreed)),
                      joined, false};
}

int Agreement::last_joined() const noexcept {
  const auto last = std::max_element(brought.begin(), brought.end(), [](const Descriptor& a, const Descriptor& b) {
    return std::pair(a.count, a.detail) < std::pair(b.count, b.detail);
  });
  return static_cast<int>(last - brought.begin());
}

Disagreement unequal_counts(int from, std::int64_t sent, int to, std::int64_t expected, int rank) {
  return {fmt::format("rank {} sends {} elements to rank {}, which expects {}", from, sent, to, expected),
          rank == from ? to : from, false};
}

Round round_of(const Agreement& agreement) {
  Round round;
  round.everyone = agreement.active.size() == agreement.everyone.size();
  round.contributors = agreement.active;
  if (agreement.uniform || agreement.agreed.weighted == 0) return round;
  std::vector<double> weights;
  for (const int rank : agreement.active) weights.push_back(agreement.of(rank).weight);
  const Weighting weighting = weigh(weights);
  if (weighting.fractions.empty() && weighting.members.size() == agreement.everyone.size()) return round;
  round.contributors.clear();
  for (const int member : weighting.members)
    round.contributors.push_back(agreement.active[static_cast<std::size_t>(member)]);
  round.fractions = weighting.fractions;
  round.shares.assign(agreement.everyone.size(), 0);
  for (std::size_t i = 0; i < weighting.members.size(); ++i) {
    const int rank = agreement.active[static_cast<std::size_t>(weighting.members[i])];
    round.shares[static_cast<std::size_t>(rank)] =
        weighting.fractions.empty() ? 1.0 / static_cast<double>(weighting.members.size()) : weighting.fractions[i];
  }
  return round;
}

Error refusal(const std::string& operation, int rank, const std::string& host, std::uint64_t number,
              Disagreement disagreement) {
  ErrorContext context;
  context.rank = rank;
  context.host = host;
  context.peer = disagreement.peer;
  context.operation = operation;
  context.sequence = number;
  context.tagged = disagreement.tagged;
  context.cause = std::move(disagreement.why);
  std::string text = fmt::format(
      "{} refused -- rank {} ({}), operation {} -- {} -- all ranks must call the same operations in the "
      "same order with the same shape and type",
      operation.substr(0, operation.find('(')), rank, host, number, context.cause);
  return Error(ErrorCode::Mismatch, std::move(text), std::move(context));
}

void Contributors::set(const Agreement& agreement) {
  const Descriptor& agreed = agreement.agreed;
  scales_.clear();
  if (agreed.weighted != 0 && !agreement.uniform) {
    weights_.clear();
    for (const int rank : agreement.active) weights_.push_back(agreement.of(rank).weight);
    weigh(weights_, weighting_);
    ranks_.clear();
    for (const int member : weighting_.members) ranks_.push_back(agreement.active[static_cast<std::size_t>(member)]);
    scales_ = weighting_.fractions;
  } else {
    ranks_ = agreement.active;
  }
  divisor_ = scales_.empty() ? std::max<std::int64_t>(count(), 1) : 1;  // fractions add up to 1 and need no divisor
  if (agreed.prescale != 1 && is_scalable(agreed.dtype)) {
    scales_.resize(ranks_.size(), 1);
    for (double& scale : scales_) scale *= agreed.prescale;
  }
}

}  // namespace cohort::comm
