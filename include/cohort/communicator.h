// N ranks that act as one: collectives over a fixed set of ranks, which are processes or threads.
// A Communicator is a handle: copies mean the same rank of the same world. One thread at a time may call it
// (its own progress thread apart); `abort` and the accessors may be called from any thread. Operations take
// effect in the order of the calls, which has to be the same on all ranks: what differs is refused (Mismatch).
// After Timeout, PeerLost or Aborted it is never used again: form a new one.
#pragma once

#include <cohort/buffer.h>
#include <cohort/dtype.h>
#include <cohort/work.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class Observer;

namespace comm {
class CommunicatorImpl;
struct MemoryBlock;
}  // namespace comm

/// Memory that collectives read and write in place, without staging copies: a segment that peers on the same
/// host map on first use. A handle; the memory lives until its last copy is gone, after the communicator too.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::shared_ptr<comm::MemoryBlock> block) noexcept;
  void* data() const noexcept;         ///< aligned to at least 4096 bytes; zero-filled when new
  std::size_t bytes() const noexcept;  ///< as asked for
  explicit operator bool() const noexcept { return block_ != nullptr; }

 private:
  std::shared_ptr<comm::MemoryBlock> block_;
};

/// Common to all operations. `timeout` counts from the call; unset means the communicator's own.
struct BarrierOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllReduceOptions {
  ReduceOp op = ReduceOp::Sum;
  /// With ReduceOp::Average only: this rank's weight, finite and >= 0, typically its number of samples. The result
  /// is sum(weight * x) / sum(weight); a rank of weight 0 is skipped, so its NaN does no harm; equal weights
  /// give the bits of the plain average. All zero: the result is zero. Give it on all ranks or on none.
  std::optional<double> weight = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::Sum;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllGatherOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct BroadcastOptions {
  int root = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

class Communicator {
 public:
  /// Belongs to no world; only assignment and `operator bool` make sense.
  Communicator() = default;
  explicit Communicator(std::shared_ptr<comm::CommunicatorImpl> impl) noexcept;

  explicit operator bool() const noexcept { return impl_ != nullptr; }

  int rank() const noexcept;
  int size() const noexcept;
  int local_rank() const noexcept;  ///< among the ranks of this host
  int local_size() const noexcept;
  int cross_rank() const noexcept;  ///< among the ranks of the same local rank: the host's number
  int cross_size() const noexcept;
  const std::string& host() const noexcept;
  /// The deadline of operations that give none of their own.
  std::chrono::milliseconds timeout() const noexcept;

  /// Reduces `data` over all ranks, in place. Every element is folded by ascending rank, so the bits do not
  /// depend on timing, size or position. Throws InvalidArgument at once if the arguments have no meaning.
  Work all_reduce(Buffer data, const AllReduceOptions& options = {});
  /// Out of place; `input` and `output` have the same count and dtype and do not overlap, or are the same.
  Work all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options = {});
  /// `input` holds size() parts of `output.count` elements; rank r receives the reduction of part r.
  Work reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options = {});
  /// `output` receives size() parts of `input.count` elements, by ascending rank. In place: `input` is part rank().
  Work all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options = {});
  /// Copies `data` from the root to all other ranks.
  Work broadcast(Buffer data, const BroadcastOptions& options = {});
  /// Done once every rank has come to it.
  Work barrier(const BarrierOptions& options = {});

  /// Memory for zero-copy collectives. Local, not collective. Pre-faulted, so that no operation pays for
  /// first touches. Throws Unavailable when the host cannot give that much, before any of it is used.
  Memory allocate(std::size_t bytes, Device device = {});

  /// This rank has no more input: takes part in all further operations of the others without bringing anything
  /// (sums, minima and averages skip it; a broadcast from it comes from the lowest active rank instead;
  /// all_gather and reduce_scatter are refused with Mismatch on the active ranks) until every rank has
  /// called `join`. Blocks; returns the rank that called it last. (Horovod's hvd.join, as a state of the world.)
  int join(const BarrierOptions& options = {});

  /// Ends the world: every rank's pending and further operations throw Aborted with this reason and this rank.
  void abort(std::string_view reason);

  /// What happens on this communicator is told to `observer` (not owned; nullptr for none).
  void set_observer(Observer* observer) noexcept;

 private:
  std::shared_ptr<comm::CommunicatorImpl> impl_;
};

struct ThreadWorldOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
};

/// A world whose ranks are threads of this process: element r is for the thread that is to be rank r.
std::vector<Communicator> form_thread_world(int size, const ThreadWorldOptions& options = {});

/// Runs `body` as rank 0 .. size-1, each on a thread of its own, and waits for all. The first exception aborts the
/// world and is rethrown once all threads have ended.
void run_on_threads(int size, const std::function<void(Communicator)>& body, const ThreadWorldOptions& options = {});

}  // namespace cohort
