// Properties of a terminal, and a guard that restores its settings.
#pragma once

#include <termios.h>

#include <optional>

namespace cohort::sys {

/// True if the descriptor is a terminal on which colours are welcome (NO_COLOR unset, TERM not "dumb").
bool wants_colour(int fd);
/// True if the environment's locale uses UTF-8.
bool speaks_unicode();
/// Style in which a table or bar is drawn.
struct TextStyle {
  bool unicode = false;
  bool colour = false;
};
/// Returns the style for this descriptor: plain unless it is a terminal; Unicode characters if the locale uses UTF-8.
TextStyle text_style(int fd);
/// True if this process belongs to the terminal's foreground group, so reading the terminal does not stop it.
bool in_foreground(int fd);

/// Remembers the settings of a terminal and restores them when destroyed. Does nothing if `fd` is no terminal.
class TerminalGuard {
 public:
  explicit TerminalGuard(int fd);
  ~TerminalGuard();
  TerminalGuard(const TerminalGuard&) = delete;
  TerminalGuard& operator=(const TerminalGuard&) = delete;

 private:
  int fd_;
  std::optional<termios> before_;
};

}  // namespace cohort::sys
