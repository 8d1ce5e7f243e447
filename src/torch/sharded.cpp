#include <cohort/torch/sharded.h>

#include "base/result.h"
#include "torch/reducer.h"

#include <cohort/torch/parallel.h>
#include <cohort/torch/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>
#include <unordered_set>
#include <utility>

namespace cohort::optim {

namespace {

bool has_master(const at::Tensor& values) {
  return values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
}

}  // namespace

ShardedCore::ShardedCore(nn::DataParallelCore& model) : model_(model), reducer_(model.reducer()) {
  if (!reducer_->core().shards()) {
    raise(ErrorCode::InvalidArgument,
          "Sharded: the model's training state is not divided -- give its DistributedDataParallel a `sharding`");
  }
  for (const nn::Reducer::Piece& piece : reducer_->pieces()) {
    pieces_.push_back({.parameter = reducer_->name_of(piece.range.parameter),
                       .parameter_tensor = reducer_->tensor_of(piece.range.parameter),
                       .tensor = has_master(piece.values) ? piece.values.to(at::kFloat) : piece.values,
                       .begin = piece.range.begin});
  }
  std::unordered_set<const void*> seen;  // a parameter may be registered twice
  for (const at::Tensor& parameter : model_.parameters()) {
    if (parameter.requires_grad() && seen.insert(parameter.unsafeGetTensorImpl()).second) trained_.push_back(parameter);
  }
  reducer_->note_optimizer();
}

ShardedCore::~ShardedCore() = default;

void ShardedCore::masters_written() noexcept {
  for (std::size_t i = 0; i < own_.size(); ++i) writes_[i] = reducer_->writes_to(parameter_of(i));
}

std::size_t ShardedCore::parameter_of(std::size_t piece) const noexcept {
  return reducer_->pieces()[own_[piece]].range.parameter;
}

void ShardedCore::allow_writes() { reducer_->core().allow_writes(); }
void ShardedCore::forbid_writes() { reducer_->core().forbid_writes(); }

ShardedCore::Groups ShardedCore::all() const {
  Groups groups;
  groups.emplace_back(trained_);
  return groups;
}

ShardedCore::Groups ShardedCore::divide(const Groups& groups) {
  std::map<const void*, std::vector<std::size_t>> pieces_of;
  for (const at::Tensor& parameter : trained_) pieces_of[parameter.unsafeGetTensorImpl()];
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    pieces_of.at(pieces_[i].parameter_tensor.unsafeGetTensorImpl()).push_back(i);
  }
  Groups divided;
  trained_.clear();
  for (const torch::optim::OptimizerParamGroup& group : groups) {
    std::vector<at::Tensor> own;
    for (const at::Tensor& parameter : group.params()) {
      const auto found = pieces_of.find(parameter.unsafeGetTensorImpl());
      if (found == pieces_of.end()) {
        raise(ErrorCode::InvalidArgument,
              "Sharded: a parameter group has a tensor that the model does not train -- give parameters of the module "
              "that the DistributedDataParallel wraps, each once");
      }
      for (const std::size_t piece : found->second) {
        own.push_back(pieces_[piece].tensor);
        own_.push_back(piece);
      }
      trained_.push_back(parameter);
      pieces_of.erase(found);
    }
    if (group.has_options()) {
      divided.emplace_back(std::move(own), group.options().clone());
    } else {
      divided.emplace_back(std::move(own));
    }
  }
  std::vector<Piece> pieces;
  std::sort(own_.begin(), own_.end());
  for (const std::size_t piece : own_) pieces.push_back(std::move(pieces_[piece]));
  pieces_ = std::move(pieces);
  writes_.resize(own_.size());
  masters_written();
  return divided;
}

void ShardedCore::before_step() {
  const at::NoGradGuard no_grad;
  reducer_->check_parameters("Sharded::step");
  reducer_->take_gradients();
  reducer_->note_writes();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const at::Tensor& values = reducer_->pieces()[own_[i]].values;
    const std::int64_t writes = reducer_->writes_to(parameter_of(i));
    if (std::exchange(writes_[i], writes) != writes && has_master(values)) pieces_[i].tensor.copy_(values);
  }
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const at::Tensor& gradient = reducer_->pieces()[own_[i]].gradient;
    pieces_[i].tensor.mutable_grad() = gradient.defined() ? gradient.to(pieces_[i].tensor.scalar_type()) : at::Tensor();
  }
  // Others of this host may still read parameters, for an output of their own.
  if (reducer_->core().shards()->shares_parameters()) reducer_->core().shards()->meet();
  reducer_->core().allow_writes();
}

void ShardedCore::after_step() {
  const at::NoGradGuard no_grad;
  gradients::Shards& shards = *reducer_->core().shards();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const nn::Reducer::Piece& piece = reducer_->pieces()[own_[i]];
    if (has_master(piece.values)) piece.values.copy_(pieces_[i].tensor);
    pieces_[i].tensor.mutable_grad().reset();
  }
  if (shards.divides_gradients()) reducer_->drop_gradients(own_);
  const std::vector<gradients::Region>& regions = reducer_->core().regions();
  const Device& device = regions.front().values.device;
  shards.gather(regions, device.type == DeviceType::CPU ? nullptr : reducer_->stream_of(device));
  reducer_->core().forbid_writes();
  if (shards.shares_parameters()) shards.meet();
  // To autograd, as if they had been changed in place: an older graph is not to be used any more.
  for (const at::Tensor& parameter : trained_) parameter.unsafeGetTensorImpl()->bump_version();
  reducer_->note_step();
}

namespace {

/// By their names in `module`, the parameters of which this rank holds a part.
std::set<std::string> parts_of(const torch::nn::Module& module) {
  std::set<std::string> names;
  for (const auto& item : module.named_modules("", /*include_self=*/true)) {
    const auto* const parts = dynamic_cast<const nn::HasShards*>(item.value().get());
    if (parts == nullptr) continue;
    for (const auto& [name, shard] : parts->shards()) {
      if (shard.extent != shard.sizes) names.insert(item.key().empty() ? name : item.key() + "." + name);
    }
  }
  return names;
}

using Named = std::vector<std::pair<std::string, at::Tensor>>;

/// By how much gradients are to be scaled, and the norm. `counted`: this rank's, by the names of their parameters.
std::pair<double, double> factor_of(const Named& counted, double max_norm, const torch::nn::Module& module,
                                    const ClipOptions& options, Communicator over) {
  if (!(max_norm > 0)) raise(ErrorCode::InvalidArgument, "clip_grad_norm({}): a norm is above 0", max_norm);
  const std::set<std::string> parts = parts_of(module);
  if (!parts.empty() && !(options.over && options.parts)) {
    raise(ErrorCode::InvalidArgument,
          "clip_grad_norm: this rank holds a part of '{}', so its gradients are not the whole norm -- say which ranks "
          "hold "
          "the rest: {{.over = mesh.comm(), .parts = mesh.along(\"tp\")}}",
          *parts.begin());
  }
  const bool first = !options.parts || options.parts.rank() == 0;
  at::Tensor own;
  for (const auto& [name, gradient] : counted) {
    if (!first && !parts.contains(name)) continue;
    const at::Tensor square = gradient.to(at::kDouble).square().sum();
    own = own.defined() ? own + square : square;
  }
  std::array<double, 1> squares = {own.defined() ? own.item<double>() : 0};
  over.all_reduce(std::span(squares)).wait();
  const double norm = std::sqrt(squares[0]);
  const double factor = max_norm / (norm + 1e-6);
  return {factor >= 1 ? 1 : factor, norm};  // NaN stays
}

}  // namespace

double ShardedCore::clip_grad_norm(double max_norm, const ClipOptions& options) {
  const at::NoGradGuard no_grad;
  reducer_->take_gradients();
  Named pieces;
  for (std::size_t i = 0; i < own_.size(); ++i) {
    const at::Tensor& gradient = reducer_->pieces()[own_[i]].gradient;
    if (gradient.defined()) pieces.emplace_back(pieces_[i].parameter, gradient);
  }
  Communicator over = options.over ? options.over : reducer_->core().shards()->comm();
  const auto [factor, norm] = factor_of(pieces, max_norm, *model_.whole(), options, over);
  if (factor == 1) return norm;
  if (reducer_->core().divides_gradients()) {
    for (const auto& [name, gradient] : pieces) gradient.mul_(factor);
  } else {
    for (const at::Tensor& parameter : trained_) {
      if (parameter.grad().defined()) parameter.mutable_grad().mul_(factor);
    }
  }
  return norm;
}

double clip_grad_norm(torch::nn::Module& module, double max_norm, const ClipOptions& options, Communicator copies) {
  if (!options.over) raise(ErrorCode::InvalidArgument, "clip_grad_norm: options.over is empty -- give mesh.comm()");
  const at::NoGradGuard no_grad;
  Named all;
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined()) all.emplace_back(item.key(), item.value().grad());
  }
  const bool counts = !copies || copies.rank() == 0;
  const auto [factor, norm] = factor_of(counts ? all : Named(), max_norm, module, options, options.over);
  if (factor == 1) return norm;
  for (const auto& [name, gradient] : all) gradient.mul_(factor);
  return norm;
}

void ShardedCore::zero_grad() {
  for (const at::Tensor& parameter : trained_) parameter.mutable_grad().reset();
  reducer_->drop_gradients(own_);
}

}  // namespace cohort::optim
