// The backend of ranks on one host, and its queue.
#pragma once

#include "comm/api/communicator_impl.h"
#include "comm/engine/channel.h"
#include "comm/engine/matcher.h"
#include "comm/engine/pending_work.h"
#include "comm/engine/queue.h"
#include "comm/engine/queue_communicator.h"
#include "comm/shm/algorithms.h"
#include "comm/shm/context.h"
#include "comm/shm/control.h"
#include "comm/shm/rendezvous.h"
#include "comm/shm/world.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

namespace cohort::comm::local {

// Channels through shared memory, for the matcher of sends and receives. Headers are in the cells of a ring
// (control.h), small payloads in or beside the cells. The receiver reads an offered payload from the sender's memory
// through the kernel; if it may not, the sender sends fragments through the cells. Owned by the core of a world on one
// host, or of a larger world; ranks are numbered as in that world. Callers: see engine/channel.h.
class ShmChannels final : public messages::Channels {
 public:
  /// `here`: the ranks of this host, ascending, by their numbers in the world of the matcher. `world` has been formed
  /// and has a plan, and outlives the channels.
  ShmChannels(const World& world, std::vector<int> here);

  bool leads_to(int peer) const noexcept override;
  std::unique_ptr<messages::Channel> open(int peer) override;
  bool look() override { return false; }
  std::uint32_t bell() noexcept override { return wakeup_.bell.load(); }
  void arm(bool on) noexcept override { wakeup_.sleepers.fetch_add(on ? 1u : ~0u); }
  void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) override;
  void wake() noexcept override { ring(wakeup_); }

 private:
  friend class ShmChannel;
  friend class Pull;
  static void ring(WakeupWord& door) noexcept;

  const World& world_;
  const std::vector<int> here_;
  const ShmRingLayout layout_;
  std::byte* const base_;
  WakeupWord& wakeup_;
  const bool pulls_allowed_;
  std::atomic<int> pulls_to_do_{0};  // number of pulls on which no thread works
};

// The operations of a world on one host. The caller carries out small operations if all ranks come soon, and the queue
// all others. The queue's thread is started when it is first needed. Lock order: the queue's mutex, then the mesh's.

/// State shared by the communicator, its Works and its threads.
class Core final : public Queue {
 public:
  Core(const FormOptions& options, std::unique_ptr<Rendezvous> point);

  Work submit(const Request& request) override;
  void abort(std::string_view reason) noexcept override { world_.abort(reason); }
  void stop() override;
  bool in_child() const noexcept override { return guard_->in_child(); }

  World& world() noexcept { return world_; }
  Context& context() noexcept { return context_; }
  const std::shared_ptr<ForkGuard>& guard() const noexcept { return guard_; }

 private:
  // Largest operation that, once all ranks have come, takes at most a few times as long as waking a thread for it.
  // (Waking takes 20 us on virtual machines, and the thread then takes a core from threads that compute.)
  static constexpr std::size_t kQuickBytes = std::size_t{256} << 10;

  bool run_one(const Request& request, Clock::time_point called, bool& announced, Clock::time_point limit,
               CollectiveEvent* event) override;
  int run_join(std::chrono::milliseconds patience) override { return local::join(context_, patience); }
  std::byte* fusing() override;
  bool is_quick(const Request& request) const noexcept override { return request.payload() <= kQuickBytes; }
  bool wants_rousing() override;
  void rouse() noexcept override { work_to_do_.notify_one(); }
  void leave_to_thread() noexcept override {
    if (dozing_) work_to_do_.notify_one();
  }
  int ranks() const noexcept override { return world_.size(); }
  bool lends() const noexcept override { return true; }
  void attend() override { context_.attend(); }
  bool ended() noexcept override { return world_.ended(); }
  Error recorded(const std::string& doing) const override { return world_.recorded(doing, 0); }
  void tell_over(std::uint64_t number) noexcept override;
  bool are_over(std::uint64_t number) const noexcept override;
  void progress();

  const std::shared_ptr<ForkGuard> guard_ = std::make_shared<ForkGuard>();
  World world_;
  Context context_;
  // Empty in a world of one, and in a part of a larger world, since that world has its own channels.
  std::optional<ShmChannels> channels_;
  std::optional<messages::Matcher> matcher_;
  bool dozing_ = false;                   // the thread sleeps, but soon looks for operations without being woken
  std::shared_ptr<sys::Mapping> fusing_;  // registered memory in which small buffers are carried out together
};

// The backend of ranks on one host: a Communicator over shared memory. One thread at a time, but any for `abort`.
class LocalCommunicator final : public QueueCommunicator {
 public:
  /// `point`: set if the options have the ranks' entries.
  explicit LocalCommunicator(const FormOptions& options, std::unique_ptr<Rendezvous> point = nullptr);

  std::shared_ptr<MemoryBlock> allocate(std::size_t bytes) override;
  std::shared_ptr<MemoryBlock> allocate_shared(std::size_t bytes) override;
  /// The core, for a larger world of which this one is a part.
  Core& core() const noexcept { return static_cast<Core&>(*queue_); }

 private:
  std::shared_ptr<CommunicatorImpl> form_group(int color, int key, std::span<const int> listed,
                                               std::chrono::milliseconds timeout, bool background) override;
};

}  // namespace cohort::comm::local
