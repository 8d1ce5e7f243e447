// Processes that run beside a job but are no part of it: the server of its page, the exporters of --track, the command
// that gets warnings. Their failures do not fail the job, and after its end the job waits for them only a bounded time.
// All belong to the supervisor and its thread, and end with it at the latest.
#pragma once

#include "base/process.h"
#include "launch/health/health.h"
#include "launch/loop.h"
#include "launch/output/run_folder.h"
#include "launch/output/text.h"
#include "launch/start/starter.h"
#include "net/address.h"

#include <chrono>
#include <deque>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::launch {

class RunOutput;

/// Makes a callback that passes on a SideCommand's output line by line.
template <class Say>
auto by_lines(Say say) {
  return [lines = LineSplitter(), say](std::string_view bytes) mutable {
    for (const Line& line : lines.feed(bytes)) say(line.text);
  };
}

/// Exports a job's run record while it runs (--track): by `cohort export --follow`, one command for each destination,
/// in sessions of their own.
class Trackers {
 public:
  /// `destinations`: written as for `cohort export --to`. `run` outlives this.
  Trackers(Loop& loop, RunOutput& run, const std::vector<std::string>& destinations);

  std::vector<pid_t> pids() const;
  /// Called when the job has ended and job.json says so: the commands may run for `limit`, then they are killed.
  void finish(std::chrono::milliseconds limit);
  bool all_ended() const;

 private:
  struct Tracker {
    std::string destination;
    std::optional<SideCommand> command;  ///< empty after it has ended
  };

  void start(Tracker& tracker);
  void on_ended(Tracker& tracker, const sys::ExitStatus& status);
  void on_limit();
  std::string way_out(const Tracker& tracker) const;

  Loop& loop_;
  RunOutput& run_;
  std::vector<std::unique_ptr<Tracker>> trackers_;
  Timer limit_, notice_;
};

/// Delivers warnings: to the screen or the events, to warnings.jsonl, and to the user's command (`--on-warning`), which
/// is run for each, outside of the ranks. The job never waits for the command: a few run at the same time, each for a
/// bounded time, more are queued, and those beyond the queue's limit are dropped.
class Warnings {
 public:
  /// `on_warning`: the command; empty: none. `run` and its folder outlive this.
  Warnings(Loop& loop, RunOutput& run, std::string on_warning, std::string job_id);

  /// Appends lines to usage.jsonl.
  void record_usage(const std::string& lines) { file_.append("usage.jsonl", lines); }
  /// Delivers the warning, unless it is one that was delivered a moment ago.
  void tell(const Warning& warning);
  /// Called when the job has ended: waits a moment for running commands, and kills those that are left.
  void finish();

 private:
  struct Call {
    std::vector<std::string> environment;
    std::string line;  ///< the warning as JSON, for the command's stdin
  };
  struct Running {
    std::optional<SideCommand> command;
    Timer limit;
  };
  void look_at_disk();
  void run_command(const Warning& warning, const std::string& line);
  void start_next();
  void complain(const std::string& why);

  Loop& loop_;
  RunOutput& run_;
  const RunFolder& folder_;
  const std::string on_warning_, job_id_;
  Repeats repeats_;
  WarningsFile file_;
  std::deque<Call> waiting_;
  std::list<Running> running_;
  bool complained_ = false;
  bool full_ = false;
  Timer look_;
};

}  // namespace cohort::launch
