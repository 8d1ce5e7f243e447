#include "comm/local/distance.h"

#include "comm/local/waiting.h"

#include <algorithm>

namespace cohort::comm::local {

void Distance::measure() noexcept {
  using Clock = std::chrono::steady_clock;
  const int rank = world_.rank();
  const int partner = rank ^ 1;
  const std::uint64_t first = turns_ + 1;
  turns_ += kTrips;
  // Ranks that share a core would measure the scheduler.
  if (partner >= world_.size() || world_.crowded()) return;
  std::atomic<std::uint64_t>& own = world_.state(rank).probe.value;
  const std::atomic<std::uint64_t>& theirs = world_.state(partner).probe.value;
  const auto await = [&](std::uint64_t turn) {
    for (int spins = 0; spins < 2000; ++spins) {
      if (theirs.load(std::memory_order_acquire) >= turn) return true;
      cpu_relax();
    }
    return false;
  };
  double least = 1e9;
  auto before = Clock::now();
  for (std::uint64_t turn = first; turn <= turns_; ++turn) {
    if (rank > partner && !await(turn)) return own.store(turns_, std::memory_order_release);
    own.store(turn, std::memory_order_release);
    if (rank < partner && !await(turn)) return own.store(turns_, std::memory_order_release);
    const auto now = Clock::now();
    if (turn > first + 1) least = std::min(least, std::chrono::duration<double, std::nano>(now - before).count());
    before = now;
  }
  if (least < 1e9) round_trip_ = least;
}

}  // namespace cohort::comm::local
