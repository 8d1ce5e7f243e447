// What observers, and the status page, are told of where an operation's time went.
#include "comm/communicator_impl.h"

#include <cohort/communicator.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <span>
#include <thread>
#include <vector>

namespace cohort::comm {
namespace {

using namespace std::chrono_literals;

class Events final : public Observer {
 public:
  void on_collective(const CollectiveEvent& event) override {
    const std::lock_guard lock(mutex_);
    events_.push_back(event);
  }
  CollectiveEvent last() const {
    const std::lock_guard lock(mutex_);
    return events_.empty() ? CollectiveEvent{} : events_.back();
  }

 private:
  mutable std::mutex mutex_;
  std::vector<CollectiveEvent> events_;
};

/// What each rank is told of an all_reduce of `count` floats to which the last rank comes `late`.
std::vector<CollectiveEvent> all_reduce_on(const char* hosts, int size, std::size_t count,
                                           std::chrono::milliseconds late) {
  ::setenv("COHORT_PRETEND_HOSTS", hosts, 1);
  std::vector<Communicator> world = form_thread_world(size);
  ::unsetenv("COHORT_PRETEND_HOSTS");
  std::vector<Events> events(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        Communicator& own = world[static_cast<std::size_t>(rank)];
        own.set_observer(&events[static_cast<std::size_t>(rank)]);
        std::vector<float> values(count, 1);
        own.barrier().wait();
        if (rank + 1 == size) std::this_thread::sleep_for(late);
        own.all_reduce(std::span<float>(values)).wait();
        own.set_observer(nullptr);
      });
    }
  }
  world.clear();
  std::vector<CollectiveEvent> out;
  for (const Events& each : events) out.push_back(each.last());
  return out;
}

void expect_sound(const std::vector<CollectiveEvent>& events) {
  for (const CollectiveEvent& event : events) {
    EXPECT_EQ(event.operation, "all_reduce");
    EXPECT_GE(event.waited, 0ns);
    EXPECT_GE(event.wire, 0ns);
    EXPECT_LE(event.waited + event.wire, event.ended - event.begun);
  }
}

TEST(Times, OneHostHasNoWireAndWaitsForTheLate) {
  for (const std::size_t count : {std::size_t{4}, std::size_t{1} << 20}) {
    const auto events = all_reduce_on("", 3, count, 200ms);
    expect_sound(events);
    for (const CollectiveEvent& event : events) {
      EXPECT_EQ(event.wire, 0ns);
      EXPECT_EQ(event.wire_bytes, 0U);
    }
    EXPECT_GE(std::max(events[0].waited, events[1].waited), 100ms) << count;
    EXPECT_LT(events[2].waited, 100ms) << count;
  }
}

TEST(Times, SeveralHostsHaveAWire) {
  const std::size_t count = std::size_t{1} << 20;
  for (const char* const hosts : {"2", "1,3"}) {
    const auto events = all_reduce_on(hosts, 4, count, 200ms);
    expect_sound(events);
    std::size_t sent = 0;
    for (const CollectiveEvent& event : events) sent += event.wire_bytes;
    EXPECT_GE(sent, 2 * count * sizeof(float)) << hosts;            // each host all of it, once,
    EXPECT_LT(sent, 2 * count * sizeof(float) + 100'000) << hosts;  // and little else
    EXPECT_GT(events[0].wire, 0ns) << hosts;
    for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_GE(events[rank].waited, 100ms) << hosts << " " << rank;
    EXPECT_LT(events[3].waited, 100ms) << hosts;
  }
}

}  // namespace
}  // namespace cohort::comm
