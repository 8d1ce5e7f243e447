// How the engine waits for peers: spinning while there is a core for every rank and somebody waits for the result,
// yielding at once where ranks are more numerous than cores, and sleeping on the world's bell when it takes longer, in
// slices between which deadlines and the peers' lives are looked after. Included by the engine's source files only.
#pragma once

#include "comm/local/engine.h"
#include "sys/futex.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace cohort::comm::local {

inline void cpu_relax() noexcept {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Decides what the next step of waiting is.
class Pacer {
 public:
  enum class Step { Spin, Yield, Sleep };
  static constexpr auto kSlice = std::chrono::milliseconds(10);

  /// `spins` is how long spinning has paid so far; it is kept from wait to wait.
  Pacer(bool crowded, const std::atomic<int>& attended, int& spins) noexcept
      : crowded_(crowded), attended_(attended), spins_(spins) {}

  /// To be called when what was waited for has come. Ranks may share a core although there are enough of them (other
  /// programs run too): then the peer comes only when this one yields, and spinning before that is lost time.
  void arrived() noexcept {
    if (yields_ == 0) spins_ = std::min(spins_ * 2, kMostSpins);
    if (yields_ == 1 || yields_ == 2) spins_ = std::max(spins_ / 2, kLeastSpins);
  }
  static constexpr int kMostSpins = 2000;

  Step next() noexcept {
    ++steps_;
    // Nobody waits for the result: the core belongs to whoever computes.
    if (attended_.load(std::memory_order_relaxed) == 0) return steps_ <= kUnattendedSpins ? Step::Spin : Step::Sleep;
    if (!crowded_ && steps_ <= spins_) return Step::Spin;
    if (!yielding_) {
      yielding_ = true;
      since_ = Clock::now();
    } else if (Clock::now() - since_ > kYielding) {
      return Step::Sleep;
    }
    ++yields_;
    return Step::Yield;
  }
  /// True once per interval in which the peers should be looked after.
  bool look_now() noexcept {
    const auto now = Clock::now();
    if (now - looked_ < kLook) return false;
    looked_ = now;
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kLeastSpins = 30;
  static constexpr int kUnattendedSpins = 100;
  static constexpr auto kYielding = std::chrono::microseconds(200);
  static constexpr auto kLook = std::chrono::milliseconds(20);

  const bool crowded_;
  const std::atomic<int>& attended_;
  int& spins_;
  int steps_ = 0;
  int yields_ = 0;
  bool yielding_ = false;
  Clock::time_point since_{};
  Clock::time_point looked_{};
};

/// Waits until `reached(rank)` is true of every rank; it must not become false again.
template <class Reached>
void Engine::wait_for_all(Reached reached) {
  int next = 0;  // those before have reached it
  const auto all = [&] {
    while (next < size_ && reached(next)) ++next;
    return next == size_;
  };
  const auto ended = [&] { return header().abort.state.load() != AbortRecord::kNone; };
  if (all()) return;
  Pacer pacer(crowded_, attended_, spins_);
  while (!all()) {
    if (ended()) throw_if_ended();
    switch (pacer.next()) {
      case Pacer::Step::Spin: cpu_relax(); continue;
      case Pacer::Step::Yield:
        mesh_->flush();
        ::sched_yield();
        continue;
      case Pacer::Step::Sleep: break;
    }
    mesh_->flush();
    Header& shared = header();
    const std::uint32_t bell = shared.bell.load();
    shared.sleepers.fetch_add(1);
    if (!all() && !ended()) sys::futex_wait(shared.bell, bell, Pacer::kSlice);
    shared.sleepers.fetch_sub(1);
    if (!pacer.look_now() || all()) continue;
    std::vector<int> missing;
    for (int rank = next; rank < size_; ++rank) {
      if (!reached(rank)) missing.push_back(rank);
    }
    for (const int rank : missing) {
      const auto why = lost(rank);
      if (!why || reached(rank)) continue;  // it may have done its part and then gone
      end_world(ErrorCode::PeerLost, rank, *why);
    }
    judge(missing);
  }
  pacer.arrived();
}

inline void Engine::wait_for_counters(CounterOf counter, std::uint64_t target) {
  wait_for_all([&](int rank) { return (state(rank).*counter).value.load() >= target; });
}

inline void Engine::post(CounterOf counter, std::uint64_t value) noexcept {
  (state(rank_).*counter).value.store(value);
  ring();
}

/// Wakes those who sleep. After a sequentially consistent store: a rank that goes to sleep counts itself first and
/// then looks again, so one of the two sees the other.
inline void Engine::ring() noexcept {
  Header& shared = header();
  if (shared.sleepers.load() == 0) return;
  shared.bell.fetch_add(1);
  sys::futex_wake_all(shared.bell);
}

}  // namespace cohort::comm::local
