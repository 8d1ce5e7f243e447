// The commands of a server in a file, each written before it is carried out: a process that is killed and started again
// has the state that it had. (The system writes it to the disk in its own time: what a host loses with its memory is
// lost.) Owns the file, under a lock; one thread at a time.
#pragma once

#include "ps/state.h"
#include "sys/unique_fd.h"

#include <functional>
#include <string>

namespace cohort::ps {

class Journal {
 public:
  using Replay = std::function<Result<void>(const Command&)>;

  /// Opens or makes the file, and calls `replay` with each command in it. A record that was torn when its writer died
  /// is cut off. Unavailable if another process has it, Io, Corrupt if it is no journal, or what `replay` says.
  static Result<Journal> open(const std::string& path, const Replay& replay);
  /// Io: nothing of it is in the file.
  Result<void> append(const Command& command);

 private:
  Journal(sys::UniqueFd fd, std::string path, std::uint64_t size)
      : fd_(std::move(fd)), path_(std::move(path)), size_(size) {}
  sys::UniqueFd fd_;
  std::string path_;
  std::uint64_t size_;
};

}  // namespace cohort::ps
