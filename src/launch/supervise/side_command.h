// Another `cohort` beside a job (its page, what --track names), in a session of its own: a Ctrl-C is for the job. It is
// no part of the job and ends with this at the latest. Belongs to the supervisor and its thread.
#pragma once

#include "launch/loop.h"
#include "launch/show/text.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

#include <functional>
#include <string>
#include <vector>

namespace cohort::launch {

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

}  // namespace cohort::launch
