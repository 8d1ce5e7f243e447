// `cohort run --json`: everything on stdout, an event a line.
#include "launch_harness.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <sstream>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

using nlohmann::json;

std::vector<json> events_of(const Finished& finished) {
  std::vector<json> events;
  std::istringstream lines(finished.out);
  for (std::string line; std::getline(lines, line);) events.push_back(json::parse(line));
  return events;
}

std::vector<json> named(const std::vector<json>& events, const std::string& name) {
  std::vector<json> out;
  for (const json& event : events) {
    if (event.at("event") == name) out.push_back(event);
  }
  return out;
}

TEST(LaunchJson, AFailureIsToldInEvents) {
  const auto finished = run({{"run", "-np", "3", "--json", "--", HEALTH_PEER, "dies"}});
  EXPECT_EQ(finished.status, 128 + SIGKILL);
  EXPECT_EQ(finished.err, "");
  const auto events = events_of(finished);
  ASSERT_FALSE(events.empty());
  EXPECT_EQ(events.front().at("event"), "start");
  EXPECT_EQ(events.front().at("world_size"), 3);
  EXPECT_EQ(events.front().at("pids").size(), 3U);
  const auto failures = named(events, "failure");
  ASSERT_EQ(failures.size(), 1U) << finished.out;
  EXPECT_EQ(failures[0].at("rank"), 1);
  EXPECT_EQ(failures[0].at("signal"), "SIGKILL");
  EXPECT_EQ(failures[0].at("pid"), events.front().at("pids")[1]);
  EXPECT_NE(failures[0].at("doing").get<std::string>().find("all_reduce(float32[10], sum), operation 1"),
            std::string::npos);
  EXPECT_FALSE(failures[0].at("others").empty());
  EXPECT_EQ(named(events, "rank_ended").size(), 3U);
  EXPECT_EQ(events.back().at("event"), "end");
  EXPECT_EQ(events.back().at("exit_status"), 128 + SIGKILL);
}

TEST(LaunchJson, AJobThatDoesNotGoOnIsStartedAgain) {
  const auto finished = run(
      {{"run", "-np", "3", "--json", "--deadlock-timeout", "2", "--max-restarts", "1", "--", HEALTH_PEER, "deadlock"}});
  EXPECT_EQ(finished.status, 124);
  const auto events = events_of(finished);
  EXPECT_EQ(named(events, "start").size(), 2U) << finished.out;
  const auto restarts = named(events, "restart");
  ASSERT_EQ(restarts.size(), 1U);
  EXPECT_NE(restarts[0].at("text").get<std::string>().find("nothing can go on"), std::string::npos);
  const auto ends = named(events, "end");
  ASSERT_EQ(ends.size(), 2U);
  EXPECT_TRUE(ends[0].at("again").get<bool>());
  EXPECT_FALSE(ends[1].at("again").get<bool>());
  EXPECT_NE(ends[1].at("reason").get<std::string>().find("nothing can go on"), std::string::npos);
}

TEST(LaunchJson, LinesAreEventsAndHiddenRanksStayHidden) {
  const auto finished = run({{"run", "-np", "2", "--json", "--ranks", "1", "--prefix", "none", "--", "sh", "-c",
                              "echo out $RANK; echo err $RANK >&2"}});
  EXPECT_EQ(finished.status, 0);
  const auto lines = named(events_of(finished), "output");
  ASSERT_EQ(lines.size(), 2U) << finished.out;
  for (const json& line : lines) {
    EXPECT_EQ(line.at("rank"), 1);
    EXPECT_EQ(line.at("line"), line.at("stream") == "stdout" ? "out 1" : "err 1");
  }
}

}  // namespace
}  // namespace cohort::test
