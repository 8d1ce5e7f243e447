// Times of an operation's phases, as reported to observers and in the status page.
#include "comm/api/communicator_impl.h"
#include "comm/testing/worlds.h"

#include "comm/kernels/codecs.h"

#include <cohort/communicator.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <mutex>
#include <numeric>
#include <random>
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

/// Events of the last operation in `program`, by rank; `program` runs on one thread for each rank.
std::vector<CollectiveEvent> events_of(const char* hosts, int size, const std::function<void(Communicator&)>& program) {
  std::vector<Communicator> world = comm::testing::Worlds(std::string("hosts:") + hosts).form(size);
  std::vector<Events> events(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back([&, rank] {
        Communicator& own = world[static_cast<std::size_t>(rank)];
        own.set_observer(&events[static_cast<std::size_t>(rank)]);
        program(own);
        own.set_observer(nullptr);
      });
    }
  }
  world.clear();
  std::vector<CollectiveEvent> out;
  for (const Events& each : events) out.push_back(each.last());
  return out;
}

/// Events of an all_reduce of `count` floats, which the last rank enters `late`.
std::vector<CollectiveEvent> all_reduce_on(const char* hosts, int size, std::size_t count,
                                           std::chrono::milliseconds late) {
  return events_of(hosts, size, [&](Communicator& comm) {
    std::vector<float> values(count, 1);
    comm.barrier().wait();
    if (comm.rank() + 1 == size) std::this_thread::sleep_for(late);
    comm.all_reduce(std::span<float>(values)).wait();
  });
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
    const auto events = all_reduce_on("", 3, count, 600ms);
    expect_sound(events);
    for (const CollectiveEvent& event : events) {
      EXPECT_EQ(event.wire, 0ns);
      EXPECT_EQ(event.wire_bytes, 0U);
    }
    EXPECT_GE(std::max(events[0].waited, events[1].waited), 300ms) << count;
    EXPECT_LT(events[2].waited, 300ms) << count;
  }
}

TEST(Times, SeveralHostsHaveAWire) {
  const std::size_t count = std::size_t{1} << 20;
  for (const char* const hosts : {"2", "1,3"}) {
    const auto events = all_reduce_on(hosts, 4, count, 600ms);
    expect_sound(events);
    std::size_t sent = 0;
    for (const CollectiveEvent& event : events) sent += event.wire_bytes;
    EXPECT_GE(sent, 2 * count * sizeof(float)) << hosts;            // each host sends all of it once,
    EXPECT_LT(sent, 2 * count * sizeof(float) + 100'000) << hosts;  // and little else
    EXPECT_GT(events[0].wire, 0ns) << hosts;
    for (std::size_t rank = 0; rank < 3; ++rank) EXPECT_GE(events[rank].waited, 300ms) << hosts << " " << rank;
    EXPECT_LT(events[3].waited, 300ms) << hosts;
  }
}

// Checks bytes exactly, since an operation's description takes as many in all formats.
TEST(Times, AWireFormatSendsItsBytesAndNoMore) {
  const std::size_t count = (std::size_t{1} << 20) + 777;
  for (const char* const hosts : {"2", "1,3", "4"}) {
    const std::size_t times = std::string_view(hosts) == "4" ? 2 * 3 : 2;  // each of four sends three quarters, twice
    const auto sent_as = [&](WireFormat format) {
      std::size_t sent = 0;
      for (const CollectiveEvent& event : events_of(hosts, 4, [&](Communicator& comm) {
             std::vector<float> values(count, 1);
             comm.all_reduce(std::span(values), {.wire_format = format}).wait();
             EXPECT_NEAR(values.back(), 4, 0.05);
           }))
        sent += event.wire_bytes;
      return sent;
    };
    const std::size_t about_itself = sent_as(WireFormat::None) - times * count * sizeof(float);
    EXPECT_LT(about_itself, 10'000U);
    for (const WireFormat format : {WireFormat::BFloat16, WireFormat::Int8, WireFormat::Int4})
      EXPECT_EQ(sent_as(format), times * encoded_bytes(format, count) + about_itself) << to_string(format) << hosts;
  }
}

// A host sends what other hosts keep, and nothing else. If hosts have different numbers of ranks, or one keeps nearly
// all, it sends no more than in an all_reduce.
TEST(Times, AReduceScatterSendsWhatOthersKeep) {
  const std::int64_t part = std::int64_t{1} << 18;
  struct Case {
    const char* hosts;
    std::vector<std::int64_t> counts;
    std::int64_t elements;  // on all wires together
  };
  const Case cases[] = {{"2", {part, part, part, part}, 4 * part},
                        {"4", {part, part, part, part}, 12 * part},
                        {"2", {part, 0, 3 * part, 7}, 4 * part + 7},
                        {"4", {7 * part, part, 0, 0}, 2 * 3 * 8 * part},
                        {"1,3", {part, part, part, part}, 8 * part}};
  for (const Case& one : cases) {
    const std::vector<std::int64_t>& counts = one.counts;
    const auto events = events_of(one.hosts, 4, [&](Communicator& comm) {
      std::vector<float> input(static_cast<std::size_t>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0})),
                               1);
      std::vector<float> output(static_cast<std::size_t>(counts[static_cast<std::size_t>(comm.rank())]));
      comm.reduce_scatter_v(std::span<const float>(input), std::span<float>(output), counts).wait();
      EXPECT_EQ(output, std::vector<float>(output.size(), 4));
    });
    std::size_t sent = 0;
    for (const CollectiveEvent& event : events) {
      EXPECT_EQ(event.operation, "reduce_scatter_v");
      sent += event.wire_bytes;
    }
    const std::size_t bytes = static_cast<std::size_t>(one.elements) * sizeof(float);
    EXPECT_GE(sent, bytes) << one.hosts;
    EXPECT_LT(sent, bytes + 100'000) << one.hosts;
  }
}

// Ranks on several hosts make their pieces longer as they learn how fast the wire is. Sums stay the same to the bit,
// whatever the pieces, the order of sizes, and what each rank has learnt.

using namespace std::chrono_literals;

std::vector<float> brought_by(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) * 6007 + static_cast<unsigned>(count));
  std::vector<float> values(count);
  for (float& value : values) value = (static_cast<float>(random()) / 4294967296.0F - 0.5F) * 1e6F;
  return values;
}

class ChunkTuner : public ::testing::TestWithParam<const char*> {};

TEST_P(ChunkTuner, DoesNotChangeResults) {
  constexpr int kRanks = 8;
  // The world first knows nothing about its wire. Sizes that teach it come next, and then sizes of all kinds, twice.
  const std::vector<std::size_t> counts = {70001,   1 << 20, 1 << 20, 3 << 19, 300007,
                                           1 << 20, 70001,   33000,   1 << 20, 300007};
  std::vector<Communicator> world = comm::testing::Worlds(std::string("hosts:") + GetParam()).form(kRanks);
  std::vector<std::vector<std::vector<float>>> results(kRanks);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          Communicator& comm = world[static_cast<std::size_t>(rank)];
          for (std::size_t i = 0; i < counts.size(); ++i) {
            std::vector<float> values = brought_by(rank, counts[i]);
            const std::vector<float> own = values;
            // One rank comes late, so that the ranks learn different speeds.
            if (rank == 5 && i == 4) std::this_thread::sleep_for(20ms);
            comm.all_reduce(std::span(values)).wait();
            std::vector<float> kept(counts[i] / kRanks);
            comm.reduce_scatter(std::span(own).first(kept.size() * kRanks), std::span(kept)).wait();
            EXPECT_EQ(std::memcmp(kept.data(), values.data() + kept.size() * static_cast<std::size_t>(rank),
                                  kept.size() * sizeof(float)),
                      0)
                << "reduce_scatter " << i;
            results[static_cast<std::size_t>(rank)].push_back(std::move(values));
          }
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
  }
  for (const auto& of_rank : results) ASSERT_EQ(of_rank.size(), counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::vector<double> sums(counts[i], 0);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<float> values = brought_by(rank, counts[i]);
      for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += static_cast<double>(values[k]);
    }
    for (std::size_t k = 0; k < sums.size(); ++k) ASSERT_NEAR(results[0][i][k], sums[k], 2) << i << " " << k;
    for (std::size_t rank = 1; rank < kRanks; ++rank) EXPECT_EQ(results[rank][i], results[0][i]) << i << " " << rank;
  }
  std::map<std::size_t, std::vector<float>> first;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    EXPECT_EQ(first.try_emplace(counts[i], results[0][i]).first->second, results[0][i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, ChunkTuner, ::testing::Values("2", "4", "8", "3,5", "1,1,6"));

}  // namespace

}  // namespace cohort::comm
