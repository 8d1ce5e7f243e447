// Collectives by name: ranks may request them in any order and from any thread, and each runs when all ranks have
// requested it. An Engine owns its communicator, which nobody else may use, and a thread. Every rank of the
// communicator constructs an Engine, with equal options where the options say so. Process sets are separate engines,
// over communicators from form_group. The semantics are those of Horovod's API; README.md lists the differences. Any
// thread may call; results are in Handles.
#pragma once

#include "horovod/named/request.h"

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
  std::chrono::milliseconds waited{0};  ///< longest wait of any rank
  std::vector<int> present = {};
  std::vector<int> missing = {};
};

/// Number by which averages divide while some ranks have joined.
enum class JoinedAverage : std::uint8_t {
  AllRanks = 0,  ///< as in Horovod, where ranks that joined count as zeros
  ActiveRanks,   ///< only ranks with data
};

struct EngineOptions {
  /// Largest number of bytes of a fused operation. Equal on all ranks.
  std::size_t fusion_threshold = std::size_t{64} << 20;
  /// Number of operations that are remembered, so that requesting one again costs one bit. Equal on all ranks.
  std::size_t cache_capacity = 4096;
  /// Equal on all ranks.
  JoinedAverage joined_average = JoinedAverage::AllRanks;
  /// Names that wait for longer are reported, repeatedly at this interval.
  std::chrono::milliseconds stall_after = std::chrono::seconds(60);
  /// Names that wait for longer fail with Timeout. Default: the communicator's timeout.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// Time in which the other ranks have to notice that this rank ends.
  std::chrono::milliseconds shutdown_timeout = std::chrono::seconds(30);
  /// Called on every rank's engine thread; must be quick, and must not throw or call the engine. Default: rank 0 logs a
  /// warning.
  std::function<void(std::span<const Stall>)> on_stall = {};
};

class EngineCore;

class Engine {
 public:
  /// Does not wait for the other ranks. Throws InvalidArgument if `comm` belongs to no world.
  explicit Engine(Communicator comm, EngineOptions options = {});
  /// Calls shutdown(). Does nothing in a forked child.
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const noexcept;
  int size() const noexcept;

  /// Requests an operation. Throws InvalidArgument, and does nothing, for an invalid request, for a name that is still
  /// under way, and after `join`. Throws the error that ended the engine, if it has ended.
  Handle submit(Request request);
  /// Requests several operations. Either all or none are accepted, and they become visible together.
  std::vector<Handle> submit(std::vector<Request> requests);

  /// Declares that this rank has no more data. It contributes neutral elements until all ranks have joined, and may not
  /// submit until then. Operations requested before are still carried out.
  Handle join_async();
  /// Does join_async and waits. Returns the rank that joined last, the same on all ranks.
  int join();

  /// Returns a communicator of these ranks, numbered as listed; all ranks pass the same list. Blocks. Belongs to no
  /// world on ranks that are not in the list.
  Communicator form_group(std::span<const int> ranks);
  /// Does form_group without waiting; the communicator is Outcome::group.
  Handle form_group_async(std::span<const int> ranks);

  /// Ends the engine on all ranks, where outstanding operations fail with Aborted. Blocks until the others have
  /// noticed, for at most shutdown_timeout; then aborts the communicator. Does nothing if called again.
  void shutdown();
  /// Does shutdown without waiting.
  void begin_shutdown();
  /// Returns whether the engine has ended on this rank, so that `shutdown` and the destructor do not wait.
  bool ended() const noexcept;

  /// Counts since the engine was made, for tests and logs.
  struct Statistics {
    std::uint64_t rounds = 0;     ///< rounds of negotiation
    std::uint64_t exchanges = 0;  ///< rounds in which operations were described
    std::uint64_t batches = 0;    ///< calls of collectives that carry data
    std::uint64_t rings = 0;      ///< rounds in which peers had to be woken
  };
  Statistics statistics() const;

 private:
  std::unique_ptr<EngineCore> core_;
};

}  // namespace cohort::named
