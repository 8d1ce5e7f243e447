// Collectives and messages on GPU memory through host memory. An operation runs on host memory that the ranks of the
// host share, with a copy before and after it; large ones run in pieces (chunking.h). Therefore results have the same
// bits as on the CPU. One thread at a time.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/api/request.h"
#include "comm/gpu/driver.h"
#include "rendezvous/identity.h"

#include <cohort/work.h>

#include <chrono>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm::cuda {

class Pieces;
class Ring;

/// A communicator's host memory for copies, reused for later operations of the same size. Any thread.
class Rooms : public std::enable_shared_from_this<Rooms> {
 public:
  /// Allocates memory that the communicator's planes read and write in place.
  using Allocate = std::function<std::shared_ptr<MemoryBlock>(std::size_t bytes)>;

  /// Returns memory of at least `bytes`; it is given back when the last copy of the pointer is destroyed.
  std::shared_ptr<std::byte> take(Gpu& gpu, std::size_t bytes, const Allocate& allocate);
  /// Returns the GPU's ring, which all operations in pieces of up to `slot_bytes` use, one after the other.
  std::shared_ptr<Ring> ring(Gpu& gpu, std::size_t slot_bytes, const Allocate& allocate);

 private:
  struct Room;
  std::mutex mutex_;
  std::map<Gpu*, std::shared_ptr<Ring>> rings_;
  std::multimap<std::pair<Gpu*, std::size_t>, std::shared_ptr<Room>> free_;
};

/// Marks of the work that a request's streams had when the request was made.
struct StreamMarks {
  MarkPtr input;
  MarkPtr output;
};
/// Makes the marks of a request; `rank` is the caller's. Throws Internal, InvalidArgument (Gpu::refuse_capture).
StreamMarks marks_of(Gpu& gpu, const DeviceRequest& request, const rendezvous::Placement& rank);
/// Returns, for example, "all_reduce(float32[2]) of a GPU's memory".
std::string text_of(const Request& request);

/// A rank, and the size of its world.
struct Place {
  int rank = 0;
  int size = 1;
};

// Copies to host memory, where an operation is carried out, and back. Call the functions in this order; one thread at a
// time.
class Staging {
 public:
  using Clock = std::chrono::steady_clock;
  /// Called repeatedly during a wait: checks the other ranks, and throws the error that ends the world.
  using Attend = std::function<void()>;

  /// Sets the buffers of `host` to host memory, and begins the copy of the input.
  Staging(Gpu& gpu, const Request& device, const StreamMarks& marks, Request& host, Rooms& rooms,
          const Rooms::Allocate& allocate);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Waits until the input is in host memory. Throws Timeout, Internal.
  void arrive(Clock::time_point deadline, const Attend& attend);
  /// Starts the copy of the output back. Throws Internal.
  void depart();
  /// True if the output has been copied, so that any stream can use it. Throws Internal.
  bool is_there() const { return !departed_ || gpu_.passed(*departed_); }
  /// Waits until the output has been copied. Throws Timeout, Internal.
  void finish(Clock::time_point deadline, const Attend& attend);
  /// After an operation has failed, waits until `limit` for copies that still use the staging memory and the program's
  /// memory. The destructor does the same, for a moment.
  void abandon(Clock::time_point limit) noexcept;

  std::shared_ptr<std::byte> room() const noexcept { return room_; }

 private:
  Gpu& gpu_;
  void* const output_;
  const std::size_t bytes_;
  std::shared_ptr<std::byte> room_;
  std::byte* host_output_ = nullptr;
  MarkPtr ready_;     // work that the output's stream had when the operation was requested
  MarkPtr arrived_;   // end of the copy of the input, if one is under way
  MarkPtr departed_;  // end of the copy of the output, if one is under way
};

/// An operation through host memory: either `host`, which runs on that memory between the copies of `staging`, or
/// `pieces`. With neither, the operation's own buffers are in host memory.
struct Staged {
  Request host;
  std::shared_ptr<Staging> staging;
  std::shared_ptr<Pieces> pieces;
};
/// Begins the copy of the request's input, after `marks`. Throws Unavailable, InvalidArgument.
Staged stage(const DeviceRequest& request, Place place, const StreamMarks& marks, Rooms& rooms,
             const Rooms::Allocate& allocate);

/// Checks on the other ranks. Returns the error that has ended the world, if any. One thread at a time.
using WhyEnded = std::function<std::optional<Error>()>;
/// Returns a Work for the receive `work` into host memory. It ends when the data is in GPU memory or the world has
/// ended; no thread blocks on the GPU for it.
Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline,
                   WhyEnded why_ended);

/// Allocates GPU memory. Throws Unavailable, InvalidArgument, Timeout.
std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index, Staging::Clock::time_point deadline);

}  // namespace cohort::comm::cuda
