// Requests of this rank's users, from the call to the end of the operation, by name and, for a known operation, by the
// bit of its slot. Users' threads and the engine's thread call their own parts, and the mutex guards what they share.
// The engine's thread changes the cache under the mutex, and reads it without. Callbacks and Handles are served without
// the mutex.
#pragma once

#include "horovod/named/engine.h"
#include "horovod/named/execution.h"
#include "horovod/named/rounds.h"
#include "horovod/named/table.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

namespace cohort::named {

/// A name that has waited for a long time on this rank.
struct Stalled {
  std::string name;
  std::int64_t milliseconds = 0;
  bool expired = false;
};

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
  std::chrono::steady_clock::time_point since;
  std::chrono::steady_clock::time_point report_at;
  Stage stage = Stage::New;
  Device device = {};  // as the caller passed it
  Marks marks = {};    // for GPU memory: the work that has to end first
};
using PendingPtr = std::shared_ptr<Pending>;

/// An operation that can be carried out. The same on all ranks except for `own`.
struct Ready {
  AgreedPtr agreed;
  std::vector<bool> lacking;  // ranks that joined and have no data
  PendingPtr own;             // null if this rank lacks it
};

inline constexpr std::size_t kWordBits = 64;  // slots in a word of bits

class Requests {
 public:
  using Clock = std::chrono::steady_clock;

  /// All arguments outlive this. `timeout`: time after which names that some ranks lack fail.
  Requests(int rank, int size, const EngineOptions& options, std::chrono::milliseconds timeout,
           std::shared_ptr<Wakeup> wakeup);

  // Users' threads.
  bool in_child() const noexcept;
  Handle submit(Request request);
  std::vector<Handle> submit(std::vector<Request> requests);
  Handle join();

  const std::shared_ptr<Wakeup>& wakeup() const noexcept { return wakeup_; }

  // The engine's thread.
  /// True if there is news for the next contribution.
  bool stirred() const noexcept { return stirred_; }
  /// Makes the next contribution necessary.
  void stir() noexcept { stirred_ = true; }
  /// Returns the time of the next check for stalls.
  Clock::time_point look_at() const;
  /// Returns names that have waited so long that the ranks should exchange which ranks lack them.
  std::vector<Stalled> take_stalled();
  struct News {
    std::vector<PendingPtr> described;  // to be described now
    std::vector<std::uint64_t> bits;    // of requests at stage Slot
    bool joins = false;
  };
  News take_news();
  /// Frees the slot of a name that is described again.
  void free_slot(const std::string& name);
  /// Returns this rank's request for a name in the table; null if this rank has joined and made no request.
  PendingPtr take_described(const std::string& name);
  /// Removes a name on which the ranks have not agreed in time. Returns this rank's request for it, or null.
  PendingPtr take_expired(const std::string& name);
  /// Returns the operations whose bits are set on all ranks. `joined`: the ranks that have joined and lack them.
  void take_slots(std::span<const std::uint64_t> words, const std::vector<bool>& joined, std::vector<Ready>& ready);
  std::optional<std::size_t> slot_of(const std::string& name) const { return cache_.slot_of(name); }
  void remember(const AgreedPtr& agreed, const Pending& own);
  void finish(std::span<const PendingPtr> done, const std::optional<Error>& error);
  void finish_join(int last_joined);
  /// Ends all requests, and refuses further ones.
  void end(const Error& why);

 private:
  PendingPtr make(Request request, Clock::time_point now) const;
  /// Accepts all requests or none.
  void enqueue(std::span<const PendingPtr> made);
  void check_open() const;
  void check_gpu(const Pending& asked);
  void demote(const Cache::Freed& freed);
  void set_slot(const PendingPtr& pending, std::size_t slot);
  PendingPtr clear_slot(std::size_t slot);

  const int rank_;
  const int size_;
  const EngineOptions& options_;
  const std::chrono::milliseconds timeout_;
  const int process_;
  const std::shared_ptr<Wakeup> wakeup_;

  mutable std::mutex mutex_;
  std::unordered_map<std::string_view, PendingPtr> pending_;  // by name; keys view the requests' names
  std::vector<PendingPtr> news_;                              // at stage New
  std::vector<std::uint64_t> bits_;                           // bits of requests at stage Slot
  std::vector<PendingPtr> by_slot_;                           // requests at stage Slot; null if the bit is not set
  Cache cache_;
  std::shared_ptr<State> join_;  // set if this rank has called join
  bool join_announced_ = false;
  Clock::time_point look_at_ = Clock::time_point::max();
  int gpu_ = -1;  // GPU of the first operation on GPU memory
  std::optional<Error> ended_;
  std::atomic<bool> stirred_{false};
};

}  // namespace cohort::named
