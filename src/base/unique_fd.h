// UniqueFd: a file descriptor with one owner, closed when destroyed. Not thread-safe.
// send_with_fd: a descriptor sent with bytes over a Unix socket to another process. Any thread; owns no globals.
// close_on_fork: registers descriptors that a forked child must not keep open, since peers learn of the parent's death
// by the end of the connection. (CLOEXEC helps only if the child execs.) Any thread.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <cstddef>
#include <utility>

namespace cohort::sys {

class UniqueFd {
 public:
  UniqueFd() noexcept = default;
  explicit UniqueFd(int fd) noexcept : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(other.release()) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) reset(other.release());
    return *this;
  }
  UniqueFd(const UniqueFd&) = delete;
  UniqueFd& operator=(const UniqueFd&) = delete;
  ~UniqueFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  int release() noexcept { return std::exchange(fd_, -1); }
  void reset(int fd = -1) noexcept {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }

 private:
  int fd_ = -1;
};

/// Like send(2) without SIGPIPE. Sends `descriptor`, unless it is negative, along with the first byte.
ssize_t send_with_fd(int socket, const void* bytes, std::size_t size, int descriptor, int flags = 0) noexcept;
/// Like recv(2). Puts a descriptor that was sent along into `descriptor` (CLOEXEC); if several were, the last one.
ssize_t receive_with_fd(int socket, void* bytes, std::size_t size, UniqueFd& descriptor, int flags = 0) noexcept;

/// Makes children that this process forks from now on close `fd` immediately.
void close_on_fork(int fd);
/// Undoes close_on_fork. Must be called before `fd` is closed.
void forget_on_fork(int fd) noexcept;

}  // namespace cohort::sys
