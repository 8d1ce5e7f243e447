#include "comm/control/agreement.h"

#include "comm/control/operation.h"
#include "comm/kernels/fold.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace cohort::comm {
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
        differs(rank) || rank != reference ? reference : other};
  }
  const Kind kind = agreed.kind;
  const bool serves_joined = kind == Kind::AllReduce || kind == Kind::Broadcast || kind == Kind::Barrier;
  if (serves_joined || active.size() == everyone.size() || active.empty()) return std::nullopt;
  const int joined =
      *std::find_if(everyone.begin(), everyone.end(), [&](int which) { return of(which).kind == Kind::Joined; });
  return Disagreement{fmt::format("rank {} has joined (it has no more input), and {} needs something of every rank",
                                  joined, to_string(agreed)),
                      joined};
}

int Agreement::last_joined() const noexcept {
  const auto last = std::max_element(brought.begin(), brought.end(), [](const Descriptor& a, const Descriptor& b) {
    return std::pair(a.count, a.detail) < std::pair(b.count, b.detail);
  });
  return static_cast<int>(last - brought.begin());
}

Disagreement unequal_counts(int from, std::int64_t sent, int to, std::int64_t expected, int rank) {
  return {fmt::format("rank {} sends {} elements to rank {}, which expects {}", from, sent, to, expected),
          rank == from ? to : from};
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
  context.cause = std::move(disagreement.why);
  std::string text = fmt::format(
      "{} refused -- rank {} ({}), operation {} -- {} -- all ranks must call the same operations in the "
      "same order with the same shape and type",
      operation.substr(0, operation.find('(')), rank, host, number, context.cause);
  return Error(ErrorCode::Mismatch, std::move(text), std::move(context));
}

}  // namespace cohort::comm
