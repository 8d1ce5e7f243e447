// A Python program that runs beside a sink, by the python3 in PATH, with a socket as its stdin and stdout. The program
// ends with the thread that made it. One thread.
#pragma once

#include "base/process.h"
#include "base/unique_fd.h"

#include <chrono>
#include <string>
#include <string_view>

namespace cohort::track {

class PythonChild {
 public:
  /// Throws Unavailable if the program cannot be started.
  explicit PythonChild(std::string_view program);
  /// Kills the program.
  ~PythonChild();
  PythonChild(const PythonChild&) = delete;
  PythonChild& operator=(const PythonChild&) = delete;

  /// Writes to the program's stdin; returns false if the program has ended.
  bool say(std::string_view text) const;
  /// The child's next line, without its line end; when the child ends, the rest of the output.
  std::string line(std::chrono::milliseconds limit);

 private:
  sys::UniqueFd fd_;
  sys::ChildProcess process_;
  std::string said_;
};

}  // namespace cohort::track
