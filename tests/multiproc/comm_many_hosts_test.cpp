// A rank that is killed or stopped in the midst of sums over more hosts than exchange data with each other directly:
// all others name it, also those that have no connection to it.
#include "comm_processes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

constexpr int kHosts = 35;
constexpr int kCulprit = 18;

/// The ranks sum again and again until something ends it.
void start_summing(Processes& world, std::size_t count, std::chrono::milliseconds timeout) {
  for (int rank = 0; rank < kHosts; ++rank) {
    world.start_rank(rank, [&world, count, rank, timeout]() -> std::string {
      comm::FormOptions options = world.form_options(rank);
      options.hosts.clear();
      for (int host = 0; host < kHosts; ++host) options.hosts.push_back(host);
      options.placement.local_rank = 0;
      options.placement.local_size = 1;
      options.placement.cross_rank = rank;
      options.placement.cross_size = kHosts;
      options.timeout = timeout;
      Communicator comm = Processes::form(options);
      std::vector<float> values(count, 1);
      for (int i = 0;; ++i) {
        if (i == 5 && rank == kCulprit) world.raise_flag("busy");
        comm.all_reduce(std::span(values), {.op = ReduceOp::Average}).wait();
      }
    });
  }
}

void expect_named_by_all(Processes& world, int signal, const std::string& code) {
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(kCulprit, signal);
  const auto begin = Clock::now();
  const std::string name = fmt::format("rank {} (", kCulprit);
  for (int rank = 0; rank < kHosts; ++rank) {
    if (rank == kCulprit) continue;
    const std::string said = world.collect(rank).said;
    EXPECT_EQ(said.rfind(code, 0), 0U) << rank << ": " << said;
    EXPECT_NE(said.find(name), std::string::npos) << rank << ": " << said;
    EXPECT_NE(said.find(std::to_string(world.pid(kCulprit))), std::string::npos) << rank << ": " << said;
  }
  EXPECT_LT(Clock::now() - begin, 20s);
  world.kill(kCulprit, SIGKILL);
  static_cast<void>(world.collect(kCulprit));
}

TEST(ManyHosts, AKilledRankIsNamedByAll) {
  for (const std::size_t count : {100U, 50000U}) {
    Processes world(kHosts);
    start_summing(world, count, 20s);
    expect_named_by_all(world, SIGKILL, "PeerLost: ");
  }
}

TEST(ManyHosts, AStoppedRankIsNamedByAll) {
  for (const std::size_t count : {100U, 50000U}) {
    Processes world(kHosts);
    start_summing(world, count, 2s);
    expect_named_by_all(world, SIGSTOP, "Timeout: ");
  }
}

}  // namespace
}  // namespace cohort::testing
