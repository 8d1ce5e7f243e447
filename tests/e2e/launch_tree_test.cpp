// Jobs of more hosts than the supervisor has connections to. The hosts are names, for which a script in place of ssh
// starts agents on this machine.
#include "launch_harness.h"

#include <gtest/gtest.h>

#include <fmt/core.h>

#include <algorithm>

namespace cohort::test {
namespace {

constexpr int kHosts = 20;  // four routers, each with four children

JobOptions on_hosts(const std::string& script, std::vector<std::string> options = {}) {
  std::string hosts;
  for (int host = 0; host < kHosts; ++host) hosts += fmt::format("{}node{}:1", host > 0 ? "," : "", host);
  JobOptions job{{"run", "-H", hosts, "--ssh", "./ssh", "--prefix", "none"}};
  job.arguments.insert(job.arguments.end(), options.begin(), options.end());
  job.arguments.insert(job.arguments.end(), {"--", "sh", "-c", script});
  job.shell_before =
      R"(printf '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec sh -c "$*"\n' >ssh; chmod +x ssh)";
  return job;
}

TEST(LaunchTree, OutputOfAllHostsComesThroughRouters) {
  Job job(on_hosts("seq 20000; echo rank $RANK >&2"));
  ASSERT_EQ(job.wait(), 0) << job.err();
  const std::string out = job.out();
  EXPECT_EQ(std::ranges::count(out, '\n'), kHosts * 20'000);
  for (int rank = 0; rank < kHosts; ++rank)
    EXPECT_NE(job.err().find(fmt::format("rank {}\n", rank)), std::string::npos) << rank;
}

TEST(LaunchTree, AKilledRouterEndsTheJobAndIsNamed) {
  Job job(on_hosts("if [ $RANK = 5 ]; then sleep 0.5; kill -9 $PPID; fi; exec sleep 60"));
  EXPECT_EQ(job.wait(), 1);
  EXPECT_NE(job.err().find("node5"), std::string::npos) << job.err();
  EXPECT_TRUE(eventually([&] { return job.processes().empty(); }));
}

TEST(LaunchTree, ThoseBehindAFrozenRouterGoOn) {
  Job job(
      on_hosts("if [ $RANK = 5 ]; then kill -STOP $PPID; sleep 6; kill -CONT $PPID; fi; sleep 0.5; echo rank $RANK"));
  EXPECT_TRUE(eventually([&] { return job.out().find("rank 6\n") != std::string::npos; }));
  EXPECT_EQ(job.out().find("rank 5\n"), std::string::npos);
  EXPECT_EQ(job.wait(), 0) << job.err();
  for (int rank = 0; rank < kHosts; ++rank)
    EXPECT_NE(job.out().find(fmt::format("rank {}\n", rank)), std::string::npos) << rank;
}

}  // namespace
}  // namespace cohort::test
