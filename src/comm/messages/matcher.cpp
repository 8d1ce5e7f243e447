// Calls and matching. Waiting is in matcher_waiting.cpp, how messages fail in matcher_faults.cpp.
#include "comm/messages/matcher.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace cohort::comm::messages {
namespace {

// Messages that were sent before anyone receives them lie in the receiver's memory. After so many, sends wait for
// theirs.
constexpr std::uint64_t kMostUnmet = 256;
// From this size on the thread is woken at once: it has more to do than being woken costs.
constexpr std::size_t kWorthWaking = std::size_t{256} << 10;

bool is_answer(LetterKind kind) noexcept {
  return kind == LetterKind::Grant || kind == LetterKind::Done || kind == LetterKind::Refused;
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

Letter letter_of(const Message& message, LetterKind kind) noexcept {
  Letter letter;
  letter.kind = kind;
  letter.dtype = message.dtype;
  letter.tag = message.tag;
  letter.count = message.count;
  return letter;
}

}  // namespace

MessageWork::~MessageWork() = default;

// --- calls ---

Matcher::Channel& Matcher::open(int peer) {
  auto& channel = channels_[static_cast<std::size_t>(peer)];
  if (!channel) {
    channel = std::make_unique<Channel>();
    channel->peer = peer;
    for (Paths* const kind : owner_.kinds) {
      if (!kind->leads_to(peer)) continue;
      channel->kind = kind;
      channel->path = kind->open(peer);
      break;
    }
    opened_.push_back(channel.get());
  }
  return *channel;
}

void Matcher::open_all() {
  for (int peer = 0; peer < members_.size(); ++peer) {
    if (peer != rank_) open(peer);
  }
}

Work Matcher::submit(const Request& request) {
  Message message = message_of(request);
  const bool any = message.peer == kAnySource;
  for (Paths* const kind : owner_.kinds) {  // there may be news of the peer
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
      Channel& channel = open(message.peer);
      const bool over =
          message.kind == Kind::Send ? send_at_once(channel, message) : receive_at_once(channel, message, failed);
      if (!over) {
        work = pend(&channel, message, called);
      } else if (!failed && channel.late_refusal) {
        failed = late(channel, message);
      }
    }
    if (!finished_.empty()) settle(lock);
  }
  if (work) return Work(std::move(work));
  if (is_observed) report(message, called, called, Clock::now(), failed.has_value());
  return failed ? Work(std::make_shared<FailedWork>(*std::move(failed))) : Work();
}

bool Matcher::may_be_eager(Channel& channel, std::size_t bytes) const noexcept {
  if (bytes > channel.path->eager_bytes) return false;
  if (channel.eager - channel.eager_met < kMostUnmet) return true;
  channel.eager_met = std::min(channel.path->met(), channel.eager);
  return channel.eager - channel.eager_met < kMostUnmet;
}

/// Those that nothing else stands before.
void Matcher::take_answers(Channel& channel) {
  Arrival arrival;
  while (channel.path->peek(arrival) && is_answer(arrival.letter.kind)) take(channel, arrival);
}

bool Matcher::send_at_once(Channel& channel, const Message& message) {
  take_answers(channel);
  if (!channel.outbox.empty() || !may_be_eager(channel, message.bytes())) return false;
  if (!channel.path->put(letter_of(message, LetterKind::Eager), message.from)) return false;
  ++channel.eager;
  return true;
}

bool Matcher::receive_at_once(Channel& channel, const Message& message, std::optional<Error>& failed) {
  Arrival arrival;
  while (channel.path->peek(arrival)) {
    const Letter& letter = arrival.letter;
    if (is_answer(letter.kind)) {
      take(channel, arrival);
      continue;
    }
    if (letter.kind != LetterKind::Eager || letter.tag != message.tag) return false;
    if (!channel.receives.empty() || !any_receives_.empty() || !channel.unexpected.empty()) return false;
    failed = deliver(channel, message, letter, arrival.payload);
    channel.path->take();
    return true;
  }
  return false;
}

Matcher::WorkPtr Matcher::pend(Channel* channel, const Message& message, Clock::time_point called) {
  if (called == Clock::time_point{}) called = Clock::now();
  WorkPtr work = std::make_shared<MessageWork>(*this, owner_.keep(), message, called);
  count(channel, 1);
  if (message.kind == Kind::Send) {
    channel->outbox.push_back({{LetterKind::None}, work});
    flush(*channel);
  } else if (channel != nullptr) {
    receive(*channel, work);
  } else {
    receive_any(work);
  }
  const Paths& at = channel != nullptr ? *channel->kind : home_;
  if (!at.is_driven && at.pending > 0) {
    if (!thread_.joinable()) start_thread();
    if (dozing_ || message.bytes() >= kWorthWaking) home_.wake();
  }
  return work;
}

void Matcher::receive(Channel& channel, const WorkPtr& work) {
  const auto found = std::find_if(channel.unexpected.begin(), channel.unexpected.end(),
                                  [&](const Unexpected& message) { return message.letter.tag == work->message_.tag; });
  if (found != channel.unexpected.end()) {
    const Unexpected message = std::move(*found);
    channel.unexpected.erase(found);
    meet(channel, work, message.letter, message.payload.data());
    return;
  }
  channel.receives.push_back(work);
  drain(channel);
}

/// What has come by now is put aside in turns, so that the first of it can be told.
void Matcher::receive_any(const WorkPtr& work) {
  open_all();
  for (bool moved = true; moved;) {
    moved = false;
    for (Channel* const channel : opened_) {
      Arrival arrival;
      if (!channel->path->peek(arrival)) continue;
      take(*channel, arrival);
      moved = true;
    }
  }
  Channel* from = nullptr;
  std::deque<Unexpected>::iterator first;
  for (Channel* const channel : opened_) {
    const auto found =
        std::find_if(channel->unexpected.begin(), channel->unexpected.end(),
                     [&](const Unexpected& message) { return message.letter.tag == work->message_.tag; });
    if (found == channel->unexpected.end() || (from != nullptr && first->arrival < found->arrival)) continue;
    from = channel;
    first = found;
  }
  if (from == nullptr) return any_receives_.push_back(work);
  const Unexpected message = std::move(*first);
  from->unexpected.erase(first);
  work->message_.peer = from->peer;
  meet(*from, work, message.letter, message.payload.data());
}

// --- letters out ---

/// `ends`: a receive that is over once the peer has been told.
void Matcher::answer(Channel& channel, const Letter& letter, WorkPtr ends) {
  channel.outbox.push_back({letter, std::move(ends)});
  flush(channel);
}

/// Puts what is to be put while there is room.
bool Matcher::flush(Channel& channel) {
  bool moved = false;
  while (!channel.outbox.empty()) {
    const Outgoing& next = channel.outbox.front();
    Letter letter = next.letter;
    const bool is_message = letter.kind == LetterKind::None;
    const std::byte* payload = nullptr;
    if (is_message) {
      const Message& message = next.work->message_;
      const bool eager = may_be_eager(channel, message.bytes());
      letter = letter_of(message, eager ? LetterKind::Eager : LetterKind::Offer);
      if (!eager) {
        letter.offer = channel.offers + 1;
        letter.address = reinterpret_cast<std::uint64_t>(message.from);
      }
      payload = message.from;
    }
    if (!channel.path->put(letter, payload)) return moved;
    const WorkPtr work = next.work;
    channel.outbox.pop_front();
    moved = true;
    if (letter.kind == LetterKind::Offer) {
      work->offer_ = ++channel.offers;
      channel.offered.push_back(work);
      continue;
    }
    if (is_message) {
      ++channel.eager;
      mark_met(*work);
    }
    if (work) complete(work, std::exchange(work->refusal_, std::nullopt));
  }
  return moved;
}

// --- letters in ---

bool Matcher::drain(Channel& channel) {
  bool moved = false;
  Arrival arrival;
  while (wants_letters(channel) && channel.path->peek(arrival)) {
    take(channel, arrival);
    moved = true;
  }
  return moved;
}

/// The receive that was started first of those that a message of the peer with this tag may meet.
Matcher::WorkPtr Matcher::take_receive(Channel& channel, std::int32_t tag) {
  const auto fits = [&](const WorkPtr& work) { return work->message_.tag == tag; };
  auto found = std::find_if(channel.receives.begin(), channel.receives.end(), fits);
  const auto any = std::find_if(any_receives_.begin(), any_receives_.end(), fits);
  std::deque<WorkPtr>* list = &channel.receives;
  if (any != any_receives_.end() &&
      (found == channel.receives.end() || (*any)->message_.number < (*found)->message_.number)) {
    found = any;
    list = &any_receives_;
    (*any)->message_.peer = channel.peer;
  }
  if (found == list->end()) return nullptr;
  WorkPtr work = std::move(*found);
  list->erase(found);
  return work;
}

Matcher::WorkPtr Matcher::take_offered(Channel& channel, std::uint64_t offer) {
  const auto found = std::find_if(channel.offered.begin(), channel.offered.end(),
                                  [&](const WorkPtr& work) { return work->offer_ == offer; });
  if (found == channel.offered.end()) {
    Message what;
    what.peer = channel.peer;
    end(what, channel.peer, ErrorCode::Corrupt,
        fmt::format("rank {} ({}) answered a message that rank {} ({}) has not offered -- do all ranks run the same "
                    "build?",
                    channel.peer, members_.host_name(channel.peer), rank_, members_.host_name(rank_)));
    return nullptr;
  }
  WorkPtr work = std::move(*found);
  channel.offered.erase(found);
  return work;
}

/// Takes what has come first.
void Matcher::take(Channel& channel, const Arrival& arrival) {
  const Letter& letter = arrival.letter;
  switch (letter.kind) {
    case LetterKind::Eager:
    case LetterKind::Offer: {
      if (const WorkPtr work = take_receive(channel, letter.tag)) {
        meet(channel, work, letter, arrival.payload);
        break;
      }
      Unexpected message;
      message.letter = letter;
      message.arrival = ++arrivals_;
      if (letter.kind == LetterKind::Eager) message.payload.assign(arrival.payload, arrival.payload + letter.bytes());
      channel.unexpected.push_back(std::move(message));
      break;
    }
    case LetterKind::Grant: {
      const WorkPtr work = take_offered(channel, letter.offer);
      if (!work) break;
      mark_met(*work);
      work->transfer_ = channel.path->send_payload(work->message_, letter.offer);
      channel.moving.push_back(work);
      break;
    }
    case LetterKind::Done: {
      if (const WorkPtr work = take_offered(channel, letter.offer)) complete(work, std::nullopt);
      break;
    }
    case LetterKind::Refused: {
      if (letter.offer != 0) {
        if (const WorkPtr work = take_offered(channel, letter.offer)) complete(work, refusal(work->message_, letter));
      } else if (!channel.late_refusal) {
        Message own;
        own.peer = channel.peer;
        own.tag = letter.tag;
        own.dtype = letter.dtype;
        own.count = letter.count;
        channel.late_refusal = refusal(own, letter);
      }
      break;
    }
    case LetterKind::None:
    case LetterKind::OfPath: break;
  }
  channel.path->take();
}

/// A receive and its message.
void Matcher::meet(Channel& channel, const WorkPtr& work, const Letter& letter, const std::byte* payload) {
  mark_met(*work);
  const Message& own = work->message_;
  if (letter.kind == LetterKind::Eager) return complete(work, deliver(channel, own, letter, payload));
  const bool fits = own.dtype == letter.dtype && own.count == letter.count;
  work->offer_ = letter.offer;
  Letter back = letter;
  if (fits && own.count > 0) {
    work->transfer_ = channel.path->receive_payload(own, letter);
    channel.moving.push_back(work);
    back.kind = LetterKind::Grant;
    if (work->transfer_->asks_sender) answer(channel, back);
    return;
  }
  back.kind = fits ? LetterKind::Done : LetterKind::Refused;
  back.expected = own.dtype;
  back.expected_count = own.count;
  if (!fits) work->refusal_ = refusal(own, back);
  answer(channel, back, work);
}

std::optional<Error> Matcher::deliver(Channel& channel, const Message& to, const Letter& letter,
                                      const std::byte* payload) {
  channel.path->note_met();
  if (to.dtype == letter.dtype && to.count == letter.count) {
    if (const std::size_t bytes = to.bytes(); bytes > 0) std::memcpy(to.to, payload, bytes);
    return std::nullopt;
  }
  Letter back = letter;
  back.kind = LetterKind::Refused;
  back.expected = to.dtype;
  back.expected_count = to.count;
  answer(channel, back);
  return refusal(to, back);
}

// --- payloads ---

bool Matcher::move_payloads(Channel& channel, Lock& lock) {
  for (std::size_t i = 0; i < channel.moving.size(); ++i) {
    const WorkPtr work = channel.moving[i];
    if (work->transfer_->busy) continue;
    const auto step = work->transfer_->step(lock);  // the list may be another one afterwards, if it has moved
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
    channel.moving.erase(std::find(channel.moving.begin(), channel.moving.end(), work));
    if (work->message_.kind == Kind::Send || work->transfer_->asks_sender) {
      complete(work, std::nullopt);
    } else {
      Letter done;
      done.kind = LetterKind::Done;
      done.offer = work->offer_;
      answer(channel, done, work);
    }
    return true;
  }
  return false;
}

/// Moves what can be moved now. The mutex is held on entry and on return, but not all the time.
bool Matcher::progress(Lock& lock) {
  if (members_.ended()) {
    if (pending_ == 0) return false;
    fail_all();
    return !finished_.empty();
  }
  bool moved = false;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    Channel& channel = *opened_[i];
    if (wants_letters(channel) && drain(channel)) moved = true;
    if (!channel.outbox.empty() && flush(channel)) moved = true;
    if (!channel.moving.empty() && move_payloads(channel, lock)) moved = true;
  }
  return moved;
}

}  // namespace cohort::comm::messages
