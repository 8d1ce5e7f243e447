// `--on-warning COMMAND`: a shell command that is run for each warning, outside of the ranks. The job never waits for
// it: a few run at once, each for so long, more wait, and of too many the rest is left out. Belongs to the supervisor
// and its thread, and its processes end with it.
#pragma once

#include "launch/loop.h"
#include "launch/watch/warning.h"
#include "sys/process.h"

#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <string>
#include <vector>

namespace cohort::launch {

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

}  // namespace cohort::launch
