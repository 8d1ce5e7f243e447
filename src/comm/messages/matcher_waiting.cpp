// Waiting, the thread that works when nobody waits, and what is told of works that are over.
#include "base/log.h"
#include "comm/messages/matcher.h"
#include "status/timeline.h"
#include "sys/thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace cohort::comm::messages {
namespace {

using namespace std::chrono_literals;

// While messages come and go the thread looks at intervals whether anybody attends to them, instead of being woken for
// each: so a message that nobody waits for may be late by this, the first time.
constexpr auto kTick = 1ms;
// The first sleep is short: peers read whether to ring without a fence, and their last store may not be seen yet.
constexpr auto kFirstSleep = 200us;
constexpr auto kSlice = 10ms;
constexpr auto kDoze = 1h;
// Waiting spins as long as that has paid, then yields, then sleeps.
constexpr int kMostSpins = 4000;
constexpr int kLeastSpins = 30;
constexpr auto kYielding = 200us;

}  // namespace

Matcher::Matcher(Owner owner)
    : owner_(std::move(owner)),
      members_(owner_.members),
      rank_(members_.rank()),
      home_(*owner_.kinds.front()),
      peer_states_(static_cast<std::size_t>(members_.size())),
      spins_(kMostSpins) {
  opened_.reserve(peer_states_.size());
}

void Matcher::attend() {
  if (idle()) return;
  Lock lock(mutex_);
  progress(lock);
  look_after(lock);
  settle(lock);
}

/// Progresses unless another thread does; true if something has moved.
bool Matcher::attempt() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const bool moved = progress(lock);
  if (!finished_.empty()) settle(lock);
  return moved;
}

/// Null: of all peers. They have all been opened by then, so the list does not change any more.
bool Matcher::stirred(const PeerState* peer_state) const noexcept {
  if (peer_state != nullptr) return peer_state->channel->stirred();
  return std::any_of(opened_.begin(), opened_.end(), [](const PeerState* each) { return each->channel->stirred(); });
}

bool Matcher::wait_until(PendingWork& waited, Clock::time_point limit) {
  if (waited.done()) return true;
  auto& work = static_cast<MessageWork&>(waited);
  const PeerState* peer_state = nullptr;  // null: all
  Message message;
  {
    const Lock lock(mutex_);
    message = work.message_;
    if (!work.any_source_) peer_state = peer_states_[static_cast<std::size_t>(message.peer)].get();
  }
  Channels& at = peer_state != nullptr ? *peer_state->kind : home_;
  // A receive from any source sleeps at home; the communicator's thread drives the others meanwhile, and wakes it.
  Channels* const last = peer_state != nullptr ? &at : owner_.kinds.back();
  Channels* const driven = last->is_driven ? last : nullptr;
  const bool limited = limit != Clock::time_point::max();
  at.attended.fetch_add(1, std::memory_order_relaxed);
  const int spins = at.is_driven || members_.crowded() ? 0 : spins_.load(std::memory_order_relaxed);
  int yields = 0;
  bool first_sleep = true;
  bool told = false;
  Clock::time_point yielding{};
  for (int turn = 1; !work.done(); ++turn) {
    if (stirred(peer_state) && attempt()) continue;
    if (turn <= spins) {
      if (turn % 64 == 0) attempt();  // others' messages progress as well, and the world may have ended
      sys::cpu_relax();
      continue;
    }
    const bool looked = driven != nullptr && driven->look();
    if (attempt()) continue;
    const auto now = Clock::now();
    if (now >= limit) break;
    if (yields++ == 0) yielding = now;
    if (now - yielding < kYielding) {
      if (!looked) ::sched_yield();
      continue;
    }
    const std::uint32_t seen = at.bell();
    at.asleep.fetch_add(1);
    at.arm(true);
    if (first_sleep && !told && !sys::in_service_thread()) {
      tell_waiting(message);
      told = true;
    }
    if (!attempt() && !work.done()) {
      std::chrono::nanoseconds nap = first_sleep ? std::chrono::nanoseconds(kFirstSleep) : kSlice;
      if (limited) nap = std::clamp<std::chrono::nanoseconds>(limit - now, 1us, nap);
      at.sleep(seen, nap);
      first_sleep = false;
    }
    at.arm(false);
    at.asleep.fetch_sub(1);
    if (work.done()) break;
    attend();
  }
  // Ranks may share a core although there are enough: then the peer comes only when this one yields, and spinning
  // before that is lost time.
  if (spins > 0 && yields == 0) spins_.store(std::min(spins * 2, kMostSpins), std::memory_order_relaxed);
  if (spins > 0 && (yields == 1 || yields == 2))
    spins_.store(std::max(spins / 2, kLeastSpins), std::memory_order_relaxed);
  at.attended.fetch_sub(1, std::memory_order_relaxed);
  if (told && tellers_.fetch_sub(1) == 1) members_.messages().waiting.store(0, std::memory_order_relaxed);
  return work.done();
}

/// For whoever looks at this rank from outside. Of several threads that wait, the last to begin is seen. (The number of
/// a message is given when it is queued, which one that is waited for has been.)
void Matcher::tell_waiting(const Message& message) noexcept {
  tellers_.fetch_add(1);
  status::LaneStatus& lane = members_.messages();
  lane.peer.store(message.named_peer(), std::memory_order_relaxed);
  lane.begin(message.number,
             status::LaneStatus::pack(static_cast<std::uint8_t>(message.kind), message.dtype, ReduceOp::Sum),
             message.count);
  lane.waiting.store(1, std::memory_order_relaxed);
}

/// Threads of this rank, for a work is over.
void Matcher::wake_sleepers() noexcept {
  for (Channels* const kind : owner_.kinds) {
    if (kind->asleep.load() > 0) kind->wake();
  }
}

// --- the thread ---

void Matcher::start_thread() {
  if (stopping_) return;
  try {
    thread_ = sys::start_without_signals([this, keep = owner_.keep()] { run(); });
  } catch (const std::system_error& error) {
    log::warn("comm", "no thread for send and recv, which progress when they are waited for -- {}", error.what());
  }
}

void Matcher::run() {
  ::pthread_setname_np(::pthread_self(), "cohort-p2p");
  bool armed = false;  // peers ring
  bool fresh = false;  // since a moment ago
  std::uint64_t seen_submitted = 0;
  const auto arm = [&](bool on) {
    if (armed == on) return;
    armed = fresh = on;
    home_.arm(on);
  };
  Lock lock(mutex_);
  while (home_.pending > 0 || !stopping_) {
    const std::uint32_t bell = home_.bell();
    std::chrono::nanoseconds nap = kTick;
    // While it stops, whoever attends may be the one that stops it, in a callback.
    const bool attended = home_.attended.load(std::memory_order_relaxed) > 0 && !stopping_;
    arm(home_.pending > 0 && !attended);
    if (armed) {
      bool moved = false;
      try {
        moved = progress(lock);
        look_after(lock);
        settle(lock);
      } catch (const std::exception& error) {
        members_.end(ErrorCode::Internal, -1, submitted_,
                     std::string("unexpected in send and recv -- ") + error.what());
        fail_all();
        settle(lock);
      }
      if (moved || (home_.pending == 0 && stopping_)) {
        fresh = true;
        continue;
      }
      if (!fresh) nap = kSlice;
      fresh = false;
    } else if (home_.pending == 0 && seen_submitted == submitted_) {
      nap = kDoze;
      dozing_ = true;
    }
    seen_submitted = submitted_;
    lock.unlock();
    home_.sleep(bell, nap);
    lock.lock();
    dozing_ = false;
  }
  arm(false);
}

void Matcher::stop(bool waits) {
  bool here = false;
  {
    Lock lock(mutex_);
    stopping_ = true;
    here = thread_.get_id() == std::this_thread::get_id();
    while (waits && !thread_.joinable() && pending_ > 0) {  // it could not be started
      const bool moved = progress(lock);
      look_after(lock);
      settle(lock);
      lock.unlock();
      if (!moved) std::this_thread::sleep_for(kFirstSleep);
      lock.lock();
    }
  }
  if (thread_.joinable()) {
    home_.wake();
    if (here || !waits) {
      thread_.detach();  // the last handle went in a callback; the thread keeps the matcher and ends by itself
    } else {
      thread_.join();
    }
  }
  const Lock lock(mutex_);
  for (PeerState* const peer_state : opened_) {
    if (!here) take_answers(*peer_state);  // a refusal may have come since the last operation
    if (peer_state->late_refusal) log::warn("comm", "{}", peer_state->late_refusal->what());
  }
}

// --- endings ---

/// Whether somebody is told of what is over: an observer, or the rank's timeline.
bool Matcher::observed() const noexcept {
  return owner_.observer.load(std::memory_order_acquire) != nullptr || status::timeline::on();
}

/// Now, for those who are told.
void Matcher::mark_met(MessageWork& work) const noexcept {
  if (observed()) work.met_ = Clock::now();
}

/// Null: from any source.
void Matcher::count(const PeerState* peer_state, int works) noexcept {
  (peer_state != nullptr ? *peer_state->kind : home_).pending += static_cast<std::size_t>(works);
  pending_.store(pending_.load(std::memory_order_relaxed) + static_cast<std::size_t>(works), std::memory_order_release);
}

/// The last of a work: it stands in no list any more.
void Matcher::complete(const WorkPtr& work, std::optional<Error> error) {
  const int peer = work->message_.peer;
  PeerState* const peer_state = peer == kAnySource ? nullptr : peer_states_[static_cast<std::size_t>(peer)].get();
  if (!error && peer_state->late_refusal) error = late(*peer_state, work->message_);
  work->transfer_.reset();
  work->set_outcome(std::move(error));
  count(work->any_source_ ? nullptr : peer_state, -1);
  if (observed() || work->has_callbacks()) {
    finished_.push_back(work);
    return;
  }
  work->set_done();
  wake_sleepers();
}

/// Tells observers and callbacks, without the mutex.
void Matcher::settle(Lock& lock) {
  while (!finished_.empty()) {
    const std::vector<WorkPtr> finished = std::exchange(finished_, {});
    std::vector<std::function<void()>> callbacks;
    lock.unlock();
    for (const WorkPtr& work : finished) {
      report(work->message_, work->called_, work->met_, Clock::now(), work->outcome().has_value());
    }
    lock.lock();
    for (const WorkPtr& work : finished) {
      work->set_done();
      for (auto& callback : work->take_callbacks()) callbacks.push_back(std::move(callback));
    }
    wake_sleepers();
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
}

void Matcher::report(const Message& message, Clock::time_point called, Clock::time_point met, Clock::time_point ended,
                     bool failed) const noexcept {
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
  Observer* const observer = owner_.observer.load(std::memory_order_acquire);
  if (observer != nullptr) observer->on_collective(event);
}

}  // namespace cohort::comm::messages
