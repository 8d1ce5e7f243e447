// Engines on GPU memory of the fake driver, over the fake NCCL: cases that the tests in Python do not cover. Those are
// python.torch_on_gpus and python.torch_training_on_gpus.
#include "comm/testing/gpus.h"
#include "horovod/named/engine.h"
#include "horovod/named/testing.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::named {
namespace {

using comm::testing::Floats;
using comm::testing::function_of;
using testing::error_of;

int operations_of_nccl() {
  auto* const count = function_of<int()>("libnccl.so.2", "fake_nccl_operations");
  return count != nullptr ? count() : 0;
}

Request request_of(Kind kind, std::string name, const Floats& input) {
  Request request;
  request.name = std::move(name);
  request.kind = kind;
  request.op = ReduceOp::Sum;
  request.input = input.buffer();
  request.shape = {request.input.count};
  return request;
}

std::vector<float> floats_of(const Outcome& outcome, int gpu) {
  std::vector<float> values(static_cast<std::size_t>(outcome.shape[0]));
  comm::cuda::Gpu& on = comm::cuda::Gpu::at(gpu);
  on.wait(*on.copy_to_host(values.data(), outcome.data, values.size() * sizeof(float), *on.mark(nullptr)),
          std::chrono::steady_clock::time_point::max());
  return values;
}

/// Each rank has two floats, rank + 1 and 5, on a GPU of its own, and room for two.
void with_engines_on_gpus(const std::function<void(Engine&, const Floats& mine, const Floats& room)>& body) {
  run_on_threads(2, [&](Communicator comm) {
    const Floats mine(comm, {static_cast<float>(comm.rank() + 1), 5}, comm.rank());
    const Floats room(comm, {0, 0}, comm.rank());
    Engine engine(std::move(comm));
    body(engine, mine, room);
    engine.submit(testing::barrier("end of the test")).wait();
  });
}

TEST(NamedOnGpus, ResultsThatTheEngineAllocatesAreOnTheGpu) {
  const int before = operations_of_nccl();
  with_engines_on_gpus([](Engine& engine, const Floats& mine, const Floats& room) {
    const int rank = engine.rank();
    const auto result = [&](Kind kind) {
      return floats_of(engine.submit(request_of(kind, std::string(name_of(kind)), mine)).outcome(), rank);
    };
    EXPECT_EQ(result(Kind::AllGather), (std::vector<float>{1, 5, 2, 5}));
    EXPECT_EQ(result(Kind::ReduceScatter), (std::vector<float>{rank == 0 ? 3.f : 10.f}));
    EXPECT_EQ(result(Kind::AllToAll), rank == 0 ? (std::vector<float>{1, 2}) : (std::vector<float>{5, 5}));
    Request spread = request_of(Kind::Broadcast, "spread", mine);
    spread.output = room.buffer();
    spread.root = 1;
    engine.submit(spread).wait();
    EXPECT_EQ(room.values(), (std::vector<float>{2, 5}));
    EXPECT_EQ(mine.values()[0], static_cast<float>(rank + 1));
  });
  EXPECT_EQ(operations_of_nccl() - before, 2 * 4);
}

TEST(NamedOnGpus, RanksThatHaveJoinedAreServedByTheHost) {
  const int before = operations_of_nccl();
  with_engines_on_gpus([](Engine& engine, const Floats& mine, const Floats& room) {
    if (engine.rank() == 0) {
      EXPECT_EQ(floats_of(engine.submit(request_of(Kind::AllGather, "gather", mine)).outcome(), 0),
                (std::vector<float>{1, 5}));
      Request spread = request_of(Kind::Broadcast, "spread", mine);
      spread.output = room.buffer();
      engine.submit(spread).wait();
      EXPECT_EQ(room.values(), (std::vector<float>{1, 5}));
      Request sum = request_of(Kind::AllReduce, "sum", mine);
      sum.output = room.buffer();
      sum.postscale = 2;
      engine.submit(sum).wait();
      EXPECT_EQ(room.values(), (std::vector<float>{2, 10}));
      EXPECT_EQ(error_of(engine.submit(request_of(Kind::AllToAll, "exchange", mine))).code(), ErrorCode::Mismatch);
    }
    engine.join();
  });
  EXPECT_EQ(operations_of_nccl() - before, 0);
}

// With staging, since the ranks share a GPU. Rank 1's program gives up while rank 0's stream hangs.
void expect_that_a_hanging_rank_hears(bool other_has_joined) {
  using Clock = std::chrono::steady_clock;
  std::atomic<bool> go{false};
  std::atomic<Clock::time_point> aborted{};
  run_on_threads(2, [&](Communicator comm) {
    const Floats mine(comm, {1, 5});
    Communicator own = comm;  // the test's own, with which it aborts
    Engine engine(std::move(comm));
    Request sum = request_of(Kind::AllReduce, "sum", mine);
    sum.output = mine.buffer();
    engine.submit(sum).wait();
    engine.submit(testing::barrier("a driver gives no memory while a stream hangs")).wait();
    if (engine.rank() == 0) {
      void* const stream = comm::testing::new_stream();
      comm::testing::launch(stream, comm::testing::wait_for_flag, &go);
      sum.input = sum.output = mine.buffer(stream);
      const Error error = error_of(engine.submit(sum));
      EXPECT_EQ(error.code(), ErrorCode::Aborted) << error.what();
      EXPECT_TRUE(comm::testing::has(error.what(), "enough")) << error.what();
      EXPECT_LT(Clock::now() - aborted.load(), std::chrono::seconds(1));
      go = true;
      return;
    }
    std::optional<Handle> last;
    last = other_has_joined ? engine.join_async() : engine.submit(sum);
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    aborted = Clock::now();
    own.abort("enough");
    while (!go) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_EQ(error_of(*last).code(), ErrorCode::Aborted);
  });
}

TEST(NamedOnGpus, ARankWhoseStreamHangsHearsOfAnAbort) { expect_that_a_hanging_rank_hears(false); }
TEST(NamedOnGpus, ARankWhoseStreamHangsHearsOfAnAbortOfOneThatHasJoined) { expect_that_a_hanging_rank_hears(true); }

TEST(NamedOnGpus, AStreamThatIsCapturedIsRefusedAndTheGraphIsWhole) {
  with_engines_on_gpus([](Engine& engine, const Floats& mine, const Floats& room) {
    if (engine.rank() == 0) {
      void* const stream = comm::testing::new_stream();
      auto* const begin = comm::testing::of_driver<int(void*, int)>("cuStreamBeginCapture_v2");
      auto* const end = comm::testing::of_driver<int(void*, void**)>("cuStreamEndCapture");
      EXPECT_EQ(begin(stream, 0), 0);
      Request sum = request_of(Kind::AllReduce, "sum", mine);
      sum.output = room.buffer(stream);
      const std::string why =
          comm::testing::refused([&] { static_cast<void>(engine.submit(sum)); }, ErrorCode::InvalidArgument);
      EXPECT_TRUE(comm::testing::has(why, "all_reduce 'sum' failed -- rank 0 -- its stream on cuda:0 is being")) << why;
      void* graph = nullptr;
      EXPECT_EQ(end(stream, &graph), 0);
    }
    Request sum = request_of(Kind::AllReduce, "sum", mine);
    sum.output = room.buffer();
    engine.submit(sum).wait();
    EXPECT_EQ(room.values(), (std::vector<float>{3, 10}));
  });
}

TEST(NamedOnGpus, InputAndOutputAreOnOneDevice) {
  with_engines_on_gpus([](Engine& engine, const Floats& mine, const Floats& room) {
    Request sum = request_of(Kind::AllReduce, "sum", mine);
    sum.output = room.buffer();
    sum.output.device = {};
    EXPECT_THROW(engine.submit(sum), Error);
    sum.output.device = {DeviceType::CUDA, 1 - engine.rank()};
    EXPECT_THROW(engine.submit(sum), Error);
  });
}

}  // namespace
}  // namespace cohort::named
