#include "net/hmac.h"

#include "base/result.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>

namespace cohort::net {

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

}  // namespace cohort::net
