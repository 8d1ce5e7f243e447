// Send and receive, apart from the collectives: matches messages with receives, over all kinds of channels (channel.h).
// Messages of a peer are matched by tag, and in order among those of one tag; a receive from any source gets the first
// message that has come. A small message is sent with its header, and its send ends immediately; a larger one is
// offered. Headers are read from a channel while a receive or a send waits for one. A message without a receive is kept
// aside, so that it does not block the messages behind it. Any thread may call. All state is under one mutex, which is
// locked before those of channels. Any waiting thread makes all messages progress. If no thread waits, calls of
// `attend` and the matcher's own thread do; that thread sleeps until a peer wakes it.
#pragma once

#include "comm/engine/channel.h"
#include "comm/engine/pending_work.h"

#include <cohort/observer.h>
#include <cohort/work.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace cohort::comm::messages {

class Matcher final : public Carrier {
 public:
  /// State that the matcher shares with its owner, and that outlives the matcher.
  struct Owner {
    Members& members;
    std::vector<Channels*> kinds;  ///< channels to all peers; the kinds that are not driven come first
    const ForkGuard& guard;
    const std::atomic<Observer*>& observer;
    std::function<std::shared_ptr<void>()> keep;  ///< returns a pointer that keeps the matcher alive
  };

  explicit Matcher(Owner owner);
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  /// Starts a checked send or receive, whose timeout is set.
  Work submit(const Request& request);
  /// Makes messages progress. Called by code that drives a channel, after it has driven it.
  void attend();
  bool idle() const noexcept { return pending_.load() == 0; }
  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }
  bool in_child() const noexcept override { return owner_.guard.in_child(); }
  /// Ends the thread; nothing may be submitted afterwards. `waits`: first waits for the messages under way; to be false
  /// if these need the caller to progress.
  void stop(bool waits = true);

 private:
  using WorkPtr = std::shared_ptr<MessageWork>;

  /// A message that came before its receive.
  struct Unexpected {
    MessageHeader header;
    std::uint64_t arrival = 0;  // its number among the unexpected messages of all peers
    std::vector<std::byte> payload;
  };
  /// A header that waits for space on the channel to the peer.
  struct Outgoing {
    MessageHeader header;  // None: a message, which becomes Eager or an Offer when it is put on the channel
    WorkPtr work;          // the send of a message, or the receive that ends with an answer
  };
  /// State between this rank and a peer. A work that is not over is in one of these lists, or in `any_receives_`.
  struct PeerState {
    int peer = 0;
    Channels* kind = nullptr;
    std::unique_ptr<Channel> channel;
    std::uint64_t offers = 0;
    std::uint64_t eager = 0;      // messages sent with their payload
    std::uint64_t eager_met = 0;  // how many of these are known to have met their receive
    std::deque<Unexpected> unexpected;
    std::deque<WorkPtr> receives;  // receives from this peer that have no message yet
    std::deque<Outgoing> outbox;
    std::vector<WorkPtr> offered;  // sends that have been offered
    std::vector<WorkPtr> moving;   // works whose payload is being transferred
    std::optional<Error> late_refusal;
  };

  // matcher.cpp: calls and matching
  PeerState& open(int peer);
  void open_all();
  void take_answers(PeerState& peer_state);
  bool send_at_once(PeerState& peer_state, const Message& message);
  bool receive_at_once(PeerState& peer_state, const Message& message, std::optional<Error>& failed);
  WorkPtr pend(PeerState* peer_state, const Message& message, Clock::time_point called);
  void receive(PeerState& peer_state, const WorkPtr& work);
  void receive_any(const WorkPtr& work);
  bool may_be_eager(PeerState& peer_state, std::size_t bytes) const noexcept;
  void answer(PeerState& peer_state, const MessageHeader& header, WorkPtr ends = nullptr);
  bool flush(PeerState& peer_state);
  bool wants_letters(const PeerState& peer_state) const noexcept {
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
  bool progress(Lock& lock);

  // matcher_waiting.cpp: waiting, the thread, reports of works that are over, and failures
  void start_thread();
  void run();
  bool attempt();
  bool stirred(const PeerState* peer_state) const noexcept;
  void tell_waiting(const Message& message) noexcept;
  void wake_sleepers() noexcept;
  bool observed() const noexcept;
  void mark_met(MessageWork& work) const noexcept;
  void count(const PeerState* peer_state, int works) noexcept;
  void complete(const WorkPtr& work, std::optional<Error> error);
  void settle(Lock& lock);
  void report(const Message& message, Clock::time_point called, Clock::time_point met, Clock::time_point ended,
              bool failed) const noexcept;

  // failures of messages
  Error refusal(const Message& own, const MessageHeader& header) const;
  Error late(PeerState& peer_state, const Message& message) const;
  void look_after(Lock& lock);
  bool ends_with(const MessageWork& work, std::string_view how) const;
  void end(const Message& message, int peer, ErrorCode code, const std::string& text);
  void end_lost(const Message& message, int peer, const std::string& how);
  void fail_all();
  void fail_moving(Lock& lock, const WorkPtr& work, const Error& why);
  std::vector<WorkPtr> waiting(const PeerState& peer_state) const;
  std::string timed_out(const PeerState& peer_state, const Message& message) const;
  std::string sources_text() const;

  const Owner owner_;
  Members& members_;
  const int rank_;
  Channels& home_;  // channels on which the thread sleeps and receives from any source wait

  std::mutex mutex_;
  std::vector<std::unique_ptr<PeerState>> peer_states_;  // by peer; made at the first use
  std::vector<PeerState*> opened_;
  std::deque<WorkPtr> any_receives_;  // receives from any source that have no message yet
  std::vector<WorkPtr> finished_;     // works that are over, to be reported to observers and callbacks
  std::uint64_t submitted_ = 0;
  std::uint64_t arrivals_ = 0;
  Clock::time_point looked_{};
  bool stopping_ = false;
  bool dozing_ = false;  // the thread sleeps until it is woken
  std::thread thread_;

  std::atomic<std::size_t> pending_{0};  // works that are not over; written under the mutex
  std::atomic<int> tellers_{0};          // threads whose waiting is reported in the status page
  std::atomic<int> spins_;               // number of spins before yielding; adapts
};

}  // namespace cohort::comm::messages
