#include "comm/gpu/staging.h"

#include "base/thread.h"
#include "comm/api/work_state.h"
#include "comm/gpu/chunking.h"
#include "comm/gpu/in_flight.h"

#include <fmt/format.h>

#include <pthread.h>

#include <algorithm>
#include <bit>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

constexpr std::size_t kLeastRoom = 4096;

/// The Work of a receive, done when the message is in GPU memory. The thread that receives the message begins the copy,
/// and must not block. Waiting threads check whether the copy is over, and the thread of Unattended checks deliveries
/// that no thread waits for.
class Delivery final : public DeviceWork {
 public:
  Delivery(std::shared_ptr<Staging> staging, Clock::time_point deadline, WhyEnded why_ended)
      : deadline_(deadline), staging_(std::move(staging)), why_ended_(std::move(why_ended)) {}

  void look() noexcept override {
    const std::unique_lock turn(looking_, std::try_to_lock);
    if (!turn || !departed_.load(std::memory_order_acquire) || done()) return;
    std::optional<Error> failed;
    try {
      if (!staging_->is_there()) {
        failed = why_ended_();
        if (!failed && Clock::now() < deadline_) return;
        if (!failed) staging_->finish(deadline_, {});  // throws Timeout if the copy is late
      }
    } catch (const Error& error) {
      failed = error;
    }
    end(std::move(failed));
  }

 private:
  void go_on(std::optional<Error> failed) noexcept override;
  /// Frees the memory; otherwise a program that keeps the Work would keep it alive.
  void end(std::optional<Error> failed) noexcept {
    staging_ = nullptr;
    why_ended_ = {};
    finish(std::move(failed));
  }

  const Clock::time_point deadline_;
  std::mutex looking_;  // held while checking the copy
  std::atomic<bool> departed_{false};
  std::shared_ptr<Staging> staging_;  // kept until `end`
  WhyEnded why_ended_;                // kept until `end`
};

/// The thread that checks this process's deliveries. It ends when there have been none for a while.
class Unattended {
 public:
  static Unattended& of_this_process() {
    static auto* const one = new Unattended();  // never destroyed: the thread may still run at the process's end
    return *one;
  }
  void add(std::shared_ptr<Delivery> delivery) {
    const std::lock_guard lock(mutex_);
    under_way_.push_back(std::move(delivery));
    if (!running_) sys::start_without_signals([this] { run(); }).detach();
    running_ = true;
    changed_.notify_all();
  }

 private:
  void run() noexcept {
    ::pthread_setname_np(::pthread_self(), "cohort-copies");
    Pauses pauses(std::chrono::microseconds(500));
    std::unique_lock lock(mutex_);
    while (changed_.wait_for(lock, std::chrono::seconds(1), [this] { return !under_way_.empty(); })) {
      std::vector<std::shared_ptr<Delivery>> all = under_way_;
      lock.unlock();
      bool any = false;
      for (const auto& one : all) {
        one->look();
        any = any || one->done();
      }
      lock.lock();
      std::erase_if(under_way_, [](const auto& one) { return one->done(); });
      lock.unlock();
      all.clear();  // may destroy what the callbacks hold
      any ? pauses.begin_again() : pauses.take();
      lock.lock();
    }
    running_ = false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Delivery>> under_way_;
  bool running_ = false;
};

void Delivery::go_on(std::optional<Error> failed) noexcept {
  try {
    if (!failed) staging_->depart();
  } catch (const Error& error) {
    failed = error;
  }
  if (failed) return end(std::move(failed));
  departed_.store(true, std::memory_order_release);
  try {
    Unattended::of_this_process().add(std::static_pointer_cast<Delivery>(shared_from_this()));
  } catch (const std::system_error&) {  // the thread could not be started, so this thread checks
    for (Pauses pauses; !done(); pauses.take()) look();
  }
}

struct GpuBlock final : MemoryBlock {
  GpuBlock(Gpu& of, std::size_t asked, Staging::Clock::time_point deadline) : gpu(of) {
    data = gpu.allocate(asked, deadline);
    bytes = asked;
  }
  ~GpuBlock() override { gpu.free(data); }
  Gpu& gpu;
};

}  // namespace

Staging::Staging(Gpu& gpu, const Request& device, const StreamMarks& marks, Request& host, Rooms& rooms,
                 const Rooms::Allocate& allocate)
    : gpu_(gpu), output_(device.output), bytes_(device.output_bytes()), ready_(marks.output) {
  const auto* const input = static_cast<const std::byte*>(device.input);
  auto* const output = static_cast<std::byte*>(device.output);
  const std::size_t in = device.input_bytes();
  const std::size_t out = bytes_;
  std::size_t input_at = 0;
  std::size_t output_at = (in + kCacheLine - 1) / kCacheLine * kCacheLine;
  std::size_t all = output_at + out;
  if (in > 0 && out > 0 && input < output + out && output < input + in) {  // in place, in host memory as well
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

Staging::~Staging() { abandon(end_of_patience()); }

void Staging::abandon(Clock::time_point limit) noexcept {
  // If the operation failed, copies under way may still use the memory.
  if (!settled(gpu_, arrived_, limit) || !settled(gpu_, departed_, limit)) keep_for_good(room_);
  arrived_ = departed_ = nullptr;
}

void Staging::arrive(Clock::time_point deadline, const Attend& attend) {
  if (arrived_) gpu_.wait(*arrived_, deadline, attend);
  arrived_ = nullptr;
}

void Staging::depart() {
  if (bytes_ > 0) departed_ = gpu_.copy_to_device(output_, host_output_, bytes_, *ready_);
}

void Staging::finish(Clock::time_point deadline, const Attend& attend) {
  if (departed_) gpu_.wait(*departed_, deadline, attend);
  departed_ = nullptr;
}

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

std::string text_of(const Request& request) {
  const std::int64_t count = std::max(request.input_count, request.output_count);
  return fmt::format("{}({}[{}]) of a GPU's memory", name_of(request.kind), to_string(request.dtype), count);
}

StreamMarks marks_of(Gpu& gpu, const DeviceRequest& request, const rendezvous::Placement& rank) {
  const auto doing = [&] { return fmt::format("{} failed -- rank {} ({})", text_of(request), rank.rank, rank.host); };
  gpu.refuse_capture(request.device.stream, doing);
  if (request.input_stream != request.device.stream) gpu.refuse_capture(request.input_stream, doing);
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
  // The memory is used for nothing else, since peers may still read it when an operation is over on this rank.
  std::shared_ptr<std::byte> memory(room, static_cast<std::byte*>(room->block->data));
  const auto made = std::make_shared<Ring>(gpu, std::move(memory), slot_bytes);
  std::shared_ptr<Ring> before;  // kept alive by the operations that will use it
  const std::lock_guard lock(mutex_);
  before = std::exchange(rings_[&gpu], made);
  return made;
}

Staged stage(const DeviceRequest& request, Place place, const StreamMarks& marks, Rooms& rooms,
             const Rooms::Allocate& allocate) {
  Gpu& gpu = Gpu::at(request.device.index);
  Staged staged{request, nullptr, nullptr};
  if (place.size == 1 && is_copy(request)) {
    staged.pieces = copy_alone(gpu, request, marks);
    return staged;
  }
  const std::size_t most = piece_bytes();
  if (Chunking cut(request, place.rank, place.size, most); cut.pieces() > 1) {
    auto ring = rooms.ring(gpu, std::max(cut.room(), most), allocate);
    staged.pieces = in_pieces(gpu, request, marks, std::move(cut), std::move(ring), place.rank);
    return staged;
  }
  Request& host = staged.host;
  staged.staging = std::make_shared<Staging>(gpu, request, marks, host, rooms, allocate);
  if (request.finite_check)
    request.finite_check->read_instead({host.output, host.output_count, host.dtype}, staged.staging->room());
  return staged;
}

Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline,
                   WhyEnded why_ended) {
  const auto delivery = std::make_shared<Delivery>(std::move(staging), deadline, std::move(why_ended));
  delivery->follow(std::move(work));
  return Work(delivery);
}

std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index, Staging::Clock::time_point deadline) {
  return std::make_shared<GpuBlock>(Gpu::at(index), bytes, deadline);
}

}  // namespace cohort::comm::cuda
