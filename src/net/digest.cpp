#include "net/digest.h"

#include "base/result.h"

#include <openssl/evp.h>

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

}  // namespace cohort::net
