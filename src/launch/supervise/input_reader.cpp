#include "launch/supervise/input_reader.h"

#include "launch/messages.h"
#include "sys/terminal.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace cohort::launch {

InputReader::InputReader(Loop& loop, int fd, OnInput on_input)
    : fd_(fd), on_input_(std::move(on_input)), watch_(loop, fd) {
  update();
}

bool InputReader::worth_reading(int fd) {
  struct stat info {};
  if (::fstat(fd, &info) != 0) return false;
  return !(S_ISCHR(info.st_mode) && info.st_rdev == makedev(1, 3));
}

bool InputReader::may_be_given(int fd) { return worth_reading(fd) && ::isatty(fd) == 0; }

void InputReader::taken(std::uint64_t bytes) {
  under_way_ -= std::min(under_way_, bytes);
  update();
}

void InputReader::look_again() { update(); }

void InputReader::update() {
  const bool wanted = !ended_ && under_way_ < kInputWindow && (::isatty(fd_) == 0 || sys::in_foreground(fd_));
  if (wanted)
    watch_.on_readable([this] { read_some(); });
  else
    watch_.on_readable(nullptr);
}

void InputReader::read_some() {
  if (::isatty(fd_) != 0 && !sys::in_foreground(fd_)) return update();
  std::string bytes(16 * 1024, '\0');
  const ssize_t got = ::read(fd_, bytes.data(), bytes.size());
  if (got < 0 && (errno == EINTR || errno == EAGAIN)) return;
  bytes.resize(got > 0 ? static_cast<std::size_t>(got) : 0);
  ended_ = bytes.empty();
  under_way_ += bytes.size();
  // update first: the handler may destroy us.
  update();
  on_input_(std::move(bytes));
}

}  // namespace cohort::launch
