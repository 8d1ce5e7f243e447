#include "comm/gpu/device_communicator.h"

#include "base/env.h"
#include "base/result.h"
#include "comm/engine/agreement.h"
#include "comm/engine/queue.h"
#include "comm/gpu/chunking.h"
#include "comm/gpu/in_flight.h"
#include "comm/gpu/nccl_plane.h"
#include "comm/gpu/staging.h"

#include <algorithm>
#include <utility>

namespace cohort::comm {

using namespace cuda;

/// State shared by the operations on GPU memory that this class starts. Lives as long as any of them.
class DeviceCommunicator::Gpu : public std::enable_shared_from_this<Gpu> {
 public:
  explicit Gpu(const CommunicatorImpl& host)
      : placement(host.placement()),
        timeout(host.timeout()),
        queue(host.queue()),
        nccl(std::make_shared<NcclPlane>(placement, host.hosts())),
        in_flight(std::make_shared<InFlight>(queue)),
        sums_(std::get<std::string>(value_or_throw(env::value(env::kGpuSums))) == "exact" ? GpuSums::Exact
                                                                                          : GpuSums::Fast) {}

  /// Sets the request's timeout, and how its memory is described to the other ranks.
  void complete(DeviceRequest& request) const {
    if (request.timeout.count() == 0) request.timeout = timeout;
    if (request.device.type != DeviceType::CUDA) return;
    const bool fast = request.gpu_sums.value_or(sums_) == GpuSums::Fast && has_sum(request);
    request.memory = fast ? MemoryKind::DeviceFast : MemoryKind::Device;
  }
  /// Starts the requests with NCCL, if it may carry out all of them; else begins the copies to host memory.
  Work start(std::vector<DeviceRequest> requests, const Rooms::Allocate& allocate);
  /// Makes a Work that is over when all earlier operations are.
  Work await_all(const Request& name);
  /// Returns the check for threads that wait for a GPU outside of a turn.
  WhyEnded watch(Kind kind) const;
  Staged stage(const DeviceRequest& request, const Rooms::Allocate& allocate) {
    if (request.device.type != DeviceType::CUDA) return {request, nullptr, nullptr};
    const StreamMarks marks = marks_of(cuda::Gpu::at(request.device.index), request, placement);
    return cuda::stage(request, {placement.rank, placement.size}, marks, *rooms_, allocate);
  }

  const rendezvous::Placement placement;
  const std::chrono::milliseconds timeout;
  const std::shared_ptr<Queue> queue;
  const std::shared_ptr<NcclPlane> nccl;
  const std::shared_ptr<InFlight> in_flight;

 private:
  class Call;
  const GpuSums sums_;
  const std::shared_ptr<Rooms> rooms_ = std::make_shared<Rooms>();
};

/// One call of the program, for one operation or a group: a Composite for the queue, and a Work for the program.
class DeviceCommunicator::Gpu::Call final : public Composite, public DeviceWork {
 public:
  Call(std::shared_ptr<Gpu> gpu, Request whole, std::vector<DeviceCall> direct, std::vector<Staged> staged)
      : gpu_(std::move(gpu)),
        whole_(std::move(whole)),
        may_be_direct_(!direct.empty()),
        only_stream_(stream_of(direct)),
        direct_(std::move(direct)),
        staged_(std::move(staged)) {}

  // The next functions implement Composite.
  std::optional<Error> run(Turn& turn, bool& finished) noexcept override {
    if (may_be_direct_) {
      auto failed = run_direct(turn, finished);
      if (failed && failed->code() != ErrorCode::Mismatch) gpu_->nccl->give_up();
      if (failed || !finished || is_given_) return failed;
    }
    return run_staged(turn);
  }
  bool is_quick() const noexcept override {
    return may_be_direct_ && gpu_->nccl->ready() && gpu_->in_flight->has_room();
  }

  // The next functions implement WorkState.
  Ordering order(const Device& stream, Clock::time_point limit) override {
    if (!may_be_direct_) return Ordering::Never;
    if (!wait_for_first(limit == Clock::time_point::max() ? std::nullopt : std::optional(limit)))
      return Ordering::NotYet;
    std::shared_ptr<Flight> given;
    {
      const std::lock_guard lock(mutex_);
      given = flight_;
    }
    if (!given || done()) return Ordering::Never;
    given->put_before(stream);
    return Ordering::Done;
  }
  bool is_given_in(const Device& stream) const noexcept override {
    return only_stream_ && only_stream_->index == stream.index && only_stream_->stream == stream.stream;
  }

 private:
  /// Returns the stream of all buffers, if it is the same for all.
  static std::optional<Device> stream_of(const std::vector<DeviceCall>& direct) {
    if (direct.empty()) return std::nullopt;
    const Device& first = direct.front().request.device;
    const bool alike = std::all_of(direct.begin(), direct.end(), [&](const DeviceCall& call) {
      const DeviceRequest& request = call.request;
      return request.device.index == first.index && request.device.stream == first.stream &&
             request.input_stream == first.stream;
    });
    return alike ? std::optional(first) : std::nullopt;
  }
  Clock::time_point deadline() const noexcept { return called_ + whole_.timeout; }
  void look() noexcept override { gpu_->in_flight->look(); }
  void go_on(std::optional<Error> failed) noexcept override {
    if (!is_given_) end(std::move(failed));
  }
  /// Called by the one thread that ends the call. Frees the staging memory and the callbacks; otherwise a program that
  /// keeps the Work would keep them alive.
  void end(std::optional<Error> failed) {
    const auto limit = end_of_patience();  // one limit for all
    for (const Staged& one : staged_) {
      if (failed && one.staging) one.staging->abandon(limit);
      if (failed && one.pieces) one.pieces->abandon(limit);
      if (one.host.finite_check) one.host.finite_check->let_go(failed.has_value());
    }
    for (const DeviceCall& one : direct_) {
      if (one.request.finite_check) one.request.finite_check->let_go(failed.has_value());
    }
    staged_.clear();
    direct_.clear();
    {
      const std::lock_guard lock(mutex_);
      flight_ = nullptr;
    }
    finish(std::move(failed));
  }
  /// Called in the call's turn.
  void put_in_flight(std::shared_ptr<Flight> given) {
    is_given_ = true;
    {
      const std::lock_guard lock(mutex_);
      flight_ = given;
    }
    gpu_->in_flight->put({std::move(given), deadline(), [self = shared_from_this(), this](std::optional<Error> why) {
                            if (event_) gpu_->queue->tell(*event_, whole_, called_, why.has_value());
                            end(std::move(why));
                          }});
  }

  /// Runs without staging. Leaves `finished` false if ranks have not called the operation. If the result is neither an
  /// error nor a flight, all ranks have to stage the operation.
  std::optional<Error> run_direct(Turn& turn, bool& finished) noexcept {
    return gpu_->queue->guarded(whole_, called_, [&](CollectiveEvent* event) {
      NcclPlane& plane = *gpu_->nccl;
      Round round;
      finished = !plane.open() || turn.agree(whole_, round, event);
      if (!finished) return false;
      try {
        // The event describes the last round.
        if (round.everyone && plane.form(direct_.front().gpu, turn)) {
          if (event != nullptr) event->sequence = 0;
          turn.carry_out(as_round(whole_, round), event);
        }
        std::shared_ptr<Flight> given;
        if (round.everyone) {
          gpu_->in_flight->await_room(InFlight::kMost, whole_, deadline(), turn);
          gpu_->in_flight->watch_from_now_on();
          given = plane.run(direct_, round, turn);
        }
        if (given) {
          if (event != nullptr) event_ = *event;
          put_in_flight(std::move(given));
          return false;
        }
        gpu_->in_flight->await_room(1, whole_, deadline(), turn);
        for (const DeviceCall& call : direct_) staged_.push_back(plane.stage(call));
      } catch (const Error& error) {
        gpu_->queue->abort(error.what());
        throw;
      }
      return false;
    });
  }

  // Runs like the queue's groups: one operation after the other, with small adjacent ones of the same type fused into
  // one buffer.
  std::optional<Error> run_staged(Turn& turn) noexcept {
    const auto await_gpu = [&] { gpu_->in_flight->await_room(1, whole_, deadline(), turn); };
    if (staged_.empty()) {
      return gpu_->queue->guarded(whole_, called_, [&](CollectiveEvent*) {
        await_gpu();
        return false;
      });
    }
    std::vector<Request> hosts;
    for (const Staged& one : staged_) hosts.push_back(one.host);
    const bool waits = std::any_of(staged_.begin(), staged_.end(), [](const Staged& one) {
      return one.staging || one.pieces || one.host.kind == Kind::Barrier;
    });
    for (std::size_t begin = 0; begin < staged_.size();) {
      std::size_t count = 1;
      auto failed = gpu_->queue->guarded(hosts[begin], called_, [&](CollectiveEvent* event) {
        if (begin == 0 && waits) await_gpu();
        if (staged_[begin].pieces) {
          run_pieces(staged_[begin], turn, event);
        } else {
          const std::span<const Staged> left = std::span(staged_).subspan(begin);
          const auto pieces = std::find_if(left.begin(), left.end(), [](const Staged& one) { return !!one.pieces; });
          const auto whole = static_cast<std::size_t>(pieces - left.begin());
          count = Turn::count_together(std::span(hosts).subspan(begin, whole));
          step(left.first(count), [&](Staging& staging) { staging.arrive(deadline(), [&] { turn.attend(); }); });
          turn.carry_out(std::span(hosts).subspan(begin, count), event);
          step(left.first(count), [](Staging& staging) { staging.depart(); });
        }
        // An operation's output is copied while the next operation runs.
        if (begin + count == staged_.size())
          step(staged_, [&](Staging& staging) { staging.finish(deadline(), [&] { turn.attend(); }); });
        return true;
      });
      if (failed) return failed;
      begin += count;
    }
    return std::nullopt;
  }

  static Request as_round(Request request, Round& round) {
    request.round = &round;
    return request;
  }
  /// Ends the world if the function fails, since the others wait for this rank.
  template <class Way>
  void step(std::span<const Staged> staged, const Way& way) {
    try {
      for (const Staged& one : staged) {
        if (one.staging) way(*one.staging);
      }
    } catch (const Error& error) {
      gpu_->queue->abort(error.what());
      throw;
    }
  }

  /// Runs an operation in pieces. As for any other operation, the ranks first agree on the whole, or refuse a mismatch.
  void run_pieces(const Staged& staged, Turn& turn, CollectiveEvent* event) {
    Round agreed{.everyone = true};
    if (gpu_->placement.size > 1) turn.carry_out(as_round(staged.host, agreed), event);
    try {
      staged.pieces->run(agreed, deadline(), turn, event);
    } catch (const Error& error) {
      gpu_->queue->abort(error.what());
      throw;
    }
  }

  const std::shared_ptr<Gpu> gpu_;
  const Request whole_;
  const Clock::time_point called_ = Clock::now();
  const bool may_be_direct_;
  const std::optional<Device> only_stream_;
  std::vector<DeviceCall> direct_;        // kept until `end`
  std::vector<Staged> staged_;            // kept until `end`
  bool is_given_ = false;                 // queued on the GPU; used in the turn only
  std::shared_ptr<Flight> flight_;        // guarded by the mutex
  std::optional<CollectiveEvent> event_;  // reported when the call ends
};

Work DeviceCommunicator::Gpu::start(std::vector<DeviceRequest> requests, const Rooms::Allocate& allocate) {
  constexpr std::size_t kLarge = std::size_t{1} << 20;  // the GPU takes longer to copy this than a thread takes to wake
  const auto may_be_direct = [this](const DeviceRequest& request) {
    return request.device.type == DeviceType::CUDA && nccl->may_take(request);
  };
  std::vector<DeviceCall> direct;
  std::vector<Staged> staged;
  std::size_t bytes = 0;
  if (nccl->open() && std::all_of(requests.begin(), requests.end(), may_be_direct)) {
    for (const DeviceRequest& request : requests) {
      direct.push_back(nccl->call(request));
      bytes += request.payload();
    }
  } else {
    for (const DeviceRequest& request : requests) staged.push_back(stage(request, allocate));
  }
  const Request& whole = requests.front();
  const auto call = std::make_shared<Call>(shared_from_this(), whole, std::move(direct), std::move(staged));
  call->follow(queue->submit(call, whole, bytes >= kLarge));
  return Work(call);
}

Work DeviceCommunicator::Gpu::await_all(const Request& name) {
  const auto call = std::make_shared<Call>(shared_from_this(), name, std::vector<DeviceCall>(), std::vector<Staged>());
  call->follow(queue->submit(call, name, false));
  return Work(call);
}

WhyEnded DeviceCommunicator::Gpu::watch(Kind kind) const {
  using Clock = Staging::Clock;
  static constexpr auto kLook = std::chrono::milliseconds(5);
  queue->keep_from_caller();
  const std::shared_ptr<Queue> kept(queue.get(), [own = queue](Queue*) { own->release_caller(); });
  return [kept, kind, looked = Clock::time_point{}]() mutable -> std::optional<Error> {
    const auto now = Clock::now();
    if (now - looked < kLook) return std::nullopt;
    looked = now;
    try {
      kept->attend_if_idle();
    } catch (const Error&) {  // the error that ended the world, reported below
    } catch (const std::exception& error) {
      return Error(ErrorCode::Internal, error.what());
    }
    return kept->why_ended(name_of(kind));
  };
}

DeviceCommunicator::~DeviceCommunicator() {
  if (!gpu_) return;
  if (gpu_->queue->in_child()) {  // in a forked child, everything belongs to the parent
    static_cast<void>(new std::shared_ptr<Gpu>(std::move(gpu_)));
    return;
  }
  const bool in_callback = gpu_->queue->is_in_callback();
  gpu_->in_flight->leave();
  host_.reset();
  gpu_->in_flight->join(in_callback);
}

const std::shared_ptr<DeviceCommunicator::Gpu>& DeviceCommunicator::gpu() {
  if (!gpu_) gpu_ = std::make_shared<Gpu>(*host_);
  return gpu_;
}

Work DeviceCommunicator::start_beside_gpu(const DeviceRequest& asked) {
  const bool on_gpu = asked.device.type == DeviceType::CUDA;
  host_->check_home();
  if (!on_gpu && asked.kind != Kind::Barrier) return host_->start(asked);
  Gpu& own = *gpu();
  DeviceRequest request = asked;
  own.complete(request);
  const auto allocate = [this](std::size_t bytes) { return host_->allocate(bytes); };
  if (request.kind != Kind::Send && request.kind != Kind::Recv) return own.start({std::move(request)}, allocate);
  const auto deadline = Staging::Clock::now() + request.timeout;
  const WhyEnded why_ended = own.watch(request.kind);
  const Staged staged = own.stage(request, allocate);
  if (request.kind == Kind::Recv) return deliver_later(host_->start(staged.host), staged.staging, deadline, why_ended);
  staged.staging->arrive(deadline, [&why_ended] {
    if (const auto why = why_ended()) throw *why;
  });
  Work work = host_->start(staged.host);
  work.on_done([staging = staged.staging] {});  // keeps the memory until the end
  return work;
}

Work DeviceCommunicator::start_group(std::vector<DeviceRequest> requests) {
  const bool any_on_gpu = std::any_of(requests.begin(), requests.end(), [](const DeviceRequest& request) {
    return request.device.type == DeviceType::CUDA;
  });
  if (!any_on_gpu) return host_->start_group({requests.begin(), requests.end()});
  host_->check_home();
  for (DeviceRequest& request : requests) gpu()->complete(request);
  if (requests.size() > 1) {
    const std::uint64_t group = group_digest(std::vector<Request>(requests.begin(), requests.end()));
    for (DeviceRequest& request : requests) request.group = group;
  }
  return gpu()->start(std::move(requests), [this](std::size_t bytes) { return host_->allocate(bytes); });
}

int DeviceCommunicator::join(const BarrierOptions& options) {
  if (gpu_) {  // after the operations in flight
    DeviceRequest nothing;
    nothing.kind = Kind::Joined;
    nothing.timeout = options.timeout.value_or(host_->timeout());
    gpu_->await_all(nothing).wait();
  }
  return host_->join(options);
}

std::shared_ptr<MemoryBlock> DeviceCommunicator::allocate(std::size_t bytes, Device device) {
  if (device.type == DeviceType::CPU) return host_->allocate(bytes);
  if (device.type == DeviceType::CUDA)
    return cuda::allocate(bytes, device.index, Staging::Clock::now() + host_->timeout());
  raise(ErrorCode::InvalidArgument, "allocate failed -- rank {} ({}) -- memory of device type {} is not supported",
        host_->placement().rank, host_->placement().host, static_cast<int>(device.type));
}

}  // namespace cohort::comm
