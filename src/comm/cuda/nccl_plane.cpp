#include "comm/cuda/nccl_plane.h"

#include "base/log.h"
#include "comm/finite_check.h"
#include "sys/thread.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kMostToStart = 60s;     // for NCCL to connect the ranks; without it they go by staging
constexpr auto kGrace = 1s;            // after a deadline, for the rank whose stream hangs to say so itself
constexpr auto kLooking = 500ms;       // after NCCL's error, for the ranks to find out which of them is lost
constexpr auto kEnding = 2s;           // for NCCL to give back what it has
constexpr auto kEndingBroken = 200ms;  // likewise in a world that has ended: the error is waited for

std::string text_of(const Request& request) {
  const std::int64_t count = std::max(request.input_count, request.output_count);
  return fmt::format("{}({}[{}]) of a GPU's memory", name_of(request.kind), to_string(request.dtype), count);
}

struct HeapBlock final : MemoryBlock {
  static constexpr std::align_val_t kPage{4096};
  explicit HeapBlock(std::size_t size) {
    data = ::operator new(size, kPage);
    bytes = size;
  }
  ~HeapBlock() override { ::operator delete(data, kPage); }
  HeapBlock(const HeapBlock&) = delete;
  HeapBlock& operator=(const HeapBlock&) = delete;
};

/// Runs what may hang on a thread of its own, and leaves it there if it does.
template <class Body>
bool within(std::chrono::milliseconds limit, Body body) noexcept {
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
  };
  try {
    const auto shared = std::make_shared<Shared>();
    sys::start_without_signals([shared, body] {
      body();
      const std::lock_guard lock(shared->mutex);
      shared->done = true;
      shared->changed.notify_all();
    }).detach();
    std::unique_lock lock(shared->mutex);
    return shared->changed.wait_for(lock, limit, [&] { return shared->done; });
  } catch (const std::exception&) {  // no thread can be had
    return false;
  }
}

}  // namespace

/// The steps of one wait: short pauses, in which the other ranks are looked after.
class NcclPlane::Patience {
 public:
  explicit Patience(Direct::Ranks& ranks) noexcept : ranks_(ranks) {}
  void step() {
    ranks_.attend();
    if (pause_.count() == 0) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(pause_);
    }
    pause_ = std::min(pause_ + std::chrono::microseconds(1), std::chrono::microseconds(100));
  }

 private:
  Direct::Ranks& ranks_;
  std::chrono::microseconds pause_{0};
};

/// One request: what its streams had when it was asked for.
class NcclPlane::Call final : public Direct {
 public:
  Call(std::shared_ptr<NcclPlane> plane, Gpu& gpu, const Request& request)
      : plane_(std::move(plane)), gpu_(gpu), marks_(marks_of(gpu, request)) {}
  bool open() const noexcept override { return plane_->open(); }
  bool run(std::span<const Request> together, Ranks& ranks, Clock::time_point deadline) override {
    return plane_->run(together, ranks, deadline);
  }
  Request staged(const Request& request) override {
    Request host = request;
    host.direct = nullptr;
    return stage(host, marks_, *plane_->rooms_, [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
  }

  Gpu& gpu() const noexcept { return gpu_; }
  void put_before(Stream stream) const {
    gpu_.put_after(stream, *marks_.output);
    gpu_.put_after(stream, *marks_.input);
  }
  bool reached() const { return gpu_.passed(*marks_.output) && gpu_.passed(*marks_.input); }

 private:
  const std::shared_ptr<NcclPlane> plane_;
  Gpu& gpu_;
  const StreamMarks marks_;
};

NcclPlane::~NcclPlane() {
  if (::getpid() != home_) return;  // a forked child: it is the parent's
  end_comm(state_.load(std::memory_order_relaxed) == State::Nccl);
  if (stream_ != nullptr) gpu_->end_stream(stream_);
}

bool NcclPlane::may_take(const Request& request) const noexcept {
  return size_ > 1 && (is_reduction(request.kind) ? request.fast : has_move(request.kind));
}

std::shared_ptr<Direct> NcclPlane::call(const Request& request) {
  Gpu& gpu = Gpu::at(request.device.index);
  if (state_.load(std::memory_order_acquire) == State::Nccl && &gpu != gpu_) {
    raise(
        ErrorCode::InvalidArgument,
        "{} failed -- {} -- its buffers are on cuda:{}, and NCCL uses cuda:{} for this communicator -- give it buffers "
        "of one GPU, form a communicator for the other (split), or set COHORT_NCCL=off on all ranks",
        text_of(request), where(), gpu.index(), gpu_->index());
  }
  return std::make_shared<Call>(shared_from_this(), gpu, request);
}

std::string NcclPlane::where() const {
  return fmt::format("rank {} ({}{})", rank_, host_, gpu_ != nullptr ? fmt::format(", cuda:{}", gpu_->index()) : "");
}

void NcclPlane::check(NcclResult result, std::string_view what) const {
  if (result == NcclResult::Success || result == NcclResult::InProgress) return;
  raise(ErrorCode::Internal,
        "{} failed -- {} -- {} -- NCCL_DEBUG=WARN tells more; COHORT_NCCL=off goes by the host's memory instead", what,
        where(), nccl_->said(result, comm_));
}

NcclResult NcclPlane::state_of_comm() const {
  NcclResult state = NcclResult::Success;
  const NcclResult asked = nccl_->call.ncclCommGetAsyncError(comm_, &state);
  return asked == NcclResult::Success ? state : asked;
}

// --- beginning and end ---

void NcclPlane::form(Gpu& gpu, Direct::Ranks& ranks, Clock::time_point deadline) {
  std::vector<Card> cards(static_cast<std::size_t>(size_));
  const Card own = card_of(gpu, host_, rank_ == 0);
  ranks.exchange(&own, cards.data(), sizeof own);
  auto why = obstacle(cards);
  if (!why) {
    gpu_ = &gpu;
    nccl_ = &*Nccl::find();
    const Start made = start(cards.front().id, ranks, deadline);
    std::vector<Start> starts(static_cast<std::size_t>(size_));
    ranks.exchange(&made, starts.data(), sizeof made);
    why = obstacle(starts, cards);
  }
  if (why) {
    if (rank_ == 0) log::warn("comm", "memory of GPUs goes by way of the host's, without NCCL -- {}", *why);
    end_comm(false);
    state_.store(State::Staging, std::memory_order_release);
    return;
  }
  stream_ = gpu.make_stream();
  if (rank_ == 0) {
    log::info("comm", "NCCL {} carries out what {} ranks do with memory of GPUs ({})", Nccl::text_of(nccl_->version),
              size_, nccl_->path);
  }
  state_.store(State::Nccl, std::memory_order_release);
}

Start NcclPlane::start(const NcclId& id, Direct::Ranks& ranks, Clock::time_point deadline) {
  Start made;
  NcclConfig config;
  NcclResult state = NcclResult::Success;
  {
    const InGpu here(*gpu_);
    state = nccl_->call.ncclCommInitRankConfig(&comm_, size_, id, rank_, &config);
  }
  // Ranks that fail meet the others in the exchange that follows: these must come to it within the operation's time.
  const auto now = Clock::now();
  const auto limit = now + std::min<Clock::duration>(kMostToStart, (deadline - now) / 2);
  Patience patience(ranks);
  while (state == NcclResult::InProgress || (state == NcclResult::Success && comm_ != nullptr)) {
    if (const NcclResult next = state_of_comm(); next != NcclResult::InProgress) {
      state = next;
      break;
    }
    if (Clock::now() >= limit) break;
    patience.step();
  }
  made.made = state == NcclResult::Success ? 1 : 0;
  if (state == NcclResult::InProgress) {
    put_text(made.why, "the ranks did not connect in time; NCCL_DEBUG=INFO tells which networks it tries");
  } else if (made.made == 0) {
    put_text(made.why, nccl_->said(state, comm_));
  }
  return made;
}

void NcclPlane::end_comm(bool healthy) noexcept {
  const NcclComm comm = std::exchange(comm_, nullptr);
  if (comm == nullptr) return;
  const auto end = healthy ? nccl_->call.ncclCommDestroy : nccl_->call.ncclCommAbort;
  const bool ended = within(healthy ? kEnding : kEndingBroken, [end, comm, gpu = gpu_] {
    try {
      const InGpu here(*gpu);
      end(comm);
    } catch (const Error&) {  // the GPU has failed: there is nothing to give back
    }
  });
  if (!ended) log::info("comm", "NCCL still ends its communicator on cuda:{}", gpu_->index());
}

// --- operations ---

bool NcclPlane::run(std::span<const Request> together, Direct::Ranks& ranks, Clock::time_point deadline) {
  try {
    if (state_.load(std::memory_order_relaxed) == State::Unknown)
      form(static_cast<const Call&>(*together.front().direct).gpu(), ranks, deadline);
    if (state_.load(std::memory_order_relaxed) == State::Staging) return false;
    carry_out(together, ranks, deadline);
    return true;
  } catch (...) {
    state_.store(State::Broken, std::memory_order_release);
    end_comm(false);
    throw;
  }
}

void NcclPlane::carry_out(std::span<const Request> together, Direct::Ranks& ranks, Clock::time_point deadline) {
  const NcclFunctions& call = nccl_->call;
  const std::string what = text_of(together.front());
  if (comm_ == nullptr) raise(ErrorCode::Aborted, "{} failed -- {} -- NCCL has been ended", what, where());
  const auto call_of = [](const Request& request) -> const Call& { return static_cast<const Call&>(*request.direct); };
  for (const Request& request : together) {
    const Call& own = call_of(request);
    if (&own.gpu() != gpu_)
      raise(ErrorCode::InvalidArgument, "{} failed -- {} -- its buffers are on cuda:{}", what, where(),
            own.gpu().index());
    own.put_before(stream_);
  }
  {
    const InGpu here(*gpu_);
    check(call.ncclGroupStart(), what);
    NcclResult given = NcclResult::Success;
    const NcclWorld world{*nccl_, comm_, stream_, rank_, size_};
    for (const Request& request : together) {
      given = launch(world, request);
      if (given != NcclResult::Success && given != NcclResult::InProgress) break;
    }
    const NcclResult ended = call.ncclGroupEnd();
    check(given, what);
    check(ended, what);
  }
  Patience patience(ranks);
  MarkPtr done;
  std::optional<Clock::time_point> failing;
  for (;;) {
    const NcclResult state = state_of_comm();
    // What NCCL is given is in the stream once it is no longer in progress.
    if (!done && state == NcclResult::Success) done = gpu_->mark(stream_);
    if (done && gpu_->passed(*done)) break;
    const auto now = Clock::now();
    if (state != NcclResult::Success && state != NcclResult::InProgress) {
      // NCCL sees that a connection is broken before it is known that a rank has died: then that rank is named.
      if (!failing) failing = now;
      if (now - *failing >= kLooking) check(state, what);
    }
    if (now >= deadline) {
      for (const Request& request : together) {
        if (call_of(request).reached()) continue;
        raise(ErrorCode::Timeout,
              "{} timed out -- {} -- its stream has not come to the operation by the deadline -- a kernel before it "
              "hangs, or takes longer than the operation's timeout",
              what, where());
      }
      if (now >= deadline + kGrace) {
        raise(
            ErrorCode::Timeout,
            "{} timed out -- {} -- NCCL has not carried it out by the deadline, although all ranks have come to it -- "
            "a stream of another rank hangs, or NCCL does (NCCL_DEBUG=INFO, COHORT_NCCL=off)",
            what, where());
      }
    }
    patience.step();
  }
  look_at_results(together, deadline + kGrace);
  // A rank that is done may leave; so nobody is before all are.
  ranks.meet();
}

/// Where somebody asks whether results are finite, they are read on the host.
void NcclPlane::look_at_results(std::span<const Request> together, Clock::time_point deadline) {
  std::vector<MarkPtr> copied;
  for (const Request& request : together) {
    if (!request.finite_check || request.output_count == 0) continue;
    const auto room = rooms_->take(*gpu_, request.output_bytes(),
                                   [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
    const MarkPtr made = gpu_->mark(stream_);
    copied.push_back(gpu_->copy_to_host(room.get(), request.output, request.output_bytes(), *made));
    request.finite_check->read_instead({room.get(), request.output_count, request.dtype}, room);
  }
  for (const MarkPtr& mark : copied) gpu_->wait(*mark, deadline);
}

}  // namespace cohort::comm::cuda
