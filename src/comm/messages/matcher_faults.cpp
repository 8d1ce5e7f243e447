// How sends and receives fail: refusals, deadlines, peers that are gone, the end of the world.
#include "comm/messages/matcher.h"
#include "transport/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace cohort::comm::messages {
namespace {

using namespace std::chrono_literals;

constexpr auto kLook = 20ms;

/// " (pid 12)", or nothing.
std::string in_brackets(const std::string& pid) { return pid.empty() ? "" : fmt::format(" ({})", pid); }

}  // namespace

std::string to_string(const Message& message) {
  const std::string peer = message.peer == kAnySource ? "any rank" : fmt::format("rank {}", message.peer);
  return fmt::format("{}({}[{}], {} {}, tag {})", name_of(message.kind), cohort::to_string(message.dtype),
                     message.count, message.kind == Kind::Send ? "to" : "from", peer, message.tag);
}

/// For either side: what was sent, and what its receiver expected.
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

/// A send that was over before its receiver refused it is reported by the next operation with that rank, once.
Error Matcher::late(PeerState& peer_state, const Message& message) const {
  const Error refused = *std::exchange(peer_state.late_refusal, std::nullopt);
  return Error(
      ErrorCode::Mismatch,
      fmt::format("{}; that send was over before it was refused, so {} reports it, which was itself carried out",
                  refused.what(), to_string(message)),
      refused.context());
}

/// All works that wait for the peer.
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

/// Whom a receive from any source has waited for, and what of theirs did not fit.
std::string Matcher::sources_text() const {
  std::string text = "none of the ranks";
  std::string others;
  for (const auto& peer_state : peer_states_) {  // all but this rank's are open by then
    if (!peer_state) continue;
    text += fmt::format("{} {}{}", text.back() == 's' ? "" : ",", peer_state->peer,
                        in_brackets(members_.pid_text(peer_state->peer)));
    if (peer_state->unexpected.empty()) continue;
    others += fmt::format("; {} messages of rank {} wait to be received, the first has tag {}",
                          peer_state->unexpected.size(), peer_state->peer, peer_state->unexpected.front().header.tag);
  }
  return text + " sent it" + others;
}

/// Whether a peer that is lost ends a work of its peer_state. From any source, others may still send where it only
/// left.
bool Matcher::ends_with(const MessageWork& work, std::string_view how) const {
  if (work.message_.peer != kAnySource || how != transport::kLeft) return true;
  return std::all_of(opened_.begin(), opened_.end(),
                     [&](const PeerState* other) { return members_.lost(other->peer).has_value(); });
}

/// From time to time: ends the world if a peer is gone that something waits for, or if a deadline has passed.
void Matcher::look_after(Lock& lock) {
  if (members_.ended()) return fail_all();
  const auto now = Clock::now();
  if (now - looked_ < kLook || idle()) return;
  looked_ = now;
  for (std::size_t i = 0; i < opened_.size(); ++i) {
    PeerState& peer_state = *opened_[i];
    if (waiting(peer_state).empty()) continue;
    if (const auto how = members_.lost(peer_state.peer)) {
      progress(lock);  // it may have done its part and then gone
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

/// The world has ended. What a thread moves right now fails when that thread is back.
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

/// A payload could not be moved: its peer is gone, or that is not allowed after all.
void Matcher::fail_moving(Lock& lock, const WorkPtr& work, const Error& why) {
  const int peer = work->message_.peer;
  work->transfer_->busy = true;  // no other thread tries meanwhile
  // A process that dies loses its memory a little before it shows as dying.
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
