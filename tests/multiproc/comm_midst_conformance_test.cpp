// A rank that is killed or stopped in the midst of a collective, on each of the ways that operations go: the others
// name it, and soon; and if it goes on after they have given up, it fails, too.
#include "comm_processes.h"

#include "comm/testing/calls.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>

#include <atomic>
#include <cctype>
#include <cstdint>
#include <cstring>
#include <ostream>
#include <string>
#include <vector>

namespace {

/// Function that stops this process in the midst of reading a peer's memory; null: it does not stop.
std::atomic<void (*)()> stop_here{nullptr};

void stop_once() {
  if (const auto stop = stop_here.exchange(nullptr)) stop();
}

}  // namespace

/// Replaces the system call that the library uses for memory that is not mapped.
extern "C" ssize_t process_vm_readv(pid_t pid, const iovec* local, unsigned long locals, const iovec* remote,
                                    unsigned long remotes, unsigned long flags) noexcept {
  if (local[0].iov_len > 1000) stop_once();
  return ::syscall(SYS_process_vm_readv, pid, local, locals, remote, remotes, flags);
}

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

constexpr int kMidstSize = 3;

Call call_of(const Midst& midst) {
  Call call;
  call.kind = midst.kind;
  call.count = midst.kind == Kind::Barrier ? 0 : midst.way.count;
  call.root = 0;
  if (comm::testing::has_counts_by_rank(midst.kind)) call.counts.assign(kMidstSize, midst.way.count);
  if (midst.kind == Kind::AllToAllV) call.counts.assign(kMidstSize * kMidstSize, midst.way.count);
  return call;
}

/// Ranks do the same again and again until something ends it.
void start_looping(Processes& world, const Midst& midst, std::chrono::milliseconds timeout) {
  for (int rank = 0; rank < kMidstSize; ++rank) {
    world.start_rank(rank, [&world, &midst, rank, timeout]() -> std::string {
      comm::FormOptions options = world.form_options(rank);
      options.timeout = timeout;
      Communicator comm = Processes::form(options);
      const Call call = call_of(midst);
      const comm::testing::Bytes input(static_cast<std::size_t>(comm::testing::elements_in(call, kMidstSize, rank)) *
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
  Processes world(kMidstSize);
  start_looping(world, GetParam(), 20s);
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGKILL);
  const auto killed = Clock::now();
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank);
    if (ending.said.find("may not read its peers' memory") != std::string::npos) GTEST_SKIP() << ending.said;
    EXPECT_EQ(ending.said.rfind("PeerLost: ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("lost rank 1 (testhost, pid " + std::to_string(world.pid(1)) + ")"), std::string::npos)
        << ending.said;
    EXPECT_NE(ending.said.find(std::string(comm::name_of(GetParam().kind)) + "("), std::string::npos) << ending.said;
  }
  EXPECT_LT(Clock::now() - killed, 15s);
}

TEST_P(InTheMidst, AStoppedRankIsNamed) {
  const ForcedPlan forced(GetParam().way.plan);
  Processes world(kMidstSize);
  start_looping(world, GetParam(), 2s);
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGSTOP);
  const auto stopped = Clock::now();
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank);
    EXPECT_EQ(ending.said.rfind("Timeout: ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("rank 1 (pid " + std::to_string(world.pid(1)) + ") "), std::string::npos) << ending.said;
    EXPECT_NE(ending.said.find(std::string(comm::name_of(GetParam().kind)) + "("), std::string::npos) << ending.said;
  }
  EXPECT_LT(Clock::now() - stopped, 15s);
  world.kill(1, SIGKILL);
  static_cast<void>(world.collect(1));
}

INSTANTIATE_TEST_SUITE_P(Ways, InTheMidst,
                         ::testing::Values(Midst{kBeside, Kind::AllGather}, Midst{kBeside, Kind::Barrier},
                                           Midst{kInPlace, Kind::AllReduce}, Midst{kInPlace, Kind::AllToAll},
                                           Midst{kInPlace, Kind::ReduceScatter}, Midst{kCross, Kind::AllReduce},
                                           Midst{kCross, Kind::ReduceScatterV}, Midst{kCross, Kind::AllToAllV},
                                           Midst{kStaged, Kind::AllReduce}, Midst{kStaged, Kind::ReduceScatter},
                                           Midst{kStaged, Kind::AllToAllV}, Midst{kStaged, Kind::AllGatherV},
                                           Midst{kStaged, Kind::GatherV}),
                         name_of_midst);

// --- a rank that comes late ---

/// State of the process that is rank 1: the world whose ranks it waits for when it stops, and the pages it may not
/// write until then.
struct Late {
  const Processes* world = nullptr;
  std::byte* pages = nullptr;
  std::size_t bytes = 0;
} late_pages;

void stop_until_the_others_have_given_up() {
  for (const char* const flag : {"gave up 0", "gave up 2"}) static_cast<void>(late_pages.world->await_flag(flag));
}

/// The first write into memory that is locked, which is in the midst of reading what is to go there.
void on_locked_memory(int, siginfo_t* where, void*) {
  auto* const at = static_cast<std::byte*>(where->si_addr);
  if (at < late_pages.pages || at >= late_pages.pages + late_pages.bytes) ::_exit(99);
  stop_once();
  ::mprotect(late_pages.pages, late_pages.bytes, PROT_READ | PROT_WRITE);
}

void lock_pages_of(void* memory, std::size_t bytes) {
  constexpr std::uintptr_t kPage = 4096;
  const auto begin = (reinterpret_cast<std::uintptr_t>(memory) + kPage - 1) / kPage * kPage;
  const auto end = (reinterpret_cast<std::uintptr_t>(memory) + bytes) / kPage * kPage;
  late_pages.pages = reinterpret_cast<std::byte*>(begin);
  late_pages.bytes = end - begin;
  struct sigaction action {};
  action.sa_sigaction = on_locked_memory;
  action.sa_flags = SA_SIGINFO | SA_NODEFER;
  ::sigaction(SIGSEGV, &action, nullptr);
  ::mprotect(late_pages.pages, late_pages.bytes, PROT_READ);
}

class LateReader : public ::testing::TestWithParam<Midst> {};

// The others have their memory back once they have given up, and use it again. The values that a late rank then reads
// there are not their inputs.
TEST_P(LateReader, FailsWhereTheOthersHaveGivenUp) {
  const ForcedPlan forced(GetParam().way.plan);
  Processes world(kMidstSize);
  for (int rank = 0; rank < kMidstSize; ++rank) {
    world.start_rank(rank, [&world, rank]() -> std::string {
      const Midst& midst = GetParam();
      comm::FormOptions options = world.form_options(rank);
      options.timeout = 1s;
      Communicator comm = Processes::form(options);
      Call call = call_of(midst);
      if (midst.kind == Kind::Gather || midst.kind == Kind::Reduce) call.root = 1;
      const auto bytes_in =
          static_cast<std::size_t>(comm::testing::elements_in(call, kMidstSize, rank)) * size_of(call.dtype);
      const auto bytes_out =
          static_cast<std::size_t>(comm::testing::elements_out(call, kMidstSize, rank)) * size_of(call.dtype);
      CallMemory memory(comm, call, midst.way.place, false, comm::testing::Bytes(bytes_in));
      comm.barrier().wait();
      late_pages.world = &world;
      if (rank == 1) {
        stop_here = stop_until_the_others_have_given_up;
        if (midst.way.place == Place::Arena) lock_pages_of(memory.output(), bytes_out);
      }
      try {
        comm::testing::start(comm, call, memory.input(), memory.output()).wait();
      } catch (const Error&) {
        if (rank == 1) world.raise_flag("came");
        std::memset(const_cast<void*>(memory.input()), 0xFF, bytes_in);
        world.raise_flag("gave up " + std::to_string(rank));
        static_cast<void>(world.await_flag("came"));
        throw;
      }
      world.raise_flag("came");
      return stop_here.load() == nullptr ? "succeeded" : "did not stop";
    });
  }
  const Ending own = world.collect(1);
  if (own.said.find("may not read its peers' memory") != std::string::npos) GTEST_SKIP() << own.said;
  EXPECT_EQ(own.said.rfind("Aborted: ", 0), 0u) << own.said << " (wait status " << own.status << ")";
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank);
    EXPECT_EQ(ending.said.rfind("Timeout: ", 0), 0u) << ending.said;
    EXPECT_NE(ending.said.find("rank 1 (pid "), std::string::npos) << ending.said;
  }
}

INSTANTIATE_TEST_SUITE_P(Ways, LateReader,
                         ::testing::Values(Midst{kInPlace, Kind::AllReduce}, Midst{kInPlace, Kind::Reduce},
                                           Midst{kInPlace, Kind::ReduceScatter}, Midst{kInPlace, Kind::Broadcast},
                                           Midst{kInPlace, Kind::AllGather}, Midst{kInPlace, Kind::Gather},
                                           Midst{kInPlace, Kind::Scatter}, Midst{kInPlace, Kind::AllToAll},
                                           Midst{kCross, Kind::AllReduce}, Midst{kCross, Kind::Reduce},
                                           Midst{kCross, Kind::ReduceScatterV}, Midst{kCross, Kind::Broadcast},
                                           Midst{kCross, Kind::AllGatherV}, Midst{kCross, Kind::Gather},
                                           Midst{kCross, Kind::Scatter}, Midst{kCross, Kind::ScatterV},
                                           Midst{kCross, Kind::AllToAllV}),
                         name_of_midst);

}  // namespace
}  // namespace cohort::testing
