// Collectives by name: ranks may ask for them in any order and from any thread, and each is carried out once all ranks
// have asked for it. An Engine owns its communicator (nobody else may use it) and a thread. Every rank of the
// communicator makes one, with equal options where they say so. Process sets are engines of their own, over
// communicators from form_group. The semantics are those of Horovod's API; what differs is said in README.md. Any
// thread may call; results are in Handles.
#pragma once

#include "train/named/request.h"

#include <cohort/communicator.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace cohort::named {

/// A name that some ranks wait for and others have not requested.
struct Stall {
  std::string name;
  std::chrono::milliseconds waited{0};  ///< the longest of any rank
  std::vector<int> present = {};
  std::vector<int> missing = {};
};

/// Divisor of averages while some ranks have joined.
enum class JoinedAverage : std::uint8_t {
  AllRanks = 0,  ///< as Horovod: those that joined count, as zeros
  ActiveRanks,   ///< only those with data
};

struct EngineOptions {
  /// Bytes that go together at most. Equal on all ranks.
  std::size_t fusion_threshold = std::size_t{64} << 20;
  /// Operations that are remembered, so that asking again costs a bit. Equal on all ranks.
  std::size_t cache_capacity = 4096;
  /// Equal on all ranks.
  JoinedAverage joined_average = JoinedAverage::AllRanks;
  /// Names that wait for longer are reported, again and again after as long.
  std::chrono::milliseconds stall_after = std::chrono::seconds(60);
  /// Names that wait for longer fail with Timeout. Unset: the communicator's timeout.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Time that the other ranks may take to notice that this one ends.
  std::chrono::milliseconds shutdown_timeout = std::chrono::seconds(30);
  /// Called on every rank's engine thread: be quick, do not throw, do not call the engine. Unset: rank 0 logs a
  /// warning.
  std::function<void(std::span<const Stall>)> on_stall = {};
};

class EngineCore;

class Engine {
 public:
  /// Does not wait for the other ranks. Throws InvalidArgument if `comm` belongs to no world.
  explicit Engine(Communicator comm, EngineOptions options = {});
  /// Does shutdown(). In a forked child nothing is touched.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const noexcept;
  int size() const noexcept;

  /// Asks for one operation. Throws InvalidArgument (nothing was done) for an invalid request, for a name that is still
  /// under way, and after `join`; and the error that ended the engine.
  Handle submit(Request request);
  /// Asks for several at once: all or none are accepted, and they become visible together.
  std::vector<Handle> submit(std::vector<Request> requests);

  /// This rank has no more data: it serves the others with neutral elements until all ranks have joined. Operations
  /// requested before are still carried out. Until then it may not submit.
  Handle join_async();
  /// The same, and waits. Returns the rank that joined last, the same on all ranks.
  int join();

  /// A communicator of these ranks, numbered as listed; every rank asks for the same list. Blocks. Belongs to no
  /// world on ranks that are not in the list.
  Communicator form_group(std::span<const int> ranks);
  /// The same without waiting: the outcome's `group`.
  Handle form_group_async(std::span<const int> ranks);

  /// Ends the engine on all ranks: outstanding operations fail with Aborted, on each. Blocks until the others have
  /// noticed, for at most shutdown_timeout, which aborts the communicator. Again: does nothing.
  void shutdown();
  /// The same without waiting.
  void begin_shutdown();
  /// Returns whether it has ended on this rank: `shutdown` and the destructor do not wait any more.
  bool ended() const noexcept;

  /// Counts since the engine was made, for tests and logs.
  struct Statistics {
    std::uint64_t rounds = 0;     ///< of negotiation
    std::uint64_t exchanges = 0;  ///< of them, those in which operations were described
    std::uint64_t batches = 0;    ///< calls of collectives with data
    std::uint64_t rings = 0;      ///< rounds in which peers had to be woken
  };
  Statistics statistics() const;

 private:
  std::unique_ptr<EngineCore> core_;
};

}  // namespace cohort::named
