// The commands of a server in a file, each written before it is carried out: a process that is killed and started again
// has the state that it had. (The system writes it to the disk in its own time: what a host loses with its memory is
// lost.) Once it is long it is written anew beside, on a thread, as an image of the state and what comes after, and
// takes the old one's place when the disk has it: whole at every moment. Owns the file, under a lock; one thread at a
// time.
// A command as bytes, framed as the records of a file store: in journals, and on the way to a backup. Pure; any thread.
#pragma once

#include "base/unique_fd.h"
#include "ps/state.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace cohort::ps {

class Journal {
 public:
  enum class Before : std::uint8_t {
    GoesOn,
    SetAside,  ///< an existing file is of an earlier job: renamed, once nobody has it
  };
  /// Opens or makes the file, and has `state`, a new one, carry out each command in it. An incomplete record at its
  /// end, left when its writer died, is kept in a file beside it and cut off. `tail`: bytes of commands after which it
  /// is long. Unavailable if another process has it, Io, Corrupt if it is no journal or damaged (it stays as it is), or
  /// the state's error.
  static Result<Journal> open(const std::string& path, State& state, std::size_t tail, Before before = Before::GoesOn);
  Journal(Journal&&) noexcept;
  Journal& operator=(Journal&&) noexcept;
  ~Journal();

  /// Io: nothing of it is in the file.
  Result<void> append(const Command& command);
  /// `state`: the result of the commands so far. If its image cannot be written, the journal goes on as it is.
  void compact_if_long(State& state);
  /// Bytes of the file.
  std::uint64_t size() const noexcept { return file_.size; }

 private:
  struct File {
    sys::UniqueFd fd;
    std::string path;
    std::uint64_t size = 0;
    std::uint64_t image = 0;  ///< of these: what is no change, but stands for those before
    Result<void> append(const Command& command);
    Result<void> append(std::string_view first, std::string_view second);
    /// Appends those bytes of another file.
    Result<void> append_from(int other, std::uint64_t from, std::uint64_t to);
  };
  struct Next;
  Journal(File file, std::size_t tail);
  static Result<File> lock(const std::string& path);
  static Result<void> set_aside(const File& file, const std::string& path);
  static Result<void> cut(File& file, std::string_view torn);
  static Result<File> begin_next(const std::string& path);
  void go_on_with_next();
  void give_up(const Error& error);

  File file_;
  std::size_t tail_;
  std::unique_ptr<Next> next_;  ///< that will take its place, and has all that it has
};

/// Size of the head before a command's body.
inline constexpr std::size_t kRecordHead = 32;

/// The head alone: the body follows it as it is.
std::string record_head(const Command& command);
/// The first record of `bytes`, which goes on behind it then. The body lies in `bytes`. nullopt, and nothing happens:
/// it does not begin with a whole one; `damaged` says why more bytes would not make it one.
std::optional<Command> next_record(std::string_view& bytes, std::optional<Error>* damaged = nullptr);

}  // namespace cohort::ps
