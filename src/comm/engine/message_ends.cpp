#include "comm/engine/message_ends.h"

#include "telemetry/timeline.h"

#include <utility>

namespace cohort::comm::messages {

bool MessageEnds::observed() const noexcept {
  return observer_.load(std::memory_order_acquire) != nullptr || status::timeline::on();
}

void MessageEnds::wake_sleepers() noexcept {
  for (Channels* const kind : kinds_) {
    if (kind->asleep.load() > 0) kind->wake();
  }
}

void MessageEnds::count(Channels& kind, int works) noexcept {
  kind.pending += static_cast<std::size_t>(works);
  pending_.store(pending_.load(std::memory_order_relaxed) + static_cast<std::size_t>(works), std::memory_order_release);
}

void MessageEnds::complete(const std::shared_ptr<MessageWork>& work, Channels& kind, std::optional<Error> error) {
  work->transfer.reset();
  work->set_outcome(std::move(error));
  count(kind, -1);
  if (observed() || work->has_callbacks()) {
    finished_.push_back(work);
    return;
  }
  work->set_done();
  wake_sleepers();
}

void MessageEnds::settle(Lock& lock) {
  while (!finished_.empty()) {
    const std::vector<std::shared_ptr<MessageWork>> finished = std::exchange(finished_, {});
    std::vector<std::function<void()>> callbacks;
    lock.unlock();
    for (const std::shared_ptr<MessageWork>& work : finished) {
      report(work->message, work->called, work->met, Clock::now(), work->outcome().has_value());
    }
    lock.lock();
    for (const std::shared_ptr<MessageWork>& work : finished) {
      work->set_done();
      for (auto& callback : work->take_callbacks()) callbacks.push_back(std::move(callback));
    }
    wake_sleepers();
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    callbacks.clear();  // without the mutex, since objects that callbacks hold may do anything in their destructors
    lock.lock();
  }
}

void MessageEnds::report(const Message& message, Clock::time_point called, Clock::time_point met,
                         Clock::time_point ended, bool failed) const noexcept {
  if (!observed()) return;
  CollectiveEvent event;
  event.operation = name_of(message.kind);
  event.sequence = message.number;
  event.bytes = message.bytes();
  event.called = event.begun = called;
  event.ended = ended;
  event.waited = (met == Clock::time_point{} ? ended : met) - called;
  event.failed = failed;
  status::timeline::add(event);
  Observer* const observer = observer_.load(std::memory_order_acquire);
  if (observer != nullptr) observer->on_collective(event);
}

}  // namespace cohort::comm::messages
