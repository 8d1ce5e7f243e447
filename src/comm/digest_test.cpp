#include <cohort/digest.h>

#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string_view>
#include <vector>

namespace cohort {
namespace {

Digest digest_of_bytes(const void* data, std::size_t bytes, const DigestKey& key) {
  return digest_of({data, static_cast<std::int64_t>(bytes), DType::UInt8}, key);
}

// RFC 8439, section 2.5.2.
TEST(DigestTest, IsPoly1305) {
  const DigestKey key = {0x85, 0xd6, 0xbe, 0x78, 0x57, 0x55, 0x6d, 0x33, 0x7f, 0x44, 0x52,
                         0xfe, 0x42, 0xd5, 0x06, 0xa8, 0x01, 0x03, 0x80, 0x8a, 0xfb, 0x0d,
                         0xb2, 0xfd, 0x4a, 0xbf, 0xf6, 0xaf, 0x41, 0x49, 0xf5, 0x1b};
  const std::uint8_t tag[] = {0xa8, 0x06, 0x1d, 0xc1, 0x30, 0x51, 0x36, 0xc6,
                              0xc2, 0x2b, 0x8b, 0xaf, 0x0c, 0x01, 0x27, 0xa9};
  constexpr std::string_view kText = "Cryptographic Forum Research Group";
  const Digest digest = digest_of_bytes(kText.data(), kText.size(), key);
  EXPECT_EQ(std::memcmp(digest.data(), tag, sizeof tag), 0);
}

TEST(DigestTest, EveryFlippedBitChangesIt) {
  const DigestKey key = make_digest_key();
  std::vector<std::uint8_t> bytes(259);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 37);
  for (std::size_t size : {std::size_t{1}, std::size_t{16}, std::size_t{17}, bytes.size()}) {
    std::set<Digest> seen = {digest_of_bytes(bytes.data(), size, key)};
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
      EXPECT_TRUE(seen.insert(digest_of_bytes(bytes.data(), size, key)).second) << "bit " << bit << " of " << size;
      bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    }
  }
  EXPECT_NE(digest_of_bytes(bytes.data(), 16, key), digest_of_bytes(bytes.data(), 16, make_digest_key()));
  EXPECT_NO_THROW(digest_of_bytes(nullptr, 0, key));
}

}  // namespace
}  // namespace cohort
