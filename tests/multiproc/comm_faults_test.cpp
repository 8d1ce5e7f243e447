// Ranks as processes that die, stop, run out of memory or fork, at every stage of a communicator's life.
#include "comm/testing/worlds.h"
#include "comm_processes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

using comm::testing::contains;
using comm::testing::floats;

TEST(Processes, SumInArenaInOtherMemoryAndMixed) {
  for (const int size : {2, 3, 5}) {
    Processes world(size);
    world.start([&](Communicator comm) -> std::string {
      for (const std::size_t count : {std::size_t{3}, std::size_t{5000}, std::size_t{300001}}) {
        Memory memory = comm.allocate(count * sizeof(float));
        std::vector<float> heap(count);
        for (int mix = 0; mix < 3; ++mix) {
          const bool arena = mix == 0 || (mix == 1 && comm.rank() == 1);
          const std::span<float> data = arena ? floats(memory) : std::span<float>(heap);
          for (std::size_t i = 0; i < count; ++i)
            data[i] = static_cast<float>(i % 1000 + static_cast<std::size_t>(comm.rank()));
          comm.all_reduce(data).wait();
          for (std::size_t i = 0; i < count; ++i) {
            const auto expected =
                static_cast<float>(size) * static_cast<float>(i % 1000) + static_cast<float>(size * (size - 1) / 2);
            if (data[i] != expected) return "wrong at " + std::to_string(i);
          }
        }
      }
      return "right";
    });
    for (int rank = 0; rank < size; ++rank) {
      const Ending ending = world.collect(rank);
      EXPECT_TRUE(ending.exited_well()) << ending.status;
      EXPECT_EQ(ending.said, "right");
    }
  }
}

/// A rank is killed while the others are in all_reduce after all_reduce: all of them name it, soon.
void kill_in_all_reduce(std::size_t count, bool arena) {
  Processes world(3);
  world.start([&](Communicator comm) -> std::string {
    Memory memory = comm.allocate(count * sizeof(float));
    std::vector<float> heap(count);
    const std::span<float> data = arena ? floats(memory) : std::span<float>(heap);
    for (int i = 0;; ++i) {
      if (i == 20 && comm.rank() == 1) world.raise_flag("busy");
      comm.all_reduce(data).wait();
    }
  });
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGKILL);
  const auto killed = Clock::now();
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank);
    EXPECT_TRUE(contains(ending.said, "PeerLost: ")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "lost rank 1 (testhost, pid " + std::to_string(world.pid(1)) + ")"))
        << ending.said;
    EXPECT_TRUE(contains(ending.said, "all_reduce(float32[" + std::to_string(count) + "], sum)")) << ending.said;
  }
  EXPECT_LT(Clock::now() - killed, 15s);  // 30 ms on an idle machine
  EXPECT_TRUE(world.collect(1).killed_by(SIGKILL));
}

TEST(Killed, InASmallAllReduce) { kill_in_all_reduce(8, false); }
TEST(Killed, InAZeroCopyAllReduce) { kill_in_all_reduce(2000000, true); }
TEST(Killed, InAStagedAllReduce) { kill_in_all_reduce(2000000, false); }

// --- moves between hosts of which not all meet ---

constexpr int kMany = 18;
constexpr std::int64_t kPart = 200'000;

/// A move of this kind, and a rank between others.
struct ManyMoves {
  const char* name;
  int victim;
  void (*move)(Communicator& comm, std::vector<std::uint8_t>& own, std::vector<std::uint8_t>& all,
               std::chrono::milliseconds timeout);
  int ranks = kMany;
  const char* hosts = nullptr;  // default: a host for each rank
};

ConstBuffer given(const std::vector<std::uint8_t>& from, bool any = true) {
  return {from.data(), any ? static_cast<std::int64_t>(from.size()) : 0, DType::UInt8};
}
Buffer taken(std::vector<std::uint8_t>& to, bool any = true) {
  return {to.data(), any ? static_cast<std::int64_t>(to.size()) : 0, DType::UInt8};
}

void gather(Communicator& comm, std::vector<std::uint8_t>& own, std::vector<std::uint8_t>& all,
            std::chrono::milliseconds timeout) {
  comm.gather(given(own), taken(all, comm.rank() == 0), {.timeout = timeout}).wait();
}

constexpr ManyMoves kManyMoves[] = {
    {"Broadcast", 8,
     [](Communicator& comm, auto&, auto& all, auto timeout) {
       comm.broadcast(taken(all), {.timeout = timeout}).wait();
     }},
    {"AllGather", 5,
     [](Communicator& comm, auto& own, auto& all, auto timeout) {
       comm.all_gather(given(own), taken(all), {.timeout = timeout}).wait();
     }},
    {"Gather", 16, gather},
    {"GatherOfFewHosts", 2, gather, 9},  // while others wait for their turn
    {"GatherToAStruckRoot", 0, gather, 9},
    {"GatherOfHostsOfTwo", 3, gather, 13, "hosts:1,2,2,2,2,2,2"},
    {"Scatter", 16,
     [](Communicator& comm, auto& own, auto& all, auto timeout) {
       comm.scatter(given(all, comm.rank() == 0), taken(own), {.timeout = timeout}).wait();
     }},
};

class MovesOfManyHosts : public ::testing::TestWithParam<ManyMoves> {
 protected:
  /// Ranks do the same again and again until something ends it. The first rounds, in which a busy machine may keep a
  /// rank from running for seconds, have more time than the others.
  void start_looping(std::chrono::milliseconds timeout) {
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      world_.start_rank(rank, [this, rank, timeout]() -> std::string {
        Communicator comm = Processes::form(world_.form_options(rank));
        std::vector<std::uint8_t> own(kPart), all(kPart * GetParam().ranks);
        for (int i = 0;; ++i) {
          if (i == 3 && rank == GetParam().victim) world_.raise_flag("busy");
          GetParam().move(comm, own, all, i < 3 ? std::chrono::milliseconds(60s) : timeout);
        }
      });
    }
  }
  /// Waits until the victim is about to begin a round. If none of the ranks gets so far, it says what they have said.
  bool victim_is_busy() {
    if (world_.await_flag("busy")) return true;
    for (int rank = 0; rank < GetParam().ranks; ++rank) ADD_FAILURE() << rank << ": " << world_.collect(rank, 1s).said;
    return false;
  }
  /// All but the victim end with these words.
  void expect_all_say(std::string_view kind, const std::string& words) {
    for (int rank = 0; rank < GetParam().ranks; ++rank) {
      if (rank == GetParam().victim) continue;
      const Ending ending = world_.collect(rank);
      EXPECT_TRUE(contains(ending.said, kind) && contains(ending.said, words)) << rank << ": " << ending.said;
    }
  }

  Processes world_{GetParam().ranks,
                   comm::testing::Worlds(GetParam().hosts != nullptr ? GetParam().hosts
                                                                     : fmt::format("hosts:{}", GetParam().ranks))};
};

TEST_P(MovesOfManyHosts, AKilledRankIsNamed) {
  start_looping(20s);
  ASSERT_TRUE(victim_is_busy());
  world_.kill(GetParam().victim, SIGKILL);
  expect_all_say("PeerLost: ",
                 fmt::format("lost rank {} (testhost, pid {})", GetParam().victim, world_.pid(GetParam().victim)));
}

// Those that it keeps from going on are not taken for it.
TEST_P(MovesOfManyHosts, AStoppedRankIsNamed) {
  start_looping(2s);
  ASSERT_TRUE(victim_is_busy());
  world_.kill(GetParam().victim, SIGSTOP);
  // Ranks of other hosts cannot know which of a host's ranks is late, but the victim is the first one that is accused.
  const bool alone = GetParam().hosts == nullptr;
  expect_all_say("Timeout: ", fmt::format("{}rank {} (pid {}){}", alone ? "" : "-- ", GetParam().victim,
                                          world_.pid(GetParam().victim), alone ? " " : ""));
  world_.kill(GetParam().victim, SIGKILL);
}

INSTANTIATE_TEST_SUITE_P(Kinds, MovesOfManyHosts, ::testing::ValuesIn(kManyMoves),
                         [](const ::testing::TestParamInfo<ManyMoves>& tested) { return tested.param.name; });

// A child of the dead rank still holds its sockets: there is no end-of-file, and it must be found out all the same.
TEST(Killed, WhileItsForkedChildLivesOn) {
  void* const shared = ::mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(shared, MAP_FAILED);
  pid_t& child = *static_cast<pid_t*>(shared);
  Processes world(2);
  world.start([&](Communicator comm) -> std::string {
    comm.barrier().wait();
    if (comm.rank() == 1) {
      const pid_t pid = ::fork();
      if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, 0);
        std::this_thread::sleep_for(60s);
        ::_exit(0);
      }
      child = pid;
      world.raise_flag("forked");
      std::this_thread::sleep_for(60s);
    }
    comm.barrier().wait();
    return "";
  });
  ASSERT_TRUE(world.await_flag("forked"));
  world.kill(1, SIGKILL);
  const auto killed = Clock::now();
  const Ending ending = world.collect(0);
  EXPECT_EQ(::kill(child, SIGKILL), 0) << "it has ended before";
  ::munmap(shared, sizeof(pid_t));
  EXPECT_LT(Clock::now() - killed, 15s);
  EXPECT_TRUE(contains(ending.said, "PeerLost: ") && contains(ending.said, "rank 1")) << ending.said;
}

TEST(Killed, BeforeTheWorldIsFormed) {
  Processes world(3);
  for (const int rank : {0, 2}) {
    world.start_rank(rank, [&world, rank] {
      Processes::form(world.form_options(rank));
      return std::string("formed");
    });
  }
  // Rank 1 says where it is and dies before anyone has been answered.
  world.start_rank(1, [&world]() -> std::string {
    auto options = world.form_options(1);
    struct Dying final : store::Store {
      std::shared_ptr<store::Store> store;
      void set(std::string_view key, std::string_view value) override {
        store->set(key, value);
        ::raise(SIGKILL);
      }
      Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless,
                       Deadline deadline) override {
        return store->get_all(keys, unless, deadline);
      }
      std::int64_t add(std::string_view key, std::int64_t amount) override { return store->add(key, amount); }
      std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                                 std::string_view desired) override {
        return store->compare_and_set(key, expected, desired);
      }
      bool delete_key(std::string_view key) override { return store->delete_key(key); }
      std::string name() const override { return store->name(); }
    };
    auto dying = std::make_shared<Dying>();
    dying->store = options.store;
    options.store = dying;
    Processes::form(options);
    return "formed";
  });
  const auto begin = Clock::now();
  const Ending second = world.collect(2);
  const Ending zeroth = world.collect(0);
  EXPECT_LT(Clock::now() - begin, 50s);  // before the deadline of 60 s
  EXPECT_TRUE(contains(second.said, "PeerLost: ") && contains(second.said, "rank 1")) << second.said;
  EXPECT_TRUE(contains(zeroth.said, "Aborted: ") && contains(zeroth.said, "rank 1")) << zeroth.said;
  EXPECT_TRUE(world.collect(1).killed_by(SIGKILL));
}

TEST(Missing, RankIsNamedWhenTheWorldCannotForm) {
  Processes world(3);
  for (const int rank : {0, 2}) {
    world.start_rank(rank, [&world, rank] {
      auto options = world.form_options(rank);
      options.init_timeout = 2s;
      Processes::form(options);
      return std::string("formed");
    });
  }
  for (const int rank : {0, 2}) {
    const Ending ending = world.collect(rank);
    EXPECT_TRUE(contains(ending.said, "rank 1")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "Timeout: ") || contains(ending.said, "Aborted: ")) << ending.said;
  }
}

TEST(Killed, AtTheEndDisturbsNobody) {
  for (int round = 0; round < 5; ++round) {
    Processes world(3);
    world.start([&](Communicator comm) -> std::string {
      std::vector<float> values(100000, 1);
      comm.all_reduce(std::span(values)).wait();
      if (comm.rank() == 1) ::raise(SIGKILL);  // its part is done
      return values[99999] == 3 ? "right" : "wrong";
    });
    EXPECT_EQ(world.collect(0).said, "right");
    EXPECT_EQ(world.collect(2).said, "right");
    EXPECT_TRUE(world.collect(1).killed_by(SIGKILL));
  }
}

TEST(Stopped, RankIsNamedWhenTheDeadlinePasses) {
  Processes world(3);
  world.start([&](Communicator comm) -> std::string {
    std::vector<double> values(1000, comm.rank());
    comm.all_reduce(std::span(values)).wait();
    if (comm.rank() == 2) {
      world.raise_flag("stopping");
      ::raise(SIGSTOP);
    }
    comm.all_reduce(std::span(values), {.op = ReduceOp::Max, .timeout = 500ms}).wait();
    // If rank 2 is on another host, all data it needs may have come before they gave up. Then its result is right, and
    // the next operation reports the failure.
    if (std::ranges::any_of(values, [](double value) { return value != 3; })) return "wrong";
    comm.all_reduce(std::span(values)).wait();
    return "done";
  });
  for (const int rank : {0, 1}) {
    const Ending ending = world.collect(rank);
    EXPECT_TRUE(contains(ending.said, "Timeout: ")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "all_reduce(float64[1000], max)")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "rank 2 (pid " + std::to_string(world.pid(2)) + ") did not come")) << ending.said;
    EXPECT_TRUE(contains(ending.said, "operation 2")) << ending.said;
  }
  world.kill(2, SIGCONT);
  const Ending late = world.collect(2);  // it learns that it was given up
  EXPECT_TRUE(contains(late.said, "Aborted: ") && contains(late.said, "rank 2")) << late.said;
}

TEST(Stopped, ForSecondsInTheMidstOfLargeMovesDoesNoHarm) {
  Processes world(2);
  world.start([&](Communicator comm) -> std::string {
    std::vector<unsigned char> values(std::size_t{64} << 20);
    const auto begun = Clock::now();
    for (unsigned char turn = 1;; ++turn) {
      if (comm.rank() == 0) std::fill(values.begin(), values.end(), turn);
      comm.broadcast(std::span(values)).wait();
      if (values.front() != turn || values.back() != turn) return "wrong";
      if (turn == 2 && comm.rank() == 0) world.raise_flag("busy");
      int go_on = Clock::now() - begun < 5s ? 1 : 0;
      comm.broadcast(std::span(&go_on, 1)).wait();
      if (go_on == 0) return "right";
    }
  });
  ASSERT_TRUE(world.await_flag("busy"));
  world.kill(1, SIGSTOP);
  std::this_thread::sleep_for(4s);  // longer than a host may be silent
  world.kill(1, SIGCONT);
  for (const int rank : {0, 1}) EXPECT_EQ(world.collect(rank).said, "right");
}

/// Sanitizers map terabytes for themselves, and then a limit on address space cannot be tried.
bool address_space_is_taken() {
  std::size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages > (std::size_t{1} << 40) / 4096;
}

TEST(OutOfMemory, IsACleanErrorBeforeUse) {
  if (address_space_is_taken()) GTEST_SKIP() << "a sanitizer has the address space";
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    const rlimit limit{std::size_t{1} << 30, std::size_t{1} << 30};
    if (comm.rank() == 0 && ::setrlimit(RLIMIT_AS, &limit) != 0) return "setrlimit";
    std::vector<Memory> taken;
    std::string told;
    try {
      while (comm.rank() == 0 && taken.size() < 64) taken.push_back(comm.allocate(std::size_t{64} << 20));
    } catch (const Error& error) {
      told = std::string(to_string(error.code())) + ": " + error.what();
    }
    taken.clear();
    std::vector<float> values(1000, 1);
    comm.all_reduce(std::span(values)).wait();  // the world is none the worse
    return values[0] == 2 ? told : "wrong";
  });
  const Ending limited = world.collect(0);
  EXPECT_TRUE(contains(limited.said, "Unavailable: ") && contains(limited.said, "ulimit -v")) << limited.said;
  EXPECT_TRUE(world.collect(1).exited_well());
}

TEST(OutOfMemory, OfFileSizeIsNoSignal) {
  Processes world(1);
  world.start([](Communicator comm) -> std::string {
    const rlimit limit{1 << 20, 1 << 20};
    if (::setrlimit(RLIMIT_FSIZE, &limit) != 0) return "setrlimit";
    static_cast<void>(comm.allocate(std::size_t{8} << 20));
    return "got it";
  });
  const Ending ending = world.collect(0);
  EXPECT_TRUE(contains(ending.said, "Unavailable: ") && contains(ending.said, "ulimit -f")) << ending.said;
}

// A peer that cannot map what another has: everybody learns it.
TEST(OutOfMemory, OfAPeerThatHasToMapIsToldToAll) {
  if (address_space_is_taken()) GTEST_SKIP() << "a sanitizer has the address space";
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    if (comm.rank() == 1) {
      const rlimit limit{std::size_t{600} << 20, std::size_t{600} << 20};
      if (::setrlimit(RLIMIT_AS, &limit) != 0) return "setrlimit";
    }
    std::vector<Memory> all;
    for (int i = 0; i < 10; ++i) {
      all.push_back(comm.allocate(std::size_t{comm.rank() == 0 ? 100u : 1u} << 20));
      comm.broadcast(floats(all.back()).first(1 << 18)).wait();
    }
    return "mapped";
  });
  for (const int rank : {0, 1}) {
    const Ending ending = world.collect(rank);
    EXPECT_TRUE(contains(ending.said, "Unavailable: ")) << ending.said;
  }
}

TEST(Exiting, WithoutDestroyingTheCommunicatorIsALostPeer) {
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    comm.barrier().wait();
    if (comm.rank() == 1) ::_exit(0);
    comm.barrier().wait();
    return "";
  });
  const Ending ending = world.collect(0);
  EXPECT_TRUE(contains(ending.said, "PeerLost: ") && contains(ending.said, "barrier()")) << ending.said;
  EXPECT_TRUE(world.collect(1).exited_well());
}

TEST(NothingIsLeft, InSharedMemoryOrOfDescriptors) {
  const auto names = [] {
    std::vector<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) found.push_back(entry.path().string());
    std::sort(found.begin(), found.end());
    return found;
  };
  const auto descriptors = [] {
    std::filesystem::directory_iterator open("/proc/self/fd");
    return std::distance(begin(open), end(open));
  };
  const auto before = names();
  Processes world(1);
  world.start([&](Communicator) -> std::string {
    const auto open = descriptors();
    for (int i = 0; i < 3; ++i) {
      comm::testing::run_world(4, [](Communicator comm) {
        Memory memory = comm.allocate(1 << 20);
        comm.all_reduce(floats(memory)).wait();
      });
    }
    return descriptors() == open ? "none" : "descriptors are left";
  });
  EXPECT_EQ(world.collect(0).said, "none");
  std::vector<std::string> more;
  const auto after = names();
  std::set_difference(after.begin(), after.end(), before.begin(), before.end(), std::back_inserter(more));
  for (const std::string& name : more) EXPECT_FALSE(contains(name, "cohort")) << name;
}

}  // namespace
}  // namespace cohort::testing
