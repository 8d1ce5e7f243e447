// Writes live.json into a run's folder, on a thread of its own: the folder may be on a file system of the network that
// takes its time, and the launcher waits for no viewer. Methods belong to one thread.
#pragma once

#include "launch/record/live_run.h"
#include "launch/record/run_folder.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::launch {

class LiveFile {
 public:
  /// `folder` outlives this.
  explicit LiveFile(const RunFolder& folder) : folder_(folder) {}
  /// Writes what it was given last.
  ~LiveFile();
  LiveFile(const LiveFile&) = delete;
  LiveFile& operator=(const LiveFile&) = delete;

  /// The last one is written, and some time has passed since: it is worth the effort to make another.
  bool due() const noexcept { return due_.load(std::memory_order_relaxed); }
  void write(LiveRun run);
  /// Why it cannot be written; once.
  std::optional<std::string> complaint();

 private:
  void work();

  const RunFolder& folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<LiveRun> next_;
  bool closing_ = false;
  std::optional<std::string> complaint_;
  bool complained_ = false;
  std::atomic<bool> due_{true};
  std::thread thread_;
};

}  // namespace cohort::launch
