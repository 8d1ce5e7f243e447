// One round of negotiation: the ranks' contributions are combined, and every rank draws the same conclusions from them.

#include "train/named/rounds.h"
#include "base/log.h"
#include "train/named/engine_core.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <span>
#include <utility>

namespace cohort::named {
namespace {

constexpr int kTag = 0x6265;  // the engine's communicator carries no other messages
constexpr std::uint64_t kLast = std::numeric_limits<std::uint64_t>::max();
// Timeout of ranks without requests, which may be idle for any time: the core's longest timeout is a year.
constexpr auto kIdle = std::chrono::hours(24 * 365);

}  // namespace

void Wakeup::notify() {
  {
    const std::lock_guard lock(mutex_);
    notified_ = true;
  }
  changed_.notify_one();
}

void Wakeup::request() {
  {
    const std::lock_guard lock(mutex_);
    requested_ = true;
    if (lingering_) return;
  }
  changed_.notify_one();
}

void Wakeup::end_lingering() {
  // Under the mutex, the thread has either seen the change or sleeps.
  { const std::lock_guard lock(mutex_); }
  changed_.notify_one();
}

void Wakeup::wait_until(std::chrono::steady_clock::time_point limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [&] { return notified_ || requested_; });
  notified_ = requested_ = false;
}

void Wakeup::linger(std::chrono::nanoseconds moment) {
  const auto limit = std::chrono::steady_clock::now() + moment;
  std::unique_lock lock(mutex_);
  lingering_ = true;
  changed_.wait_until(lock, limit, [&] { return notified_ || urgent_ > 0; });
  lingering_ = false;
}

MessageRoundAnnouncer::MessageRoundAnnouncer(Communicator comm, std::shared_ptr<Wakeup> wakeup)
    : comm_(std::move(comm)), wakeup_(std::move(wakeup)) {
  for (int rank = 0; rank < comm_.size(); ++rank) {
    if (rank == comm_.rank()) continue;
    peers_.push_back(std::make_unique<Peer>());
    peers_.back()->rank = rank;
    listen(*peers_.back());
  }
}

MessageRoundAnnouncer::~MessageRoundAnnouncer() {
  // Without `close` the communicator has ended, or has to end here: receives without a sender would wait for a year.
  // Threads that wait for the engine have received the reason.
  for (const auto& peer : peers_) {
    if (!peer->receive.done()) comm_.abort("the engine of named operations has ended");
  }
  const auto wait_out = [](Work& work) {
    try {
      work.wait();
    } catch (const Error&) {  // see above
    }
  };
  for (const auto& peer : peers_) {
    wait_out(peer->receive);
    for (Ring& ring : peer->rings) wait_out(ring.send);
  }
}

void MessageRoundAnnouncer::listen(Peer& peer) {
  SendOptions options;
  options.tag = kTag;
  options.timeout = kIdle;
  peer.receive = comm_.recv(std::span(&peer.incoming, 1), peer.rank, options);
  peer.receive.on_done([wakeup = wakeup_] { wakeup->notify(); });
}

void MessageRoundAnnouncer::take(Peer& peer) {
  peer.receive.wait();
  if (peer.incoming == kLast) {
    peer.closed = true;
    return;
  }
  if (peer.incoming > heard_) heard_ = peer.incoming;
  listen(peer);
}

void MessageRoundAnnouncer::ring(std::uint64_t round) {
  SendOptions options;
  options.tag = kTag;
  for (const auto& peer : peers_) {
    // A peer receives rings between rounds only. Waiting here for an earlier ring, when this round has begun, could be
    // a deadlock with a peer that waits for this rank.
    while (!peer->rings.empty() && peer->rings.front().send.done()) {
      peer->rings.front().send.wait();
      peer->rings.pop_front();
    }
    Ring& ring = peer->rings.emplace_back();
    ring.round = round;
    ring.send = comm_.send(std::span(&std::as_const(ring.round), 1), peer->rank, options);
  }
}

std::uint64_t MessageRoundAnnouncer::heard() {
  for (const auto& peer : peers_) {
    while (!peer->closed && peer->receive.done()) take(*peer);
  }
  return heard_;
}

void MessageRoundAnnouncer::close(std::chrono::milliseconds limit) {
  ring(kLast);
  const auto deadline = std::chrono::steady_clock::now() + limit;
  for (const auto& peer : peers_) {
    while (!peer->closed) {
      if (!peer->receive.wait_for(deadline - std::chrono::steady_clock::now())) {
        comm_.abort("a rank did not end its engine of named operations in time");
        return;
      }
      take(*peer);
    }
    for (Ring& ring : peer->rings) ring.send.wait();
  }
}

void visit_fields(auto& m, auto& a, const Stalled*) { a(m.name, m.milliseconds, m.expired); }

namespace {

constexpr std::size_t kWordBits = 64;

// Flags of the first word. The word is combined by "and", like the bits, so a flag is sent as a zero bit.
constexpr std::uint64_t kNews = 1;    // names are described
constexpr std::uint64_t kCensus = 2;  // requests an exchange of the names that ranks lack
constexpr std::uint64_t kEnd = 4;     // a rank shuts down

constexpr std::size_t kMostStalls = 256;

/// A name in an exchange of descriptions.
struct Description {
  std::string name;
  Signature signature;
};
struct Descriptions {
  bool joins = false;
  std::vector<Description> all;
};
/// A rank's part in an exchange about names that wait too long.
struct Census {
  std::vector<std::uint64_t> words;
  std::vector<Stalled> stalled;
};

void visit_fields(auto& m, auto& a, const Description*) { a(m.name, m.signature); }
void visit_fields(auto& m, auto& a, const Descriptions*) { a(m.joins, m.all); }
void visit_fields(auto& m, auto& a, const Census*) { a(m.words, m.stalled); }

std::size_t words_for(std::size_t slots) noexcept { return (slots + kWordBits - 1) / kWordBits; }

bool bit_of(std::span<const std::uint64_t> words, std::size_t slot) noexcept {
  return slot / kWordBits < words.size() && (words[slot / kWordBits] >> (slot % kWordBits) & 1) != 0;
}

}  // namespace

bool EngineCore::round() {
  const Contribution own = contribute();
  const std::vector<std::uint64_t> all = combine(own);
  ++round_;
  const std::uint64_t flags = ~all.front();
  if ((flags & kEnd) != 0) {
    end(why_ended());
    return false;
  }
  std::vector<Ready> ready;
  if ((flags & kNews) != 0) enter_descriptions(own);
  take_slots(std::span(all).subspan(1), ready);
  if ((flags & kNews) != 0) take_table(ready);
  if ((flags & kCensus) != 0) take_census(own);
  execute(std::move(ready));
  finish_join();
  return true;
}

EngineCore::Contribution EngineCore::contribute() {
  Contribution own;
  own.stalled = std::exchange(stalled_, {});
  const std::lock_guard lock(mutex_);
  stirred_ = false;
  if (join_ && !join_announced_) {
    join_announced_ = own.joins = true;
    // Joined ranks set all bits, so this rank's outstanding requests are described, for the others to distinguish.
    for (std::size_t slot = 0; slot < by_slot_.size(); ++slot) {
      if (PendingPtr pending = clear_slot(slot)) {
        pending->stage = Pending::Stage::New;
        news_.push_back(std::move(pending));
      }
    }
  }
  own.described = std::exchange(news_, {});
  for (const PendingPtr& one : own.described) one->stage = Pending::Stage::Described;
  std::uint64_t flags = 0;
  if (own.joins || !own.described.empty()) flags |= kNews;
  if (!own.stalled.empty()) flags |= kCensus;
  if (stopping_) flags |= kEnd;
  own.words.push_back(~flags);
  own.words.insert(own.words.end(), bits_.begin(), bits_.end());
  if (joined_[static_cast<std::size_t>(rank_)]) std::fill(own.words.begin() + 1, own.words.end(), ~std::uint64_t{0});
  return own;
}

std::vector<std::uint64_t> EngineCore::combine(const Contribution& own) {
  std::vector<std::uint64_t> all = own.words;
  AllReduceOptions options;
  options.op = ReduceOp::BitAnd;
  options.timeout = operation_timeout();
  Work work = comm_.all_reduce(std::span(all), options);
  rounds_.fetch_add(1, std::memory_order_relaxed);
  if (!work.done()) {  // a rank may be asleep
    announcer_->ring(round_);
    rings_.fetch_add(1, std::memory_order_relaxed);
  }
  work.wait();
  return all;
}

/// Sends `own` to all ranks; returns the text of each rank, by rank.
std::vector<std::string> EngineCore::exchange(const std::string& own) {
  AllGatherOptions options;
  options.timeout = operation_timeout();
  const auto size = static_cast<std::size_t>(size_);
  const auto own_length = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> lengths(size);
  comm_.all_gather(std::span(&own_length, 1), std::span(lengths), options).wait();
  std::int64_t total = 0;
  for (const std::int64_t length : lengths) total += length;
  std::string bytes(static_cast<std::size_t>(total), '\0');
  comm_
      .all_gather_v(ConstBuffer(own.data(), own_length, DType::UInt8), Buffer(bytes.data(), total, DType::UInt8),
                    lengths, options)
      .wait();
  std::vector<std::string> result;
  std::size_t at = 0;
  for (const std::int64_t length : lengths) {
    result.push_back(bytes.substr(at, static_cast<std::size_t>(length)));
    at += static_cast<std::size_t>(length);
  }
  return result;
}

// --- names and slots ---

void EngineCore::set_slot(const PendingPtr& pending, std::size_t slot) {
  pending->stage = Pending::Stage::Slot;
  by_slot_[slot] = pending;
  bits_[slot / kWordBits] |= std::uint64_t{1} << (slot % kWordBits);
}

EngineCore::PendingPtr EngineCore::clear_slot(std::size_t slot) {
  bits_[slot / kWordBits] &= ~(std::uint64_t{1} << (slot % kWordBits));
  return std::exchange(by_slot_[slot], nullptr);
}

/// Handles a freed slot: if this rank had set its bit, it describes the name in the next round.
void EngineCore::demote(const Cache::Freed& freed) {
  PendingPtr pending = clear_slot(freed.slot);
  if (!pending) return;
  pending->stage = Pending::Stage::New;
  news_.push_back(std::move(pending));
  stirred_ = true;
}

void EngineCore::free_slot(const std::string& name) {
  const std::lock_guard lock(mutex_);
  if (const auto freed = cache_.erase(name)) demote(*freed);
}

/// Returns this rank's request for a name in the table; null if this rank has joined and made no request.
EngineCore::PendingPtr EngineCore::take_described(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto found = pending_.find(name);
  if (found == pending_.end() || found->second->stage != Pending::Stage::Described) return nullptr;
  found->second->stage = Pending::Stage::Running;
  return found->second;
}

void EngineCore::enter_descriptions(const Contribution& own) {
  exchanges_.fetch_add(1, std::memory_order_relaxed);
  Descriptions mine{own.joins, {}};
  for (const PendingPtr& one : own.described) mine.all.push_back({one->request.name, one->signature});
  const std::vector<std::string> all = exchange(codec::encode(mine));
  for (int rank = 0; rank < size_; ++rank) {
    auto theirs = value_or_throw(codec::decode<Descriptions>(all[static_cast<std::size_t>(rank)]));
    for (Description& one : theirs.all) {
      free_slot(one.name);  // the cached operation is not what all ranks request now
      table_.add(rank, one.name, std::move(one.signature));
    }
    if (!theirs.joins) continue;
    joined_[static_cast<std::size_t>(rank)] = true;
    last_joined_ = rank;
    // The others have announced all outstanding names, which this rank's bits now complete.
    if (rank == rank_) stirred_ = true;
  }
}

void EngineCore::take_slots(std::span<const std::uint64_t> words, std::vector<Ready>& ready) {
  const std::lock_guard lock(mutex_);
  for (std::size_t word = 0; word < words.size(); ++word) {
    for (std::uint64_t rest = words[word]; rest != 0; rest &= rest - 1) {
      const std::size_t slot = word * kWordBits + static_cast<std::size_t>(std::countr_zero(rest));
      if (slot >= cache_.width() || !cache_.at(slot)) continue;
      cache_.touch(slot);
      PendingPtr own = clear_slot(slot);
      if (own) own->stage = Pending::Stage::Running;
      ready.push_back({cache_.at(slot), joined_, std::move(own)});
    }
  }
}

void EngineCore::take_table(std::vector<Ready>& ready) {
  for (Table::Complete& complete : table_.take_complete(joined_)) {
    PendingPtr own = take_described(complete.name);
    auto agreed = match(complete.name, complete.brought);
    if (!agreed) {
      if (own) finish(std::span(&own, 1), agreed.error());
      continue;
    }
    std::vector<bool> lacking(complete.brought.size());
    bool all = true;
    for (std::size_t rank = 0; rank < lacking.size(); ++rank) {
      lacking[rank] = !complete.brought[rank].has_value();
      all = all && !lacking[rank];
    }
    if (all && own && (*agreed)->common.kind != Kind::Group) remember(*agreed, *own);
    ready.push_back({*std::move(agreed), std::move(lacking), std::move(own)});
  }
}

void EngineCore::remember(const AgreedPtr& agreed, const Pending& own) {
  const std::lock_guard lock(mutex_);
  if (const auto freed = cache_.insert(agreed, own.signature)) demote(*freed);
  bits_.resize(words_for(cache_.width()), 0);
  by_slot_.resize(cache_.width());
}

// --- waiting too long ---

void EngineCore::take_census(const Contribution& own) {
  const bool joined = joined_[static_cast<std::size_t>(rank_)];
  Census mine;
  if (!joined) mine.words.assign(own.words.begin() + 1, own.words.end());
  mine.stalled = own.stalled;
  mine.stalled.resize(std::min(own.stalled.size(), kMostStalls));
  struct Case {
    std::int64_t waited = 0;
    bool expired = false;
  };
  std::map<std::string, Case> cases;
  std::vector<std::vector<std::uint64_t>> bits;
  for (const std::string& bytes : exchange(codec::encode(mine))) {
    auto theirs = value_or_throw(codec::decode<Census>(bytes));
    bits.push_back(std::move(theirs.words));
    for (const Stalled& one : theirs.stalled) {
      Case& known = cases[one.name];
      known.waited = std::max(known.waited, one.milliseconds);
      known.expired = known.expired || one.expired;
    }
  }
  std::vector<Stall> stalls_of_all;
  for (const auto& [name, one] : cases) {
    Stall stall;
    stall.name = name;
    stall.waited = std::chrono::milliseconds(one.waited);
    const auto slot = cache_.slot_of(name);
    for (int rank = 0; rank < size_; ++rank) {
      const auto index = static_cast<std::size_t>(rank);
      const bool present = table_.has(rank, name) || (slot && bit_of(bits[index], *slot));
      if (present) stall.present.push_back(rank);
      if (!present && !joined_[index]) stall.missing.push_back(rank);
    }
    if (stall.missing.empty() || stall.present.empty()) continue;  // the name has become ready in this round
    if (one.expired) {
      fail_expired(stall);
    } else {
      stalls_of_all.push_back(std::move(stall));
    }
  }
  if (stalls_of_all.empty()) return;
  if (options_.on_stall) return options_.on_stall(stalls_of_all);
  if (rank_ != 0) return;
  for (const Stall& stall : stalls_of_all) {
    log::warn("named", "'{}' has waited for {} s -- rank{} {} ha{} not asked for it, rank{} {} ha{}", stall.name,
              stall.waited.count() / 1000, stall.missing.size() > 1 ? "s" : "", list_ranks(stall.missing),
              stall.missing.size() > 1 ? "ve" : "s", stall.present.size() > 1 ? "s" : "", list_ranks(stall.present),
              stall.present.size() > 1 ? "ve" : "s");
  }
}

/// Removes the name on every rank; ranks that wait get the error.
void EngineCore::fail_expired(const Stall& stall) {
  PendingPtr own = take_described(stall.name);
  {
    const std::lock_guard lock(mutex_);
    if (const auto freed = cache_.erase(stall.name)) {
      if (PendingPtr waiting = clear_slot(freed->slot)) own = std::move(waiting);
    }
  }
  table_.erase(stall.name);
  if (!own) return;
  finish(std::span(&own, 1),
         Error(ErrorCode::Timeout,
               fmt::format("'{}' timed out after {} ms -- {} -- rank{} {} did not ask for it, rank{} {} did -- is it "
                           "slow, or in another branch of the program? other operations are not affected",
                           stall.name, stall.waited.count(), to_string(own->signature),
                           stall.missing.size() > 1 ? "s" : "", list_ranks(stall.missing),
                           stall.present.size() > 1 ? "s" : "", list_ranks(stall.present))));
}

// --- join and end ---

void EngineCore::finish_join() {
  if (std::find(joined_.begin(), joined_.end(), false) != joined_.end()) return;
  joined_.assign(joined_.size(), false);
  std::shared_ptr<State> done;
  {
    const std::lock_guard lock(mutex_);
    done = std::exchange(join_, nullptr);
    join_announced_ = false;
  }
  if (!done) return;
  done->result.last_joined = last_joined_;
  done->end(std::nullopt);
}

Error EngineCore::why_ended() {
  const std::uint8_t own = stopping_ ? 1 : 0;
  std::vector<std::uint8_t> all(static_cast<std::size_t>(size_));
  AllGatherOptions options;
  options.timeout = operation_timeout();
  comm_.all_gather(std::span(&own, 1), std::span(all), options).wait();
  std::vector<int> who;
  for (int rank = 0; rank < size_; ++rank) {
    if (all[static_cast<std::size_t>(rank)] != 0) who.push_back(rank);
  }
  return Error(
      ErrorCode::Aborted,
      fmt::format("the engine of named operations has been shut down by rank{} {} -- rank {} -- what was "
                  "outstanding is not carried out -- wait for operations before shutdown, or make a new engine",
                  who.size() > 1 ? "s" : "", list_ranks(who), rank_));
}

}  // namespace cohort::named
