#include "meet/plan.h"

#include "net/secret.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <string>

namespace cohort::meet {
namespace {

TEST(JoinPlan, WithASecretNobodyElseKnowsTheNameOnThisHost) {
  std::string folder = ::testing::TempDir() + "cohort-plan-XXXXXX";
  ASSERT_NE(::mkdtemp(folder.data()), nullptr);
  for (const char* name : {"/one", "/other"}) ASSERT_TRUE(net::write_new_secret_file(folder + name));
  const auto name_with = [&](const std::string& secret, const std::string& init) {
    JoinOptions options;
    options.init_method = init;
    options.rank = 0;
    options.world_size = 2;
    if (!secret.empty()) options.secret_file = folder + secret;
    return value_or_throw(plan_join(options, {})).endpoint.unix_name;
  };
  const std::string open = name_with("", "unix://here"), one = name_with("/one", "unix://here");
  EXPECT_EQ(one, name_with("/one", "unix://here"));
  EXPECT_NE(one, name_with("/one", "unix://there"));
  EXPECT_NE(one, open);
  EXPECT_NE(one, name_with("/other", "unix://here"));
  std::filesystem::remove_all(folder);
}

TEST(JoinPlan, TrustIsSaidByTheWordsForYesAndNo) {
  const auto plan = [](const std::string& word) {
    JoinOptions options;
    options.init_method = "unix://here";
    options.rank = 0;
    options.world_size = 2;
    return plan_join(options, {{"COHORT_TRUST_NETWORK", word}});
  };
  for (const char* yes : {"1", "yes", "TRUE", "on"}) EXPECT_TRUE(value_or_throw(plan(yes)).trusts_network) << yes;
  for (const char* no : {"0", "no", "False", "off", ""}) EXPECT_FALSE(value_or_throw(plan(no)).trusts_network) << no;
  for (const char* bad : {"2", "trusted"}) {
    const auto refused = plan(bad);
    ASSERT_FALSE(refused) << bad;
    EXPECT_EQ(refused.error().code(), ErrorCode::InvalidArgument);
    const std::string why = refused.error().what();
    EXPECT_NE(why.find("COHORT_TRUST_NETWORK='" + std::string(bad) + "'"), std::string::npos) << why;
    EXPECT_NE(why.find("1 (or true, yes, on) or 0 (or false, no, off)"), std::string::npos) << why;
  }
}

TEST(JoinPlan, AWordForTimesThatIsNeitherYesNorNoIsRefused) {
  const auto refused = plan_join({}, {{"COHORT_ALONE", "1"}, {"COHORT_TIMES", "often"}});
  ASSERT_FALSE(refused);
  EXPECT_NE(std::string(refused.error().what()).find("COHORT_TIMES='often'"), std::string::npos);
  EXPECT_TRUE(plan_join({}, {{"COHORT_ALONE", "1"}, {"COHORT_TIMES", "yes"}}));
}

}  // namespace
}  // namespace cohort::meet
