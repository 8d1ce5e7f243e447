#include "net/frame_mac.h"

#include "base/result.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>

namespace cohort::net {
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
