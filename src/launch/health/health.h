// Health decides from the ranks' own reports whether a job still goes on. Pure: it takes reports and the time, and
// returns warnings for people and, if nothing can go on, the reason why the job has to end. HealthWatch connects Health
// to the supervisor. One thread.
// A rank waits if its program waits in a collective or message that needs a peer. Ranks that wait only for waiting
// ranks, none of which has moved or used its processor for a while, will wait for ever (a deadlock). A rank that does
// something else while others wait for it may be saving or evaluating, so it is named first, and given up only much
// later. If no reports of ranks come although their host is connected, the host's processes do not run. Processes of
// other roles are in no world: only missing reports and stops are checked for them.
#pragma once

#include "launch/messages.h"
#include "launch/plan/job_spec.h"
#include "launch/rank_report.h"

#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {

// Warnings are plain values. Each says that a person should look at a running job, though the job goes on. Health,
// StepWatch and the disk's watcher make them; `Warnings` (supervise/) delivers them. StepWatch, which checks a job's
// steps, is pure: it takes reports and the time. One thread.

/// docs/tracking.md explains each kind.
enum class WarningKind : std::uint8_t {
  NotFinite,  ///< a logged loss is no number
  StepTime,   ///< steps take twice as long as before
  NoStep,     ///< ranks took steps, and no longer do
  LateRank,   ///< the others wait for this rank, again and again
  Awaited,    ///< the others have waited long for this rank
  Stopped,    ///< a rank was stopped (SIGSTOP)
  Silent,     ///< nothing comes from a host
  LostData,   ///< the network drops data, and ranks wait until it is sent again
  DiskFull,   ///< the disk is nearly full
};

struct Warning {
  WarningKind kind = WarningKind::NoStep;
  std::string text;
  std::optional<int> rank = {};
  std::optional<std::int64_t> step = {};
};

/// Returns "not_finite", ...
const char* to_string(WarningKind kind) noexcept;
/// Returns a line of warnings.jsonl, with its line end. `time`: seconds since 1970.
std::string warning_line(const Warning& warning, double time);

/// Limits repeated warnings: one of each kind and rank, the next after a minute; the pause doubles up to an hour.
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

/// Checks a job's steps by the ranks' reports: whether steps have become slow or have stopped, or losses are no
/// numbers.
class StepWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit StepWatch(const StepLimits& limits) : limits_(limits) {}

  void report(const RankReport& report, Clock::time_point now);
  void ended(int rank);
  /// Returns new warnings. To be called about once a second.
  std::vector<Warning> judge(Clock::time_point now);

 private:
  void close_window(Clock::time_point now);
  void close_losses(Clock::time_point now);

  StepLimits limits_;
  std::set<int> running_;
  std::int64_t step_ = 0;  ///< step of the furthest rank
  Clock::time_point step_at_{}, judged_at_{};
  std::int64_t window_step_ = 0;
  Clock::time_point window_at_{};
  std::deque<double> windows_;  ///< seconds of a step, in windows that were not slow
  int slow_ = 0;
  bool slow_told_ = false, still_told_ = false;
  std::set<int> not_finite_;  ///< ranks already warned of
  struct Losses {
    LossReport begin, now;  ///< at the begin of the window, and latest
  };
  std::map<int, Losses> losses_;  ///< by rank
  Clock::time_point losses_at_{};
  std::vector<Warning> found_;
};

class Health {
 public:
  using Clock = std::chrono::steady_clock;

  /// `hosts`: host of each process.
  Health(std::vector<std::string> hosts, const Roles& roles, const HealthLimits& limits);

  void report(RankReport report, Clock::time_point now);
  /// `worlds`: number of worlds that the rank had formed.
  void ended(int rank, Clock::time_point now, std::uint32_t worlds = 0);
  /// Adds ranks behind the existing ones; the job has no other processes. `hosts`: the hosts of all ranks.
  void grow(std::vector<std::string> hosts, Clock::time_point now);
  /// Called when the others go on in a world without the rank; with `has_left` false, the rank stays after all.
  void left(int rank, bool has_left = true);
  /// Called when another process has been started in place of the rank's.
  void began_anew(int rank, Clock::time_point now);
  /// Called when the agent of these processes is at work, whether or not it reports anything about them.
  void heard_of_host(const std::vector<int>& processes, Clock::time_point now);
  /// Called when nothing is left of these processes, and nothing more will come from their agent.
  void host_ended(const std::vector<int>& processes);

  struct Findings {
    struct Stopped {
      int process = 0;
      std::chrono::seconds since{};
      std::string why;             ///< why the job has to end, if it cannot go on without the process
      bool with_its_host = false;  ///< nothing has come from its agent
    };
    std::vector<Warning> warnings;
    std::vector<Stopped> stopped;    ///< processes stopped for too long: the job has to end, or go on without them
    std::optional<std::string> end;  ///< why the job has to end
  };
  /// Returns new findings. To be called about once a second.
  Findings judge(Clock::time_point now);

  /// Returns what each process is doing: "waiting in barrier(), operation 2".
  std::vector<std::string> doing_now() const;
  /// Returns true if a rank has left its world and has not ended yet.
  bool somebody_leaves() const;
  /// Returns true if a running rank has reported that it saves when a signal asks it to.
  bool somebody_saves() const;
  /// Returns in one line how long each rank has waited for others in collectives; empty if none has. The rank that
  /// waits least is the one that the others wait for.
  std::string waiting_times() const;
  const RankReport& last(int rank) const { return ranks_[static_cast<std::size_t>(rank)].report; }

 private:
  struct Rank {
    RankReport report;
    bool known = false;
    bool gone = false;
    bool left = false;
    bool swept = false;            ///< its descendants are gone, too
    bool paused = false;           ///< waited in the previous report, and seemingly not in the latest
    Clock::time_point heard_at{};  ///< time of the last report, or of the rank's end
    bool silence_told = false;
    Clock::time_point moved_at{};    ///< last time that its counters changed or it used its processor
    Clock::time_point waiting_at{};  ///< start of waiting for the current operation
    Clock::time_point forming_at{};  ///< start of waiting for a world's ranks
    std::uint64_t moved_cpu_ms = 0;
    std::optional<Clock::time_point> stopped_at;
    bool stopped_told = false;
    Clock::time_point step_at{};  ///< start of the window of steps
    std::int64_t step = 0;
    std::uint64_t step_waited_ns = 0;
    double own_seconds = 0;   ///< seconds per step without waits, in its last whole window
    bool own_is_new = false;  ///< not checked yet
    int slow_windows = 0;     ///< number of consecutive slow windows so far
    Clock::time_point slow_since{};
    bool slow_told = false;
  };
  /// Ranks that a waiting rank needs before it can go on.
  struct Need {
    std::vector<int> ranks;
    std::string what;
    bool message = false;  ///< `what` is a message
    bool anyone = false;   ///< `ranks` are all other ranks: which of them it needs is not known
  };

  /// Returns the number of ranks that others may have to wait for.
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
  std::vector<std::chrono::seconds> away_told_;  ///< by rank: the interval after which it was last named
};

/// Watches a running job once a second: passes ranks' reports to Health and StepWatch, and returns what both find.
/// Reads the clock, and starts nothing.
class HealthWatch {
 public:
  /// `hosts`: host of each process.
  HealthWatch(std::vector<std::string> hosts, const Roles& roles, const JobSpec& spec);

  /// Returns new findings; to be called once a second while all ranks run.
  Health::Findings look();
  /// Takes the reports that the agent of these processes has sent.
  void take(Reports reports, const std::vector<int>& processes);
  /// `last`: the rank's last report.
  std::vector<Warning> rank_ended(int process, RankReport last);
  void grow(std::vector<std::string> hosts) {
    roles_.workers = static_cast<int>(hosts.size());
    health_.grow(std::move(hosts), Health::Clock::now());
  }
  void left(int process, bool has_left = true) { health_.left(process, has_left); }
  void started_again(int process) { health_.began_anew(process, Health::Clock::now()); }
  void host_ended(const std::vector<int>& processes) { health_.host_ended(processes); }
  /// Returns true if a rank saves and ends when a signal asks it to.
  bool somebody_saves() const { return health_.somebody_saves(); }
  bool somebody_leaves() const { return health_.somebody_leaves(); }
  std::vector<std::string> doing_now() const { return health_.doing_now(); }
  /// Returns lines that say what every rank is doing, and how long each has waited.
  std::vector<std::string> overview() const;

 private:
  Roles roles_;
  Health health_;
  StepWatch steps_;
};

}  // namespace cohort::launch
