#include <cohort/torch/parallel.h>

#include "base/result.h"
#include "torch/checkpoint_tensors.h"
#include "torch/reducer.h"
#include "train/step/agreement.h"
#include "train/step/ranks.h"

#include <cohort/torch/autograd.h>
#include <cohort/torch/recompute.h>
#include <cohort/torch/tensor.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <fmt/ranges.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/functional/batchnorm.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <set>
#include <unordered_set>
#include <utility>

namespace cohort::nn {
namespace {

struct Cut {
  std::int64_t begin;
  std::int64_t size;
};

Cut cut_of(const Communicator& comm, std::int64_t whole) {
  const std::int64_t size = whole / comm.size();
  return {comm.rank() * size, size};
}

// Collective. Returns a generator in the same state on all ranks. `cut`: index in `sizes` of the divided size.
at::Generator common_generator(Communicator& comm, const char* layer, const at::Generator& seeding,
                               at::IntArrayRef sizes, std::int64_t cut) {
  if (!comm) raise(ErrorCode::InvalidArgument, "{}: the communicator is empty", layer);
  const at::Tensor seed = at::empty({1}, at::kLong);
  if (seeding.defined()) {
    seed.random_(seeding);
  } else {
    seed.random_();
  }
  const at::Tensor all = all_gather(comm, at::cat({at::tensor(sizes), seed}));
  for (std::int64_t rank = 0; rank < comm.size(); ++rank) {
    for (std::int64_t dim = 0; dim < static_cast<std::int64_t>(sizes.size()); ++dim) {
      const auto first = all[0][dim].item<std::int64_t>(), its = all[rank][dim].item<std::int64_t>();
      if (first == its) continue;
      raise(ErrorCode::Mismatch, "{}: ranks give different sizes: {} on rank 0, {} on rank {}", layer, first, its,
            rank);
    }
  }
  for (const std::int64_t size : sizes) {
    if (size <= 0) raise(ErrorCode::InvalidArgument, "{}: a size of {}", layer, size);
  }
  if (cut % comm.size() != 0) {
    raise(ErrorCode::InvalidArgument, "{}: {} cannot be cut into {} equal parts -- round it up to a multiple", layer,
          cut, comm.size());
  }
  return at::detail::createCPUGenerator(static_cast<std::uint64_t>(all[0][-1].item<std::int64_t>()));
}

// Returns a copy of this rank's part of a whole tensor, so that the whole can be freed.
at::Tensor part_of(const Communicator& comm, const at::Tensor& whole, std::int64_t dim) {
  const Cut cut = cut_of(comm, whole.size(dim));
  return whole.narrow(dim, cut.begin, cut.size).clone(at::MemoryFormat::Contiguous);
}

// Draws weights like torch's linear layer: kaiming_uniform_(a = sqrt(5)), whose bound is 1 / sqrt(in_features).
at::Tensor drawn(at::IntArrayRef sizes, std::int64_t in_features, const at::Generator& generator) {
  const double bound = 1 / std::sqrt(static_cast<double>(in_features));
  return at::empty(sizes).uniform_(-bound, bound, generator);
}

Shard shard_of(const Communicator& comm, const at::Tensor& part, std::int64_t dim) {
  Shard shard{.sizes = part.sizes().vec(),
              .start = std::vector<std::int64_t>(static_cast<std::size_t>(part.dim())),
              .extent = part.sizes().vec(),
              .begin = 0,
              .count = part.numel()};
  const auto along = static_cast<std::size_t>(dim);
  shard.start[along] = comm.rank() * part.size(dim);
  shard.sizes[along] *= comm.size();
  return shard;
}

// Positions of `ids` in this rank's part of 0 .. whole - 1. Ids of other ranks are masked. Ids that belong to no rank
// stay outside of the part on every rank, so that using them fails.
struct OwnIds {
  at::Tensor index, elsewhere;
};
OwnIds own_ids(const at::Tensor& ids, const Cut& cut, std::int64_t whole) {
  const at::Tensor known = ids.ge(0).logical_and(ids.lt(whole));
  const at::Tensor own = ids.ge(cut.begin).logical_and(ids.lt(cut.begin + cut.size));
  const at::Tensor elsewhere = known.logical_and(own.logical_not());
  return {(ids - cut.begin).masked_fill(elsewhere, 0), elsewhere};
}

// Throws Mismatch if `whole` differs between ranks. Rounding on different processors stays far below the tolerance;
// another mask, batch or weight is far above it.
void require_alike(Communicator& comm, const char* layer, const char* what, const at::Tensor& whole) {
  constexpr std::int64_t kValues = 64;
  const at::NoGradGuard no_grad;
  const std::int64_t count = std::min(kValues, whole.numel());
  at::Tensor own = at::zeros({kValues + 1}, at::kDouble);
  own[0] = static_cast<double>(whole.numel());
  if (count > 0) {
    std::vector<std::int64_t> index;
    for (std::int64_t i = 0; i < count; ++i) index.push_back(whole.numel() / count * i);
    const at::Tensor flat = whole.detach().reshape({-1});
    own.narrow(0, 1, count).copy_(flat.index_select(0, at::tensor(index, at::kLong).to(flat.device())));
  }
  const at::Tensor all = all_gather(comm, own);
  const double tolerance = whole.element_size() < 4 ? 0.1 : 0.01;
  const at::Tensor finite = all.where(all.isfinite(), at::zeros_like(all)).narrow(1, 1, kValues);
  const double allowed = tolerance * finite.abs().max().item<double>();
  for (std::int64_t rank = 1; rank < comm.size(); ++rank) {
    for (std::int64_t i = 0; i <= kValues; ++i) {
      const auto first = all[0][i].item<double>(), other = all[rank][i].item<double>();
      if (first == other || (std::isnan(first) && std::isnan(other))) continue;
      if (i > 0 && std::abs(first - other) <= allowed) continue;
      raise(ErrorCode::Mismatch,
            "{}: the ranks' {} differs, which has to be the same on all: {}{} on rank 0, {} on rank {} -- give the "
            "ranks one batch, call nn::replicate once the model is made, and draw the same random numbers on all",
            layer, what, i == 0 ? "elements: " : "", first, other, rank);
    }
  }
}

// Counts only forwards in training, without recomputations, so that all ranks count the same.
bool compares_now(const torch::nn::Module& layer, std::int64_t& forwards) {
  constexpr std::int64_t kForwardsBetween = 64;
  return layer.is_training() && at::GradMode::is_enabled() && !recomputing() && forwards++ % kForwardsBetween == 0;
}

// Sum of the partial sums, or this rank's part of it along the sequence.
at::Tensor summed(Communicator& comm, const at::Tensor& partial, const std::optional<std::int64_t>& sequence_dim) {
  return sequence_dim ? autograd::reduce_scatter(comm, partial, *sequence_dim) : autograd::reduce_from(comm, partial);
}

}  // namespace

ColumnParallelLinearImpl::ColumnParallelLinearImpl(Communicator comm, const ColumnParallelLinearOptions& options)
    : comm_(std::move(comm)), options_(options) {
  const at::Generator generator = common_generator(comm_, "ColumnParallelLinear", options.generator,
                                                   {options.out_features, options.in_features}, options.out_features);
  const auto draw = [&](at::IntArrayRef sizes) {
    return part_of(comm_, drawn(sizes, options.in_features, generator), 0);
  };
  weight = register_parameter("weight", draw({options.out_features, options.in_features}));
  if (options.bias) bias = register_parameter("bias", draw({options.out_features}));
}

at::Tensor ColumnParallelLinearImpl::forward(const at::Tensor& x) {
  if (compares_now(*this, forwards_) && !options_.sequence_dim) {
    require_alike(comm_, "ColumnParallelLinear", "input", x);
  }
  const at::Tensor whole =
      options_.sequence_dim ? autograd::all_gather(comm_, x, *options_.sequence_dim) : autograd::copy_to(comm_, x);
  const at::Tensor y = at::linear(whole, weight, bias);
  return options_.output == Features::Whole ? autograd::gather_from(comm_, y, -1) : y;
}

std::map<std::string, Shard> ColumnParallelLinearImpl::shards() const {
  std::map<std::string, Shard> all{{"weight", shard_of(comm_, weight, 0)}};
  if (bias.defined()) all.emplace("bias", shard_of(comm_, bias, 0));
  return all;
}

RowParallelLinearImpl::RowParallelLinearImpl(Communicator comm, const RowParallelLinearOptions& options)
    : comm_(std::move(comm)), options_(options) {
  const at::Generator generator = common_generator(comm_, "RowParallelLinear", options.generator,
                                                   {options.out_features, options.in_features}, options.in_features);
  weight = register_parameter(
      "weight", part_of(comm_, drawn({options.out_features, options.in_features}, options.in_features, generator), 1));
  if (options.bias) {
    bias = register_parameter("bias", drawn({options.out_features}, options.in_features, generator));
  }
}

at::Tensor RowParallelLinearImpl::forward(const at::Tensor& x) {
  if (compares_now(*this, forwards_) && bias.defined()) require_alike(comm_, "RowParallelLinear", "bias", bias);
  const at::Tensor part = options_.input == Features::Whole ? autograd::scatter_to(comm_, x, -1) : x;
  const at::Tensor y = summed(comm_, at::linear(part, weight), options_.sequence_dim);
  if (!bias.defined()) return y;
  // If the sequence is divided, each rank computes only a part of the bias's gradient.
  return y + (options_.sequence_dim ? autograd::copy_to(comm_, bias) : bias);
}

std::map<std::string, Shard> RowParallelLinearImpl::shards() const { return {{"weight", shard_of(comm_, weight, 1)}}; }

VocabParallelEmbeddingImpl::VocabParallelEmbeddingImpl(Communicator comm, const VocabParallelEmbeddingOptions& options)
    : comm_(std::move(comm)), options_(options) {
  const at::Generator generator =
      common_generator(comm_, "VocabParallelEmbedding", options.generator,
                       {options.num_embeddings, options.embedding_dim}, options.num_embeddings);
  const at::Tensor whole = at::empty({options.num_embeddings, options.embedding_dim}).normal_(0, 1, generator);
  weight = register_parameter("weight", part_of(comm_, whole, 0));
}

at::Tensor VocabParallelEmbeddingImpl::forward(const at::Tensor& indices) {
  const OwnIds own = own_ids(indices, cut_of(comm_, options_.num_embeddings), options_.num_embeddings);
  const at::Tensor rows = at::embedding(weight, own.index).masked_fill(own.elsewhere.unsqueeze(-1), 0);
  return summed(comm_, rows, options_.sequence_dim);
}

std::map<std::string, Shard> VocabParallelEmbeddingImpl::shards() const {
  return {{"weight", shard_of(comm_, weight, 0)}};
}

ParallelCrossEntropyImpl::ParallelCrossEntropyImpl(Communicator comm, const ParallelCrossEntropyOptions& options)
    : comm_(std::move(comm)), options_(options) {
  if (!comm_) raise(ErrorCode::InvalidArgument, "ParallelCrossEntropy: the communicator is empty");
}

at::Tensor ParallelCrossEntropyImpl::forward(const at::Tensor& logits, const at::Tensor& targets) {
  if (logits.dim() == 0 || targets.sizes() != logits.sizes().slice(0, static_cast<std::size_t>(logits.dim() - 1))) {
    raise(ErrorCode::InvalidArgument, "ParallelCrossEntropy: logits [..., classes] need one target for each [...]");
  }
  const at::Tensor wide = logits.to(at::promote_types(logits.scalar_type(), at::kFloat));
  const at::Tensor highest = std::get<0>(wide.detach().max(-1));
  all_reduce(comm_, highest, {.op = ReduceOp::Max}).synchronize(buffer_device(highest));
  const at::Tensor shifted = wide - highest.unsqueeze(-1);

  const std::int64_t classes = logits.size(-1) * comm_.size();
  const at::Tensor ignored = targets.eq(options_.ignore_index);
  const OwnIds own = own_ids(targets.masked_fill(ignored, 0), cut_of(comm_, classes), classes);
  const at::Tensor picked = shifted.gather(-1, own.index.unsqueeze(-1)).squeeze(-1).masked_fill(own.elsewhere, 0);
  const at::Tensor sums = autograd::reduce_from(comm_, at::stack({shifted.exp().sum(-1), picked}));
  const at::Tensor losses = (sums[0].log() - sums[1]).masked_fill(ignored, 0);
  if (options_.reduction == at::Reduction::None) return losses;
  if (options_.reduction == at::Reduction::Sum) return losses.sum();
  return losses.sum() / ignored.logical_not().sum();
}

// ------------------------------------------------------------------------------------------------- what is whole

namespace {

std::string line_of_tensor(const std::string& name, const at::Tensor& tensor) {
  return fmt::format("'{}' of {} [{}]", name, at::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ", "));
}

}  // namespace

void replicate(Communicator& comm, torch::nn::Module& module) {
  if (!comm) raise(ErrorCode::InvalidArgument, "replicate: the communicator is empty");
  std::set<std::string> cut;
  const auto add = [&](const torch::nn::Module& one, const std::string& prefix) {
    const auto* const has = dynamic_cast<const HasShards*>(&one);
    if (has == nullptr) return;
    for (const auto& [name, shard] : has->shards()) cut.insert(prefix + name);
  };
  add(module, "");
  for (const auto& item : module.named_modules("", false)) add(*item.value(), item.key() + ".");
  std::vector<std::string> lines;
  std::vector<at::Tensor> whole;
  std::unordered_set<const void*> cut_tensors, seen;
  const auto named = checkpoint::named_tensors(module);
  for (const auto& [name, tensor] : named) {
    if (cut.count(name) > 0) cut_tensors.insert(tensor.unsafeGetTensorImpl());
  }
  for (const auto& [name, tensor] : named) {
    lines.push_back(line_of_tensor(name, tensor));
    if (cut_tensors.count(tensor.unsafeGetTensorImpl()) > 0) continue;
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) whole.push_back(tensor);
  }
  auto generators = checkpoint::generators_of(module);
  std::vector<at::Tensor> states;
  for (auto& [name, generator] : generators) {
    states.push_back(checkpoint::state_of(generator));
    lines.push_back(line_of_tensor("generator " + name, states.back()));
  }
  step::require_same_on_all_ranks(*step::ranks_of(comm), lines, "replicate");
  broadcast_parameters(comm, whole);
  broadcast_parameters(comm, states);
  for (std::size_t i = 0; i < states.size(); ++i) {
    const std::lock_guard lock(generators[i].second.mutex());
    generators[i].second.set_state(states[i]);
  }
}

ParallelDropoutImpl::ParallelDropoutImpl(Communicator comm, const ParallelDropoutOptions& options)
    : comm_(std::move(comm)), options_(options) {
  if (!comm_) raise(ErrorCode::InvalidArgument, "ParallelDropout: the communicator is empty");
  if (!(options.p >= 0 && options.p <= 1)) {
    raise(ErrorCode::InvalidArgument, "ParallelDropout: a probability of {}", options.p);
  }
}

at::Tensor ParallelDropoutImpl::forward(const at::Tensor& x) {
  if (!is_training() || options_.p == 0) return x;
  const at::Tensor drawn_seed = at::empty({1}, at::kLong);
  if (options_.generator.defined()) {
    drawn_seed.random_(options_.generator);
  } else {
    drawn_seed.random_();
  }
  // Uses a separate generator, seeded by the drawn number and the rank (mixed as in splitmix64). Only the number is
  // drawn from the common generator.
  auto seed = static_cast<std::uint64_t>(drawn_seed.item<std::int64_t>());
  seed += (static_cast<std::uint64_t>(comm_.rank()) + 1) * 0x9E3779B97F4A7C15ULL;
  seed = (seed ^ (seed >> 30)) * 0xBF58476D1CE4E5B9ULL;
  seed = (seed ^ (seed >> 27)) * 0x94D049BB133111EBULL;
  seed ^= seed >> 31;
  at::Generator own;
  {
    at::Generator process = at::globalContext().defaultGenerator(x.device());
    const std::lock_guard lock(process.mutex());
    own = process.clone();
  }
  own.set_current_seed(seed);
  at::Tensor mask = at::empty(x.sizes(), x.options().requires_grad(false)).bernoulli_(1 - options_.p, own);
  if (options_.p < 1) mask.div_(1 - options_.p);
  return x * mask;
}

void sum_gradients(Communicator& comm, torch::nn::Module& module) {
  for (const at::Tensor& parameter : module.parameters()) {
    if (!parameter.requires_grad()) continue;
    parameter.register_hook([comm](const at::Tensor& gradient) {
      Communicator own = comm;
      return autograd::all_reduce(own, gradient);
    });
  }
}

// ------------------------------------------------------------------------------------------------- batch normalization

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

at::Tensor like_channels(const at::Tensor& vector, const at::Tensor& x) {
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(x.dim()), 1);
  sizes[1] = -1;
  return vector.reshape(sizes);
}

at::Tensor over_channels(const at::Tensor& x) {
  std::vector<std::int64_t> others{0};
  for (std::int64_t dim = 2; dim < x.dim(); ++dim) others.push_back(dim);
  return x.sum(others);
}

struct BatchStatistics {
  at::Tensor mean, squares;  // squares: the sum of squared deviations; float64
  double count = 0;          // number of values per channel, over all ranks
};

// Combines each rank's count, mean and sum of squared deviations, since sums of squares would lose digits if the mean
// is large.
BatchStatistics statistics_of(Communicator& comm, const at::Tensor& x) {
  const std::int64_t channels = x.size(1);
  const std::int64_t count = channels == 0 ? 0 : x.numel() / channels;
  const at::Tensor own_mean = over_channels(x) / static_cast<double>(std::max<std::int64_t>(count, 1));
  const at::Tensor own_squares = over_channels((x - like_channels(own_mean, x)).square());
  const at::Tensor own_count = at::full({1}, static_cast<double>(count), own_mean.options());
  const at::Tensor all = all_gather(comm, at::cat({own_mean, own_squares, own_count}).to(at::kDouble));
  const at::Tensor means = all.narrow(1, 0, channels), counts = all.narrow(1, 2 * channels, 1);
  const at::Tensor total = counts.sum();
  const at::Tensor mean = (means * counts).sum(0) / total;
  const at::Tensor squares = (all.narrow(1, channels, channels) + counts * (means - mean).square()).sum(0);
  return {mean, squares, total.item<double>()};
}

class Normalize : public torch::autograd::Function<Normalize> {
 public:
  static at::Tensor forward(AutogradContext* context, const at::Tensor& x, Communicator& comm,
                            const BatchStatistics& statistics, double eps) {
    const at::Tensor inverse = (statistics.squares / statistics.count + eps).rsqrt().to(x.scalar_type());
    const at::Tensor mean = statistics.mean.to(x.scalar_type());
    const at::Tensor normal = (x - like_channels(mean, x)) * like_channels(inverse, x);
    context->save_for_backward({normal, inverse});
    context->saved_data["count"] = statistics.count;
    context->saved_data["comm"] = c10::IValue::make_capsule(c10::make_intrusive<HeldCommunicator>(comm));
    return normal;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    if (at::GradMode::is_enabled()) {
      raise(ErrorCode::InvalidArgument, "double backward (create_graph) through SyncBatchNorm is not supported");
    }
    const variable_list saved = context->get_saved_variables();
    const at::Tensor& normal = saved[0];
    const at::Tensor& gradient = gradients.at(0);
    const at::Tensor sums = at::stack({over_channels(gradient), over_channels(gradient * normal)});
    Communicator comm = static_cast<HeldCommunicator*>(context->saved_data.at("comm").toCapsule().get())->comm;
    all_reduce(comm, sums).synchronize(buffer_device(sums));
    const at::Tensor means = sums / context->saved_data.at("count").toDouble();
    const at::Tensor inner = gradient - like_channels(means[0], normal) - normal * like_channels(means[1], normal);
    return {inner * like_channels(saved[1], normal), {}, {}, {}};
  }

 private:
  struct HeldCommunicator : torch::CustomClassHolder {
    explicit HeldCommunicator(Communicator held) : comm(std::move(held)) {}
    Communicator comm;
  };
};

}  // namespace

SyncBatchNormImpl::SyncBatchNormImpl(Communicator comm, const torch::nn::BatchNormOptions& options)
    : comm_(std::move(comm)), options_(options) {
  if (!comm_) raise(ErrorCode::InvalidArgument, "SyncBatchNorm: the communicator is empty");
  const std::int64_t features = options.num_features();
  if (options.affine()) {
    weight = register_parameter("weight", at::ones({features}));
    bias = register_parameter("bias", at::zeros({features}));
  }
  if (options.track_running_stats()) {
    running_mean = register_buffer("running_mean", at::zeros({features}));
    running_var = register_buffer("running_var", at::ones({features}));
    num_batches_tracked = register_buffer("num_batches_tracked", at::zeros({}, at::kLong));
  }
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& x) {
  if (x.dim() < 2 || x.size(1) != options_.num_features()) {
    raise(ErrorCode::InvalidArgument, "SyncBatchNorm: an input (N, {}, ...) is needed, not one of {} dimensions{}",
          options_.num_features(), x.dim(), x.dim() < 2 ? "" : fmt::format(" and {} channels", x.size(1)));
  }
  if (!is_training()) {
    namespace F = torch::nn::functional;
    const bool own_statistics = !running_mean.defined();
    return F::batch_norm(
        x, running_mean, running_var,
        F::BatchNormFuncOptions().weight(weight).bias(bias).training(own_statistics).eps(options_.eps()));
  }
  const at::Tensor wide = x.to(at::promote_types(x.scalar_type(), at::kFloat));
  const BatchStatistics statistics = statistics_of(comm_, wide.detach());
  if (statistics.count <= 1) {
    raise(ErrorCode::InvalidArgument,
          "SyncBatchNorm: more than one value per channel is needed in training, over all ranks");
  }
  if (running_mean.defined() && !recomputing()) {
    const at::NoGradGuard no_grad;
    num_batches_tracked += 1;
    const auto& momentum = options_.momentum();
    const double factor = momentum ? *momentum : 1 / num_batches_tracked.item<double>();
    running_mean.lerp_(statistics.mean.to(running_mean.scalar_type()), factor);
    running_var.lerp_((statistics.squares / (statistics.count - 1)).to(running_var.scalar_type()), factor);
  }
  at::Tensor y = Normalize::apply(wide, comm_, statistics, options_.eps());
  if (weight.defined()) y = y * like_channels(weight, x) + like_channels(bias, x);
  return y.to(x.scalar_type());
}

}  // namespace cohort::nn
