#include "comm/engine/message_queues.h"

#include "base/log.h"
#include "comm/transport/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

namespace cohort::comm::messages {
namespace {

using namespace std::chrono_literals;

// Limit of eager messages to a peer that have not met a receive, since the receiver has to keep them in its memory.
// Further messages are offered instead.
constexpr std::uint64_t kMostUnmet = 256;
constexpr auto kLook = 20ms;

bool is_answer(HeaderKind kind) noexcept {
  return kind == HeaderKind::Grant || kind == HeaderKind::Done || kind == HeaderKind::Refused;
}

MessageHeader header_of(const Message& message, HeaderKind kind) noexcept {
  MessageHeader header;
  header.kind = kind;
  header.dtype = message.dtype;
  header.tag = message.tag;
  header.count = message.count;
  return header;
}

/// Returns " (pid 12)" for "pid 12", and "" for "".
std::string in_brackets(const std::string& pid) { return pid.empty() ? "" : fmt::format(" ({})", pid); }

}  // namespace

MessageQueues::MessageQueues(Members& members, const std::vector<Channels*>& kinds, MessageEnds& ends)
    : members_(members),
      rank_(members.rank()),
      kinds_(kinds),
      home_(*kinds.front()),
      ends_(ends),
      peer_states_(static_cast<std::size_t>(members.size())) {
  opened_.reserve(peer_states_.size());
}

// --- peers ---

MessageQueues::PeerState& MessageQueues::open(int peer) {
  auto& peer_state = peer_states_[static_cast<std::size_t>(peer)];
  if (!peer_state) {
    peer_state = std::make_unique<PeerState>();
    peer_state->peer = peer;
    for (Channels* const kind : kinds_) {
      if (!kind->leads_to(peer)) continue;
      peer_state->kind = kind;
      peer_state->channel = kind->open(peer);
      break;
    }
    opened_.push_back(peer_state.get());
  }
  return *peer_state;
}

void MessageQueues::open_all() {
  for (int peer = 0; peer < members_.size(); ++peer) {
    if (peer != rank_) open(peer);
  }
}

Channels& MessageQueues::kind_of(int peer) const noexcept {
  return peer == kAnySource ? home_ : *peer_states_[static_cast<std::size_t>(peer)]->kind;
}

bool MessageQueues::stirred(int peer) const noexcept {
  if (peer != kAnySource) return peer_states_[static_cast<std::size_t>(peer)]->channel->stirred();
  return std::any_of(opened_.begin(), opened_.end(), [](const PeerState* each) { return each->channel->stirred(); });
}

// --- calls ---

bool MessageQueues::at_once(const Message& message, std::optional<Error>& failed) {
  PeerState& peer_state = open(message.peer);
  const bool over =
      message.kind == Kind::Send ? send_at_once(peer_state, message) : receive_at_once(peer_state, message, failed);
  if (over && !failed && peer_state.late_refusal) failed = late(peer_state, message);
  return over;
}

void MessageQueues::begin(const WorkPtr& work) {
  const Message& message = work->message;
  PeerState* const peer_state = work->any_source ? nullptr : peer_states_[static_cast<std::size_t>(message.peer)].get();
  ends_.count(work->any_source ? home_ : *peer_state->kind, 1);
  if (message.kind == Kind::Send) {
    peer_state->outbox.push_back({{HeaderKind::None}, work});
    flush(*peer_state);
  } else if (peer_state != nullptr) {
    receive(*peer_state, work);
  } else {
    receive_any(work);
  }
}

bool MessageQueues::may_be_eager(PeerState& peer_state, std::size_t bytes) const noexcept {
  if (bytes > peer_state.channel->eager_bytes) return false;
  if (peer_state.eager - peer_state.eager_met < kMostUnmet) return true;
  peer_state.eager_met = std::min(peer_state.channel->met(), peer_state.eager);
  return peer_state.eager - peer_state.eager_met < kMostUnmet;
}

/// Takes the answers at the front of the channel, up to the first header of another kind.
void MessageQueues::take_answers(PeerState& peer_state) {
  Arrival arrival;
  while (peer_state.channel->peek(arrival) && is_answer(arrival.header.kind)) take(peer_state, arrival);
}

bool MessageQueues::send_at_once(PeerState& peer_state, const Message& message) {
  take_answers(peer_state);
  if (!peer_state.outbox.empty() || !may_be_eager(peer_state, message.bytes())) return false;
  if (!peer_state.channel->put(header_of(message, HeaderKind::Eager), message.from)) return false;
  ++peer_state.eager;
  return true;
}

bool MessageQueues::receive_at_once(PeerState& peer_state, const Message& message, std::optional<Error>& failed) {
  Arrival arrival;
  while (peer_state.channel->peek(arrival)) {
    const MessageHeader& header = arrival.header;
    if (is_answer(header.kind)) {
      take(peer_state, arrival);
      continue;
    }
    if (header.kind != HeaderKind::Eager || header.tag != message.tag) return false;
    if (!peer_state.receives.empty() || !any_receives_.empty() || !peer_state.unexpected.empty()) return false;
    failed = deliver(peer_state, message, header, arrival.payload);
    peer_state.channel->take();
    return true;
  }
  return false;
}

void MessageQueues::receive(PeerState& peer_state, const WorkPtr& work) {
  const auto found = std::find_if(peer_state.unexpected.begin(), peer_state.unexpected.end(),
                                  [&](const Unexpected& message) { return message.header.tag == work->message.tag; });
  if (found != peer_state.unexpected.end()) {
    const Unexpected message = std::move(*found);
    peer_state.unexpected.erase(found);
    meet(peer_state, work, message.header, message.payload.data());
    return;
  }
  peer_state.receives.push_back(work);
  drain(peer_state);
}

/// Takes all headers that have come, from each peer in turn, to find the earliest message with the receive's tag.
void MessageQueues::receive_any(const WorkPtr& work) {
  open_all();
  for (bool moved = true; moved;) {
    moved = false;
    for (PeerState* const peer_state : opened_) {
      Arrival arrival;
      if (!peer_state->channel->peek(arrival)) continue;
      take(*peer_state, arrival);
      moved = true;
    }
  }
  PeerState* from = nullptr;
  std::deque<Unexpected>::iterator first;
  for (PeerState* const peer_state : opened_) {
    const auto found = std::find_if(peer_state->unexpected.begin(), peer_state->unexpected.end(),
                                    [&](const Unexpected& message) { return message.header.tag == work->message.tag; });
    if (found == peer_state->unexpected.end() || (from != nullptr && first->arrival < found->arrival)) continue;
    from = peer_state;
    first = found;
  }
  if (from == nullptr) return any_receives_.push_back(work);
  const Unexpected message = std::move(*first);
  from->unexpected.erase(first);
  work->message.peer = from->peer;
  meet(*from, work, message.header, message.payload.data());
}

// --- headers out ---

/// Sends an answer. `ends`: a receive that is over when the answer has been put on the channel.
void MessageQueues::answer(PeerState& peer_state, const MessageHeader& header, WorkPtr ends) {
  peer_state.outbox.push_back({header, std::move(ends)});
  flush(peer_state);
}

/// Puts headers of the outbox on the channel while there is space. Returns true if any was put.
bool MessageQueues::flush(PeerState& peer_state) {
  bool moved = false;
  while (!peer_state.outbox.empty()) {
    const Outgoing& next = peer_state.outbox.front();
    MessageHeader header = next.header;
    const bool is_message = header.kind == HeaderKind::None;
    const std::byte* payload = nullptr;
    if (is_message) {
      const Message& message = next.work->message;
      const bool eager = may_be_eager(peer_state, message.bytes());
      header = header_of(message, eager ? HeaderKind::Eager : HeaderKind::Offer);
      if (!eager) {
        header.offer = peer_state.offers + 1;
        header.address = reinterpret_cast<std::uint64_t>(message.from);
      }
      payload = message.from;
    }
    if (!peer_state.channel->put(header, payload)) return moved;
    const WorkPtr work = next.work;
    peer_state.outbox.pop_front();
    moved = true;
    if (header.kind == HeaderKind::Offer) {
      work->offer = ++peer_state.offers;
      peer_state.offered.push_back(work);
      continue;
    }
    if (is_message) {
      ++peer_state.eager;
      mark_met(*work);
    }
    if (work) complete(work, std::exchange(work->refusal, std::nullopt));
  }
  return moved;
}

// --- headers in ---

bool MessageQueues::drain(PeerState& peer_state) {
  bool moved = false;
  Arrival arrival;
  while (wants_headers(peer_state) && peer_state.channel->peek(arrival)) {
    take(peer_state, arrival);
    moved = true;
  }
  return moved;
}

/// Takes the earliest of the receives that match a message of the peer with this tag.
MessageQueues::WorkPtr MessageQueues::take_receive(PeerState& peer_state, std::int32_t tag) {
  const auto fits = [&](const WorkPtr& work) { return work->message.tag == tag; };
  auto found = std::find_if(peer_state.receives.begin(), peer_state.receives.end(), fits);
  const auto any = std::find_if(any_receives_.begin(), any_receives_.end(), fits);
  std::deque<WorkPtr>* list = &peer_state.receives;
  if (any != any_receives_.end() &&
      (found == peer_state.receives.end() || (*any)->message.number < (*found)->message.number)) {
    found = any;
    list = &any_receives_;
    (*any)->message.peer = peer_state.peer;
  }
  if (found == list->end()) return nullptr;
  WorkPtr work = std::move(*found);
  list->erase(found);
  return work;
}

MessageQueues::WorkPtr MessageQueues::take_offered(PeerState& peer_state, std::uint64_t offer) {
  const auto found = std::find_if(peer_state.offered.begin(), peer_state.offered.end(),
                                  [&](const WorkPtr& work) { return work->offer == offer; });
  if (found == peer_state.offered.end()) {
    Message what;
    what.peer = peer_state.peer;
    end(what, peer_state.peer, ErrorCode::Corrupt,
        fmt::format("rank {} ({}) answered a message that rank {} ({}) has not offered -- do all ranks run the same "
                    "build?",
                    peer_state.peer, members_.host_name(peer_state.peer), rank_, members_.host_name(rank_)));
    return nullptr;
  }
  WorkPtr work = std::move(*found);
  peer_state.offered.erase(found);
  return work;
}

/// Takes the first header that has come, and handles it.
void MessageQueues::take(PeerState& peer_state, const Arrival& arrival) {
  const MessageHeader& header = arrival.header;
  switch (header.kind) {
    case HeaderKind::Eager:
    case HeaderKind::Offer: {
      if (const WorkPtr work = take_receive(peer_state, header.tag)) {
        meet(peer_state, work, header, arrival.payload);
        break;
      }
      Unexpected message;
      message.header = header;
      message.arrival = ++arrivals_;
      if (header.kind == HeaderKind::Eager) message.payload.assign(arrival.payload, arrival.payload + header.bytes());
      peer_state.unexpected.push_back(std::move(message));
      break;
    }
    case HeaderKind::Grant: {
      const WorkPtr work = take_offered(peer_state, header.offer);
      if (!work) break;
      mark_met(*work);
      work->transfer = peer_state.channel->send_payload(work->message, header.offer);
      peer_state.moving.push_back(work);
      break;
    }
    case HeaderKind::Done: {
      if (const WorkPtr work = take_offered(peer_state, header.offer)) complete(work, std::nullopt);
      break;
    }
    case HeaderKind::Refused: {
      if (header.offer != 0) {
        if (const WorkPtr work = take_offered(peer_state, header.offer))
          complete(work, refusal_of(members_, work->message, header));
      } else if (!peer_state.late_refusal) {
        Message own;
        own.peer = peer_state.peer;
        own.tag = header.tag;
        own.dtype = header.dtype;
        own.count = header.count;
        peer_state.late_refusal = refusal_of(members_, own, header);
      }
      break;
    }
    case HeaderKind::None:
    case HeaderKind::OfChannel: break;
  }
  peer_state.channel->take();
}

/// Handles a receive and the message that matches it.
void MessageQueues::meet(PeerState& peer_state, const WorkPtr& work, const MessageHeader& header,
                         const std::byte* payload) {
  mark_met(*work);
  const Message& own = work->message;
  if (header.kind == HeaderKind::Eager) return complete(work, deliver(peer_state, own, header, payload));
  const bool fits = own.dtype == header.dtype && own.count == header.count;
  work->offer = header.offer;
  MessageHeader back = header;
  if (fits && own.count > 0) {
    work->transfer = peer_state.channel->receive_payload(own, header);
    peer_state.moving.push_back(work);
    back.kind = HeaderKind::Grant;
    if (work->transfer->asks_sender) answer(peer_state, back);
    return;
  }
  back.kind = fits ? HeaderKind::Done : HeaderKind::Refused;
  back.expected = own.dtype;
  back.expected_count = own.count;
  if (!fits) work->refusal = refusal_of(members_, own, back);
  answer(peer_state, back, work);
}

std::optional<Error> MessageQueues::deliver(PeerState& peer_state, const Message& to, const MessageHeader& header,
                                            const std::byte* payload) {
  peer_state.channel->note_met();
  if (to.dtype == header.dtype && to.count == header.count) {
    if (const std::size_t bytes = to.bytes(); bytes > 0) std::memcpy(to.to, payload, bytes);
    return std::nullopt;
  }
  MessageHeader back = header;
  back.kind = HeaderKind::Refused;
  back.expected = to.dtype;
  back.expected_count = to.count;
  answer(peer_state, back);
  return refusal_of(members_, to, back);
}

// --- payloads ---

bool MessageQueues::move_payloads(PeerState& peer_state, Lock& lock) {
  for (std::size_t i = 0; i < peer_state.moving.size(); ++i) {
    const WorkPtr work = peer_state.moving[i];
    if (work->transfer->busy) continue;
    const auto step = work->transfer->step(lock);  // the list may have changed if the step moved anything
    if (members_.ended()) {
      fail_all();
      return true;
    }
    if (!step) {
      fail_moving(lock, work, step.error());
      return true;
    }
    if (*step == Transfer::Step::Still) continue;
    if (*step == Transfer::Step::Moved) return true;
    peer_state.moving.erase(std::find(peer_state.moving.begin(), peer_state.moving.end(), work));
    if (work->message.kind == Kind::Send || work->transfer->asks_sender) {
      complete(work, std::nullopt);
    } else {
      MessageHeader done;
      done.kind = HeaderKind::Done;
      done.offer = work->offer;
      answer(peer_state, done, work);
    }
    return true;
  }
  return false;
}

bool MessageQueues::progress(Lock& lock) {
  if (members_.ended()) {
    if (ends_.pending() == 0) return false;
    fail_all();
    return ends_.any();
  }
  bool moved = false;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    PeerState& peer_state = *opened_[i];
    if (wants_headers(peer_state) && drain(peer_state)) moved = true;
    if (!peer_state.outbox.empty() && flush(peer_state)) moved = true;
    if (!peer_state.moving.empty() && move_payloads(peer_state, lock)) moved = true;
  }
  return moved;
}

// --- endings ---

void MessageQueues::log_refusals(bool takes) {
  for (PeerState* const peer_state : opened_) {
    if (takes) take_answers(*peer_state);
    if (peer_state->late_refusal) log::warn("comm", "{}", peer_state->late_refusal->what());
  }
}

/// Notes the time at which a receive and its message met, for observers.
void MessageQueues::mark_met(MessageWork& work) const noexcept {
  if (ends_.observed()) work.met = Clock::now();
}

/// Ends a work that is in no list any more.
void MessageQueues::complete(const WorkPtr& work, std::optional<Error> error) {
  const int peer = work->message.peer;
  PeerState* const peer_state = peer == kAnySource ? nullptr : peer_states_[static_cast<std::size_t>(peer)].get();
  if (!error && peer_state->late_refusal) error = late(*peer_state, work->message);
  ends_.complete(work, work->any_source ? home_ : *peer_state->kind, std::move(error));
}

/// The error of a send that had ended when its receiver refused it. The next operation with that rank reports it.
Error MessageQueues::late(PeerState& peer_state, const Message& message) const {
  const Error refused = *std::exchange(peer_state.late_refusal, std::nullopt);
  return Error(
      ErrorCode::Mismatch,
      fmt::format("{}; that send was over before it was refused, so {} reports it, which was itself carried out",
                  refused.what(), to_string(message)),
      refused.context());
}

/// Returns all works that wait for the peer, including receives from any source.
std::vector<MessageQueues::WorkPtr> MessageQueues::waiting(const PeerState& peer_state) const {
  std::vector<WorkPtr> all(peer_state.receives.begin(), peer_state.receives.end());
  all.insert(all.end(), peer_state.offered.begin(), peer_state.offered.end());
  all.insert(all.end(), peer_state.moving.begin(), peer_state.moving.end());
  for (const Outgoing& outgoing : peer_state.outbox) {
    if (outgoing.work) all.push_back(outgoing.work);
  }
  all.insert(all.end(), any_receives_.begin(), any_receives_.end());
  return all;
}

std::string MessageQueues::timed_out(const PeerState& peer_state, const Message& message) const {
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

/// Names the ranks for which a receive from any source has waited, and the messages from them that wait for a receive.
std::string MessageQueues::sources_text() const {
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
bool MessageQueues::ends_with(const MessageWork& work, std::string_view how) const {
  if (work.message.peer != kAnySource || how != transport::kLeft) return true;
  return std::all_of(opened_.begin(), opened_.end(),
                     [&](const PeerState* other) { return members_.lost(other->peer).has_value(); });
}

void MessageQueues::look_after(Lock& lock) {
  if (members_.ended()) return fail_all();
  const auto now = Clock::now();
  if (now - looked_ < kLook || ends_.pending() == 0) return;
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
      if (found != still.end()) return end_lost((*found)->message, peer_state.peer, *how);
    }
    for (const WorkPtr& work : waiting(peer_state)) {
      if (now < work->deadline()) continue;
      return end(work->message, work->message.named_peer(), ErrorCode::Timeout, timed_out(peer_state, work->message));
    }
  }
}

void MessageQueues::end(const Message& message, int peer, ErrorCode code, const std::string& text) {
  members_.end(code, peer, message.number, text);
  fail_all();
}

void MessageQueues::end_lost(const Message& message, int peer, const std::string& how) {
  const std::string pid = members_.pid_text(peer);
  end(message, peer, ErrorCode::PeerLost,
      fmt::format("{} failed -- rank {} ({}) lost rank {} ({}{}) -- {} -- see the output of rank {}; form a new "
                  "communicator",
                  to_string(message), rank_, members_.host_name(rank_), peer, members_.host_name(peer),
                  pid.empty() ? "" : ", " + pid, how, peer));
}

void MessageQueues::fail_all() {
  members_.tell_if_ended();
  std::vector<WorkPtr> all(any_receives_.begin(), any_receives_.end());
  any_receives_.clear();
  for (PeerState* const peer_state : opened_) {
    for (WorkPtr& work : waiting(*peer_state)) {
      if (!work->transfer || !work->transfer->busy) all.push_back(std::move(work));
    }
    peer_state->receives.clear();
    peer_state->offered.clear();
    peer_state->outbox.clear();
    std::erase_if(peer_state->moving, [](const WorkPtr& work) { return !work->transfer->busy; });
  }
  for (const WorkPtr& work : all) {
    complete(work, members_.recorded(to_string(work->message), work->message.number));
  }
}

/// Fails a work whose payload could not be moved: its peer is lost, or reading the peer's memory is not allowed.
void MessageQueues::fail_moving(Lock& lock, const WorkPtr& work, const Error& why) {
  const int peer = work->message.peer;
  work->transfer->busy = true;  // so that no other thread continues the transfer meanwhile
  // A dying process loses its memory shortly before others can see that it is dying.
  std::optional<std::string> how;
  for (int i = 0; i < 100 && !how && !members_.ended(); ++i) {
    lock.unlock();
    how = members_.lost(peer);
    if (!how) std::this_thread::sleep_for(2ms);
    lock.lock();
  }
  work->transfer->busy = false;
  if (how) return end_lost(work->message, peer, *how + " while its message was read");
  end(work->message, peer, why.code(),
      fmt::format("{} failed -- rank {} ({}) -- {}", to_string(work->message), rank_, members_.host_name(rank_),
                  why.what()));
}

}  // namespace cohort::comm::messages
