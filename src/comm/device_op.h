// Collectives of device memory that a library carries out between the devices themselves: NCCL. The ranks first agree
// on each of them in a round of their plane (Request::round); what the library has not, or a rank lacks, goes by
// staging. One for each request, which the queue takes through its steps; one thread at a time, beside which another
// may look at what is in flight.
#pragma once

#include "comm/request.h"

#include <chrono>
#include <cstddef>
#include <memory>
#include <span>

namespace cohort::comm {

class DeviceOp {
 public:
  using Clock = std::chrono::steady_clock;

  /// The other ranks, by way of the plane.
  class Ranks {
   public:
    virtual ~Ranks() = default;
    /// Looks after them, and drives their messages: to be called again and again while something is waited for. Throws
    /// what has ended the world; a rank that is lost ends it.
    virtual void attend() = 0;
    /// Of the operation; it may come nearer, since those behind it have deadlines as well.
    virtual Clock::time_point deadline() const = 0;
    /// Gives every rank's `bytes` bytes, by rank. All call it.
    virtual void exchange(const void* own, void* all, std::size_t bytes) = 0;
  };

  /// What the library has been given, in the order of the stream. `put_before` from any thread.
  class InFlight {
   public:
    virtual ~InFlight() = default;
    /// Whether the result is there. `deadline`: until when it has to be. Throws Timeout, Internal. Never true once the
    /// library has been given up: then it cannot be told.
    virtual bool over(Clock::time_point deadline) = 0;
    /// What this stream is given from now on comes after the result. Throws Internal.
    virtual void put_before(const Device& device) const = 0;
  };

  virtual ~DeviceOp() = default;

  /// False: the ranks have agreed to do without the library. The same on all of them, once what was asked for before
  /// is over.
  virtual bool open() const noexcept = 0;
  /// It carries out what it is given, and need not be formed any more.
  virtual bool ready() const noexcept = 0;
  /// What the library needs before its first operation, once all ranks have agreed on that. False: it has it, or the
  /// ranks do without it from now on. Throws what ends the world.
  virtual bool form(Ranks& ranks) = 0;
  /// Gives the library `together`, a group or one request, of which this is the first and which live as long as what
  /// is returned: all ranks have agreed on them in `round`. Null: they go by staging, on all ranks. Throws what ends
  /// the world.
  virtual std::shared_ptr<InFlight> run(std::span<const Request> together, const Round& round, Ranks& ranks) = 0;
  /// The world has ended: what the library does is given up. Any thread.
  virtual void give_up() noexcept = 0;
  /// The same request by staging; the copy of its input begins. Throws Unavailable, Internal.
  virtual Request staged(const Request& request) = 0;
};

}  // namespace cohort::comm
