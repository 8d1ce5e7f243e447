#include <cohort/torch/comm_hooks.h>

#include "base/result.h"
#include "train/gradients/power_sgd.h"

#include <cohort/torch/tensor.h>

#include <algorithm>
#include <memory>
#include <string_view>
#include <utility>

namespace cohort::nn {

GradBucket::GradBucket(std::size_t index, bool is_last, bool last_step_refused, at::Tensor buffer,
                       std::vector<Part> parts, Communicator& communicator, std::weak_ptr<const void> model)
    : index_(index),
      is_last_(is_last),
      last_step_refused_(last_step_refused),
      buffer_(std::move(buffer)),
      parts_(std::move(parts)),
      communicator_(&communicator),
      model_(std::move(model)) {
  for (const Part& part : parts_) {
    parameters_.push_back(part.parameter);
    names_.push_back(part.name);
  }
}

void GradBucket::set_buffer(at::Tensor buffer) {
  if (buffer.numel() != buffer_.numel()) {
    raise(ErrorCode::InvalidArgument, "GradBucket::set_buffer: {} elements in place of {}", buffer.numel(),
          buffer_.numel());
  }
  buffer_ = buffer.view({-1});
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> all;
  for (const Part& part : parts_) {
    all.push_back(buffer_.as_strided(part.parameter.sizes(), part.strides, buffer_.storage_offset() + part.offset));
  }
  return all;
}

namespace {

// Averages the bucket in elements of `type`; 16-bit floats are folded in float32.
std::function<at::Tensor()> average_as(at::ScalarType type, GradBucket& bucket) {
  const at::Tensor buffer = bucket.buffer();
  const at::Tensor sent = buffer.to(type);
  const auto work = std::make_shared<Work>(all_reduce(bucket.communicator(), sent, {.op = ReduceOp::Average}));
  return [=] {
    work->wait();
    return sent.is_same(buffer) ? buffer : buffer.copy_(sent);
  };
}

}  // namespace

CommHook allreduce_hook() {
  return [](GradBucket& bucket) { return average_as(bucket.buffer().scalar_type(), bucket); };
}
CommHook fp16_compress_hook() {
  return [](GradBucket& bucket) { return average_as(at::kHalf, bucket); };
}
CommHook bf16_compress_hook() {
  return [](GradBucket& bucket) { return average_as(at::kBFloat16, bucket); };
}

// ---------------------------------------------------------------------------------------------------- PowerSGD

namespace {

constexpr std::string_view kPrefix = "powerSGD.";

at::Tensor floats_as(const std::vector<float>& values, std::int64_t rows, std::int64_t columns) {
  const at::Tensor tensor = at::empty({rows, columns}, at::kFloat);
  std::copy(values.begin(), values.end(), tensor.data_ptr<float>());
  return tensor;
}

[[noreturn]] void refuse_state(const std::string& name, const char* why) {
  raise(ErrorCode::InvalidArgument, "PowerSGDState::load_state_dict: '{}' {}", name, why);
}

std::vector<float> floats_in(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined() || !at::isFloatingType(tensor.scalar_type())) refuse_state(name, "does not hold real numbers");
  const at::Tensor flat = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

std::vector<std::int64_t> integers_in(const std::string& name, const at::Tensor& tensor, std::int64_t count) {
  if (!tensor.defined() || !at::isIntegralType(tensor.scalar_type(), false) || tensor.numel() != count)
    refuse_state(name, count == 1 ? "is not one integer" : "is not two integers");
  const at::Tensor flat = tensor.detach().to(at::kCPU, at::kLong).contiguous();
  return {flat.data_ptr<std::int64_t>(), flat.data_ptr<std::int64_t>() + count};
}

}  // namespace

PowerSGDState::PowerSGDState(const PowerSGDOptions& options) : core_(std::make_unique<gradients::PowerSGD>(options)) {}
PowerSGDState::~PowerSGDState() = default;

std::pair<std::int64_t, std::int64_t> PowerSGDState::compression_stats() const { return core_->compression_stats(); }

std::map<std::string, at::Tensor> PowerSGDState::state_dict() const {
  std::map<std::string, at::Tensor> state;
  state[fmt::format("{}iter", kPrefix)] = at::full({1}, core_->iteration(), at::kLong);
  for (const auto& [key, kept] : core_->kept()) {
    if (kept.error.empty() && kept.q.empty()) continue;
    const auto name = [&, &parameter = key](const char* what) {
      return fmt::format("{}{}.{}", kPrefix, parameter, what);
    };
    const at::Tensor shape = state[name("shape")] = at::empty({2}, at::kLong);
    shape[0] = kept.rows;
    shape[1] = kept.columns;
    if (!kept.error.empty()) state[name("error")] = floats_as(kept.error, kept.rows, kept.columns);
    if (kept.q.empty()) continue;
    state[name("q")] = floats_as(kept.q, static_cast<std::int64_t>(kept.q.size()) / kept.columns, kept.columns);
  }
  return state;
}

void PowerSGDState::load_state_dict(const std::map<std::string, at::Tensor>& state) {
  std::int64_t iteration = 0;
  std::map<std::string, gradients::PowerSGD::Kept> all;
  for (const auto& [name, tensor] : state) {
    if (!name.starts_with(kPrefix)) continue;
    const std::string rest = name.substr(kPrefix.size());
    const std::size_t dot = rest.rfind('.');
    const std::string field = dot == std::string::npos ? std::string() : rest.substr(dot + 1);
    if (rest == "iter") {
      iteration = integers_in(name, tensor, 1)[0];
    } else if (field == "shape") {
      const std::vector<std::int64_t> shape = integers_in(name, tensor, 2);
      gradients::PowerSGD::Kept& kept = all[rest.substr(0, dot)];
      kept.rows = shape[0];
      kept.columns = shape[1];
    } else if (field == "error") {
      all[rest.substr(0, dot)].error = floats_in(name, tensor);
    } else if (field == "q") {
      all[rest.substr(0, dot)].q = floats_in(name, tensor);
    } else {
      refuse_state(name, "is not one of its names");
    }
  }
  core_->restore(iteration, std::move(all));
}

void PowerSGDState::drop_residuals() { core_->drop_residuals(); }

void PowerSGDState::require_one_model(const GradBucket& bucket) {
  if (!model_) model_ = bucket.model();
  if (model_->owner_before(bucket.model()) || bucket.model().owner_before(*model_)) {
    raise(ErrorCode::InvalidArgument,
          "power_sgd_hook: this state is of another model, and what it keeps between steps would go from one to the "
          "other -- give each model a PowerSGDState of its own");
  }
}

namespace {

/// Returns the dimension whose elements lie farthest apart. With it as rows, the memory is a matrix, row by row.
std::int64_t leading_dimension(const at::Tensor& tensor) {
  std::int64_t leading = 0;
  for (std::int64_t d = 1; d < tensor.dim(); ++d) {
    if (tensor.size(d) > 1 && (tensor.size(leading) == 1 || tensor.stride(d) > tensor.stride(leading))) leading = d;
  }
  return leading;
}

}  // namespace

CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) raise(ErrorCode::InvalidArgument, "power_sgd_hook: the state is empty");
  return [state = std::move(state)](GradBucket& bucket) {
    state->require_one_model(bucket);
    const at::Tensor buffer = bucket.buffer();
    const std::shared_ptr<step::Ranks> ranks = step::ranks_of(bucket.communicator());
    std::vector<gradients::PowerSGD::Matrix> matrices;
    const std::vector<at::Tensor> gradients = bucket.gradients();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& gradient = gradients[i];
      const std::int64_t rows = gradient.dim() > 1 ? gradient.size(leading_dimension(gradient)) : gradient.numel();
      matrices.push_back({.parameter = bucket.parameters()[i].unsafeGetTensorImpl(),
                          .offset = gradient.storage_offset() - buffer.storage_offset(),
                          .rows = rows,
                          .columns = rows == 0 ? 0 : gradient.numel() / rows,
                          .name = bucket.names()[i]});
    }
    if (bucket.index() == 0) {
      state->core().forget();
      if (bucket.last_step_refused()) state->core().drop_residuals();
    }
    state->core().start(*ranks, to_buffer(buffer), std::move(matrices), std::make_shared<const at::Tensor>(buffer));
    return [state, ranks, buffer] {
      state->core().finish(*ranks);  // only the first bucket's call has an effect
      return buffer;
    };
  };
}

}  // namespace cohort::nn
