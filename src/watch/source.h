// Where what is shown comes from: the files of a run, or the page of another machine. One thread.
#pragma once

#include "launch/messages.h"
#include "watch/view.h"

#include <string>
#include <vector>

namespace cohort::watch {

/// The last lines of a log, without control characters.
struct LogTail {
  std::string path;
  std::vector<std::string> lines;
  std::string why;  ///< there is none, and why
};

class Source {
 public:
  virtual ~Source() = default;
  /// Looks again; true if anything has changed. What cannot be read now stays as it was.
  virtual bool poll() = 0;
  virtual const View& view() const = 0;
  virtual LogTail log(int rank, launch::Stream stream, std::size_t lines) = 0;
  /// Seconds since 1970 by the clock of the run's host.
  virtual double now() const = 0;
  /// Why nothing new comes; empty if it does.
  virtual std::string trouble() const = 0;
};

}  // namespace cohort::watch
