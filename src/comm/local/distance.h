// How far the cores of two ranks are apart: the time of a cache line there and back, measured between the ranks that
// run operations. Virtual cores move over a host, so it is measured again from time to time. It decides only how stores
// are made, never what is computed, so ranks need not agree on it. Used by the thread that runs operations.
#pragma once

#include "comm/local/world.h"

#include <chrono>
#include <cstdint>

namespace cohort::comm::local {

class Distance {
 public:
  explicit Distance(World& world) noexcept : world_(world) {}

  /// All ranks call it at the same operation. Takes some microseconds; a partner that does not answer soon leaves the
  /// value as it was.
  void measure() noexcept;
  /// Nanoseconds there and back; 0: not known (a rank without a partner, or more ranks than cores).
  double round_trip() const noexcept { return round_trip_; }

 private:
  static constexpr int kTrips = 12;

  World& world_;
  std::uint64_t turns_ = 0;
  double round_trip_ = 0;
};

}  // namespace cohort::comm::local
