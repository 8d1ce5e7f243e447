#include "train/gradients/buckets.h"

#include "comm/api/communicator_impl.h"
#include "telemetry/timeline.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <numeric>
#include <tuple>
#include <utility>

namespace cohort::gradients {

std::int64_t Parameter::count() const noexcept {
  return std::accumulate(sizes.begin(), sizes.end(), std::int64_t{1}, std::multiplies<>());
}

BucketPlan plan_buckets(std::span<const Parameter> parameters, std::span<const int> order, const PlanOptions& options) {
  struct Open {
    std::vector<int> members;
    std::size_t bytes = 0;
    bool first = true;
  };
  std::map<std::tuple<DType, DeviceType, int>, Open> open;
  BucketPlan plan;
  for (const int index : order) {
    const Parameter& parameter = parameters[static_cast<std::size_t>(index)];
    Open& bucket = open[{parameter.dtype, parameter.device.type, parameter.device.index}];
    bucket.members.push_back(index);
    bucket.bytes += parameter.bytes();
    if (bucket.bytes >= (bucket.first ? options.first_bucket_bytes : options.bucket_bytes)) {
      plan.push_back(std::move(bucket.members));
      bucket = Open{.members = {}, .bytes = 0, .first = false};
    }
  }
  // A bucket that is still open is complete when its last parameter has its gradient.
  std::vector<std::size_t> rank_in_order(parameters.size());
  for (std::size_t at = 0; at < order.size(); ++at) rank_in_order[static_cast<std::size_t>(order[at])] = at;
  for (auto& [kind, bucket] : open) {
    if (!bucket.members.empty()) plan.push_back(std::move(bucket.members));
  }
  std::stable_sort(plan.begin(), plan.end(), [&](const std::vector<int>& a, const std::vector<int>& b) {
    return rank_in_order[static_cast<std::size_t>(a.back())] < rank_in_order[static_cast<std::size_t>(b.back())];
  });
  return plan;
}

namespace {

struct OwnedBlock final : comm::MemoryBlock {
  std::shared_ptr<const void> owner;
};

}  // namespace

Memory memory_of(void* data, std::size_t bytes, std::shared_ptr<const void> owner) {
  auto block = std::make_shared<OwnedBlock>();
  block->data = data;
  block->bytes = bytes;
  block->owner = std::move(owner);
  return Memory(std::move(block));
}

Bucket::Bucket(std::span<const Parameter> parameters, std::vector<int> members, const BucketLayout& layout)
    : dtype_(parameters[static_cast<std::size_t>(members.front())].dtype),
      device_(parameters[static_cast<std::size_t>(members.front())].device),
      members_(std::move(members)),
      holds_large_(layout.holds_large),
      is_large_(members_.size()),
      offsets_(members_.size()) {
  for (const int member : members_) counts_.push_back(parameters[static_cast<std::size_t>(member)].count());
  const auto lay_out = [&](bool large) {
    for (std::size_t position = 0; position < members_.size(); ++position) {
      const std::size_t size = static_cast<std::size_t>(counts_[position]) * size_of(dtype_);
      if ((size >= layout.large_bytes) != large) continue;
      is_large_[position] = large;
      if (large) large_.push_back(position);
      offsets_[position] = bytes_;
      if (large && !holds_large_) continue;
      bytes_ += (size + layout.alignment - 1) / layout.alignment * layout.alignment;
    }
  };
  lay_out(true);
  small_begin_ = bytes_;
  lay_out(false);
}

Buffer Bucket::place(std::size_t position) const {
  const bool nowhere = is_large_[position] && !holds_large_;
  return {nowhere ? nullptr : static_cast<std::byte*>(memory_.data()) + offsets_[position], counts_[position], dtype_,
          device_};
}

Buffer Bucket::small() const {
  return {static_cast<std::byte*>(memory_.data()) + small_begin_,
          static_cast<std::int64_t>((bytes_ - small_begin_) / size_of(dtype_)), dtype_, device_};
}

void Bucket::clear_gaps() const {
  std::vector<std::size_t> begins(offsets_);
  begins.push_back(bytes_);
  std::sort(begins.begin(), begins.end());
  for (std::size_t position = 0; position < offsets_.size(); ++position) {
    if (counts_[position] == 0) continue;  // an empty gradient shares its offset with another
    const std::size_t end = offsets_[position] + static_cast<std::size_t>(counts_[position]) * size_of(dtype_);
    const auto next = std::upper_bound(begins.begin(), begins.end() - 1, offsets_[position]);
    if (*next > end) std::memset(static_cast<std::byte*>(memory_.data()) + end, 0, *next - end);
  }
}

std::size_t Bucket::position_of(std::int64_t element) const {
  const std::size_t at = small_begin_ + static_cast<std::size_t>(element) * size_of(dtype_);
  std::size_t found = 0;
  for (std::size_t position = 0; position < offsets_.size(); ++position) {
    if (is_large_[position]) continue;
    const std::size_t size = static_cast<std::size_t>(counts_[position]) * size_of(dtype_);
    if (at >= offsets_[position] && at < offsets_[position] + size) found = position;
  }
  return found;
}

void BucketTimes::note_ready(std::size_t number, const std::vector<Bucket>& buckets) {
  if (status::timeline::on()) {
    ready_at_.resize(buckets.size());
    ready_at_[number] = std::chrono::steady_clock::now();
  }
  if (observer_ == nullptr) return;
  observer_->on_bucket_ready(
      {.index = static_cast<int>(number), .bytes = buckets[number].bytes(), .ready = std::chrono::steady_clock::now()});
}

void BucketTimes::note_reduction(Work& work, std::size_t number, std::size_t bytes) const {
  if (number >= ready_at_.size()) return;
  status::timeline::Event event;
  event.kind = status::TimelineKind::Bucket;
  event.name = "bucket";
  event.begun = ready_at_[number];
  event.number = number;
  event.bytes = bytes;
  work.on_done([event]() mutable {
    event.ended = std::chrono::steady_clock::now();
    status::timeline::add(event);
  });
}

}  // namespace cohort::gradients
