#include "store/file_locks.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <thread>

namespace cohort::store {
namespace {

struct flock lock_request(short type, off_t byte) {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  return request;
}

}  // namespace

Result<bool> try_lock(int fd, off_t byte) {
  struct flock request = lock_request(F_WRLCK, byte);
  if (::fcntl(fd, F_OFD_SETLK, &request) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  return fail(ErrorCode::Io, "locking: {} -- choose a file on a local file system, or one with locks",
              errno_text(errno));
}

bool held_by_another(int fd, off_t byte) {
  struct flock request = lock_request(F_WRLCK, byte);
  return ::fcntl(fd, F_OFD_GETLK, &request) == 0 && request.l_type != F_UNLCK;
}

Result<LogLock> LogLock::take(int fd, net::Deadline deadline) {
  std::chrono::milliseconds pause = kShortestPause;
  while (true) {
    const auto taken = try_lock(fd, kLogLock);
    if (!taken) return tl::unexpected(taken.error());
    if (*taken) return LogLock(fd);
    if (net::passed(deadline))
      return fail(ErrorCode::Timeout, "another process holds its lock -- is one of the ranks stopped?");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

LogLock::~LogLock() {
  if (fd_ < 0) return;
  struct flock request = lock_request(F_UNLCK, kLogLock);
  (void)::fcntl(fd_, F_OFD_SETLK, &request);
}

}  // namespace cohort::store
