// Journal: the records that a backup gets of some rows, in a file: an image of their state, and the commands since.
// Each is written before it is run, so that a process that is killed and started again recovers its state. (The system
// writes the file to the disk in its own time: if the host fails, the latest commands are lost.) When a journal is
// long, a thread writes a new one beside it. The new file replaces the old one when it is on the disk, so the journal
// is complete at every moment. Owns the file, under a lock; one thread at a time. record_head, next_record: a command
// as bytes, framed like the records of a file store; in journals and sent to backups. Pure; any thread.
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
  /// Renames the file at the path, which is of an earlier job, if there is one. Fails with Unavailable if another
  /// process has it, or Io if there can be none.
  static Result<void> set_aside(const std::string& path);
  /// Removes the file, which is of an earlier copy, if there is one. Fails like set_aside.
  static Result<void> remove(const std::string& path);
  /// Opens or creates the file, and runs each command in it on `state`, which must be new. An incomplete record at the
  /// end, left when its writer died, is moved to a file beside it. `tail`: bytes of commands after which the journal is
  /// long. Fails with Unavailable if another process has the file, Io, Corrupt if it is no journal or damaged (the file
  /// stays as it is), or the state's error.
  static Result<Journal> open(const std::string& path, State& state, std::size_t tail);
  Journal(Journal&&) noexcept;
  Journal& operator=(Journal&&) noexcept;
  ~Journal();

  /// Appends a command's record, which is in two parts. If it fails with Io, no part of the record is in the file.
  Result<void> append(Method method, std::string_view head, std::string_view body);
  /// Begins to write a new file if the journal is long. `state`: the result of all commands so far. If its image cannot
  /// be written, the journal continues in the old file.
  void compact_if_long(State& state);
  /// Size of the file in bytes.
  std::uint64_t size() const noexcept { return file_.size; }

 private:
  struct File {
    sys::UniqueFd fd;
    std::string path;
    std::uint64_t size = 0;
    std::uint64_t image = 0;  ///< bytes up to the image's end, which do not count toward `tail`
    Result<void> append(std::string_view first, std::string_view second);
    /// Appends a range of bytes of another file.
    Result<void> append_from(int other, std::uint64_t from, std::uint64_t to);
  };
  struct Next;
  Journal(File file, std::size_t tail);
  static Result<File> lock(const std::string& path);
  static Result<void> cut(File& file, std::string_view torn);
  static Result<File> begin_next(const std::string& path);
  void go_on_with_next();
  void give_up(const Error& error);

  File file_;
  std::size_t tail_;
  std::unique_ptr<Next> next_;  ///< the file that will replace this one
};

/// The state of some rows, and the journal of what has made it, if there is one.
struct Journaled {
  State state = {};
  std::optional<Journal> journal = {};
};

/// Size of the head before a command's body.
inline constexpr std::size_t kRecordHead = 32;

/// Returns the head of a command's record. The body follows it unchanged.
std::string record_head(const Command& command);
/// Removes the first record from `bytes` and returns its command, whose body stays in that memory. Returns nullopt, and
/// removes nothing, if `bytes` do not begin with a complete record; `damaged` is set if more bytes could not complete
/// it.
std::optional<Command> next_record(std::string_view& bytes, std::optional<Error>* damaged = nullptr);

}  // namespace cohort::ps
