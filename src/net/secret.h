// The job's 256-bit secret: every process that has it belongs to the job. The secret is passed in sealed memory files
// over inherited descriptors and in files of mode 0600, never in arguments or the environment. A Secret owns its 32
// bytes, in memory excluded from core dumps, and its destructor erases them. Copies are independent; const use from
// several threads is fine.
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

  /// Makes a secret with the kernel's random generator. Fails with Io only if getrandom(2) fails.
  static Result<Secret> generate();
  static Secret from_bytes(std::span<const std::uint8_t, kBytes> bytes);
  /// Parses 64 hexadecimal digits. Returns nullopt for anything else.
  static std::optional<Secret> from_digits(std::string_view digits);
  /// Appends the secret's 64 digits. Reserve space in `to` first, since a string that grows leaves its old contents in
  /// freed memory; `wipe` it afterwards.
  void append_digits(std::string& to) const;

  /// Reads a memory file of `to_sealed_memfd`; it can be read again. Sets CLOEXEC, so programs started by this process
  /// do not inherit the descriptor. Fails with Unavailable if the descriptor is closed or is not a sealed memory file
  /// of 32 bytes. (Launchers in between, such as torchrun, close descriptors, and the number may be reused.)
  static Result<Secret> from_sealed_memfd(int fd);

  /// Reads 64 hexadecimal digits and an optional newline. Fails with InvalidArgument if other users may read the file
  /// or it does not belong to this user; the message gives the command that fixes that. "env:NAME" reads the
  /// environment variable NAME instead of a file.
  static Result<Secret> from_file(const std::string& path);

  /// Makes a memory file that holds the secret, sealed against every change. CLOEXEC is set, so clear it in a child
  /// that is to inherit the file.
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
  std::uint8_t* bytes_;  ///< from sys::take_hidden_memory
};

/// Overwrites and clears a string that held a secret.
void wipe(std::string& text) noexcept;

/// Wipes a string at the end of its scope.
class Wiping {
 public:
  explicit Wiping(std::string& text) noexcept : text_(text) {}
  ~Wiping() { wipe(text_); }
  Wiping(const Wiping&) = delete;
  Wiping& operator=(const Wiping&) = delete;

 private:
  std::string& text_;
};

/// Makes a new secret and writes it to a new file of mode 0600 that `from_file` can read. Fails with Unavailable if the
/// file exists (a secret is never overwritten), Io if it cannot be written. Leaves no partial file.
Result<void> write_new_secret_file(const std::string& path);

// Digests and authentication codes, by OpenSSL. SHA-256 is for names that have to be the same on all ranks. Pure
// functions; any thread.

/// Returns the digest as 64 lower-case hexadecimal digits.
std::string sha256_hex(std::string_view bytes);

// HMAC-SHA256 (RFC 2104), for proofs of a shared secret. Pure functions; any thread.

using Mac = std::array<std::uint8_t, 32>;

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes);

/// Compares in constant time.
bool same(const Mac& a, const Mac& b) noexcept;

// Authenticates the frames of one direction of a connection: GMAC with AES-128 (NIST SP 800-38D), with a key used for
// this direction only and the frame's number as nonce. If a frame was changed, repeated, dropped or reordered, the tag
// does not match. Both ends begin and finish the same frames in the same order. Not thread-safe.
class FrameMac {
 public:
  using Key = std::array<std::uint8_t, 16>;
  using Tag = std::array<std::byte, 16>;

  /// Throws Internal if this OpenSSL has no AES-GCM. Tags are the same with Ghash (`own_hash`) and with OpenSSL's hash.
  explicit FrameMac(const Key& key, bool own_hash = Ghash::available());
  FrameMac(FrameMac&&) noexcept = default;
  FrameMac& operator=(FrameMac&&) noexcept = default;

  /// Begins the next frame.
  void begin();
  /// Adds the frame's bytes, in order, in pieces of any size.
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
  std::unique_ptr<Ghash> hash_;       // null: `context_` computes the whole tag
  std::array<Tag, kPads> pads_ = {};  // these encrypt the hashes of the next frames
  std::uint64_t frames_ = 0;
};

}  // namespace cohort::net
