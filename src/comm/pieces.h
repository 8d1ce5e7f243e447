// Large collectives of device memory, chunked: the plane carries the pieces out one after the other in host memory,
// while the next is copied there and the previous one back. The ranks first agree on the whole, in a round of their
// plane. One for each request; one thread at a time.
#pragma once

#include "comm/request.h"

#include <chrono>

namespace cohort::comm {

class Pieces {
 public:
  using Clock = std::chrono::steady_clock;

  class Plane {
   public:
    virtual ~Plane() = default;
    /// An operation of host memory, which all ranks carry out. Throws what ends the world.
    virtual void carry_out(const Request& piece) = 0;
    /// Looks after the other ranks: to be called again and again while something is waited for. Throws likewise.
    virtual void attend() = 0;
  };

  virtual ~Pieces() = default;
  /// Returns when the result is in its place. `agreed`: what came of the round. Throws what ends the world.
  virtual void run(const Round& agreed, Clock::time_point deadline, Plane& plane) = 0;
};

}  // namespace cohort::comm
