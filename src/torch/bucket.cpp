#include "torch/bucket.h"

#include <cohort/torch/tensor.h>

#include <algorithm>
#include <map>

namespace cohort::nn {

namespace {

// Gradients begin on cache lines: kernels of torch and of the reduction run on whole vectors.
constexpr std::size_t kAlignment = 64;

// From here on an operation of its own, and the waits that come with it, cost less than the copy that it saves (at 1
// MiB already where gradients are few, but not in convolutional networks).
constexpr std::size_t kLargeBytes = std::size_t{8} << 20;

// A flag that survives being divided by large worlds and multiplied by small weights in every type: in half precision,
// 65504 * (weight / sum of weights) is non-zero down to a ratio of 1e-12.
constexpr double kFlag = 65504.0;

template <class Function>
auto with_element_type(at::ScalarType type, Function&& function) {
  switch (type) {
    case at::kDouble: return function(double{});
    case at::kHalf: return function(at::Half{});
    case at::kBFloat16: return function(at::BFloat16{});
    default: return function(float{});
  }
}

}  // namespace

BucketPlan plan_buckets(std::span<const PlanParameter> parameters, std::span<const int> order,
                        const PlanOptions& options) {
  struct Open {
    std::vector<int> members;
    std::size_t bytes = 0;
    bool first = true;
  };
  std::map<at::ScalarType, Open> open;
  BucketPlan plan;
  for (const int index : order) {
    const PlanParameter& parameter = parameters[static_cast<std::size_t>(index)];
    Open& bucket = open[parameter.type];
    bucket.members.push_back(index);
    bucket.bytes += parameter.bytes;
    if (bucket.bytes >= (bucket.first ? options.first_bucket_bytes : options.bucket_bytes)) {
      plan.push_back(std::move(bucket.members));
      bucket = Open{.members = {}, .bytes = 0, .first = false};
    }
  }
  // What is left open is complete when its last parameter is.
  std::vector<std::size_t> rank_in_order(parameters.size());
  for (std::size_t at = 0; at < order.size(); ++at) rank_in_order[static_cast<std::size_t>(order[at])] = at;
  for (auto& [type, bucket] : open) {
    if (!bucket.members.empty()) plan.push_back(std::move(bucket.members));
  }
  std::stable_sort(plan.begin(), plan.end(), [&](const std::vector<int>& a, const std::vector<int>& b) {
    return rank_in_order[static_cast<std::size_t>(a.back())] < rank_in_order[static_cast<std::size_t>(b.back())];
  });
  return plan;
}

Bucket::Bucket(Communicator& comm, std::span<const at::Tensor> parameters)
    : type_(parameters.front().scalar_type()), dtype_(to_dtype(type_)) {
  const std::size_t element = size_of(dtype_);
  const auto aligned = [](std::size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; };
  std::size_t bytes = 0;
  offsets_.resize(parameters.size());
  const auto lay_out = [&](std::size_t position) {
    offsets_[position] = bytes;
    bytes = aligned(bytes + parameters[position].nbytes());
  };
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].nbytes() < kLargeBytes) continue;
    large_.push_back(i);
    lay_out(i);
  }
  rest_begin_ = static_cast<std::int64_t>(bytes / element);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].nbytes() < kLargeBytes) lay_out(i);
  }
  flags_begin_ = static_cast<std::int64_t>(bytes / element);
  elements_ = flags_begin_ + static_cast<std::int64_t>(parameters.size()) + 2;
  memory_ = comm.allocate(static_cast<std::size_t>(elements_) * element);

  // The storage holds the memory, so a gradient may outlive bucket and communicator. `set_` on an empty tensor instead
  // of a view of the whole: libtorch 1.13 zeroes gradients with detach_(), which views refuse.
  const at::TensorOptions type_options = at::TensorOptions().dtype(type_);
  const at::Tensor whole = at::from_blob(
      memory_.data(), {elements_}, [memory = memory_](void*) {}, type_options);
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor& parameter = parameters[i];
    at::Tensor gradient = at::empty({0}, type_options);
    // Optimizers are fastest where gradient and parameter have the same strides (libtorch's "gradient layout
    // contract").
    const at::Tensor layout = parameter.is_non_overlapping_and_dense() ? parameter.detach() : at::Tensor();
    const auto offset = static_cast<std::int64_t>(offsets_[i] / element);
    if (layout.defined()) {
      gradient.set_(whole.storage(), offset, parameter.sizes(), parameter.strides());
    } else {
      gradient.set_(whole.storage(), offset, parameter.sizes());
    }
    gradients_.push_back(std::move(gradient));
  }
}

Buffer Bucket::large_buffer(std::size_t position) const {
  return {gradients_[position].data_ptr(), gradients_[position].numel(), dtype_};
}

bool Bucket::can_read(std::size_t position, const at::Tensor& gradient) const {
  const at::Tensor& place = gradients_[position];
  return place.nbytes() >= kLargeBytes && gradient.layout() == at::kStrided &&
         gradient.scalar_type() == place.scalar_type() && gradient.sizes() == place.sizes() &&
         gradient.strides() == place.strides();
}

Buffer Bucket::rest() const {
  return {static_cast<std::byte*>(memory_.data()) + static_cast<std::size_t>(rest_begin_) * size_of(dtype_),
          elements_ - rest_begin_, dtype_};
}

std::optional<std::size_t> Bucket::first_non_finite(const ReadInstead& read_instead,
                                                    const FiniteOptions& options) const {
  for (const std::size_t position : large_) {
    const std::optional<at::Tensor> other = read_instead(position);
    if (!other) continue;
    Buffer values = large_buffer(position);
    if (other->defined()) values.data = other->data_ptr();
    if (cohort::first_non_finite(values, options)) return position;
  }
  // The small ones in one go. What lies between them is zero.
  const Buffer all = rest();
  const auto found = cohort::first_non_finite({all.data, flags_begin_ - rest_begin_, dtype_}, options);
  if (!found) return std::nullopt;
  const std::size_t offset = static_cast<std::size_t>(rest_begin_ + *found) * size_of(dtype_);
  std::size_t first = gradients_.size();
  for (std::size_t position = 0; position < gradients_.size(); ++position) {
    const bool holds = offset >= offsets_[position] && offset < offsets_[position] + gradients_[position].nbytes();
    if (holds) first = position;
  }
  return first;
}

void Bucket::set_flag(std::size_t position, bool value) {
  with_element_type(type_, [&](auto element) {
    using Element = decltype(element);
    static_cast<Element*>(memory_.data())[flags_begin_ + static_cast<std::int64_t>(position)] =
        static_cast<Element>(static_cast<float>(value ? kFlag : 0.0));
  });
}

bool Bucket::flag(std::size_t position) const {
  return with_element_type(type_, [&](auto element) {
    using Element = decltype(element);
    const auto* const elements = static_cast<const Element*>(memory_.data());
    return static_cast<double>(static_cast<float>(elements[flags_begin_ + static_cast<std::int64_t>(position)])) != 0.0;
  });
}

}  // namespace cohort::nn
