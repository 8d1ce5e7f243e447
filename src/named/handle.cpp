#include "named/handle.h"

#include "named/doorbell.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cohort::named {

namespace {

class Urgency {
 public:
  explicit Urgency(Wakeup& engine) : engine_(engine) { engine_.urge(); }
  ~Urgency() { engine_.relax(); }
  Urgency(const Urgency&) = delete;
  Urgency& operator=(const Urgency&) = delete;

 private:
  Wakeup& engine_;
};

}  // namespace

State::State(std::shared_ptr<Wakeup> engine) : process_(::getpid()), engine_(std::move(engine)) {}

bool State::at_home() const noexcept { return process_ == ::getpid(); }

void State::wait() {
  if (done()) return;
  const Urgency urgency(*engine_);
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return done(); });
}

bool State::wait_for(std::chrono::nanoseconds limit) {
  if (done()) return true;
  const Urgency urgency(*engine_);
  // Longer than this overflows the clock.
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365);
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::min(limit, kLongest), [&] { return done(); });
}

void State::on_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      engine_->urge();  // until `end`
      return;
    }
  }
  callback();
}

void State::end(std::optional<Error> error) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (done()) return;
    error_ = std::move(error);
    ended_at = std::chrono::steady_clock::now();
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    ended_.notify_all();
  }
  for (const auto& callback : callbacks) {
    engine_->relax();
    callback();
  }
}

}  // namespace cohort::named
