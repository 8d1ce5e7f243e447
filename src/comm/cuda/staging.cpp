#include "comm/cuda/staging.h"

#include "comm/cuda/in_pieces.h"
#include "comm/cuda/ring.h"
#include "comm/finite_check.h"
#include "comm/work_state.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

constexpr std::size_t kLeastRoom = 4096;
constexpr std::size_t kLine = 64;

class Copies final : public Staging {
 public:
  Copies(Gpu& gpu, const Request& device, const StreamMarks& marks, Request& host, Rooms& rooms,
         const Rooms::Allocate& allocate)
      : gpu_(gpu), output_(device.output), bytes_(device.output_bytes()), ready_(marks.output) {
    const auto* const input = static_cast<const std::byte*>(device.input);
    auto* const output = static_cast<std::byte*>(device.output);
    const std::size_t in = device.input_bytes();
    const std::size_t out = bytes_;
    std::size_t input_at = 0;
    std::size_t output_at = (in + kLine - 1) / kLine * kLine;
    std::size_t all = output_at + out;
    if (in > 0 && out > 0 && input < output + out && output < input + in) {  // in place: so it is here, too
      const std::byte* const begin = std::min<const std::byte*>(input, output);
      input_at = static_cast<std::size_t>(input - begin);
      output_at = static_cast<std::size_t>(output - begin);
      all = std::max(input_at + in, output_at + out);
    }
    if (all == 0) return;
    room_ = rooms.take(gpu, all, allocate);
    host.input = in > 0 ? room_.get() + input_at : nullptr;
    host.output = host_output_ = out > 0 ? room_.get() + output_at : nullptr;
    if (in > 0) arrived_ = gpu.copy_to_host(room_.get() + input_at, input, in, *marks.input);
  }
  ~Copies() override {
    // What is under way still uses the room: an operation that failed is left in the midst of it.
    const auto limit = end_of_patience();
    if (!settled(gpu_, arrived_, limit) || !settled(gpu_, departed_, limit)) keep_for_good(room_);
  }
  Copies(const Copies&) = delete;
  Copies& operator=(const Copies&) = delete;

  void arrive(Clock::time_point deadline) override {
    if (arrived_) gpu_.wait(*arrived_, deadline);
    arrived_ = nullptr;
  }
  void depart() override {
    if (bytes_ > 0) departed_ = gpu_.copy_to_device(output_, host_output_, bytes_, *ready_);
  }
  void finish(Clock::time_point deadline) override {
    if (departed_) gpu_.wait(*departed_, deadline);
    departed_ = nullptr;
  }

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

/// Done once the message is in the GPU's memory.
class Delivery final : public WorkState, public std::enable_shared_from_this<Delivery> {
 public:
  Delivery(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline)
      : work_(std::move(work)), staging_(std::move(staging)), deadline_(deadline) {}

  void begin() {
    work_.on_done([self = shared_from_this()] { self->deliver(); });
  }
  void wait() override { wait_for(std::chrono::hours(24 * 365)); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto until = Staging::Clock::now() + limit;
    try {
      if (!work_.wait_for(limit)) return false;
    } catch (const Error&) {  // `deliver` sees it, too
    }
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, until, [this] { return done(); });
  }
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override {
    {
      const std::lock_guard lock(mutex_);
      if (!done()) {
        callbacks_.push_back(std::move(callback));
        return;
      }
    }
    callback();
  }
  std::optional<int> source() const noexcept override { return work_.source(); }
  bool at_home() const noexcept override { return ::getpid() == home_; }

 private:
  void deliver() {
    outcome_ = work_.error();
    try {
      if (!outcome_) {
        staging_->depart();
        staging_->finish(deadline_);
      }
    } catch (const Error& error) {
      outcome_ = error;
    }
    std::vector<std::function<void()>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      done_.store(true, std::memory_order_release);
      callbacks.swap(callbacks_);
    }
    changed_.notify_all();
    for (const auto& callback : callbacks) callback();
  }

  Work work_;
  const std::shared_ptr<Staging> staging_;
  const Staging::Clock::time_point deadline_;
  const pid_t home_ = ::getpid();
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  std::optional<Error> outcome_;  // written before done_
  std::vector<std::function<void()>> callbacks_;
};

struct GpuBlock final : MemoryBlock {
  GpuBlock(Gpu& of, std::size_t asked) : gpu(of) {
    data = gpu.allocate(asked);
    bytes = asked;
  }
  ~GpuBlock() override { gpu.free(data); }
  Gpu& gpu;
};

}  // namespace

struct Rooms::Room {
  Room(Gpu& of, std::shared_ptr<MemoryBlock> memory)
      : gpu(of), block(std::move(memory)), pinned(gpu.pin(block->data, block->bytes)) {}
  ~Room() {
    if (pinned) gpu.unpin(block->data);
  }
  Room(const Room&) = delete;
  Room& operator=(const Room&) = delete;

  Gpu& gpu;
  const std::shared_ptr<MemoryBlock> block;
  const bool pinned;
};

std::shared_ptr<std::byte> Rooms::take(Gpu& gpu, std::size_t bytes, const Allocate& allocate) {
  const std::size_t size = std::bit_ceil(std::max(bytes, kLeastRoom));
  std::shared_ptr<Room> room;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = free_.find({&gpu, size}); found != free_.end()) {
      room = std::move(found->second);
      free_.erase(found);
    }
  }
  if (!room) room = std::make_shared<Room>(gpu, allocate(size));
  auto* const data = static_cast<std::byte*>(room->block->data);
  return {data, [room, size, keep = weak_from_this()](std::byte*) {
            if (const auto rooms = keep.lock()) {
              const std::lock_guard lock(rooms->mutex_);
              rooms->free_.emplace(std::pair(&room->gpu, size), room);
            }
          }};
}

StreamMarks marks_of(Gpu& gpu, const Request& request) {
  const MarkPtr output = gpu.mark(request.device.stream);
  return {request.input_stream == request.device.stream ? output : gpu.mark(request.input_stream), output};
}

std::shared_ptr<Ring> Rooms::ring(Gpu& gpu, std::size_t slot_bytes, const Allocate& allocate) {
  {
    const std::lock_guard lock(mutex_);
    const auto found = rings_.find(&gpu);
    if (found != rings_.end() && found->second->slot_bytes() >= slot_bytes) return found->second;
  }
  const auto room = std::make_shared<Room>(gpu, allocate(Ring::kSlots * slot_bytes));
  // Nothing else is ever put there: peers may still read it when an operation is over on this rank.
  std::shared_ptr<std::byte> memory(room, static_cast<std::byte*>(room->block->data));
  const auto made = std::make_shared<Ring>(gpu, std::move(memory), slot_bytes);
  std::shared_ptr<Ring> before;  // lives on in the operations that are to go through it
  const std::lock_guard lock(mutex_);
  before = std::exchange(rings_[&gpu], made);
  return made;
}

Request stage(const Request& request, Place place, Rooms& rooms, const Rooms::Allocate& allocate) {
  return stage(request, place, marks_of(Gpu::at(request.device.index), request), rooms, allocate);
}

Request stage(const Request& request, Place place, const StreamMarks& marks, Rooms& rooms,
              const Rooms::Allocate& allocate) {
  Gpu& gpu = Gpu::at(request.device.index);
  Request host = request;
  if (place.size == 1 && is_copy(request)) {
    host.pieces = copy_alone(gpu, request, marks);
    return host;
  }
  const std::size_t most = piece_bytes();
  if (Cut cut(request, place.rank, place.size, most); cut.pieces() > 1) {
    auto ring = rooms.ring(gpu, std::max(cut.room(), most), allocate);
    host.pieces = in_pieces(gpu, request, marks, std::move(cut), std::move(ring), place.rank);
    return host;
  }
  auto copies = std::make_shared<Copies>(gpu, request, marks, host, rooms, allocate);
  if (request.finite_check)
    request.finite_check->read_instead({host.output, host.output_count, host.dtype}, copies->room());
  host.staging = std::move(copies);
  return host;
}

Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline) {
  auto delivery = std::make_shared<Delivery>(std::move(work), std::move(staging), deadline);
  delivery->begin();
  return Work(std::move(delivery));
}

std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index) {
  return std::make_shared<GpuBlock>(Gpu::at(index), bytes);
}

}  // namespace cohort::comm::cuda
