#include "train/named/handle.h"

#include "base/log.h"
#include "comm/api/work_state.h"
#include "telemetry/status_page.h"
#include "telemetry/timeline.h"
#include "train/named/rounds.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

namespace cohort::named {
namespace {

/// A thread of the program waits: the engine hurries, and the rank's agent is told for what.
class Waiting {
 public:
  Waiting(Wakeup& engine, const std::string& name) : engine_(engine) {
    engine_.urge();
    status::StatusPage::own().begin_wait(name);
  }
  ~Waiting() {
    status::StatusPage::own().end_wait();
    engine_.relax();
  }
  Waiting(const Waiting&) = delete;
  Waiting& operator=(const Waiting&) = delete;

 private:
  Wakeup& engine_;
  const comm::times::Exposed exposed_;
};

}  // namespace

State::State(std::shared_ptr<Wakeup> engine, std::string name)
    : process_(::getpid()),
      asked_at_(status::timeline::on() ? std::chrono::steady_clock::now() : decltype(agreed_at){}),
      engine_(std::move(engine)),
      name_(std::move(name)) {}

State::~State() {
  const std::optional<Error>& error = outcome();
  if (!error || error->code() == ErrorCode::Aborted || reported || !at_home()) return;
  log::warn("named", "an operation failed and nobody waited for it: {}", error->what());
}

bool State::at_home() const noexcept { return process_ == ::getpid(); }

void State::wait() {
  if (done()) return;
  const Waiting waiting(*engine_, name_);
  std::unique_lock lock(mutex_);
  ended_.wait(lock, [&] { return done(); });
}

bool State::wait_for(std::chrono::nanoseconds limit) {
  if (done()) return true;
  const Waiting waiting(*engine_, name_);
  // Longer than this overflows the clock.
  constexpr std::chrono::nanoseconds kLongest = std::chrono::hours(24 * 365);
  std::unique_lock lock(mutex_);
  return ended_.wait_for(lock, std::min(limit, kLongest), [&] { return done(); });
}

void State::on_done(std::function<void()> callback) {
  if (done()) return callback();
  engine_->urge();  // until `end`
  if (!add_callback(mutex_, std::move(callback))) engine_->relax();
}

void State::tell_timeline() const noexcept {
  using status::timeline::Event;
  if (!status::timeline::on()) return;
  Event event;
  event.kind = status::TimelineKind::Named;
  event.name = name_;
  event.begun = asked_at_;
  event.ended = ended_at;
  event.waited = (agreed_at == decltype(agreed_at){} ? ended_at : agreed_at) - asked_at_;
  status::timeline::add(event);
}

void State::end(std::optional<Error> error) {
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    if (done()) return;
    set_outcome(std::move(error));
    ended_at = std::chrono::steady_clock::now();
    set_done();
    status::StatusPage::own().count_named();
    tell_timeline();
    callbacks = take_callbacks();
    ended_.notify_all();
  }
  for (const auto& callback : callbacks) {
    engine_->relax();
    callback();
  }
}

}  // namespace cohort::named
