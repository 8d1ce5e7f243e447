#include "bench/bound.h"

#include "base/memory.h"
#include "base/result.h"
#include "bench/operation.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <optional>
#include <span>
#include <thread>

namespace cohort::app::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

double over_ranks(Communicator& comm, double value, ReduceOp op) {
  std::array<double, 1> one = {value};
  comm.all_reduce(std::span<double>(one), {.op = op}).wait();
  return one[0];
}

}  // namespace

double MemoryRoof::rate(Communicator& comm, std::byte* data, std::size_t bytes, MemoryKind kind, State state) {
  constexpr std::size_t kLeast = 4096;
  constexpr double kSeconds = 2e-3;
  if (bytes < kLeast) return 0;
  if (state == State::Touched) state = State::Hot;
  const auto key = std::make_tuple(bytes, kind, state);
  if (const auto found = known_.find(key); found != known_.end()) return found->second;

  double best = 0;
  for (const std::size_t streams : kStreams) {
    int passes = 1;
    for (int trial = 0; trial < 4; ++trial) {
      if (state == State::Cold) drop_from_caches(data, bytes);
      comm.barrier().wait();
      const auto begin = Clock::now();
      for (int pass = 0; pass < passes; ++pass) read_and_write(data, bytes, streams);
      // To the end of the last rank: with more ranks than cores they run one after the other.
      comm.barrier().wait();
      const double seconds = over_ranks(comm, seconds_since(begin), ReduceOp::Max);
      best = std::max(best, 2.0 * static_cast<double>(bytes) * passes / seconds);
      // Small buffers are passed over often, so that the barrier does not count.
      if (trial == 0 && state == State::Hot) passes = std::max(1, static_cast<int>(kSeconds / seconds));
    }
  }
  return known_[key] = best;
}

namespace {

struct alignas(128) Line {
  std::atomic<std::uint32_t> word;
};
struct Page {
  Line there, back, turn;
};

constexpr std::uint32_t kBatch = 50;
constexpr std::uint32_t kBatches = 40;
constexpr int kMostPeers = 8;
constexpr std::chrono::seconds kPatience(30);

/// The ranks' common page; nothing where one of them cannot map it. Rank 0 says where it lies in its own process.
std::optional<sys::Mapping> common_page(Communicator& comm) {
  std::optional<sys::SharedSegment> own;
  std::array<std::int64_t, 2> place = {-1, -1};
  if (comm.rank() == 0) {
    if (auto segment = sys::create_shared_segment("cohort-bench", sizeof(Page))) {
      own = *std::move(segment);
      place = {::getpid(), own->fd.get()};
    }
  }
  comm.broadcast(std::span<std::int64_t>(place)).wait();
  std::optional<sys::Mapping> page;
  if (place[0] >= 0 && comm.local_size() == comm.size()) {
    const std::string path = fmt::format("/proc/{}/fd/{}", place[0], place[1]);
    const sys::UniqueFd fd(::open(path.c_str(), O_RDWR | O_CLOEXEC));
    if (fd) {
      if (auto mapped = sys::map_shared_segment(fd.get(), sizeof(Page))) page = *std::move(mapped);
    }
  }
  if (over_ranks(comm, page ? 1 : 0, ReduceOp::Min) < 1) page.reset();
  return page;
}

void await(const Line& line, std::uint32_t value) {
  std::optional<Clock::time_point> since;
  for (std::uint32_t spins = 1; line.word.load(std::memory_order_acquire) != value; ++spins) {
    if (spins < 20000) continue;
    ::sched_yield();
    if (!since) since = Clock::now();
    if (Clock::now() - *since > kPatience) {
      raise(ErrorCode::Timeout, "bench: another rank did not answer a flag for {} s", kPatience.count());
    }
  }
}

/// Of the best batch: what interrupts the others is not the distance.
double shortest_trip(Page& page) {
  double shortest = 1e12;
  for (std::uint32_t i = 1; i <= kBatch * kBatches;) {
    const auto begin = Clock::now();
    for (const std::uint32_t end = i + kBatch; i < end; ++i) {
      page.there.word.store(i, std::memory_order_release);
      await(page.back, i);
    }
    shortest = std::min(shortest, seconds_since(begin) * 1e9 / kBatch);
  }
  return shortest;
}

void answer_trips(Page& page) {
  for (std::uint32_t i = 1; i <= kBatch * kBatches; ++i) {
    await(page.there, i);
    page.back.word.store(i, std::memory_order_release);
  }
}

}  // namespace

std::vector<double> flag_round_trips(Communicator& comm) {
  std::vector<double> trips;
  const auto mapping = common_page(comm);
  if (!mapping) return trips;
  Page& page = *static_cast<Page*>(mapping->data());
  for (int peer = 1; peer < std::min(comm.size(), kMostPeers + 1); ++peer) {
    double trip = 0;
    if (comm.rank() == 0) {
      page.there.word.store(0);
      page.back.word.store(0);
      page.turn.word.store(static_cast<std::uint32_t>(peer), std::memory_order_release);
      trip = shortest_trip(page);
    } else {
      // Ranks whose turn it is not leave the cores to the two.
      const auto deadline = Clock::now() + kPatience;
      while (page.turn.word.load(std::memory_order_acquire) < static_cast<std::uint32_t>(peer)) {
        std::this_thread::sleep_for(std::chrono::microseconds(200));
        if (Clock::now() > deadline) raise(ErrorCode::Timeout, "bench: rank 0 did not begin with its flags");
      }
      if (comm.rank() == peer) answer_trips(page);
    }
    trips.push_back(over_ranks(comm, trip, ReduceOp::Max));
  }
  return trips;
}

}  // namespace cohort::app::bench
