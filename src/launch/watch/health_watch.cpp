#include "launch/watch/health_watch.h"

#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

constexpr auto kLookEvery = std::chrono::seconds(1);
/// For agents to answer.
constexpr auto kAnswerTime = std::chrono::milliseconds(100);

}  // namespace

HealthWatch::HealthWatch(Loop& loop, std::vector<std::string> hosts, const Roles& roles, const WatchLimits& limits,
                         Events events)
    : loop_(loop),
      roles_(roles),
      health_(std::move(hosts), roles, limits.health),
      steps_(limits.steps),
      events_(std::move(events)) {}

void HealthWatch::stop() {
  look_ = Timer();
  show_ = Timer();
}

void HealthWatch::take(Reports reports, const std::vector<int>& processes) {
  health_.heard_of_host(processes, Health::Clock::now());
  for (RankReport& report : reports.ranks) {
    if (roles_.is_rank(report.rank)) steps_.report(report, StepWatch::Clock::now());
    health_.report(std::move(report), Health::Clock::now());
  }
}

void HealthWatch::rank_ended(const RankReport& last) {
  const auto now = Health::Clock::now();
  health_.ended(last.rank, now, last.worlds);
  if (!roles_.is_rank(last.rank)) return;
  steps_.report(last, now);
  steps_.ended(last.rank);
  for (Warning& warning : steps_.judge(now)) events_.warn(std::move(warning));
}

bool HealthWatch::show_soon() {
  if (show_) return false;
  show_ = Timer(loop_, kAnswerTime, [this] {
    show_ = Timer();
    show();
  });
  return true;
}

void HealthWatch::look() {
  Health::Findings findings = health_.judge(Health::Clock::now());
  for (Warning& warning : findings.warnings) events_.warn(std::move(warning));
  for (Warning& warning : steps_.judge(StepWatch::Clock::now())) events_.warn(std::move(warning));
  if (findings.end) {
    show();
    return events_.on_stuck(*findings.end);
  }
  look_ = Timer(loop_, kLookEvery, [this] { look(); });
}

void HealthWatch::show() {
  for (const std::string& line : folded(health_.doing_now(), roles_)) events_.say(line);
  if (const std::string waits = health_.waiting_times(); !waits.empty()) events_.say(waits);
}

}  // namespace cohort::launch
