#include "train/gradients/residuals.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <utility>

namespace cohort::gradients {

namespace {

/// Pages of zeros are left as they are.
void copy(std::span<const float> from, std::span<float> to) noexcept {
  for (std::size_t i = 0; i < to.size(); ++i) {
    if (from[i] != 0) to[i] = from[i];
  }
}

}  // namespace

void Residuals::lay_out(const std::vector<Bucket>& buckets) {
  const std::shared_ptr<float> before = memory_;
  const auto old_places = std::exchange(places_, {});
  const auto of_large = [](const Bucket& bucket) {
    std::int64_t count = 0;
    for (const std::size_t position : bucket.large()) count += bucket.place(position).count;
    return count;
  };
  std::int64_t count = 1;
  for (const Bucket& bucket : buckets) {
    if (bucket.dtype() == DType::Float32) count += of_large(bucket) + bucket.small().count;
  }
  // Zeroed pages that nobody writes to take no memory: a rank has losses of its part of the host's sum alone.
  memory_.reset(static_cast<float*>(std::calloc(static_cast<std::size_t>(count), sizeof(float))), std::free);
  if (memory_ == nullptr) throw std::bad_alloc();
  small_.assign(buckets.size(), nullptr);
  float* next = memory_.get();
  for (std::size_t number = 0; number < buckets.size(); ++number) {
    const Bucket& bucket = buckets[number];
    if (bucket.dtype() != DType::Float32) continue;
    const Buffer small = bucket.small();
    small_[number] = std::exchange(next, next + small.count);
    for (std::size_t position = 0; position < bucket.members().size(); ++position) {
      const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
      const std::int64_t elements = bucket.place(position).count;
      const std::size_t offset = bucket.offset(position) - (bucket.bytes() - small.bytes());
      float* const begin =
          bucket.is_large(position) ? std::exchange(next, next + elements) : small_[number] + offset / sizeof(float);
      const std::span<float> place(begin, static_cast<std::size_t>(elements));
      if (const auto old = old_places.find(parameter); old != old_places.end()) copy(old->second, place);
      places_.emplace(parameter, place);
    }
  }
}

std::span<float> Residuals::of(std::size_t parameter) const {
  const auto place = places_.find(parameter);
  return place == places_.end() ? std::span<float>() : place->second;
}

}  // namespace cohort::gradients
