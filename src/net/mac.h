// Digests and authentication codes, by OpenSSL. SHA-256, for names that have to be the same on all ranks: pure
// functions; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace cohort::net {

/// 64 lower-case hexadecimal digits.
std::string sha256_hex(std::string_view bytes);

// HMAC-SHA256 (RFC 2104), for proofs of a shared secret. Pure functions; any thread.

using Mac = std::array<std::uint8_t, 32>;

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes);

/// In constant time.
bool same(const Mac& a, const Mac& b) noexcept;

}  // namespace cohort::net

struct evp_cipher_ctx_st;

namespace cohort::net {

// Proofs for frames that go one way over a connection: GMAC with AES-128 (NIST SP 800-38D) under a key of this
// direction alone, whose nonce counts the frames. A frame that was changed, repeated, left out or moved has no right
// tag. Both ends begin and finish the same frames in the same order. Not thread-safe.
class FrameMac {
 public:
  using Key = std::array<std::uint8_t, 16>;
  using Tag = std::array<std::byte, 16>;

  /// Throws Internal if this OpenSSL has no AES-GCM.
  explicit FrameMac(const Key& key);
  FrameMac(FrameMac&&) noexcept = default;
  FrameMac& operator=(FrameMac&&) noexcept = default;

  /// The next frame.
  void begin();
  /// Bytes of it, in order, in pieces of any size.
  void add(const void* data, std::size_t bytes);
  Tag finish();

  /// In constant time.
  static bool same(const Tag& a, const Tag& b) noexcept;

 private:
  struct Free {
    void operator()(evp_cipher_ctx_st* context) const noexcept;
  };
  std::unique_ptr<evp_cipher_ctx_st, Free> context_;
  std::uint64_t frames_ = 0;
};

}  // namespace cohort::net
