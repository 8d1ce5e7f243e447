// A rank whose announcement names memory that it does not have: the others refuse it and touch nothing there.
#include "comm/shm/algorithms.h"

#include "base/result.h"
#include "comm/shm/rendezvous.h"

#include <cohort/communicator.h>
#include "net/store.h"

#include <gtest/gtest.h>

#include <functional>
#include <latch>
#include <string>
#include <thread>

namespace cohort::comm::local {
namespace {

using namespace std::chrono_literals;

TEST(Astray, MemoryBeyondItsSegmentIsRefusedOnEveryWayThatReadsOrWritesInPlace) {
  constexpr std::int64_t kCount = 300000;
  struct Case {
    Kind kind;
    std::function<void(Descriptor&)> spoil;
  };
  const Case cases[] = {
      {Kind::AllReduce, [](Descriptor& own) { own.input_offset += 4096; }},
      {Kind::AllReduce, [](Descriptor& own) { own.output_offset += 4096; }},
  };
  for (const Case& each : cases) {
    auto store = store::make_in_process_store();
    std::latch spoiled(1);
    std::string said;
    const auto rank_of = [&](int rank) {
      FormOptions options;
      options.store = store;
      options.placement.rank = options.placement.local_rank = rank;
      options.placement.size = options.placement.local_size = 2;
      options.placement.host = "testhost";
      World world(options, nullptr);
      Waiters waiters;
      Context context(world, waiters, options);
      waiters.deadline.begin(std::chrono::steady_clock::now(), 20s);
      const std::size_t bytes = kCount * sizeof(float);
      std::uint32_t id = 0;
      const auto memory = value_or_throw(world.mesh()->create_segment(bytes, id));
      Request request;
      request.kind = each.kind;
      request.input = request.output = memory->data();
      request.input_count = kCount;
      request.output_count = kCount;
      if (rank == 0) spoiled.wait();
      announce(context, request);
      if (rank == 1) {
        each.spoil(world.state(1).slots[1].descriptor);
        spoiled.count_down();
      }
      try {
        complete(context, request, nullptr);
      } catch (const Error& error) {
        if (rank == 0) said = error.what();
      }
    };
    {
      const std::jthread other(rank_of, 1);
      rank_of(0);
    }
    EXPECT_NE(said.find("rank 1 named"), std::string::npos) << name_of(each.kind) << ": " << said;
  }
}

}  // namespace
}  // namespace cohort::comm::local
