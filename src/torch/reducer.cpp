#include "torch/reducer.h"

#include "base/result.h"
#include "train/gradients/ranks.h"

#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>

// clang-format off
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
// clang-format on

#include <algorithm>
#include <string>
#include <utility>

namespace cohort::nn {

namespace {

using VariableList = torch::autograd::variable_list;

// Sparse tensors cannot be copied into dense ones, only added.
void assign(const at::Tensor& place, const at::Tensor& value) {
  if (value.layout() == at::kStrided) {
    place.copy_(value);
  } else {
    place.zero_();
    place.add_(value);
  }
}

}  // namespace

// Autograd owns the hooks and has no way to give them back in 1.13: they die with the node, and do nothing without a
// reducer.
class BeforeAccumulate final : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& gradients) override {
    const std::shared_ptr<Reducer> reducer = reducer_.lock();
    return reducer ? reducer->before_accumulate(index_, gradients) : gradients;
  }
  bool alive() const noexcept { return !reducer_.expired(); }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

class AfterAccumulate final : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& outputs, const VariableList& /*inputs*/) override {
    if (const std::shared_ptr<Reducer> reducer = reducer_.lock()) reducer->after_accumulate(index_);
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

namespace {

// Of the user's, called after the accumulation: they may read `.grad`.
bool has_hooks_after(torch::autograd::Node& accumulator) {
  const auto& hooks = accumulator.post_hooks();
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const AfterAccumulate*>(hook.get()) == nullptr; });
}

}  // namespace

namespace {

gradients::Parameter described(const NamedParameter& named) {
  const at::Tensor& tensor = named.tensor;
  // Optimizers are fastest where gradient and parameter have the same strides (libtorch's "gradient layout contract").
  const at::Tensor layout = tensor.is_non_overlapping_and_dense() ? tensor.detach() : at::empty(tensor.sizes());
  return {.name = named.name,
          .dtype = to_dtype(tensor.scalar_type()),
          .sizes = layout.sizes().vec(),
          .strides = layout.strides().vec(),
          .device = tensor.is_cuda() ? Device{DeviceType::CUDA, tensor.device().index()} : Device{}};
}

std::vector<gradients::Parameter> described(const std::vector<NamedParameter>& parameters) {
  std::vector<gradients::Parameter> all;
  for (const NamedParameter& parameter : parameters) all.push_back(described(parameter));
  return all;
}

bool lies_in(const at::Tensor& place, const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.data_ptr() == place.data_ptr() &&
         gradient.strides() == place.strides();
}

}  // namespace

Reducer::Reducer(std::shared_ptr<gradients::Ranks> ranks, const std::vector<NamedParameter>& parameters,
                 const DistributedDataParallelOptions& options)
    : ranks_(ranks), core_(std::move(ranks), described(parameters), options, *this) {
  for (const NamedParameter& parameter : parameters) {
    parameters_.push_back({.name = parameter.name, .tensor = parameter.tensor, .accumulator = {}, .place = {}});
  }
  core_.lay_out();
}

void Reducer::attach() {
  for (Parameter& parameter : parameters_) {
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    for (const auto& hook : parameter.accumulator->pre_hooks()) {
      const auto* const other = dynamic_cast<const BeforeAccumulate*>(hook.get());
      if (other != nullptr && other->alive()) {
        raise(ErrorCode::InvalidArgument,
              "parameter '{}' is already wrapped by a DistributedDataParallel -- use that one, or destroy it first",
              parameter.name);
      }
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].accumulator->add_pre_hook(std::make_unique<BeforeAccumulate>(weak_from_this(), i));
    parameters_[i].accumulator->add_post_hook(std::make_unique<AfterAccumulate>(weak_from_this(), i));
  }
}

// ---------------------------------------------------------------------------------------------------- places

// The storage holds the memory, so a gradient may outlive bucket and communicator. `set_` on an empty tensor instead of
// a view of the whole: libtorch 1.13 zeroes gradients with detach_(), which views refuse.
void Reducer::take_places() {
  for (const gradients::Bucket& bucket : core_.buckets()) {
    const at::TensorOptions type = parameters_[static_cast<std::size_t>(bucket.members().front())].tensor.options();
    const auto elements = static_cast<std::int64_t>(bucket.bytes() / size_of(bucket.dtype()));
    const at::Tensor whole = at::for_blob(bucket.memory().data(), {elements})
                                 .deleter([memory = bucket.memory()](void*) {})
                                 .options(type.requires_grad(false))
                                 .target_device(type.device())
                                 .make_tensor();
    for (std::size_t position = 0; position < bucket.members().size(); ++position) {
      const auto index = static_cast<std::size_t>(bucket.members()[position]);
      Parameter& parameter = parameters_[index];
      const gradients::Parameter as = described({parameter.name, parameter.tensor});
      parameter.place = at::empty({0}, type.requires_grad(false));
      parameter.place.set_(whole.storage(),
                           static_cast<std::int64_t>(bucket.offset(position) / size_of(bucket.dtype())), as.sizes,
                           as.strides);
      put_in_place(index);
    }
  }
}

bool Reducer::put_in_place(std::size_t index) {
  Parameter& parameter = parameters_[index];
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!gradient.defined()) return false;
  if (lies_in(parameter.place, gradient)) return true;
  const at::NoGradGuard no_grad;
  assign(parameter.place, gradient.detach());
  gradient = parameter.place;
  ++core_.stats().gradients_moved;
  return true;
}

void Reducer::give(std::size_t index) { parameters_[index].tensor.mutable_grad() = parameters_[index].place; }

void Reducer::drop_all() {
  for (Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

void Reducer::clear(std::size_t index) {
  const at::NoGradGuard no_grad;
  parameters_[index].place.zero_();
}
void Reducer::keep(std::size_t index) { kept_[index] = parameters_[index].place.detach().clone(); }
void Reducer::put_back(std::size_t index) {
  const at::NoGradGuard no_grad;
  parameters_[index].place.copy_(kept_.at(index));
}

std::vector<std::span<const std::byte>> Reducer::values_of(std::span<const int> parameters) {
  std::vector<std::span<const std::byte>> values;
  for (const int index : parameters) {
    const at::Tensor& tensor = parameters_[static_cast<std::size_t>(index)].tensor;
    if (tensor.is_cpu() && tensor.is_non_overlapping_and_dense()) {
      values.emplace_back(static_cast<const std::byte*>(tensor.data_ptr()), tensor.nbytes());
    } else {
      values.emplace_back();
    }
  }
  return values;
}

void Reducer::compare(std::span<const int> parameters, std::int64_t step) {
  std::vector<NamedTensor> named;
  for (const int index : parameters) {
    const Parameter& parameter = parameters_[static_cast<std::size_t>(index)];
    named.push_back({"parameter '" + parameter.name + "'", parameter.tensor});
  }
  require_same_tensors(*ranks_, named, step);
}

// ---------------------------------------------------------------------------------------------------- of a GPU

// From libtorch's own allocator, which has most of the GPU's memory.
Memory Reducer::allocate(const Device& gpu, std::size_t bytes) {
  const auto type = at::TensorOptions(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu.index))).dtype(at::kByte);
  const auto tensor = std::make_shared<const at::Tensor>(at::zeros({static_cast<std::int64_t>(bytes)}, type));
  return gradients::memory_of(tensor->data_ptr(), bytes, tensor);
}

void* Reducer::stream_of(const Device& gpu) {
  return current_stream(at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(gpu.index)));
}

bool Reducer::are_finite(std::span<const int> parameters) {
  const at::NoGradGuard no_grad;
  at::Tensor all;
  for (const int index : parameters) {
    const at::Tensor one = at::isfinite(parameters_[static_cast<std::size_t>(index)].place).all();
    all = all.defined() ? all.logical_and(one) : one;
  }
  return all.item<bool>();
}

std::vector<std::byte> Reducer::copy_to_host(std::size_t index) {
  const at::Tensor& place = parameters_[index].place;
  const at::Tensor copy = place.detach().as_strided({place.numel()}, {1}).cpu();
  const auto* const bytes = static_cast<const std::byte*>(copy.data_ptr());
  return {bytes, bytes + copy.nbytes()};
}

// ---------------------------------------------------------------------------------------------------- forward

// A leaf would keep its hook for ever, so leaves get none.
void Reducer::watch(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([self = weak_from_this()](const at::Tensor& /*gradient*/) {
      const std::shared_ptr<Reducer> reducer = self.lock();
      if (reducer && reducer->accumulates()) reducer->core_.begin_backward();
    });
  }
}

// ---------------------------------------------------------------------------------------------------- backward

// False if the backward under way is an autograd::grad() for other tensors: it asks for nothing of ours, and is no
// step.
bool Reducer::accumulates() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;  // for all leaves, even where ours are not among them
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
    const auto entry = chosen->find(parameter.accumulator.get());
    return entry != chosen->end() && entry->second.needed_;
  });
}

void Reducer::call_at_end(std::shared_ptr<void> pass) {
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), pass = std::move(pass)] {
    if (const std::shared_ptr<Reducer> reducer = self.lock()) reducer->core_.finish();
  });
}

// Writes the gradient before AccumulateGrad sees it, or keeps a large one for the reduction to read. Afterwards would
// be one write more wherever AccumulateGrad has to clone what it may not steal. Where a gradient exists already,
// AccumulateGrad adds to it in place.
VariableList Reducer::before_accumulate(std::size_t index, const VariableList& gradients) {
  if (gradients.empty() || !gradients[0].defined()) return gradients;
  if (!core_.receive(index)) return {at::Tensor()};
  Parameter& parameter = parameters_[index];
  if (put_in_place(index)) return gradients;
  if (at::GradMode::is_enabled())
    return gradients;  // create_graph: AccumulateGrad makes it, and it is copied afterwards
  VariableList incoming = gradients;
  if constexpr (TORCH_VERSION_MAJOR < 2) {
    // 1.13 runs the user's hooks on the parameter inside AccumulateGrad, which we are about to skip.
    for (const auto& hook : torch::autograd::impl::hooks(parameter.tensor)) incoming = (*hook)(incoming);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& made = incoming[0];
  const at::Tensor& place = parameter.place;
  const bool alike = made.layout() == at::kStrided && made.device() == place.device() &&
                     made.scalar_type() == place.scalar_type() && made.sizes() == place.sizes() &&
                     made.strides() == place.strides();
  if (alike && core_.can_read(index) && !has_hooks_after(*parameter.accumulator)) {
    core_.read_from(index, made.data_ptr(), std::make_shared<const at::Tensor>(made));
  } else {
    assign(place, made);
  }
  parameter.tensor.mutable_grad() = place;
  ++core_.stats().gradients_written;
  return {at::Tensor()};
}

void Reducer::after_accumulate(std::size_t index) {
  if (!core_.received(index)) return;
  put_in_place(index);  // nothing to do except under create_graph
  core_.arrive(index);
}

}  // namespace cohort::nn

namespace cohort {
namespace {

std::string text_of(const at::Tensor& element) {
  if (at::isComplexType(element.scalar_type())) return {};
  return at::isFloatingType(element.scalar_type()) ? fmt::format("{}", element.item<double>())
                                                   : fmt::format("{}", element.item<std::int64_t>());
}

}  // namespace

void require_same_tensors(gradients::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step) {
  const at::NoGradGuard no_grad;
  std::vector<gradients::NamedValues> values;
  std::vector<at::Tensor> kept;  // copies of those that are not contiguous
  for (const NamedTensor& named : tensors) {
    if (!named.tensor.defined() || named.tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument, "require_same_parameters: {} is undefined or not dense", named.name);
    }
    const at::Tensor flat = kept.emplace_back(named.tensor.detach().cpu().contiguous().view({-1}));
    values.push_back({.name = named.name,
                      .sizes = named.tensor.sizes().vec(),
                      .element_size = static_cast<std::size_t>(flat.element_size()),
                      .bytes = {static_cast<const std::uint8_t*>(flat.data_ptr()), flat.nbytes()},
                      .text = [flat](std::int64_t index) { return text_of(flat[index]); }});
  }
  gradients::require_same_parameters(ranks, values, step);
}

void require_same_parameters(Communicator& comm, const std::vector<NamedTensor>& tensors,
                             const SameParametersOptions& options) {
  require_same_tensors(*gradients::ranks_of(comm), tensors, options.step);
}

}  // namespace cohort
