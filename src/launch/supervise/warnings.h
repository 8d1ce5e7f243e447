// Tells everybody of a warning: who looks at the screen or reads events, warnings.jsonl, and the command of the user.
// Belongs to the Job and its thread.
#pragma once

#include "launch/record/run_folder.h"
#include "launch/supervise/warning_command.h"
#include "launch/watch/warning.h"

#include <functional>
#include <optional>
#include <string>

namespace cohort::launch {

struct WarningsOptions {
  std::string on_warning;  ///< empty: no command
  std::string job_id;
  std::function<void(const Warning&)> show;
  std::function<void(const std::string&)> say;
};

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
