#include <cohort/work.h>

#include "base/log.h"
#include "base/result.h"
#include "comm/finite_check.h"
#include "comm/times.h"
#include "comm/work_state.h"

#include <algorithm>
#include <utility>

namespace cohort {
namespace {

/// `by_stream`: a stream waits for it.
void give_up(std::shared_ptr<comm::WorkState>& state, bool by_stream) noexcept {
  if (!state) return;
  try {
    if (!state->at_home()) {
      // In a forked child: what it refers to belongs to the parent's threads, so it is left as it is.
      static_cast<void>(new std::shared_ptr<comm::WorkState>(std::move(state)));
      return;
    }
    if (by_stream && !state->done()) return state.reset();
    state->wait();
    if (const auto& error = state->outcome(); error && !state->reported.exchange(true)) {
      log::warn("comm", "an operation failed and nobody waited for it: {}", error->what());
    }
  } catch (...) {  // a destructor cannot tell anyone
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
