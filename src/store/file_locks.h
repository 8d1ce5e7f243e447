// The locks of a file store: bytes far behind its log, locked by open file description, so that the kernel drops them
// with their owner's last descriptor, however it died. Any thread; a lock belongs to the open file, not to the thread.
#pragma once

#include "base/result.h"
#include "net/deadline.h"

#include <sys/types.h>

#include <chrono>
#include <utility>

namespace cohort::store {

/// One byte for whoever reads or writes the log, and one for each member for as long as it lives.
inline constexpr off_t kLogLock = off_t{1} << 40;
inline constexpr off_t kSlotLocks = kLogLock + 1;

/// Between two looks at what others do, from the first to the last.
inline constexpr std::chrono::milliseconds kShortestPause{1};
inline constexpr std::chrono::milliseconds kLongestPause{20};

/// True if taken, false if another open file holds it. Io where the file system has no locks.
Result<bool> try_lock(int fd, off_t byte);

/// Does another open file hold it? On some file systems (see README.md), only those of this host are known.
bool held_by_another(int fd, off_t byte);

/// The log's, for one reading and writing of it.
class LogLock {
 public:
  /// Timeout if another holds it until then.
  static Result<LogLock> take(int fd, net::Deadline deadline);
  LogLock(LogLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  LogLock& operator=(LogLock&&) = delete;
  ~LogLock();

 private:
  explicit LogLock(int fd) : fd_(fd) {}
  int fd_;
};

}  // namespace cohort::store
