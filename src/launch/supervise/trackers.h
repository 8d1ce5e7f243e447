// The processes that take a job's run record elsewhere while it runs (--track): `cohort export --follow`, one for each
// destination, in sessions of their own. They are no part of the job: none of their failures is one of it, and the job
// waits for them only a bounded time after its end. They die with the supervisor, to whose thread this belongs.
#pragma once

#include "launch/loop.h"
#include "launch/supervise/side_command.h"

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

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

}  // namespace cohort::launch
