// A point in time by which a wait has to end. Plain data.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>

namespace cohort::net {

using Deadline = std::chrono::steady_clock::time_point;

inline Deadline deadline_in(std::chrono::milliseconds duration) { return std::chrono::steady_clock::now() + duration; }

/// For poll(2): milliseconds until the deadline, rounded up, 0 if it has passed, at most an hour (callers loop).
inline int poll_timeout(Deadline deadline) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  return static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 3'600'000));
}

inline std::chrono::nanoseconds time_left(Deadline deadline) {
  return std::max<std::chrono::nanoseconds>(deadline - std::chrono::steady_clock::now(), std::chrono::nanoseconds(0));
}

inline bool passed(Deadline deadline) { return std::chrono::steady_clock::now() >= deadline; }

}  // namespace cohort::net
