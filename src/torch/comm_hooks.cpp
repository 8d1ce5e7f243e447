#include <cohort/torch/comm_hooks.h>

#include "base/result.h"
#include "train/gradients/power_sgd.h"

#include <cohort/torch/tensor.h>

#include <algorithm>
#include <charconv>
#include <memory>
#include <string_view>
#include <utility>

namespace cohort::nn {

GradBucket::GradBucket(std::size_t index, bool is_last, at::Tensor buffer, std::vector<at::Tensor> parameters,
                       std::vector<std::int64_t> offsets, Communicator& communicator)
    : index_(index),
      is_last_(is_last),
      buffer_(std::move(buffer)),
      parameters_(std::move(parameters)),
      offsets_(std::move(offsets)),
      communicator_(&communicator) {}

void GradBucket::set_buffer(at::Tensor buffer) {
  if (buffer.numel() != buffer_.numel()) {
    raise(ErrorCode::InvalidArgument, "GradBucket::set_buffer: {} elements in place of {}", buffer.numel(),
          buffer_.numel());
  }
  buffer_ = buffer.view({-1});
}

std::vector<at::Tensor> GradBucket::gradients() const {
  std::vector<at::Tensor> all;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    all.push_back(buffer_.narrow(0, offsets_[i], parameters_[i].numel()).view(parameters_[i].sizes()));
  }
  return all;
}

namespace {

// Sends tensors of `type`; 16-bit floats are folded in float32.
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

std::vector<float> floats_in(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.detach().to(at::kCPU, at::kFloat).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

}  // namespace

PowerSGDState::PowerSGDState(const PowerSGDOptions& options) : core_(std::make_unique<gradients::PowerSGD>(options)) {}
PowerSGDState::~PowerSGDState() = default;

std::pair<std::int64_t, std::int64_t> PowerSGDState::compression_stats() const { return core_->compression_stats(); }

std::map<std::string, at::Tensor> PowerSGDState::state_dict() const {
  std::map<std::string, at::Tensor> state;
  state[fmt::format("{}iter", kPrefix)] = at::full({1}, core_->iteration(), at::kLong);
  for (std::size_t number = 0; number < core_->kept().size(); ++number) {
    const gradients::PowerSGD::Kept& kept = core_->kept()[number];
    if (kept.error.empty() && kept.q.empty()) continue;
    const auto name = [&](const char* what) { return fmt::format("{}{}.{}", kPrefix, number, what); };
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
  std::vector<gradients::PowerSGD::Kept> all;
  for (const auto& [name, tensor] : state) {
    if (!name.starts_with(kPrefix)) continue;
    const std::string rest = name.substr(kPrefix.size());
    if (rest == "iter") {
      iteration = tensor.item<std::int64_t>();
      continue;
    }
    std::size_t number = 0;
    const char* const end = rest.data() + rest.size();
    const auto [what, problem] = std::from_chars(rest.data(), end, number);
    if (problem != std::errc() || number >= (std::size_t{1} << 24)) {
      raise(ErrorCode::InvalidArgument, "PowerSGDState::load_state_dict: '{}' is not one of its names", name);
    }
    if (number >= all.size()) all.resize(number + 1);
    const std::string_view field(what, static_cast<std::size_t>(end - what));
    if (field == ".shape") {
      all[number].rows = tensor[0].item<std::int64_t>();
      all[number].columns = tensor[1].item<std::int64_t>();
    } else if (field == ".error") {
      all[number].error = floats_in(tensor);
    } else if (field == ".q") {
      all[number].q = floats_in(tensor);
    }
  }
  core_->restore(iteration, std::move(all));
}

CommHook power_sgd_hook(std::shared_ptr<PowerSGDState> state) {
  if (!state) raise(ErrorCode::InvalidArgument, "power_sgd_hook: the state is empty");
  return [state = std::move(state)](GradBucket& bucket) {
    const at::Tensor buffer = bucket.buffer();
    const std::shared_ptr<gradients::Ranks> ranks = gradients::ranks_of(bucket.communicator());
    std::vector<gradients::PowerSGD::Matrix> matrices;
    const std::vector<at::Tensor> gradients = bucket.gradients();
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      const at::Tensor& gradient = gradients[i];
      const std::int64_t rows = gradient.dim() > 1 ? gradient.size(0) : gradient.numel();
      matrices.push_back({.parameter = bucket.parameters()[i].unsafeGetTensorImpl(),
                          .offset = gradient.storage_offset() - buffer.storage_offset(),
                          .rows = rows,
                          .columns = rows == 0 ? 0 : gradient.numel() / rows});
    }
    if (bucket.index() == 0) state->core().forget();
    state->core().start(*ranks, to_buffer(buffer), std::move(matrices), std::make_shared<const at::Tensor>(buffer));
    return [state, ranks, buffer] {
      state->core().finish(*ranks);  // the first call, of all buckets
      return buffer;
    };
  };
}

}  // namespace cohort::nn
