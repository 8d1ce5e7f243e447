#include "net/secret.h"

#include <gtest/gtest.h>
#include <openssl/evp.h>

#include <random>
#include <string>
#include <vector>

namespace cohort::net {
namespace {

std::string hex(const Mac& mac) {
  std::string text;
  for (const std::uint8_t byte : mac) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

// RFC 4231, test cases 1 and 2.
TEST(Hmac, IsThatOfTheStandard) {
  EXPECT_EQ(hex(hmac_sha256(std::vector<std::uint8_t>(20, 0x0b), "Hi There")),
            "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  const std::string key = "Jefe";
  EXPECT_EQ(hex(hmac_sha256(std::vector<std::uint8_t>(key.begin(), key.end()), "what do ya want for nothing?")),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
}

// Tags of frames: equal to the standard's value, and changed by any change.

constexpr FrameMac::Key kKey = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

FrameMac::Tag tag_of(FrameMac& mac, const std::string& frame, std::size_t piece = 1000) {
  mac.begin();
  for (std::size_t at = 0; at < frame.size(); at += piece)
    mac.add(frame.data() + at, std::min(piece, frame.size() - at));
  return mac.finish();
}

// Compares with OpenSSL's own GMAC, which takes its nonce as a parameter.
TEST(FrameMac, IsGmacWhoseNonceCountsTheFrames) {
  FrameMac mac(kKey);
  const std::string frame(5000, 'g');
  tag_of(mac, "the first");
  const FrameMac::Tag tag = tag_of(mac, frame);
  unsigned char nonce[12] = {2};
  char cipher[] = "AES-128-GCM";
  const OSSL_PARAM parameters[] = {OSSL_PARAM_construct_utf8_string("cipher", cipher, 0),
                                   OSSL_PARAM_construct_octet_string("iv", nonce, sizeof nonce),
                                   OSSL_PARAM_construct_end()};
  FrameMac::Tag expected{};
  std::size_t length = 0;
  ASSERT_NE(::EVP_Q_mac(nullptr, "GMAC", nullptr, nullptr, parameters, kKey.data(), kKey.size(),
                        reinterpret_cast<const unsigned char*>(frame.data()), frame.size(),
                        reinterpret_cast<unsigned char*>(expected.data()), expected.size(), &length),
            nullptr);
  EXPECT_EQ(tag, expected);
}

// Takes lengths around each internal boundary of the hash, split anywhere.
TEST(FrameMac, IsTheSameWithOurHashAndWithOpenSsls) {
  if (!Ghash::available()) GTEST_SKIP() << "this processor has no VPCLMULQDQ";
  std::mt19937 random(5);
  std::string frame(5000, '\0');
  for (char& byte : frame) byte = static_cast<char>(random());
  for (int key_number = 0; key_number < 4; ++key_number) {
    FrameMac::Key key{};
    for (std::uint8_t& byte : key) byte = static_cast<std::uint8_t>(random());
    FrameMac ours(key, true);
    FrameMac theirs(key, false);
    for (std::size_t length = 0; length < frame.size(); length += length < 1200 ? 1 : 97) {
      const std::string part = frame.substr(random() % (frame.size() - length), length);
      const std::size_t piece = 1 + random() % (length + 20);
      ASSERT_EQ(tag_of(ours, part, piece), tag_of(theirs, part)) << length << " in pieces of " << piece;
    }
  }
}

TEST(FrameMac, DependsOnEveryByteTheKeyAndThePlaceInTheOrder) {
  const std::string frame(3000, 'g');
  FrameMac sender(kKey);
  const FrameMac::Tag first = tag_of(sender, frame);
  EXPECT_NE(tag_of(sender, frame), first) << "the same again is another frame";
  for (const std::size_t piece : {1U, 15U, 16U, 17U, 4096U}) {
    FrameMac receiver(kKey);
    EXPECT_TRUE(FrameMac::same(tag_of(receiver, frame, piece), first)) << piece;
  }
  for (const std::size_t at : {0U, 15U, 16U, 1500U, 2999U}) {
    std::string changed = frame;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    FrameMac receiver(kKey);
    EXPECT_FALSE(FrameMac::same(tag_of(receiver, changed), first)) << at;
  }
  FrameMac receiver(kKey);
  EXPECT_NE(tag_of(receiver, frame + '\0'), first);
  FrameMac::Key other = kKey;
  other[15] ^= 1;
  FrameMac stranger(other);
  EXPECT_NE(tag_of(stranger, frame), first);
}

}  // namespace

}  // namespace cohort::net
