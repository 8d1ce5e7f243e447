#include "net/mac.h"

#include "base/result.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

#include <algorithm>
#include <array>

namespace cohort::net {

std::string sha256_hex(std::string_view bytes) {
  std::array<unsigned char, 32> digest{};
  unsigned int size = 0;
  if (::EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, ::EVP_sha256(), nullptr) != 1) {
    raise(ErrorCode::Internal, "SHA-256 is not available in this OpenSSL");
  }
  std::string text;
  for (const unsigned char byte : digest) text += fmt::format("{:02x}", byte);
  return text;
}

Mac hmac_sha256(std::span<const std::uint8_t> key, std::string_view bytes) {
  Mac mac{};
  unsigned int size = 0;
  if (::HMAC(::EVP_sha256(), key.data(), static_cast<int>(key.size()),
             reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size(), mac.data(), &size) == nullptr) {
    raise(ErrorCode::Internal, "HMAC-SHA256 is not available in this OpenSSL");
  }
  return mac;
}

bool same(const Mac& a, const Mac& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

namespace {

constexpr std::size_t kMostAtOnce = std::size_t{1} << 30;  // OpenSSL counts in int

void require(int success) {
  if (success != 1) raise(ErrorCode::Internal, "OpenSSL's AES-128-GCM failed -- is this OpenSSL built without it?");
}

}  // namespace

void FrameMac::Free::operator()(evp_cipher_ctx_st* context) const noexcept { ::EVP_CIPHER_CTX_free(context); }

FrameMac::FrameMac(const Key& key) : context_(::EVP_CIPHER_CTX_new()) {
  require(context_ != nullptr &&
          ::EVP_EncryptInit_ex(context_.get(), ::EVP_aes_128_gcm(), nullptr, key.data(), nullptr) == 1);
}

void FrameMac::begin() {
  std::array<std::uint8_t, 12> nonce{};
  ++frames_;
  for (std::size_t i = 0; i < sizeof frames_; ++i) nonce[i] = static_cast<std::uint8_t>(frames_ >> (8 * i));
  require(::EVP_EncryptInit_ex(context_.get(), nullptr, nullptr, nullptr, nonce.data()));
}

void FrameMac::add(const void* data, std::size_t bytes) {
  const auto* from = static_cast<const unsigned char*>(data);
  while (bytes > 0) {
    const std::size_t step = std::min(bytes, kMostAtOnce);
    int length = 0;
    // What is authenticated and not encrypted: all of it.
    require(::EVP_EncryptUpdate(context_.get(), nullptr, &length, from, static_cast<int>(step)));
    from += step;
    bytes -= step;
  }
}

FrameMac::Tag FrameMac::finish() {
  Tag tag{};
  int length = 0;
  require(::EVP_EncryptFinal_ex(context_.get(), reinterpret_cast<unsigned char*>(tag.data()), &length));
  require(::EVP_CIPHER_CTX_ctrl(context_.get(), EVP_CTRL_GCM_GET_TAG, static_cast<int>(tag.size()), tag.data()));
  return tag;
}

bool FrameMac::same(const Tag& a, const Tag& b) noexcept { return ::CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0; }

}  // namespace cohort::net
