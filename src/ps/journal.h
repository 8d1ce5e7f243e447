// The commands of a server in a file, each written before it is carried out: a process that is killed and started again
// has the state that it had. (The system writes it to the disk in its own time: what a host loses with its memory is
// lost.) Once it is long it is written anew beside, as an image of the state and what comes after, and takes the old
// one's place when the disk has the image: whole at every moment. Owns the file, under a lock, and for that time a
// thread; one thread at a time.
#pragma once

#include "ps/state.h"
#include "sys/unique_fd.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace cohort::ps {

class Journal {
 public:
  /// Opens or makes the file, and has `state`, a new one, carry out each command in it. A record that was torn when its
  /// writer died is cut off. `tail`: bytes of commands after which it is long. Unavailable if another process has it,
  /// Io, Corrupt if it is no journal, or what the state says.
  static Result<Journal> open(const std::string& path, State& state, std::size_t tail);
  Journal(Journal&&) noexcept;
  Journal& operator=(Journal&&) noexcept;
  ~Journal();

  /// Io: nothing of it is in the file.
  Result<void> append(const Command& command);
  /// `state`: what the commands so far have made. If that cannot be written the journal goes on as it is.
  void compact_if_long(const State& state);
  /// Bytes of the file.
  std::uint64_t size() const noexcept { return file_.size; }

 private:
  struct File {
    sys::UniqueFd fd;
    std::string path;
    std::uint64_t size = 0;
    std::uint64_t image = 0;  ///< of these: what is no change, but stands for those before
    Result<void> append(const Command& command);
  };
  struct Next;
  Journal(File file, std::size_t tail);
  static Result<File> lock(const std::string& path);
  static Result<File> write_image(const std::string& path, const State& state);
  void take_over();
  void give_up(const Error& error);

  File file_;
  std::size_t tail_;
  std::unique_ptr<Next> next_;  ///< that will take its place, and has all that it has
};

}  // namespace cohort::ps
