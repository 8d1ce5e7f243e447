// The table of rows and its documentation; who measures with whom.
#include "doctor/finding.h"
#include "doctor/rounds.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <set>
#include <string>

namespace cohort::doctor {
namespace {

TEST(DoctorRounds, EachPairMeetsOnceAndNobodyTwiceAtATime) {
  for (std::size_t count = 0; count <= 9; ++count) {
    std::set<std::pair<std::size_t, std::size_t>> met;
    for (const Pairs& round : rounds_of_pairs(count, true)) {
      std::set<std::size_t> busy;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(met.insert({a, b}).second);
        EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second && a < b && b < count);
      }
    }
    EXPECT_EQ(met.size(), count * (count == 0 ? 0 : count - 1) / 2) << count;
  }
  for (std::size_t count = 2; count <= 70; ++count) {
    std::set<std::size_t> covered;
    for (const Pairs& round : rounds_of_pairs(count, false)) {
      std::set<std::size_t> busy;
      for (const auto& [a, b] : round) {
        EXPECT_TRUE(busy.insert(a).second && busy.insert(b).second && b < count) << count;
        covered.insert({a, b});
      }
    }
    EXPECT_EQ(covered.size(), count);
  }
}

TEST(DoctorRows, EachIsInTheDocumentation) {
  std::ifstream file(COHORT_DOCTOR_PAGE);
  const std::string page{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  ASSERT_FALSE(page.empty());
  std::size_t documented = 0;
  for (std::size_t at = page.find("\n| `"); at != std::string::npos; at = page.find("\n| `", at + 1)) ++documented;
  for (const Row& each : rows()) {
    EXPECT_LE(each.title.size(), 16U) << each.id;
    EXPECT_NE(page.find(fmt::format("| `{}` | {} |", each.id, each.title)), std::string::npos) << each.id;
  }
  EXPECT_EQ(documented, rows().size());
}

}  // namespace
}  // namespace cohort::doctor
