// Something about a running job that a person should look at, though the job goes on. Values. Whoever judges makes them
// (Health, StepWatch, the disk's watcher); `Warnings` (supervise/) tells them to everybody. StepWatch, the judge of a
// job's steps, is pure: it takes reports and the time. One thread.
#pragma once

#include "launch/plan/job_spec.h"
#include "launch/rank_report.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
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

/// Judges a job's steps by what its ranks report: whether they have become slow, have come to an end, or bring losses
/// that are no numbers.
class StepWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StepWatch(const StepLimits& limits) : limits_(limits) {}

  void report(const RankReport& report, Clock::time_point now);
  void ended(int rank);
  /// What is new. To be called about once a second.
  std::vector<Warning> judge(Clock::time_point now);

 private:
  void close_window(Clock::time_point now);

  StepLimits limits_;
  std::set<int> running_;
  std::int64_t step_ = 0;  ///< of the rank that is furthest
  Clock::time_point step_at_{}, judged_at_{};
  std::int64_t window_step_ = 0;
  Clock::time_point window_at_{};
  std::deque<double> windows_;  ///< seconds of a step, in those that were not slow
  int slow_ = 0;
  bool slow_told_ = false, still_told_ = false;
  std::set<int> not_finite_;  ///< told
  std::vector<Warning> found_;
};

}  // namespace cohort::launch
