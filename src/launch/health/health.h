// Whether a job still goes on: Health judges what the ranks report about themselves. Pure: it takes reports and the
// time, gives what a person should be told and, where nothing can go on, why the job has to end. HealthWatch is what
// the supervisor has of it. One thread.
//
// A rank waits if its program waits in a collective or message that needs a peer. Ranks that wait only for ranks that
// wait, none of which has moved or used its processor for a while, will wait for ever (a deadlock). A rank that others
// wait for, and that does something else, may be saving or evaluating: it is named, and given up only much later. Ranks
// of which no reports come any more, while their host is still connected, are on a host whose processes do not run.
// Processes of other roles are in no world: of them only this, and whether they are stopped, is judged.
#pragma once

#include "launch/messages.h"
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

// Something about a running job that a person should look at, though the job goes on. Values. Whoever judges makes them
// (Health, StepWatch, the disk's watcher); `Warnings` (supervise/) tells them to everybody. StepWatch, the judge of a
// job's steps, is pure: it takes reports and the time. One thread.

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
  /// Returns what is new. To be called about once a second.
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

class Health {
 public:
  using Clock = std::chrono::steady_clock;

  /// `hosts`: of each process.
  Health(std::vector<std::string> hosts, const Roles& roles, const HealthLimits& limits);

  void report(RankReport report, Clock::time_point now);
  /// `worlds`: that it had formed.
  void ended(int rank, Clock::time_point now, std::uint32_t worlds = 0);
  /// More ranks, behind those that there are; there are no other processes. `hosts`: of all.
  void grow(std::vector<std::string> hosts, Clock::time_point now);
  /// The others go on without it, in a world of their own; or with it after all.
  void left(int rank, bool has_left = true);
  /// Another process has been started in its place.
  void began_anew(int rank, Clock::time_point now);
  /// Their agent is at work, whether or not it has something to report of them.
  void heard_of_host(const std::vector<int>& processes, Clock::time_point now);
  /// Nothing is left of these processes, and nothing more comes from their agent.
  void host_ended(const std::vector<int>& processes);

  struct Findings {
    struct Stopped {
      int process = 0;
      std::chrono::seconds since{};
      std::string why;             ///< the job has to end, where it does not go on without it
      bool with_its_host = false;  ///< nothing has come from its agent
    };
    std::vector<Warning> warnings;
    std::vector<Stopped> stopped;    ///< for too long: the job has to end, or go on without them
    std::optional<std::string> end;  ///< the job has to end, and why
  };
  /// To be called about once a second.
  Findings judge(Clock::time_point now);

  /// Describes what each process is doing: "waiting in barrier(), operation 2".
  std::vector<std::string> doing_now() const;
  /// A rank has left its world and has not ended yet.
  bool somebody_leaves() const;
  /// A rank that runs has said that it saves when a signal asks it to.
  bool somebody_saves() const;
  /// How long each rank has waited for others in collectives, in one line; empty if none has. A rank that waits less
  /// than the others is the one that they wait for.
  std::string waiting_times() const;
  const RankReport& last(int rank) const { return ranks_[static_cast<std::size_t>(rank)].report; }

 private:
  struct Rank {
    RankReport report;
    bool known = false;
    bool gone = false;
    bool left = false;
    bool swept = false;            ///< what it has started is gone, too
    bool paused = false;           ///< it waited in the report before and does not seem to in this one
    Clock::time_point heard_at{};  ///< the last report, or its end
    bool silence_told = false;
    Clock::time_point moved_at{};    ///< its counters changed, or it used its processor
    Clock::time_point waiting_at{};  ///< it waits, for the same thing, since
    Clock::time_point joining_at{};  ///< it waits for a world's ranks since
    std::uint64_t moved_cpu_ms = 0;
    std::optional<Clock::time_point> stopped_at;
    bool stopped_told = false;
    Clock::time_point step_at{};  ///< where the window of steps begins
    std::int64_t step = 0;
    std::uint64_t step_waited_ns = 0;
    double own_seconds = 0;   ///< per step, of its last whole window
    bool own_is_new = false;  ///< not judged yet
    int slow_windows = 0;     ///< so far,
    Clock::time_point slow_since{};
    bool slow_told = false;
  };
  /// Ranks of the world that keep a rank waiting.
  struct Need {
    std::vector<int> ranks;
    std::string what;
    bool message = false;  ///< `what` is one
    bool anyone = false;   ///< `ranks` are all others: which of them it needs is not known
  };

  /// Ranks that others may have to wait for.
  int members() const;
  void forgive_sleep(Clock::time_point now);
  std::optional<Need> need_of(const Rank& rank) const;
  std::optional<int> world_rank(std::uint64_t group, int rank) const;
  void look_for_stopped(Clock::time_point now, Findings& findings);
  void look_for_silent(Clock::time_point now, Findings& findings);
  void look_for_absent(Clock::time_point now, Findings& findings) const;
  void look_for_deadlock(Findings& findings);
  void look_for_away(Clock::time_point now, Findings& findings);
  void look_for_slow(Clock::time_point now, Findings& findings);
  void warn(Findings& findings, WarningKind kind, int rank, std::string text) const;
  std::string name(int rank) const;

  std::vector<std::string> hosts_;
  Roles roles_;
  HealthLimits limits_;
  std::vector<Rank> ranks_;
  std::optional<Clock::time_point> judged_at_;
  std::vector<std::chrono::seconds> away_told_;  ///< by rank: the interval after which it was named last
};

/// A running job as it is seen once a second: what ranks report goes to Health and StepWatch, and what both find comes
/// out. Reads the clock, and starts nothing.
class HealthWatch {
 public:
  /// `hosts`: of each process.
  HealthWatch(std::vector<std::string> hosts, const Roles& roles, const JobSpec& spec);

  /// Once a second, while all ranks run.
  Health::Findings look();
  /// Takes the reports of the agent of these processes.
  void take(Reports reports, const std::vector<int>& processes);
  /// `last`: what it was doing then.
  std::vector<Warning> rank_ended(int process, RankReport last);
  void grow(std::vector<std::string> hosts) {
    roles_.workers = static_cast<int>(hosts.size());
    health_.grow(std::move(hosts), Health::Clock::now());
  }
  void left(int process, bool has_left = true) { health_.left(process, has_left); }
  void started_again(int process) { health_.began_anew(process, Health::Clock::now()); }
  void host_ended(const std::vector<int>& processes) { health_.host_ended(processes); }
  /// A rank saves and ends when a signal asks it to.
  bool somebody_saves() const { return health_.somebody_saves(); }
  bool somebody_leaves() const { return health_.somebody_leaves(); }
  std::vector<std::string> doing_now() const { return health_.doing_now(); }
  /// Lines that say what every rank is doing, and how long each has waited.
  std::vector<std::string> overview() const;

 private:
  Roles roles_;
  Health health_;
  StepWatch steps_;
};

}  // namespace cohort::launch
