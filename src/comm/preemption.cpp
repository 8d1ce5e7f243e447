#include <cohort/preemption.h>

#include "base/result.h"
#include "status/status_page.h"
#include "sys/signals.h"

#include <span>
#include <utility>

namespace cohort {

struct Preemption::State {
  State(PreemptionOptions given, sys::SignalLatch signals) : options(std::move(given)), latch(std::move(signals)) {}
  PreemptionOptions options;
  sys::SignalLatch latch;
  std::int64_t calls = 0;
  int signal = 0;  ///< of the answer
};

Preemption::Preemption(PreemptionOptions options) {
  if (options.every < 1) {
    raise(ErrorCode::InvalidArgument, "Preemption: every is {} -- at every call is 1", options.every);
  }
  auto latch = sys::SignalLatch::create(options.signals);
  if (!latch) raise(latch.error().code(), "Preemption: {}", latch.error().what());
  state_ = std::make_unique<State>(std::move(options), *std::move(latch));
  status::StatusPage::own().announce_saving();
}

Preemption::~Preemption() { status::StatusPage::own().withdraw_saving(); }

bool Preemption::requested(Communicator& comm) {
  State& state = *state_;
  if (state.signal != 0) return true;
  if (++state.calls % state.options.every != 0) return false;
  std::int32_t signal = state.latch.received();
  if (comm && comm.size() > 1) {
    status::called("Preemption::requested", [&] {
      comm.all_reduce(std::span(&signal, 1), {.op = ReduceOp::Max, .timeout = state.options.timeout}).wait();
    });
  }
  if (signal == 0) return false;
  state.signal = signal;
  state.latch.keep_handlers();
  status::StatusPage::own().note_preemption(signal);
  return true;
}

int Preemption::signal() const noexcept { return state_->signal; }
int Preemption::received() const noexcept {
  const int signal = state_->latch.received();
  if (signal != 0) state_->latch.keep_handlers();
  return signal;
}

}  // namespace cohort
