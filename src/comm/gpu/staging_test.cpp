// Collectives and messages on GPU memory: their order after earlier work in the stream, the ranks' errors when a GPU
// fails or hangs, and which calls are refused. Uses the fake driver without NCCL, since all ranks share one GPU.
// comm_tests.trials_on_gpus checks the bits of all operations.
#include "comm/gpu/chunking.h"
#include "comm/gpu/driver.h"
#include "comm/testing/gpus.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

class OnGpus : public ::testing::Test {
 protected:
  void TearDown() override {
    if (auto* const fail = of_driver<void(int)>("fake_cuda_fail")) fail(0);
  }
};

TEST_F(OnGpus, TheHostCannotTouchTheirMemory) {
  run_world(1, [](Communicator comm) {
    const Floats floats(comm, {1});
    EXPECT_DEATH(*static_cast<volatile float*>(floats.data()) = 2, "");  // by SIGSEGV, or AddressSanitizer
  });
}

TEST_F(OnGpus, OperationsComeAfterWhatIsInTheirStream) {
  run_world(2, [](Communicator comm) {
    Floats floats(comm, {0, 0});
    void* const stream = new_stream();
    launch(
        stream,
        [](void* memory) {
          std::this_thread::sleep_for(500ms);
          seen_by_kernels(memory)[0] = 3;
          seen_by_kernels(memory)[1] = 4;
        },
        floats.data());
    Work work = comm.all_reduce(floats.buffer(stream));
    EXPECT_FALSE(work.done());
    work.wait();
    EXPECT_EQ(floats.values(), (std::vector<float>{6, 8}));
    // An output, too, is written only after its stream's earlier work on it.
    std::atomic<bool> read{false};
    struct Reader {
      void* memory;
      std::atomic<bool>* read;
      float value;
    } reader{floats.data(), &read, 0};
    launch(
        stream,
        [](void* data) {
          std::this_thread::sleep_for(50ms);
          auto* const own = static_cast<Reader*>(data);
          own->value = seen_by_kernels(own->memory)[0];
          own->read->store(true);
        },
        &reader);
    const Floats input(comm, {1});
    comm.all_gather(input.buffer(), floats.buffer(stream)).wait();
    EXPECT_TRUE(read.load());
    EXPECT_EQ(reader.value, 6);
    EXPECT_EQ(floats.values(), (std::vector<float>{1, 1}));
  });
}

TEST_F(OnGpus, GroupsAndSinglesGoOnTogether) {
  run_world(4, [](Communicator comm) {
    std::vector<Floats> small, large;
    for (int i = 0; i < 20; ++i) small.emplace_back(comm, std::vector<float>(static_cast<std::size_t>(i), 1.f));
    for (int i = 0; i < 4; ++i) large.emplace_back(comm, std::vector<float>(300000, static_cast<float>(i)));
    for (int turn = 1; turn <= 3; ++turn) {
      std::vector<Buffer> buffers;
      for (const Floats& one : small) buffers.push_back(one.buffer());
      std::vector<Work> works;
      works.push_back(comm.all_reduce(buffers, {.op = ReduceOp::Average}));
      for (const Floats& one : large) works.push_back(comm.all_reduce(one.buffer(), {.op = ReduceOp::Average}));
      for (Work& work : works) work.wait();
    }
    for (const Floats& one : small) {
      for (const float value : one.values()) ASSERT_EQ(value, 1);
    }
    for (std::size_t i = 0; i < large.size(); ++i) {
      for (const float value : large[i].values()) ASSERT_EQ(value, static_cast<float>(i));
    }
  });
}

TEST_F(OnGpus, MessagesAreDoneWhenTheyAreThere) {
  run_world(2, [](Communicator comm) {
    Floats floats(comm, std::vector<float>(100000, static_cast<float>(comm.rank() + 1)));
    if (comm.rank() == 0) {
      comm.send(floats.buffer(), 1).wait();
      comm.send(floats.buffer(), 1, {.tag = 7}).wait();
      return;
    }
    std::atomic<bool> called{false};
    Work work = comm.recv(floats.buffer(), 0);
    work.on_done([&] { called = floats.values().back() == 1; });
    work.wait();
    EXPECT_EQ(floats.values(), std::vector<float>(100000, 1.f));
    for (int i = 0; i < 10000 && !called; ++i) std::this_thread::sleep_for(1ms);
    EXPECT_TRUE(called);
    Work any = comm.recv(floats.buffer(), kAnySource, {.tag = 7});
    any.wait();
    EXPECT_EQ(any.source(), 0);
  });
}

TEST_F(OnGpus, ResultsAreLookedAtOnTheHost) {
  run_world(3, [](Communicator comm) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const Floats fine(comm, {1, 2}), bad(comm, {1, comm.rank() == 1 ? nan : 2.f});
    Work works[] = {comm.all_reduce(fine.buffer(), {.check_finite = true}),
                    comm.all_reduce(bad.buffer(), {.check_finite = true})};
    for (Work& work : works) work.wait();
    EXPECT_EQ(works[0].finite(), true);
    EXPECT_EQ(works[1].finite(), false);
  });
}

TEST_F(OnGpus, MixedWorldsAreRefusedAndBothSidesNamed) {
  run_world(2, [](Communicator comm) {
    const Floats floats(comm, {1, 2});
    std::vector<float> host = {1, 2};
    const std::string why = refused(
        [&] {
          if (comm.rank() == 0) {
            comm.all_reduce(floats.buffer()).wait();
          } else {
            comm.all_reduce(std::span(host)).wait();
          }
        },
        ErrorCode::Mismatch);
    EXPECT_TRUE(has(why, "rank 1 brought all_reduce(float32[2], sum)")) << why;
    EXPECT_TRUE(has(why, "rank 0 brought all_reduce(float32[2], sum) of a GPU's memory")) << why;
    comm.all_reduce(floats.buffer()).wait();  // the world goes on
    EXPECT_EQ(floats.values(), (std::vector<float>{2, 4}));
    const std::string both =
        refused([&] { comm.all_reduce(floats.buffer(), Buffer(std::span(host))).wait(); }, ErrorCode::InvalidArgument);
    EXPECT_TRUE(has(both, "the input is in cuda:0 and the output in the host's memory")) << both;
  });
}

TEST_F(OnGpus, AFailingGpuEndsTheWorldAndIsNamed) {
  run_world(2, [](Communicator comm) {
    const Floats floats(comm, {1, 2});
    comm.all_reduce(floats.buffer()).wait();  // from then on all know that it goes by staging
    if (comm.rank() == 0) {
      comm.barrier().wait();
      of_driver<void(int)>("fake_cuda_fail")(700);
      const std::string why =
          refused([&] { comm.all_reduce(floats.buffer(), {.timeout = 5s}).wait(); }, ErrorCode::Internal);
      EXPECT_TRUE(has(why, "fake failure (error 700)")) << why;
      comm.abort(why);
    } else {
      // On several hosts, the news may come before this rank is through with the first.
      const std::string why = refused(
          [&] {
            comm.barrier().wait();
            comm.barrier().wait();
          },
          ErrorCode::Aborted);
      EXPECT_TRUE(has(why, "fake failure")) << why;
    }
  });
}

TEST_F(OnGpus, AHangingStreamIsATimeoutThatSaysSo) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats floats(comm, {1, 2});
    void* const stream = new_stream();
    comm.barrier().wait();  // a driver gives no memory while a stream hangs
    if (comm.rank() == 0) {
      launch(stream, wait_for_flag, &go);
      const std::string why =
          refused([&] { comm.all_reduce(floats.buffer(stream), {.timeout = 200ms}).wait(); }, ErrorCode::Timeout);
      EXPECT_TRUE(has(why, "its stream has not come to the operation by the deadline")) << why;
      go = true;
    } else {
      EXPECT_TRUE(has(refused([&] { comm.all_reduce(floats.buffer(), {.timeout = 5s}).wait(); }, ErrorCode::Aborted),
                      "its stream has not come to the operation"));
      while (!go)
        std::this_thread::sleep_for(1ms);  // nor frees memory, and meanwhile it blocks the other rank's thread
    }
  });
}

TEST_F(OnGpus, ARankWhoseStreamHangsHearsOfAnAbort) {
  // The call waits for its stream, until its input has come or its output is free.
  using Call = std::function<Work(Communicator&, const Buffer& hangs, const Buffer& half)>;
  const std::vector<Call> calls = {
      [](Communicator& comm, const Buffer& hangs, const Buffer&) { return comm.all_reduce(hangs); },
      [](Communicator& comm, const Buffer& hangs, const Buffer& half) { return comm.all_gather(half, hangs); },
      [](Communicator& comm, const Buffer& hangs, const Buffer& half) {
        std::vector<Buffer> group(40, half);
        group.insert(group.begin() + 20, hangs);
        for (int i = 0; i < 40; ++i) group.push_back(hangs);
        return comm.all_reduce(group);
      },
      [](Communicator& comm, const Buffer& hangs, const Buffer&) { return comm.send(hangs, 1); },
      [](Communicator& comm, const Buffer& hangs, const Buffer&) { return comm.recv(hangs, 1); },
  };
  const std::size_t usual = cuda::piece_bytes();
  constexpr std::size_t kCollectives = 3;  // the first calls, which are collectives, also go in pieces
  for (std::size_t i = 0; i < calls.size() + kCollectives; ++i) {
    const std::size_t which = i % calls.size();
    SCOPED_TRACE(i);
    cuda::set_piece_bytes(i == which ? usual : 4096);
    std::atomic<bool> go{false};
    std::atomic<std::chrono::steady_clock::time_point> aborted{};
    run_world(2, [&](Communicator comm) {
      constexpr std::size_t kCount = 10000;
      const Floats floats(comm, std::vector<float>(kCount)), half(comm, std::vector<float>(kCount / 2)),
          whole(comm, std::vector<float>(kCount));
      comm.all_reduce(floats.buffer()).wait();  // from then on all know that it goes by staging
      comm.barrier().wait();                    // a driver gives no memory while a stream hangs
      if (comm.rank() == 0) {
        void* const stream = new_stream();
        launch(stream, wait_for_flag, &go);
        const std::string why =
            refused([&] { calls[which](comm, floats.buffer(stream), half.buffer()).wait(); }, ErrorCode::Aborted);
        EXPECT_TRUE(has(why, "enough")) << why;
        EXPECT_LT(std::chrono::steady_clock::now() - aborted.load(), 1s);
        go = true;
      } else {
        std::vector<Work> works;
        if (which == 1) works.push_back(comm.all_gather(half.buffer(), whole.buffer()));
        if (which == 4) works.push_back(comm.send(whole.buffer(), 0));
        std::this_thread::sleep_for(50ms);
        aborted = std::chrono::steady_clock::now();
        comm.abort("enough");
        while (!go)
          std::this_thread::sleep_for(1ms);  // nor frees memory, and meanwhile it blocks the other rank's thread
        for (Work& work : works) work.error();
      }
    });
  }
  cuda::set_piece_bytes(usual);
}

std::size_t pinned() { return of_driver<std::size_t()>("fake_cuda_pinned")(); }
int events() { return of_driver<int()>("fake_cuda_events")(); }

TEST_F(OnGpus, WhoeverKeepsAWorkKeepsNoRoom) {
  for (const bool by_nccl : {false, true}) {
    run_world(2, [by_nccl](Communicator comm) {
      const std::vector<float> values(5000, 1);
      const Floats floats(comm, values, by_nccl ? comm.rank() : 0);
      const auto rounds = [&](int count) {
        std::vector<Work> works;
        for (int i = 0; i < count; ++i) {
          works.push_back(comm.all_reduce(floats.buffer(), {.op = ReduceOp::Average, .check_finite = true}));
          works.back().wait();
          works.push_back(
              comm.all_reduce(floats.buffer(), {.op = ReduceOp::Average, .wire_format = WireFormat::BFloat16}));
          works.back().wait();
          works.push_back(comm.rank() == 0 ? comm.send(floats.buffer(), 1) : comm.recv(floats.buffer(), 0));
          works.back().wait();
        }
        comm.barrier().wait();
        return works;
      };
      const std::vector<Work> first = rounds(3);
      std::this_thread::sleep_for(50ms);  // the thread that ends an operation releases its own copy
      comm.barrier().wait();
      const std::size_t rooms = pinned();
      const int marks = events();
      const std::vector<Work> kept = rounds(20);
      for (int i = 0; i < 5000 && events() > marks; ++i) std::this_thread::sleep_for(1ms);
      EXPECT_LE(events(), marks);
      EXPECT_EQ(pinned(), rooms);
      for (std::size_t i = 0; i < kept.size(); i += 3) EXPECT_EQ(kept[i].finite(), true);
      comm.barrier().wait();
    });
  }
}

TEST_F(OnGpus, WhatACallbackKeepsGoesWithTheOperationThoughNobodyWaits) {
  run_world(2, [](Communicator comm) {
    const Floats floats(comm, {1, 2});
    std::vector<float> host = {1};
    const std::function<Work()> calls[] = {
        [&] { return comm.all_reduce(floats.buffer()); },
        [&] { return comm.all_reduce(std::span(host)); },
        [&] { return comm.rank() == 0 ? comm.send(floats.buffer(), 1) : comm.recv(floats.buffer(), 0); },
    };
    for (const auto& call : calls) {
      auto array = std::make_shared<int>(1);
      const std::weak_ptr<int> gone = array;
      Work work = call();
      work.on_done([array = std::move(array)] {});
      for (int i = 0; i < 5000 && !gone.expired(); ++i) std::this_thread::sleep_for(1ms);
      EXPECT_TRUE(gone.expired());
    }
  });
}

TEST_F(OnGpus, AMessageThatItsGpuDoesNotTakeYetKeepsNoOtherWaiting) {
  std::atomic<bool> go{false};
  run_world(2, [&](Communicator comm) {
    const Floats floats(comm, {static_cast<float>(comm.rank()), 2});
    std::vector<float> host = {static_cast<float>(comm.rank()), 3};
    void* const stream = new_stream();
    comm.barrier().wait();
    if (comm.rank() == 1) {
      comm.send(floats.buffer(), 0, {.tag = 1}).wait();
      comm.send(std::span(host), 0, {.tag = 2}).wait();
      return;
    }
    launch(stream, wait_for_flag, &go);
    std::atomic<bool> called{false};
    Work late = comm.recv(floats.buffer(stream), 1, {.tag = 1});
    late.on_done([&] { called = true; });
    comm.recv(std::span(host), 1, {.tag = 2, .timeout = 10s}).wait();
    EXPECT_EQ(host[0], 1);
    EXPECT_FALSE(late.wait_for(50ms));
    EXPECT_FALSE(called.load());
    go = true;
    for (int i = 0; i < 10000 && !called; ++i) std::this_thread::sleep_for(1ms);  // though nobody waits
    EXPECT_TRUE(called.load());
    late.wait();
    EXPECT_EQ(floats.values(), (std::vector<float>{1, 2}));
  });
}

TEST_F(OnGpus, GpusThatAreNotThereAreRefused) {
  run_world(1, [](Communicator comm) {
    const std::string why = refused([&] { (void)comm.allocate(4, {DeviceType::CUDA, 4}); }, ErrorCode::InvalidArgument);
    EXPECT_TRUE(has(why, "cuda:4: this process sees 4 GPUs")) << why;
    EXPECT_EQ(*cuda::Gpu::look(), "CUDA 12.4, 4 GPUs");
  });
}

}  // namespace
}  // namespace cohort::comm::testing
