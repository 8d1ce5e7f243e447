// Processes beside a job that are no part of it: its page, what --track names, the command that is told of warnings.
// None of their failures is one of the job's, which waits for them only a bounded time after its end. All belong to the
// supervisor and its thread, and end with it at the latest.
#pragma once

#include "base/process.h"
#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/record/run_folder.h"
#include "launch/show/text.h"
#include "launch/watch/warning.h"

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// Another `cohort` beside a job (its page, what --track names), in a session of its own: a Ctrl-C is for the job.
class SideCommand {
 public:
  enum class Output { All, Errors };
  struct Options {
    std::vector<std::string> arguments;  ///< behind "cohort"
    Output output = Output::All;
    int parent_death_signal = 0;
    std::function<void(const std::string&)> say;  ///< gets what it prints, by lines
    /// Once it has, and all that it printed is said; may destroy this.
    std::function<void(const sys::ExitStatus&)> on_ended = {};
  };
  /// Throws Unavailable.
  SideCommand(Loop& loop, Options options);
  /// Says what it has printed by then, and kills it.
  ~SideCommand();
  SideCommand(const SideCommand&) = delete;
  SideCommand& operator=(const SideCommand&) = delete;

  pid_t pid() const noexcept { return process_.pid; }

 private:
  void read();
  void on_ended();

  Options options_;
  sys::ChildProcess process_;
  sys::UniqueFd output_;
  LineSplitter lines_;
  Watch output_watch_, process_watch_;
};

/// Those that take a job's run record elsewhere while it runs (--track): `cohort export --follow`, one for each
/// destination, in sessions of their own.
class Trackers {
 public:
  struct Options {
    std::vector<std::string> destinations;  ///< as `cohort export --to` takes them
    std::string run_folder;
    std::function<void(const std::string&)> say;
  };
  Trackers(Loop& loop, Options options);

  std::vector<pid_t> pids() const;
  /// The job has ended, which job.json says. Calls `on_done` once they have, or `limit` has passed: they are killed
  /// then.
  void finish(std::chrono::milliseconds limit, std::function<void()> on_done);

 private:
  struct Tracker {
    std::string destination;
    std::optional<SideCommand> command;  ///< none once it has ended
  };

  void start(Tracker& tracker);
  void on_ended(Tracker& tracker, const sys::ExitStatus& status);
  void on_limit();
  void check_done();
  std::string way_out(const Tracker& tracker) const;

  Loop& loop_;
  Options options_;
  std::vector<std::unique_ptr<Tracker>> trackers_;
  std::function<void()> on_done_;
  Timer limit_, notice_, done_;
};

struct WarningCommandOptions {
  std::string command;
  std::string job_id;
  std::string run_folder;                       ///< what it prints goes to on-warning.log there
  std::function<void(const std::string&)> say;  ///< that it fails, once
  std::size_t at_once = 4;
  std::size_t most_waiting = 64;
  std::chrono::milliseconds limit = std::chrono::seconds(60);  ///< of one
  std::chrono::milliseconds at_end = std::chrono::seconds(5);  ///< for those that run when the job has ended
};

/// `--on-warning COMMAND`: a shell command that is run for each warning, outside of the ranks. The job never waits for
/// it: a few run at once, each for so long, more wait, and of too many the rest is left out.
class WarningCommand {
 public:
  WarningCommand(Loop& loop, WarningCommandOptions options);
  ~WarningCommand();
  WarningCommand(const WarningCommand&) = delete;
  WarningCommand& operator=(const WarningCommand&) = delete;

  /// `line`: the warning as JSON, which it finds on its stdin.
  void run(const Warning& warning, const std::string& line);
  /// The job has ended: waits for those that run and wait, but not for long, and kills what is left of them.
  void finish();

 private:
  struct Call {
    std::vector<std::string> environment;
    std::string line;
  };
  struct Running {
    sys::ChildProcess process;
    Watch ended;
    Timer limit;
  };
  void start_next();
  void on_ended(std::list<Running>::iterator which);
  void complain(const std::string& why);

  Loop& loop_;
  WarningCommandOptions options_;
  std::deque<Call> waiting_;
  std::list<Running> running_;
  bool complained_ = false;
};

struct WarningsOptions {
  std::string on_warning;  ///< empty: no command
  std::string job_id;
  std::function<void(const Warning&)> show;
  std::function<void(const std::string&)> say;
};

/// Tells everybody of a warning: who looks at the screen or reads events, warnings.jsonl, and the command of the user.
class Warnings {
 public:
  /// `folder` outlives this.
  Warnings(Loop& loop, const RunFolder& folder, WarningsOptions options);

  /// But for those that were told a moment ago.
  void tell(const Warning& warning);
  /// The job has ended. Waits a moment for commands that run.
  void finish();

 private:
  void look_at_disk();

  Loop& loop_;
  const RunFolder& folder_;
  WarningsOptions options_;
  Repeats repeats_;
  WarningsFile file_;
  std::optional<WarningCommand> command_;
  bool full_ = false;
  Timer look_;
};

}  // namespace cohort::launch
