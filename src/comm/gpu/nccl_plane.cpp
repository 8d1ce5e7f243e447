#include "comm/gpu/nccl_plane.h"

#include "comm/api/work_state.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <new>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {
namespace {

using namespace std::chrono_literals;

constexpr auto kGraceOfHang = 1s;  // time after a deadline for the rank whose stream hangs to report that
constexpr auto kLooking = 500ms;   // time after an NCCL error for the ranks to find out which of them is lost

/// True for a reduction that Cohort's kernels fold, because NCCL lacks it or its bits would differ from the CPU's.
bool is_folded(const Request& request, const Round& round) noexcept {
  return is_reduction(request.kind) &&
         (request.memory != MemoryKind::DeviceFast || (!round.shares.empty() && !has_shares(request.dtype)));
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

bool NcclPlane::may_take(const DeviceRequest& request) const noexcept {
  if (placement_.size == 1) return false;
  return is_reduction(request.kind) ? request.memory == MemoryKind::DeviceFast || ExactSums::has(request)
                                    : has_move(request.kind);
}

DeviceCall NcclPlane::call(const DeviceRequest& request) {
  Gpu& gpu = Gpu::at(request.device.index);
  if (state_.load(std::memory_order_acquire) == State::Nccl && &gpu != gpu_) {
    raise(
        ErrorCode::InvalidArgument,
        "{} failed -- {} -- its buffers are on cuda:{}, and NCCL uses cuda:{} for this communicator -- give it buffers "
        "of one GPU, form a communicator for the other (split), or set COHORT_NCCL=off on all ranks",
        text_of(request), where(), gpu.index(), gpu_->index());
  }
  return {request, gpu, marks_of(gpu, request, placement_)};
}

Staged NcclPlane::stage(const DeviceCall& call) {
  return cuda::stage(call.request, {placement_.rank, placement_.size}, call.marks, *rooms_,
                     [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
}

std::string NcclPlane::where() const {
  return fmt::format("rank {} ({}{})", placement_.rank, placement_.host,
                     gpu_ != nullptr ? fmt::format(", cuda:{}", gpu_->index()) : "");
}

void NcclPlane::check(NcclResult result, std::string_view what) const {
  if (result == NcclResult::Success) return;
  raise(ErrorCode::Internal,
        "{} failed -- {} -- {} -- NCCL_DEBUG=WARN tells more; COHORT_NCCL=off goes by the host's memory instead", what,
        where(), nccl_->said(result, comm_));
}

std::optional<NcclResult> NcclPlane::state_of_comm() {
  const std::lock_guard lock(calls_);
  if (comm_ == nullptr) return std::nullopt;
  NcclResult state = NcclResult::Success;
  const NcclResult asked = nccl_->call.ncclCommGetAsyncError(comm_, &state);
  return asked == NcclResult::Success ? state : asked;
}

/// Operations queued in NCCL's stream.
class NcclPlane::Given final : public Flight {
 public:
  Given(std::shared_ptr<NcclPlane> plane, std::span<const DeviceCall> together, std::string what, MarkPtr made,
        Look look)
      : plane_(std::move(plane)),
        together_(together),
        what_(std::move(what)),
        made_(std::move(made)),
        look_(std::move(look)) {}

  bool over(Clock::time_point deadline) override {
    const Gpu& gpu = *plane_->gpu_;
    const bool there = gpu.passed(*made_) && std::all_of(look_.there.begin(), look_.there.end(),
                                                         [&](const auto& mark) { return gpu.passed(*mark); });
    // An abort lets the stream finish without a result, so check the communicator after the stream.
    const auto state = plane_->state_of_comm();
    if (!state) return false;
    const bool well = *state == NcclResult::Success;
    if (there && well) {
      const auto* const flags = reinterpret_cast<const std::uint32_t*>(look_.flags.get());
      for (std::size_t i = 0; i < look_.asked.size(); ++i) look_.asked[i]->note(flags[i] == 0);
      return true;
    }
    if (!well) {
      // NCCL may detect a broken connection before this world detects the dead rank. Wait, so that the rank is named.
      const auto now = Clock::now();
      if (!failing_) failing_ = now;
      if (now - *failing_ < kLooking) return false;
      const std::lock_guard lock(plane_->calls_);
      plane_->check(*state, what_);
    }
    plane_->require_in_time(together_, what_, deadline);
    return false;
  }
  void give_up() noexcept override { plane_->give_up(); }
  void put_before(const Device& device) const override {
    Gpu& gpu = Gpu::at(device.index);
    gpu.refuse_capture(device.stream,
                       [&] { return fmt::format("synchronize of {} failed -- {}", what_, plane_->where()); });
    gpu.put_after(device.stream, *made_);
  }

 private:
  const std::shared_ptr<NcclPlane> plane_;
  const std::span<const DeviceCall> together_;
  const std::string what_;
  const MarkPtr made_;
  const Look look_;
  std::optional<Clock::time_point> failing_;
};

std::shared_ptr<Flight> NcclPlane::run(std::span<const DeviceCall> together, const Round& round, Turn& turn) {
  if (!open()) return nullptr;
  // NCCL does not authenticate traffic between hosts.
  const auto may_be_code = [](const DeviceCall& call) { return may_be_object(call.request.dtype); };
  const bool several_hosts = placement_.local_size < placement_.size;
  if (several_hosts && std::any_of(together.begin(), together.end(), may_be_code)) return nullptr;
  std::vector<Request> sums;
  for (const DeviceCall& call : together) {
    if (is_folded(call.request, round)) sums.push_back(call.request);
  }
  if (!sums.empty() && !can_fold(sums, turn)) return nullptr;
  return give(together, round, turn);
}

void NcclPlane::give_up() noexcept {
  state_.store(State::Broken, std::memory_order_release);
  end_comm(false);
}

/// Operations passed to NCCL in one group.
struct NcclPlane::Step {
  std::vector<Request> operations;  // carried out by NCCL itself
  std::optional<double> share;      // this rank's share in a weighted average
  ExactStep exchange;
};

std::shared_ptr<Flight> NcclPlane::give(std::span<const DeviceCall> together, const Round& round, Turn& turn) {
  const std::string what = text_of(together.front().request);
  Step step;
  std::vector<Request> sums;
  for (const DeviceCall& call : together) {
    const Request& request = call.request;
    if (&call.gpu != gpu_)
      raise(ErrorCode::InvalidArgument, "{} failed -- {} -- its buffers are on cuda:{}", what, where(),
            call.gpu.index());
    gpu_->put_after(stream_, *call.marks.output);
    gpu_->put_after(stream_, *call.marks.input);
    if (is_folded(request, round)) {
      sums.push_back(request);
      continue;
    }
    step.operations.push_back(request);
    if (round.shares.empty()) continue;
    step.share = round.shares[static_cast<std::size_t>(placement_.rank)];
    // The input of a rank with weight 0 is not read.
    if (step.share == 0.0 && request.output_count > 0) gpu_->zero(request.output, request.output_bytes(), stream_);
  }
  std::vector<ExactStep> exchanges;
  if (!sums.empty()) {
    void* const scratch = scratch_.memory;
    exchanges = ExactSums(world_, round).plan(sums, static_cast<std::byte*>(scratch));
  }
  for (std::size_t number = 0; number < std::max<std::size_t>(exchanges.size(), 1); ++number) {
    if (number < exchanges.size()) step.exchange = std::move(exchanges[number]);
    const std::vector<ExactFold> folds = std::move(step.exchange.folds);
    give_step(std::exchange(step, {}), together, what, turn);
    for (const ExactFold& fold : folds) folds_->fold(fold.bound(), stream_);
  }
  Look look = look_at_results(together);  // before other work can change them
  return std::make_shared<Given>(shared_from_this(), together, what, gpu_->mark(stream_), std::move(look));
}

NcclResult NcclPlane::call_nccl(const Step& step, const std::optional<ShareOps>& shares) {
  NcclWorld world{*nccl_, nullptr, stream_, placement_.rank, placement_.size, shares};
  {
    const std::lock_guard lock(calls_);
    if (comm_ == nullptr) return NcclResult::Success;  // the caller detects that later
    world.comm = comm_;
    calling_->store(true, std::memory_order_release);
  }
  NcclResult given = nccl_->call.ncclGroupStart();
  for (const Request& request : step.operations) {
    if (given == NcclResult::Success) given = launch(world, request);
  }
  if (given == NcclResult::Success) given = launch(world, step.exchange);
  const NcclResult ended = nccl_->call.ncclGroupEnd();
  calling_->store(false, std::memory_order_release);
  return given == NcclResult::Success ? ended : given;
}

void NcclPlane::give_step(Step step, std::span<const DeviceCall> together, std::string_view what, Turn& turn) {
  std::optional<ShareOps> shares;
  if (step.share) {
    const std::lock_guard lock(calls_);
    if (comm_ == nullptr) return;  // the caller detects that later
    if (!(shares_ && shares_->ops().share == *step.share))
      check(shares_.emplace(*nccl_, comm_, *step.share).result(), what);
    shares = shares_->ops();
  }
  thread_->make([self = shared_from_this(), step = std::move(step), shares] { return self->call_nccl(step, shares); });
  Pauses pauses(100us, 100us);
  std::optional<Clock::time_point> failing;
  for (;;) {
    const auto state = state_of_comm();
    if (!state) {
      turn.attend();  // throws the reason
      raise(ErrorCode::Aborted, "{} failed -- {} -- NCCL has been ended", what, where());
    }
    if (thread_->over()) {
      const NcclResult result = thread_->result();
      if (result == NcclResult::Success) return;
      const auto now = Clock::now();
      if (!failing) failing = now;
      const std::lock_guard lock(calls_);
      if (now - *failing >= kLooking) check(result, what);
    }
    require_in_time(together, what, turn.deadline());
    turn.attend();
    pauses.take();
  }
}

void NcclPlane::require_in_time(std::span<const DeviceCall> together, std::string_view what,
                                Clock::time_point deadline) const {
  const auto now = Clock::now();
  if (now < deadline) return;
  for (const DeviceCall& call : together) {
    if (call.reached()) continue;
    raise(ErrorCode::Timeout,
          "{} timed out -- {} -- its stream has not come to the operation by the deadline -- a kernel before it "
          "hangs, or takes longer than the operation's timeout",
          what, where());
  }
  if (now < deadline + kGraceOfHang) return;
  raise(ErrorCode::Timeout,
        "{} timed out -- {} -- NCCL has not carried it out by the deadline, although all ranks have come to it -- "
        "a stream of another rank hangs, or NCCL does (NCCL_DEBUG=INFO, COHORT_NCCL=off)",
        what, where());
}

/// Checks results for non-finite values, if requested: by a kernel, or on the host if there are no kernels.
NcclPlane::Look NcclPlane::look_at_results(std::span<const DeviceCall> together) {
  std::vector<const Request*> asked;
  for (const DeviceCall& call : together) {
    if (call.request.finite_check && call.request.output_count > 0) asked.push_back(&call.request);
  }
  if (asked.empty()) return {};
  const std::size_t bytes = asked.size() * sizeof(std::uint32_t);
  const FoldLauncher* folds = nullptr;
  try {
    folds = &FoldLauncher::on(*gpu_);
    if (flags_.bytes < bytes) flags_ = reserve(std::bit_ceil(bytes));
  } catch (const Error&) {
    return read_results(asked);
  }
  auto* const flags = static_cast<std::uint32_t*>(flags_.memory);
  gpu_->zero(flags, bytes, stream_);
  Look look;
  for (std::size_t i = 0; i < asked.size(); ++i) {
    folds->look({asked[i]->output, asked[i]->output_count, asked[i]->dtype}, flags + i, stream_);
    look.asked.push_back(asked[i]->finite_check);
  }
  look.flags = rooms_->take(*gpu_, bytes, [](std::size_t most) { return std::make_shared<HeapBlock>(most); });
  look.there.push_back(gpu_->copy_to_host(look.flags.get(), flags, bytes, *gpu_->mark(stream_)));
  gpu_->put_after(stream_, *look.there.back());  // the next operation reuses the flags
  return look;
}

NcclPlane::Look NcclPlane::read_results(std::span<const Request* const> asked) {
  Look look;
  for (const Request* const request : asked) {
    const auto room = rooms_->take(*gpu_, request->output_bytes(),
                                   [](std::size_t bytes) { return std::make_shared<HeapBlock>(bytes); });
    const MarkPtr made = gpu_->mark(stream_);
    look.there.push_back(gpu_->copy_to_host(room.get(), request->output, request->output_bytes(), *made));
    gpu_->put_after(stream_, *look.there.back());
    request->finite_check->read_instead({room.get(), request->output_count, request->dtype}, room);
  }
  return look;
}

}  // namespace cohort::comm::cuda
