// Something about a running job that a person should look at, though the job goes on. Values. Whoever judges makes
// them (Health, StepWatch, the disk's watcher); `Warnings` (supervise/) tells them to everybody.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// docs/tracking.md has the list with what each means.
enum class WarningKind : std::uint8_t {
  NotFinite,  ///< a loss that was logged is no number
  StepTime,   ///< steps take twice as long as before
  NoStep,     ///< ranks took steps, and take none any more
  LateRank,   ///< the others wait for this one, again and again
  Awaited,    ///< the others have waited long for this one
  Stopped,    ///< SIGSTOP
  Silent,     ///< nothing comes from a host
  DiskFull,   ///< nearly
};

struct Warning {
  WarningKind kind = WarningKind::NoStep;
  std::string text;
  std::optional<int> rank = {};
  std::optional<std::int64_t> step = {};
};

/// "not_finite", ...
const char* to_string(WarningKind kind) noexcept;
/// A line of warnings.jsonl, with its end. `time`: seconds since 1970.
std::string warning_line(const Warning& warning, double time);

/// Which warnings are told: of each kind and rank one, and again after a minute, which doubles each time to an hour.
class Repeats {
 public:
  /// `now`: seconds of any clock.
  bool lets_through(const Warning& warning, double now);

 private:
  struct Told {
    WarningKind kind;
    std::optional<int> rank;
    double again_at = 0, pause = 0;
  };
  std::vector<Told> told_;
};

}  // namespace cohort::launch
