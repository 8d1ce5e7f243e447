// Collectives that autograd goes back through. All ranks call the same functions in the same order, and all run the
// backward; a rank without gradients (no_grad, or inputs that require none) while others have them is refused or waits.
//
// Gradients are those of the sum over ranks of each rank's loss: what a rank's input does to other ranks' losses comes
// back to it. Where every rank computes the same loss and it counts once, as in tensor parallelism, use copy_to,
// reduce_from, scatter_to and gather_from instead, whose gradients are meant so.
//
// Tensors lie in the host's memory or in CUDA's, and have the same shape and type on all ranks; inputs are left as they
// are, results are new (but for that of copy_to). Errors are those of Communicator: counts or types that differ give
// Mismatch on all ranks. Double backward (create_graph) works but for send and recv. One thread per rank; autograd's
// own, while that waits, is the same.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/communicator.h>

#include <cstdint>
#include <span>
#include <vector>

namespace cohort::autograd {

/// ReduceOp::Sum or Average; others have no gradient here (InvalidArgument). Backward: the same of the gradients.
at::Tensor all_reduce(Communicator& comm, const at::Tensor& x, ReduceOp op = ReduceOp::Sum);
/// The sum on the root, zeros elsewhere. Backward: broadcast.
at::Tensor reduce(Communicator& comm, const at::Tensor& x, int root = 0);
/// The root's tensor; that of other ranks only tells the shape. Backward: reduce.
at::Tensor broadcast(Communicator& comm, const at::Tensor& x, int root = 0);
/// Concatenates the ranks' tensors along `dim`, in order. Backward: reduce_scatter.
at::Tensor all_gather(Communicator& comm, const at::Tensor& x, std::int64_t dim = 0);
/// The sum's part of this rank: `dim` is cut into size() equal parts. Backward: all_gather.
at::Tensor reduce_scatter(Communicator& comm, const at::Tensor& x, std::int64_t dim = 0);
/// Dimension 0 is cut into size() equal parts; part s goes to rank s, where it becomes part rank(). Backward: the same.
at::Tensor all_to_all(Communicator& comm, const at::Tensor& x);
/// Parts of any size: rows_to[s] rows go to rank s, and rows_from[s] come from it.
at::Tensor all_to_all(Communicator& comm, const at::Tensor& x, std::span<const std::int64_t> rows_to,
                      std::span<const std::int64_t> rows_from);

// Megatron's f and g, and their kin, for losses that all ranks compute alike. Each is the other's backward.

/// f: x itself, in the same memory, so it must not be changed in place; backward: all_reduce. For what is the same on
/// all ranks, where each goes on with a part of the work.
at::Tensor copy_to(Communicator& comm, const at::Tensor& x);
/// g: all_reduce (sum); backward: the gradient itself. For partial sums, of which all ranks need the total.
at::Tensor reduce_from(Communicator& comm, const at::Tensor& x);
/// This rank's of size() equal parts along `dim`; backward: all-gather.
at::Tensor scatter_to(Communicator& comm, const at::Tensor& x, std::int64_t dim);
/// All-gather along `dim`; backward: this rank's part of the gradient.
at::Tensor gather_from(Communicator& comm, const at::Tensor& x, std::int64_t dim);

// From rank to rank. The backward of send receives the gradient from where it was sent, that of recv sends it there;
// with gradients on, both always do, whether x requires one or not. A rank's backward comes to its sends and recvs in
// the reverse order of its calls if its loss depends on all of them: on what it received, and on the token of what it
// sent. Then the backward cannot deadlock where the forward could not, had its sends waited for their receives.

/// Starts to send x to `peer`, another rank, and returns a token: a zero that the loss has to depend on
/// (`loss + token`, or `RecvTensor::after`) for the backward to come here. x may be changed once the token and all that
/// depends on it are gone, which waits until x has been received. Tags are below 2^30.
at::Tensor send(Communicator& comm, const at::Tensor& x, int peer, int tag = 0);

struct RecvTensor {
  std::vector<std::int64_t> sizes = {};
  at::TensorOptions options = {};  ///< type and device
  int tag = 0;
  at::Tensor after = {};  ///< a token of send: the backward comes to that send once it has sent this gradient
};
/// Waits for the tensor that `peer` sends.
at::Tensor recv(Communicator& comm, int peer, const RecvTensor& tensor);

}  // namespace cohort::autograd
