#include "formats/digest.h"

#include "base/result.h"

#include <openssl/evp.h>

#include <array>

namespace cohort::formats {

struct Sha256::Context {
  EVP_MD_CTX* pointer = EVP_MD_CTX_new();
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() { EVP_MD_CTX_free(pointer); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) {
  if (context_->pointer == nullptr || EVP_DigestInit_ex(context_->pointer, EVP_sha256(), nullptr) != 1) {
    raise(ErrorCode::Unavailable, "cannot compute SHA-256 -- OpenSSL refuses it -- check OpenSSL's configuration");
  }
}
Sha256::~Sha256() = default;
Sha256::Sha256(Sha256&&) noexcept = default;

void Sha256::update(std::span<const std::byte> bytes) {
  if (EVP_DigestUpdate(context_->pointer, bytes.data(), bytes.size()) != 1)
    raise(ErrorCode::Internal, "SHA-256 failed");
}

std::string Sha256::finish() {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int size = 0;
  if (EVP_DigestFinal_ex(context_->pointer, digest.data(), &size) != 1) raise(ErrorCode::Internal, "SHA-256 failed");
  std::string text;
  for (unsigned int i = 0; i < size; ++i) text += fmt::format("{:02x}", digest[i]);
  return text;
}

std::string sha256(std::span<const std::byte> bytes) {
  Sha256 digest;
  digest.update(bytes);
  return digest.finish();
}

}  // namespace cohort::formats
