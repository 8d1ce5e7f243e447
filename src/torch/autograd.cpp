#include <cohort/torch/autograd.h>

#include "base/result.h"
#include "torch/reducer.h"

#include <cohort/torch/tensor.h>

#include <torch/csrc/autograd/custom_function.h>

#include <functional>
#include <memory>
#include <utility>

namespace cohort::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
using Map = std::function<at::Tensor(const at::Tensor&)>;

// A value that autograd's context can keep.
template <class T>
struct Kept : torch::CustomClassHolder {
  explicit Kept(T kept) : value(std::move(kept)) {}
  T value;
};

template <class T>
void keep(AutogradContext* context, const char* name, T value) {
  context->saved_data[name] = c10::IValue::make_capsule(c10::make_intrusive<Kept<T>>(std::move(value)));
}

template <class T>
T& kept(AutogradContext* context, const char* name) {
  return static_cast<Kept<T>*>(context->saved_data.at(name).toCapsule().get())->value;
}

// A linear map, and its adjoint as a function that is differentiable in turn.
class Linear : public torch::autograd::Function<Linear> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const Map& map, const Map& adjoint) {
    keep(context, "adjoint", adjoint);
    return map(x);
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    return {kept<Map>(context, "adjoint")(gradients.at(0)), {}, {}};
  }
};

at::Tensor linear(const at::Tensor& x, const Map& map, const Map& adjoint) {
  if (!x.defined()) raise(ErrorCode::InvalidArgument, "collective on an undefined tensor");
  return Linear::apply(x, map, adjoint);
}

// Waits for the Work; for GPU tensors, the GPU's current stream waits instead.
void complete(Work work, const at::Tensor& input, const at::Tensor& output) {
  work.on_done([input, output] {});
  work.synchronize(buffer_device(output));
}

std::int64_t checked_dim(const char* what, const at::Tensor& x, std::int64_t dim) {
  if (dim < -x.dim() || dim >= x.dim()) {
    raise(ErrorCode::InvalidArgument, "{}: no dimension {} in a tensor of {} dimensions", what, dim, x.dim());
  }
  return dim < 0 ? dim + x.dim() : dim;
}

void require_parts(const char* what, const Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  if (x.size(dim) % comm.size() != 0) {
    raise(ErrorCode::InvalidArgument, "{}: dimension {} has {} elements, which are not {} equal parts", what, dim,
          x.size(dim), comm.size());
  }
}

at::Tensor sum_of(Communicator& comm, const at::Tensor& x, ReduceOp op = ReduceOp::Sum) {
  const at::Tensor input = x.contiguous();
  at::Tensor output = at::empty_like(input);
  complete(comm.all_reduce(to_buffer(input), to_buffer(output), {.op = op}), input, output);
  return output;
}

at::Tensor gathered(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  const at::Tensor input = x.movedim(dim, 0).contiguous();
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes[0] *= comm.size();
  at::Tensor output = at::empty(sizes, input.options());
  complete(comm.all_gather(to_buffer(input), to_buffer(output)), input, output);
  return output.movedim(0, dim).detach();  // detached, since autograd forbids to change this view in place
}

at::Tensor scattered_sum(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  const at::Tensor input = x.movedim(dim, 0).contiguous();
  std::vector<std::int64_t> sizes = input.sizes().vec();
  sizes[0] /= comm.size();
  at::Tensor output = at::empty(sizes, input.options());
  complete(comm.reduce_scatter(to_buffer(input), to_buffer(output)), input, output);
  return output.movedim(0, dim).detach();  // detached, since autograd forbids to change this view in place
}

at::Tensor own_part(const Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  const std::int64_t part = x.size(dim) / comm.size();
  return x.narrow(dim, comm.rank() * part, part).clone(at::MemoryFormat::Contiguous);
}

}  // namespace

at::Tensor all_reduce(Communicator& comm, const at::Tensor& x, ReduceOp op) {
  if (op != ReduceOp::Sum && op != ReduceOp::Average) {
    raise(ErrorCode::InvalidArgument, "autograd::all_reduce: {} is not differentiable here -- use sum or average",
          to_string(op));
  }
  return linear(
      x, [&](const at::Tensor& value) { return sum_of(comm, value, op); },
      [comm, op](const at::Tensor& gradient) mutable { return all_reduce(comm, gradient, op); });
}

at::Tensor reduce(Communicator& comm, const at::Tensor& x, int root) {
  const auto map = [&](const at::Tensor& value) {
    const at::Tensor input = value.contiguous();
    at::Tensor output = comm.rank() == root ? at::empty_like(input) : at::zeros_like(input);
    complete(comm.reduce(to_buffer(input), to_buffer(output), {.root = root}), input, output);
    return output;
  };
  return linear(x, map, [comm, root](const at::Tensor& gradient) mutable { return broadcast(comm, gradient, root); });
}

at::Tensor broadcast(Communicator& comm, const at::Tensor& x, int root) {
  const auto map = [&](const at::Tensor& value) {
    at::Tensor data = value.clone(at::MemoryFormat::Contiguous);
    complete(comm.broadcast(to_buffer(data), {.root = root}), data, data);
    return data;
  };
  return linear(x, map, [comm, root](const at::Tensor& gradient) mutable { return reduce(comm, gradient, root); });
}

at::Tensor all_gather(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  dim = checked_dim("autograd::all_gather", x, dim);
  return linear(
      x, [&](const at::Tensor& value) { return gathered(comm, value, dim); },
      [comm, dim](const at::Tensor& gradient) mutable { return reduce_scatter(comm, gradient, dim); });
}

at::Tensor reduce_scatter(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  dim = checked_dim("autograd::reduce_scatter", x, dim);
  require_parts("autograd::reduce_scatter", comm, x, dim);
  return linear(
      x, [&](const at::Tensor& value) { return scattered_sum(comm, value, dim); },
      [comm, dim](const at::Tensor& gradient) mutable { return all_gather(comm, gradient, dim); });
}

at::Tensor all_to_all(Communicator& comm, const at::Tensor& x) {
  require_parts("autograd::all_to_all", comm, x, checked_dim("autograd::all_to_all", x, 0));
  const auto map = [&](const at::Tensor& value) {
    const at::Tensor input = value.contiguous();
    at::Tensor output = at::empty_like(input);
    complete(comm.all_to_all(to_buffer(input), to_buffer(output)), input, output);
    return output;
  };
  return linear(x, map, [comm](const at::Tensor& gradient) mutable { return all_to_all(comm, gradient); });
}

at::Tensor all_to_all(Communicator& comm, const at::Tensor& x, std::span<const std::int64_t> rows_to,
                      std::span<const std::int64_t> rows_from) {
  (void)checked_dim("autograd::all_to_all", x, 0);
  using Rows = std::vector<std::int64_t>;
  const Rows to(rows_to.begin(), rows_to.end());
  const Rows from(rows_from.begin(), rows_from.end());
  const auto map = [&](const at::Tensor& value) {
    const at::Tensor input = value.contiguous();
    std::vector<std::int64_t> sizes = input.sizes().vec();
    std::int64_t row = 1;
    for (std::size_t dim = 1; dim < sizes.size(); ++dim) row *= sizes[dim];
    sizes[0] = 0;
    for (const std::int64_t rows : from) sizes[0] += rows;
    const auto elements = [row](Rows rows) {
      for (std::int64_t& one : rows) one *= row;
      return rows;
    };
    at::Tensor output = at::empty(sizes, input.options());
    complete(comm.all_to_all_v(to_buffer(input), elements(to), to_buffer(output), elements(from)), input, output);
    return output;
  };
  return linear(x, map,
                [comm, to, from](const at::Tensor& gradient) mutable { return all_to_all(comm, gradient, from, to); });
}

// ------------------------------------------------------------------------------------------------- one loss for all

at::Tensor copy_to(Communicator& comm, const at::Tensor& x) {
  return linear(
      x, [](const at::Tensor& value) { return value; },
      [comm](const at::Tensor& gradient) mutable { return reduce_from(comm, gradient); });
}

at::Tensor reduce_from(Communicator& comm, const at::Tensor& x) {
  return linear(
      x, [&](const at::Tensor& value) { return sum_of(comm, value); },
      [comm](const at::Tensor& gradient) mutable { return copy_to(comm, gradient); });
}

at::Tensor scatter_to(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  dim = checked_dim("autograd::scatter_to", x, dim);
  require_parts("autograd::scatter_to", comm, x, dim);
  return linear(
      x, [&](const at::Tensor& value) { return own_part(comm, value, dim); },
      [comm, dim](const at::Tensor& gradient) mutable { return gather_from(comm, gradient, dim); });
}

at::Tensor gather_from(Communicator& comm, const at::Tensor& x, std::int64_t dim) {
  dim = checked_dim("autograd::gather_from", x, dim);
  return linear(
      x, [&](const at::Tensor& value) { return gathered(comm, value, dim); },
      [comm, dim](const at::Tensor& gradient) mutable { return scatter_to(comm, gradient, dim); });
}

// ------------------------------------------------------------------------------------------------- rank to rank

namespace {

constexpr int kFirstGradientTag = 1 << 30;  // distinct from tags of forward messages to the same rank

struct Peer {
  Communicator comm;
  int rank = 0;
  int tag = 0;
  at::TensorOptions options = {};
  std::vector<std::int64_t> sizes = {};
};

void check_tag_of(const char* what, int tag) {
  if (tag < 0 || tag >= kFirstGradientTag) {
    raise(ErrorCode::InvalidArgument, "autograd::{}: tag {} -- from 0, below 2^30", what, tag);
  }
}

void refuse_double_backward(const char* what) {
  if (at::GradMode::is_enabled()) {
    raise(ErrorCode::InvalidArgument, "double backward (create_graph) through autograd::{} is not supported", what);
  }
}

// Returns without waiting. The send is complete when the Work is destroyed.
Work start_send(Peer& peer, const at::Tensor& x, int tag) {
  const at::Tensor data = x.contiguous();
  Work work = peer.comm.send(to_buffer(data), peer.rank, {.tag = tag});
  work.on_done([data] {});
  return work;
}

at::Tensor received(Peer& peer, int tag) {
  at::Tensor data = at::empty(peer.sizes, peer.options);
  complete(peer.comm.recv(to_buffer(data), peer.rank, {.tag = tag}), data, data);
  return data;
}

// Returns an input that makes autograd run a function's backward even if no other input requires a gradient.
at::Tensor anchor() { return at::zeros({}).requires_grad_(at::GradMode::is_enabled()); }

class Send : public torch::autograd::Function<Send> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, const at::Tensor& /*anchor*/,
                            const Peer& to) {
    struct Token {
      float zero;
      Work work;
    };
    Peer peer = to;
    const auto token = std::make_shared<Token>(Token{0, start_send(peer, x, peer.tag)});
    peer.sizes = x.sizes().vec();
    peer.options = x.options().requires_grad(false);
    keep(context, "peer", std::move(peer));
    return at::from_blob(&token->zero, {}, [token](void*) {});
  }
  static variable_list backward(AutogradContext* context, const variable_list& /*gradients*/) {
    refuse_double_backward("send");
    Peer& peer = kept<Peer>(context, "peer");
    return {received(peer, peer.tag + kFirstGradientTag), {}, {}};
  }
};

class Recv : public torch::autograd::Function<Recv> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& /*after*/, const Peer& from) {
    Peer peer = from;
    const at::Tensor data = received(peer, peer.tag);
    keep(context, "peer", std::move(peer));
    return data;
  }
  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    refuse_double_backward("recv");
    Peer& peer = kept<Peer>(context, "peer");
    keep(context, "sent", start_send(peer, gradients.at(0), peer.tag + kFirstGradientTag));
    return {at::zeros({}), {}};
  }
};

}  // namespace

at::Tensor send(Communicator& comm, const at::Tensor& x, int peer, int tag) {
  if (!x.defined()) raise(ErrorCode::InvalidArgument, "collective on an undefined tensor");
  check_tag_of("send", tag);
  return Send::apply(x, anchor(), Peer{.comm = comm, .rank = peer, .tag = tag});
}

at::Tensor recv(Communicator& comm, int peer, const RecvTensor& tensor) {
  check_tag_of("recv", tensor.tag);
  return Recv::apply(tensor.after.defined() ? tensor.after : anchor(),
                     Peer{.comm = comm,
                          .rank = peer,
                          .tag = tensor.tag,
                          .options = tensor.options.requires_grad(false),
                          .sizes = tensor.sizes});
}

}  // namespace cohort::autograd
