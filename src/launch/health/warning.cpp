#include "launch/health/health.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <utility>

namespace cohort::launch {
namespace {

constexpr double kFirstPause = 60, kLongestPause = 3600;
/// Limit on warnings that are remembered: a job may have thousands of ranks, and each could be late.
constexpr std::size_t kMostTold = 256;

}  // namespace

const char* to_string(WarningKind kind) noexcept {
  switch (kind) {
    case WarningKind::NotFinite: return "not_finite";
    case WarningKind::StepTime: return "step_time";
    case WarningKind::NoStep: return "no_step";
    case WarningKind::LateRank: return "late_rank";
    case WarningKind::Awaited: return "awaited_rank";
    case WarningKind::Stopped: return "stopped_rank";
    case WarningKind::Silent: return "silent_host";
    case WarningKind::LostData: return "lost_data";
    case WarningKind::DiskFull: return "disk_full";
  }
  return "warning";
}

std::string warning_line(const Warning& warning, double time) {
  nlohmann::ordered_json line = {{"event", "warning"},
                                 {"time", std::round(time * 1000) / 1000},
                                 {"kind", to_string(warning.kind)},
                                 {"text", warning.text}};
  if (warning.rank) line["rank"] = *warning.rank;
  if (warning.step) line["step"] = *warning.step;
  return line.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

bool Repeats::lets_through(const Warning& warning, double now) {
  const auto known = std::ranges::find_if(
      told_, [&](const Told& told) { return told.kind == warning.kind && told.rank == warning.rank; });
  if (known == told_.end()) {
    if (told_.size() >= kMostTold) return false;
    told_.push_back({warning.kind, warning.rank, now + kFirstPause, kFirstPause});
    return true;
  }
  if (now < known->again_at) return false;
  known->pause = std::min(2 * known->pause, kLongestPause);
  known->again_at = now + known->pause;
  return true;
}

namespace {

constexpr std::size_t kMostWindows = 60;
constexpr std::chrono::seconds kLossWindow{30};
constexpr double kLostShare = 0.05;  // share of the window in which one rank's data waits in time-outs
/// Longest normal time between two calls of `judge`; after a longer one, neither this process nor the ranks have run.
constexpr std::chrono::seconds kLongestNap{30};

double seconds_between(StepWatch::Clock::time_point begin, StepWatch::Clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

void StepWatch::report(const RankReport& report, Clock::time_point now) {
  running_.insert(report.rank);
  if (!report.not_finite.empty() && not_finite_.insert(report.rank).second) {
    found_.push_back({.kind = WarningKind::NotFinite,
                      .text = fmt::format("{} at step {}, reported by rank {}; the weights are probably NaN from here. "
                                          "NonFinite::Raise (Python: non_finite=\"raise\") ends a run at the gradient",
                                          report.not_finite, report.not_finite_step, report.rank),
                      .rank = report.rank,
                      .step = report.not_finite_step});
  }
  if (!report.losses.host.empty()) {
    Losses& losses = losses_[report.rank];
    // A process that has taken the rank's place begins to count anew.
    if (report.losses.segments < losses.begin.segments || report.losses.timeouts_ms < losses.begin.timeouts_ms)
      losses.begin = {};
    losses.now = report.losses;
  }
  if (report.step <= step_) return;
  const bool first = step_ == 0 && window_at_ == Clock::time_point();
  step_ = report.step;
  step_at_ = now;
  still_told_ = false;
  if (first) {
    window_step_ = step_;
    window_at_ = now;
  }
  close_window(now);
}

void StepWatch::close_window(Clock::time_point now) {
  if (step_ - window_step_ < limits_.window_steps || now - window_at_ < limits_.window) return;
  const double seconds = seconds_between(window_at_, now) / static_cast<double>(step_ - window_step_);
  window_step_ = step_;
  window_at_ = now;
  if (windows_.size() < limits_.warm_windows) return windows_.push_back(seconds);
  const double usual = median({windows_.begin(), windows_.end()});
  if (seconds < limits_.slow_factor * usual) {
    slow_ = 0;
    slow_told_ = false;
    windows_.push_back(seconds);
    if (windows_.size() > kMostWindows) windows_.pop_front();
  } else if (++slow_ >= limits_.windows && !std::exchange(slow_told_, true)) {
    found_.push_back({.kind = WarningKind::StepTime,
                      .text = fmt::format("a step takes {:.3g} ms, {:.3g} times as long as the {:.3g} ms before",
                                          seconds * 1e3, seconds / usual, usual * 1e3),
                      .rank = {},
                      .step = step_});
  }
}

void StepWatch::ended(int rank) { running_.erase(rank); }

void StepWatch::close_losses(Clock::time_point now) {
  if (losses_at_ == Clock::time_point()) losses_at_ = now;
  if (now - losses_at_ < kLossWindow) return;
  struct Sum {
    std::uint64_t segments = 0, timeouts = 0, longest_ms = 0, ranks = 0;
  };
  std::map<std::string, Sum> to_host;
  for (auto& [rank, losses] : losses_) {
    Sum& sum = to_host[losses.now.host];
    const std::uint64_t segments = losses.now.segments - losses.begin.segments;
    sum.segments += segments;
    sum.timeouts += losses.now.timeouts - std::min(losses.now.timeouts, losses.begin.timeouts);
    sum.longest_ms = std::max(sum.longest_ms, losses.now.timeouts_ms - losses.begin.timeouts_ms);
    if (segments > 0) ++sum.ranks;
    losses.begin = losses.now;
  }
  const double seconds = seconds_between(std::exchange(losses_at_, now), now);
  const auto worst = std::ranges::max_element(to_host, {}, [](const auto& one) { return one.second.longest_ms; });
  if (worst == to_host.end()) return;
  const auto& [host, sum] = *worst;
  const double waited = static_cast<double>(sum.longest_ms) / 1e3;
  if (waited < kLostShare * seconds) return;
  found_.push_back(
      {.kind = WarningKind::LostData,
       .text = fmt::format("the network drops data for host {}: in {:.0f} s {} segments were sent again by "
                           "{} of the ranks{}, and connections of one waited {:.1f} s for that -- too many may send "
                           "to it at once, or a cable or port on the way to it is damaged (ethtool -S)",
                           host, seconds, sum.segments, sum.ranks,
                           sum.timeouts > 0 ? fmt::format(", {} time-outs passed", sum.timeouts) : "", waited),
       .rank = {},
       .step = step_ > 0 ? std::optional(step_) : std::nullopt});
}

std::vector<Warning> StepWatch::judge(Clock::time_point now) {
  close_losses(now);
  if (judged_at_ != Clock::time_point() && now - judged_at_ > kLongestNap) {
    step_at_ += now - judged_at_;
    window_at_ += now - judged_at_;
  }
  judged_at_ = now;
  const bool still = limits_.no_step.count() > 0 && step_ > 0 && !running_.empty() && now - step_at_ >= limits_.no_step;
  if (still && !std::exchange(still_told_, true)) {
    found_.push_back(
        {.kind = WarningKind::NoStep,
         .text = fmt::format("no step for {:.0f} s, since step {} -- Ctrl-\\ (SIGQUIT) shows what the ranks do",
                             seconds_between(step_at_, now), step_),
         .rank = {},
         .step = step_});
  }
  return std::exchange(found_, {});
}

}  // namespace cohort::launch
