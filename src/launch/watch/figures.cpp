#include "launch/watch/figures.h"

#include <algorithm>
#include <utility>

namespace cohort::launch {
namespace {

using std::chrono::seconds;

double between(Figures::Clock::time_point begin, Figures::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

/// Counters only grow; what a rank has written otherwise counts as nothing.
template <class Number>
double grown(Number from, Number to) {
  return to > from ? static_cast<double>(to) - static_cast<double>(from) : 0;
}

std::uint64_t waiting_in(const RankReport& report) {
  for (const GroupReport& group : report.groups) {
    if (!group.message.empty()) return group.message_number;
    if (group.waiting) return group.begun;
  }
  return report.named.ended;
}

std::string state_of(const RankReport& report) {
  if (report.state == 'T' || report.state == 't') return "stopped";
  if (report.preempted_by != 0) return "saving";
  return waits(report) ? "waiting" : "running";
}

double share(double part, double whole) { return whole > 0 ? std::clamp(part / whole, 0.0, 1.0) : 0; }

}  // namespace

void Figures::add_waits(Rank& rank, const RankReport& report, Clock::time_point now) {
  Waits waits{now, 0, report.exposed_ns};
  for (const GroupReport& group : report.groups) waits.waited_ns += group.waited_ns;
  // A group that was left takes its waiting along; and a program may have begun anew.
  if (!rank.waits.empty() &&
      (waits.waited_ns < rank.waits.back().waited_ns || waits.exposed_ns < rank.waits.back().exposed_ns))
    rank.waits.clear();
  const std::size_t count = rank.waits.size();
  if (count >= 2 && rank.waits[count - 1].at - rank.waits[count - 2].at < seconds(1)) rank.waits.pop_back();
  rank.waits.push_back(waits);
  while (rank.waits.size() > 2 && now - rank.waits[1].at >= kWindow) rank.waits.pop_front();
}

void Figures::add_steps(Rank& rank, const RankReport& report, Clock::time_point now) {
  const Steps steps{now, report.step, report.samples};
  if (!rank.steps.empty()) {
    if (report.step == rank.steps.back().step) return;
    if (report.step < rank.steps.back().step) rank.steps.clear();
  }
  const std::size_t count = rank.steps.size();
  if (count >= 2 && rank.steps[count - 1].at - rank.steps[count - 2].at < seconds(1)) rank.steps.pop_back();
  rank.steps.push_back(steps);
  while (rank.steps.size() > 2 && now - rank.steps[1].at >= kWindow) rank.steps.pop_front();
}

void Figures::report(const RankReport& report, Clock::time_point now) {
  if (report.rank < 0 || static_cast<std::size_t>(report.rank) >= ranks_.size()) return;
  Rank& rank = ranks_[static_cast<std::size_t>(report.rank)];
  if (rank.gone) return;
  rank.known = true;
  rank.figures.state = state_of(report);
  rank.figures.doing = doing(report);
  rank.figures.step = std::max<std::int64_t>(report.step, 0);
  rank.figures.samples = std::max<std::int64_t>(report.samples, 0);
  rank.figures.memory = report.memory;
  if (!waits(report)) {
    rank.since.reset();
  } else if (!rank.since || rank.operation != waiting_in(report)) {
    rank.since = now;
    rank.operation = waiting_in(report);
  }
  add_waits(rank, report, now);
  add_steps(rank, report, now);
}

void Figures::begins_anew(int number) {
  if (number >= 0 && static_cast<std::size_t>(number) < ranks_.size()) ranks_[static_cast<std::size_t>(number)] = {};
}

void Figures::ended(int number, bool well, std::string how) {
  if (number < 0 || static_cast<std::size_t>(number) >= ranks_.size()) return;
  Rank& rank = ranks_[static_cast<std::size_t>(number)];
  rank.gone = true;
  rank.figures.state = well ? "ended" : "failed";
  rank.figures.doing = std::move(how);
}

std::vector<RankFigures> Figures::look(Clock::time_point now) const {
  std::vector<RankFigures> all;
  std::vector<double> waited;  // of those that run
  all.reserve(ranks_.size());
  for (const Rank& rank : ranks_) {
    RankFigures& figures = all.emplace_back(rank.figures);
    if (!rank.known || rank.gone) continue;
    // What it waits in now is in no sum yet.
    const double open = rank.since ? between(std::max(*rank.since, rank.waits.front().at), now) : 0;
    const double time = between(rank.waits.front().at, now);
    const double closed = grown(rank.waits.front().waited_ns, rank.waits.back().waited_ns) * 1e-9;
    const double exposed = grown(rank.waits.front().exposed_ns, rank.waits.back().exposed_ns) * 1e-9;
    figures.waited = share(closed + open, time);
    figures.exposed = std::max(share(exposed, time), share(open, time));
    waited.push_back(figures.waited);
    const Steps& first = rank.steps.front();
    const Steps& last = rank.steps.back();
    const double took = between(first.at, last.at);
    const double steps = grown(first.step, last.step);
    // None has come for much longer than they took: it has come to a halt.
    if (took <= 0 || between(last.at, now) > std::max(5.0, 3 * took / std::max(steps, 1.0))) continue;
    figures.steps_per_second = steps / took;
    figures.samples_per_second = grown(first.samples, last.samples) / took;
  }
  if (waited.size() < 2) return all;
  const auto middle = waited.begin() + static_cast<std::ptrdiff_t>(waited.size() / 2);
  std::nth_element(waited.begin(), middle, waited.end());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (ranks_[i].known && !ranks_[i].gone) all[i].waited_for = std::max(0.0, *middle - all[i].waited);
  }
  return all;
}

}  // namespace cohort::launch
