// What ranks may not differ in, and what they are told then.
#include "meet/card.h"
#include "cluster/program_identity.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace cohort::meet {
namespace {

std::vector<JoinCard> two_cards() {
  std::vector<JoinCard> cards(2);
  for (int rank = 0; rank < 2; ++rank) {
    JoinCard& card = cards[static_cast<std::size_t>(rank)];
    card.rank = rank;
    card.size = 2;
    card.pid = 100 + rank;
    card.host = "h";
    card.host_id = "id";
    card.build = this_build();
    card.program = "train (build id 1)";
    card.torch = "2.5.1";
    card.source = "RANK";
    card.backends = {"local"};
  }
  return cards;
}

const std::vector<BackendChoice> kKnown = {{"local", false}};

std::string refusal(const std::vector<JoinCard>& cards) {
  const auto verdict = judge(cards, kKnown);
  if (verdict) return "accepted";
  EXPECT_EQ(verdict.error().code(), ErrorCode::Mismatch);
  return verdict.error().what();
}

void expect_both(const std::string& text, const std::string& first, const std::string& second) {
  EXPECT_NE(text.find("rank 0 (host h, pid 100)"), std::string::npos) << text;
  EXPECT_NE(text.find("rank 1 (host h, pid 101)"), std::string::npos) << text;
  EXPECT_NE(text.find(first), std::string::npos) << text;
  EXPECT_NE(text.find(second), std::string::npos) << text;
}

TEST(JoinCardTest, RanksThatAreAlikeFormAWorld) {
  EXPECT_EQ(refusal(two_cards()), "accepted");
  auto later = two_cards();
  later[0].torch.clear();  // it is loaded after the meeting
  EXPECT_EQ(refusal(later), "accepted");
}

TEST(JoinCardTest, WhoDiffersIsRefusedWithBothSidesValues) {
  auto cards = two_cards();
  cards[1].program = "train (build id 2)";
  expect_both(refusal(cards), "'train (build id 1)'", "'train (build id 2)'");
  cards = two_cards();
  cards[1].torch = "1.13.1";
  expect_both(refusal(cards), "torch 2.5.1", "torch 1.13.1");
  cards = two_cards();
  cards[1].build = "another";
  expect_both(refusal(cards), this_build(), "'another'");
  cards = two_cards();
  cards[1].size = 3;
  expect_both(refusal(cards), "2 ranks", "3");
}

TEST(JoinCardTest, TravelsWhole) {
  const JoinCard card = two_cards()[1];
  const auto read = decode_card(encode(card));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->program, card.program);
  EXPECT_EQ(read->torch, card.torch);
  EXPECT_EQ(read->backends, card.backends);
}

TEST(ProgramIdentityTest, ThisProgramHasAName) {
  EXPECT_TRUE(cluster::own_executable().starts_with("meet_tests (")) << cluster::own_executable();
  EXPECT_EQ(cluster::own_executable(), cluster::own_executable());
  EXPECT_EQ(cluster::loaded_torch(), "") << "no test of this room links it";
}

}  // namespace
}  // namespace cohort::meet
