// Operations on GPU memory that the host does not wait for: streams that run after them, several in flight, later
// failures, and leaving. Uses the fake driver and the fake NCCL.
#include "comm/testing/gpus.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

class InFlight : public ::testing::Test {
 protected:
  void TearDown() override {
    for (const char* name : {"FAKE_NCCL_TROUBLE", "FAKE_NCCL_DELAY"}) ::unsetenv(name);
  }
  static void delay(const char* milliseconds) { ::setenv("FAKE_NCCL_DELAY", milliseconds, 1); }
  static void cause(const char* what) { ::setenv("FAKE_NCCL_TROUBLE", what, 1); }
};

/// Memory that a kernel in a stream sees.
struct Seen {
  void* memory;
  std::size_t count;
  std::vector<float> values;
  std::atomic<bool> looked{false};

  void look_in(void* stream) {
    launch(
        stream,
        [](void* data) {
          auto& own = *static_cast<Seen*>(data);
          const float* const from = seen_by_kernels(own.memory);
          own.values.assign(from, from + own.count);
          own.looked = true;
        },
        this);
  }
  bool await() const {
    for (int i = 0; i < 10000 && !looked; ++i) std::this_thread::sleep_for(1ms);
    return looked;
  }
};

bool await_end(const Work& work) {
  for (int i = 0; i < 10000 && !work.done(); ++i) std::this_thread::sleep_for(1ms);
  return work.done();
}

TEST_F(InFlight, AStreamWaitsAndTheHostDoesNot) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();  // NCCL is there
    comm.barrier().wait();
    delay("1000");
    void* const stream = new_stream();
    Seen seen{.memory = data.data(), .count = 2, .values = {}};
    const auto begun = Clock::now();
    Work work = comm.all_reduce(data.buffer());
    work.synchronize(data.buffer(stream).device);
    seen.look_in(stream);
    EXPECT_FALSE(work.done());
    EXPECT_LT(Clock::now() - begun, 900ms);
    EXPECT_TRUE(seen.await());
    EXPECT_EQ(seen.values, (std::vector<float>{4, 8}));
    EXPECT_TRUE(await_end(work));  // nobody waits
    EXPECT_FALSE(work.error());
    work.synchronize(data.buffer(stream).device);
    work.wait();
  });
}

TEST_F(InFlight, TheNextIsGivenWhileOneRuns) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    delay("1000");
    std::mutex mutex;
    std::vector<int> ended;
    std::vector<Work> works;
    const auto begun = Clock::now();
    for (int i = 0; i < 3; ++i) {
      works.push_back(comm.all_reduce(data.buffer()));
      works.back().on_done([&, i] {
        const std::lock_guard lock(mutex);
        ended.push_back(i);
      });
      works.back().synchronize(data.buffer().device);
    }
    EXPECT_LT(Clock::now() - begun, 900ms);
    EXPECT_FALSE(works.front().done());
    works[1].wait();  // while the queue has nothing more
    EXPECT_TRUE(works[0].done());
    works[2].wait();
    EXPECT_EQ(data.values(), (std::vector<float>{16, 32}));
    for (int i = 0; i < 10000 &&
                    [&] {
                      const std::lock_guard lock(mutex);
                      return ended.size() < 3;
                    }();
         ++i) {
      std::this_thread::sleep_for(1ms);
    }
    const std::lock_guard lock(mutex);
    EXPECT_EQ(ended, (std::vector<int>{0, 1, 2}));
  });
}

TEST_F(InFlight, MoreThanTheGpuIsGivenAtOnce) {
  delay("2");
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1});
    for (int i = 0; i < 150; ++i) {
      comm.all_reduce(data.buffer(), {.op = ReduceOp::Average}).synchronize(data.buffer().device);
    }
    comm.barrier().wait();  // comes after them
    EXPECT_EQ(data.values(), std::vector<float>{1});
  });
}

TEST_F(InFlight, WaitingForOneDoesNotWaitForTheNext) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2}), next = floats(comm, {1, 2});
    std::vector<std::int32_t> token = {1};
    comm.all_reduce(data.buffer()).wait();
    if (comm.rank() == 0) {
      Work first = comm.all_reduce(data.buffer()), second = comm.all_reduce(next.buffer());
      first.wait();
      comm.send(std::span<const std::int32_t>(token), 1).wait();  // without this message the other rank does not come
      second.wait();
    } else {
      comm.all_reduce(data.buffer()).wait();
      comm.recv(std::span(token), 0).wait();
      comm.all_reduce(next.buffer()).wait();
    }
    EXPECT_EQ(next.values(), (std::vector<float>{2, 4}));
  });
}

TEST_F(InFlight, OperationsOfTheHostDoNotWaitForItAndBarriersDo) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2}), other = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    delay("1000");
    std::vector<float> host = {1};
    const auto begun = Clock::now();
    Work work = comm.all_reduce(data.buffer());
    comm.all_reduce(std::span(host)).wait();
    EXPECT_EQ(host, std::vector<float>{2});
    EXPECT_LT(Clock::now() - begun, 900ms);
    EXPECT_FALSE(work.done());
    comm.barrier().wait();
    EXPECT_TRUE(work.done());
    Work last = comm.all_reduce(data.buffer());
    comm.all_reduce(other.buffer(), {.wire_format = WireFormat::BFloat16}).wait();  // through the host
    EXPECT_TRUE(last.done());
  });
}

TEST_F(InFlight, OfStagedOperationsItIsWait) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    Work work = comm.all_reduce(data.buffer(), {.wire_format = WireFormat::BFloat16});
    work.synchronize(data.buffer().device);
    EXPECT_TRUE(work.done());
    EXPECT_EQ(data.values(), (std::vector<float>{2, 4}));
    std::vector<float> host = {1};
    Work of_host = comm.all_reduce(std::span(host));
    of_host.synchronize({});
    EXPECT_EQ(host, std::vector<float>{2});
    EXPECT_TRUE(Work().synchronize_for(data.buffer().device, 1ms));
  });
}

TEST_F(InFlight, GivesUpWaitingForRanksThatDoNotCome) {
  std::atomic<bool> given_up{false};
  run_world(2, [&given_up](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    while (comm.rank() == 1 && !given_up) std::this_thread::sleep_for(1ms);
    Work work = comm.all_reduce(data.buffer());
    if (comm.rank() == 0) {
      EXPECT_FALSE(work.synchronize_for(data.buffer().device, 20ms));
      given_up = true;
    }
    EXPECT_TRUE(work.synchronize_for(data.buffer().device, 10s));
  });
}

TEST_F(InFlight, WhatLooksAtResultsIsDoneWhenTheyHaveBeenRead) {
  delay("50");
  run_world(2, [](Communicator comm) {
    const Floats bad = floats(comm, {1, std::numeric_limits<float>::infinity()});
    Work work = comm.all_reduce(bad.buffer(), {.check_finite = true});
    work.synchronize(bad.buffer().device);
    EXPECT_TRUE(await_end(work));
    EXPECT_EQ(work.finite(), false);
  });
}

// --- what fails after the host has gone on ---

TEST_F(InFlight, AHangIsATimeoutThatTheNextCallTells) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    cause("hang:1");
    const auto begun = Clock::now();
    void* const stream = new_stream();
    Work work = comm.all_reduce(data.buffer(), {.timeout = 1s});
    work.synchronize(data.buffer(stream).device);
    Seen seen{.memory = data.data(), .count = 2, .values = {}};
    seen.look_in(stream);
    EXPECT_TRUE(await_end(work));
    EXPECT_LT(Clock::now() - begun, 9s);
    const auto error = work.error();
    ASSERT_TRUE(error);
    EXPECT_TRUE(has(error->what(), "NCCL has not carried it out by the deadline")) << error->what();
    EXPECT_TRUE(seen.await());  // the stream goes on
    EXPECT_TRUE(has(refused([&] { comm.all_reduce(data.buffer()).wait(); }, ErrorCode::Aborted),
                    "NCCL has not carried it out"));
    EXPECT_TRUE(has(refused([&] { comm.barrier().wait(); }, ErrorCode::Aborted), "NCCL has not carried it out"));
    EXPECT_THROW(work.synchronize(data.buffer(stream).device), Error);
  });
}

TEST_F(InFlight, AStreamThatHangsIsATimeoutThoughNobodyWaits) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats data = floats(comm, {1, 2}), more = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    void* const stream = new_stream();
    if (comm.rank() == 0) {
      launch(stream, wait_for_flag, &go);
      Work work = comm.all_reduce(data.buffer(stream), {.timeout = 60s});
      Work late = comm.all_reduce(more.buffer(), {.timeout = 1s});  // comes behind it
      late.synchronize(more.buffer().device);
      EXPECT_TRUE(await_end(late) && await_end(work));
      EXPECT_TRUE(has(late.error()->what(), "NCCL has not carried it out by the deadline")) << late.error()->what();
      go = true;
    } else {
      Work work = comm.all_reduce(data.buffer(), {.timeout = 60s}), late = comm.all_reduce(more.buffer());
      late.synchronize(more.buffer().device);
      EXPECT_TRUE(await_end(late));
      EXPECT_EQ(late.error()->code(), ErrorCode::Aborted) << late.error()->what();
    }
  });
}

TEST_F(InFlight, WhatARankThatGaveUpHasLeftOutIsNoResult) {
  for (const bool awaited : {true, false}) {
    ::unsetenv("FAKE_NCCL_TROUBLE");
    run_world(2, [awaited](Communicator comm) {
      const Floats data = floats(comm, {1, 2});
      comm.all_reduce(data.buffer()).wait();
      comm.barrier().wait();
      cause("careless:1");
      const auto timeout = comm.rank() == 1 ? 1s : 60s;
      Work work = comm.all_reduce(data.buffer(), {.timeout = timeout});
      if (!awaited) work.synchronize(data.buffer().device);
      const std::string why = refused([&] { work.wait(); }, comm.rank() == 1 ? ErrorCode::Timeout : ErrorCode::Aborted);
      EXPECT_TRUE(has(why, "NCCL has not carried it out by the deadline")) << why;
    });
  }
}

TEST_F(InFlight, AnAbortEndsWhatIsInFlight) {
  std::atomic<int> come{0};
  run_world(2, [&](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    cause("hang:0");
    std::vector<Work> works;
    for (int i = 0; i < 3; ++i) {
      works.push_back(comm.all_reduce(data.buffer()));
      works.back().synchronize(data.buffer().device);
    }
    ++come;
    const auto begun = Clock::now();
    while (comm.rank() == 1 && come < 2) std::this_thread::sleep_for(1ms);
    if (comm.rank() == 1) comm.abort("enough");
    for (const Work& work : works) {
      EXPECT_TRUE(await_end(work));
      ASSERT_TRUE(work.error());
      EXPECT_EQ(work.error()->code(), ErrorCode::Aborted);
      EXPECT_TRUE(has(work.error()->what(), "enough")) << work.error()->what();
    }
    EXPECT_LT(Clock::now() - begun, 9s);
  });
}

TEST_F(InFlight, AnErrorOfNcclEndsTheWorldThoughNobodyWaits) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    cause("async:1");
    comm.all_reduce(data.buffer()).synchronize(data.buffer().device);  // and forgets it
    const auto begun = Clock::now();
    while (Clock::now() - begun < 10s) {
      try {
        std::vector<float> host = {1};
        comm.all_reduce(std::span(host)).wait();
      } catch (const Error& error) {
        EXPECT_TRUE(has(error.what(), "NCCL says: ")) << error.what();
        return;
      }
    }
    ADD_FAILURE() << "the error was not told";
  });
}

// --- leaving ---

TEST_F(InFlight, LeavingWaitsForWhatIsInFlight) {
  delay("200");
  std::vector<Memory> kept(2);
  std::atomic<int> ended{0};
  run_world(2, [&](Communicator comm) {
    kept[static_cast<std::size_t>(comm.rank())] = comm.allocate(8, {DeviceType::CUDA, comm.rank()});
    void* const data = kept[static_cast<std::size_t>(comm.rank())].data();
    const Buffer buffer(data, 2, DType::Float32, {DeviceType::CUDA, comm.rank()});
    for (int i = 0; i < 2; ++i) {
      Work work = comm.all_reduce(buffer);
      work.on_done([&] { ++ended; });
      work.synchronize(buffer.device);
    }
  });
  EXPECT_EQ(ended, 4);
}

TEST_F(InFlight, TheLastHandleMayGoInACallback) {
  delay("50");
  std::atomic<int> ended{0};
  run_world(2, [&](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    auto last = std::make_shared<Communicator>(comm);
    const std::weak_ptr<Communicator> gone = last;
    Work work = comm.all_reduce(data.buffer());
    work.on_done([&ended, last = std::move(last)]() mutable {
      last.reset();
      ++ended;
    });
    work.synchronize(data.buffer().device);
    comm = {};
    for (int i = 0; i < 10000 && !gone.expired(); ++i) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(gone.expired());
  });
  EXPECT_EQ(ended, 2);
}

}  // namespace
}  // namespace cohort::comm::testing
