#include "comm/cuda/nccl_plane.h"

#include "comm/cuda/patience.h"
#include "comm/finite_check.h"

#include <algorithm>
#include <new>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kGrace = 1s;       // after a deadline, for the rank whose stream hangs to say so itself
constexpr auto kLooking = 500ms;  // after NCCL's error, for the ranks to find out which of them is lost

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

}  // namespace

/// One request: what its streams had when it was asked for.
class NcclPlane::Call final : public Direct {
 public:
  Call(std::shared_ptr<NcclPlane> plane, Gpu& gpu, const Request& request)
      : plane_(std::move(plane)), gpu_(gpu), marks_(marks_of(gpu, request)) {}
  bool open() const noexcept override { return plane_->open(); }
  bool form(Ranks& ranks) override { return plane_->form(gpu_, ranks); }
  bool run(std::span<const Request> together, const Round& round, Ranks& ranks) override {
    return plane_->run(together, round, ranks);
  }
  void give_up() noexcept override { plane_->give_up(); }
  Request staged(const Request& request) override {
    Request host = request;
    host.direct = nullptr;
    const Place place{plane_->placement_.rank, plane_->placement_.size};
    return stage(host, place, marks_, *plane_->rooms_,
                 [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
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

bool NcclPlane::may_take(const Request& request) const noexcept {
  return placement_.size > 1 && (is_reduction(request.kind) ? request.fast : has_move(request.kind));
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
  return fmt::format("rank {} ({}{})", placement_.rank, placement_.host,
                     gpu_ != nullptr ? fmt::format(", cuda:{}", gpu_->index()) : "");
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

bool NcclPlane::run(std::span<const Request> together, const Round& round, Direct::Ranks& ranks) {
  if (state_.load(std::memory_order_relaxed) == State::Staging) return false;
  // NCCL does not authenticate what it sends between hosts.
  const auto may_be_code = [](const Request& request) { return may_be_object(request.dtype); };
  const bool several_hosts = placement_.local_size < placement_.size;
  if (several_hosts && std::any_of(together.begin(), together.end(), may_be_code)) return false;
  std::optional<double> share;
  if (!round.shares.empty()) {
    const auto has = [](const Request& request) { return has_shares(request.dtype); };
    if (!std::all_of(together.begin(), together.end(), has)) return false;
    share = round.shares[static_cast<std::size_t>(placement_.rank)];
  }
  carry_out(together, share, ranks);
  return true;
}

void NcclPlane::give_up() noexcept {
  state_.store(State::Broken, std::memory_order_release);
  end_comm(false);
}

void NcclPlane::carry_out(std::span<const Request> together, std::optional<double> share, Direct::Ranks& ranks) {
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
    // A rank of no weight: what it brings is not read.
    if (share == 0.0 && request.output_count > 0) gpu_->zero(request.output, request.output_bytes(), stream_);
  }
  std::optional<ShareSums> shares;
  {
    const InGpu here(*gpu_);
    if (share) check(shares.emplace(*nccl_, comm_, *share).result(), what);
    check(call.ncclGroupStart(), what);
    NcclResult given = NcclResult::Success;
    const NcclWorld world{*nccl_, comm_, stream_, placement_.rank, placement_.size, shares ? &*shares : nullptr};
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
    if (const auto deadline = ranks.deadline(); now >= deadline) {
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
  look_at_results(together, ranks.deadline() + kGrace);
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
