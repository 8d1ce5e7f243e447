// A rank that is killed or stopped in the midst of a collective, on each of the ways that operations go: the others
// name it, and soon.
#include "comm_processes.h"

#include "comm/testing/calls.h"

#include <gtest/gtest.h>

#include <cctype>
#include <ostream>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

using comm::Kind;
using comm::testing::Call;
using comm::testing::CallMemory;
using comm::testing::ForcedPlan;
using comm::testing::Place;

struct Way {
  const char* name;
  const char* plan;
  Place place;
  std::int64_t count;
};

const Way kBeside{"Beside", "", Place::Heap, 5};
const Way kInPlace{"InPlace", "", Place::Arena, 300000};
const Way kCross{"Cross", "cross=on", Place::Heap, 300000};
const Way kStaged{"Staged", "cross=off", Place::Heap, 300000};

struct Midst {
  Way way;
  Kind kind;
};

// GoogleTest's own printer would show addresses.
[[maybe_unused]] void PrintTo(const Midst& midst, std::ostream* out) {
  *out << midst.way.name << ' ' << comm::name_of(midst.kind);
}

std::string name_of_midst(const ::testing::TestParamInfo<Midst>& info) {
  std::string name = info.param.way.name;
  bool upper = true;
  for (const char letter : comm::name_of(info.param.kind)) {
    if (letter != '_') name += upper ? static_cast<char>(std::toupper(letter)) : letter;
    upper = letter == '_';
  }
  return name;
}

constexpr int kSize = 3;

Call call_of(const Midst& midst) {
  Call call;
  call.kind = midst.kind;
  call.count = midst.kind == Kind::Barrier ? 0 : midst.way.count;
  call.root = 0;
  if (midst.kind == Kind::AllGatherV || midst.kind == Kind::ReduceScatterV) call.counts.assign(kSize, midst.way.count);
  if (midst.kind == Kind::AllToAllV) call.counts.assign(kSize * kSize, midst.way.count);
  return call;
}

/// Ranks do the same again and again until something ends it.
void start_looping(Processes& world, const Midst& midst, std::chrono::milliseconds timeout) {
  for (int rank = 0; rank < kSize; ++rank) {
    world.start_rank(rank, [&world, &midst, rank, timeout]() -> std::string {
      comm::FormOptions options = world.form_options(rank);
      options.timeout = timeout;
      Communicator comm = Processes::form(options);
      const Call call = call_of(midst);
      const comm::testing::Bytes input(static_cast<std::size_t>(comm::testing::elements_in(call, kSize, rank)) *
                                       size_of(call.dtype));
      CallMemory memory(comm, call, midst.way.place, false, input);
      for (int i = 0;; ++i) {
        if (i == 5 && rank == 1) world.raise_flag("busy");
        comm::testing::start(comm, call, memory.input(), memory.output()).wait();
      }
    });
  }
}

class InTheMidst : public ::testing::TestWithParam<Midst> {};

TEST_P(InTheMidst, AKilledRankIsNamed) {
  const ForcedPlan forced(GetParam().way.plan);
  Processes world(kSize);
  start_looping(world, GetParam(), 20s);
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGKILL);
  const auto killed = Clock::now();
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank, 10s);
    if (ending.said.find("may not read its peers' memory") != std::string::npos) GTEST_SKIP() << ending.said;
    EXPECT_EQ(ending.said.rfind("PeerLost: ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("lost rank 1 (testhost, pid " + std::to_string(world.pid(1)) + ")"), std::string::npos)
        << ending.said;
    EXPECT_NE(ending.said.find(std::string(comm::name_of(GetParam().kind)) + "("), std::string::npos) << ending.said;
  }
  EXPECT_LT(Clock::now() - killed, 5s);
}

TEST_P(InTheMidst, AStoppedRankIsNamed) {
  const ForcedPlan forced(GetParam().way.plan);
  Processes world(kSize);
  start_looping(world, GetParam(), 700ms);
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGSTOP);
  const auto stopped = Clock::now();
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank, 10s);
    EXPECT_EQ(ending.said.rfind("Timeout: ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("rank 1 (pid " + std::to_string(world.pid(1)) + ") "), std::string::npos) << ending.said;
    EXPECT_NE(ending.said.find(std::string(comm::name_of(GetParam().kind)) + "("), std::string::npos) << ending.said;
  }
  EXPECT_LT(Clock::now() - stopped, 5s);
  world.kill(1, SIGKILL);
  static_cast<void>(world.collect(1));
}

INSTANTIATE_TEST_SUITE_P(Ways, InTheMidst,
                         ::testing::Values(Midst{kBeside, Kind::AllGather}, Midst{kBeside, Kind::Barrier},
                                           Midst{kInPlace, Kind::AllReduce}, Midst{kInPlace, Kind::AllToAll},
                                           Midst{kInPlace, Kind::ReduceScatter}, Midst{kCross, Kind::AllReduce},
                                           Midst{kCross, Kind::ReduceScatterV}, Midst{kCross, Kind::AllToAllV},
                                           Midst{kStaged, Kind::AllReduce}, Midst{kStaged, Kind::ReduceScatter},
                                           Midst{kStaged, Kind::AllToAllV}, Midst{kStaged, Kind::AllGatherV}),
                         name_of_midst);

}  // namespace
}  // namespace cohort::testing
