// How far the cores of two ranks are apart, measured between the ranks that run operations: the time of a cache line
// there and back, and which way of writing gets a buffer to the other core sooner, through the caches or past them.
// Virtual cores move over a host, so it is measured again from time to time. It decides only how stores are made, never
// what is computed, so ranks need not agree on it. Used by the thread that runs operations.
#pragma once

#include "comm/kernels/copy.h"
#include "comm/local/world.h"

#include <chrono>
#include <cstdint>
#include <vector>

namespace cohort::comm::local {

class Distance {
 public:
  explicit Distance(World& world) noexcept : world_(world) {}

  /// All ranks call it at the same operation, when nothing is staged. Takes tens of microseconds; a partner that does
  /// not answer soon leaves the values as they were.
  void measure() noexcept;
  /// Nanoseconds there and back; 0: not known (a rank without a partner, or more ranks than cores).
  double round_trip() const noexcept { return round_trip_; }
  /// Microseconds until the partner has read what this rank has written; 0: not known.
  double cached() const noexcept { return cached_; }
  double streamed() const noexcept { return streamed_; }
  /// What buffers for other cores are to be written with.
  Stores better() const noexcept {
    return streamed_ > 0 && streamed_ < 0.9 * cached_ ? Stores::NonTemporal : Stores::Cached;
  }

 private:
  bool await(std::uint64_t turn) const noexcept;
  bool trips(std::uint64_t first) noexcept;
  bool trial(std::uint64_t first, Stores stores, double& microseconds) noexcept;

  World& world_;
  std::uint64_t turns_ = 0;
  double round_trip_ = 0;
  double cached_ = 0;
  double streamed_ = 0;
  std::vector<std::byte> buffer_;
};

}  // namespace cohort::comm::local
