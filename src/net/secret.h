// The job's 256-bit secret: every process that has it belongs to the job. It travels in sealed memory files over
// inherited descriptors and in files of mode 0600, never in arguments or the environment. A Secret owns its 32 bytes,
// in memory that no core dump shows, and erases them when it dies. Copies are independent; const use from several
// threads is fine.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/ghash.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

struct evp_cipher_ctx_st;

namespace cohort::net {

class Secret {
 public:
  static constexpr std::size_t kBytes = 32;

  /// Makes a secret by the kernel's generator. Fails with Io only where getrandom(2) does.
  static Result<Secret> generate();
  static Secret from_bytes(std::span<const std::uint8_t, kBytes> bytes);
  /// Reads 64 hexadecimal digits; nullopt for anything else.
  static std::optional<Secret> from_digits(std::string_view digits);
  /// Its 64 digits. Reserve space in the text first, and `wipe` it: a text that grows leaves what it held behind.
  void append_digits(std::string& to) const;

  /// Reads what `to_sealed_memfd` made, which can be read again. Sets CLOEXEC: what this process starts does not get
  /// it. Refuses (Unavailable) a descriptor that is closed, or is not a memory file of 32 bytes sealed against changes:
  /// launchers in between (torchrun, Python's subprocess) close descriptors and the number may mean another file.
  static Result<Secret> from_sealed_memfd(int fd);

  /// Reads 64 hexadecimal digits and an optional newline. Refuses (InvalidArgument) a file that others may read or
  /// that does not belong to this user; the message gives the command that puts it right. "env:NAME" is the variable
  /// NAME instead of a file.
  static Result<Secret> from_file(const std::string& path);

  /// A memory file that holds the secret, sealed against every change. CLOEXEC is set: clear it in the child that is
  /// to inherit it.
  Result<sys::UniqueFd> to_sealed_memfd() const;

  std::span<const std::uint8_t, kBytes> bytes() const noexcept {
    return std::span<const std::uint8_t, kBytes>(bytes_, kBytes);
  }
  /// Compares in constant time.
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

// Digests and authentication codes, by OpenSSL. SHA-256, for names that have to be the same on all ranks: pure
// functions; any thread.

/// 64 lower-case hexadecimal digits.
std::string sha256_hex(std::string_view bytes);

// HMAC-SHA256 (RFC 2104), for proofs of a shared secret. Pure functions; any thread.

using Mac = std::array<std::uint8_t, 32>;

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes);

/// Compares in constant time.
bool same(const Mac& a, const Mac& b) noexcept;

// Proofs for frames of one direction of a connection: GMAC with AES-128 (NIST SP 800-38D) under a key of this direction
// alone, whose nonce counts the frames. A frame that was changed, repeated, left out or moved has no right tag. Both
// ends begin and finish the same frames in the same order. Not thread-safe.
class FrameMac {
 public:
  using Key = std::array<std::uint8_t, 16>;
  using Tag = std::array<std::byte, 16>;

  /// Throws Internal if this OpenSSL has no AES-GCM. Tags are the same with our hash and with OpenSSL's.
  explicit FrameMac(const Key& key, bool own_hash = Ghash::available());
  FrameMac(FrameMac&&) noexcept = default;
  FrameMac& operator=(FrameMac&&) noexcept = default;

  /// The next frame.
  void begin();
  /// Bytes of it, in order, in pieces of any size.
  void add(const void* data, std::size_t bytes);
  Tag finish();

  /// Compares in constant time.
  static bool same(const Tag& a, const Tag& b) noexcept;

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const noexcept;
  };
  static constexpr std::uint64_t kPads = 16;
  void make_pads();

  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
  std::unique_ptr<Ghash> hash_;       // or all is the context's
  std::array<Tag, kPads> pads_ = {};  // what hashes of the next frames are encrypted with
  std::uint64_t frames_ = 0;
};

}  // namespace cohort::net
