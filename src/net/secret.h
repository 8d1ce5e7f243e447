// The job's 256-bit secret: whoever has it belongs to the job. It travels in sealed memory files over inherited
// descriptors and in files of mode 0600, never in arguments or the environment. A Secret owns its 32 bytes, in memory
// that no core dump shows, and erases them when it dies. Copies are independent; const use from several threads is
// fine.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

class Secret {
 public:
  static constexpr std::size_t kBytes = 32;

  /// From the kernel's generator. Fails with Io only where getrandom(2) does.
  static Result<Secret> generate();
  static Secret from_bytes(std::span<const std::uint8_t, kBytes> bytes);
  /// Of 64 hexadecimal digits; nullopt for anything else.
  static std::optional<Secret> from_digits(std::string_view digits);
  /// Its 64 digits. Give the text room first, and `wipe` it: a text that grows leaves what it held behind.
  void append_digits(std::string& to) const;

  /// Reads what `to_sealed_memfd` made, which can be read again. Sets CLOEXEC: what this process starts does not get
  /// it. Refuses (Unavailable) a descriptor that is closed, or is not a memory file of 32 bytes sealed against changes:
  /// launchers in between (torchrun, Python's subprocess) close descriptors and the number may mean another file.
  static Result<Secret> from_sealed_memfd(int fd);

  /// Reads 64 hexadecimal digits and an optional newline. Refuses (InvalidArgument) a file that others may read or
  /// that does not belong to this user; the message gives the command that puts it right.
  static Result<Secret> from_file(const std::string& path);

  /// A memory file that holds the secret, sealed against every change. CLOEXEC is set: clear it in the child that is
  /// to inherit it.
  Result<sys::UniqueFd> to_sealed_memfd() const;

  std::span<const std::uint8_t, kBytes> bytes() const noexcept {
    return std::span<const std::uint8_t, kBytes>(bytes_, kBytes);
  }
  /// In constant time.
  bool operator==(const Secret& other) const noexcept;

  Secret(const Secret& other);
  Secret& operator=(const Secret& other) noexcept;
  ~Secret();

 private:
  Secret();
  std::uint8_t* bytes_;  ///< sys::take_hidden_memory
};

/// Overwrites a text that has held a secret, and empties it.
void wipe(std::string& text) noexcept;

/// Does so at the end of its scope.
class Wiping {
 public:
  explicit Wiping(std::string& text) noexcept : text_(text) {}
  ~Wiping() { wipe(text_); }
  Wiping(const Wiping&) = delete;
  Wiping& operator=(const Wiping&) = delete;

 private:
  std::string& text_;
};

/// Makes a new secret and writes it to a new file of mode 0600 as `from_file` reads it. Fails with Unavailable if the
/// file exists (a secret is never overwritten), Io if it cannot be written; leaves no half-written file.
Result<void> write_new_secret_file(const std::string& path);

}  // namespace cohort::net
