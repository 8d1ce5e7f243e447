// Send and receive between the ranks of a host, apart from the collectives. Messages are matched by tag, with one tag
// in order: small ones travel in the cells of a lane (channels_memory.h) and their send is over at once; of larger ones
// the receiver reads the payload out of the sender's memory through the kernel, or, where it may not, has it sent in
// fragments. A cell is taken out as long as a receive waits or a send wants its answer, and what nobody waits for yet
// is kept aside, so that no message stands in another's way. Any thread may call; all state is under one mutex. Whoever
// waits makes everything progress; when nobody does, a thread of its own, which sleeps until a peer rings.
#pragma once

#include "comm/control/fork_guard.h"
#include "comm/local/channels_memory.h"
#include "comm/local/channels_work.h"
#include "comm/local/protocol.h"
#include "comm/local/world.h"

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
#include <thread>
#include <vector>

namespace cohort::comm::local {

class Channels final : public Carrier {
 public:
  /// What the channels share with their owner. All of it outlives them.
  struct Owner {
    World& world;  ///< formed, with its plan made
    const ForkGuard& guard;
    const std::atomic<Observer*>& observer;
    std::function<std::shared_ptr<void>()> keep;  ///< keeps the channels alive as long as it is held
  };

  explicit Channels(Owner owner);
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  /// Starts a checked send or receive, whose timeout is set.
  Work submit(const Request& request);
  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }
  bool in_child() const noexcept override { return guard_.in_child(); }
  /// Waits for what is under way and ends the thread. Nothing may be submitted afterwards.
  void stop();

 private:
  using Lock = std::unique_lock<std::mutex>;
  using WorkPtr = std::shared_ptr<ChannelWork>;

  /// A message that came before its receive.
  struct Unexpected {
    CellKind kind = CellKind::None;
    std::uint64_t arrival = 0;  // among those of all peers
    std::uint64_t number = 0;
    std::int32_t tag = 0;
    DType dtype = DType::Float32;
    std::int64_t count = 0;
    std::uint64_t address = 0;
    std::vector<std::byte> payload;
  };
  /// What is to be put into the lane to the peer when there is room.
  struct Outgoing {
    CellKind kind = CellKind::None;  // None: a message; eager or an offer is decided when there is room
    WorkPtr work;                    // of a message; of Done: the receive that it ends
    std::uint64_t message = 0;       // of answers
    std::int32_t tag = 0;            // of Refused, as the next
    DType dtype = DType::Float32;
    std::int64_t count = 0;
    DType expected = DType::Float32;
    std::int64_t expected_count = 0;
  };
  /// This rank's side of both lanes between it and a peer. A work stands in one of the lists, or among `pulls_`.
  struct Channel {
    int peer = 0;
    Lane in, out;
    std::atomic<std::uint64_t> next{1};  // cell of `in`; written under the mutex
    std::uint64_t placed = 0;            // cells of `out` written
    std::atomic<std::uint64_t> room{0};  // up to this cell `out` is known to be free; written under the mutex
    std::atomic<bool> blocked{false};    // something waits for room
    std::uint64_t eager = 0;             // messages sent with their payload, and how many of them have been met
    std::uint64_t eager_met = 0;
    std::uint64_t delivered = 0;  // the same of `in`
    std::deque<Unexpected> unexpected;
    std::deque<WorkPtr> receives;   // without a message yet; those from any source are in every channel
    std::vector<WorkPtr> arriving;  // receives whose payload comes in fragments
    std::deque<Outgoing> outbox;
    std::vector<WorkPtr> offered;  // sends whose payload the receiver takes
    std::deque<WorkPtr> leaving;   // sends that go in fragments
    std::optional<Error> late_refusal;

    bool wants_cells() const noexcept { return !receives.empty() || !arriving.empty() || !offered.empty(); }
    bool has_come() const noexcept {
      const std::uint64_t number = next.load(std::memory_order_relaxed);
      return stands(in.cell(number).stamp, number);
    }
  };

  // channels.cpp: calls, waiting, progress
  Channel& open(int peer);
  std::shared_ptr<ChannelWork> pend(Channel* channel, const Message& message, Clock::time_point called);
  void open_all();
  void start_thread();
  void tell_waiting(const Message& message) noexcept;
  void run();
  bool attempt();
  bool stirred(const Channel& channel) const noexcept;
  bool stirred() const noexcept;
  bool progress(Lock& lock);
  void settle(Lock& lock);
  void complete(const WorkPtr& work, std::optional<Error> error);
  void report(const Message& message, Clock::time_point called, Clock::time_point begun, Clock::time_point met,
              bool failed) const noexcept;
  Doorbell& doorbell(int rank) const noexcept { return layout_.doorbell(base_, static_cast<std::size_t>(rank)); }
  void ring(int rank) noexcept;
  void wake() noexcept;

  // channels_cells.cpp: what goes through the lanes
  bool send_at_once(Channel& channel, const Message& message);
  bool receive_at_once(Channel& channel, const Message& message, std::optional<Error>& failed);
  void send(Channel& channel, WorkPtr work);
  void receive(Channel& channel, const WorkPtr& work);
  void receive_any(const WorkPtr& work);
  void bind(Channel& channel, const WorkPtr& work);
  void drop_elsewhere();
  bool drain(Channel& channel);
  bool flush(Channel& channel);
  bool send_fragments(Channel& channel);
  bool pull(Lock& lock);
  bool may_be_eager(Channel& channel, std::size_t bytes) const noexcept;
  bool has_room(Channel& channel) const noexcept;
  void place_message(Channel& channel, const Message& message, CellKind kind);
  void place_answer(Channel& channel, const Outgoing& answer);
  void publish(Channel& channel, CellKind kind);
  void release_cell(Channel& channel);
  void take(Channel& channel);
  void take_fragment(Channel& channel, const Cell& cell);
  void take_done(Channel& channel, const Cell& cell);
  void met(Channel& channel, const WorkPtr& work, const Unexpected& message);
  std::optional<Error> deliver(Channel& channel, const Message& to, const Unexpected& message,
                               const std::byte* payload);

  // channels_faults.cpp: how they fail
  Error refusal(const Message& own, std::int32_t tag, DType sent, std::int64_t sent_count, DType expected,
                std::int64_t expected_count) const;
  Error late(const Channel& channel, const Message& message) const;
  void look_after(Lock& lock);
  bool ends_with(const ChannelWork& work, std::string_view how) const;
  std::string sources_text() const;
  void end(const WorkPtr& work, int peer, ErrorCode code, const std::string& text);
  void fail_all();
  void lost_in_pull(Lock& lock, const WorkPtr& work, const Error& why);
  std::vector<WorkPtr> waiting(const Channel& channel) const;
  std::string timed_out(const Channel& channel, const Message& message) const;

  World& world_;
  const ForkGuard& guard_;
  const std::atomic<Observer*>& observer_;
  const std::function<std::shared_ptr<void>()> keep_;
  const int rank_;
  const ChannelLayout layout_;
  std::byte* const base_;
  const bool pulls_allowed_;

  std::mutex mutex_;
  std::vector<std::unique_ptr<Channel>> channels_;  // by peer; made at the first use
  std::vector<Channel*> opened_;
  std::deque<WorkPtr> pulls_;      // receives whose payload is read out of the sender's memory
  std::vector<WorkPtr> finished_;  // to be told to observers and callbacks
  std::uint64_t submitted_ = 0;
  std::uint64_t arrivals_ = 0;
  std::vector<WorkPtr> claims_;  // receives that are posted between hosts as well, without a message yet
  std::size_t pending_ = 0;
  Clock::time_point looked_{};
  bool stopping_ = false;
  bool dozing_ = false;  // the thread sleeps until it is woken
  std::thread thread_;

  std::atomic<int> attended_{0};     // threads that wait, and so make things progress
  std::atomic<int> asleep_{0};       // of them
  std::atomic<int> pulls_to_do_{0};  // pulls that no thread is at
  std::atomic<int> spins_;           // before yielding; adapts
};

}  // namespace cohort::comm::local
