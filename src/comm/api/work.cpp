#include "base/env.h"
#include "base/log.h"
#include "base/result.h"
#include "comm/api/request.h"
#include "comm/api/work_state.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"

#include <cohort/work.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace cohort::comm {

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::None: return "none";
    case Kind::AllReduce: return "all_reduce";
    case Kind::Reduce: return "reduce";
    case Kind::ReduceScatter: return "reduce_scatter";
    case Kind::ReduceScatterV: return "reduce_scatter_v";
    case Kind::Broadcast: return "broadcast";
    case Kind::AllGather: return "all_gather";
    case Kind::AllGatherV: return "all_gather_v";
    case Kind::Gather: return "gather";
    case Kind::GatherV: return "gather_v";
    case Kind::Scatter: return "scatter";
    case Kind::ScatterV: return "scatter_v";
    case Kind::AllToAll: return "all_to_all";
    case Kind::AllToAllV: return "all_to_all_v";
    case Kind::Barrier: return "barrier";
    case Kind::Split: return "split";
    case Kind::Joined: return "join";
    case Kind::Send: return "send";
    case Kind::Recv: return "recv";
  }
  return "unknown";
}

std::string_view name_of(MemoryKind kind) noexcept {
  switch (kind) {
    case MemoryKind::Host: break;
    case MemoryKind::Device: return " of a GPU's memory";
    case MemoryKind::DeviceFast: return " of a GPU's memory, summed fast";
  }
  return "";
}

}  // namespace cohort::comm

namespace cohort::comm::times {
namespace {

thread_local bool left_out = false;  // this thread belongs to Cohort, or is within an Exposed

std::uint64_t count_of(std::chrono::nanoseconds duration) noexcept {
  return duration.count() > 0 ? static_cast<std::uint64_t>(duration.count()) : 0;
}

}  // namespace

bool wanted() noexcept {
  static const bool wanted = env::flag(env::kTimes).value_or(false) || status::timeline::on();
  return wanted;
}

void add(const CollectiveEvent& event) noexcept {
  status::timeline::add(event);
  status::TimesStatus& times = status::StatusPage::own().times();
  constexpr auto kRelaxed = std::memory_order_relaxed;
  times.operations.fetch_add(1, kRelaxed);
  times.bytes.fetch_add(event.bytes, kRelaxed);
  times.busy_ns.fetch_add(count_of(event.ended - event.begun), kRelaxed);
  times.waited_ns.fetch_add(count_of(event.waited), kRelaxed);
  times.wire_ns.fetch_add(count_of(event.wire), kRelaxed);
  times.wire_bytes.fetch_add(event.wire_bytes, kRelaxed);
}

void leave_out_this_thread() noexcept { left_out = true; }

void add_exposed(std::uint64_t ns) noexcept {
  if (left_out || ns == 0) return;
  status::StatusPage::own().times().exposed_ns.fetch_add(ns, std::memory_order_relaxed);
}

void Exposed::begin() noexcept {
  if (left_out) return;
  left_out = true;
  begun_ = Clock::now();
}

void Exposed::end() noexcept {
  left_out = false;
  const Clock::time_point ended = Clock::now();
  status::StatusPage::own().times().exposed_ns.fetch_add(count_of(ended - begun_), std::memory_order_relaxed);
  // A call is not shown as a wait if its operation has ended already.
  if (ended - begun_ < std::chrono::microseconds(1) || !status::timeline::on()) return;
  using status::TimelineKind;
  status::timeline::add({TimelineKind::Wait, "wait", begun_, ended, status::timeline::this_thread(), 0, 0, {}});
}

}  // namespace cohort::comm::times

namespace cohort {
namespace {

/// Drops a Work that the program has not waited for. `by_stream`: a stream waits for the operation.
void give_up(std::shared_ptr<comm::WorkState>& state, bool by_stream) noexcept {
  if (!state) return;
  try {
    if (!state->at_home()) {
      // This is a forked child: the state belongs to the parent's threads, so it is leaked.
      static_cast<void>(new std::shared_ptr<comm::WorkState>(std::move(state)));
      return;
    }
    if (by_stream && !state->done()) return state.reset();
    state->wait();
    const auto& error = state->outcome();
    // When a world has ended, all its operations fail, and the error of one of them is already being reported.
    const bool another_is_told = std::uncaught_exceptions() > 0 || std::current_exception() != nullptr;
    const bool ended = error && (error->code() == ErrorCode::PeerLost || error->code() == ErrorCode::Aborted);
    if (error && !state->reported.exchange(true) && !(ended && another_is_told)) {
      log::warn("comm", "an operation failed and nobody waited for it: {}", error->what());
    }
  } catch (...) {  // a destructor cannot report it
  }
  state.reset();
}

void check_home(const comm::WorkState& state) {
  if (!state.at_home()) {
    raise(ErrorCode::InvalidArgument,
          "this Work belongs to the process that started it -- a forked child cannot wait for it");
  }
}

}  // namespace

Work::Work() noexcept = default;
Work::Work(std::shared_ptr<comm::WorkState> state) noexcept : state_(std::move(state)) {}
Work::Work(Work&&) noexcept = default;

Work& Work::operator=(Work&& other) noexcept {
  if (this != &other) {
    give_up(state_, synchronized_);
    state_ = std::move(other.state_);
    synchronized_ = other.synchronized_;
    ordered_ = other.ordered_;
    finite_checks_ = std::move(other.finite_checks_);
  }
  return *this;
}

Work::~Work() { give_up(state_, synchronized_); }

void Work::wait() {
  if (!state_) return;
  check_home(*state_);
  if (!state_->done()) {
    const comm::times::Exposed exposed;
    state_->wait();
  }
  if (const auto& error = state_->outcome()) {
    state_->reported = true;
    throw *error;
  }
}

bool Work::wait_for(std::chrono::nanoseconds limit) {
  if (!state_) return true;
  check_home(*state_);
  {
    const comm::times::Exposed exposed;
    if (!state_->wait_for(limit)) return false;
  }
  wait();
  return true;
}

bool Work::synchronize_until(const Device& stream, std::chrono::steady_clock::time_point limit) {
  if (!state_) return true;
  check_home(*state_);
  if (stream.type != DeviceType::CPU && !state_->done()) {
    const comm::times::Exposed exposed;
    const comm::Ordering ordering = state_->order(stream, limit);
    if (ordering == comm::Ordering::Done) {
      synchronized_ = true;
      ordered_ = ordered_ || state_->is_given_in(stream);
    }
    if (ordering != comm::Ordering::Never) return ordering == comm::Ordering::Done;
  }
  if (limit != std::chrono::steady_clock::time_point::max()) return wait_for(limit - std::chrono::steady_clock::now());
  wait();
  return true;
}

void Work::synchronize(const Device& stream) {
  synchronize_until(stream, std::chrono::steady_clock::time_point::max());
}

bool Work::synchronize_for(const Device& stream, std::chrono::nanoseconds limit) {
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365);
  return synchronize_until(stream, std::chrono::steady_clock::now() + std::min(limit, kLongest));
}

bool Work::done() const noexcept { return !state_ || (state_->at_home() && state_->done()); }

std::optional<Error> Work::error() const {
  if (!state_ || !done()) return std::nullopt;
  const auto& error = state_->outcome();
  if (error) state_->reported = true;
  return error;
}

std::optional<bool> Work::finite() const {
  if (finite_checks_.empty() || !done() || (state_ && state_->outcome())) return std::nullopt;
  return std::all_of(finite_checks_.begin(), finite_checks_.end(),
                     [](const auto& finite_check) { return finite_check->finite(); });
}

std::optional<int> Work::source() const {
  if (!state_ || !done() || state_->outcome()) return std::nullopt;
  return state_->source();
}

void Work::on_done(std::function<void()> callback) {
  if (!state_) return callback();
  check_home(*state_);
  state_->on_done(std::move(callback));
}

}  // namespace cohort
