#include "formats/digest.h"

#include "base/result.h"

#include <openssl/evp.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <string_view>

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

void FileDigester::end_block() {
  blocks_ += fmt::format("{:08x}", crc_);
  crc_ = 0;
  in_block_ = 0;
}

void FileDigester::update(std::span<const std::byte> bytes) {
  size_ += bytes.size();
  // Both digests of a block while it is in the cache.
  while (!bytes.empty()) {
    const auto piece = bytes.first(std::min(bytes.size(), kBlockBytes - in_block_));
    sha256_.update(piece);
    crc_ =
        static_cast<std::uint32_t>(::crc32_z(crc_, reinterpret_cast<const unsigned char*>(piece.data()), piece.size()));
    in_block_ += piece.size();
    if (in_block_ == kBlockBytes) end_block();
    bytes = bytes.subspan(piece.size());
  }
}

FileDigest FileDigester::finish() {
  if (in_block_ > 0) end_block();
  return {size_, sha256_.finish(), std::move(blocks_)};
}

FileDigest digest_of(std::span<const std::byte> bytes) {
  FileDigester digester;
  digester.update(bytes);
  return digester.finish();
}

std::string differing_bytes(const FileDigest& written, const FileDigest& found) {
  constexpr std::size_t kDigits = 8;
  if (written.crc32.size() != found.crc32.size() || written.bytes != found.bytes) return {};
  const std::size_t blocks = written.crc32.size() / kDigits;
  const auto differs = [&](std::size_t block) {
    const auto of = [&](const FileDigest& digest) {
      return std::string_view(digest.crc32).substr(block * kDigits, kDigits);
    };
    return of(written) != of(found);
  };
  std::string first_place;
  std::size_t places = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    if (!differs(block)) continue;
    const std::size_t first = block;
    while (block + 1 < blocks && differs(block + 1)) ++block;
    if (places++ > 0) continue;
    first_place = fmt::format("bytes {} to {}", first * kBlockBytes,
                              std::min<std::uint64_t>((block + 1) * kBlockBytes, written.bytes) - 1);
  }
  if (places < 2) return first_place;
  return fmt::format("{} and {} more place{}", first_place, places - 1, places == 2 ? "" : "s");
}

}  // namespace cohort::formats
