// Ranks without more input, which serve those that have some, and forked children.
#include "comm/testing/errors.h"
#include "comm/testing/floats.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace cohort {
namespace {

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::floats;
using comm::testing::what_of;

// --- join ---

TEST(Join, ServesTheOthersUntilAllHaveJoined) {
  comm::testing::run_world(3, [](Communicator comm) {
    // Rank r brings 2 + r rounds; of each round, those still there are averaged.
    Memory memory = comm.allocate(100000 * sizeof(float));
    for (int round = 0; round < 2 + comm.rank(); ++round) {
      const int lowest = std::max(0, round - 1);  // of the active ranks
      float sum = 0;
      for (int rank = lowest; rank < 3; ++rank) sum += static_cast<float>(rank + 1);
      const float average = sum / static_cast<float>(3 - lowest);
      for (const std::size_t count : {std::size_t{4}, std::size_t{3000}, std::size_t{100000}}) {
        for (const bool arena : {true, false}) {
          std::vector<float> heap(count, static_cast<float>(comm.rank() + 1));
          std::copy(heap.begin(), heap.end(), floats(memory).begin());
          const std::span<float> data = arena ? floats(memory).first(count) : std::span<float>(heap);
          comm.all_reduce(data, {.op = ReduceOp::Average}).wait();
          ASSERT_EQ(data[count - 1], average);
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.all_reduce(data, {.op = ReduceOp::Average, .weight = comm.rank() + 1}).wait();
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.all_reduce(data, {.op = ReduceOp::Min}).wait();
          ASSERT_EQ(data[0], static_cast<float>(lowest + 1));
          // Root 0 may have joined: then it comes from the lowest rank that is active.
          std::fill(data.begin(), data.end(), static_cast<float>(comm.rank() + 1));
          comm.broadcast(data, {.root = 0}).wait();
          ASSERT_EQ(data[count - 1], static_cast<float>(lowest + 1));
          const std::vector<float> own(count, static_cast<float>(comm.rank() + 1));
          comm.all_reduce(std::span(own), data, {.op = ReduceOp::Average}).wait();
          ASSERT_EQ(data[count - 1], average);
        }
      }
      comm.barrier().wait();
      if (lowest > 0) {
        std::vector<float> own(10);
        std::vector<float> all(3 * 10);
        const std::string text =
            what_of([&] { comm.all_gather(std::span(own), std::span(all)).wait(); }, ErrorCode::Mismatch);
        EXPECT_TRUE(contains(text, "rank 0 has joined")) << text;
      } else {
        std::vector<float> all(3 * 10);
        comm.all_gather(std::span(all).subspan(static_cast<std::size_t>(comm.rank()) * 10, 10), std::span(all)).wait();
      }
    }
    EXPECT_EQ(comm.join(), 2);
    // All are back.
    std::vector<float> values(10, 1);
    comm.all_reduce(std::span(values)).wait();
    EXPECT_EQ(values[0], 3.0F);
    EXPECT_GE(comm.join(), 0);
  });
}

TEST(Join, EndsWithTheWorld) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  std::jthread joined([&] { what_of([&] { world[0].join(); }, ErrorCode::Aborted); });
  std::this_thread::sleep_for(20ms);
  world[1].abort("enough");
}

// --- fork ---

TEST(Fork, ChildIsRefusedAndLeavesTheWorldAlone) {
  comm::testing::run_world(1, [](Communicator comm) { comm.barrier().wait(); });
  Communicator comm = comm::testing::form_world(1)[0];
  Memory memory = comm.allocate(10000);
  floats(memory)[0] = 42;
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    int status = 1;
    try {
      comm.barrier().wait();
    } catch (const Error& error) {
      if (error.code() == ErrorCode::InvalidArgument && contains(error.what(), "forked child")) status = 0;
    }
    if (floats(memory)[0] != 42) status = 2;
    memory = Memory();
    comm = Communicator();
    ::_exit(status);
  }
  int status = -1;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  comm.barrier().wait();
  EXPECT_EQ(floats(memory)[0], 42.0F);
}

}  // namespace
}  // namespace cohort
