// Which samples of a data set a rank gets for good, and the way there of those that only the root has.
#include "base/records.h"
#include "base/result.h"
#include "train/checkpoint/exchange.h"

#include <cohort/torch/data.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <span>

namespace cohort::data {
namespace {

/// What the root decides.
struct Order {
  std::int64_t size = 0;
  std::int64_t equal = 0;
  std::int64_t shuffle = 0;
  std::uint64_t seed = 0;

  /// Of rank `rank` of `ranks`, as ChainerMN cuts them.
  std::int64_t begin(std::int64_t rank, std::int64_t ranks) const {
    return equal != 0 ? size * rank / ranks : size / ranks * rank + std::min(rank, size % ranks);
  }
  std::int64_t count(std::int64_t rank, std::int64_t ranks) const {
    return size / ranks + ((equal != 0 ? size % ranks > 0 : rank < size % ranks) ? 1 : 0);
  }
  std::vector<std::int64_t> samples() const {
    if (shuffle != 0) return permutation(size, seed, 0);
    std::vector<std::int64_t> all(static_cast<std::size_t>(size));
    std::iota(all.begin(), all.end(), std::int64_t{0});
    return all;
  }
};

/// The root's, on all ranks.
Order agreed_order(std::int64_t size, Communicator& comm, const ScatterDatasetOptions& options) {
  Order order{size, options.force_equal_length ? 1 : 0, options.shuffle ? 1 : 0, 0};
  std::random_device random;
  order.seed = options.seed ? *options.seed : (std::uint64_t{random()} << 32U) | random();
  checkpoint::share_bytes(comm, std::as_writable_bytes(std::span(&order, 1)), options.root);
  return order;
}

void require_root(const Communicator& comm, int root) {
  if (root < 0 || root >= comm.size())
    raise(ErrorCode::InvalidArgument, "scatter_dataset: root {} in a world of {}", root, comm.size());
}

std::optional<Error> problem_of(const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.dim() == 0) {
      return fail(ErrorCode::InvalidArgument, "scatter_dataset: tensor {} is not dense, or has no rows", i).value();
    }
    if (tensor.size(0) != tensors[0].size(0)) {
      return fail(ErrorCode::InvalidArgument,
                  "scatter_dataset: tensor {} has {} rows and tensor 0 has {} -- give as many of each", i,
                  tensor.size(0), tensors[0].size(0))
          .value();
    }
  }
  return std::nullopt;
}

/// Types and shapes of the root's tensors, on all ranks: empty tensors without rows.
std::vector<at::Tensor> agreed_shapes(const std::vector<at::Tensor>& tensors, Communicator& comm, int root) {
  codec::Writer out;
  out.number(static_cast<std::int64_t>(tensors.size()));
  for (const at::Tensor& tensor : tensors) {
    out.number(static_cast<std::int8_t>(tensor.scalar_type())).number(tensor.dim());
    for (const std::int64_t size : tensor.sizes()) out.number(size);
  }
  const std::string said = checkpoint::share(comm, out.bytes(), root);
  codec::Reader in(said);
  std::vector<at::Tensor> shapes(static_cast<std::size_t>(value_or_throw(in.number<std::int64_t>())));
  for (at::Tensor& shape : shapes) {
    const auto type = static_cast<at::ScalarType>(value_or_throw(in.number<std::int8_t>()));
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(value_or_throw(in.number<std::int64_t>())));
    for (std::int64_t& size : sizes) size = value_or_throw(in.number<std::int64_t>());
    sizes[0] = 0;
    shape = at::empty(sizes, type);
  }
  return shapes;
}

}  // namespace

std::vector<std::int64_t> scatter_index(std::int64_t n_total_samples, Communicator& comm,
                                        const ScatterDatasetOptions& options) {
  require_root(comm, options.root);
  const Order order = agreed_order(n_total_samples, comm, options);
  if (order.size < 0) raise(ErrorCode::InvalidArgument, "scatter_index: {} samples", order.size);
  const std::vector<std::int64_t> all = order.samples();
  const auto first = all.begin() + order.begin(comm.rank(), comm.size());
  return {first, first + order.count(comm.rank(), comm.size())};
}

std::vector<std::int64_t> detail::scatter_index_of(std::int64_t size, Communicator& comm,
                                                   const ScatterDatasetOptions& options) {
  require_root(comm, options.root);
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(comm.size()));
  comm.all_gather(std::span(&size, 1), std::span(sizes)).wait();
  const std::int64_t of_root = sizes[static_cast<std::size_t>(options.root)];
  if (of_root < 0) raise(ErrorCode::InvalidArgument, "scatter_dataset: the root's data set has no size");
  for (std::size_t rank = 0; rank < sizes.size(); ++rank) {
    if (sizes[rank] == of_root) continue;
    raise(
        ErrorCode::Mismatch,
        "scatter_dataset: rank {} has {} samples and the root, rank {}, has {} -- open the same data on all ranks, or "
        "give tensors, which only the root needs",
        rank, sizes[rank], options.root, of_root);
  }
  return scatter_index(of_root, comm, options);
}

std::vector<at::Tensor> scatter_dataset(const std::vector<at::Tensor>& tensors, Communicator& comm,
                                        const ScatterDatasetOptions& options) {
  require_root(comm, options.root);
  const bool is_root = comm.rank() == options.root;
  const std::vector<at::Tensor> given = is_root ? tensors : std::vector<at::Tensor>();
  checkpoint::agree(comm, problem_of(given));
  const Order order = agreed_order(given.empty() ? 0 : given[0].size(0), comm, options);
  std::vector<at::Tensor> parts = agreed_shapes(given, comm, options.root);

  // One after the other, as they are sent.
  std::vector<std::int64_t> lengths, rows;
  const std::vector<std::int64_t> all = is_root ? order.samples() : std::vector<std::int64_t>();
  for (int rank = 0; rank < comm.size(); ++rank) {
    lengths.push_back(order.count(rank, comm.size()));
    const std::int64_t begin = order.begin(rank, comm.size());
    if (is_root) rows.insert(rows.end(), all.begin() + begin, all.begin() + begin + lengths.back());
  }
  for (std::size_t i = 0; i < parts.size(); ++i) {
    std::vector<std::int64_t> shape = parts[i].sizes().vec();
    shape[0] = lengths[static_cast<std::size_t>(comm.rank())];
    parts[i] = at::empty(shape, parts[i].options());
    std::int64_t row_bytes = static_cast<std::int64_t>(parts[i].element_size());
    for (std::size_t d = 1; d < shape.size(); ++d) row_bytes *= shape[d];
    std::vector<std::int64_t> counts = lengths;
    for (std::int64_t& count : counts) count *= row_bytes;
    at::Tensor sent;
    if (is_root) sent = given[i].detach().cpu().index_select(0, at::tensor(rows, at::kLong)).contiguous();
    comm.scatter_v(is_root ? ConstBuffer(sent.data_ptr(), static_cast<std::int64_t>(sent.nbytes()), DType::UInt8)
                           : ConstBuffer(nullptr, 0, DType::UInt8),
                   Buffer(parts[i].data_ptr(), static_cast<std::int64_t>(parts[i].nbytes()), DType::UInt8), counts,
                   {.root = options.root})
        .wait();
  }
  return parts;
}

}  // namespace cohort::data
