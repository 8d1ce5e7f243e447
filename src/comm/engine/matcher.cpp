#include "comm/engine/matcher.h"

#include "base/log.h"
#include "base/thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <thread>
#include <utility>

namespace cohort::comm::messages {
namespace {

using namespace std::chrono_literals;

// Interval at which the thread checks whether any thread waits for messages, instead of being woken for each message.
// The first message for which no thread waits may be late by this interval.
constexpr auto kTick = 1ms;
// The first sleep is short because, without a fence, a peer may have read that no thread sleeps before this one did.
constexpr auto kFirstSleep = 200us;
constexpr auto kSlice = 10ms;
constexpr auto kDoze = 1h;
// A waiting thread spins, then yields, then sleeps. The number of spins adapts to the success of spinning.
constexpr int kMostSpins = 4000;
constexpr int kLeastSpins = 30;
constexpr auto kYielding = 200us;
// Size from which a message wakes the thread immediately: moving it takes longer than waking the thread.
constexpr std::size_t kWorthWaking = std::size_t{256} << 10;

Message message_of(const Request& request) noexcept {
  Message message;
  message.kind = request.kind;
  message.dtype = request.dtype;
  message.peer = request.root;
  message.tag = request.tag;
  message.from = static_cast<const std::byte*>(request.input);
  message.to = static_cast<std::byte*>(request.output);
  message.count = request.kind == Kind::Send ? request.input_count : request.output_count;
  message.timeout = request.timeout;
  return message;
}

}  // namespace

Matcher::Matcher(Owner owner)
    : owner_(std::move(owner)),
      members_(owner_.members),
      home_(*owner_.kinds.front()),
      ends_(owner_.kinds, owner_.observer),
      queues_(members_, owner_.kinds, ends_),
      spins_(kMostSpins) {}

Work Matcher::submit(const Request& request) {
  Message message = message_of(request);
  const bool any = message.peer == kAnySource;
  for (Channels* const kind : owner_.kinds) {  // something may have come from the peer
    if (kind->is_driven && kind->attended.load(std::memory_order_relaxed) == 0 && (any || kind->leads_to(message.peer)))
      kind->look();
  }
  const bool is_observed = ends_.observed();
  const auto called = is_observed ? Clock::now() : Clock::time_point{};
  std::optional<Error> failed;
  std::shared_ptr<MessageWork> work;
  {
    Lock lock(mutex_);
    message.number = ++submitted_;
    if (members_.ended()) {
      failed = members_.recorded(to_string(message), message.number);
    } else if (any || !queues_.at_once(message, failed)) {
      work = std::make_shared<MessageWork>(*this, owner_.keep(), message, is_observed ? called : Clock::now());
      queues_.begin(work);
      const Channels& at = queues_.kind_of(message.peer);
      if (!at.is_driven && at.pending > 0) {
        if (!thread_.joinable()) start_thread();
        if (dozing_ || message.bytes() >= kWorthWaking) home_.wake();
      }
    }
    if (ends_.any()) ends_.settle(lock);
  }
  if (work) return Work(std::move(work));
  if (is_observed) ends_.report(message, called, called, Clock::now(), failed.has_value());
  return failed ? Work(std::make_shared<FailedWork>(*std::move(failed))) : Work();
}

void Matcher::attend() {
  if (idle()) return;
  Lock lock(mutex_);
  queues_.progress(lock);
  queues_.look_after(lock);
  ends_.settle(lock);
}

/// Makes messages progress, unless another thread does. Returns true if anything moved.
bool Matcher::attempt() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const bool moved = queues_.progress(lock);
  if (ends_.any()) ends_.settle(lock);
  return moved;
}

bool Matcher::wait_until(PendingWork& waited, Clock::time_point limit) {
  if (waited.done()) return true;
  auto& work = static_cast<MessageWork&>(waited);
  int peer = kAnySource;
  Message message;
  {
    const Lock lock(mutex_);
    message = work.message;
    if (!work.any_source) peer = message.peer;
  }
  Channels& at = queues_.kind_of(peer);
  // A receive from any source sleeps on `home_`. The communicator's thread drives the other channels meanwhile, and
  // wakes it.
  Channels* const last = peer != kAnySource ? &at : owner_.kinds.back();
  Channels* const driven = last->is_driven ? last : nullptr;
  const bool limited = limit != Clock::time_point::max();
  at.attended.fetch_add(1, std::memory_order_relaxed);
  const int spins = at.is_driven || members_.crowded() ? 0 : spins_.load(std::memory_order_relaxed);
  int yields = 0;
  bool first_sleep = true;
  bool told = false;
  Clock::time_point yielding{};
  for (int turn = 1; !work.done(); ++turn) {
    if (queues_.stirred(peer) && attempt()) continue;
    if (turn <= spins) {
      if (turn % 64 == 0) attempt();  // lets other messages progress, and notices the end of the world
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
  // Ranks may share a core although there are enough cores. Then the peer runs only when this rank yields, so spinning
  // before that loses time.
  if (spins > 0 && yields == 0) spins_.store(std::min(spins * 2, kMostSpins), std::memory_order_relaxed);
  if (spins > 0 && (yields == 1 || yields == 2))
    spins_.store(std::max(spins / 2, kLeastSpins), std::memory_order_relaxed);
  at.attended.fetch_sub(1, std::memory_order_relaxed);
  if (told && tellers_.fetch_sub(1) == 1) members_.messages().waiting.store(0, std::memory_order_relaxed);
  return work.done();
}

/// Reports the wait in the status page, for observers outside of the process. If several threads wait, the last one to
/// begin is shown. A message that is waited for has been queued, so it has a number.
void Matcher::tell_waiting(const Message& message) noexcept {
  tellers_.fetch_add(1);
  status::LaneStatus& lane = members_.messages();
  lane.peer.store(message.named_peer(), std::memory_order_relaxed);
  lane.begin(message.number,
             status::LaneStatus::pack(static_cast<std::uint8_t>(message.kind), message.dtype, ReduceOp::Sum),
             message.count);
  lane.waiting.store(1, std::memory_order_relaxed);
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
  bool armed = false;  // peers wake this thread
  bool fresh = false;  // messages have just moved, or `armed` has just changed
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
    // While the matcher stops, the attending thread may be the one that stops it, in a callback.
    const bool attended = home_.attended.load(std::memory_order_relaxed) > 0 && !stopping_;
    arm(home_.pending > 0 && !attended);
    if (armed) {
      bool moved = false;
      try {
        moved = queues_.progress(lock);
        queues_.look_after(lock);
        ends_.settle(lock);
      } catch (const std::exception& error) {
        members_.end(ErrorCode::Internal, -1, submitted_,
                     std::string("unexpected in send and recv -- ") + error.what());
        queues_.fail_all();
        ends_.settle(lock);
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
    while (waits && !thread_.joinable() && !idle()) {  // the thread could not be started
      const bool moved = queues_.progress(lock);
      queues_.look_after(lock);
      ends_.settle(lock);
      lock.unlock();
      if (!moved) std::this_thread::sleep_for(kFirstSleep);
      lock.lock();
    }
  }
  if (thread_.joinable()) {
    home_.wake();
    if (here || !waits) {
      thread_.detach();  // a callback destroyed the last handle; the thread keeps the matcher alive and ends by itself
    } else {
      thread_.join();
    }
  }
  const Lock lock(mutex_);
  queues_.log_refusals(!here);
}

}  // namespace cohort::comm::messages
