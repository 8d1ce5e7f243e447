// Proofs for frames that go one way over a connection: GMAC with AES-128 (NIST SP 800-38D) under a key of this
// direction alone, whose nonce counts the frames. A frame that was changed, repeated, left out or moved has no right
// tag. Both ends begin and finish the same frames in the same order. Not thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

struct evp_cipher_ctx_st;

namespace cohort::net {

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
