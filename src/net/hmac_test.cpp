#include "net/hmac.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace cohort::net
