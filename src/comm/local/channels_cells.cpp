// What goes through the lanes: placing and taking cells, matching, and moving payloads.
#include "comm/local/channels.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::local {
namespace {

// Messages that were sent before anyone receives them lie in the receiver's memory. After so many, sends wait for
// theirs.
constexpr std::uint64_t kMostUnmet = 256;
// Read out of a peer's memory at a time: deadlines and abort are looked after between.
constexpr std::size_t kPullBytes = std::size_t{512} << 10;

bool is_answer(CellKind kind) noexcept {
  return kind == CellKind::Grant || kind == CellKind::Done || kind == CellKind::Refused;
}

template <class List>
std::shared_ptr<ChannelWork> take_by_number(List& list, std::uint64_t number,
                                            std::uint64_t (*number_of)(const ChannelWork&)) {
  const auto found =
      std::find_if(list.begin(), list.end(), [&](const auto& work) { return number_of(*work) == number; });
  if (found == list.end()) return nullptr;
  auto work = *found;
  list.erase(found);
  return work;
}

}  // namespace

// --- placing ---

bool Channels::has_room(Channel& channel) const noexcept {
  if (channel.placed < channel.room.load(std::memory_order_relaxed)) return true;
  channel.room.store(room_up_to(channel.out.head(), channel.out.cells()), std::memory_order_relaxed);
  return channel.placed < channel.room.load(std::memory_order_relaxed);
}

bool Channels::may_be_eager(Channel& channel, std::size_t bytes) const noexcept {
  if (bytes > layout_.cell_bytes()) return false;
  if (channel.eager - channel.eager_met < kMostUnmet) return true;
  channel.eager_met = channel.out.head().delivered.load(std::memory_order_acquire);
  return channel.eager - channel.eager_met < kMostUnmet;
}

void Channels::publish(Channel& channel, CellKind kind) {
  Cell& cell = channel.out.cell(channel.placed + 1);
  cell.kind = kind;
  local::publish(cell.stamp, ++channel.placed);
  ring(channel.peer);
}

void Channels::place_message(Channel& channel, const Message& message, CellKind kind) {
  const std::uint64_t number = channel.placed + 1;
  Cell& cell = channel.out.cell(number);
  cell.count = message.count;
  cell.tag = message.tag;
  cell.dtype = message.dtype;
  const std::size_t bytes = message.bytes();
  if (kind == CellKind::Offer) {
    cell.address = reinterpret_cast<std::uint64_t>(message.from);
  } else {
    ++channel.eager;
    if (bytes > 0) std::memcpy(bytes <= Cell::kInline ? cell.payload : channel.out.beside(number), message.from, bytes);
  }
  publish(channel, kind);
}

void Channels::place_answer(Channel& channel, const Outgoing& answer) {
  Cell& cell = channel.out.cell(channel.placed + 1);
  cell.count = answer.count;
  cell.tag = answer.tag;
  cell.dtype = answer.dtype;
  cell.expected = answer.expected;
  cell.refused = answer.work && answer.work->refusal_ ? 1 : 0;
  cell.about = {answer.message, answer.expected_count};
  publish(channel, answer.kind);
}

bool Channels::send_at_once(Channel& channel, const Message& message) {
  while (channel.has_come() && is_answer(channel.in.cell(channel.next.load(std::memory_order_relaxed)).kind)) {
    take(channel);
  }
  if (!channel.outbox.empty() || !may_be_eager(channel, message.bytes()) || !has_room(channel)) return false;
  place_message(channel, message, CellKind::Eager);
  return true;
}

void Channels::send(Channel& channel, WorkPtr work) {
  Outgoing outgoing;
  outgoing.work = std::move(work);
  channel.outbox.push_back(std::move(outgoing));
  flush(channel);
}

/// Places what is to be placed while there is room.
bool Channels::flush(Channel& channel) {
  bool moved = false;
  while (!channel.outbox.empty()) {
    if (!has_room(channel)) {
      channel.blocked.store(true, std::memory_order_relaxed);
      ask_for_room(channel.out.head());
      if (!has_room(channel)) return moved;
    }
    const Outgoing outgoing = std::move(channel.outbox.front());
    channel.outbox.pop_front();
    moved = true;
    const WorkPtr& work = outgoing.work;
    if (outgoing.kind != CellKind::None) {
      place_answer(channel, outgoing);
      if (work) complete(work, std::exchange(work->refusal_, std::nullopt));
    } else if (may_be_eager(channel, work->message_.bytes())) {
      place_message(channel, work->message_, CellKind::Eager);
      if (observer_.load(std::memory_order_relaxed) != nullptr) work->met_ = Clock::now();
      complete(work, std::nullopt);
    } else {
      place_message(channel, work->message_, CellKind::Offer);
      work->peers_number_ = channel.placed;
      channel.offered.push_back(work);
    }
  }
  if (channel.leaving.empty() && channel.blocked.load(std::memory_order_relaxed)) {
    channel.blocked.store(false, std::memory_order_relaxed);
    channel.out.head().full.store(0, std::memory_order_relaxed);
  }
  return moved;
}

bool Channels::send_fragments(Channel& channel) {
  bool moved = false;
  while (!channel.leaving.empty()) {
    if (!has_room(channel)) {
      channel.blocked.store(true, std::memory_order_relaxed);
      ask_for_room(channel.out.head());
      if (!has_room(channel)) return moved;
    }
    const WorkPtr work = channel.leaving.front();
    const std::uint64_t number = channel.placed + 1;
    const std::size_t bytes = std::min(layout_.cell_bytes(), work->message_.bytes() - work->moved_);
    std::memcpy(channel.out.beside(number), work->message_.from + work->moved_, bytes);
    Cell& cell = channel.out.cell(number);
    cell.count = static_cast<std::int64_t>(bytes);
    cell.about = {work->peers_number_, 0};
    publish(channel, CellKind::Fragment);
    work->moved_ += bytes;
    moved = true;
    if (work->moved_ < work->message_.bytes()) continue;
    channel.leaving.pop_front();
    complete(work, std::nullopt);
  }
  flush(channel);  // nothing is blocked any more, unless it is there
  return moved;
}

// --- taking ---

void Channels::release_cell(Channel& channel) {
  const std::uint64_t number = channel.next.load(std::memory_order_relaxed);
  const bool sender_waits = release(channel.in.head(), number);
  channel.next.store(number + 1, std::memory_order_relaxed);
  if (sender_waits) ring(channel.peer);
}

bool Channels::drain(Channel& channel) {
  bool moved = false;
  while (channel.wants_cells() && channel.has_come()) {
    take(channel);
    moved = true;
  }
  return moved;
}

bool Channels::receive_at_once(Channel& channel, const Message& message, std::optional<Error>& failed) {
  while (channel.has_come()) {
    const std::uint64_t number = channel.next.load(std::memory_order_relaxed);
    const Cell& cell = channel.in.cell(number);
    if (is_answer(cell.kind) || cell.kind == CellKind::Fragment) {
      take(channel);
      continue;
    }
    if (cell.kind != CellKind::Eager || cell.tag != message.tag) return false;
    if (!channel.receives.empty() || !channel.unexpected.empty()) return false;
    const std::byte* const payload = static_cast<std::size_t>(cell.count) * size_of(cell.dtype) <= Cell::kInline
                                         ? cell.payload
                                         : channel.in.beside(number);
    Unexpected found;
    found.number = number;
    found.tag = cell.tag;
    found.dtype = cell.dtype;
    found.count = cell.count;
    failed = deliver(channel, message, found, payload);
    release_cell(channel);
    return true;
  }
  return false;
}

void Channels::receive(Channel& channel, const WorkPtr& work) {
  const auto found = std::find_if(channel.unexpected.begin(), channel.unexpected.end(),
                                  [&](const Unexpected& message) { return message.tag == work->message_.tag; });
  if (found != channel.unexpected.end()) {
    const Unexpected message = std::move(*found);
    channel.unexpected.erase(found);
    met(channel, work, message);
    return;
  }
  channel.receives.push_back(work);
  drain(channel);
}

/// What has come by now is put aside in turns, so that the first of it can be told; the claim decides between hosts.
void Channels::receive_any(const WorkPtr& work) {
  open_all();
  if (!claims_.empty()) drop_elsewhere();
  for (bool moved = true; moved;) {
    moved = false;
    for (Channel* const channel : opened_) {
      if (!channel->has_come()) continue;
      take(*channel);
      moved = true;
    }
  }
  Channel* from = nullptr;
  std::deque<Unexpected>::iterator first;
  for (Channel* const channel : opened_) {
    const auto found = std::find_if(channel->unexpected.begin(), channel->unexpected.end(),
                                    [&](const Unexpected& message) { return message.tag == work->message_.tag; });
    if (found == channel->unexpected.end() || (from != nullptr && first->arrival < found->arrival)) continue;
    from = channel;
    first = found;
  }
  if (from != nullptr && work->message_.takes(first->tag)) {
    const Unexpected message = std::move(*first);
    from->unexpected.erase(first);
    bind(*from, work);
    return met(*from, work, message);
  }
  if (work->message_.claim) claims_.push_back(work);
  for (Channel* const channel : opened_) channel->receives.push_back(work);
}

/// A receive from any source has its message, and expects none of the others any more.
void Channels::bind(Channel& channel, const WorkPtr& work) {
  work->message_.peer = channel.peer;
  work->message_.peer_name = world_.name(channel.peer);
  const auto forget = [&](auto& list) { list.erase(std::remove(list.begin(), list.end(), work), list.end()); };
  for (Channel* const other : opened_) forget(other->receives);
  if (work->message_.claim) forget(claims_);
}

/// Ends receives that have got their message from another host.
void Channels::drop_elsewhere() {
  const std::vector<WorkPtr> all = claims_;
  for (const WorkPtr& work : all) {
    if (!work->message_.lies_elsewhere()) continue;
    for (Channel* const channel : opened_) {
      channel->receives.erase(std::remove(channel->receives.begin(), channel->receives.end(), work),
                              channel->receives.end());
    }
    claims_.erase(std::find(claims_.begin(), claims_.end(), work));
    complete(work, std::nullopt);
  }
}

/// Takes the cell that has come.
void Channels::take(Channel& channel) {
  const std::uint64_t number = channel.next.load(std::memory_order_relaxed);
  const Cell& cell = channel.in.cell(number);
  switch (cell.kind) {
    case CellKind::Eager:
    case CellKind::Offer: {
      Unexpected message;
      message.kind = cell.kind;
      message.number = number;
      message.tag = cell.tag;
      message.dtype = cell.dtype;
      message.count = cell.count;
      if (cell.kind == CellKind::Offer) message.address = cell.address;
      const std::size_t bytes = static_cast<std::size_t>(cell.count) * size_of(cell.dtype);
      const std::byte* const payload = bytes <= Cell::kInline ? cell.payload : channel.in.beside(number);
      const auto fits = std::find_if(channel.receives.begin(), channel.receives.end(),
                                     [&](const WorkPtr& work) { return work->message_.takes(message.tag); });
      if (fits == channel.receives.end()) {
        if (cell.kind == CellKind::Eager) message.payload.assign(payload, payload + bytes);
        message.arrival = ++arrivals_;
        channel.unexpected.push_back(std::move(message));
        break;
      }
      const WorkPtr work = *fits;
      channel.receives.erase(fits);
      if (work->any_source_) bind(channel, work);
      if (cell.kind == CellKind::Eager) {
        if (observer_.load(std::memory_order_relaxed) != nullptr) work->met_ = Clock::now();
        complete(work, deliver(channel, work->message_, message, payload));
      } else {
        met(channel, work, message);
      }
      break;
    }
    case CellKind::Fragment: take_fragment(channel, cell); break;
    case CellKind::Grant: {
      const WorkPtr work = take_by_number(
          channel.offered, cell.about.message, +[](const ChannelWork& one) { return one.peers_number_; });
      if (work) {
        if (observer_.load(std::memory_order_relaxed) != nullptr) work->met_ = Clock::now();
        channel.leaving.push_back(work);
      }
      break;
    }
    case CellKind::Done: take_done(channel, cell); break;
    case CellKind::Refused: {
      Message own;
      own.kind = Kind::Send;
      own.peer = channel.peer;
      own.peer_name = world_.name(channel.peer);
      own.tag = cell.tag;
      own.dtype = cell.dtype;
      own.count = cell.count;
      if (!channel.late_refusal) {
        channel.late_refusal = refusal(own, cell.tag, cell.dtype, cell.count, cell.expected, cell.about.count);
      }
      break;
    }
    case CellKind::None: break;
  }
  release_cell(channel);
}

void Channels::take_fragment(Channel& channel, const Cell& cell) {
  const auto found = std::find_if(channel.arriving.begin(), channel.arriving.end(),
                                  [&](const WorkPtr& work) { return work->peers_number_ == cell.about.message; });
  if (found == channel.arriving.end()) return;
  const WorkPtr work = *found;
  const auto bytes = static_cast<std::size_t>(cell.count);
  std::memcpy(work->message_.to + work->moved_, channel.in.beside(channel.next.load(std::memory_order_relaxed)), bytes);
  work->moved_ += bytes;
  if (work->moved_ < work->message_.bytes()) return;
  channel.arriving.erase(found);
  complete(work, std::nullopt);
}

void Channels::take_done(Channel& channel, const Cell& cell) {
  const WorkPtr work = take_by_number(
      channel.offered, cell.about.message, +[](const ChannelWork& one) { return one.peers_number_; });
  if (!work) return;
  std::optional<Error> error;
  const Message& own = work->message_;
  if (cell.refused != 0) error = refusal(own, own.tag, own.dtype, own.count, cell.expected, cell.about.count);
  complete(work, std::move(error));
}

/// A receive and its message, which was taken out of the lane or is an offer.
void Channels::met(Channel& channel, const WorkPtr& work, const Unexpected& message) {
  if (observer_.load(std::memory_order_relaxed) != nullptr) work->met_ = Clock::now();
  const Message& own = work->message_;
  if (message.kind == CellKind::Eager) {
    complete(work, deliver(channel, own, message, message.payload.data()));
    return;
  }
  work->peers_number_ = message.number;
  work->address_ = message.address;
  const bool fits = own.dtype == message.dtype && own.count == message.count;
  if (fits && own.count > 0 && pulls_allowed_) {
    pulls_.push_back(work);
    pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  Outgoing answer;
  answer.message = message.number;
  if (fits && own.count > 0) {
    answer.kind = CellKind::Grant;
    channel.arriving.push_back(work);
  } else {
    answer.kind = CellKind::Done;
    answer.work = work;
    answer.expected = own.dtype;
    answer.expected_count = own.count;
    if (!fits) work->refusal_ = refusal(own, message.tag, message.dtype, message.count, own.dtype, own.count);
  }
  channel.outbox.push_back(std::move(answer));
  flush(channel);
}

std::optional<Error> Channels::deliver(Channel& channel, const Message& to, const Unexpected& message,
                                       const std::byte* payload) {
  channel.in.head().delivered.store(++channel.delivered, std::memory_order_release);
  if (to.dtype == message.dtype && to.count == message.count) {
    if (const std::size_t bytes = to.bytes(); bytes > 0) std::memcpy(to.to, payload, bytes);
    return std::nullopt;
  }
  Outgoing answer;
  answer.kind = CellKind::Refused;
  answer.message = message.number;
  answer.tag = message.tag;
  answer.dtype = message.dtype;
  answer.count = message.count;
  answer.expected = to.dtype;
  answer.expected_count = to.count;
  channel.outbox.push_back(std::move(answer));
  flush(channel);
  return refusal(to, message.tag, message.dtype, message.count, to.dtype, to.count);
}

/// Reads one piece of one payload out of its sender's memory, without the mutex.
bool Channels::pull(Lock& lock) {
  const auto found = std::find_if(pulls_.begin(), pulls_.end(), [](const WorkPtr& one) { return !one->busy_; });
  if (found == pulls_.end()) return false;
  const WorkPtr work = *found;
  const Message& message = work->message_;
  const std::size_t bytes = std::min(kPullBytes, message.bytes() - work->moved_);
  work->busy_ = true;
  pulls_to_do_.fetch_sub(1, std::memory_order_relaxed);
  lock.unlock();
  const auto read = world_.read_peer(message.peer, message.to + work->moved_, work->address_ + work->moved_, bytes);
  lock.lock();
  work->busy_ = false;
  pulls_to_do_.fetch_add(1, std::memory_order_relaxed);
  if (world_.ended_before_reads()) {  // then the sender may have given its memory up
    fail_all();
    return true;
  }
  if (!read) {
    lost_in_pull(lock, work, read.error());
    return true;
  }
  work->moved_ += bytes;
  if (work->moved_ < message.bytes()) return true;
  pulls_.erase(std::find(pulls_.begin(), pulls_.end(), work));
  pulls_to_do_.fetch_sub(1, std::memory_order_relaxed);
  Channel& channel = *channels_[static_cast<std::size_t>(message.peer)];
  Outgoing answer;
  answer.kind = CellKind::Done;
  answer.work = work;
  answer.message = work->peers_number_;
  channel.outbox.push_back(std::move(answer));
  flush(channel);
  return true;
}

}  // namespace cohort::comm::local
