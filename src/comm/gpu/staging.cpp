#include "comm/gpu/staging.h"

#include "base/thread.h"
#include "comm/api/device_op.h"
#include "comm/api/work_state.h"
#include "comm/gpu/chunking.h"

#include <pthread.h>
#include <unistd.h>

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
    std::size_t output_at = (in + kCacheLine - 1) / kCacheLine * kCacheLine;
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

  void arrive(Clock::time_point deadline, const Attend& attend) override {
    if (arrived_) gpu_.wait(*arrived_, deadline, attend);
    arrived_ = nullptr;
  }
  void depart() override {
    if (bytes_ > 0) departed_ = gpu_.copy_to_device(output_, host_output_, bytes_, *ready_);
  }
  bool is_there() const override { return !departed_ || gpu_.passed(*departed_); }
  void finish(Clock::time_point deadline, const Attend& attend) override {
    if (departed_) gpu_.wait(*departed_, deadline, attend);
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

/// Done once the message is in the GPU's memory. Its copy begins where the message comes, in a thread that is needed
/// for others; whether it is over, those look who wait, and a thread for all that nobody waits for.
class Delivery final : public UnfinishedWork, public std::enable_shared_from_this<Delivery> {
 public:
  using WhyEnded = std::function<std::optional<Error>()>;

  Delivery(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline, WhyEnded why_ended)
      : work_(std::move(work)), staging_(std::move(staging)), deadline_(deadline), why_ended_(std::move(why_ended)) {}

  void begin() {
    work_.on_done([self = shared_from_this()] { self->depart(); });
  }
  /// False: it is still on its way.
  bool look() noexcept {
    const std::unique_lock turn(looking_, std::try_to_lock);
    if (!turn || done()) return done();
    std::optional<Error> failed;
    try {
      if (!staging_->is_there()) {
        failed = why_ended_();
        if (!failed && Staging::Clock::now() < deadline_) return false;
        if (!failed) staging_->finish(deadline_, {});  // says that it is late
      }
    } catch (const Error& error) {
      failed = error;
    }
    end(std::move(failed));
    return true;
  }
  void wait() override { wait_for(std::chrono::hours(24 * 365)); }
  bool wait_for(std::chrono::nanoseconds limit) override {
    const auto until = Staging::Clock::now() + limit;
    try {
      if (!work_.wait_for(limit)) return false;
    } catch (const Error&) {  // `depart` sees it, too
    }
    // A copy takes no longer than waking would; until `depart` has been called there is nothing to look at.
    for (Pauses pauses(std::chrono::microseconds(100), std::chrono::microseconds(200)); !done(); pauses.take()) {
      if (departed_.load(std::memory_order_acquire) && look()) break;
      if (Staging::Clock::now() >= until) return done();
    }
    return true;
  }
  void on_done(std::function<void()> callback) override { add_callback(mutex_, std::move(callback)); }
  std::optional<int> source() const noexcept override { return work_.source(); }
  bool at_home() const noexcept override { return ::getpid() == home_; }

 private:
  void depart();
  void end(std::optional<Error> failed) {
    set_outcome(std::move(failed));
    std::vector<std::function<void()>> callbacks;
    {
      const std::lock_guard lock(mutex_);
      set_done();
      callbacks = take_callbacks();
    }
    for (const auto& callback : callbacks) callback();
  }

  Work work_;
  const std::shared_ptr<Staging> staging_;
  const Staging::Clock::time_point deadline_;
  const WhyEnded why_ended_;
  const pid_t home_ = ::getpid();
  std::mutex looking_;  // at the copy; before mutex_
  std::mutex mutex_;
  std::atomic<bool> departed_{false};
};

/// The thread that looks at deliveries of this process. It goes once there have been none for a while.
class Unattended {
 public:
  static Unattended& of_this_process() {
    static auto* const one = new Unattended();  // never destroyed: the thread may be there at the process's end
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
      for (const auto& one : all) any = one->look() || any;
      lock.lock();
      std::erase_if(under_way_, [](const auto& one) { return one->done(); });
      lock.unlock();
      all.clear();  // what a callback keeps may go with the last
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

void Delivery::depart() {
  auto failed = work_.error();
  try {
    if (!failed) staging_->depart();
  } catch (const Error& error) {
    failed = error;
  }
  if (failed) return end(std::move(failed));
  departed_.store(true, std::memory_order_release);
  try {
    Unattended::of_this_process().add(shared_from_this());
  } catch (const std::system_error&) {  // no thread can be had: this one looks
    for (Pauses pauses; !look(); pauses.take()) {
    }
  }
}

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
  if (Chunking cut(request, place.rank, place.size, most); cut.pieces() > 1) {
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

Work deliver_later(Work work, std::shared_ptr<Staging> staging, Staging::Clock::time_point deadline,
                   std::function<std::optional<Error>()> why_ended) {
  auto delivery = std::make_shared<Delivery>(std::move(work), std::move(staging), deadline, std::move(why_ended));
  delivery->begin();
  return Work(std::move(delivery));
}

std::shared_ptr<MemoryBlock> allocate(std::size_t bytes, int index) {
  return std::make_shared<GpuBlock>(Gpu::at(index), bytes);
}

}  // namespace cohort::comm::cuda
