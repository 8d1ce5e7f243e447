#include "comm/cuda/nccl_plane.h"

#include "comm/cuda/patience.h"
#include "comm/finite_check.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <functional>
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

/// A reduction whose elements are exchanged and folded by us: NCCL lacks it, or does it otherwise than the CPU.
bool is_folded(const Request& request, const Round& round) noexcept {
  return is_reduction(request.kind) && (!request.fast || (!round.shares.empty() && !has_shares(request.dtype)));
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

const NcclPlane::Call& NcclPlane::call_of(const Request& request) { return static_cast<const Call&>(*request.direct); }

bool NcclPlane::may_take(const Request& request) const noexcept {
  if (placement_.size == 1) return false;
  return is_reduction(request.kind) ? request.fast || ExactSums::has(request) : has_move(request.kind);
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
  std::vector<Request> sums;
  for (const Request& request : together) {
    if (is_folded(request, round)) sums.push_back(request);
  }
  if (!sums.empty() && !can_fold(sums, ranks)) return false;
  carry_out(together, round, ranks);
  return true;
}

void NcclPlane::give_up() noexcept {
  state_.store(State::Broken, std::memory_order_release);
  end_comm(false);
}

struct NcclPlane::Waiting {
  std::span<const Request> together;
  Direct::Ranks& ranks;
  /// Given what NCCL says of itself.
  std::function<bool(NcclResult)> over;
};

void NcclPlane::carry_out(std::span<const Request> together, const Round& round, Direct::Ranks& ranks) {
  const std::string what = text_of(together.front());
  if (comm_ == nullptr) raise(ErrorCode::Aborted, "{} failed -- {} -- NCCL has been ended", what, where());
  std::optional<double> share;
  std::vector<const Request*> operations;
  std::vector<Request> sums;
  for (const Request& request : together) {
    const Call& own = call_of(request);
    if (&own.gpu() != gpu_)
      raise(ErrorCode::InvalidArgument, "{} failed -- {} -- its buffers are on cuda:{}", what, where(),
            own.gpu().index());
    own.put_before(stream_);
    if (is_folded(request, round)) {
      sums.push_back(request);
      continue;
    }
    operations.push_back(&request);
    if (round.shares.empty()) continue;
    share = round.shares[static_cast<std::size_t>(placement_.rank)];
    // A rank of no weight: what it brings is not read.
    if (share == 0.0 && request.output_count > 0) gpu_->zero(request.output, request.output_bytes(), stream_);
  }
  std::optional<ShareSums> shares;
  if (share) {
    const InGpu here(*gpu_);
    check(shares.emplace(*nccl_, comm_, *share).result(), what);
  }
  std::vector<ExactStep> steps;
  if (!sums.empty()) {
    void* const scratch = scratch_.memory;
    steps = ExactSums(world_, round).plan(sums, static_cast<std::byte*>(scratch));
  }
  for (std::size_t number = 0; number < std::max<std::size_t>(steps.size(), 1); ++number) {
    const ExactStep* const step = number < steps.size() ? &steps[number] : nullptr;
    give(number == 0 ? operations : std::span<const Request* const>(), shares ? &*shares : nullptr, step, what);
    // What NCCL is given is in the stream once it is no longer in progress.
    wait_for({together, ranks, [](NcclResult state) { return state == NcclResult::Success; }});
    if (step == nullptr) continue;
    for (const ExactFold& fold : step->folds) folds_->fold(fold.bound(), stream_);
  }
  const MarkPtr done = gpu_->mark(stream_);
  wait_for({together, ranks, [&](NcclResult) { return gpu_->passed(*done); }});
  look_at_results(together, ranks.deadline() + kGrace);
  // A rank that is done may leave; so nobody is before all are.
  ranks.meet();
}

void NcclPlane::give(std::span<const Request* const> operations, const ShareSums* shares, const ExactStep* step,
                     std::string_view what) {
  const NcclFunctions& call = nccl_->call;
  const InGpu here(*gpu_);
  check(call.ncclGroupStart(), what);
  NcclResult given = NcclResult::Success;
  const auto is_going = [&] { return given == NcclResult::Success || given == NcclResult::InProgress; };
  const NcclWorld world{*nccl_, comm_, stream_, placement_.rank, placement_.size, shares};
  for (const Request* const request : operations) {
    if (is_going()) given = launch(world, *request);
  }
  if (step != nullptr && is_going()) given = launch(world, *step);
  const NcclResult ended = call.ncclGroupEnd();
  check(given, what);
  check(ended, what);
}

void NcclPlane::wait_for(const Waiting& waiting) {
  Direct::Ranks& ranks = waiting.ranks;
  const std::string what = text_of(waiting.together.front());
  Patience patience(ranks);
  std::optional<Clock::time_point> failing;
  for (;;) {
    const NcclResult state = state_of_comm();
    if (waiting.over(state)) return;
    const auto now = Clock::now();
    if (state != NcclResult::Success && state != NcclResult::InProgress) {
      // NCCL sees that a connection is broken before it is known that a rank has died: then that rank is named.
      if (!failing) failing = now;
      if (now - *failing >= kLooking) check(state, what);
    }
    if (const auto deadline = ranks.deadline(); now >= deadline) {
      for (const Request& request : waiting.together) {
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
}

/// Where somebody asks whether results are finite, a kernel looks, or the host where there are no kernels.
void NcclPlane::look_at_results(std::span<const Request> together, Clock::time_point deadline) {
  std::vector<const Request*> asked;
  for (const Request& request : together) {
    if (request.finite_check && request.output_count > 0) asked.push_back(&request);
  }
  if (asked.empty()) return;
  const std::size_t bytes = asked.size() * sizeof(std::uint32_t);
  const FoldLauncher* folds = nullptr;
  try {
    folds = &FoldLauncher::on(*gpu_);
    if (flags_.bytes < bytes) flags_ = reserve(std::bit_ceil(bytes));
  } catch (const Error&) {
    return read_results(asked, deadline);
  }
  auto* const flags = static_cast<std::uint32_t*>(flags_.memory);
  gpu_->zero(flags, bytes, stream_);
  for (std::size_t i = 0; i < asked.size(); ++i)
    folds->look({asked[i]->output, asked[i]->output_count, asked[i]->dtype}, flags + i, stream_);
  const auto room = rooms_->take(*gpu_, bytes, [](std::size_t most) { return std::make_shared<HeapBlock>(most); });
  gpu_->wait(*gpu_->copy_to_host(room.get(), flags, bytes, *gpu_->mark(stream_)), deadline);
  const auto* const found = reinterpret_cast<const std::uint32_t*>(room.get());
  for (std::size_t i = 0; i < asked.size(); ++i) asked[i]->finite_check->note(found[i] == 0);
}

void NcclPlane::read_results(std::span<const Request* const> asked, Clock::time_point deadline) {
  std::vector<MarkPtr> copied;
  for (const Request* const request : asked) {
    const auto room = rooms_->take(*gpu_, request->output_bytes(),
                                   [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
    const MarkPtr made = gpu_->mark(stream_);
    copied.push_back(gpu_->copy_to_host(room.get(), request->output, request->output_bytes(), *made));
    request->finite_check->read_instead({room.get(), request->output_count, request->dtype}, room);
  }
  for (const MarkPtr& mark : copied) gpu_->wait(*mark, deadline);
}

}  // namespace cohort::comm::cuda
