#include "launch/show/live_text.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>

namespace cohort::launch {
namespace {

constexpr double kSilence = 6;

}  // namespace

std::string duration_text(double seconds) {
  const auto all = static_cast<std::int64_t>(std::clamp(seconds, 0.0, 1e12));
  if (all >= 86400) return fmt::format("{} d {} h", all / 86400, all / 3600 % 24);
  if (all >= 3600) return fmt::format("{}:{:02}:{:02}", all / 3600, all / 60 % 60, all % 60);
  return fmt::format("{}:{:02}", all / 60, all % 60);
}

std::string bytes_text(double bytes) {
  const char* unit = "BKMGTP";
  while (bytes >= 999.5 && unit[1] != '\0') {
    bytes /= 1024;
    ++unit;
  }
  return fmt::format("{:.{}f}{}", bytes, bytes < 9.95 && *unit != 'B' ? 1 : 0, *unit);
}

std::string number_text(double value) {
  const double size = std::fabs(value);
  if (!(size < 1e15)) return fmt::format("{:.3g}", value);
  if (size >= 999.5e6) return fmt::format("{:.3g}G", value / 1e9);
  if (size >= 999.5e3) return fmt::format("{:.3g}M", value / 1e6);
  if (size >= 9999.5) return fmt::format("{:.3g}k", value / 1e3);
  if (size >= 99.95) return fmt::format("{:.0f}", value);
  return fmt::format("{:.3g}", value);
}

std::string percent_text(double share) { return share < 0.005 ? "-" : fmt::format("{:.0f}%", std::round(share * 100)); }

double samples_per_second(const LiveRun& run) {
  double sum = 0;
  for (const LiveRank& rank : run.ranks) sum += rank.figures.samples_per_second;
  return sum;
}

int late_rank(const LiveRun& run) {
  const auto most = std::max_element(run.ranks.begin(), run.ranks.end(), [](const LiveRank& a, const LiveRank& b) {
    return a.figures.waited_for < b.figures.waited_for;
  });
  if (most == run.ranks.end() || most->figures.waited_for < 0.1) return -1;
  return run.first_rank + static_cast<int>(most - run.ranks.begin());
}

std::string state_text(const LiveRun& run, double now) {
  std::string text = run.state;
  if (run.state == "ended" && run.exit_status) text = fmt::format("ended with status {}", *run.exit_status);
  const double until = run.state == "ended" ? run.time : now;
  if (run.start > 0) text += " " + duration_text(until - run.start);
  return text;
}

std::string others_text(const LiveRun& run) {
  std::map<std::string, int> states;  // of servers
  std::uint64_t memory = 0;
  std::int64_t restarts = 0;
  std::string evaluator;
  for (const LiveOther& other : run.others) {
    if (other.name.starts_with("server")) {
      ++states[other.state];
      restarts += std::max(other.restarts, 0);
      memory += std::min<std::uint64_t>(other.memory, std::uint64_t{1} << 48);
    } else {
      evaluator = fmt::format("{}: {}", other.name, other.state);
    }
  }
  std::string text;
  for (const auto& [state, count] : states)
    text += fmt::format("{} {} {}", text.empty() ? "servers:" : ",", count, state);
  if (restarts > 0) text += fmt::format(", {} started again", restarts);
  if (memory > 0) text += ", " + bytes_text(static_cast<double>(memory));
  if (!evaluator.empty()) text += (text.empty() ? "" : "; ") + evaluator;
  return text;
}

bool is_silent(const LiveRun& run, double now) { return run.state != "ended" && now - run.time > kSilence; }

std::string steps_text(const LiveRun& run) {
  std::int64_t step = 0;
  double speed = 0;
  for (const LiveRank& rank : run.ranks) {
    step = std::max(step, rank.figures.step);
    speed = std::max(speed, rank.figures.steps_per_second);
  }
  std::string text = step > 0 ? fmt::format("step {}", step) : std::string();
  if (const double samples = samples_per_second(run); samples > 0) {
    text += "  " + number_text(samples) + " samples/s";
  } else if (speed > 0) {
    text += "  " + number_text(speed) + " steps/s";
  }
  return text;
}

std::string summary(const LiveRun& run, double now, std::string_view progress) {
  std::string text = state_text(run, now);
  const std::string steps = progress.empty() ? steps_text(run) : std::string(progress);
  if (!steps.empty()) text += "  " + steps;
  if (const int late = late_rank(run); late >= 0) {
    const LiveRank& rank = run.ranks[static_cast<std::size_t>(late - run.first_rank)];
    text += fmt::format("  late: rank {} ({})", late, percent_text(rank.figures.waited_for));
  }
  if (is_silent(run, now)) text += fmt::format("  no news for {}", duration_text(now - run.time));
  return text;
}

}  // namespace cohort::launch
