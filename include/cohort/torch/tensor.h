// Connects at::Tensor with cohort::Buffer: types, views without copies, tensors that lie in communicator memory, and
// the collectives on whole tensors. Unless stated otherwise, the functions own nothing after the call. Functions that
// call the communicator are for one thread at a time, the others thread-safe.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

namespace cohort {

/// The DType of a tensor's elements. Throws InvalidArgument for types that collectives do not know (complex32,
/// quantised), naming the type and a remedy.
DType dtype_of(const at::Tensor& tensor);
DType to_dtype(at::ScalarType type);
/// Throws InvalidArgument for UInt16, UInt32 and UInt64, which libtorch 1.13 does not have.
at::ScalarType to_scalar_type(DType dtype);

/// Returns the tensor's elements as a Buffer, without copying; the tensor still owns them. A CUDA tensor's Buffer has
/// libtorch's current stream. Throws InvalidArgument unless the tensor is defined, dense, contiguous, in host or CUDA
/// memory.
Buffer to_buffer(const at::Tensor& tensor);

/// Makes a zero-filled, contiguous tensor in memory that the communicator's collectives read in place
/// (Communicator::allocate). The memory lives until the last tensor over it is destroyed, even after the communicator.
at::Tensor empty_in(Communicator& comm, at::IntArrayRef sizes, at::ScalarType type = at::kFloat);

// Collectives on tensors, like Communicator's of the same names, which document the errors; `comm.all_reduce(tensor)`
// is the same as `all_reduce(comm, tensor)`. The returned Work keeps the tensors alive until it is done. Tensors from
// `empty_in` are reduced without staging copies.

/// Reduces `tensor` over all ranks, in place.
Work all_reduce(Communicator& comm, const at::Tensor& tensor, const AllReduceOptions& options = {});
/// Copies `tensor` from the root to all other ranks. Any dense type is sent as bytes.
Work broadcast(Communicator& comm, const at::Tensor& tensor, const BroadcastOptions& options = {});
/// Waits. Every rank gives a tensor of the same shape [...]; returns [size(), ...] by ascending rank.
at::Tensor all_gather(Communicator& comm, const at::Tensor& tensor, const AllGatherOptions& options = {});
/// `input` is [size() * n, ...]; `output`, [n, ...], receives the reduction of part rank().
Work reduce_scatter(Communicator& comm, const at::Tensor& input, const at::Tensor& output,
                    const ReduceScatterOptions& options = {});

namespace detail {
template <>
struct OnTensors<at::Tensor> {
  template <class... Rest>
  static Work all_reduce(Communicator& comm, const Rest&... rest) {
    return cohort::all_reduce(comm, rest...);
  }
  template <class... Rest>
  static Work broadcast(Communicator& comm, const Rest&... rest) {
    return cohort::broadcast(comm, rest...);
  }
  template <class... Rest>
  static at::Tensor all_gather(Communicator& comm, const Rest&... rest) {
    return cohort::all_gather(comm, rest...);
  }
  template <class... Rest>
  static Work reduce_scatter(Communicator& comm, const Rest&... rest) {
    return cohort::reduce_scatter(comm, rest...);
  }
};
}  // namespace detail

struct BroadcastParametersOptions {
  int root = 0;
  /// At most this many bytes travel in one broadcast, through a staging buffer of this size.
  std::size_t chunk_bytes = std::size_t{64} << 20;
};

/// Waits; for GPU tensors, libtorch's current stream waits instead. Overwrites the tensors of all ranks with the
/// root's, many tensors per broadcast, mixed types as bytes. All ranks give tensors of the same shapes and types in the
/// same order (different numbers of bytes are refused: Mismatch). For a module: `broadcast_parameters(comm,
/// net->parameters())`, and the same with its buffers().
void broadcast_parameters(Communicator& comm, const std::vector<at::Tensor>& tensors,
                          const BroadcastParametersOptions& options = {});

}  // namespace cohort
