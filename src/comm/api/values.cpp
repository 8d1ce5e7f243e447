#include "base/result.h"
#include "comm/kernels/finite.h"

#include <cohort/digest.h>
#include <cohort/finite.h>

#include <openssl/evp.h>

#include <cstring>
#include <memory>
#include <random>

namespace cohort {
namespace {

template <class T>
std::optional<std::int64_t> first(const void* data, std::int64_t parts, T limit) {
  const auto count = static_cast<std::size_t>(parts);
  const std::size_t at = comm::first_reaching(static_cast<const T*>(data), count, limit);
  return at == count ? std::nullopt : std::optional(static_cast<std::int64_t>(at));
}

}  // namespace

std::optional<std::int64_t> first_non_finite(ConstBuffer data, const FiniteOptions& options) {
  if (data.count < 0) raise(ErrorCode::InvalidArgument, "first_non_finite: {} elements", data.count);
  if (options.wire_dtype && *options.wire_dtype != DType::BFloat16) {
    raise(ErrorCode::InvalidArgument, "first_non_finite: wire_dtype {} -- only bfloat16 is ever on the wire",
          to_string(*options.wire_dtype));
  }
  switch (data.dtype) {
    case DType::Float16: return first(data.data, data.count, comm::kInfiniteFloat16);
    case DType::BFloat16: return first(data.data, data.count, comm::kInfiniteBFloat16);
    case DType::Float32:
      return first(data.data, data.count, options.wire_dtype ? comm::kInfiniteAsBFloat16 : comm::kInfiniteFloat32);
    case DType::Float64: return first(data.data, data.count, comm::kInfiniteFloat64);
    case DType::Complex64:
    case DType::Complex128: {
      const auto part = data.dtype == DType::Complex64 ? first(data.data, 2 * data.count, comm::kInfiniteFloat32)
                                                       : first(data.data, 2 * data.count, comm::kInfiniteFloat64);
      return part ? std::optional(*part / 2) : std::nullopt;
    }
    default: return std::nullopt;
  }
}

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
