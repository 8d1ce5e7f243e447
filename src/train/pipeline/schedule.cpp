#include "train/pipeline/schedule.h"

#include "base/result.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <map>
#include <tuple>
#include <utility>

namespace cohort::pipeline {

std::string_view to_string(Schedule schedule) noexcept {
  constexpr std::array<std::string_view, 4> names = {"GPipe", "1F1B", "interleaved 1F1B", "zero bubble"};
  return names.at(static_cast<std::size_t>(schedule));
}

std::string_view to_string(Kind kind) noexcept {
  constexpr std::array<std::string_view, 4> names = {"forward", "backward", "backward of the input",
                                                     "backward of the parameters"};
  return names.at(static_cast<std::size_t>(kind));
}

void check(const Layout& layout) {
  if (layout.ranks < 1 || layout.micro_batches < 1 || layout.chunks < 1) {
    raise(ErrorCode::InvalidArgument, "pipeline of {} ranks, {} micro-batches, {} chunks -- each is 1 or more",
          layout.ranks, layout.micro_batches, layout.chunks);
  }
  const bool interleaved = layout.schedule == Schedule::Interleaved;
  if (layout.chunks > 1 && !interleaved) {
    raise(ErrorCode::InvalidArgument,
          "pipeline: {} chunks with schedule {}, which has one stage for each rank -- use Interleaved", layout.chunks,
          to_string(layout.schedule));
  }
  if (interleaved && layout.micro_batches % layout.ranks != 0) {
    raise(ErrorCode::InvalidArgument,
          "pipeline: {} micro-batches over {} ranks -- with Interleaved their number is a multiple of the ranks'",
          layout.micro_batches, layout.ranks);
  }
}

namespace {

/// Returns the actions of one kind in order: the rank's stages in turn, each with `round` micro-batches.
std::vector<Action> in_order(const Layout& layout, int rank, Kind kind) {
  std::vector<Action> actions;
  const int round = layout.chunks > 1 ? layout.ranks : layout.micro_batches;
  for (int first = 0; first < layout.micro_batches; first += round) {
    for (int i = 0; i < layout.chunks; ++i) {
      const int chunk = kind == Kind::Forward ? i : layout.chunks - 1 - i;
      for (int m = first; m < std::min(first + round, layout.micro_batches); ++m) {
        actions.push_back({kind, chunk * layout.ranks + rank, m});
      }
    }
  }
  return actions;
}

/// Returns the number of forwards before the first backward, not counting the one right before it.
int warm_up(const Layout& layout, int rank) {
  const int later = layout.ranks - rank - 1;  // ranks that a micro-batch passes before its backward returns
  const int all = layout.micro_batches * layout.chunks;
  switch (layout.schedule) {
    case Schedule::GPipe: return all;
    case Schedule::OneFOneB:
    case Schedule::ZeroBubble: return std::min(all, later);
    case Schedule::Interleaved: return std::min(all, (layout.chunks - 1) * layout.ranks + 2 * later);
  }
  return all;
}

}  // namespace

std::vector<Action> forwards_of(const Layout& layout, int rank) { return in_order(layout, rank, Kind::Forward); }

std::vector<Action> actions_of(const Layout& layout, int rank) {
  const bool split = layout.schedule == Schedule::ZeroBubble;
  const std::vector<Action> forwards = forwards_of(layout, rank);
  const std::vector<Action> backwards = in_order(layout, rank, split ? Kind::BackwardInput : Kind::Backward);
  auto forward = forwards.begin();
  std::vector<Action> actions;
  for (int i = 0; i < warm_up(layout, rank); ++i) actions.push_back(*forward++);
  // The backwards of parameters are delayed by as many micro-batches as there are ranks before this one: those ranks
  // have their gaps at the end, and less memory left than this rank.
  auto weights = backwards.begin();
  const auto behind = static_cast<std::ptrdiff_t>(rank);
  const auto weight = [&] {
    actions.push_back(*weights++);
    actions.back().kind = Kind::BackwardWeight;
  };
  for (auto backward = backwards.begin(); backward != backwards.end(); ++backward) {
    if (forward != forwards.end()) actions.push_back(*forward++);
    actions.push_back(*backward);
    if (split && backward - weights >= behind) weight();
  }
  while (split && weights != backwards.end()) weight();
  return actions;
}

int most_activations(const Layout& layout, int rank) {
  const int all = layout.micro_batches * layout.chunks;
  if (layout.schedule == Schedule::ZeroBubble) return std::min(all, layout.ranks);
  return std::min(all, warm_up(layout, rank) + 1);
}

Played play(const std::vector<std::vector<Action>>& ranks, int stages, const Duration& duration,
            const Duration& delay) {
  std::map<std::tuple<bool, int, int>, double> ended;  // (forward, stage, micro-batch)
  std::vector<std::size_t> next(ranks.size(), 0);
  std::vector<double> now(ranks.size(), 0);
  Played played;
  played.busy.assign(ranks.size(), 0);
  // Returns when the action may begin; below 0 if an action that it needs has not happened.
  const auto begin_of = [&](int rank, const Action& action) {
    double begin = now[static_cast<std::size_t>(rank)];
    const auto after = [&](bool forward, int stage, double late) {
      const auto found = ended.find({forward, stage, action.micro_batch});
      begin = found == ended.end() || begin < 0 ? -1 : std::max(begin, found->second + late);
    };
    const auto message = [&](bool forward, int stage) { after(forward, stage, delay ? delay(rank, action) : 0); };
    const bool forward = action.kind == Kind::Forward;
    if (forward && action.stage > 0) message(true, action.stage - 1);
    if (!forward) after(action.kind != Kind::BackwardWeight, action.stage, 0);
    if ((action.kind == Kind::Backward || action.kind == Kind::BackwardInput) && action.stage + 1 < stages) {
      message(false, action.stage + 1);
    }
    return begin;
  };
  for (bool goes_on = true; goes_on;) {
    goes_on = false;
    for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
      while (next[rank] < ranks[rank].size()) {
        const Action& action = ranks[rank][next[rank]];
        const double begin = begin_of(static_cast<int>(rank), action);
        if (begin < 0) break;
        const double takes = duration(static_cast<int>(rank), action);
        now[rank] = begin + takes;
        played.busy[rank] += takes;
        played.end = std::max(played.end, now[rank]);
        if (action.kind != Kind::BackwardWeight) {
          ended[{action.kind == Kind::Forward, action.stage, action.micro_batch}] = now[rank];
        }
        ++next[rank];
        goes_on = true;
      }
    }
  }
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) played.whole &= next[rank] == ranks[rank].size();
  return played;
}

Expectation expect(const Layout& layout, std::span<const StageCost> stages) {
  check(layout);
  if (stages.size() != static_cast<std::size_t>(layout.stages())) {
    raise(ErrorCode::InvalidArgument, "pipeline of {} stages, and costs of {}", layout.stages(), stages.size());
  }
  std::vector<std::vector<Action>> ranks;
  for (int rank = 0; rank < layout.ranks; ++rank) ranks.push_back(actions_of(layout, rank));
  const Played played = play(ranks, layout.stages(), [&](int, const Action& action) {
    const StageCost& cost = stages[static_cast<std::size_t>(action.stage)];
    switch (action.kind) {
      case Kind::Forward: return cost.forward;
      case Kind::Backward: return cost.input + cost.weight;
      case Kind::BackwardInput: return cost.input;
      case Kind::BackwardWeight: return cost.weight;
    }
    return 0.0;
  });
  double busy = 0;
  for (const double of_rank : played.busy) busy += of_rank;
  return {.time = played.end, .bubble = played.end > 0 ? 1 - busy / (layout.ranks * played.end) : 0};
}

namespace {

/// Scales the costs to at most 1, since sums and squares of the largest numbers would not be finite. The factor is a
/// power of two, so nothing is rounded. If all costs are 0, all layers count the same.
std::vector<double> scaled(std::span<const double> costs) {
  int exponent = 0;
  const double largest = costs.empty() ? 0 : *std::max_element(costs.begin(), costs.end());
  if (!(largest > 0)) return std::vector<double>(costs.size(), 1);
  std::frexp(largest, &exponent);
  std::vector<double> all;
  for (const double cost : costs) all.push_back(std::ldexp(cost, -exponent));
  return all;
}

}  // namespace

std::vector<std::int64_t> cut_by_cost(std::span<const double> layers, int stages) {
  const std::size_t n = layers.size();
  if (stages < 1 || n < static_cast<std::size_t>(stages)) {
    raise(ErrorCode::InvalidArgument, "pipeline: {} layers cannot be cut into {} stages", n, stages);
  }
  std::vector<double> before(n + 1, 0);  // the cost of all earlier layers
  for (std::size_t i = 0; i < n; ++i) {
    if (!(layers[i] >= 0) || !std::isfinite(layers[i])) {
      raise(ErrorCode::InvalidArgument, "pipeline: layer {} costs {} -- a cost is finite, and 0 or more", i, layers[i]);
    }
  }
  const std::vector<double> costs = scaled(layers);
  for (std::size_t i = 0; i < n; ++i) before[i + 1] = before[i] + costs[i];
  // best[i]: the best split of the first i layers into the current number of stages, as (cost of the slowest stage, sum
  // of the stages' squared costs, lower if more even). from[s][i]: first layer of the last of its s + 1 stages.
  using Best = std::pair<double, double>;
  constexpr Best kNone{INFINITY, INFINITY};
  std::vector<Best> best(n + 1, kNone);
  best[0] = {0, 0};
  std::vector<std::vector<std::size_t>> from;
  for (int stage = 0; stage < stages; ++stage) {
    std::vector<Best> longer(n + 1, kNone);
    std::vector<std::size_t> begins(n + 1, 0);
    for (std::size_t end = 1; end <= n; ++end) {
      for (std::size_t begin = 0; begin < end; ++begin) {
        const double cost = before[end] - before[begin];
        const Best with = {std::max(best[begin].first, cost), best[begin].second + cost * cost};
        if (with < longer[end]) {
          longer[end] = with;
          begins[end] = begin;
        }
      }
    }
    best = std::move(longer);
    from.push_back(std::move(begins));
  }
  std::vector<std::int64_t> cuts;
  std::size_t end = n;
  for (std::size_t stage = from.size(); stage-- > 1;) {
    end = from[stage][end];
    cuts.insert(cuts.begin(), static_cast<std::int64_t>(end));
  }
  return cuts;
}

std::string describe(const Layout& layout, std::span<const double> layers, std::span<const std::int64_t> cuts) {
  const std::vector<double> costs = scaled(layers);
  std::vector<StageCost> stages;
  std::string text;
  double slowest = 0, sum = 0;
  for (std::size_t stage = 0; stage <= cuts.size(); ++stage) {
    const auto begin = stage == 0 ? 0 : static_cast<std::size_t>(cuts[stage - 1]);
    const auto end = stage == cuts.size() ? layers.size() : static_cast<std::size_t>(cuts[stage]);
    double cost = 0;
    for (std::size_t i = begin; i < end; ++i) cost += costs[i];
    stages.push_back({cost, cost, cost});
    slowest = std::max(slowest, cost);
    sum += cost;
    text += fmt::format("{}{}", stage > 0 ? " | " : "", begin);
    if (end > begin + 1) text += fmt::format("-{}", end - 1);
  }
  const double mean = sum / static_cast<double>(stages.size());
  return fmt::format(
      "pipeline: {} over {} ranks{}, {} micro-batches; layers {}\npipeline: the slowest stage takes {:.2f} of the "
      "mean, "
      "expected bubble {:.1f} %",
      to_string(layout.schedule), layout.ranks,
      layout.chunks > 1 ? fmt::format(" with {} chunks each", layout.chunks) : "", layout.micro_batches, text,
      mean > 0 ? slowest / mean : 1, 100 * expect(layout, stages).bubble);
}

}  // namespace cohort::pipeline
