// N ranks that act as one: collectives over a fixed set of ranks, which are processes or threads.
// A Communicator is a handle: copies mean the same rank of the same world. One thread at a time may call it
// (its own progress thread apart); `abort` and the accessors may be called from any thread. Operations take
// effect in the order of the calls, which has to be the same on all ranks: what differs is refused (Mismatch).
// After Timeout, PeerLost or Aborted it is never used again: form a new one.
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

/// Memory that collectives read and write in place, without staging copies: a segment that peers on the same
/// host map on first use; or a GPU's. A handle; the memory lives until its last copy is gone, after the communicator
/// too.
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

class Communicator {
 public:
  /// Belongs to no world; only assignment and `operator bool` make sense.
  Communicator() = default;
  explicit Communicator(std::shared_ptr<comm::CommunicatorImpl> impl);

  explicit operator bool() const noexcept { return impl_ != nullptr; }

  int rank() const noexcept;
  int size() const noexcept;
  /// Rank among the ranks of this host. In the world of an elastic job that `cohort run` has started it is LOCAL_RANK,
  /// which a process keeps while others leave and come: it may be local_size() or more, and 0 may be missing.
  int local_rank() const noexcept;
  int local_size() const noexcept;
  int cross_rank() const noexcept;  ///< this host's number among the hosts that have this local rank
  int cross_size() const noexcept;  ///< how many these are
  const std::string& host() const noexcept;
  /// The deadline of operations that give none of their own.
  std::chrono::milliseconds timeout() const noexcept;

  // --- all ranks take part ---
  // Buffers of different ranks have the same dtype, and the same counts where nothing else is said. Arguments that have
  // no meaning throw InvalidArgument at once, ranks that disagree get Mismatch from the Work. An output may be the
  // input ("in place") where that is said; otherwise the two share no byte.

  /// Reduces `data` over all ranks, in place. Every element is folded by ascending rank within each host,
  /// then by ascending host, so the bits depend on the layout (ranks per host), and not on timing, size or position.
  Work all_reduce(Buffer data, const AllReduceOptions& options = {});
  /// Out of place, or in place if both are the same; `input` and `output` have the same count.
  Work all_reduce(ConstBuffer input, Buffer output, const AllReduceOptions& options = {});
  /// In place on the root; all other ranks' `data` stays as it is.
  Work reduce(Buffer data, const ReduceOptions& options = {});
  /// `output` is used on the root only, and may be empty elsewhere.
  Work reduce(ConstBuffer input, Buffer output, const ReduceOptions& options = {});
  /// `input` holds size() parts of `output.count` elements; rank r receives the reduction of part r. In place: `output`
  /// is part rank() of `input`.
  Work reduce_scatter(ConstBuffer input, Buffer output, const ReduceScatterOptions& options = {});
  /// Part r has `counts[r]` elements; `counts` is the same on all ranks. In place as reduce_scatter.
  Work reduce_scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                        const ReduceScatterOptions& options = {});
  /// Copies `data` from the root to all other ranks.
  Work broadcast(Buffer data, const BroadcastOptions& options = {});
  /// `output` receives size() parts of `input.count` elements, by ascending rank. In place: `input` is part rank().
  Work all_gather(ConstBuffer input, Buffer output, const AllGatherOptions& options = {});
  /// Rank r contributes `counts[r]` elements; `counts` is the same on all ranks. In place as all_gather.
  Work all_gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                    const AllGatherOptions& options = {});
  /// As all_gather, on the root only: `output` may be empty elsewhere.
  Work gather(ConstBuffer input, Buffer output, const GatherOptions& options = {});
  /// As all_gather_v, on the root only: `output` may be empty elsewhere.
  Work gather_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                const GatherOptions& options = {});
  /// Rank r receives part r of the root's `input` (size() parts of `output.count`), which may be empty elsewhere. In
  /// place on the root: `output` is part rank() of `input`.
  Work scatter(ConstBuffer input, Buffer output, const ScatterOptions& options = {});
  /// Part r has `counts[r]` elements; `counts` is the same on all ranks. Else as scatter.
  Work scatter_v(ConstBuffer input, Buffer output, std::span<const std::int64_t> counts,
                 const ScatterOptions& options = {});
  /// Rank r's part s goes to rank s, where it becomes part r. Both hold size() parts of the same count.
  Work all_to_all(ConstBuffer input, Buffer output, const AllToAllOptions& options = {});
  /// Parts of any size: `input_counts[s]` elements go to rank s, `output_counts[s]` come from it; parts lie one after
  /// the other. Counts of sender and receiver have to match, or all get Mismatch.
  Work all_to_all_v(ConstBuffer input, std::span<const std::int64_t> input_counts, Buffer output,
                    std::span<const std::int64_t> output_counts, const AllToAllOptions& options = {});
  /// Done once every rank has come to it.
  Work barrier(const BarrierOptions& options = {});

  // Grouped forms: one Work for many buffers, of any dtypes and sizes; small ones travel together. The same results, to
  // the bit, as one call for each.
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

  // --- two ranks take part ---
  // These progress apart from the collectives and from each other, in any number: two ranks may each start a send to
  // the other and then receive. The receiver's dtype and count have to be the sender's, or both get Mismatch. The peer
  // is another rank: oneself is InvalidArgument, so in a world of one there is nobody to send to.

  /// Done once `data` may be used again: if it is small as soon as it is buffered, whether the receiver has come or
  /// not. Such a send is over before its receiver can refuse it; then the first later send or recv with that rank that
  /// ends once the refusal has come reports the Mismatch, and is itself carried out.
  Work send(ConstBuffer data, int peer, const SendOptions& options = {});
  /// Receives a message. From kAnySource it takes the message of whichever rank comes first, and the Work names that
  /// rank (`Work::source`). A message goes to the receive that was started first of those that it fits, specific or
  /// not; of several messages that are there, a receive takes the one that this rank has seen first. A rank that dies
  /// while such a receive waits ends it with PeerLost, and so does one that left before there was a connection to it;
  /// one that was seen to leave the world does once all others have.
  Work recv(Buffer data, int peer, const RecvOptions& options = {});

  // --- groups ---

  /// Every rank calls it. Ranks of the same color form a world of their own, which progresses independently. Blocks.
  /// Returns a Communicator that belongs to no world where the color is kNoColor. A rank that has no means for it, such
  /// as descriptors, fails it for all ranks with its reason; this communicator stays usable.
  Communicator split(const SplitOptions& options);
  /// The ranks of this host, as `split` (MPI's COMM_TYPE_SHARED). Every rank calls it.
  Communicator split_by_host(const GroupOptions& options = {});
  /// The group of these ranks, numbered as listed. Every rank calls it with the same list; those that are
  /// not in it receive a Communicator that belongs to no world. Blocks.
  Communicator group(std::span<const int> ranks, const GroupOptions& options = {});

  /// Memory for zero-copy collectives. Local, not collective. Pre-faulted, so that no operation pays for
  /// first touches. With a GPU as `device`: memory there; without NCCL, operations stage it through host memory. Throws
  /// Unavailable when the host, or the GPU, cannot give that much, before any of it is used, and where there is no
  /// driver.
  Memory allocate(std::size_t bytes, Device device = {});
  /// One memory for all ranks, which all read and write; every rank calls it, with the same `bytes`. Blocks.
  /// Zero-filled; it is the host's memory, and collectives read it in place on rank 0 only. Nothing orders what ranks
  /// do in it but their collectives. Throws InvalidArgument where ranks are on several hosts (see split_by_host),
  /// Unavailable on all ranks when the host cannot give that much, Mismatch where they ask for different sizes.
  Memory allocate_shared(std::size_t bytes);

  /// This rank has no more input: takes part in all further operations of the others without bringing anything
  /// (sums, minima and averages skip it; a broadcast from it comes from the lowest active rank instead;
  /// all other collectives but barrier are refused with Mismatch on the active ranks) until every rank has
  /// called `join`. Blocks; returns the rank that called it last. (Horovod's hvd.join, as a state of the world.)
  int join(const BarrierOptions& options = {});

  /// Ends the world: every rank's pending and further operations throw Aborted with this reason and this rank.
  void abort(std::string_view reason);

  /// Reports what happens on this communicator to `observer` (not owned; nullptr for none).
  void set_observer(Observer* observer) noexcept;

 private:
  std::shared_ptr<comm::DeviceCommunicator> impl_;
};

struct ThreadWorldOptions {
  /// Deadline of operations that give none of their own; default: that of `across`, else 30 minutes.
  std::chrono::milliseconds timeout = std::chrono::milliseconds(0);
  /// The world of this process, with one rank for each process: process P's threads are then ranks P * size to
  /// P * size + size - 1 of one world. So one task for each node of Slurm fills its node with threads. All processes
  /// call it, with the same size. Empty: this process alone.
  Communicator across = {};
};

/// A world whose ranks are threads: element i is for this process's thread i. Throws InvalidArgument for a size below
/// 1; with `across` also Mismatch where processes give different ones, Unavailable where they are on several hosts and
/// have no secret, and what `join` does.
std::vector<Communicator> form_thread_world(int size, const ThreadWorldOptions& options = {});

/// Runs `body` on `size` threads, each of them a rank, and waits for all. The first exception aborts the world and is
/// rethrown once all threads have ended. Throws as form_thread_world.
void run_on_threads(int size, const std::function<void(Communicator)>& body, const ThreadWorldOptions& options = {});

}  // namespace cohort
