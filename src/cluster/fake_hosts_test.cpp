// How ranks are divided among fake hosts.
#include "cluster/fake_hosts.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::cluster {
namespace {

std::vector<int> divided(const char* text, int size) {
  const auto hosts = divide_into_hosts(text, size);
  return hosts ? *hosts : std::vector<int>{-1};
}

TEST(PretendedHosts, AreANumberOrAList) {
  EXPECT_EQ(divided("", 4), std::vector<int>());
  EXPECT_EQ(divided("2", 4), (std::vector<int>{0, 0, 1, 1}));
  EXPECT_EQ(divided("3", 4), (std::vector<int>{0, 0, 1, 2}));
  EXPECT_EQ(divided("9", 2), (std::vector<int>{0, 1}));
  EXPECT_EQ(divided("1,3", 4), (std::vector<int>{0, 1, 1, 1}));
}

TEST(PretendedHosts, ThatDoNotFitAreRefused) {
  for (const char* const text : {"0", "-1", "x", "2,", "1,2", "1,,3", "4294967297", "2147483647,2147483647,6"}) {
    const auto hosts = divide_into_hosts(text, 4);
    ASSERT_FALSE(hosts) << text;
    EXPECT_NE(std::string(hosts.error().what()).find(std::string("COHORT_PRETEND_HOSTS='") + text + "'"),
              std::string::npos);
  }
}

}  // namespace
}  // namespace cohort::cluster
