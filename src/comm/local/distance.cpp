#include "comm/local/distance.h"

#include "comm/local/waiting.h"

#include <algorithm>

namespace cohort::comm::local {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kTrips = 12;
constexpr std::uint64_t kRepeats = 3;
constexpr std::uint64_t kTurnsOfTrial = 3 * kRepeats;
constexpr std::size_t kTrialBytes = std::size_t{32} << 10;

double since(Clock::time_point begin, double unit) noexcept {
  return std::chrono::duration<double>(Clock::now() - begin).count() * unit;
}

}  // namespace

void Distance::measure() noexcept {
  const std::uint64_t first = turns_ + 1;
  turns_ += kTrips + 2 * kTurnsOfTrial;
  // Ranks that share a core would measure the scheduler.
  if ((world_.rank() ^ 1) >= world_.size() || world_.crowded()) return;
  if (buffer_.empty()) buffer_.resize(kTrialBytes);
  double cached = 0;
  double streamed = 0;
  if (trips(first) && trial(first + kTrips, Stores::Cached, cached) &&
      trial(first + kTrips + kTurnsOfTrial, Stores::NonTemporal, streamed)) {
    cached_ = cached;
    streamed_ = streamed;
  }
  // Also where this rank gave up: the partner need not wait for it.
  world_.state(world_.rank()).probe.value.store(turns_, std::memory_order_release);
}

bool Distance::await(std::uint64_t turn) const noexcept {
  const std::atomic<std::uint64_t>& theirs = world_.state(world_.rank() ^ 1).probe.value;
  for (int spins = 0; spins < 4000; ++spins) {
    if (theirs.load(std::memory_order_acquire) >= turn) return true;
    cpu_relax();
  }
  return false;
}

bool Distance::trips(std::uint64_t first) noexcept {
  std::atomic<std::uint64_t>& own = world_.state(world_.rank()).probe.value;
  const bool leads = world_.rank() % 2 == 0;
  double least = 1e9;
  auto before = Clock::now();
  for (std::uint64_t turn = first; turn < first + kTrips; ++turn) {
    if (!leads && !await(turn)) return false;
    own.store(turn, std::memory_order_release);
    if (leads && !await(turn)) return false;
    if (turn > first + 1) least = std::min(least, since(before, 1e9));
    before = Clock::now();
  }
  round_trip_ = least;
  return true;
}

// Both write a staging buffer of their own and read the other's.
bool Distance::trial(std::uint64_t first, Stores stores, double& microseconds) noexcept {
  const int rank = world_.rank();
  const ControlLayout& layout = world_.layout();
  std::atomic<std::uint64_t>& own = world_.state(rank).probe.value;
  microseconds = 1e9;
  for (std::uint64_t turn = first; turn < first + kTurnsOfTrial;) {
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    const auto begin = Clock::now();
    copy(layout.staging(world_.control(), rank, 0), buffer_.data(), kTrialBytes, stores);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    copy(buffer_.data(), layout.staging(world_.control(), rank ^ 1, 0), kTrialBytes, Stores::Cached);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    microseconds = std::min(microseconds, since(begin, 1e6));
  }
  return true;
}

}  // namespace cohort::comm::local
