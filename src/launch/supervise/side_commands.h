// Processes beside a job that are no part of it: its page, what --track names, the command that is told of warnings.
// None of their failures is one of the job's, which waits for them only a bounded time after its end. All belong to the
// supervisor and its thread, and end with it at the latest.
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

/// Hands on by lines what a SideCommand has printed.
template <class Say>
auto by_lines(Say say) {
  return [lines = LineSplitter(), say](std::string_view bytes) mutable {
    for (const Line& line : lines.feed(bytes)) say(line.text);
  };
}

/// Commands that take a job's run record elsewhere while it runs (--track): `cohort export --follow`, one for each
/// destination, in sessions of their own.
class Trackers {
 public:
  /// `destinations`: as `cohort export --to` takes them. `run` outlives this.
  Trackers(Loop& loop, RunOutput& run, const std::vector<std::string>& destinations);

  std::vector<pid_t> pids() const;
  /// The job has ended, which job.json says: they have so long, and are killed then.
  void finish(std::chrono::milliseconds limit);
  bool all_ended() const;

 private:
  struct Tracker {
    std::string destination;
    std::optional<SideCommand> command;  ///< none once it has ended
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

/// Tells everybody of a warning: who looks at the screen or reads events, warnings.jsonl, and the command of the user
/// (`--on-warning`), which is run for each, outside of the ranks. The job never waits for it: a few run at once, each
/// for so long, more wait, and of too many the rest is left out.
class Warnings {
 public:
  /// `on_warning`: the command; empty: none. `run` and its folder outlive this.
  Warnings(Loop& loop, RunOutput& run, std::string on_warning, std::string job_id);

  /// Lines for usage.jsonl.
  void record_usage(const std::string& lines) { file_.append("usage.jsonl", lines); }
  /// But for those that were told a moment ago.
  void tell(const Warning& warning);
  /// The job has ended: waits a moment for commands that run, and kills what is left of them.
  void finish();

 private:
  struct Call {
    std::vector<std::string> environment;
    std::string line;  ///< the warning as JSON, which it finds on its stdin
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
