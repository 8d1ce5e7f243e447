// Waiting, the thread that works when no other thread waits, reports of works that are over, and failures.
#include "base/log.h"
#include "base/thread.h"
#include "comm/engine/matcher.h"
#include "comm/transport/transport.h"
#include "telemetry/timeline.h"

#include <fmt/format.h>

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
// A message for which no thread waits may be late by this interval, the first time.
constexpr auto kTick = 1ms;
// The first sleep is short: without a fence, a peer may have read that no thread sleeps before this one went to sleep.
constexpr auto kFirstSleep = 200us;
constexpr auto kSlice = 10ms;
constexpr auto kDoze = 1h;
// Waiting spins, for a number of times that adapts to the success of spinning, then yields, then sleeps.
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

/// Makes messages progress, unless another thread does. Returns true if anything moved.
bool Matcher::attempt() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const bool moved = progress(lock);
  if (!finished_.empty()) settle(lock);
  return moved;
}

/// True if messages of a peer may progress; null stands for all peers, which are all open then: the list is constant.
bool Matcher::stirred(const PeerState* peer_state) const noexcept {
  if (peer_state != nullptr) return peer_state->channel->stirred();
  return std::any_of(opened_.begin(), opened_.end(), [](const PeerState* each) { return each->channel->stirred(); });
}

bool Matcher::wait_until(PendingWork& waited, Clock::time_point limit) {
  if (waited.done()) return true;
  auto& work = static_cast<MessageWork&>(waited);
  const PeerState* peer_state = nullptr;  // null: all peers
  Message message;
  {
    const Lock lock(mutex_);
    message = work.message_;
    if (!work.any_source_) peer_state = peer_states_[static_cast<std::size_t>(message.peer)].get();
  }
  Channels& at = peer_state != nullptr ? *peer_state->kind : home_;
  // A receive from any source sleeps on `home_`. The communicator's thread drives the other channels meanwhile, and
  // wakes it.
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
  // Ranks may share a core although there are enough cores: then the peer runs only when this rank yields, and spinning
  // before that is lost time.
  if (spins > 0 && yields == 0) spins_.store(std::min(spins * 2, kMostSpins), std::memory_order_relaxed);
  if (spins > 0 && (yields == 1 || yields == 2))
    spins_.store(std::max(spins / 2, kLeastSpins), std::memory_order_relaxed);
  at.attended.fetch_sub(1, std::memory_order_relaxed);
  if (told && tellers_.fetch_sub(1) == 1) members_.messages().waiting.store(0, std::memory_order_relaxed);
  return work.done();
}

/// Reports the wait in the status page, for observers outside of the process. If several threads wait, the last one to
/// begin is shown. A message that is waited for has been queued, and so has its number.
void Matcher::tell_waiting(const Message& message) noexcept {
  tellers_.fetch_add(1);
  status::LaneStatus& lane = members_.messages();
  lane.peer.store(message.named_peer(), std::memory_order_relaxed);
  lane.begin(message.number,
             status::LaneStatus::pack(static_cast<std::uint8_t>(message.kind), message.dtype, ReduceOp::Sum),
             message.count);
  lane.waiting.store(1, std::memory_order_relaxed);
}

/// Wakes threads of this rank after the end of a work.
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
    while (waits && !thread_.joinable() && pending_ > 0) {  // the thread could not be started
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
      thread_.detach();  // a callback destroyed the last handle; the thread keeps the matcher alive and ends by itself
    } else {
      thread_.join();
    }
  }
  const Lock lock(mutex_);
  for (PeerState* const peer_state : opened_) {
    if (!here) take_answers(*peer_state);  // gets refusals that have come since the last operation
    if (peer_state->late_refusal) log::warn("comm", "{}", peer_state->late_refusal->what());
  }
}

// --- endings ---

/// True if finished works are reported: to an observer, or in the rank's timeline.
bool Matcher::observed() const noexcept {
  return owner_.observer.load(std::memory_order_acquire) != nullptr || status::timeline::on();
}

/// Notes the time at which a receive and its message met, for observers.
void Matcher::mark_met(MessageWork& work) const noexcept {
  if (observed()) work.met_ = Clock::now();
}

/// Changes the counts of works that are not over. `peer_state` is null for a receive from any source.
void Matcher::count(const PeerState* peer_state, int works) noexcept {
  (peer_state != nullptr ? *peer_state->kind : home_).pending += static_cast<std::size_t>(works);
  pending_.store(pending_.load(std::memory_order_relaxed) + static_cast<std::size_t>(works), std::memory_order_release);
}

/// Ends a work, which is in no list any more.
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

/// Reports finished works to observers, sets them done and calls their callbacks. Unlocks the mutex meanwhile.
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
    callbacks.clear();  // without the mutex, since destructors of what callbacks hold may do anything
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

namespace {

// Failures of sends and receives: refusals, deadlines, lost peers, the end of the world.

using namespace std::chrono_literals;

constexpr auto kLook = 20ms;

/// Returns " (pid 12)" for "pid 12", and nothing for nothing.
std::string in_brackets(const std::string& pid) { return pid.empty() ? "" : fmt::format(" ({})", pid); }

}  // namespace

std::string to_string(const Message& message) {
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer);
  return fmt::format("{}({}[{}], {} {}, tag {})", name_of(message.kind), cohort::to_string(message.dtype),
                     message.count, message.kind == Kind::Send ? "to" : "from", peer, message.tag);
}

/// The error of either side of a refused message, with the sent and the expected type and count.
Error Matcher::refusal(const Message& own, const MessageHeader& header) const {
  const bool sends = own.kind == Kind::Send;
  const std::string& host = members_.host_name(rank_);
  const std::string why =
      fmt::format("rank {} sends {}[{}] (tag {}) to rank {}, which receives {}[{}]", sends ? rank_ : own.peer,
                  cohort::to_string(header.dtype), header.count, header.tag, sends ? own.peer : rank_,
                  cohort::to_string(header.expected), header.expected_count);
  ErrorContext context;
  context.rank = rank_;
  context.host = host;
  context.peer = own.peer;
  context.operation = to_string(own);
  context.sequence = own.number;
  context.cause = why;
  return Error(ErrorCode::Mismatch,
               fmt::format("{} refused -- rank {} ({}) -- {} -- give both the same type and count", name_of(own.kind),
                           rank_, host, why),
               std::move(context));
}

/// The error of a send that was over before its receiver refused it. The next operation with that rank reports it.
Error Matcher::late(PeerState& peer_state, const Message& message) const {
  const Error refused = *std::exchange(peer_state.late_refusal, std::nullopt);
  return Error(
      ErrorCode::Mismatch,
      fmt::format("{}; that send was over before it was refused, so {} reports it, which was itself carried out",
                  refused.what(), to_string(message)),
      refused.context());
}

/// Returns all works that wait for the peer, including receives from any source.
std::vector<Matcher::WorkPtr> Matcher::waiting(const PeerState& peer_state) const {
  std::vector<WorkPtr> all(peer_state.receives.begin(), peer_state.receives.end());
  all.insert(all.end(), peer_state.offered.begin(), peer_state.offered.end());
  all.insert(all.end(), peer_state.moving.begin(), peer_state.moving.end());
  for (const Outgoing& outgoing : peer_state.outbox) {
    if (outgoing.work) all.push_back(outgoing.work);
  }
  all.insert(all.end(), any_receives_.begin(), any_receives_.end());
  return all;
}

std::string Matcher::timed_out(const PeerState& peer_state, const Message& message) const {
  const bool any = message.peer == kAnySource;
  std::string why = any ? sources_text()
                        : fmt::format("rank {}{} {}", message.peer, in_brackets(members_.pid_text(message.peer)),
                                      message.kind == Kind::Send ? "did not receive it" : "did not send it");
  if (!any && message.kind == Kind::Recv && !peer_state.unexpected.empty()) {
    const MessageHeader& first = peer_state.unexpected.front().header;
    why += fmt::format("; {} of its messages wait to be received, the first is {}[{}] with tag {}",
                       peer_state.unexpected.size(), cohort::to_string(first.dtype), first.count, first.tag);
  }
  return fmt::format(
      "{} timed out after {} ms -- rank {} ({}) -- {} -- is it stopped, slow, or in another branch of the program? "
      "give a longer timeout if it is only slow",
      to_string(message), message.timeout.count(), rank_, members_.host_name(rank_), why);
}

/// Names the ranks for which a receive from any source has waited, and their messages that wait to be received.
std::string Matcher::sources_text() const {
  std::string text = "none of the ranks";
  std::string others;
  for (const auto& peer_state : peer_states_) {  // the receive has opened all except this rank's own
    if (!peer_state) continue;
    text += fmt::format("{} {}{}", text.back() == 's' ? "" : ",", peer_state->peer,
                        in_brackets(members_.pid_text(peer_state->peer)));
    if (peer_state->unexpected.empty()) continue;
    others += fmt::format("; {} messages of rank {} wait to be received, the first has tag {}",
                          peer_state->unexpected.size(), peer_state->peer, peer_state->unexpected.front().header.tag);
  }
  return text + " sent it" + others;
}

/// True if the loss of a peer ends a work that waits for the peer. A receive from any source goes on if the peer left
/// in order and another peer may still send.
bool Matcher::ends_with(const MessageWork& work, std::string_view how) const {
  if (work.message_.peer != kAnySource || how != transport::kLeft) return true;
  return std::all_of(opened_.begin(), opened_.end(),
                     [&](const PeerState* other) { return members_.lost(other->peer).has_value(); });
}

/// Called repeatedly. Ends the world if a peer for which a work waits is lost, or if a deadline has passed.
void Matcher::look_after(Lock& lock) {
  if (members_.ended()) return fail_all();
  const auto now = Clock::now();
  if (now - looked_ < kLook || idle()) return;
  looked_ = now;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    PeerState& peer_state = *opened_[i];
    if (waiting(peer_state).empty()) continue;
    if (const auto how = members_.lost(peer_state.peer)) {
      progress(lock);  // the peer may have sent everything before it ended
      if (members_.ended()) return fail_all();
      const auto still = waiting(peer_state);
      const auto found =
          std::find_if(still.begin(), still.end(), [&](const auto& one) { return ends_with(*one, *how); });
      if (found != still.end()) return end_lost((*found)->message_, peer_state.peer, *how);
    }
    for (const WorkPtr& work : waiting(peer_state)) {
      if (now < work->deadline()) continue;
      return end(work->message_, work->message_.named_peer(), ErrorCode::Timeout,
                 timed_out(peer_state, work->message_));
    }
  }
}

void Matcher::end(const Message& message, int peer, ErrorCode code, const std::string& text) {
  members_.end(code, peer, message.number, text);
  fail_all();
}

void Matcher::end_lost(const Message& message, int peer, const std::string& how) {
  const std::string pid = members_.pid_text(peer);
  end(message, peer, ErrorCode::PeerLost,
      fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) -- {} -- see the output of rank {}; form a new "
                  "communicator",
                  to_string(message), rank_, members_.host_name(rank_), peer, members_.host_name(peer),
                  pid.empty() ? "" : ", " + pid, how, peer));
}

/// Fails all works after the end of the world. A work whose data a thread is moving fails when that thread returns.
void Matcher::fail_all() {
  members_.tell_if_ended();
  std::vector<WorkPtr> all(any_receives_.begin(), any_receives_.end());
  any_receives_.clear();
  for (PeerState* const peer_state : opened_) {
    for (WorkPtr& work : waiting(*peer_state)) {
      if (!work->transfer_ || !work->transfer_->busy) all.push_back(std::move(work));
    }
    peer_state->receives.clear();
    peer_state->offered.clear();
    peer_state->outbox.clear();
    std::erase_if(peer_state->moving, [](const WorkPtr& work) { return !work->transfer_->busy; });
  }
  for (const WorkPtr& work : all) {
    complete(work, members_.recorded(to_string(work->message_), work->message_.number));
  }
}

/// Fails a work whose payload could not be moved: its peer is lost, or reading the peer's memory is not allowed.
void Matcher::fail_moving(Lock& lock, const WorkPtr& work, const Error& why) {
  const int peer = work->message_.peer;
  work->transfer_->busy = true;  // so that no other thread continues the transfer meanwhile
  // The memory of a process that dies is gone shortly before the process is seen as dying.
  std::optional<std::string> how;
  for (int i = 0; i < 100 && !how && !members_.ended(); ++i) {
    lock.unlock();
    how = members_.lost(peer);
    if (!how) std::this_thread::sleep_for(2ms);
    lock.lock();
  }
  work->transfer_->busy = false;
  if (how) return end_lost(work->message_, peer, *how + " while its message was read");
  end(work->message_, peer, why.code(),
      fmt::format("{} failed -- rank {} ({}) -- {}", to_string(work->message_), rank_, members_.host_name(rank_),
                  why.what()));
}

}  // namespace cohort::comm::messages
