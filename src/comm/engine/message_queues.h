// Matches messages with receives: the lists of sends, receives and messages between this rank and each peer, and what
// an arriving header does to them. Messages of a peer are matched by tag, and in order if they have the same tag; a
// receive from any source gets the first message that has come. Headers are read from a channel while a receive or a
// send waits for one. A message without a receive is kept aside, so that it does not block the messages behind it.
// Under the matcher's mutex, except `stirred`, and `kind_of` for a peer that has a work.
#pragma once

#include "comm/engine/channel.h"
#include "comm/engine/message_ends.h"

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm::messages {

class MessageQueues {
 public:
  using WorkPtr = std::shared_ptr<MessageWork>;
  using Clock = Carrier::Clock;

  /// `kinds`: channels to all peers, of at least one kind.
  MessageQueues(Members& members, const std::vector<Channels*>& kinds, MessageEnds& ends);

  /// Sends or receives a message, unless it would have to wait. Returns whether it is over; `failed`: its error.
  bool at_once(const Message& message, std::optional<Error>& failed);
  /// Takes a work that is not over.
  void begin(const WorkPtr& work);
  /// Makes all messages progress as far as possible. Holds the mutex on entry and on return, but not always in between.
  bool progress(Lock& lock);
  /// Called repeatedly. Ends the world if a peer for which a work waits is lost, or if a deadline has passed.
  void look_after(Lock& lock);
  /// Fails all works after the end of the world. A work whose data a thread is moving fails when that thread returns.
  void fail_all();
  /// Logs refusals that no operation has reported. `takes`: first takes the refusals that have come meanwhile.
  void log_refusals(bool takes);

  /// True if messages of a peer may progress. kAnySource means any peer; all are open then, so the list is constant.
  bool stirred(int peer) const noexcept;
  /// The channels to the peer. kAnySource: the channels on which receives from any source wait.
  Channels& kind_of(int peer) const noexcept;

 private:
  /// A message that came before its receive.
  struct Unexpected {
    MessageHeader header;
    std::uint64_t arrival = 0;  // its number among the unexpected messages of all peers
    std::vector<std::byte> payload;
  };
  /// A header that waits for space on the channel to the peer.
  struct Outgoing {
    MessageHeader header;  // None: a message; it becomes Eager or an Offer when it is put on the channel
    WorkPtr work;          // the send of this message, or the receive that this answer ends
  };
  /// State between this rank and a peer. A work that is not over is in one of these lists, or in `any_receives_`.
  struct PeerState {
    int peer = 0;
    Channels* kind = nullptr;
    std::unique_ptr<Channel> channel;
    std::uint64_t offers = 0;
    std::uint64_t eager = 0;      // messages sent with their payload
    std::uint64_t eager_met = 0;  // number of these that are known to have met their receive
    std::deque<Unexpected> unexpected;
    std::deque<WorkPtr> receives;  // receives from this peer that have no message yet
    std::deque<Outgoing> outbox;
    std::vector<WorkPtr> offered;  // sends that have been offered
    std::vector<WorkPtr> moving;   // works whose payload is being transferred
    std::optional<Error> late_refusal;
  };

  PeerState& open(int peer);
  void open_all();
  void take_answers(PeerState& peer_state);
  bool send_at_once(PeerState& peer_state, const Message& message);
  bool receive_at_once(PeerState& peer_state, const Message& message, std::optional<Error>& failed);
  void receive(PeerState& peer_state, const WorkPtr& work);
  void receive_any(const WorkPtr& work);
  bool may_be_eager(PeerState& peer_state, std::size_t bytes) const noexcept;
  void answer(PeerState& peer_state, const MessageHeader& header, WorkPtr ends = nullptr);
  bool flush(PeerState& peer_state);
  bool wants_headers(const PeerState& peer_state) const noexcept {
    return !peer_state.receives.empty() || !peer_state.offered.empty() || !peer_state.moving.empty() ||
           !any_receives_.empty();
  }
  bool drain(PeerState& peer_state);
  void take(PeerState& peer_state, const Arrival& arrival);
  WorkPtr take_receive(PeerState& peer_state, std::int32_t tag);
  WorkPtr take_offered(PeerState& peer_state, std::uint64_t offer);
  void meet(PeerState& peer_state, const WorkPtr& work, const MessageHeader& header, const std::byte* payload);
  std::optional<Error> deliver(PeerState& peer_state, const Message& to, const MessageHeader& header,
                               const std::byte* payload);
  bool move_payloads(PeerState& peer_state, Lock& lock);

  void mark_met(MessageWork& work) const noexcept;
  void complete(const WorkPtr& work, std::optional<Error> error);
  Error late(PeerState& peer_state, const Message& message) const;
  bool ends_with(const MessageWork& work, std::string_view how) const;
  void end(const Message& message, int peer, ErrorCode code, const std::string& text);
  void end_lost(const Message& message, int peer, const std::string& how);
  void fail_moving(Lock& lock, const WorkPtr& work, const Error& why);
  std::vector<WorkPtr> waiting(const PeerState& peer_state) const;
  std::string timed_out(const PeerState& peer_state, const Message& message) const;
  std::string sources_text() const;

  Members& members_;
  const int rank_;
  const std::vector<Channels*>& kinds_;
  Channels& home_;
  MessageEnds& ends_;
  std::vector<std::unique_ptr<PeerState>> peer_states_;  // by peer; made at the first use
  std::vector<PeerState*> opened_;
  std::deque<WorkPtr> any_receives_;  // receives from any source that have no message yet
  std::uint64_t arrivals_ = 0;
  Clock::time_point looked_{};
};

}  // namespace cohort::comm::messages
