// Guarantees of Work and Memory, whatever the operation: unattended progress, order, slices, lifetimes.
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort {
namespace {

using namespace std::chrono_literals;

using comm::testing::contains;
using comm::testing::floats;
using comm::testing::what_of;

// --- works ---

TEST(Work, ProgressesUnattended) {
  comm::testing::run_world(2, [](Communicator comm) {
    Memory memory = comm.allocate(1 << 20);
    std::atomic<bool> called = false;
    std::fill(floats(memory).begin(), floats(memory).end(), 1.0F);
    Work work = comm.all_reduce(floats(memory));
    work.on_done([&] { called = true; });
    const auto give_up = std::chrono::steady_clock::now() + 20s;
    while (!called && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(called);
    EXPECT_TRUE(work.done());
    EXPECT_FALSE(work.error());
    EXPECT_EQ(floats(memory)[77], 2.0F);
    bool at_once = false;
    work.on_done([&] { at_once = true; });
    EXPECT_TRUE(at_once);
    work.wait();
    work.wait();
  });
}

TEST(Work, ProgressesUnattendedSoonAndLongAfterOthersThatWereWaitedFor) {
  comm::testing::run_world(2, [](Communicator comm) {
    std::vector<float> values(1 << 18);
    for (const auto pause : {0ms, 5ms, 60ms}) {
      comm.all_reduce(std::span(values)).wait();
      std::this_thread::sleep_for(pause);
      Work left = comm.all_reduce(std::span(values));
      const auto give_up = std::chrono::steady_clock::now() + 20s;
      while (!left.done() && std::chrono::steady_clock::now() < give_up) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(left.done()) << pause.count() << " ms";
    }
  });
}

TEST(Work, ManyInFlightRunInOrder) {
  comm::testing::run_world(3, [](Communicator comm) {
    constexpr std::size_t kWorks = 40;
    Memory memory = comm.allocate(kWorks * 100000);
    std::vector<Work> works;
    std::mutex mutex;
    std::vector<std::size_t> order;
    for (std::size_t i = 0; i < kWorks; ++i) {
      // Large and small operations take turns; the small ones must not overtake.
      const auto part = floats(memory).subspan(i * 25000, i % 3 == 0 ? 10 : 25000);
      std::fill(part.begin(), part.end(), static_cast<float>(i));
      works.push_back(comm.all_reduce(part));
      works.back().on_done([&, i] {
        const std::lock_guard lock(mutex);
        order.push_back(i);
      });
    }
    // A wait for a late operation also completes the earlier ones.
    works.back().wait();
    for (std::size_t i = 0; i < kWorks; ++i) {
      EXPECT_TRUE(works[i].done());
      EXPECT_EQ(floats(memory)[i * 25000], static_cast<float>(3 * i));
    }
    comm.barrier().wait();
    const std::lock_guard lock(mutex);
    EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
    EXPECT_EQ(order.size(), kWorks);
  });
}

TEST(Work, WaitForGivesUpWaitingButNotTheOperation) {
  std::atomic<bool> given_up{false};
  comm::testing::run_world(2, [&given_up](Communicator comm) {
    std::vector<float> values(50000, 1);
    if (comm.rank() == 0) {
      Work work = comm.all_reduce(std::span(values));
      EXPECT_FALSE(work.wait_for(20ms));
      EXPECT_FALSE(work.done());
      given_up = true;
      { const Work behind = comm.barrier(); }  // its destructor waits
      EXPECT_TRUE(work.done());
    } else {
      while (!given_up) std::this_thread::sleep_for(1ms);
      comm.all_reduce(std::span(values)).wait();
      comm.barrier().wait();
    }
    EXPECT_EQ(values[49999], 2.0F);
  });
}

// Waits in slices, like Python. Each slice may run the operation or leave it to the next one.
TEST(Work, WaitedForInSlicesIsDoneOnceAllHaveCome) {
  std::atomic<int> waits{0};  // waits of rank 0, over all rounds
  comm::testing::run_world(2, [&waits](Communicator comm) {
    for (int i = 0; i < 5; ++i) {
      std::vector<float> small(100, 1), large(200000, 1);
      // Rank 1 comes once rank 0 has waited in vain three times.
      while (comm.rank() == 1 && waits < 3 * (i + 1)) std::this_thread::sleep_for(1ms);
      Work first = comm.all_reduce(std::span(small));
      Work second = comm.all_reduce(std::span(large));
      int slices = 0;
      while (!second.wait_for(2ms)) {
        ++slices;
        if (comm.rank() == 0 && slices <= 3) ++waits;
      }
      EXPECT_TRUE(first.wait_for(2ms));
      if (comm.rank() == 0) {
        EXPECT_GT(slices, 2);
      }
      EXPECT_EQ(small[99], 2.0F);
      EXPECT_EQ(large[199999], 2.0F);
    }
  });
}

// The communicator's thread looks each millisecond for operations that nobody runs, but need not look for this one.
TEST(Work, WaitedForInSlicesBetweenHostsBeginsAtOnce) {
  comm::run_on_threads_of(comm::testing::Worlds("hosts:2").form(2), [](Communicator comm) {
    auto shortest = std::chrono::steady_clock::duration::max();
    for (int i = 0; i < 300; ++i) {
      comm.barrier().wait();
      const auto begun = std::chrono::steady_clock::now();
      Work work = comm.barrier();
      while (!work.wait_for(50ms)) continue;
      shortest = std::min(shortest, std::chrono::steady_clock::now() - begun);
    }
    EXPECT_LT(shortest, 900us);
  });
}

TEST(Work, OutlivesItsCommunicator) {
  std::vector<Communicator> world = comm::testing::form_world(2);
  std::vector<std::vector<float>> values(2, std::vector<float>(50000, 1));
  std::vector<std::jthread> threads;
  for (std::size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      Work work = world[rank].all_reduce(std::span(values[rank]));
      world[rank] = Communicator();
      work.wait();
    });
  }
  threads.clear();
  EXPECT_EQ(values[0][0], 2.0F);
  EXPECT_EQ(values[1][0], 2.0F);
}

// --- memory ---

TEST(MemoryOf, ACommunicatorOutlivesItAndStartsZeroed) {
  std::vector<Memory> kept(2);
  comm::testing::run_world(2, [&](Communicator comm) {
    Memory memory = comm.allocate(300000);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.data()) % 4096, 0u);
    EXPECT_EQ(memory.bytes(), 300000u);
    for (const float value : floats(memory)) ASSERT_EQ(value, 0.0F);
    std::fill(floats(memory).begin(), floats(memory).end(), 1.0F);
    comm.all_reduce(floats(memory)).wait();
    kept[static_cast<std::size_t>(comm.rank())] = memory;
  });
  for (Memory& memory : kept) {
    for (const float value : floats(memory)) ASSERT_EQ(value, 2.0F);
    floats(memory)[0] = 3;
  }
}

TEST(MemoryOf, ManySegmentsComeAndGo) {
  comm::testing::run_world(3, [](Communicator comm) {
    for (int round = 0; round < 60; ++round) {
      std::vector<Memory> several;
      for (int i = 0; i <= round % 7; ++i) several.push_back(comm.allocate(40000));
      const std::span<float> values = floats(several.back());
      std::fill(values.begin(), values.end(), static_cast<float>(comm.rank()));
      comm.all_reduce(values).wait();
      ASSERT_EQ(values[9999], 3.0F);
    }
  });
}

TEST(MemoryOf, MoreAnnouncementsThanSocketsHold) {
  comm::testing::run_world(2, [](Communicator comm) {
    std::vector<Memory> many;
    for (int i = 0; i < 800; ++i) many.push_back(comm.allocate(16384));
    for (const std::size_t index : {std::size_t{0}, std::size_t{799}, std::size_t{400}}) {
      std::fill(floats(many[index]).begin(), floats(many[index]).end(), 1.0F);
      comm.all_reduce(floats(many[index])).wait();
      EXPECT_EQ(floats(many[index])[4095], 2.0F);
    }
  });
}

TEST(MemoryOf, MoreThanThereIsIsACleanError) {
  comm::testing::run_world(2, [](Communicator comm) {
    const std::string text =
        what_of([&] { static_cast<void>(comm.allocate(std::size_t{1} << 46)); }, ErrorCode::Unavailable);
    EXPECT_TRUE(contains(text, "allocate(") && contains(text, "rank")) << text;
    comm.barrier().wait();
  });
}

TEST(ThreadWorld, SumsOverRanks) {
  for (const int size : {1, 2, 3, 5}) {
    comm::testing::run_world(size, [&](Communicator comm) {
      EXPECT_EQ(comm.size(), size);
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{300000}}) {
        std::vector<float> own(count, static_cast<float>(comm.rank() + 1));
        comm.all_reduce(std::span(own)).wait();
        EXPECT_EQ(own, std::vector<float>(count, static_cast<float>(size * (size + 1) / 2)));
        Memory memory = comm.allocate(count * sizeof(float));
        const std::span<float> values(static_cast<float*>(memory.data()), count);
        std::iota(values.begin(), values.end(), static_cast<float>(comm.rank()));
        comm.all_reduce(values).wait();
        EXPECT_EQ(values[count - 1],
                  static_cast<float>(size) * static_cast<float>(count - 1) + static_cast<float>(size * (size - 1) / 2));
      }
    });
  }
}

TEST(ThreadWorld, RethrowsTheFirstExceptionAndEndsTheOthers) {
  std::atomic<int> told = 0;
  try {
    comm::testing::run_world(3, [&](Communicator comm) {
      if (comm.rank() == 1) throw std::runtime_error("no more coffee");
      try {
        comm.barrier().wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Aborted);
        EXPECT_NE(std::string(error.what()).find("no more coffee"), std::string::npos) << error.what();
        ++told;
        throw;
      }
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no more coffee");
  }
  EXPECT_EQ(told, 2);
}

TEST(ThreadWorld, RefusesAWorldOfNone) { EXPECT_THROW(comm::testing::form_world(0), Error); }

}  // namespace

}  // namespace cohort
