// The backend of ranks on several hosts: its queue, and how an operation is run.
#pragma once

#include "comm/engine/agreement.h"
#include "comm/engine/channel.h"
#include "comm/engine/matcher.h"
#include "comm/engine/queue.h"
#include "comm/engine/queue_communicator.h"
#include "comm/hosts/context.h"
#include "comm/hosts/world.h"
#include "comm/shm/local_communicator.h"

#include <cohort/observer.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {

// Channels between hosts, for the matcher of sends and receives. Headers travel as the Transport's messages, together
// with small payloads; a large payload is offered, and sent as a frame on request. Messages from the transport are
// stored under this class's mutex. Lock order: the matcher's mutex, the transport's, this one. For the permitted
// callers, see engine/channel.h.
class TransportChannel;

class TransportChannels final : public messages::Channels {
 public:
  /// `world` has to outlive the channels.
  explicit TransportChannels(World& world);
  ~TransportChannels() override;

  bool leads_to(int peer) const noexcept override { return world_.layout().host_of(peer) != world_.layout().host; }
  std::unique_ptr<messages::Channel> open(int peer) override;
  bool look() override { return transport_.progress(); }
  std::uint32_t bell() noexcept override { return 0; }
  void arm(bool) noexcept override {}  // any message ends a sleep
  void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) override;
  void wake() noexcept override { transport_.wake(); }

 private:
  friend class TransportChannel;
  struct Inbox;
  Inbox& inbox(int peer);
  void on_message(int peer, std::string_view bytes);

  World& world_;
  transport::Transport& transport_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;  // by rank; made at the first message or `open`
};

// Runs one collective after the other over ranks on several hosts. Every operation begins with a round (round.cpp), in
// which all ranks learn the others' descriptions; a disagreement is refused before any result is delivered. Then data
// moves through the local world inside hosts and through the transport between them (context.h, docs/design/hosts.md).
// One thread at a time runs operations. After a failure other than Mismatch the world has ended.
class Engine {
 public:
  using Clock = std::chrono::steady_clock;

  Engine(World& world, Waiters& waiters, std::function<void()> meanwhile)
      : context_(world, waiters, std::move(meanwhile)) {}

  /// Runs a whole operation. Throws Mismatch (the engine stays usable) or the error that ended the world.
  void run(const Request& request, Clock::time_point called, CollectiveEvent* event);
  /// Serves the other ranks' operations until all ranks have joined; `patience` is the timeout of each operation.
  int join(std::chrono::milliseconds patience);
  /// Implements Turn::attend.
  void attend() { context_.attend(); }

 private:
  Context context_;
  Round round_;
};

// The operations of a world on several hosts: collectives in a queue, whose thread also drives the transport while no
// other thread waits, and sends and receives. Lock order: the queue's mutex, then the transport's.
class Core final : public Queue {
 public:
  Core(const FormOptions& options, std::unique_ptr<Place> place);
  /// Call after a shared_ptr owns this object.
  void begin();

  Work submit(const Request& request) override;
  void abort(std::string_view reason) override;
  void stop() override;
  bool in_child() const noexcept override { return world_.in_child(); }

  World& world() noexcept { return world_; }

 private:
  std::vector<messages::Channels*> kinds();
  bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
               CollectiveEvent* event) override;
  int run_join(std::chrono::milliseconds patience) override { return engine_.join(patience); }
  std::byte* fusing() override;
  bool wants_rousing() override { return asleep_; }
  void rouse() noexcept override { world_.transport().wake(); }
  void leave_to_thread() noexcept override;
  int ranks() const noexcept override { return world_.layout().size; }
  void attend() override { engine_.attend(); }
  bool ended() noexcept override;
  Error recorded(const std::string& doing) const override { return world_.recorded(doing, 0); }
  void tell_over(std::uint64_t number) noexcept override;
  bool are_over(std::uint64_t number) const noexcept override;
  void serve();

  World world_;
  std::optional<local::ShmChannels> lanes_;  // channels to the ranks of this host
  TransportChannels wire_;
  messages::Matcher matcher_;
  Engine engine_;
  bool asleep_ = false;  // the thread sleeps in the transport
  bool left_ = false;    // a caller that waits with a deadline leaves the first operation to the thread
  std::vector<std::byte> fusing_;
};

// The backend of ranks on several hosts. One thread at a time, except that any thread may call `abort`.
class HostsCommunicator final : public QueueCommunicator {
 public:
  /// `place` is set for a group, whose members have exchanged their addresses; otherwise the store has the addresses.
  explicit HostsCommunicator(const FormOptions& options, std::unique_ptr<Place> place = nullptr);

  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) override;
  std::shared_ptr<MemoryBlock> allocate_shared(std::size_t bytes) override;
  std::vector<int> hosts() const override { return core().world().options().hosts; }

 private:
  Core& core() const noexcept { return static_cast<Core&>(*queue_); }
  std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                               std::chrono::milliseconds timeout, bool background) override;
};

}  // namespace cohort::comm::hosts
