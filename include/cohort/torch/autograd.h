// Differentiable collectives. All ranks call the same functions in the same order, and all run the backward; if a rank
// has no gradients (no_grad, or inputs that require none) while others have, it is refused or waits.
//
// Gradients are those of the sum over ranks of each rank's loss, so a rank's gradient includes its input's effect on
// other ranks' losses. If every rank computes the same loss, and it counts once, as in tensor parallelism, use copy_to,
// reduce_from, scatter_to and gather_from instead: their gradients are defined for that case.
//
// Tensors lie in host or CUDA memory, and have the same shape and type on all ranks; inputs are not changed, and
// results are new tensors (except that of copy_to). Errors are those of Communicator: counts or types that differ give
// Mismatch on all ranks. Double backward (create_graph) works except for send and recv. One thread per rank; while that
// thread waits for a backward, autograd's threads make the calls.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <cstdint>
#include <span>
#include <vector>

namespace cohort::autograd {

/// Supports ReduceOp::Sum and Average; others have no gradient here (InvalidArgument). Backward: the same operation on
/// the gradients.
at::Tensor all_reduce(Communicator& comm, const at::Tensor& x, ReduceOp op = ReduceOp::Sum);
/// Returns the sum on the root, zeros elsewhere. Backward: broadcast.
at::Tensor reduce(Communicator& comm, const at::Tensor& x, int root = 0);
/// Returns the root's tensor; `x` of other ranks only defines the shape. Backward: reduce.
at::Tensor broadcast(Communicator& comm, const at::Tensor& x, int root = 0);
/// Concatenates the ranks' tensors along `dim`, in order. Backward: reduce_scatter.
at::Tensor all_gather(Communicator& comm, const at::Tensor& x, std::int64_t dim = 0);
/// Returns this rank's part of the sum: `dim` is cut into size() equal parts. Backward: all_gather.
at::Tensor reduce_scatter(Communicator& comm, const at::Tensor& x, std::int64_t dim = 0);
/// Dimension 0 is cut into size() equal parts; part s goes to rank s, where it becomes part rank(). Backward: the same.
at::Tensor all_to_all(Communicator& comm, const at::Tensor& x);
/// Like all_to_all with parts of any size: rows_to[s] rows go to rank s, and rows_from[s] rows come from rank s.
at::Tensor all_to_all(Communicator& comm, const at::Tensor& x, std::span<const std::int64_t> rows_to,
                      std::span<const std::int64_t> rows_from);

// Megatron's f and g, and similar functions, for losses that are the same on all ranks. Each is the other's backward.

/// f: returns x itself, in the same memory, so the result must not be changed in place; backward: all_reduce. For a
/// tensor that is the same on all ranks, before each rank does a part of the work.
at::Tensor copy_to(Communicator& comm, const at::Tensor& x);
/// g: all_reduce (sum); backward: the gradient itself. For partial sums whose total all ranks need.
at::Tensor reduce_from(Communicator& comm, const at::Tensor& x);
/// Returns this rank's part of size() equal parts along `dim`; backward: all-gather.
at::Tensor scatter_to(Communicator& comm, const at::Tensor& x, std::int64_t dim);
/// All-gather along `dim`; backward: this rank's part of the gradient.
at::Tensor gather_from(Communicator& comm, const at::Tensor& x, std::int64_t dim);

// Point-to-point. The backward of send receives the gradient from the receiver, and the backward of recv sends it to
// the sender; with gradients on, they do so even if x requires no gradient. A rank's backward runs its sends and recvs
// in the reverse order of its calls if the loss depends on all received tensors and on the tokens of all sent ones.
// Then it cannot deadlock, provided that the forward could not even if each send waited for its receive.

/// Starts to send x to `peer`, another rank, and returns a token: a zero that the loss has to depend on (`loss +
/// token`, or `RecvTensor::after`) for the backward to reach this send. Destroying the token and all that depends on it
/// waits until x has been received; afterwards x may be changed. Tags are below 2^30.
at::Tensor send(Communicator& comm, const at::Tensor& x, int peer, int tag = 0);

struct RecvTensor {
  std::vector<std::int64_t> sizes = {};
  at::TensorOptions options = {};  ///< type and device
  int tag = 0;
  at::Tensor after = {};  ///< a token of send: the backward runs that send after it has sent this gradient
};
/// Waits for the tensor that `peer` sends.
at::Tensor recv(Communicator& comm, int peer, const RecvTensor& tensor);

}  // namespace cohort::autograd
