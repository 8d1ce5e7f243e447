#include "horovod/named/requests.h"

#include "base/env.h"

#include <fmt/format.h>

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace cohort::named {
namespace {

std::size_t words_for(std::size_t slots) noexcept { return (slots + kWordBits - 1) / kWordBits; }

}  // namespace

Requests::Requests(int rank, int size, const EngineOptions& options, std::chrono::milliseconds timeout,
                   std::shared_ptr<Wakeup> wakeup)
    : rank_(rank),
      size_(size),
      options_(options),
      timeout_(timeout),
      process_(::getpid()),
      wakeup_(std::move(wakeup)),
      cache_(options.cache_capacity) {}

bool Requests::in_child() const noexcept { return process_ != ::getpid(); }

// --- users' calls ---

void Requests::check_open() const {
  if (ended_) throw *ended_;
  if (join_) {
    raise(ErrorCode::InvalidArgument,
          "this rank has joined: it has said that it has no more data -- wait for the join before the next operation");
  }
}

// NCCL uses one GPU per communicator. A second GPU is refused here, since a later refusal would fail other ranks, too.
void Requests::check_gpu(const Pending& asked) {
  if (asked.device.type == DeviceType::CPU) return;
  if (gpu_ < 0) gpu_ = asked.device.index;
  if (gpu_ == asked.device.index || env::text(env::kNccl) == "off") return;
  raise(ErrorCode::InvalidArgument,
        "{} '{}': its memory is on cuda:{}, and that of operations before it was on cuda:{} -- rank {} -- keep to one "
        "GPU in each process, or set COHORT_NCCL=off on all ranks",
        name_of(asked.request.kind), asked.request.name, asked.device.index, gpu_, rank_);
}

PendingPtr Requests::make(Request request, Clock::time_point now) const {
  auto signature = signature_of(request, size_);
  if (!signature) throw signature.error();
  auto pending = std::make_shared<Pending>();
  pending->signature = *std::move(signature);
  pending->request = std::move(request);
  pending->device = device_of(pending->request);
  if (!in_child()) pending->marks = marks_of(pending->request, rank_);
  pending->state = std::make_shared<State>(wakeup_, pending->request.name);
  pending->since = now;
  pending->report_at = now + std::min(options_.stall_after, timeout_);
  return pending;
}

void Requests::enqueue(std::span<const PendingPtr> made) {
  if (in_child()) {
    raise(ErrorCode::InvalidArgument,
          "this engine belongs to the process that made it -- this is a forked child of it (pid {})", ::getpid());
  }
  bool rouse = false;
  {
    const std::lock_guard lock(mutex_);
    check_open();
    for (const PendingPtr& pending : made) check_gpu(*pending);
    std::size_t accepted = 0;
    while (accepted < made.size() && pending_.emplace(made[accepted]->request.name, made[accepted]).second) ++accepted;
    if (accepted < made.size()) {
      for (std::size_t i = 0; i < accepted; ++i) pending_.erase(made[i]->request.name);
      raise(ErrorCode::InvalidArgument,
            "{} '{}': an operation of this name is still under way -- rank {} -- wait for it, or use another name",
            name_of(made[accepted]->request.kind), made[accepted]->request.name, rank_);
    }
    for (const PendingPtr& pending : made) {
      if (const auto slot = cache_.find(pending->request.name, pending->signature)) {
        set_slot(pending, *slot);
      } else {
        news_.push_back(pending);
      }
      look_at_ = std::min(look_at_, pending->report_at);
    }
    // If the flag was already set, the thread checks for requests before it sleeps.
    rouse = !made.empty() && !stirred_.exchange(true);
  }
  if (rouse) wakeup_->request();
}

Handle Requests::submit(Request request) {
  const PendingPtr made = make(std::move(request), Clock::now());
  enqueue(std::span(&made, 1));
  return Handle(made->state);
}

std::vector<Handle> Requests::submit(std::vector<Request> requests) {
  const auto now = Clock::now();
  std::vector<PendingPtr> made;
  made.reserve(requests.size());
  for (Request& request : requests) made.push_back(make(std::move(request), now));
  enqueue(made);
  std::vector<Handle> handles;
  handles.reserve(made.size());
  for (const PendingPtr& pending : made) handles.emplace_back(pending->state);
  return handles;
}

Handle Requests::join() {
  if (in_child()) raise(ErrorCode::InvalidArgument, "join: this engine belongs to the parent process");
  auto state = std::make_shared<State>(wakeup_, "join");
  {
    const std::lock_guard lock(mutex_);
    check_open();
    join_ = state;
  }
  if (!stirred_.exchange(true)) wakeup_->notify();
  return Handle(std::move(state));
}

// --- contributions ---

Requests::Clock::time_point Requests::look_at() const {
  const std::lock_guard lock(mutex_);
  return look_at_;
}

std::vector<Stalled> Requests::take_stalled() {
  std::vector<Stalled> stalled;
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (now < look_at_) return stalled;
  look_at_ = Clock::time_point::max();
  for (const auto& [name, pending] : pending_) {
    const auto waited = std::chrono::duration_cast<std::chrono::milliseconds>(now - pending->since);
    const bool waits = pending->stage == Pending::Stage::Described || pending->stage == Pending::Stage::Slot;
    if (now >= pending->report_at) {
      if (waits) stalled.push_back({std::string(name), waited.count(), waited >= timeout_});
      const auto expires = pending->since + timeout_;
      pending->report_at = now + options_.stall_after;
      if (expires > now) pending->report_at = std::min(pending->report_at, expires);
    }
    look_at_ = std::min(look_at_, pending->report_at);
  }
  return stalled;
}

Requests::News Requests::take_news() {
  News own;
  const std::lock_guard lock(mutex_);
  stirred_ = false;
  if (join_ && !join_announced_) {
    join_announced_ = own.joins = true;
    // Joined ranks set all bits, so outstanding requests are described, to tell them from bits without a request.
    for (std::size_t slot = 0; slot < by_slot_.size(); ++slot) {
      if (PendingPtr pending = clear_slot(slot)) {
        pending->stage = Pending::Stage::New;
        news_.push_back(std::move(pending));
      }
    }
  }
  own.described = std::exchange(news_, {});
  for (const PendingPtr& one : own.described) one->stage = Pending::Stage::Described;
  own.bits = bits_;
  return own;
}

// --- names and slots ---

void Requests::set_slot(const PendingPtr& pending, std::size_t slot) {
  pending->stage = Pending::Stage::Slot;
  by_slot_[slot] = pending;
  bits_[slot / kWordBits] |= std::uint64_t{1} << (slot % kWordBits);
}

PendingPtr Requests::clear_slot(std::size_t slot) {
  bits_[slot / kWordBits] &= ~(std::uint64_t{1} << (slot % kWordBits));
  return std::exchange(by_slot_[slot], nullptr);
}

/// Handles a freed slot. If this rank had set the slot's bit, it describes the name in the next round.
void Requests::demote(const Cache::Freed& freed) {
  PendingPtr pending = clear_slot(freed.slot);
  if (!pending) return;
  pending->stage = Pending::Stage::New;
  news_.push_back(std::move(pending));
  stirred_ = true;
}

void Requests::free_slot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (const auto freed = cache_.erase(name)) demote(*freed);
}

PendingPtr Requests::take_described(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(name);
  if (found == pending_.end() || found->second->stage != Pending::Stage::Described) return nullptr;
  found->second->stage = Pending::Stage::Running;
  return found->second;
}

PendingPtr Requests::take_expired(const std::string& name) {
  PendingPtr own = take_described(name);
  const std::lock_guard lock(mutex_);
  if (const auto freed = cache_.erase(name)) {
    if (PendingPtr waiting = clear_slot(freed->slot)) own = std::move(waiting);
  }
  return own;
}

void Requests::take_slots(std::span<const std::uint64_t> words, const std::vector<bool>& joined,
                          std::vector<Ready>& ready) {
  const std::lock_guard lock(mutex_);
  for (std::size_t word = 0; word < words.size(); ++word) {
    for (std::uint64_t rest = words[word]; rest != 0; rest &= rest - 1) {
      const std::size_t slot = word * kWordBits + static_cast<std::size_t>(std::countr_zero(rest));
      if (slot >= cache_.width() || !cache_.at(slot)) continue;
      cache_.touch(slot);
      PendingPtr own = clear_slot(slot);
      if (own) own->stage = Pending::Stage::Running;
      ready.push_back({cache_.at(slot), joined, std::move(own)});
    }
  }
}

void Requests::remember(const AgreedPtr& agreed, const Pending& own) {
  const std::lock_guard lock(mutex_);
  if (const auto freed = cache_.insert(agreed, own.signature)) demote(*freed);
  bits_.resize(words_for(cache_.width()), 0);
  by_slot_.resize(cache_.width());
}

// --- endings ---

void Requests::finish(std::span<const PendingPtr> done, const std::optional<Error>& error) {
  {
    const std::lock_guard lock(mutex_);
    for (const PendingPtr& one : done) {
      if (one) pending_.erase(one->request.name);
    }
  }
  for (const PendingPtr& one : done) {
    if (one) one->state->end(error);
  }
}

void Requests::finish_join(int last_joined) {
  std::shared_ptr<State> done;
  {
    const std::lock_guard lock(mutex_);
    done = std::exchange(join_, nullptr);
    join_announced_ = false;
  }
  if (!done) return;
  done->result.last_joined = last_joined;
  done->end(std::nullopt);
}

void Requests::end(const Error& why) {
  std::vector<PendingPtr> outstanding;
  std::shared_ptr<State> joining;
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) ended_ = why;
    for (const auto& [name, pending] : pending_) outstanding.push_back(pending);
    pending_.clear();
    news_.clear();
    by_slot_.clear();
    joining = std::exchange(join_, nullptr);
  }
  for (const PendingPtr& one : outstanding) {
    if (one != outstanding.front()) one->state->reported = true;  // one warning is enough if nobody waits
    one->state->end(why);
  }
  if (joining) joining->end(why);
}

}  // namespace cohort::named
