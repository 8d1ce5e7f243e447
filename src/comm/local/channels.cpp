// Calls, waiting and progress. What goes through the lanes is in channels_cells.cpp.
#include "comm/local/channels.h"

#include "base/log.h"
#include "comm/local/plan.h"
#include "comm/local/waiting.h"
#include "status/timeline.h"
#include "sys/futex.h"
#include "sys/thread.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <system_error>
#include <utility>

namespace cohort::comm::local {
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
// From this size on the thread is woken at once: it has more to do than being woken costs.
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
  message.claim = request.claim;
  return message;
}

}  // namespace

// --- Channels ---

Channels::Channels(Owner owner)
    : world_(owner.world),
      guard_(owner.guard),
      observer_(owner.observer),
      keep_(std::move(owner.keep)),
      rank_(world_.rank()),
      layout_(world_.layout().channel_layout()),
      base_(world_.layout().channels(world_.control())),
      pulls_allowed_(world_.header().plan.cross_copy_bytes != kNever),
      channels_(static_cast<std::size_t>(world_.size())),
      spins_(kMostSpins) {
  opened_.reserve(channels_.size());
}

Channels::Channel& Channels::open(int peer) {
  auto& channel = channels_[static_cast<std::size_t>(peer)];
  if (!channel) {
    channel = std::make_unique<Channel>();
    channel->peer = peer;
    channel->in = Lane(layout_, base_, peer, rank_);
    channel->out = Lane(layout_, base_, rank_, peer);
    channel->room.store(layout_.cells(), std::memory_order_relaxed);
    opened_.push_back(channel.get());
  }
  return *channel;
}

void Channels::open_all() {
  for (int peer = 0; peer < world_.size(); ++peer) {
    if (peer != rank_) open(peer);
  }
}

Work Channels::submit(const Request& request) {
  Message message = message_of(request);
  const bool observed = observer_.load(std::memory_order_acquire) != nullptr;
  const auto called = observed ? Clock::now() : Clock::time_point{};
  std::optional<Error> failed;
  WorkPtr work;
  {
    Lock lock(mutex_);
    message.number = ++submitted_;
    message.peer_name = message.peer == kAnySource ? -1 : world_.name(message.peer);
    if (world_.ended()) {
      failed = world_.recorded(to_string(message), message.number);
      if (message.claim) message.claim->take(kWithinHost);
    } else if (message.peer == kAnySource) {
      work = pend(nullptr, message, called);
    } else {
      Channel& channel = open(message.peer);
      const bool over =
          message.kind == Kind::Send ? send_at_once(channel, message) : receive_at_once(channel, message, failed);
      if (!over) {
        work = pend(&channel, message, called);
      } else if (!failed && channel.late_refusal) {
        failed = late(channel, message);
        channel.late_refusal.reset();
      }
    }
    if (!finished_.empty()) settle(lock);
  }
  if (work) return Work(std::move(work));
  if (observed) report(message, called, called, Clock::now(), failed.has_value());
  return failed ? Work(std::make_shared<FailedWork>(*std::move(failed))) : Work();
}

Channels::WorkPtr Channels::pend(Channel* channel, const Message& message, Clock::time_point called) {
  if (called == Clock::time_point{}) called = Clock::now();
  WorkPtr work = std::make_shared<ChannelWork>(*this, keep_(), message, called);
  ++pending_;
  if (message.kind == Kind::Send) {
    send(*channel, work);
  } else if (channel != nullptr) {
    receive(*channel, work);
  } else {
    receive_any(work);
  }
  if (pending_ > 0) {
    if (!thread_.joinable()) start_thread();
    if (dozing_ || message.bytes() >= kWorthWaking) wake();
  }
  return work;
}

void Channels::start_thread() {
  if (stopping_) return;
  try {
    thread_ = sys::start_without_signals([this, keep = keep_()] { run(); });
  } catch (const std::system_error& error) {
    log::warn("comm", "no thread for send and recv, which progress when they are waited for -- {}", error.what());
  }
}

void Channels::stop() {
  bool here = false;
  {
    Lock lock(mutex_);
    stopping_ = true;
    here = thread_.get_id() == std::this_thread::get_id();
    while (!thread_.joinable() && pending_ > 0) {  // it could not be started
      const bool moved = progress(lock);
      look_after(lock);
      settle(lock);
      lock.unlock();
      if (!moved) std::this_thread::sleep_for(kFirstSleep);
      lock.lock();
    }
  }
  if (world_.size() > 1) wake();  // a world of one has no channels
  if (thread_.joinable()) {
    if (here) {
      thread_.detach();  // the last handle went in a callback; the thread keeps the channels and ends by itself
    } else {
      thread_.join();
    }
  }
  Lock lock(mutex_);
  if (!here && world_.size() > 1) {  // a refusal may be among what has come since the last operation
    progress(lock);
    settle(lock);
  }
  for (const Channel* const channel : opened_) {
    if (channel->late_refusal) log::warn("comm", "{}", channel->late_refusal->what());
  }
}

// --- waiting ---

bool Channels::stirred(const Channel& channel) const noexcept {
  if (channel.has_come() || pulls_to_do_.load(std::memory_order_relaxed) > 0) return true;
  return channel.blocked.load(std::memory_order_relaxed) &&
         channel.out.head().taken.load(std::memory_order_relaxed) + channel.out.cells() >
             channel.room.load(std::memory_order_relaxed);
}

/// Of all peers. They have all been opened by then, so the list does not change any more.
bool Channels::stirred() const noexcept {
  return std::any_of(opened_.begin(), opened_.end(), [&](const Channel* channel) { return stirred(*channel); });
}

/// Progresses unless another thread does; true if something has moved.
bool Channels::attempt() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock) return false;
  const bool moved = progress(lock);
  if (!finished_.empty()) settle(lock);
  return moved;
}

bool Channels::wait_until(PendingWork& waited, Clock::time_point limit) {
  if (waited.done()) return true;
  auto& work = static_cast<ChannelWork&>(waited);
  const Channel* channel = nullptr;  // null: all
  Message told;
  {
    const Lock lock(mutex_);
    told = work.message_;
    if (!work.any_source_) channel = channels_[static_cast<std::size_t>(told.peer)].get();
  }
  const bool limited = limit != Clock::time_point::max();
  attended_.fetch_add(1, std::memory_order_relaxed);
  const int spins = world_.crowded() ? 0 : spins_.load(std::memory_order_relaxed);
  int yields = 0;
  bool first_sleep = true;
  Clock::time_point yielding{};
  for (int turn = 1; !work.done(); ++turn) {
    if ((channel != nullptr ? stirred(*channel) : stirred()) && attempt()) continue;
    if (turn <= spins) {
      if (turn % 64 == 0) attempt();  // others' messages progress as well, and the world may have ended
      cpu_relax();
      continue;
    }
    if (attempt()) continue;
    const auto now = Clock::now();
    if (now >= limit) break;
    if (yields++ == 0) yielding = now;
    if (now - yielding < kYielding) {
      ::sched_yield();
      continue;
    }
    Doorbell& own = doorbell(rank_);
    const std::uint32_t seen = own.bell.load();
    asleep_.fetch_add(1);
    own.sleepers.fetch_add(1);
    if (first_sleep && !sys::in_service_thread()) tell_waiting(told);
    if (!attempt() && !work.done()) {
      std::chrono::nanoseconds nap = first_sleep ? std::chrono::nanoseconds(kFirstSleep) : kSlice;
      if (limited) nap = std::clamp<std::chrono::nanoseconds>(limit - now, 1us, nap);
      sys::futex_wait(own.bell, seen, nap);
      first_sleep = false;
    }
    own.sleepers.fetch_sub(1);
    asleep_.fetch_sub(1);
    if (work.done()) break;
    Lock lock(mutex_);
    progress(lock);
    look_after(lock);
    settle(lock);
  }
  // Ranks may share a core although there are enough: then the peer comes only when this one yields, and spinning
  // before that is lost time.
  if (spins > 0 && yields == 0) spins_.store(std::min(spins * 2, kMostSpins), std::memory_order_relaxed);
  if (spins > 0 && (yields == 1 || yields == 2))
    spins_.store(std::max(spins / 2, kLeastSpins), std::memory_order_relaxed);
  if (attended_.fetch_sub(1, std::memory_order_relaxed) == 1 && !first_sleep) {
    world_.messages().waiting.store(0, std::memory_order_relaxed);
  }
  return work.done();
}

/// For whoever looks at this rank from outside. Of several threads that wait, the last to begin is seen. (The number of
/// a message is given when it is queued, which one that is waited for has been.)
void Channels::tell_waiting(const Message& message) noexcept {
  status::LaneStatus& lane = world_.messages();
  lane.peer.store(message.peer_name, std::memory_order_relaxed);
  lane.begin(message.number,
             status::LaneStatus::pack(static_cast<std::uint8_t>(message.kind), message.dtype, ReduceOp::Sum),
             message.count);
  lane.waiting.store(1, std::memory_order_relaxed);
}

void Channels::ring(int rank) noexcept {
  Doorbell& door = doorbell(rank);
  if (door.sleepers.load(std::memory_order_relaxed) == 0) return;
  door.bell.fetch_add(1);
  sys::futex_wake_all(door.bell);
}

/// The thread, and whoever of this rank sleeps.
void Channels::wake() noexcept {
  Doorbell& own = doorbell(rank_);
  own.bell.fetch_add(1);
  sys::futex_wake_all(own.bell);
}

void Channels::run() {
  ::pthread_setname_np(::pthread_self(), "cohort-p2p");
  Doorbell& own = doorbell(rank_);
  bool armed = false;  // peers ring
  bool fresh = false;  // since a moment ago
  std::uint64_t seen_submitted = 0;
  const auto arm = [&](bool on) {
    if (armed == on) return;
    armed = fresh = on;
    own.sleepers.fetch_add(on ? 1u : ~0u);
  };
  Lock lock(mutex_);
  while (pending_ > 0 || !stopping_) {
    const std::uint32_t bell = own.bell.load();
    std::chrono::nanoseconds nap = kTick;
    // While it stops, whoever attends may be the one that stops it, in a callback.
    const bool attended = attended_.load(std::memory_order_relaxed) > 0 && !stopping_;
    arm(pending_ > 0 && !attended);
    if (armed) {
      bool moved = false;
      try {
        moved = progress(lock);
        look_after(lock);
        settle(lock);
      } catch (const std::exception& error) {
        world_.record(ErrorCode::Internal, -1, submitted_,
                      std::string("unexpected in send and recv -- ") + error.what());
        fail_all();
        settle(lock);
      }
      if (moved || (pending_ == 0 && stopping_)) {
        fresh = true;
        continue;
      }
      if (!fresh) nap = kSlice;
      fresh = false;
    } else if (pending_ == 0 && seen_submitted == submitted_) {
      nap = kDoze;
      dozing_ = true;
    }
    seen_submitted = submitted_;
    lock.unlock();
    sys::futex_wait(own.bell, bell, nap);
    lock.lock();
    dozing_ = false;
  }
  arm(false);
}

/// Moves what can be moved now. The mutex is held on entry and on return, but not all the time.
bool Channels::progress(Lock& lock) {
  if (world_.ended()) {
    if (pending_ == 0) return false;
    fail_all();
    return !finished_.empty();
  }
  if (!claims_.empty()) drop_elsewhere();
  bool moved = false;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    Channel& channel = *opened_[i];
    if (channel.wants_cells() && drain(channel)) moved = true;
    if (!channel.outbox.empty() && flush(channel)) moved = true;
    if (!channel.leaving.empty() && send_fragments(channel)) moved = true;
  }
  if (!pulls_.empty() && pull(lock)) moved = true;
  return moved;
}

// --- endings ---

/// The last of a work: it stands in no list any more.
void Channels::complete(const WorkPtr& work, std::optional<Error> error) {
  if (!error && !work->message_.lies_elsewhere()) {
    Channel& channel = *channels_[static_cast<std::size_t>(work->message_.peer)];
    if (channel.late_refusal) {
      error = late(channel, work->message_);
      channel.late_refusal.reset();
    }
  }
  if (work->message_.claim) work->message_.claim->take(kWithinHost);  // if only to say how it failed
  work->set_outcome(std::move(error));
  --pending_;
  if (observer_.load(std::memory_order_acquire) != nullptr || work->has_callbacks()) {
    finished_.push_back(work);
    return;
  }
  work->set_done();
  if (asleep_.load() > 0) wake();
}

/// Tells observers and callbacks, without the mutex.
void Channels::settle(Lock& lock) {
  while (!finished_.empty()) {
    const std::vector<WorkPtr> finished = std::exchange(finished_, {});
    std::vector<std::function<void()>> callbacks;
    lock.unlock();
    for (const WorkPtr& work : finished) {
      if (work->message_.lies_elsewhere()) continue;
      report(work->message_, work->called_, work->met_, Clock::now(), work->outcome().has_value());
    }
    lock.lock();
    for (const WorkPtr& work : finished) {
      work->set_done();
      for (auto& callback : work->take_callbacks()) callbacks.push_back(std::move(callback));
    }
    if (asleep_.load() > 0) wake();
    lock.unlock();
    for (const auto& callback : callbacks) callback();
    lock.lock();
  }
}

void Channels::report(const Message& message, Clock::time_point called, Clock::time_point met, Clock::time_point ended,
                      bool failed) const noexcept {
  Observer* const observer = observer_.load(std::memory_order_acquire);
  if (observer == nullptr && !status::timeline::on()) return;
  CollectiveEvent event;
  event.operation = name_of(message.kind);
  event.sequence = message.number;
  event.bytes = message.bytes();
  event.called = event.begun = called;
  event.ended = ended;
  event.waited = (met == Clock::time_point{} ? ended : met) - called;
  event.failed = failed;
  status::timeline::add(event);
  if (observer != nullptr) observer->on_collective(event);
}

}  // namespace cohort::comm::local
