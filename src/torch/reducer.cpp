#include "torch/reducer.h"

#include "base/result.h"
#include "train/step/ranks.h"

#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>
#include <cohort/track.h>

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

// Autograd owns the hooks, which cannot be removed in 1.13. They live as long as the node, and do nothing without a
// reducer.
class BeforeAccumulate final : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& gradients) override {
    const std::shared_ptr<Reducer> reducer = reducer_.lock();
    return reducer && !reducer->detached_ ? reducer->before_accumulate(index_, gradients) : gradients;
  }
  bool alive() const noexcept {
    const std::shared_ptr<Reducer> reducer = reducer_.lock();
    return reducer && !reducer->detached_;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

class AfterAccumulate final : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& outputs, const VariableList& /*inputs*/) override {
    const std::shared_ptr<Reducer> reducer = reducer_.lock();
    if (reducer && !reducer->detached_) reducer->after_accumulate(index_);
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

namespace {

// True if the user has hooks that run after the accumulation, and so may read `.grad`.
bool has_hooks_after(torch::autograd::Node& accumulator) {
  const auto& hooks = accumulator.post_hooks();
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const AfterAccumulate*>(hook.get()) == nullptr; });
}

}  // namespace

namespace {

gradients::Parameter described(const NamedTensor& named) {
  const at::Tensor& tensor = named.tensor;
  // Optimizers are fastest if gradient and parameter have the same strides (libtorch's "gradient layout contract").
  const at::Tensor layout = tensor.is_non_overlapping_and_dense() ? tensor.detach() : at::empty(tensor.sizes());
  return {.name = named.name,
          .dtype = to_dtype(tensor.scalar_type()),
          .sizes = layout.sizes().vec(),
          .strides = layout.strides().vec(),
          .device = tensor.is_cuda() ? Device{DeviceType::CUDA, tensor.device().index()} : Device{}};
}

std::vector<gradients::Parameter> described(const std::vector<NamedTensor>& parameters) {
  std::vector<gradients::Parameter> all;
  for (const NamedTensor& parameter : parameters) all.push_back(described(parameter));
  return all;
}

bool lies_in(const at::Tensor& place, const at::Tensor& gradient) {
  return gradient.layout() == at::kStrided && gradient.data_ptr() == place.data_ptr() &&
         gradient.strides() == place.strides();
}

}  // namespace

Reducer::Reducer(std::shared_ptr<step::Ranks> ranks, const std::vector<NamedTensor>& parameters,
                 const DistributedDataParallelOptions& options, std::shared_ptr<gradients::Shards> shards,
                 std::shared_ptr<step::Transaction> transaction)
    : ranks_(ranks),
      core_(std::move(ranks), described(parameters), options, *this, gradients::reduce_by_average, std::move(shards),
            std::move(transaction)) {
  for (const NamedTensor& parameter : parameters) {
    parameters_.push_back(
        {.name = parameter.name, .tensor = parameter.tensor, .accumulator = {}, .place = {}, .bucket = {}, .home = {}});
  }
  core_.lay_out();
  if (core_.division().shards()) move_parameters();
}

void Reducer::attach() {
  for (Parameter& parameter : parameters_) {
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    for (const auto& hook : parameter.accumulator->pre_hooks()) {
      const auto* const other = dynamic_cast<const BeforeAccumulate*>(hook.get());
      if (other != nullptr && other->alive()) {
        raise(ErrorCode::InvalidArgument,
              "parameter '{}' is already wrapped by a DistributedDataParallel -- use that one, or destroy it first; "
              "where that one is a part of this model, put the module that it wraps in its place",
              parameter.name);
      }
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) hook_node(i);
}

void Reducer::hook_node(std::size_t index) {
  Parameter& parameter = parameters_[index];
  parameter.accumulator->add_pre_hook(std::make_unique<BeforeAccumulate>(weak_from_this(), index));
  parameter.accumulator->add_post_hook(std::make_unique<AfterAccumulate>(weak_from_this(), index));
  parameter.type = parameter.tensor.scalar_type();
  parameter.device = parameter.tensor.device();
  parameter.sizes = parameter.tensor.sizes().vec();
}

void Reducer::detach() noexcept {
  detached_ = true;
  // Lets each accumulator end with its hooks, unless somebody else holds it. Otherwise a parameter that stays would
  // gather hooks, and its accumulator would keep its old size.
  for (Parameter& parameter : parameters_) parameter.accumulator.reset();
}

bool Reducer::look_at_parameters() {
  bool all_as_before = true;
  for (const Parameter& parameter : parameters_) {
    all_as_before = all_as_before && parameter.tensor.scalar_type() == parameter.type &&
                    parameter.tensor.device() == parameter.device && parameter.tensor.sizes() == parameter.sizes;
  }
  if (!all_as_before) return false;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (torch::autograd::impl::try_get_grad_accumulator(parameter.tensor) == parameter.accumulator) continue;
    if (!parameter.tensor.requires_grad()) continue;  // no gradient until it is unfrozen
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    hook_node(i);
  }
  return true;
}

// ---------------------------------------------------------------------------------------------------- what is divided

namespace {

at::Tensor tensor_over(const Buffer& buffer, const Memory& memory, const at::TensorOptions& type) {
  return at::for_blob(buffer.data, {buffer.count})
      .deleter([memory](void*) {})
      .options(type.requires_grad(false))
      .target_device(type.device())
      .make_tensor();
}

bool is_home(const at::Tensor& tensor, const at::Tensor& home) {
  return tensor.data_ptr() == home.data_ptr() && tensor.sizes() == home.sizes() &&
         tensor.scalar_type() == home.scalar_type();
}

}  // namespace

// Requires that all ranks' parameters are equal already.
void Reducer::move_parameters() {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& parameter = parameters_[i];
    if (!parameter.tensor.is_contiguous()) {
      raise(ErrorCode::InvalidArgument,
            "DistributedDataParallel: parameter '{}' is not contiguous, which Sharding needs -- "
            "parameter.set_data(parameter.contiguous()) before it is wrapped",
            parameter.name);
    }
    parameter.home = tensor_over(core_.division().home_of(i), core_.division().homes(), parameter.tensor.options())
                         .view(parameter.tensor.sizes());
  }
  bring_home();
  for (const gradients::Piece& range : core_.division().pieces()) {
    const at::Tensor& tensor = parameters_[range.parameter].tensor;
    Buffer own = core_.division().home_of(range.parameter);
    own.data = static_cast<std::byte*>(own.data) + static_cast<std::size_t>(range.begin) * size_of(own.dtype);
    own.count = range.count;
    Piece piece{.range = range,
                .values = tensor_over(own, core_.division().homes(), tensor.options()),
                .gradient = {},
                .average = {}};
    if (core_.divides_gradients()) {
      piece.average = tensor_over(core_.division().average_of(range), core_.division().averages(), tensor.options());
    }
    pieces_.push_back(std::move(piece));
  }
  note_step();
  core_.protect_parameters();
}

void Reducer::take_gradients() {
  if (core_.divides_gradients()) return;
  for (Piece& piece : pieces_) {
    const at::Tensor& gradient = parameters_[piece.range.parameter].tensor.grad();
    piece.gradient = gradient.defined()
                         ? gradient.detach().contiguous().view({-1}).narrow(0, piece.range.begin, piece.range.count)
                         : at::Tensor();
  }
}

void Reducer::put_aside() {
  const at::NoGradGuard no_grad;
  for (Piece& piece : pieces_) {
    if (piece.gradient.defined() && piece.gradient.is_same(piece.average)) piece.gradient = piece.gradient.clone();
  }
}

void Reducer::drop_gradients(const std::vector<std::size_t>& pieces) {
  for (const std::size_t piece : pieces) pieces_[piece].gradient.reset();
}

void Reducer::bring_home() {
  const at::NoGradGuard no_grad;
  gradients::Shards& shards = *core_.division().shards();
  for (const Parameter& parameter : parameters_) {
    const at::Tensor& tensor = parameter.tensor;
    if (tensor.sizes() == parameter.home.sizes() && tensor.scalar_type() == parameter.home.scalar_type() &&
        tensor.device() == parameter.home.device()) {
      continue;
    }
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: parameter '{}' has another shape, type or device than when it was wrapped -- wrap "
          "the module again, and make its optimizer anew",
          parameter.name);
  }
  if (shards.shares_parameters()) shards.meet();  // waits until no rank reads that memory any more
  for (Parameter& parameter : parameters_) {
    if (!is_home(parameter.tensor, parameter.home) && shards.writes_shared()) parameter.home.copy_(parameter.tensor);
  }
  if (shards.shares_parameters()) shards.meet();
  for (Parameter& parameter : parameters_) {
    if (is_home(parameter.tensor, parameter.home)) continue;
    parameter.tensor.set_data(parameter.home);
    ++parameter.writes;
  }
}

void Reducer::note_step() {
  for (Parameter& parameter : parameters_) parameter.version = parameter.tensor._version();
}

std::vector<Reducer::Shown> Reducer::shown() const {
  std::vector<Shown> all;
  const auto show = [&all](const at::Tensor& one) {
    all.push_back({static_cast<std::int64_t>(one._version()), one.data_ptr(), one.requires_grad()});
  };
  for (const Parameter& one : parameters_) show(one.tensor);
  for (const NamedTensor& one : frozen_) show(one.tensor);
  return all;
}

const std::string* Reducer::changed_parameter() const {
  const std::vector<Shown> now = shown();
  for (std::size_t i = 0; i < now.size() && i < at_begin_.size(); ++i) {
    if (now[i] != at_begin_[i])
      return i < parameters_.size() ? &parameters_[i].name : &frozen_[i - parameters_.size()].name;
  }
  return nullptr;
}

void Reducer::note_writes() {
  for (Parameter& parameter : parameters_) {
    const std::int64_t now = parameter.tensor._version();
    if (std::exchange(parameter.version, now) != now) ++parameter.writes;
  }
}

void Reducer::check_parameters(const char* where) {
  if (!core_.division().shards()) return;
  const bool shared = core_.division().shards()->shares_parameters();
  for (const Parameter& parameter : parameters_) {
    if (!is_home(parameter.tensor, parameter.home)) {
      raise(ErrorCode::InvalidArgument,
            "{}: rank {}: parameter '{}' was given other memory (set_data, torch::load, to), which the optimizer does "
            "not step -- copy values into it (copy_ in no_grad mode), or call parameters_written() on all ranks "
            "afterwards",
            where, ranks_->rank(), parameter.name);
    }
    if (!shared || parameter.tensor._version() == parameter.version) continue;
    raise(ErrorCode::InvalidArgument,
          "{}: rank {} has written to parameter '{}' in place, which all ranks of {} share (Sharding::Parameters), so "
          "that it was changed once for each rank that did -- let the optimizer alone change parameters, or where all "
          "have written the same values (weights were loaded), call parameters_written() on all ranks afterwards",
          where, ranks_->rank(), parameter.name, ranks_->host());
  }
  if (core_.divides_gradients() && !has_optimizer_ && core_.progress() > 0) {
    raise(ErrorCode::InvalidArgument,
          "{}: gradients are divided (Sharding), and no optim::Sharded has been made over this model: nothing steps it",
          where);
  }
}

// ---------------------------------------------------------------------------------------------------- a hook

namespace {

class HookPending final : public step::Pending {
 public:
  HookPending(std::function<at::Tensor()> result, at::Tensor buffer, std::size_t bucket)
      : result_(std::move(result)), buffer_(std::move(buffer)), bucket_(bucket) {}
  void wait() override {
    const at::NoGradGuard no_grad;
    const at::Tensor result = result_();
    if (!result.defined() || result.numel() != buffer_.numel() || !at::isFloatingType(result.scalar_type())) {
      raise(ErrorCode::InvalidArgument,
            "a hook on gradients has returned {} for bucket {} of {} elements of {} -- as many floating-point elements "
            "are wanted",
            result.defined() ? fmt::format("{} elements of {}", result.numel(), at::toString(result.scalar_type()))
                             : std::string("no tensor"),
            bucket_, buffer_.numel(), at::toString(buffer_.scalar_type()));
    }
    if (!result.is_same(buffer_)) buffer_.copy_(result.view({-1}));
  }
  void synchronize(const Device& /*stream*/) override { wait(); }
  std::optional<bool> finite() const override { return std::nullopt; }

 private:
  std::function<at::Tensor()> result_;
  at::Tensor buffer_;
  std::size_t bucket_;
};

}  // namespace

void Reducer::use_hook(CommHook hook, Communicator& comm, const std::weak_ptr<const void>& model) {
  if (!hook) raise(ErrorCode::InvalidArgument, "register_comm_hook: the hook is empty");
  core_.use_hook([this, hook = std::move(hook), &comm, model](const gradients::HookedBucket& hooked) {
    const gradients::Bucket& bucket = hooked.bucket;
    std::vector<GradBucket::Part> parts;
    for (std::size_t position = 0; position < bucket.members().size(); ++position) {
      const Parameter& parameter = parameters_[static_cast<std::size_t>(bucket.members()[position])];
      parts.push_back({.parameter = parameter.tensor,
                       .name = parameter.name,
                       .offset = static_cast<std::int64_t>(bucket.offset(position) / size_of(bucket.dtype())),
                       .strides = parameter.place.strides().vec()});
    }
    const at::NoGradGuard no_grad;
    const Buffer all{bucket.memory().data(), static_cast<std::int64_t>(bucket.bytes() / size_of(bucket.dtype())),
                     bucket.dtype()};
    const at::Tensor buffer = tensor_over(all, bucket.memory(), parts.front().parameter.options());
    if (hooked.share == 0) {
      buffer.zero_();
    } else if (hooked.share != 1) {
      buffer.mul_(hooked.share);
    }
    GradBucket given(hooked.number, hooked.last, hooked.last_step_refused, buffer, std::move(parts), comm, model);
    std::function<at::Tensor()> result = hook(given);
    if (!result) raise(ErrorCode::InvalidArgument, "a hook on gradients has returned an empty function");
    return std::make_unique<HookPending>(std::move(result), buffer, hooked.number);
  });
}

// ---------------------------------------------------------------------------------------------------- places

// The storage holds the memory, so a gradient may outlive bucket and communicator. Uses `set_` on an empty tensor
// instead of a view of the whole, since libtorch 1.13 zeroes gradients with detach_(), which views refuse.
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
      if (bucket.place(position).data == nullptr) continue;
      parameter.bucket = whole;
      parameter.offset = static_cast<std::int64_t>(bucket.offset(position) / size_of(bucket.dtype()));
      make_place(parameter);
      put_in_place(index);
    }
  }
}

void Reducer::make_place(Parameter& parameter) {
  const gradients::Parameter as = described({parameter.name, parameter.tensor});
  parameter.place = at::empty({0}, parameter.bucket.options());
  parameter.place.set_(parameter.bucket.storage(), parameter.offset, as.sizes, as.strides);
  parameter.address = parameter.place.data_ptr();
}

// Restores the place if its data was replaced (set_data, a cast of the module), since it is also the `.grad()`.
const at::Tensor& Reducer::place(std::size_t index) {
  Parameter& parameter = parameters_[index];
  if (parameter.place.data_ptr() != parameter.address) make_place(parameter);
  return parameter.place;
}

bool Reducer::put_in_place(std::size_t index) {
  Parameter& parameter = parameters_[index];
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (!gradient.defined()) return false;
  if (!parameter.place.defined()) {
    read_from_gradient(index, gradient);
    return true;
  }
  const at::Tensor& own = place(index);
  if (lies_in(own, gradient)) return true;
  const at::NoGradGuard no_grad;
  assign(own, gradient.detach());
  gradient = own;
  ++core_.stats().gradients_moved;
  return true;
}

void Reducer::give(std::size_t index) {
  if (!core_.divides_gradients()) {
    parameters_[index].tensor.mutable_grad() = place(index);
    return;
  }
  const at::NoGradGuard no_grad;
  parameters_[index].tensor.mutable_grad().reset();
  auto piece = std::ranges::lower_bound(pieces_, index, {}, [](const Piece& p) { return p.range.parameter; });
  for (; piece != pieces_.end() && piece->range.parameter == index; ++piece) {
    // Adds into a new tensor, since without a zero_grad the next reduction would overwrite the sum.
    piece->gradient = piece->gradient.defined() ? piece->gradient + piece->average : piece->average;
  }
}

void Reducer::drop_all() {
  for (Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
  for (NamedTensor& parameter : frozen_) parameter.tensor.mutable_grad().reset();
  for (Piece& piece : pieces_) piece.gradient.reset();
}

void Reducer::clear(std::size_t index) {
  const at::NoGradGuard no_grad;
  if (parameters_[index].place.defined()) {
    place(index).zero_();
  } else {
    read_from_gradient(index, at::zeros_like(parameters_[index].tensor));
  }
}
void Reducer::keep(std::size_t index) {
  if (!core_.divides_gradients()) kept_[index] = place(index).detach().clone();
}

// Uses the gradient's own memory, or a copy in the layout of its place.
void Reducer::read_from_gradient(std::size_t index, const at::Tensor& gradient) {
  const at::Tensor& values = parameters_[index].tensor;
  const at::NoGradGuard no_grad;
  at::Tensor made = gradient.detach();
  if (made.layout() != at::kStrided || made.scalar_type() != values.scalar_type() || !made.is_contiguous()) {
    made = at::empty(values.sizes(), values.options().requires_grad(false));
    assign(made, gradient.detach());
  }
  core_.read_from(index, made.data_ptr(), std::make_shared<const at::Tensor>(made));
}
void Reducer::put_back(std::size_t index) {
  const at::NoGradGuard no_grad;
  place(index).copy_(kept_.at(index));
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

// Uses libtorch's own allocator, which has most of the GPU's memory.
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
    const at::Tensor one = at::isfinite(place(static_cast<std::size_t>(index))).all();
    all = all.defined() ? all.logical_and(one) : one;
  }
  return all.item<bool>();
}

std::vector<std::byte> Reducer::copy_to_host(std::size_t index) {
  const at::Tensor& own = place(index);
  const at::Tensor copy = own.detach().as_strided({own.numel()}, {1}).cpu();
  const auto* const bytes = static_cast<const std::byte*>(copy.data_ptr());
  return {bytes, bytes + copy.nbytes()};
}

// ---------------------------------------------------------------------------------------------------- forward

// Leaves get no hook, since they would keep it for ever.
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

// False if the backward under way is an autograd::grad() for other tensors, which needs none of our gradients, and is
// no step.
bool Reducer::accumulates() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;  // a backward for all leaves, even if ours are not among them
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
    const auto entry = chosen->find(parameter.accumulator.get());
    return entry != chosen->end() && entry->second.needed_;
  });
}

void Reducer::call_at_end(std::shared_ptr<void> pass) {
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), pass = std::move(pass)] {
    const std::shared_ptr<Reducer> reducer = self.lock();
    if (!reducer) return;
    try {
      reducer->core_.finish();
    } catch (...) {
      if (reducer->after_backward_) reducer->after_backward_(false);
      throw;
    }
    if (reducer->after_backward_) reducer->after_backward_(true);
  });
}

// Writes the gradient before AccumulateGrad sees it, or keeps a large one for the reduction to read. Writing afterwards
// would cost one more write whenever AccumulateGrad has to clone a gradient that it may not steal. If a gradient
// already exists, AccumulateGrad adds to it in place.
VariableList Reducer::before_accumulate(std::size_t index, const VariableList& gradients) {
  Parameter& parameter = parameters_[index];
  // (If the parameter was frozen since the forward, AccumulateGrad adds nothing.)
  if (gradients.empty() || !gradients[0].defined() || !parameter.tensor.requires_grad()) return gradients;
  if (!core_.receive(index)) return {at::Tensor()};
  const bool divided = !parameter.place.defined();
  // Without a reduction, autograd accumulates the gradient as usual. If a gradient exists, autograd adds to it, and it
  // is read afterwards.
  if (divided && (!core_.accumulation().sync() || parameter.tensor.grad().defined())) return gradients;
  if (divided && has_hooks_after(*parameter.accumulator)) return gradients;
  if (!divided && put_in_place(index)) return gradients;
  if (at::GradMode::is_enabled())
    return gradients;  // create_graph: AccumulateGrad makes it, and it is copied afterwards
  VariableList incoming = gradients;
  if constexpr (TORCH_VERSION_MAJOR < 2) {
    // 1.13 runs the user's hooks on the parameter inside AccumulateGrad, which we are about to skip.
    for (const auto& hook : torch::autograd::impl::hooks(parameter.tensor)) incoming = (*hook)(incoming);
  }
  const at::NoGradGuard no_grad;
  const at::Tensor& made = incoming[0];
  if (divided) {
    read_from_gradient(index, made);
    ++core_.stats().gradients_written;
    return {at::Tensor()};
  }
  const at::Tensor& own = place(index);
  const bool alike = made.layout() == at::kStrided && made.device() == own.device() &&
                     made.scalar_type() == own.scalar_type() && made.sizes() == own.sizes() &&
                     made.strides() == own.strides();
  if (alike && core_.can_read(index) && !has_hooks_after(*parameter.accumulator)) {
    core_.read_from(index, made.data_ptr(), std::make_shared<const at::Tensor>(made));
  } else {
    assign(own, made);
  }
  parameter.tensor.mutable_grad() = own;
  ++core_.stats().gradients_written;
  return {at::Tensor()};
}

void Reducer::after_accumulate(std::size_t index) {
  if (!core_.received(index)) return;
  const bool read = !parameters_[index].place.defined() && core_.reads(index);
  if (!read && (parameters_[index].place.defined() || core_.accumulation().sync())) {
    put_in_place(index);  // has an effect only with create_graph, or if the gradient has no place
  }
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

/// The values as one row in host memory; a copy only if they lie otherwise.
at::Tensor flat_on_host(const NamedTensor& named, const char* who) {
  const at::NoGradGuard no_grad;
  const at::Tensor& tensor = named.tensor;
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_meta())
    raise(ErrorCode::InvalidArgument, "{}: {} is undefined or not dense", who, named.name);
  return tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().view({-1});
}

}  // namespace

void require_same_tensors(step::Ranks& ranks, const std::vector<NamedTensor>& tensors, std::int64_t step) {
  std::vector<step::NamedValues> values;
  std::vector<at::Tensor> kept;
  for (const NamedTensor& named : tensors) {
    const at::Tensor flat = kept.emplace_back(flat_on_host(named, "require_same_parameters"));
    values.push_back({.name = named.name,
                      .sizes = named.tensor.sizes().vec(),
                      .element_size = static_cast<std::size_t>(flat.element_size()),
                      .bytes = {static_cast<const std::uint8_t*>(flat.data_ptr()), flat.nbytes()},
                      .text = [flat](std::int64_t index) { return text_of(flat[index]); }});
  }
  step::require_same_parameters(ranks, values, step);
}

void write_weights(track::RunRecord& record, std::int64_t step, const std::vector<NamedTensor>& tensors) {
  std::vector<track::Weight> weights;
  std::vector<at::Tensor> kept;
  for (const NamedTensor& named : tensors) {
    const at::Tensor flat = kept.emplace_back(flat_on_host(named, "write_weights"));
    weights.push_back({named.name, {flat.data_ptr(), static_cast<std::int64_t>(flat.nbytes()), DType::UInt8}});
  }
  record.write_weights(step, weights);
}

void require_same_parameters(Communicator& comm, const std::vector<NamedTensor>& tensors,
                             const SameParametersOptions& options) {
  require_same_tensors(*step::ranks_of(comm), tensors, options.step);
}

}  // namespace cohort
