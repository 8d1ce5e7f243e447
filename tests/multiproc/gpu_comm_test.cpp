// Collectives of GPU memory between processes, over the fake NCCL: a rank that is killed in the midst of one is
// named within a second, likewise without NCCL, and ranks whose NCCL is not the others' go by staging together.
#include "comm/gpu/chunking.h"
#include "comm/testing/gpus.h"
#include "comm_processes.h"

#include <gtest/gtest.h>

namespace cohort::testing {
namespace {

using comm::testing::Floats;
using comm::testing::function_of;
using comm::testing::has;

int count_of(const char* what) {
  auto* const function = function_of<int()>("libnccl.so.2", what);
  return function != nullptr ? function() : 0;
}

TEST(GpuProcesses, SumAndExchangeByNccl) {
  constexpr int kRanks = 4;
  Processes world(kRanks);
  world.start([](Communicator comm) -> std::string {
    const Floats sum(comm, {1, 2}, comm.rank());
    comm.all_reduce(sum.buffer()).wait();
    const Floats out(comm, std::vector<float>(kRanks), comm.rank());
    const Floats in(comm, std::vector<float>(kRanks, static_cast<float>(comm.rank())), comm.rank());
    comm.all_to_all(in.buffer(), out.buffer()).wait();
    const bool right =
        sum.values() == std::vector<float>{kRanks, 2 * kRanks} && out.values() == std::vector<float>{0, 1, 2, 3};
    return fmt::format("{}, {} operations", right ? "right" : "wrong", count_of("fake_nccl_operations"));
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    const Ending ending = world.collect(rank);
    EXPECT_TRUE(ending.exited_well());
    EXPECT_EQ(ending.said, "right, 2 operations");
  }
}

TEST(GpuProcesses, WhoIsDoneFirstDoesNotLeaveBeforeTheOthersAre) {
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    const Floats in(comm, {1, 2}, comm.rank()), out(comm, {0}, comm.rank());
    void* const stream = comm::testing::new_stream();
    if (comm.rank() == 1)
      comm::testing::launch(
          stream, [](void*) { std::this_thread::sleep_for(300ms); }, nullptr);
    comm.scatter(in.buffer(), out.buffer(stream)).wait();
    return out.values() == std::vector<float>{static_cast<float>(comm.rank() + 1)} ? "" : "wrong";
  });
  for (const int rank : {0, 1}) EXPECT_EQ(world.collect(rank).said, "");
}

std::int64_t milliseconds_now() {
  return std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now().time_since_epoch()).count();
}

/// Kills rank 1, which hangs. Ranks 0 and 2 say when they had their error, which names it, and these parts.
void expect_named(Processes& world, std::initializer_list<std::string_view> parts) {
  ASSERT_TRUE(world.await_flag("hangs"));
  std::this_thread::sleep_for(100ms);
  world.kill(1, SIGKILL);
  const std::int64_t killed = milliseconds_now();
  for (const int rank : {0, 2}) {
    const std::string said = world.collect(rank).said;
    EXPECT_TRUE(has(said, " PeerLost: ") && has(said, fmt::format("pid {}", world.pid(1)))) << said;
    EXPECT_TRUE(has(said, "lost rank 1")) << said;
    for (const std::string_view part : parts) EXPECT_TRUE(has(said, part)) << part << ": " << said;
    EXPECT_LT(std::strtoll(said.c_str(), nullptr, 10) - killed, 15'000) << said;  // 30 on an idle machine
  }
}

TEST(GpuProcesses, AKilledRankIsNamedSoon) {
  Processes world(3);
  ::setenv("FAKE_NCCL_TROUBLE", "hang:1", 1);  // the others wait for it, in NCCL
  world.start([&](Communicator comm) -> std::string {
    const Floats sum(comm, {1, 2}, comm.rank());
    Work work = comm.all_reduce(sum.buffer(), {.timeout = 60s});
    if (comm.rank() == 1) {
      std::thread([&] {
        while (count_of("fake_nccl_operations") == 0) std::this_thread::sleep_for(1ms);
        world.raise_flag("hangs");
      }).detach();
    }
    try {
      work.wait();
    } catch (const Error& error) {
      const auto when = milliseconds_now();
      for (int i = 0; i < 10000 && count_of("fake_nccl_aborts") == 0; ++i) std::this_thread::sleep_for(1ms);
      return fmt::format("{} {}: {}; {} aborts", when, to_string(error.code()), error.what(),
                         count_of("fake_nccl_aborts"));
    }
    return "it was not lost";
  });
  ::unsetenv("FAKE_NCCL_TROUBLE");
  expect_named(world, {"all_reduce(float32[2], sum) of a GPU's memory, summed fast failed", "; 1 aborts"});
}

TEST(GpuProcesses, AKilledRankIsNamedSoonThoughNobodyWaits) {
  Processes world(3);
  ::setenv("FAKE_NCCL_TROUBLE", "hang:1", 1);
  world.start([&](Communicator comm) -> std::string {
    const Floats sum(comm, {1, 2}, comm.rank());
    Work work = comm.all_reduce(sum.buffer(), {.timeout = 60s});
    work.synchronize(sum.buffer().device);
    if (comm.rank() == 1) {
      while (count_of("fake_nccl_operations") == 0) std::this_thread::sleep_for(1ms);
      world.raise_flag("hangs");
    }
    while (!work.done()) std::this_thread::sleep_for(1ms);
    const auto when = milliseconds_now();
    const auto error = work.error();
    std::string next = "nothing";
    try {
      comm.all_reduce(sum.buffer()).synchronize(sum.buffer().device);
    } catch (const Error& of_next) {
      next = to_string(of_next.code());
    }
    return fmt::format("{} {}: {}; then {}", when, error ? to_string(error->code()) : "nothing",
                       error ? error->what() : "", next);
  });
  ::unsetenv("FAKE_NCCL_TROUBLE");
  expect_named(world, {"; then PeerLost"});
}

TEST(GpuProcesses, WhoDoesNotWaitDoesNotLeaveBeforeTheOthersAreDone) {
  Processes world(2);
  world.start([](Communicator comm) -> std::string {
    const Floats in(comm, {1, 2}, comm.rank()), out(comm, {0}, comm.rank());
    void* const stream = comm::testing::new_stream();
    if (comm.rank() == 1)
      comm::testing::launch(
          stream, [](void*) { std::this_thread::sleep_for(300ms); }, nullptr);
    Work work = comm.scatter(in.buffer(), out.buffer(stream));
    work.synchronize(out.buffer(stream).device);
    if (comm.rank() == 0) return "";
    work.wait();
    return out.values() == std::vector<float>{2} ? "" : "wrong";
  });
  for (const int rank : {0, 1}) EXPECT_EQ(world.collect(rank).said, "");
}

Processes* world_of_pieces = nullptr;

TEST(GpuProcesses, ARankThatIsKilledBetweenPiecesIsNamed) {
  Processes world(3);
  world_of_pieces = &world;
  world.start([&](Communicator comm) -> std::string {
    ::setenv("COHORT_NCCL", "off", 1);
    comm::cuda::set_piece_bytes(4096);
    const Floats sum(comm, std::vector<float>(100000), comm.rank());
    comm.barrier().wait();
    if (comm.rank() == 1) {
      comm::testing::of_driver<void(void (*)(int, unsigned long long, std::size_t))>("fake_cuda_watch")(
          [](int, unsigned long long, std::size_t) {
            static std::atomic<int> copies{0};
            if (++copies < 20) return;
            world_of_pieces->raise_flag("in the midst");
            std::this_thread::sleep_for(60s);
          });
    }
    try {
      comm.all_reduce(sum.buffer(), {.timeout = 60s}).wait();
    } catch (const Error& error) {
      return fmt::format("{}: {}", to_string(error.code()), error.what());
    }
    return "it was not lost";
  });
  ASSERT_TRUE(world.await_flag("in the midst"));
  world.kill(1, SIGKILL);
  for (const int rank : {0, 2}) {
    const std::string said = world.collect(rank).said;
    EXPECT_TRUE(has(said, "PeerLost: ") && has(said, "lost rank 1")) << said;
    EXPECT_TRUE(has(said, " of all_reduce(float32[100000]) of a GPU's memory")) << said;
  }
}

// By way of the host's memory, whole and in pieces: rank 0's stream hangs in what it has to do with rank 1, which is
// killed meanwhile.

struct OfTwo {
  const char* name;
  std::function<Work(Communicator&, const Buffer& hangs)> first;
  std::function<Work(Communicator&, const Buffer& own)> second;
};

TEST(GpuProcesses, ARankWhoseStreamHangsHearsOfADeathWithinASecond) {
  const auto sum = [](Communicator& comm, const Buffer& own) { return comm.all_reduce(own, {.timeout = 60s}); };
  const OfTwo all[] = {
      {"all_reduce", sum, sum},
      {"send", [](Communicator& comm, const Buffer& own) { return comm.send(own, 1, {.timeout = 60s}); }, {}},
      {"recv", [](Communicator& comm, const Buffer& own) { return comm.recv(own, 1, {.timeout = 60s}); },
       [](Communicator& comm, const Buffer& own) { return comm.send(own, 0, {.timeout = 60s}); }},
  };
  for (const std::size_t piece : {std::size_t{4} << 20, std::size_t{4096}}) {
    for (const OfTwo& each : all) {
      SCOPED_TRACE(fmt::format("{}, pieces of {} bytes", each.name, piece));
      Processes world(2);
      world.start([&](Communicator comm) -> std::string {
        ::setenv("COHORT_NCCL", "off", 1);
        comm::cuda::set_piece_bytes(piece);
        const Floats floats(comm, std::vector<float>(100000, 1));
        comm.all_reduce(floats.buffer()).wait();
        comm.barrier().wait();
        if (comm.rank() == 1) {
          const Work work = each.second ? each.second(comm, floats.buffer()) : Work();
          if (std::string_view(each.name) == "recv")
            while (!work.done()) std::this_thread::sleep_for(1ms);
          world.raise_flag("its part is done");
          std::this_thread::sleep_for(60s);
          return "it was not killed";
        }
        static std::atomic<bool> go{false};
        void* const stream = comm::testing::new_stream();
        comm::testing::launch(stream, comm::testing::wait_for_flag, &go);
        std::string said = "it was not lost";
        try {
          each.first(comm, floats.buffer(stream)).wait();
        } catch (const Error& error) {
          said = fmt::format("{} {}: {}", milliseconds_now(), to_string(error.code()), error.what());
        }
        go = true;
        return said;
      });
      ASSERT_TRUE(world.await_flag("its part is done"));
      std::this_thread::sleep_for(200ms);
      world.kill(1, SIGKILL);
      const std::int64_t killed = milliseconds_now();
      const std::string said = world.collect(0).said;
      EXPECT_TRUE(has(said, " PeerLost: ") && has(said, "lost rank 1")) << said;
      EXPECT_LT(std::strtoll(said.c_str(), nullptr, 10) - killed, 1000) << said;
    }
  }
}

/// Log of rank 0 when rank 1 has another value for the variable, and all use staging.
std::string said_where(const char* variable, const char* value, const AllReduceOptions& options = {}) {
  Processes world(2);
  for (int rank = 0; rank < 2; ++rank) {
    world.start_rank(rank, [&, rank]() -> std::string {
      if (rank == 1) ::setenv(variable, value, 1);
      ::testing::internal::CaptureStderr();
      Communicator comm = Processes::form(world.form_options(rank));
      const Floats sum(comm, {1, 2}, rank);
      for (int i = 0; i < 2; ++i) comm.all_reduce(sum.buffer(), options).wait();
      EXPECT_EQ(sum.values(), (std::vector<float>{4, 8}));
      EXPECT_EQ(count_of("fake_nccl_operations"), 0);
      return ::testing::Test::HasFailure() ? "failed" : ::testing::internal::GetCapturedStderr();
    });
  }
  const Ending ending = world.collect(0);
  EXPECT_TRUE(ending.exited_well());
  EXPECT_EQ(world.collect(1).said, "");  // it is said once
  return ending.said;
}

TEST(GpuProcesses, WithoutNcclOnOneRankAllGoByStaging) {
  const std::string said = said_where("COHORT_NCCL", "off");
  EXPECT_TRUE(has(said, "without NCCL -- rank 1 (") && has(said, "COHORT_NCCL=off")) << said;
}

TEST(GpuProcesses, WithAnOldNcclOnOneRankAllGoByStaging) {
  const std::string said = said_where("FAKE_NCCL_VERSION", "21705");
  EXPECT_TRUE(has(said, "without NCCL -- rank 1 (") && has(said, "NCCL 2.17.5 is too old")) << said;
}

TEST(GpuProcesses, WithDifferentVersionsAllGoByStaging) {
  const std::string said = said_where("FAKE_NCCL_VERSION", "22809");
  EXPECT_TRUE(has(said, "has NCCL 2.30.7 and rank 1") && has(said, "has 2.28.9")) << said;
}

TEST(GpuProcesses, WithoutKernelsOnOneRankAllSumsThatAreNotNcclsGoByStaging) {
  const std::string said = said_where("FAKE_CUDA_KERNELS", "0", {.gpu_sums = GpuSums::Exact});
  EXPECT_TRUE(has(said, "rank 1 cannot fold on its GPU: kernels for cuda:1: fake failure (error 218)")) << said;
  EXPECT_EQ(said.find("cannot fold"), said.rfind("cannot fold")) << said;
}

}  // namespace
}  // namespace cohort::testing
