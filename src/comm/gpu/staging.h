// Collectives and messages of a GPU's memory by way of host memory: each is one of host memory that the ranks of the
// host share, with a copy before and after it, or several, in pieces (chunking.h). So the bits are those of the CPU's
// planes. One thread at a time.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/api/request.h"
#include "comm/gpu/driver.h"

#include <cohort/work.h>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace cohort::comm::cuda {

class Ring;

/// Host memory of a communicator, for copies, kept for the next operation of its size. Any thread.
class Rooms : public std::enable_shared_from_this<Rooms> {
 public:
  /// `allocate` gives memory that the communicator's planes read and write in place.
  using Allocate = std::function<std::shared_ptr<MemoryBlock>(std::size_t bytes)>;

  /// At least so many bytes; given back when the last copy goes.
  std::shared_ptr<std::byte> take(Gpu& gpu, std::size_t bytes, const Allocate& allocate);
  /// What operations go through in pieces of so many bytes, one after the other: the same one for all of them.
  std::shared_ptr<Ring> ring(Gpu& gpu, std::size_t slot_bytes, const Allocate& allocate);

 private:
  struct Room;
  std::mutex mutex_;
  std::map<Gpu*, std::shared_ptr<Ring>> rings_;
  std::multimap<std::pair<Gpu*, std::size_t>, std::shared_ptr<Room>> free_;
};

/// What the streams of a request had when it was asked for.
struct StreamMarks {
  MarkPtr input;
  MarkPtr output;
};
/// Throws Internal.
StreamMarks marks_of(Gpu& gpu, const Request& request);

/// Which rank of how many.
struct Place {
  int rank = 0;
  int size = 1;
};

/// The request with host memory in place of the GPU's, the copy of its input has begun, after `marks`; or to be carried
/// out in pieces. Throws Unavailable, InvalidArgument.
Request stage(const Request& request, Place place, const StreamMarks& marks, Rooms& rooms,
              const Rooms::Allocate& allocate);
/// After what the request's streams have now.
Request stage(const Request& request, Place place, Rooms& rooms, const Rooms::Allocate& allocate);

/// A receive into host memory, under way as `work`, that ends once it is in the GPU's, or `why_ended` says why the
/// world has. Nobody's thread waits for the GPU meanwhile.
Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline,
                   std::function<std::optional<Error>()> why_ended);

/// Memory of a GPU. Throws Unavailable, InvalidArgument.
std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index);

}  // namespace cohort::comm::cuda
