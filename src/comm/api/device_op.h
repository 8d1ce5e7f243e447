// What the queue has to know of device memory: three ways to carry out collectives of it, and waiting for a GPU.
#pragma once

#include "base/memory.h"
#include "comm/api/request.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <thread>

namespace cohort::comm {

// Collectives of device memory that a library carries out between the devices themselves: NCCL. The ranks first agree
// on each of them in a round of their plane (Request::round); what the library has not, or a rank lacks, goes by
// staging. One for each request, which the queue takes through its steps; one thread at a time, beside which another
// may look at what is in flight.
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

// Collectives of device memory: its elements are copied to host memory, where the planes carry the operation out, and
// back. One for each request, which the queue takes through its steps in this order; one thread at a time.
class Staging {
 public:
  using Clock = std::chrono::steady_clock;
  virtual ~Staging() = default;

  /// Called again and again while something is waited for: checks the other ranks, and throws what ends the world.
  using Attend = std::function<void()>;

  /// Waits until the input is in host memory; its copy began when the operation was asked for. Throws Timeout,
  /// Internal.
  virtual void arrive(Clock::time_point deadline, const Attend& attend) = 0;
  /// Starts the copy of the output back. Throws Internal.
  virtual void depart() = 0;
  /// Whether the output is there, for whatever stream comes next. Throws Internal.
  virtual bool is_there() const = 0;
  /// Waits until it is. Throws Timeout, Internal.
  virtual void finish(Clock::time_point deadline, const Attend& attend) = 0;
};

// Large collectives of device memory, chunked: the plane carries the pieces out one after the other in host memory,
// while the next is copied there and the previous one back. The ranks first agree on the whole, in a round of their
// plane. One for each request; one thread at a time.
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

// Borrowed buffers: blocks of a result that a plane has left in the memory of the ranks that brought them, which this
// rank reads in place. Only for who asks for it (Request::borrowed), takes the blocks from there itself, and sees to it
// that the others do not write there meanwhile: to the plane they may once the operation is over. Plain values.
struct Borrowed {
  std::size_t at = 0;  ///< bytes from the result's beginning
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const sys::Mapping> memory = {};  ///< of a peer, as long as somebody keeps it; null: this rank's own
};

}  // namespace cohort::comm

namespace cohort::comm::cuda {

// The steps of a wait for a GPU: short pauses, and, for the thread that runs operations, a look after the other ranks
// before each. Belongs to the thread that waits.

/// Longer and longer ones; none before the thread has been awake for a while, where it waits for what takes no longer.
class Pauses {
 public:
  explicit Pauses(std::chrono::microseconds longest = std::chrono::microseconds(100),
                  std::chrono::microseconds awake = {}) noexcept
      : longest_(longest), awake_(awake) {}
  void take() {
    if (pause_.count() == 0) {
      std::this_thread::yield();
      if (awake_.count() > 0 && Clock::now() - begun_ < awake_) return;
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), longest_);
  }
  void begin_again() noexcept { pause_ = {}; }

 private:
  using Clock = std::chrono::steady_clock;
  const std::chrono::microseconds longest_;
  const std::chrono::microseconds awake_;
  const Clock::time_point begun_ = Clock::now();
  std::chrono::microseconds pause_{0};
};

class Patience {
 public:
  explicit Patience(DeviceOp::Ranks& ranks) noexcept : ranks_(ranks) {}
  /// Throws what ends the world.
  void step() {
    ranks_.attend();
    pauses_.take();
  }

 private:
  DeviceOp::Ranks& ranks_;
  Pauses pauses_;
};

}  // namespace cohort::comm::cuda
