// N ranks that act as one: collectives over a fixed set of ranks, which are processes or threads. A Communicator is a
// handle: copies mean the same rank of the same world. One thread at a time may call it (its own progress thread
// apart); `abort` and the accessors may be called from any thread. Operations take effect in the order of the calls,
// which has to be the same on all ranks: operations that differ are refused (Mismatch). After Timeout, PeerLost or
// Aborted a Communicator cannot be used again: form a new one.
#pragma once

#include <cohort/buffer.h>
#include <cohort/collective_options.h>
#include <cohort/dtype.h>
#include <cohort/work.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort {

class Observer;

namespace comm {
class CommunicatorImpl;
class DeviceCommunicator;
struct MemoryBlock;
}  // namespace comm

namespace detail {
template <class T>
concept TensorLike = requires(const T& tensor) {
  tensor.scalar_type();
  tensor.sizes();
};
/// Implements Communicator's operations on tensors; <cohort/torch/tensor.h> has the one for at::Tensor.
template <class T>
struct OnTensors;
}  // namespace detail

/// Memory that collectives read and write in place, without staging copies: a segment that peers on the same host map
/// on first use, or GPU memory. A handle: the memory lives until the handle's last copy is gone, even after the
/// communicator.
class Memory {
 public:
  Memory() = default;
  explicit Memory(std::shared_ptr<comm::MemoryBlock> block) noexcept;
  void* data() const noexcept;         ///< aligned to at least 4096 bytes; zero-filled when new
  std::size_t bytes() const noexcept;  ///< the size given to `allocate`
  explicit operator bool() const noexcept { return block_ != nullptr; }

 private:
  std::shared_ptr<comm::MemoryBlock> block_;
};

class Communicator {
 public:
  /// Belongs to no world; only assignment and `operator bool` make sense.
  Communicator() = default;
  explicit Communicator(std::shared_ptr<comm::CommunicatorImpl> impl);

  explicit operator bool() const noexcept { return impl_ != nullptr; }

  int rank() const noexcept;
  int size() const noexcept;
  /// Rank among the ranks of this host. In an elastic job of `cohort run` this is LOCAL_RANK, which a process keeps
  /// while others leave and come: so the number may be local_size() or more, and 0 may be missing.
  int local_rank() const noexcept;
  int local_size() const noexcept;
  int cross_rank() const noexcept;  ///< this host's number among the hosts that have this local rank
  int cross_size() const noexcept;  ///< number of hosts that have this local rank
  const std::string& host() const noexcept;
  /// Number of each rank's host, from 0 without gaps, in whose order sums are folded.
  std::vector<int> hosts() const;
  /// Timeout of operations whose options have none.
  std::chrono::milliseconds timeout() const noexcept;

  // --- all ranks take part --- Buffers of different ranks have the same dtype, and the same counts unless stated
  // otherwise. Arguments without a meaning throw InvalidArgument from the call; ranks that disagree get Mismatch from
  // the Work. An output may be the input ("in place") where stated; otherwise the two share no byte.

  /// Reduces `data` over all ranks, in place. Every element is folded by ascending rank within each host, then by
  /// ascending host (by one tree above 16), so the bits depend on the layout, not on timing, size or position.
  Work all_reduce(Buffer data, const AllReduceOptions& options = {});
  /// Reduces out of place, or in place if both buffers are the same; `input` and `output` have the same count.
  Work all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options = {});
  /// Reduces in place on the root; `data` of all other ranks is unchanged.
  Work reduce(Buffer data, const ReduceOptions& options = {});
  /// `output` is used on the root only, and may be empty elsewhere.
  Work reduce(ConstBuffer input, Buffer output, const ReduceOptions& options = {});
  /// `input` holds size() parts of `output.count` elements; rank r receives the reduction of part r. In place: `output`
  /// is part rank() of `input`.
  Work reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options = {});
  /// Part r has `counts[r]` elements; `counts` is the same on all ranks. May be in place, like reduce_scatter.
  Work reduce_scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                        const ReduceScatterOptions& options = {});
  /// Copies `data` from the root to all other ranks.
  Work broadcast(Buffer data, const BroadcastOptions& options = {});
  /// `output` receives size() parts of `input.count` elements, by ascending rank. In place: `input` is part rank() of
  /// it.
  Work all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options = {});
  /// Rank r contributes `counts[r]` elements; `counts` is the same on all ranks. May be in place, like all_gather.
  Work all_gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                    const AllGatherOptions& options = {});
  /// Like all_gather, but only the root receives: `output` may be empty elsewhere.
  Work gather(ConstBuffer input, Buffer output, const GatherOptions& options = {});
  /// Like all_gather_v, but only the root receives: `output` may be empty elsewhere.
  Work gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                const GatherOptions& options = {});
  /// Rank r receives part r of the root's `input` (size() parts of `output.count`). `input` may be empty elsewhere. In
  /// place on the root: `output` is part rank() of `input`.
  Work scatter(ConstBuffer input, Buffer output, const ScatterOptions& options = {});
  /// Part r has `counts[r]` elements; `counts` is the same on all ranks. Otherwise like scatter.
  Work scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                 const ScatterOptions& options = {});
  /// Part s of rank r's `input` becomes part r of rank s's `output`. Both buffers hold size() parts of the same count.
  Work all_to_all(ConstBuffer input, Buffer output, const AllToAllOptions& options = {});
  /// Like all_to_all with parts of any size: `input_counts[s]` elements go to rank s, `output_counts[s]` come from rank
  /// s; parts are contiguous. The counts of sender and receiver have to match, or all ranks get Mismatch.
  Work all_to_all_v(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                    std::span<const std::int64_t> output_counts, const AllToAllOptions& options = {});
  /// The Work is done as soon as every rank has called `barrier`.
  Work barrier(const BarrierOptions& options = {});

  // Grouped forms: one Work for many buffers, of any dtypes and sizes; small buffers are sent together. Results are
  // equal, to the bit, to one call for each buffer.
  Work all_reduce(std::span<const Buffer> data, const AllReduceOptions& options = {});
  Work broadcast(std::span<const Buffer> data, const BroadcastOptions& options = {});
  Work all_gather(std::span<const ConstBuffer> inputs, std::span<const Buffer> outputs,
                  const AllGatherOptions& options = {});
  Work reduce_scatter(std::span<const ConstBuffer> inputs, std::span<const Buffer> outputs,
                      const ReduceScatterOptions& options = {});

  // Overloads for tensors: the functions of the same names in <cohort/torch/tensor.h>, which documents them. Include
  // that header, or <cohort/torch.h>.
  template <detail::TensorLike T>
  Work all_reduce(const T& tensor, const AllReduceOptions& options = {}) {
    return detail::OnTensors<T>::all_reduce(*this, tensor, options);
  }
  template <detail::TensorLike T>
  Work broadcast(const T& tensor, const BroadcastOptions& options = {}) {
    return detail::OnTensors<T>::broadcast(*this, tensor, options);
  }
  template <detail::TensorLike T>
  T all_gather(const T& tensor, const AllGatherOptions& options = {}) {
    return detail::OnTensors<T>::all_gather(*this, tensor, options);
  }
  template <detail::TensorLike T>
  Work reduce_scatter(const T& input, const T& output, const ReduceScatterOptions& options = {}) {
    return detail::OnTensors<T>::reduce_scatter(*this, input, output, options);
  }

  // --- two ranks take part --- Any number of sends and receives progress independently of the collectives and of each
  // other: two ranks may each start a send to the other and then receive. The receiver's dtype and count have to be the
  // sender's, or both get Mismatch. The peer is another rank: a rank that names itself gets InvalidArgument, also in a
  // world of one.

  /// The Work is done when `data` may be used again. A small message is buffered, so its Work may be done before the
  /// receive has begun. Such a send ends before the receiver can refuse it. The Mismatch is then reported by the first
  /// send or recv with that rank that ends after the refusal has arrived; that operation is carried out nevertheless.
  Work send(ConstBuffer data, int peer, const SendOptions& options = {});
  /// Receives a message. With kAnySource, takes the message that arrives first from any rank; `Work::source` names that
  /// rank. A message goes to the first-started receive that it matches, specific or not; of several waiting messages, a
  /// receive takes the one that this rank saw first. A receive from kAnySource ends with PeerLost if a rank dies while
  /// it waits, or had left before there was a connection to that rank. Ranks that were seen to leave the world end the
  /// receive only when all others have left.
  Work recv(Buffer data, int peer, const RecvOptions& options = {});

  // --- groups ---

  /// Collective; blocks. Ranks of the same color form a world of their own, which progresses independently. With
  /// kNoColor, returns a Communicator that belongs to no world. If a rank lacks a resource, such as descriptors, the
  /// call fails on all ranks with that rank's reason; this communicator stays usable.
  Communicator split(const SplitOptions& options);
  /// Like `split`: forms the group of this host's ranks (MPI's COMM_TYPE_SHARED). Every rank calls it.
  Communicator split_by_host(const GroupOptions& options = {});
  /// Forms the group of these ranks, numbered as listed; blocks. Every rank calls it with the same list; ranks that are
  /// not listed receive a Communicator that belongs to no world.
  Communicator group(std::span<const int> ranks, const GroupOptions& options = {});

  /// Allocates memory for zero-copy collectives, pre-faulted, so that no operation pays for first touches. Not
  /// collective. With a GPU as `device`, the memory is on the GPU; without NCCL, operations stage it through host
  /// memory. Throws Unavailable if the host, or the GPU, cannot give that much (checked before any of the memory is
  /// used), or if there is no driver.
  Memory allocate(std::size_t bytes, Device device = {});
  /// Allocates one zero-filled host memory that all ranks read and write. Every rank calls it, with the same `bytes`;
  /// blocks. Collectives read this memory in place on rank 0 only, and nothing but collectives orders the ranks'
  /// accesses. Throws InvalidArgument if ranks are on several hosts (see split_by_host), Unavailable on all ranks if
  /// the host cannot give that much, and Mismatch if ranks ask for different sizes.
  Memory allocate_shared(std::size_t bytes);

  /// Declares that this rank has no more input. Until every rank has called `join`, it takes part without data in the
  /// others' operations: sums, minima and averages skip it; if it is a broadcast's root, the lowest active rank sends
  /// instead; all other collectives except barrier are refused (Mismatch on the active ranks). Blocks; returns the rank
  /// that called it last. (Horovod's hvd.join, as a state of the world.)
  int join(const BarrierOptions& options = {});

  /// Ends the world: every rank's pending and further operations throw Aborted with this reason and this rank.
  void abort(std::string_view reason);

  /// Reports what happens on this communicator to `observer` (not owned; nullptr for none).
  void set_observer(Observer* observer) noexcept;

 private:
  std::shared_ptr<comm::DeviceCommunicator> impl_;
};

struct ThreadWorldOptions {
  /// Timeout of operations whose options have none; default: the timeout of `across`, else 30 minutes.
  std::chrono::milliseconds timeout = std::chrono::milliseconds(0);
  /// A world with one rank for each process. The threads of process P are then ranks P * size to P * size + size - 1 of
  /// one world. So with Slurm, one task per node can fill its node with threads. All processes call form_thread_world
  /// with the same size. Empty: the world has only the threads of this process.
  Communicator across = {};
};

/// Forms a world whose ranks are threads: element i is for this process's thread i. Throws InvalidArgument for a size
/// below 1. With `across`, also throws Mismatch if processes give different sizes, Unavailable if they are on several
/// hosts without a secret, and what `init` throws.
std::vector<Communicator> form_thread_world(int size, const ThreadWorldOptions& options = {});

/// Runs `body` on `size` threads, each of them a rank, and waits for all. The first exception aborts the world and is
/// rethrown when all threads have ended. Throws what form_thread_world throws.
void run_on_threads(int size, const std::function<void(Communicator)>& body, const ThreadWorldOptions& options = {});

}  // namespace cohort
