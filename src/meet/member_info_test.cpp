// What ranks may not differ in, and what they are told then.
#include "meet/member_info.h"
#include "cluster/program_identity.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::meet {
namespace {

std::vector<MemberInfo> two_infos() {
  std::vector<MemberInfo> infos(2);
  for (int rank = 0; rank < 2; ++rank) {
    MemberInfo& info = infos[static_cast<std::size_t>(rank)];
    info.rank = rank;
    info.size = 2;
    info.pid = 100 + rank;
    info.host = "h";
    info.host_id = "id";
    info.build = this_build();
    info.program = "train (build id 1)";
    info.torch = "2.5.1";
    info.source = "RANK";
    info.backends = {"local"};
  }
  return infos;
}

const std::vector<BackendChoice> kKnown = {{"local", false}};

std::string refusal(const std::vector<MemberInfo>& infos) {
  const auto decision = judge(infos, kKnown);
  if (decision) return "accepted";
  EXPECT_EQ(decision.error().code(), ErrorCode::Mismatch);
  return decision.error().what();
}

void expect_both(const std::string& text, const std::string& first, const std::string& second) {
  EXPECT_NE(text.find("rank 0 (host h, pid 100)"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 (host h, pid 101)"), std::string::npos) << text;
  EXPECT_NE(text.find(first), std::string::npos) << text;
  EXPECT_NE(text.find(second), std::string::npos) << text;
}

TEST(MemberInfoTest, RanksThatAreAlikeFormAWorld) {
  EXPECT_EQ(refusal(two_infos()), "accepted");
  auto later = two_infos();
  later[0].torch.clear();  // it is loaded after the meeting
  EXPECT_EQ(refusal(later), "accepted");
}

TEST(MemberInfoTest, WhoDiffersIsRefusedWithBothSidesValues) {
  auto infos = two_infos();
  infos[1].program = "train (build id 2)";
  expect_both(refusal(infos), "'train (build id 1)'", "'train (build id 2)'");
  infos = two_infos();
  infos[1].torch = "1.13.1";
  expect_both(refusal(infos), "torch 2.5.1", "torch 1.13.1");
  infos = two_infos();
  infos[1].build = "another";
  expect_both(refusal(infos), this_build(), "'another'");
  infos = two_infos();
  infos[1].size = 3;
  expect_both(refusal(infos), "2 ranks", "3");
}

TEST(MemberInfoTest, TravelsWhole) {
  const MemberInfo info = two_infos()[1];
  const auto read = decode_member_info(encode(info));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->program, info.program);
  EXPECT_EQ(read->torch, info.torch);
  EXPECT_EQ(read->backends, info.backends);
}

TEST(ProgramIdentityTest, ThisProgramHasAName) {
  EXPECT_TRUE(cluster::own_executable().starts_with("meet_tests (")) << cluster::own_executable();
  EXPECT_EQ(cluster::own_executable(), cluster::own_executable());
  EXPECT_EQ(cluster::loaded_torch(), "") << "no test of this room links it";
}

}  // namespace
}  // namespace cohort::meet
