#include "train/gradients/residuals.h"

#include <cstdlib>
#include <new>
#include <utility>

namespace cohort::gradients {

// Zeroed pages that are never written take no memory, and a rank writes only the errors of its part of the host's sum.
void Residuals::clear() {
  memory_.reset(static_cast<float*>(std::calloc(count_ + 1, sizeof(float))), std::free);
  if (memory_ == nullptr) throw std::bad_alloc();
}

void Residuals::lay_out(const std::vector<Bucket>& buckets) {
  const std::shared_ptr<float> before = memory_;
  const auto old_places = std::exchange(places_, {});
  small_.assign(buckets.size(), 0);
  count_ = 0;
  for (std::size_t number = 0; number < buckets.size(); ++number) {
    const Bucket& bucket = buckets[number];
    if (bucket.dtype() != DType::Float32) continue;
    const Buffer small = bucket.small();
    small_[number] = std::exchange(count_, count_ + static_cast<std::size_t>(small.count));
    for (std::size_t position = 0; position < bucket.members().size(); ++position) {
      const auto elements = static_cast<std::size_t>(bucket.place(position).count);
      const std::size_t offset = bucket.offset(position) - (bucket.bytes() - small.bytes());
      const std::size_t begin = bucket.is_large(position) ? std::exchange(count_, count_ + elements)
                                                          : small_[number] + offset / sizeof(float);
      places_[static_cast<std::size_t>(bucket.members()[position])] = {begin, elements};
    }
  }
  clear();
  for (const auto& [parameter, place] : places_) {
    const auto old = old_places.find(parameter);
    for (std::size_t i = 0; old != old_places.end() && i < place.count; ++i) {
      const float value = before.get()[old->second.begin + i];
      if (value != 0) memory_.get()[place.begin + i] = value;  // pages of zeros are not written
    }
  }
}

std::span<float> Residuals::of(std::size_t parameter) const {
  const auto found = places_.find(parameter);
  if (found == places_.end()) return {};
  return {memory_.get() + found->second.begin, found->second.count};
}

}  // namespace cohort::gradients
