#include <cohort/digest.h>

#include "base/result.h"

#include <openssl/evp.h>

#include <cstring>
#include <memory>
#include <random>

namespace cohort {

DigestKey make_digest_key() {
  std::random_device random;
  DigestKey key;
  for (std::size_t at = 0; at < key.size(); at += sizeof(std::uint32_t)) {
    const auto word = static_cast<std::uint32_t>(random());
    std::memcpy(key.data() + at, &word, sizeof word);
  }
  return key;
}

Digest digest_of(ConstBuffer data, const DigestKey& key) {
  struct FreeMac {
    void operator()(EVP_MAC* mac) const noexcept { EVP_MAC_free(mac); }
    void operator()(EVP_MAC_CTX* context) const noexcept { EVP_MAC_CTX_free(context); }
  };
  // Looking it up takes longer than the digest of a small tensor.
  static const std::unique_ptr<EVP_MAC, FreeMac> poly1305(EVP_MAC_fetch(nullptr, "POLY1305", nullptr));
  const std::unique_ptr<EVP_MAC_CTX, FreeMac> context(poly1305 ? EVP_MAC_CTX_new(poly1305.get()) : nullptr);
  Digest digest{};
  std::size_t size = 0;
  if (context == nullptr || EVP_MAC_init(context.get(), key.data(), key.size(), nullptr) != 1 ||
      EVP_MAC_update(context.get(), static_cast<const unsigned char*>(data.data), data.bytes()) != 1 ||
      EVP_MAC_final(context.get(), reinterpret_cast<unsigned char*>(digest.data()), &size, sizeof digest) != 1) {
    raise(ErrorCode::Internal, "digest_of: OpenSSL's Poly1305 failed -- is this OpenSSL built without it?");
  }
  return digest;
}

}  // namespace cohort
