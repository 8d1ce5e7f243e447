// Send and receive between ranks on different hosts, apart from the collectives. Messages are matched by tag, with one
// tag in order. Small ones travel with their announcement and their send is over at once; larger ones are offered, and
// go when the receiver has posted where. All state is under the transport's mutex; any thread may call. Whoever waits
// drives the transport, else the communicator's thread.
#pragma once

#include "comm/control/pending_work.h"
#include "comm/hosts/world.h"

#include <cohort/observer.h>
#include <cohort/work.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::comm::hosts {

class Messenger;

/// A send or receive that was not over at once. Everything but `done` belongs to the transport's mutex.
class MessageWork final : public PendingWork {
 public:
  MessageWork(Carrier& messenger, std::shared_ptr<void> owner, const Request& request, std::uint64_t number,
              Clock::time_point called)
      : PendingWork(messenger, std::move(owner)),
        request_(request),
        any_source_(request.root == kAnySource),
        number_(number),
        called_(called) {}

  std::optional<int> source() const noexcept override {
    return any_source_ ? std::optional<int>(request_.root) : std::nullopt;
  }

 private:
  friend class Messenger;
  bool sends() const noexcept { return request_.kind == Kind::Send; }
  std::int64_t count() const noexcept { return sends() ? request_.input_count : request_.output_count; }

  /// Whether a message with this tag may become its. Then no other place has it any more.
  bool takes(std::int32_t tag) const noexcept {
    return tag == request_.tag && (!request_.claim || request_.claim->take(kBetweenHosts));
  }
  bool lies_elsewhere() const noexcept {
    return request_.claim && request_.claim->owner() != 0 && request_.claim->owner() != kBetweenHosts;
  }

  Request request_;  // only the peer changes, once
  const bool any_source_;
  const std::uint64_t number_;
  const Clock::time_point called_;
  Clock::time_point met_{};  // when the peer's side had come
  transport::Outgoing out_;
  transport::Incoming in_;
};

class Messenger final : public Carrier {
 public:
  /// What the messenger shares with its owner; all of it outlives the messenger.
  struct Owner {
    World& world;
    const std::atomic<Observer*>& observer;
    std::atomic<int>& drivers;  ///< threads that drive the transport
    std::function<std::shared_ptr<void>()> keep;
  };
  explicit Messenger(Owner owner);
  ~Messenger() override;
  Messenger(const Messenger&) = delete;
  Messenger& operator=(const Messenger&) = delete;

  /// A checked request whose timeout is set, to a rank on another host.
  Work submit(const Request& request);
  /// Goes on with what has arrived, looks after lives and deadlines, and tells those who asked to be told.
  void look_after();
  bool idle();
  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(transport_.mutex(), std::move(callback));
  }
  bool in_child() const noexcept override { return owner_.world.in_child(); }

 private:
  using WorkPtr = std::shared_ptr<MessageWork>;
  enum class MessageKind : std::uint8_t { Eager = 1, Offer, Grant, Refused, Met };
  struct Head {
    MessageKind message_kind = MessageKind::Eager;
    DType dtype = DType::Float32;
    DType expected = DType::Float32;
    std::uint8_t unused = 0;
    std::int32_t tag = 0;
    std::uint64_t id = 0;  // of the sender; of Met, how many
    std::int64_t count = 0;
    std::int64_t expected_count = 0;
  };
  struct UnexpectedMessage {
    Head head;
    std::uint64_t arrival = 0;  // among those of all peers
    std::vector<std::byte> payload;
  };
  struct Channel {
    int peer = 0;
    std::uint64_t next_id = 0;
    std::uint64_t eager_unmet = 0;  // sent and not known to be received
    std::uint64_t met = 0;          // received, and the peer not told
    std::deque<UnexpectedMessage> unexpected;
    std::deque<WorkPtr> receives;  // without a message yet; those from any source are in every channel
    std::map<std::uint64_t, WorkPtr> offered;
    std::list<WorkPtr> moving;  // payloads on their way, out or in
    std::optional<Error> late_refusal;
  };

  void tell_waiting(const MessageWork& work) noexcept;
  Channel& open(int peer);
  void on_message(int peer, std::string_view bytes);
  void tell(int peer, const Head& head, const void* payload = nullptr, std::size_t bytes = 0);
  void receive(Channel& channel, const WorkPtr& work);
  void receive_any(const WorkPtr& work);
  void bind(Channel& channel, const WorkPtr& work);
  void drop_elsewhere();
  void meet(Channel& channel, const WorkPtr& work, const UnexpectedMessage& message);
  void complete(Channel* channel, const WorkPtr& work, std::optional<Error> error);
  void report(const MessageWork& work) const;
  void settle();
  void fail_all();
  std::vector<WorkPtr> waiting(const Channel& channel) const;
  bool find_late();
  bool ends_with(const MessageWork& work, std::string_view how);
  std::string sources_text() const;
  std::string to_string(const Request& request) const;
  Error refusal(const Request& own, std::uint64_t number, const Head& head) const;
  Error late(const Channel& channel, const Request& request) const;

  const Owner owner_;
  World& world_;
  transport::Transport& transport_;
  std::map<int, Channel> channels_;
  std::vector<WorkPtr> finished_;
  std::uint64_t submitted_ = 0;
  std::uint64_t arrivals_ = 0;
  std::vector<WorkPtr> claims_;  // receives that are posted within the host as well, without a message yet
  std::atomic<std::size_t> pending_{0};
  std::atomic<int> tellers_{0};  // threads whose waiting is told in the status page
  Clock::time_point looked_{};
};

}  // namespace cohort::comm::hosts
