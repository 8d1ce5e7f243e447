#include "bench/trial.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

namespace cohort::app::trial {
namespace {

using nlohmann::json;

const std::vector<std::string> kHosts = {"a", "a", "b", "b"};

TEST(Trial, WrongResultsNameTheirHost) {
  const json event = {{"check", "all_reduce"}, {"found", "7 types"}, {"seconds", 1.5}, {"wrong", {2, 3}}};
  const Line line = line_of_check(event, kHosts);
  EXPECT_EQ(line.level, Level::Failed);
  EXPECT_EQ(line.found, "7 types; wrong on b (rank 2, 3)");
  EXPECT_EQ(line.fix, "leave b out, and test its memory and processor");
  EXPECT_EQ(to_string(line), "FAILED   all_reduce        1.5 s  7 types; wrong on b (rank 2, 3)\n" +
                                 std::string(34, ' ') + "what to do: leave b out, and test its memory and processor\n");
  EXPECT_EQ(verdict_of({line}, 2, 9.4),
            "FAILED after 9 s, a job on these 2 hosts would not work: all_reduce (7 types; wrong on b (rank 2, 3))\n");
  // If all ranks have the same wrong data from one rank, that rank cannot be identified.
  const json all = {{"check", "all_reduce"}, {"found", ""}, {"wrong", {0, 1, 2, 3}}};
  EXPECT_NE(line_of_check(all, kHosts).fix.find("for each host alone"), std::string::npos);
}

TEST(Trial, WhatIsSoundOrCutShortIsNoFailure) {
  json event = {{"check", "broadcast"}, {"found", "7 types"}, {"seconds", 1}, {"wrong", json::array()}, {"cut", false}};
  EXPECT_EQ(line_of_check(event, kHosts).level, Level::Ok);
  event["cut"] = true;
  const Line line = line_of_check(event, kHosts);
  EXPECT_EQ(line.level, Level::Warning);
  EXPECT_EQ(verdict_of({line}, 2, 9), "passed in 9 s: jobs work on these 2 hosts; warnings: broadcast\n");
  EXPECT_EQ(verdict_of({}, 1, 9), "passed in 9 s: jobs work on this host\n");
}

TEST(Trial, TakesTheFindingsOfTheDoctor) {
  const json report = {{"checks",
                        {{{"title", "start"}, {"level", "ok"}, {"hosts", {"a"}}, {"found", "by ssh"}},
                         {{"title", "speed"},
                          {"level", "warning"},
                          {"hosts", {"a"}},
                          {"to", "b"},
                          {"found", "10 MB/s"},
                          {"mend", "ethtool"}},
                         {{"title", "version"},
                          {"level", "failed"},
                          {"hosts", {"b", "c"}},
                          {"found", "0.1"},
                          {"mend", "install one"}}}}};
  const auto lines = lines_of_doctor(report, 2);
  ASSERT_EQ(lines.size(), 3U);
  EXPECT_EQ(to_string(lines[0]), "ok       doctor            2.0 s  1 checks are in order\n");
  EXPECT_EQ(lines[1].what + "|" + lines[1].title, "a to b|speed");
  EXPECT_EQ(lines[2].what + "|" + lines[2].fix, "b, c|install one");
  EXPECT_EQ(verdict_of(lines, 3, 2), "FAILED after 2 s, a job on these 3 hosts would not work: b, c (version: 0.1)\n");
}

TEST(Trial, NamesAHostThatComputesSlowly) {
  std::vector<launch::RankTimes> ranks(4);
  for (std::size_t rank = 0; rank < 4; ++rank) {
    ranks[rank].rank = static_cast<int>(rank);
    ranks[rank].host = kHosts[rank];
    ranks[rank].steps = 100;
    ranks[rank].seconds = 1;
    ranks[rank].busy = 1;
    ranks[rank].waited = ranks[rank].exposed = rank == 3 ? 0 : 0.6;
  }
  const auto lines = slow_hosts(ranks);
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_EQ(lines[0].what, "b");
  EXPECT_EQ(lines[0].found, "rank 3 computes a step in 10.0 ms, most others in 4.00 ms");
  ranks[3].waited = ranks[3].exposed = 0.5;
  EXPECT_TRUE(slow_hosts(ranks).empty());
}

}  // namespace
}  // namespace cohort::app::trial
