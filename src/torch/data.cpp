// Samplers; scatter_dataset, which also sends data that only the root has; IDX files.
#include <cohort/torch/data.h>

#include "base/env.h"
#include "base/permutation.h"
#include "base/records.h"
#include "base/result.h"
#include "train/checkpoint/exchange.h"
#include "train/formats/idx.h"
#include "train/gradients/shares.h"
#include "train/gradients/virtual_ranks.h"

#include <cohort/torch/idx.h>
#include <cohort/torch/tensor.h>

// Includes only the headers of archives, since the rest of torch/serialize is not needed.
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <numeric>
#include <random>
#include <span>

namespace cohort::data {

namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

void require_rank(int rank, int world_size, std::int64_t virtual_ranks) {
  if (virtual_ranks < 0 || (virtual_ranks > 0 && world_size > virtual_ranks))
    raise(ErrorCode::InvalidArgument, "DistributedSampler: virtual_ranks={} in a world of {}", virtual_ranks,
          world_size);
  if (world_size < 1 || rank < 0 || rank >= world_size)
    raise(ErrorCode::InvalidArgument, "DistributedSampler: rank {} in a world of {}", rank, world_size);
}

}  // namespace

// Shared by a sampler's copies, since torch's DataLoader keeps its own copy, and the user calls `step` on another.
struct DistributedSampler::Shared {
  struct DrawnStep {
    std::int64_t end = 0;     // the cursor after this step
    std::int64_t global = 0;  // samples over all ranks
    std::int64_t local = 0;   // number of samples of this rank
    int virtual_rank = -1;
  };
  int parts() const noexcept {
    return options.virtual_ranks > 0 ? static_cast<int>(options.virtual_ranks) : options.world_size;
  }
  /// This rank's virtual ranks; without them, the rank itself.
  gradients::VirtualRange block() const noexcept {
    return options.virtual_ranks > 0 ? gradients::block_of(parts(), options.world_size, options.rank)
                                     : gradients::VirtualRange{options.rank, options.rank + 1};
  }

  DistributedSamplerOptions options;
  gradients::SampleShares shares;
  bool weighted = false;          // a DistributedDataParallel has this sampler
  std::int64_t global_batch = 0;  // 0: batch_size for each rank
  SamplerState state;
  std::int64_t drawn = 0;             // samples of this epoch's steps that were handed out, over all ranks
  int drawn_parts = 0;                // this rank's virtual ranks that were handed out of the next step
  std::deque<DrawnStep> drawn_steps;  // drawn, and `step` not called yet; oldest first
  std::vector<std::int64_t> order;    // the permutation of the epoch and seed below
  std::int64_t ordered_epoch = -1;
  std::uint64_t ordered_seed = 0;
};

std::uint64_t sample_seed(std::int64_t index, std::int64_t epoch, std::uint64_t seed) noexcept {
  return gradients::virtual_seed(seed, epoch, index, 0);
}

std::vector<std::int64_t> permutation(std::int64_t size, std::uint64_t seed, std::int64_t epoch) {
  std::vector<std::int64_t> order(static_cast<std::size_t>(size));
  permute(order, seed, epoch);
  return order;
}

DistributedSampler::DistributedSampler(std::int64_t size, const DistributedSamplerOptions& options)
    : shared_(std::make_shared<Shared>()) {
  if (size < 0) raise(ErrorCode::InvalidArgument, "DistributedSampler: a data set of {} samples", size);
  if (options.batch_size < 1)
    raise(ErrorCode::InvalidArgument, "DistributedSampler: batch_size is {}", options.batch_size);
  require_rank(options.rank, options.world_size, options.virtual_ranks);
  shared_->options = options;
  shared_->shares = gradients::SampleShares(options.shares.empty() ? env::text(env::kShares) : options.shares);
  if (options.virtual_ranks > 0 && shared_->shares.uneven())
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler: virtual_ranks with shares '{}', which depend on ranks -- leave one out (COHORT_SHARES)",
          options.shares.empty() ? env::text(env::kShares) : options.shares);
  if (!options.shares.empty()) shared_->shares.require_world(options.world_size);
  shared_->state.seed = options.seed;
  shared_->state.size = size;
}

DistributedSampler::DistributedSampler(std::int64_t size, const Communicator& comm, DistributedSamplerOptions options)
    : DistributedSampler(size, [&] {
        options.rank = comm.rank();
        options.world_size = comm.size();
        return options;
      }()) {}

void DistributedSampler::permute() {
  if (shared_->ordered_epoch == shared_->state.epoch && shared_->ordered_seed == shared_->state.seed) return;
  if (shared_->options.shuffle) {
    shared_->order = permutation(shared_->state.size, shared_->state.seed, shared_->state.epoch);
  } else {
    shared_->order.resize(static_cast<std::size_t>(shared_->state.size));
    std::iota(shared_->order.begin(), shared_->order.end(), std::int64_t{0});
  }
  shared_->ordered_epoch = shared_->state.epoch;
  shared_->ordered_seed = shared_->state.seed;
}

std::optional<std::vector<std::int64_t>> DistributedSampler::draw(std::int64_t batch_size) {
  const std::int64_t full = shared_->global_batch > 0 ? shared_->global_batch : batch_size * shared_->parts();
  const std::int64_t left = shared_->state.size - shared_->drawn;
  if (left <= 0 || (shared_->options.remainder == Remainder::Drop && left < full)) return std::nullopt;
  permute();
  const std::int64_t fresh = std::min(full, left);
  const std::int64_t global = shared_->options.remainder == Remainder::Pad ? full : fresh;

  static const gradients::SampleShares kEven;
  const auto& shares = shared_->weighted || !shared_->options.shares.empty() ? shared_->shares : kEven;
  const int part = shared_->block().begin + shared_->drawn_parts;
  const auto [before, count] = shares.part(global, part, shared_->parts(), {shared_->state.epoch, shared_->drawn});
  const std::int64_t begin = shared_->drawn + before;
  std::vector<std::int64_t> batch;
  batch.reserve(static_cast<std::size_t>(count));
  for (std::int64_t i = begin; i < begin + count; ++i)
    batch.push_back(shared_->order[static_cast<std::size_t>(i % shared_->state.size)]);

  if (++shared_->drawn_parts == shared_->block().count()) {
    shared_->drawn_parts = 0;
    shared_->drawn += fresh;
  }
  shared_->drawn_steps.push_back({.end = shared_->drawn,
                                  .global = global,
                                  .local = count,
                                  .virtual_rank = shared_->options.virtual_ranks > 0 ? part : -1});
  return batch;
}

std::optional<std::vector<std::int64_t>> DistributedSampler::next_batch() { return draw(shared_->options.batch_size); }

void DistributedSampler::step(std::int64_t steps) {
  if (steps < 1 || steps > static_cast<std::int64_t>(shared_->drawn_steps.size())) {
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler::step({}) where {} batches are drawn -- call it once after each optimizer step, with the "
          "number of batches that it was of",
          steps, shared_->drawn_steps.size());
  }
  for (; steps > 0; --steps) {
    const Shared::DrawnStep ended = shared_->drawn_steps.front();
    shared_->state.cursor = ended.end;
    shared_->drawn_steps.pop_front();
    if (shared_->weighted) shared_->shares.end_step(ended.local);
  }
  const gradients::SampleShares& shares = shared_->shares;
  if (!shared_->weighted && shared_->options.rank == 0 &&
      (shares.measured() || (shares.uneven() && shared_->options.shares.empty())))
    gradients::warn_of_unused_shares();
}

void DistributedSampler::bind(std::shared_ptr<step::Ranks> ranks) const {
  if (!shared_->shares.uneven()) return;
  shared_->shares.require_world(ranks->size());
  if (!shared_->weighted && !shared_->drawn_steps.empty()) {
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler: a batch has been drawn before DistributedDataParallel was given the sampler, and its "
          "shares are not even -- make the model first");
  }
  shared_->shares.bind(std::move(ranks));
  shared_->weighted = true;
}

void DistributedSampler::begin_step() const {
  shared_->shares.begin_step(full_step(), {shared_->state.epoch, shared_->drawn});
}

std::int64_t DistributedSampler::full_step() const noexcept {
  return shared_->global_batch > 0 ? shared_->global_batch : shared_->options.batch_size * shared_->parts();
}

int DistributedSampler::virtual_rank() const noexcept {
  return shared_->drawn_steps.empty() ? -1 : shared_->drawn_steps.front().virtual_rank;
}

std::int64_t DistributedSampler::global_batch() const noexcept {
  return shared_->drawn_steps.empty() ? 0 : shared_->drawn_steps.front().global;
}

// Number of samples in a forward's batch: the oldest drawn batch whose `step` has not been called. -1: there is none.
// `trained_at` is the cursor at which the model may already have been trained on that batch. It does not matter if all
// drawn batches have equally many samples.
std::int64_t DistributedSampler::samples_of_batch(std::optional<std::int64_t> trained_at) const {
  const auto& steps = shared_->drawn_steps;
  if (steps.empty()) return -1;
  const bool alike = std::all_of(steps.begin(), steps.end(), [&](const Shared::DrawnStep& step) {
    return step.local == steps.front().local && step.global == steps.front().global;
  });
  if (!alike && trained_at == shared_->state.cursor) {
    raise(ErrorCode::InvalidArgument,
          "DistributedSampler: {} batches are drawn, the first of {} samples of this rank and the last of {}, and "
          "nothing says which one is trained on -- call step once after each batch",
          steps.size(), steps.front().local, steps.back().local);
  }
  return steps.front().local;
}

std::int64_t DistributedSampler::steps_from(std::int64_t cursor) const noexcept {
  const std::int64_t full = full_step();
  const std::int64_t left = std::max<std::int64_t>(shared_->state.size - cursor, 0);
  return shared_->options.remainder == Remainder::Drop ? left / full : ceil_div(left, full);
}

std::int64_t DistributedSampler::epoch() const noexcept { return shared_->state.epoch; }
std::int64_t DistributedSampler::cursor() const noexcept { return shared_->state.cursor; }
std::int64_t DistributedSampler::size() const noexcept { return shared_->state.size; }
SamplerState DistributedSampler::state() const noexcept { return shared_->state; }
const DistributedSamplerOptions& DistributedSampler::options() const noexcept { return shared_->options; }
void DistributedSampler::next_epoch() { set_epoch(epoch() + 1); }
std::int64_t DistributedSampler::steps_left() const noexcept { return steps_from(shared_->state.cursor); }
std::int64_t DistributedSampler::steps_per_epoch() const noexcept { return steps_from(0); }

void DistributedSampler::rewind() {
  shared_->drawn = shared_->state.cursor;
  shared_->drawn_parts = 0;
  shared_->drawn_steps.clear();
}

void DistributedSampler::set_epoch(std::int64_t epoch) {
  if (epoch < 0) raise(ErrorCode::InvalidArgument, "DistributedSampler: epoch {}", epoch);
  shared_->state.epoch = epoch;
  shared_->state.cursor = 0;
  rewind();
}

void DistributedSampler::load_state(const SamplerState& state) {
  if (state.size != shared_->state.size) {
    raise(ErrorCode::InvalidArgument,
          "a sampler's position in a data set of {} samples cannot be used for one of {} -- give the data it was saved "
          "with, or "
          "start at an epoch with set_epoch",
          state.size, shared_->state.size);
  }
  if (state.epoch < 0 || state.cursor < 0 || state.cursor > state.size) {
    raise(ErrorCode::InvalidArgument, "a sampler's position is damaged: epoch {}, cursor {} of {}", state.epoch,
          state.cursor, state.size);
  }
  shared_->state = state;
  rewind();
}

void DistributedSampler::set_world(int rank, int world_size, std::int64_t global_batch) {
  require_rank(rank, world_size, shared_->options.virtual_ranks);
  const std::int64_t whole = shared_->options.batch_size * shared_->options.virtual_ranks;
  if (whole > 0 && global_batch > 0 && global_batch != whole)
    raise(ErrorCode::InvalidArgument, "DistributedSampler: a global batch of {} samples, and {} of virtual_ranks",
          global_batch, whole);
  shared_->options.rank = rank;
  shared_->options.world_size = world_size;
  shared_->global_batch = global_batch;
  if (shared_->weighted || !shared_->options.shares.empty()) shared_->shares.require_world(world_size);
  shared_->shares.reset();
  shared_->weighted = false;
  rewind();
}

void DistributedSampler::reset(OptionalSize new_size) {
  if (new_size.has_value() && static_cast<std::int64_t>(*new_size) != shared_->state.size) {
    raise(ErrorCode::InvalidArgument, "DistributedSampler of {} samples cannot be resized to {} -- make a new one",
          shared_->state.size, *new_size);
  }
  // A loop that never calls step() has no position worth keeping. Its epochs follow one another, like torch's.
  const bool used_up = steps_left() == 0 && shared_->state.cursor > 0;
  const bool drawn_without_steps = shared_->state.cursor == 0 && shared_->drawn > 0 && steps_from(shared_->drawn) == 0;
  if (used_up || drawn_without_steps) {
    next_epoch();
  } else {
    rewind();
  }
}

DistributedSampler::OptionalBatch DistributedSampler::next(std::size_t batch_size) {
  const auto batch = draw(static_cast<std::int64_t>(batch_size));
  if (!batch) return {};
  return std::vector<std::size_t>(batch->begin(), batch->end());
}

void DistributedSampler::save(torch::serialize::OutputArchive& archive) const {
  const auto write = [&archive](const char* key, std::int64_t value) {
    archive.write(key, at::scalar_tensor(value, at::kLong));
  };
  write("seed", static_cast<std::int64_t>(shared_->state.seed));
  write("epoch", shared_->state.epoch);
  write("cursor", shared_->state.cursor);
  write("size", shared_->state.size);
  if (shared_->options.virtual_ranks > 0) write("virtual_ranks", shared_->options.virtual_ranks);
}

void DistributedSampler::load(torch::serialize::InputArchive& archive) {
  const auto read = [&archive](const char* key) {
    at::Tensor value = at::empty({}, at::kLong);
    archive.read(key, value);
    return value.item<std::int64_t>();
  };
  at::Tensor virtual_ranks = at::zeros({}, at::kLong);
  const bool has = archive.try_read("virtual_ranks", virtual_ranks);
  if (has && virtual_ranks.item<std::int64_t>() != shared_->options.virtual_ranks) {
    raise(ErrorCode::InvalidArgument,
          "a sampler's position of virtual_ranks={} cannot be used with {}, whose steps are others -- give the same",
          virtual_ranks.item<std::int64_t>(), shared_->options.virtual_ranks);
  }
  load_state({.seed = static_cast<std::uint64_t>(read("seed")),
              .epoch = read("epoch"),
              .cursor = read("cursor"),
              .size = read("size")});
}

namespace {

/// Decisions of the root.
struct Order {
  std::int64_t size = 0;
  std::int64_t equal = 0;
  std::int64_t shuffle = 0;
  std::uint64_t seed = 0;

  /// First sample of rank `rank` of `ranks`, as ChainerMN divides them.
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

/// Returns the root's decisions on all ranks.
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

/// Returns, on all ranks, empty tensors with the types and shapes of the root's tensors, without rows.
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

  // The ranks' samples one after the other, in the order of sending.
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

at::Tensor read_idx(const std::string& path) {
  const formats::IdxArray array = value_or_throw(formats::read_idx(path));
  at::Tensor tensor = at::empty(array.shape, at::TensorOptions().dtype(to_scalar_type(array.dtype)));
  if (!array.data.empty()) std::memcpy(tensor.data_ptr(), array.data.data(), array.data.size());
  return tensor;
}

}  // namespace cohort::data
