// Collectives and messages of a GPU's memory through host memory: each is one of host memory that the ranks of the host
// share, with a copy before and after it, or several, in pieces (chunking.h). So the bits are those of the CPU's
// planes. One thread at a time.
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

/// Host memory of a communicator, for copies, kept for the next operation of its size. Any thread.
class Rooms : public std::enable_shared_from_this<Rooms> {
 public:
  /// `allocate` gives memory that the communicator's planes read and write in place.
  using Allocate = std::function<std::shared_ptr<MemoryBlock>(std::size_t bytes)>;

  /// Memory of at least so many bytes; given back when the last copy goes.
  std::shared_ptr<std::byte> take(Gpu& gpu, std::size_t bytes, const Allocate& allocate);
  /// The one ring through which all operations go in pieces of so many bytes, one after the other.
  std::shared_ptr<Ring> ring(Gpu& gpu, std::size_t slot_bytes, const Allocate& allocate);

 private:
  struct Room;
  std::mutex mutex_;
  std::map<Gpu*, std::shared_ptr<Ring>> rings_;
  std::multimap<std::pair<Gpu*, std::size_t>, std::shared_ptr<Room>> free_;
};

/// Marks of what a request's streams had when it was asked for.
struct StreamMarks {
  MarkPtr input;
  MarkPtr output;
};
/// `rank`: the caller's. Throws Internal, InvalidArgument (Gpu::refuse_capture).
StreamMarks marks_of(Gpu& gpu, const DeviceRequest& request, const rendezvous::Placement& rank);
/// "all_reduce(float32[2]) of a GPU's memory".
std::string text_of(const Request& request);

/// The rank, of how many.
struct Place {
  int rank = 0;
  int size = 1;
};

// Copies to host memory, where an operation is carried out, and back. In this order; one thread at a time.
class Staging {
 public:
  using Clock = std::chrono::steady_clock;
  /// Called again and again while something is waited for: checks the other ranks, and throws what ends the world.
  using Attend = std::function<void()>;

  /// Puts host memory into `host`; the copy of the input begins.
  Staging(Gpu& gpu, const Request& device, const StreamMarks& marks, Request& host, Rooms& rooms,
          const Rooms::Allocate& allocate);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  /// Waits until the input is in host memory. Throws Timeout, Internal.
  void arrive(Clock::time_point deadline, const Attend& attend);
  /// Starts the copy of the output back. Throws Internal.
  void depart();
  /// True if the output is there, for whatever stream comes next. Throws Internal.
  bool is_there() const { return !departed_ || gpu_.passed(*departed_); }
  /// Waits until it is. Throws Timeout, Internal.
  void finish(Clock::time_point deadline, const Attend& attend);
  /// After an operation has failed, waits until `limit` for what still uses the staging memory and the program's
  /// memory. As the destructor, which waits for a moment.
  void abandon(Clock::time_point limit) noexcept;

  std::shared_ptr<std::byte> room() const noexcept { return room_; }

 private:
  Gpu& gpu_;
  void* const output_;
  const std::size_t bytes_;
  std::shared_ptr<std::byte> room_;
  std::byte* host_output_ = nullptr;
  MarkPtr ready_;     // what the output's stream had when the operation was asked for
  MarkPtr arrived_;   // the input, where it is on its way
  MarkPtr departed_;  // likewise, the output
};

/// An operation that goes by host memory: `host` is of that memory, between the copies; or it goes in pieces. With
/// neither, it has been of host memory from the beginning.
struct Staged {
  Request host;
  std::shared_ptr<Staging> staging;
  std::shared_ptr<Pieces> pieces;
};
/// The copy of its input has begun, after `marks`. Throws Unavailable, InvalidArgument.
Staged stage(const DeviceRequest& request, Place place, const StreamMarks& marks, Rooms& rooms,
             const Rooms::Allocate& allocate);

/// Checks on the other ranks, and says what has ended the world. One thread at a time.
using WhyEnded = std::function<std::optional<Error>()>;
/// A receive into host memory, under way as `work`, that ends once it is in the GPU's, or the world has. Nobody's
/// thread waits for the GPU meanwhile.
Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline,
                   WhyEnded why_ended);

/// Memory of a GPU. Throws Unavailable, InvalidArgument, Timeout.
std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index, Staging::Clock::time_point deadline);

}  // namespace cohort::comm::cuda
