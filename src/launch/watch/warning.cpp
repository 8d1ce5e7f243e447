#include "launch/watch/warning.h"

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>

namespace cohort::launch {
namespace {

constexpr double kFirstPause = 60, kLongestPause = 3600;
/// A job may have thousands of ranks, of which each could be late.
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
  const auto known = std::find_if(told_.begin(), told_.end(), [&](const Told& told) {
    return told.kind == warning.kind && told.rank == warning.rank;
  });
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

}  // namespace cohort::launch
