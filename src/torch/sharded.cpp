#include <cohort/torch/sharded.h>

#include "base/log.h"
#include "base/parse.h"
#include "base/result.h"
#include "torch/checkpoint_tensors.h"
#include "torch/reducer.h"
#include "train/step/methods.h"

#include <cohort/torch/parallel.h>
#include <cohort/torch/tensor.h>

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <map>
#include <set>
#include <string_view>
#include <unordered_set>
#include <utility>

namespace cohort::optim {

namespace {

bool has_master(const at::Tensor& values) {
  return values.scalar_type() == at::kHalf || values.scalar_type() == at::kBFloat16;
}

}  // namespace

ShardedCore::ShardedCore(nn::DataParallelCore& model)
    : model_(model), reducer_(model.reducer()), transaction_(std::make_unique<step::Transaction>(step::sharded())) {
  if (!reducer_->core().division().shards()) {
    raise(ErrorCode::InvalidArgument,
          "Sharded: the model's training state is not divided -- give its DistributedDataParallel a `sharding`");
  }
  for (std::size_t i = 0; i < reducer_->core().parameter_count(); ++i)
    free_.emplace(reducer_->tensor_of(i).unsafeGetTensorImpl(), i);
  reducer_->note_optimizer();
}

ShardedCore::~ShardedCore() = default;

void ShardedCore::masters_written() noexcept {
  for (std::size_t i = 0; i < own_.size(); ++i) writes_[i] = reducer_->writes_to(parameter_of(i));
}

std::size_t ShardedCore::parameter_of(std::size_t piece) const noexcept {
  return reducer_->pieces()[own_[piece]].range.parameter;
}

void ShardedCore::allow_writes() { reducer_->core().division().allow_writes(); }
void ShardedCore::forbid_writes() { reducer_->core().division().forbid_writes(); }

ShardedCore::Groups ShardedCore::all() const {
  std::vector<at::Tensor> trained;
  for (std::size_t i = 0; i < reducer_->core().parameter_count(); ++i) trained.push_back(reducer_->tensor_of(i));
  return Groups(1, torch::optim::OptimizerParamGroup(trained));
}

ShardedCore::Groups ShardedCore::divide(const Groups& groups) {
  std::unordered_set<const void*> frozen;
  for (const at::Tensor& parameter : model_.parameters())
    if (!parameter.requires_grad()) frozen.insert(parameter.unsafeGetTensorImpl());
  auto left = free_;
  std::map<std::size_t, std::size_t> members;  // the new parameters, with their groups to be added
  std::vector<at::Tensor> trained;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    for (const at::Tensor& parameter : groups[i].params()) {
      const auto found = left.find(parameter.unsafeGetTensorImpl());
      if (found != left.end()) {
        members.emplace(found->second, i);
        trained.push_back(parameter);
        left.erase(found);
      } else if (!frozen.contains(parameter.unsafeGetTensorImpl())) {
        raise(ErrorCode::InvalidArgument,
              "Sharded: a parameter group has a tensor that the model does not train, or that is in a group already -- "
              "give parameters of the module that the DistributedDataParallel wraps, each once");
      }
    }
  }
  std::vector<std::vector<at::Tensor>> own(groups.size());
  std::vector<Piece> pieces;
  std::vector<std::size_t> numbers;
  std::vector<std::int64_t> writes;
  // Inserts new pieces among the existing ones, in the order of the model's pieces.
  for (std::size_t i = 0, had = 0; i < reducer_->pieces().size(); ++i) {
    const nn::Reducer::Piece& piece = reducer_->pieces()[i];
    const bool old = had < own_.size() && own_[had] == i;
    const auto member = members.find(piece.range.parameter);
    if (old) {
      pieces.push_back(pieces_[had]);
      writes.push_back(writes_[had++]);
    } else if (member != members.end()) {
      pieces.push_back({.parameter = reducer_->name_of(piece.range.parameter),
                        .parameter_tensor = reducer_->tensor_of(piece.range.parameter),
                        .tensor = has_master(piece.values) ? piece.values.to(at::kFloat) : piece.values,
                        .begin = piece.range.begin});
      writes.push_back(reducer_->writes_to(piece.range.parameter));
      own[member->second].push_back(pieces.back().tensor);
    } else {
      continue;
    }
    numbers.push_back(i);
  }
  Groups divided;
  for (std::size_t i = 0; i < groups.size(); ++i) {
    if (groups[i].has_options()) {
      divided.emplace_back(std::move(own[i]), groups[i].options().clone());
    } else {
      divided.emplace_back(std::move(own[i]));
    }
  }
  pieces_ = std::move(pieces);
  own_ = std::move(numbers);
  writes_ = std::move(writes);
  free_ = std::move(left);
  for (const auto& [parameter, group] : members) members_.emplace(parameter, groups_ + group);
  groups_ += groups.size();
  trained_.insert(trained_.end(), trained.begin(), trained.end());
  return divided;
}

std::vector<step::Option> ShardedCore::told() const {
  std::vector<step::Option> options;
  for (const auto& [parameter, group] : members_)
    options.push_back({.name = fmt::format("'{}' in parameter group {}", reducer_->name_of(parameter), group)});
  for (std::string& line : checkpoint::option_lines(*optimizer_)) options.push_back({.name = std::move(line)});
  if (reducer_->core().divides_gradients()) return options;
  for (const auto& [parameter, group] : members_) {
    const at::Tensor& gradient = reducer_->tensor_of(parameter).grad();
    // Compares which gradients are missing: a rank that lacks one would not step its part of the parameter.
    if (!gradient.defined()) {
      options.push_back({.name = fmt::format("'{}' without a gradient", reducer_->name_of(parameter))});
      continue;
    }
    // A gradient that was added to since the last reduction is only this rank's, unless the program averages it itself.
    if (!reducer_->core().is_local(parameter)) continue;
    const at::Tensor here = gradient.detach().cpu().contiguous();
    const std::string_view bytes(static_cast<const char*>(here.data_ptr()),
                                 static_cast<std::size_t>(here.numel()) * here.element_size());
    options.push_back({.name = fmt::format("gradient of '{}', which no backward outside of no_sync has averaged",
                                           reducer_->name_of(parameter)),
                       .value = fmt::format("{:x}", fnv1a(bytes))});
  }
  return options;
}

void ShardedCore::require_reduced() const {
  if (!reducer_->core().divides_gradients()) return;
  for (const auto& [parameter, group] : members_) {
    if (!reducer_->tensor_of(parameter).grad().defined() || !reducer_->core().is_local(parameter)) continue;
    raise(ErrorCode::InvalidArgument,
          "Sharded: the gradient of '{}' was accumulated in no_sync, and no backward outside of it has come since: "
          "nothing of it would be stepped -- let the last backward before clip_grad_norm and step be outside of "
          "no_sync (or call the model's step_without_samples()), or drop it by zero_grad()",
          reducer_->name_of(parameter));
  }
}

void ShardedCore::before_step() {
  const at::NoGradGuard no_grad;
  note_clipping_by_others();
  reducer_->check_parameters("Sharded::step");
  require_reduced();
  std::size_t stepped = 0;
  for (const torch::optim::OptimizerParamGroup& group : optimizer_->param_groups()) stepped += group.params().size();
  if (stepped != pieces_.size()) {
    raise(ErrorCode::InvalidArgument,
          "Sharded::step: parameter groups have other tensors than this rank's pieces -- add parameters by "
          "Sharded::add_param_group, not by that of torch::optim::Optimizer");
  }
  Communicator comm = model_.communicator();
  step::Agreement& agreement = transaction_->agreement();
  Work compare;
  const bool compares = !compared_;
  step::Agreement::Sums sums = {};
  if (compares) {
    agreement.set(told());
    sums = agreement.sums();
  }
  if (compares && comm.size() > 1) compare = comm.all_reduce(std::span(sums));
  reducer_->take_gradients();
  reducer_->note_writes();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const at::Tensor& values = reducer_->pieces()[own_[i]].values;
    const std::int64_t writes = reducer_->writes_to(parameter_of(i));
    const bool written = std::exchange(writes_[i], writes) != writes && has_master(values);
    // Weights that equal the rounded master were saved with it, and leave it unchanged.
    if (written && !at::equal(values, pieces_[i].tensor.to(values.scalar_type()))) pieces_[i].tensor.copy_(values);
  }
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const at::Tensor& gradient = reducer_->pieces()[own_[i]].gradient;
    pieces_[i].tensor.mutable_grad() = gradient.defined() ? gradient.to(pieces_[i].tensor.scalar_type()) : at::Tensor();
  }
  // Waits, since other ranks of this host may still read parameters, for example to compute an output.
  if (compares) {
    if (comm.size() > 1) compare.wait();
    agreement.require(*step::ranks_of(comm), sums);
  } else if (reducer_->core().division().shards()->shares_parameters()) {
    reducer_->core().division().shards()->meet();
  }
  compared_ = false;
  reducer_->core().division().allow_writes();
}

void ShardedCore::note_clipping_by_others() {
  static std::atomic_flag warned;
  if (clips_ || !reducer_->core().divides_gradients() || warned.test_and_set()) return;
  if (model_.communicator().rank() != 0) return;
  log::warn("train",
            "Sharded: gradients are divided (sharding): torch::nn::utils::clip_grad_norm_ finds none, and clips "
            "nothing -- if this program calls it, call clip_grad_norm(max_norm) of the optimizer instead");
}

void ShardedCore::after_step() {
  const at::NoGradGuard no_grad;
  gradients::Shards& shards = *reducer_->core().division().shards();
  for (std::size_t i = 0; i < pieces_.size(); ++i) {
    const nn::Reducer::Piece& piece = reducer_->pieces()[own_[i]];
    if (has_master(piece.values)) piece.values.copy_(pieces_[i].tensor);
    pieces_[i].tensor.mutable_grad().reset();
  }
  if (shards.divides_gradients()) reducer_->drop_gradients(own_);
  const std::vector<gradients::Region>& regions = reducer_->core().division().regions();
  const Device& device = regions.front().values.device;
  shards.gather(regions, device.type == DeviceType::CPU ? nullptr : reducer_->stream_of(device));
  reducer_->core().division().forbid_writes();
  if (shards.shares_parameters()) shards.meet();
  // Makes autograd see parameters as changed in place, so that an older graph cannot be used.
  for (const at::Tensor& parameter : trained_) parameter.unsafeGetTensorImpl()->bump_version();
  reducer_->note_step();
  transaction_->end(step::Decision::none());
}

namespace {

/// Returns the names in `module` of the parameters that this rank holds only in part.
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

/// Returns the factor by which to scale gradients, and their norm. `counted`: this rank's gradients, by the names of
/// their parameters. `agreement` compares options over all ranks of `over`.
std::pair<double, double> factor_of(const Named& counted, double max_norm, const torch::nn::Module& module,
                                    const ClipOptions& options, Communicator over, step::Agreement& agreement,
                                    std::vector<step::Option> told) {
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
  told.insert(told.begin(), {.name = fmt::format("max_norm = {} of clip_grad_norm", max_norm)});
  agreement.set(std::move(told));
  const step::Agreement::Sums digest = agreement.sums();
  std::array<double, 7> sums = {own.defined() ? own.item<double>() : 0};
  std::copy(digest.begin(), digest.end(), sums.begin() + 1);
  over.all_reduce(std::span(sums)).wait();
  agreement.require(*step::ranks_of(over), std::span(sums).subspan(1), "clip_grad_norm");
  const double norm = std::sqrt(sums[0]);
  const double factor = max_norm / (norm + 1e-6);
  return {factor >= 1 ? 1 : factor, norm};  // NaN remains NaN
}

}  // namespace

double ShardedCore::clip_grad_norm(double max_norm, const ClipOptions& options) {
  const at::NoGradGuard no_grad;
  require_reduced();
  reducer_->take_gradients();
  Named pieces;
  for (std::size_t i = 0; i < own_.size(); ++i) {
    const at::Tensor& gradient = reducer_->pieces()[own_[i]].gradient;
    if (gradient.defined()) pieces.emplace_back(pieces_[i].parameter, gradient);
  }
  Communicator over = options.over ? options.over : model_.communicator();
  // Ranks outside of the model's communicator may step other parameters with other options.
  const auto [factor, norm] = factor_of(pieces, max_norm, *model_.whole(), options, over, transaction_->agreement(),
                                        options.over ? std::vector<step::Option>() : told());
  compared_ = !options.over;
  clips_ = true;
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
  std::unordered_set<const void*> seen;  // a parameter may be registered twice
  for (const auto& item : module.named_parameters()) {
    if (item.value().grad().defined() && seen.insert(item.value().unsafeGetTensorImpl()).second)
      all.emplace_back(item.key(), item.value().grad());
  }
  const bool counts = !copies || copies.rank() == 0;
  step::Agreement alone(*step::sharded().agreed.get());
  const auto [factor, norm] = factor_of(counts ? all : Named(), max_norm, module, options, options.over, alone, {});
  if (factor == 1) return norm;
  for (const auto& [name, gradient] : all) gradient.mul_(factor);
  return norm;
}

void ShardedCore::zero_grad() {
  for (const at::Tensor& parameter : trained_) parameter.mutable_grad().reset();
  reducer_->drop_gradients(own_);
}

}  // namespace cohort::optim
