#include "comm/local/distance.h"

#include "comm/local/waiting.h"

#include <sched.h>

#include <algorithm>

namespace cohort::comm::local {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kTrips = 12;
constexpr std::uint64_t kRepeats = 3;
constexpr std::uint64_t kTurnsOfTrial = 3 * kRepeats;
constexpr std::uint64_t kTurnsOfReading = 3 * 10;  // once, for all operations to come
constexpr std::size_t kLargeRead = std::size_t{32} << 10;
constexpr std::size_t kSmallRead = std::size_t{4} << 10;
constexpr std::uint64_t kMostReading = std::uint64_t{1} << 20;

double since(Clock::time_point begin, double unit) noexcept {
  return std::chrono::duration<double>(Clock::now() - begin).count() * unit;
}

}  // namespace

void Distance::measure(std::chrono::microseconds patience) noexcept {
  const std::uint64_t first = turns_ + 1;
  turns_ += 1 + kTrips + 2 * kTurnsOfTrial + 1;  // the last is the end
  // Ranks that share a core would measure the scheduler.
  if ((world_.rank() ^ 1) >= world_.size() || world_.crowded()) return;
  if (buffer_.empty()) buffer_.resize(trial_bytes());
  double cached = 0;
  double streamed = 0;
  if (meet(first, patience) && trips(first + 1) && trial(first + 1 + kTrips, Stores::Cached, cached) &&
      trial(first + 1 + kTrips + kTurnsOfTrial, Stores::NonTemporal, streamed)) {
    cached_ = cached;
    streamed_ = streamed;
  }
  // Also where this rank gave up: the partner need not wait for it.
  world_.state(world_.rank()).probe.value.store(turns_, std::memory_order_release);
}

void Distance::measure_reading(std::chrono::microseconds patience) noexcept {
  const std::uint64_t first = turns_ + 1;
  turns_ += 1 + 2 * kTurnsOfReading + 1;
  if ((world_.rank() ^ 1) >= world_.size() || world_.crowded()) return;
  if (buffer_.empty()) buffer_.resize(trial_bytes());
  double small = 0;
  double large = 0;
  if (meet(first, patience) && read_trial(first + 1, kSmallRead, small) &&
      read_trial(first + 1 + kTurnsOfReading, kLargeRead, large)) {
    read_byte_ = std::max(large - small, 0.0) / static_cast<double>(kLargeRead - kSmallRead);
    read_begin_ = std::max(small - read_byte_ * static_cast<double>(kSmallRead), 0.01);
  }
  world_.state(world_.rank()).probe.value.store(turns_, std::memory_order_release);
}

std::optional<std::uint64_t> Distance::reading_pays_from() const noexcept {
  if (cached_ <= 0 || read_begin_ <= 0) return std::nullopt;
  // What is staged waits for its chunks besides: measured in whole operations, reading is ahead until it takes twice as
  // long for each byte, and from where beginning it takes half as long as staging.
  const double staged_byte = std::max(cached_ - round_trip_ / 1e3, 0.0) / static_cast<double>(trial_bytes());
  if (read_byte_ > 2 * staged_byte) return kNever;
  const double bytes = read_begin_ / (2 * staged_byte);
  std::uint64_t least = kLeastReading;
  while (static_cast<double>(least) < bytes) {
    least *= 2;
    if (least > kMostReading) return kNever;
  }
  return least;
}

// The partner may come a little later.
bool Distance::meet(std::uint64_t turn, std::chrono::microseconds patience) noexcept {
  world_.state(world_.rank()).probe.value.store(turn, std::memory_order_release);
  const auto begin = Clock::now();
  while (!await(turn)) {
    if (world_.ended() || Clock::now() - begin > patience) return false;
    ::sched_yield();
  }
  return true;
}

bool Distance::await(std::uint64_t turn) const noexcept {
  const std::atomic<std::uint64_t>& theirs = world_.state(world_.rank() ^ 1).probe.value;
  for (int spins = 0; spins < 10000; ++spins) {
    const std::uint64_t reached = theirs.load(std::memory_order_acquire);
    // At the end before its time: it has given up, and its answers would seem to take no time.
    if (reached >= turn) return reached < turns_ || turn + 1 == turns_;
    sys::cpu_relax();
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
    copy(layout.staging(world_.control(), rank, 0), buffer_.data(), trial_bytes(), stores);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    copy(buffer_.data(), layout.staging(world_.control(), rank ^ 1, 0), trial_bytes(), Stores::Cached);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    microseconds = std::min(microseconds, since(begin, 1e6));
  }
  return true;
}

// Both write a staging buffer of their own and read the other's through the kernel; timed is the reading.
bool Distance::read_trial(std::uint64_t first, std::size_t bytes, double& microseconds) noexcept {
  const int rank = world_.rank();
  const ControlLayout& layout = world_.layout();
  std::atomic<std::uint64_t>& own = world_.state(rank).probe.value;
  const auto* const theirs = layout.staging(world_.control(), rank ^ 1, 0);
  const std::uint64_t address = world_.state(rank ^ 1).control_address +
                                static_cast<std::uint64_t>(theirs - static_cast<const std::byte*>(world_.control()));
  microseconds = 1e9;
  bool readable = true;
  for (std::uint64_t turn = first; turn < first + kTurnsOfReading;) {
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    copy(layout.staging(world_.control(), rank, 0), buffer_.data(), bytes, Stores::Cached);
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
    const auto begin = Clock::now();
    readable = readable && world_.read_peer(rank ^ 1, buffer_.data(), address, bytes).has_value();
    microseconds = std::min(microseconds, since(begin, 1e6));
    own.store(turn, std::memory_order_release);
    if (!await(turn++)) return false;
  }
  return readable;
}

}  // namespace cohort::comm::local
