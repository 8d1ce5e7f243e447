// Programs that capture CUDA graphs: operations that a graph cannot replay are refused before they affect the capture,
// and operations in flight affect none. Uses the fake driver; the ranks of odd tests share a GPU, so they stage.
#include "comm/gpu/chunking.h"
#include "comm/testing/gpus.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

/// Begins a capture of all threads, like torch.
void begin_capture(void* stream) { EXPECT_EQ((of_driver<int(void*, int)>("cuStreamBeginCapture_v2")(stream, 0)), 0); }
/// Ends the capture; true if there is a graph.
bool end_capture(void* stream) {
  void* graph = nullptr;
  return of_driver<int(void*, void**)>("cuStreamEndCapture")(stream, &graph) == 0;
}

class Captures : public ::testing::TestWithParam<bool> {
 protected:
  void TearDown() override { ::unsetenv("FAKE_NCCL_DELAY"); }
  /// Floats whose operations use NCCL or are staged.
  static Floats floats_of(Communicator& comm, std::vector<float> values) {
    return GetParam() ? floats(comm, std::move(values)) : Floats(comm, std::move(values));
  }
};

TEST_P(Captures, EveryOperationOfTheStreamIsRefusedAndTheGraphIsWhole) {
  using Call = std::function<Work(Communicator&, const Buffer& captured, const Buffer& other)>;
  const std::vector<Call> calls = {
      [](Communicator& comm, const Buffer& captured, const Buffer&) { return comm.all_reduce(captured); },
      [](Communicator& comm, const Buffer& captured, const Buffer& other) { return comm.all_reduce(other, captured); },
      [](Communicator& comm, const Buffer& captured, const Buffer& other) { return comm.all_reduce(captured, other); },
      [](Communicator& comm, const Buffer& captured, const Buffer& other) {
        return comm.all_reduce(std::vector{other, captured});
      },
      [](Communicator& comm, const Buffer& captured, const Buffer&) {
        return comm.all_reduce(captured, {.wire_format = WireFormat::BFloat16});  // staged, since NCCL lacks the format
      },
      [](Communicator& comm, const Buffer& captured, const Buffer&) { return comm.broadcast(captured); },
      [](Communicator& comm, const Buffer& captured, const Buffer&) { return comm.send(captured, 1); },
      [](Communicator& comm, const Buffer& captured, const Buffer&) { return comm.recv(captured, 1); },
  };
  const std::size_t usual = cuda::piece_bytes();
  for (const std::size_t bytes : {usual, std::size_t{64}}) {  // whole, and in pieces
    cuda::set_piece_bytes(bytes);
    run_world(2, [&](Communicator comm) {
      const Floats captured = floats_of(comm, std::vector<float>(100, 1)),
                   other = floats_of(comm, std::vector<float>(100, 1));
      comm.all_reduce(captured.buffer()).wait();
      comm.barrier().wait();
      if (comm.rank() == 0) {
        void* const stream = new_stream();
        begin_capture(stream);
        for (std::size_t i = 0; i < calls.size(); ++i) {
          SCOPED_TRACE(i);
          const std::string why = refused([&] { calls[i](comm, captured.buffer(stream), other.buffer()).wait(); },
                                          ErrorCode::InvalidArgument);
          EXPECT_TRUE(has(why, "(float32[100]) of a GPU's memory failed -- rank 0 (")) << why;
          EXPECT_TRUE(has(why, "is being captured into a CUDA graph") && has(why, "leave it out")) << why;
        }
        EXPECT_TRUE(end_capture(stream));
      }
      comm.barrier().wait();  // the world goes on, and the stream
      comm.all_reduce(captured.buffer()).wait();
      EXPECT_EQ(captured.values(), std::vector<float>(100, 4));
    });
  }
  cuda::set_piece_bytes(usual);
}

TEST_P(Captures, WhatIsGivenToOtherStreamsGoesOnBesideThem) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats_of(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    ::setenv("FAKE_NCCL_DELAY", "100", 1);
    Work before = comm.all_reduce(data.buffer());
    before.synchronize(data.buffer().device);
    void* const stream = new_stream();
    if (comm.rank() == 0) begin_capture(stream);
    const auto begun = std::chrono::steady_clock::now();
    // Checks of the GPU while nobody waits do not count as the program's calls.
    while (!before.done() || std::chrono::steady_clock::now() - begun < 50ms) std::this_thread::sleep_for(1ms);
    const Floats more = floats_of(comm, {1});
    comm.all_reduce(more.buffer()).wait();
    EXPECT_EQ(more.values(), std::vector<float>{2});
    if (comm.rank() == 0) {
      EXPECT_TRUE(end_capture(stream));
    }
    EXPECT_EQ(data.values(), (std::vector<float>{4, 8}));
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, Captures, ::testing::Bool(),
                         [](const auto& way) { return way.param ? "ByNccl" : "Staged"; });

TEST(CapturesByNccl, AStreamThatIsCapturedIsNotPutAfterAResult) {
  run_world(2, [](Communicator comm) {
    const Floats data = floats(comm, {1, 2});
    comm.all_reduce(data.buffer()).wait();
    comm.barrier().wait();
    ::setenv("FAKE_NCCL_DELAY", "100", 1);
    Work work = comm.all_reduce(data.buffer());
    if (comm.rank() == 0) {
      void* const stream = new_stream();
      begin_capture(stream);
      const std::string why =
          refused([&] { work.synchronize(data.buffer(stream).device); }, ErrorCode::InvalidArgument);
      EXPECT_TRUE(has(why, "synchronize of all_reduce(float32[2]) of a GPU's memory failed -- rank 0 (")) << why;
      EXPECT_TRUE(end_capture(stream));
      work.synchronize(data.buffer(stream).device);
    }
    work.wait();
    EXPECT_EQ(data.values(), (std::vector<float>{4, 8}));
  });
  ::unsetenv("FAKE_NCCL_DELAY");
}

}  // namespace
}  // namespace cohort::comm::testing
