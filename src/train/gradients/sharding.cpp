#include "train/gradients/sharding.h"

#include "base/env.h"
#include "base/result.h"

#include <algorithm>
#include <array>
#include <map>
#include <numeric>

namespace cohort::gradients {

std::vector<std::int64_t> divide(std::int64_t count, int owners, DType dtype) {
  const auto unit = static_cast<std::int64_t>(kShardUnit / size_of(dtype));
  const std::int64_t units = (count + unit - 1) / unit;
  std::vector<std::int64_t> counts;
  std::int64_t given = 0;
  for (std::int64_t owner = 0; owner < owners; ++owner) {
    const std::int64_t end = std::min(count, units * (owner + 1) / owners * unit);
    counts.push_back(end - given);
    given = end;
  }
  return counts;
}

Shards::Shards(Communicator comm, nn::Sharding sharding) : sharding_(sharding), host_(comm.split_by_host()) {
  if (sharding == nn::Sharding::None) raise(ErrorCode::InvalidArgument, "Shards: nothing is to be divided");
  if (env::get(env::kWorker)) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: in an elastic job training state cannot be divided (sharding), since what a rank "
          "owns is lost with it -- start the job with a fixed number of ranks, and resume it from checkpoints");
  }
  // By rank: the lowest rank of its host, its number on that host, and the number of ranks there.
  using Row = std::array<std::int64_t, 3>;
  std::vector<Row> rows(static_cast<std::size_t>(comm.size()));
  Row own = {comm.rank(), host_.rank(), host_.size()};
  host_.broadcast(std::span(own).first(1)).wait();
  comm.all_gather(ConstBuffer(own.data(), 3, DType::Int64),
                  Buffer(rows.data(), std::int64_t{3} * comm.size(), DType::Int64))
      .wait();
  std::map<std::int64_t, int> hosts;  // by their lowest rank
  std::int64_t smallest = own[2];
  for (const Row& row : rows) {
    hosts.emplace(row[0], 0);
    smallest = std::min(smallest, row[2]);
  }
  hosts_ = 0;
  for (auto& [lowest, number] : hosts) number = hosts_++;
  columns_ = static_cast<int>(smallest);
  column_of_this_ = host_.rank();
  owners_ = shares_parameters() ? columns_ * hosts_ : comm.size();
  if (hosts_ == 1) {
    comm_ = std::move(comm);
    return;
  }
  comm_ = comm.split({.key = column_of_this_ * hosts_ + hosts.at(own[0])});
  if (shares_parameters()) {
    column_ = comm.split({.color = column_of_this_ < columns_ ? column_of_this_ : kNoColor, .key = hosts.at(own[0])});
  }
}

std::vector<std::int64_t> Shards::divide(std::int64_t count, DType dtype) const {
  std::vector<std::int64_t> counts = gradients::divide(count, owners_, dtype);
  counts.resize(static_cast<std::size_t>(comm_.size()), 0);
  return counts;
}

Memory Shards::allocate(std::size_t bytes, const Device& device) {
  if (!shares_parameters()) return comm_.allocate(bytes, device);
  if (device.type != DeviceType::CPU) {
    raise(ErrorCode::InvalidArgument,
          "Sharding::Parameters: parameters of a GPU, which processes do not share -- use Sharding::Gradients");
  }
  return host_.allocate_shared(bytes);
}

void Shards::meet() { host_.barrier().wait(); }

void Shards::gather(std::span<const Region> regions, void* stream) {
  if (comm_.size() == 1 || (shares_parameters() && !column_)) return;
  std::vector<Work> works;
  for (const Region& region : regions) {
    const auto element = size_of(region.values.dtype);
    Buffer all = region.values;
    all.device.stream = stream;
    const auto at = [&](std::int64_t begin, std::int64_t count) {
      return Buffer(static_cast<std::byte*>(all.data) + static_cast<std::size_t>(begin) * element, count, all.dtype,
                    all.device);
    };
    const Buffer own = at(region.own_begin, region.own_count);
    if (!shares_parameters()) {
      works.push_back(comm_.all_gather_v(own, all, region.counts));
      continue;
    }
    const auto first = region.counts.begin() + std::ptrdiff_t{column_of_this_} * hosts_;
    const std::vector<std::int64_t> counts(first, first + hosts_);
    const std::int64_t begin = std::accumulate(region.counts.begin(), first, std::int64_t{0});
    works.push_back(
        column_.all_gather_v(own, at(begin, std::accumulate(first, first + hosts_, std::int64_t{0})), counts));
  }
  for (std::size_t i = 0; i < works.size(); ++i) {
    const Device& device = regions[i].values.device;
    if (device.type == DeviceType::CPU) {
      works[i].wait();
    } else {
      works[i].synchronize({device.type, device.index, stream});
    }
  }
}

}  // namespace cohort::gradients
