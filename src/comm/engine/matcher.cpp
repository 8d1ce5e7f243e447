#include "comm/engine/matcher.h"

#include "comm/engine/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::messages {

Result<MessageHeader> read_header(std::string_view bytes, std::size_t longest) {
  Result<MessageHeader> header = codec::decode<MessageHeader>(bytes.substr(0, kHeaderBytes));
  if (!header) return header;
  const bool eager = header->kind == HeaderKind::Eager;
  const std::size_t payload = bytes.size() - kHeaderBytes;
  // The count is checked by itself, since its bytes may overflow to a small number.
  if (payload > longest || (eager && static_cast<std::size_t>(header->count) > longest) ||
      payload != (eager ? header->bytes() : 0)) {
    return fail(ErrorCode::Corrupt, "a message of another length than it says");
  }
  if (eager != (header->offer == 0) && header->kind != HeaderKind::Refused) {
    return fail(ErrorCode::Corrupt, "a message header without its number");
  }
  return header;
}

namespace {

// Calls and matching. Waiting and failures are in matcher_waiting.cpp.

// Limit of eager messages to a peer that have not met a receive, since the receiver has to keep them in its memory.
// Further messages are offered instead.
constexpr std::uint64_t kMostUnmet = 256;
// Size from which a message wakes the thread immediately: moving it takes longer than waking the thread.
constexpr std::size_t kWorthWaking = std::size_t{256} << 10;

bool is_answer(HeaderKind kind) noexcept {
  return kind == HeaderKind::Grant || kind == HeaderKind::Done || kind == HeaderKind::Refused;
}

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

MessageHeader letter_of(const Message& message, HeaderKind kind) noexcept {
  MessageHeader header;
  header.kind = kind;
  header.dtype = message.dtype;
  header.tag = message.tag;
  header.count = message.count;
  return header;
}

}  // namespace

MessageWork::~MessageWork() = default;

// --- calls ---

Matcher::PeerState& Matcher::open(int peer) {
  auto& peer_state = peer_states_[static_cast<std::size_t>(peer)];
  if (!peer_state) {
    peer_state = std::make_unique<PeerState>();
    peer_state->peer = peer;
    for (Channels* const kind : owner_.kinds) {
      if (!kind->leads_to(peer)) continue;
      peer_state->kind = kind;
      peer_state->channel = kind->open(peer);
      break;
    }
    opened_.push_back(peer_state.get());
  }
  return *peer_state;
}

void Matcher::open_all() {
  for (int peer = 0; peer < members_.size(); ++peer) {
    if (peer != rank_) open(peer);
  }
}

Work Matcher::submit(const Request& request) {
  Message message = message_of(request);
  const bool any = message.peer == kAnySource;
  for (Channels* const kind : owner_.kinds) {  // something may have come from the peer
    if (kind->is_driven && kind->attended.load(std::memory_order_relaxed) == 0 && (any || kind->leads_to(message.peer)))
      kind->look();
  }
  const bool is_observed = observed();
  const auto called = is_observed ? Clock::now() : Clock::time_point{};
  std::optional<Error> failed;
  WorkPtr work;
  {
    Lock lock(mutex_);
    message.number = ++submitted_;
    if (members_.ended()) {
      failed = members_.recorded(to_string(message), message.number);
    } else if (any) {
      work = pend(nullptr, message, called);
    } else {
      PeerState& peer_state = open(message.peer);
      const bool over =
          message.kind == Kind::Send ? send_at_once(peer_state, message) : receive_at_once(peer_state, message, failed);
      if (!over) {
        work = pend(&peer_state, message, called);
      } else if (!failed && peer_state.late_refusal) {
        failed = late(peer_state, message);
      }
    }
    if (!finished_.empty()) settle(lock);
  }
  if (work) return Work(std::move(work));
  if (is_observed) report(message, called, called, Clock::now(), failed.has_value());
  return failed ? Work(std::make_shared<FailedWork>(*std::move(failed))) : Work();
}

bool Matcher::may_be_eager(PeerState& peer_state, std::size_t bytes) const noexcept {
  if (bytes > peer_state.channel->eager_bytes) return false;
  if (peer_state.eager - peer_state.eager_met < kMostUnmet) return true;
  peer_state.eager_met = std::min(peer_state.channel->met(), peer_state.eager);
  return peer_state.eager - peer_state.eager_met < kMostUnmet;
}

/// Takes the answers at the front of the channel, up to the first other header.
void Matcher::take_answers(PeerState& peer_state) {
  Arrival arrival;
  while (peer_state.channel->peek(arrival) && is_answer(arrival.header.kind)) take(peer_state, arrival);
}

bool Matcher::send_at_once(PeerState& peer_state, const Message& message) {
  take_answers(peer_state);
  if (!peer_state.outbox.empty() || !may_be_eager(peer_state, message.bytes())) return false;
  if (!peer_state.channel->put(letter_of(message, HeaderKind::Eager), message.from)) return false;
  ++peer_state.eager;
  return true;
}

bool Matcher::receive_at_once(PeerState& peer_state, const Message& message, std::optional<Error>& failed) {
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

Matcher::WorkPtr Matcher::pend(PeerState* peer_state, const Message& message, Clock::time_point called) {
  if (called == Clock::time_point{}) called = Clock::now();
  WorkPtr work = std::make_shared<MessageWork>(*this, owner_.keep(), message, called);
  count(peer_state, 1);
  if (message.kind == Kind::Send) {
    peer_state->outbox.push_back({{HeaderKind::None}, work});
    flush(*peer_state);
  } else if (peer_state != nullptr) {
    receive(*peer_state, work);
  } else {
    receive_any(work);
  }
  const Channels& at = peer_state != nullptr ? *peer_state->kind : home_;
  if (!at.is_driven && at.pending > 0) {
    if (!thread_.joinable()) start_thread();
    if (dozing_ || message.bytes() >= kWorthWaking) home_.wake();
  }
  return work;
}

void Matcher::receive(PeerState& peer_state, const WorkPtr& work) {
  const auto found = std::find_if(peer_state.unexpected.begin(), peer_state.unexpected.end(),
                                  [&](const Unexpected& message) { return message.header.tag == work->message_.tag; });
  if (found != peer_state.unexpected.end()) {
    const Unexpected message = std::move(*found);
    peer_state.unexpected.erase(found);
    meet(peer_state, work, message.header, message.payload.data());
    return;
  }
  peer_state.receives.push_back(work);
  drain(peer_state);
}

/// Takes all headers that have come, from each peer in turn, to determine the first message with the receive's tag.
void Matcher::receive_any(const WorkPtr& work) {
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
    const auto found =
        std::find_if(peer_state->unexpected.begin(), peer_state->unexpected.end(),
                     [&](const Unexpected& message) { return message.header.tag == work->message_.tag; });
    if (found == peer_state->unexpected.end() || (from != nullptr && first->arrival < found->arrival)) continue;
    from = peer_state;
    first = found;
  }
  if (from == nullptr) return any_receives_.push_back(work);
  const Unexpected message = std::move(*first);
  from->unexpected.erase(first);
  work->message_.peer = from->peer;
  meet(*from, work, message.header, message.payload.data());
}

// --- headers out ---

/// Sends an answer. `ends`: a receive that is over when the answer has been put on the channel.
void Matcher::answer(PeerState& peer_state, const MessageHeader& header, WorkPtr ends) {
  peer_state.outbox.push_back({header, std::move(ends)});
  flush(peer_state);
}

/// Puts headers of the outbox on the channel while there is space. Returns true if any was put.
bool Matcher::flush(PeerState& peer_state) {
  bool moved = false;
  while (!peer_state.outbox.empty()) {
    const Outgoing& next = peer_state.outbox.front();
    MessageHeader header = next.header;
    const bool is_message = header.kind == HeaderKind::None;
    const std::byte* payload = nullptr;
    if (is_message) {
      const Message& message = next.work->message_;
      const bool eager = may_be_eager(peer_state, message.bytes());
      header = letter_of(message, eager ? HeaderKind::Eager : HeaderKind::Offer);
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
      work->offer_ = ++peer_state.offers;
      peer_state.offered.push_back(work);
      continue;
    }
    if (is_message) {
      ++peer_state.eager;
      mark_met(*work);
    }
    if (work) complete(work, std::exchange(work->refusal_, std::nullopt));
  }
  return moved;
}

// --- headers in ---

bool Matcher::drain(PeerState& peer_state) {
  bool moved = false;
  Arrival arrival;
  while (wants_letters(peer_state) && peer_state.channel->peek(arrival)) {
    take(peer_state, arrival);
    moved = true;
  }
  return moved;
}

/// Takes the receive that was started first among those that match a message of the peer with this tag.
Matcher::WorkPtr Matcher::take_receive(PeerState& peer_state, std::int32_t tag) {
  const auto fits = [&](const WorkPtr& work) { return work->message_.tag == tag; };
  auto found = std::find_if(peer_state.receives.begin(), peer_state.receives.end(), fits);
  const auto any = std::find_if(any_receives_.begin(), any_receives_.end(), fits);
  std::deque<WorkPtr>* list = &peer_state.receives;
  if (any != any_receives_.end() &&
      (found == peer_state.receives.end() || (*any)->message_.number < (*found)->message_.number)) {
    found = any;
    list = &any_receives_;
    (*any)->message_.peer = peer_state.peer;
  }
  if (found == list->end()) return nullptr;
  WorkPtr work = std::move(*found);
  list->erase(found);
  return work;
}

Matcher::WorkPtr Matcher::take_offered(PeerState& peer_state, std::uint64_t offer) {
  const auto found = std::find_if(peer_state.offered.begin(), peer_state.offered.end(),
                                  [&](const WorkPtr& work) { return work->offer_ == offer; });
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
void Matcher::take(PeerState& peer_state, const Arrival& arrival) {
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
      work->transfer_ = peer_state.channel->send_payload(work->message_, header.offer);
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
          complete(work, refusal(work->message_, header));
      } else if (!peer_state.late_refusal) {
        Message own;
        own.peer = peer_state.peer;
        own.tag = header.tag;
        own.dtype = header.dtype;
        own.count = header.count;
        peer_state.late_refusal = refusal(own, header);
      }
      break;
    }
    case HeaderKind::None:
    case HeaderKind::OfChannel: break;
  }
  peer_state.channel->take();
}

/// Handles a receive and the message that matches it.
void Matcher::meet(PeerState& peer_state, const WorkPtr& work, const MessageHeader& header, const std::byte* payload) {
  mark_met(*work);
  const Message& own = work->message_;
  if (header.kind == HeaderKind::Eager) return complete(work, deliver(peer_state, own, header, payload));
  const bool fits = own.dtype == header.dtype && own.count == header.count;
  work->offer_ = header.offer;
  MessageHeader back = header;
  if (fits && own.count > 0) {
    work->transfer_ = peer_state.channel->receive_payload(own, header);
    peer_state.moving.push_back(work);
    back.kind = HeaderKind::Grant;
    if (work->transfer_->asks_sender) answer(peer_state, back);
    return;
  }
  back.kind = fits ? HeaderKind::Done : HeaderKind::Refused;
  back.expected = own.dtype;
  back.expected_count = own.count;
  if (!fits) work->refusal_ = refusal(own, back);
  answer(peer_state, back, work);
}

std::optional<Error> Matcher::deliver(PeerState& peer_state, const Message& to, const MessageHeader& header,
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
  return refusal(to, back);
}

// --- payloads ---

bool Matcher::move_payloads(PeerState& peer_state, Lock& lock) {
  for (std::size_t i = 0; i < peer_state.moving.size(); ++i) {
    const WorkPtr work = peer_state.moving[i];
    if (work->transfer_->busy) continue;
    const auto step = work->transfer_->step(lock);  // the list may have changed if the step moved anything
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
    if (work->message_.kind == Kind::Send || work->transfer_->asks_sender) {
      complete(work, std::nullopt);
    } else {
      MessageHeader done;
      done.kind = HeaderKind::Done;
      done.offer = work->offer_;
      answer(peer_state, done, work);
    }
    return true;
  }
  return false;
}

/// Makes all messages progress as far as possible. The mutex is held on entry and on return, but not all the time.
bool Matcher::progress(Lock& lock) {
  if (members_.ended()) {
    if (pending_ == 0) return false;
    fail_all();
    return !finished_.empty();
  }
  bool moved = false;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    PeerState& peer_state = *opened_[i];
    if (wants_letters(peer_state) && drain(peer_state)) moved = true;
    if (!peer_state.outbox.empty() && flush(peer_state)) moved = true;
    if (!peer_state.moving.empty() && move_payloads(peer_state, lock)) moved = true;
  }
  return moved;
}

}  // namespace cohort::comm::messages
