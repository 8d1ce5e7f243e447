// What the launcher leaves and looks at in the run's folder while the job runs: warnings.jsonl, to which it appends,
// and the room that is left on the file system. On a thread of its own, since that may be one of the network that takes
// its time. Methods belong to one thread.
#pragma once

#include "launch/record/run_folder.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::launch {

inline constexpr const char* kWarningsFile = "warnings.jsonl";

struct DiskRoom {
  std::uint64_t size = 0, free = 0;  ///< bytes; `free` for this user
};

/// Nearly full: a twentieth is left, and less than 10 GiB.
bool nearly_full(const DiskRoom& room) noexcept;

class WarningsFile {
 public:
  /// `folder` outlives this.
  explicit WarningsFile(const RunFolder& folder);
  /// Writes what it was given.
  ~WarningsFile();
  WarningsFile(const WarningsFile&) = delete;
  WarningsFile& operator=(const WarningsFile&) = delete;

  /// Whole lines.
  void append(const std::string& lines);
  /// What was seen last, every few seconds; nullopt: nothing yet.
  std::optional<DiskRoom> room();

 private:
  void work();

  const RunFolder& folder_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string waiting_;
  std::optional<DiskRoom> room_;
  bool closing_ = false;
  std::thread thread_;
};

}  // namespace cohort::launch
