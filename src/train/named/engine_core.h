// The state of an Engine, and its thread, which alone calls the communicator. `mutex_` guards the state that users and
// the thread share; the thread's own state (table, joined ranks, rounds) needs no mutex. The thread changes the cache
// under the mutex, and reads the cache without it. Callbacks and Handles are served without the mutex.
#pragma once

#include "train/named/engine.h"
#include "train/named/execution.h"
#include "train/named/rounds.h"
#include "train/named/table.h"

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

namespace cohort::named {

/// A name that has waited for a long time on this rank.
struct Stalled {
  std::string name;
  std::int64_t milliseconds = 0;
  bool expired = false;
};

class EngineCore {
 public:
  EngineCore(Communicator comm, EngineOptions options);
  ~EngineCore();
  EngineCore(const EngineCore&) = delete;
  EngineCore& operator=(const EngineCore&) = delete;

  Handle submit(Request request);
  std::vector<Handle> submit(std::vector<Request> requests);
  Handle join();
  void shutdown();
  void begin_shutdown();
  bool ended() const noexcept { return over_; }
  Engine::Statistics statistics() const;
  bool in_child() const noexcept;
  int rank() const noexcept { return rank_; }
  int size() const noexcept { return size_; }

 private:
  using Clock = std::chrono::steady_clock;

  /// An operation that a user has requested and that has not ended.
  struct Pending {
    enum class Stage {
      New,        // to be described in the next round
      Described,  // in all ranks' tables
      Slot,       // the bit of its slot is set
      Running,    // requested by all ranks
    };
    Request request;
    Signature signature;
    std::shared_ptr<State> state;
    Clock::time_point since;
    Clock::time_point report_at;
    Stage stage = Stage::New;
    Device device = {};  // as the caller passed it
    Marks marks = {};    // for GPU memory: the work that has to end first
  };
  using PendingPtr = std::shared_ptr<Pending>;

  /// A rank's contribution to a round.
  struct Contribution {
    std::vector<std::uint64_t> words;  // flags, then bits
    std::vector<PendingPtr> described;
    bool joins = false;
    std::vector<Stalled> stalled;
  };
  /// An operation that can be carried out. The same on all ranks except for `own`.
  struct Ready {
    AgreedPtr agreed;
    std::vector<bool> lacking;  // ranks that joined and have no data
    PendingPtr own;             // null if this rank lacks it
  };

  // engine.cpp: users' calls, the thread, endings
  PendingPtr pending_of(Request request, Clock::time_point now) const;
  void enqueue(std::span<const PendingPtr> made);
  void check_open() const;
  void check_gpu(const Pending& asked);
  void run() noexcept;
  void agree_on_options();
  void serve();
  bool due();
  void finish(std::span<const PendingPtr> done, const std::optional<Error>& error);
  void end(const Error& why);
  std::chrono::milliseconds operation_timeout() const;

  // rounds.cpp: one round of negotiation
  bool round();  // false: the engine ends
  Contribution contribute();
  std::vector<std::uint64_t> combine(const Contribution& own);
  std::vector<std::string> exchange(const std::string& own);
  void enter_descriptions(const Contribution& own);
  void free_slot(const std::string& name);
  void demote(const Cache::Freed& freed);
  void set_slot(const PendingPtr& pending, std::size_t slot);
  PendingPtr clear_slot(std::size_t slot);
  PendingPtr take_described(const std::string& name);
  void take_slots(std::span<const std::uint64_t> words, std::vector<Ready>& ready);
  void take_table(std::vector<Ready>& ready);
  void remember(const AgreedPtr& agreed, const Pending& own);
  void take_census(const Contribution& own);
  void fail_expired(const Stall& stall);
  void finish_join();
  Error why_ended();

  // execution.cpp: operations that all ranks have requested
  void execute(std::vector<Ready> ready);
  void run_batch(std::span<const Ready> batch);
  void carry_out(std::span<const Ready> batch);
  void run_reductions(std::span<const Ready> batch);
  void run_broadcasts(std::span<const Ready> batch);
  void run_all_gather(const Ready& one);
  void run_reduce_scatter(const Ready& one);
  void run_all_to_all(const Ready& one);
  void run_group(const Ready& one);
  Buffer place(const Ready& one, std::vector<std::int64_t> shape);
  void copy_over(const ConstBuffer& from, const Buffer& to);
  std::byte* scratch(std::size_t bytes);

  // gpu.cpp: operations on GPU memory
  void run_on_gpu(std::span<const Ready> batch);
  void run_on_host(std::span<const Ready> batch);
  void run_alone(const Ready& one);
  void follow_caller(const Pending& own);

  Communicator comm_;
  const EngineOptions options_;
  const int rank_;
  const int size_;
  const int process_;
  const std::chrono::milliseconds timeout_;
  const std::shared_ptr<Wakeup> wakeup_ = std::make_shared<Wakeup>();

  mutable std::mutex mutex_;
  std::unordered_map<std::string_view, PendingPtr> pending_;  // by name; keys view the requests' names
  std::vector<PendingPtr> news_;                              // at stage New
  std::vector<std::uint64_t> bits_;                           // bits of requests at stage Slot
  std::vector<PendingPtr> by_slot_;                           // requests at stage Slot; null if the bit is not set
  Cache cache_;
  std::shared_ptr<State> join_;  // set if this rank has called join
  bool join_announced_ = false;
  Clock::time_point look_at_ = Clock::time_point::max();  // next check for stalls
  int gpu_ = -1;                                          // GPU of the first operation on GPU memory
  std::optional<Error> ended_;
  std::atomic<bool> stirred_{false};  // there is news for the next contribution
  std::atomic<bool> stopping_{false};
  std::atomic<bool> over_{false};  // the thread has ended its work

  // Used by the thread only.
  std::unique_ptr<RoundAnnouncer> announcer_;
  Table table_;
  std::vector<bool> joined_;
  int last_joined_ = -1;
  std::uint64_t round_ = 1;
  std::vector<Stalled> stalled_;  // for the next contribution
  GpuStreams streams_;
  std::vector<std::vector<std::byte>> scratch_;  // memory of the running batch
  std::atomic<std::uint64_t> rounds_{0}, exchanges_{0}, batches_{0}, rings_{0};

  std::mutex shutdown_mutex_;
  std::thread thread_;
};

}  // namespace cohort::named
