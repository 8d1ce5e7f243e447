#include "base/terminal.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string_view>

namespace cohort::sys {

namespace {

bool is_able_terminal(int fd) {
  const char* kind = std::getenv("TERM");
  return ::isatty(fd) != 0 && kind != nullptr && std::string_view(kind) != "dumb";
}

}  // namespace

bool wants_colour(int fd) {
  const char* no_colour = std::getenv("NO_COLOR");
  return is_able_terminal(fd) && (no_colour == nullptr || *no_colour == '\0');
}

bool speaks_unicode() {
  for (const char* const name : {"LC_ALL", "LC_CTYPE", "LANG"}) {
    const char* const locale = std::getenv(name);
    if (locale == nullptr || *locale == '\0') continue;
    const std::string_view text = locale;
    return text.find("UTF-8") != text.npos || text.find("utf8") != text.npos || text.find("utf-8") != text.npos;
  }
  return false;
}

TextStyle text_style(int fd) {
  return {.unicode = is_able_terminal(fd) && speaks_unicode(), .colour = wants_colour(fd)};
}

bool in_foreground(int fd) {
  const pid_t group = ::tcgetpgrp(fd);
  // If the group is negative, this is not the controlling terminal, so reading it cannot stop this process.
  return group < 0 || group == ::getpgrp();
}

TerminalGuard::TerminalGuard(int fd) : fd_(fd) {
  termios settings{};
  if (::isatty(fd) != 0 && ::tcgetattr(fd, &settings) == 0) before_ = settings;
}

TerminalGuard::~TerminalGuard() {
  if (!before_) return;
  termios now{};
  if (::tcgetattr(fd_, &now) != 0 || !in_foreground(fd_)) return;
  // Only if the settings have changed: setting them needlessly could stop a background job.
  if (std::memcmp(&now, &*before_, sizeof now) != 0) ::tcsetattr(fd_, TCSANOW, &*before_);
}

}  // namespace cohort::sys
