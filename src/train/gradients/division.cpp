#include "train/gradients/division.h"

#include <cohort/finite.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace cohort::gradients {

namespace {

// Size of a piece. With its gradient and averages, a piece stays in the cache for the dozen passes of an optimizer.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

std::size_t padded(std::size_t bytes) { return (bytes + kShardUnit - 1) / kShardUnit * kShardUnit; }

}  // namespace

// `begin`: the region's offset in the bucket, in bytes.
void Division::add(const Bucket& bucket, const std::vector<std::size_t>& positions, std::size_t begin,
                   std::int64_t count) {
  const std::size_t element = size_of(bucket.dtype());
  Region region{.values = {nullptr, count, bucket.dtype(), bucket.device()},
                .counts = shards_->divide(count, bucket.dtype())};
  const auto own = region.counts.begin() + shards_->comm().rank();
  region.own_begin = std::accumulate(region.counts.begin(), own, std::int64_t{0});
  region.own_count = *own;
  for (const std::size_t position : positions) {
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    const std::size_t offset = bucket.offset(position) - begin;
    home_offsets_[parameter] = bytes_ + offset;
    homes_[parameter] = bucket.place(position);
    const auto first = static_cast<std::int64_t>(offset / element);
    const std::int64_t to = std::min(first + homes_[parameter].count, region.own_begin + region.own_count);
    const std::int64_t most =
        bucket.on_gpu() ? homes_[parameter].count : static_cast<std::int64_t>(kPieceBytes / element);
    for (std::int64_t from = std::max(first, region.own_begin); from < to;) {
      const std::int64_t end = std::min(to, first + ((from - first) / most + 1) * most);
      pieces_.push_back({.parameter = parameter,
                         .begin = from - first,
                         .count = end - from,
                         .region = regions_.size(),
                         .offset = from - region.own_begin});
      from = end;
    }
  }
  region_offsets_.push_back(bytes_);
  own_averages_.push_back(average_bytes_);
  bytes_ += padded(static_cast<std::size_t>(count) * element);
  average_bytes_ += padded(static_cast<std::size_t>(region.own_count) * element);
  regions_.push_back(std::move(region));
}

// Parameters that are reduced together are divided together, and lie next to each other.
void Division::lay_out(std::span<const Parameter> parameters, const std::vector<Bucket>& buckets, step::Ranks& ranks,
                       Autograd& autograd) {
  if (!shards_) return;
  homes_.resize(parameters.size());
  home_offsets_.resize(parameters.size());
  for (const Bucket& bucket : buckets) {
    std::vector<std::size_t> small;
    for (std::size_t position = 0; position < bucket.members().size(); ++position) {
      if (!bucket.is_large(position)) small.push_back(position);
    }
    for (const std::size_t position : bucket.large()) {
      add(bucket, {position}, bucket.offset(position), bucket.place(position).count);
    }
    const Buffer all = bucket.small();
    if (all.count > 0) {
      add(bucket, small, bucket.bytes() - all.bytes(), all.count);
    } else {  // parameters without elements are not reduced
      for (const std::size_t position : small)
        homes_[static_cast<std::size_t>(bucket.members()[position])] = bucket.place(position);
    }
  }
  std::stable_sort(pieces_.begin(), pieces_.end(),
                   [](const Piece& a, const Piece& b) { return a.parameter < b.parameter; });

  const Device device = parameters.front().device;
  parameter_memory_ = shards_->allocate(std::max<std::size_t>(bytes_, 1), device);
  auto* const base = static_cast<std::byte*>(parameter_memory_.data());
  for (std::size_t i = 0; i < regions_.size(); ++i) regions_[i].values.data = base + region_offsets_[i];
  for (std::size_t i = 0; i < homes_.size(); ++i) homes_[i].data = base + home_offsets_[i];
  if (!divides_gradients()) return;
  average_bytes_ = std::max<std::size_t>(average_bytes_, 1);
  average_memory_ =
      device.type == DeviceType::CPU ? ranks.allocate(average_bytes_) : autograd.allocate(device, average_bytes_);
}

Buffer Division::average_of(const Piece& piece) const {
  const Region& region = regions_[piece.region];
  return {static_cast<std::byte*>(average_memory_.data()) + own_averages_[piece.region] +
              static_cast<std::size_t>(piece.offset) * size_of(region.values.dtype),
          piece.count, region.values.dtype, region.values.device};
}

bool Division::averages_are_finite() const {
  for (std::size_t i = 0; i < regions_.size(); ++i) {
    const auto* const own = static_cast<const std::byte*>(average_memory_.data()) + own_averages_[i];
    if (first_non_finite(ConstBuffer(own, regions_[i].own_count, regions_[i].values.dtype))) return false;
  }
  return true;
}

void Division::protect(std::span<const Parameter> parameters, int rank) {
  if (!shards_ || !shards_->shares_parameters()) return;
  std::vector<WriteProtection::Named> named;
  for (std::size_t i = 0; i < parameters.size(); ++i) {
    named.push_back({.begin = homes_[i].data,
                     .bytes = homes_[i].bytes(),
                     .element = size_of(homes_[i].dtype),
                     .name = parameters[i].name});
  }
  protection_ =
      std::make_unique<WriteProtection>(parameter_memory_.data(), parameter_memory_.bytes(), std::move(named), rank);
}

void Division::allow_writes() {
  if (protection_) protection_->allow();
}

void Division::forbid_writes() {
  if (protection_) protection_->forbid();
}

Division::Part Division::next() {
  const std::size_t number = next_region_++;
  const Region& region = regions_[number];
  return {region,
          {static_cast<std::byte*>(average_memory_.data()) + own_averages_[number], region.own_count,
           region.values.dtype, region.values.device}};
}

void* Division::nothing(step::Ranks& ranks) {
  if (!nothing_) {  // allocated once, for the largest region, since earlier reductions may still use it
    std::size_t most = 0;
    for (const Region& each : regions_) most = std::max(most, each.values.bytes());
    nothing_ = ranks.allocate(most);
  }
  return nothing_.data();
}

}  // namespace cohort::gradients
