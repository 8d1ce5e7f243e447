#include "track/shared_values.h"

#include "base/result.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <span>
#include <string>

namespace cohort::track {
namespace {

constexpr std::size_t kMostEntriesOfARound = 4096;

/// Equal where ranks have logged the same steps, names and reductions.
double digest_of(std::span<const SharedEntry> entries) {
  std::string all;
  for (const SharedEntry& entry : entries) {
    all += std::to_string(entry.line.step) + ' ' + std::to_string(static_cast<int>(entry.reduce));
    for (const auto& [name, value] : entry.line.values) all.append(" ").append(name);
    all += '\n';
  }
  // Every 52-bit number is a double of its own.
  return static_cast<double>(std::hash<std::string>()(all) >> 12);
}

double reduced(std::span<const double> of_ranks, Reduce reduce) {
  switch (reduce) {
    case Reduce::Max: return *std::max_element(of_ranks.begin(), of_ranks.end());
    case Reduce::Min: return *std::min_element(of_ranks.begin(), of_ranks.end());
    case Reduce::Sum: return std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0);
    default: return std::accumulate(of_ranks.begin(), of_ranks.end(), 0.0) / static_cast<double>(of_ranks.size());
  }
}

Communicator group_of_all(Communicator& communicator) {
  std::vector<int> ranks(static_cast<std::size_t>(communicator.size()));
  std::iota(ranks.begin(), ranks.end(), 0);
  return communicator.group(ranks, {.background = true});
}

}  // namespace

SharedValues::SharedValues(Communicator& communicator) : group_(group_of_all(communicator)) {}

void SharedValues::add(SharedEntry entry) {
  const std::scoped_lock lock(mutex_);
  entries_.push_back(std::move(entry));
}

std::vector<MetricLine> SharedValues::round(Wish wish) {
  if (!mismatch_.empty()) wish = Wish::Leave;
  std::int64_t said[3] = {0, wish == Wish::GoOn ? 0 : 1, wish == Wish::Leave ? 0 : 1};
  if (mismatch_.empty()) {
    const std::scoped_lock lock(mutex_);
    said[0] = static_cast<std::int64_t>(std::min(entries_.size(), kMostEntriesOfARound));
  }
  group_.all_reduce(std::span(said), {.op = ReduceOp::Min}).wait();
  if (!mismatch_.empty()) raise(ErrorCode::Mismatch, "{}", mismatch_);
  std::vector<MetricLine> lines;
  if (said[0] > 0) lines = bring(static_cast<std::size_t>(said[0]));
  const bool more = said[0] == static_cast<std::int64_t>(kMostEntriesOfARound);
  done_ = !more && (said[1] == 1 || said[2] == 0);
  return lines;
}

std::vector<MetricLine> SharedValues::bring(std::size_t entries) {
  std::vector<SharedEntry> taken;
  {
    const std::scoped_lock lock(mutex_);
    const auto end = entries_.begin() + static_cast<std::ptrdiff_t>(entries);
    taken.assign(entries_.begin(), end);
  }
  std::vector<double> mine = {digest_of(taken)};
  for (const SharedEntry& entry : taken) {
    for (const auto& [name, value] : entry.line.values) mine.push_back(value);
  }
  const auto ranks = static_cast<std::size_t>(group_.size());
  std::vector<double> all(group_.rank() == 0 ? mine.size() * ranks : 0);
  group_.gather(std::span(mine), std::span(all)).wait();
  std::vector<MetricLine> lines;
  if (group_.rank() == 0) {
    for (std::size_t rank = 1; rank < ranks; ++rank) {
      if (all[rank * mine.size()] == mine[0]) continue;
      mismatch_ = fmt::format("rank {} has logged other steps or names than rank 0", rank);
      return lines;
    }
    std::size_t at = 1;
    std::vector<double> of_ranks(ranks);
    for (SharedEntry& entry : taken) {
      const auto value_of = [&](std::size_t rank, std::size_t i) { return all[rank * mine.size() + at + i]; };
      const std::size_t values = entry.line.values.size();
      for (std::size_t rank = 0; rank < (entry.reduce == Reduce::Each ? ranks : 0); ++rank) {
        MetricLine& line = lines.emplace_back(entry.line);
        line.rank = static_cast<int>(rank);
        for (std::size_t i = 0; i < values; ++i) line.values[i].second = value_of(rank, i);
      }
      if (entry.reduce != Reduce::Each) {
        for (std::size_t i = 0; i < values; ++i) {
          for (std::size_t rank = 0; rank < ranks; ++rank) of_ranks[rank] = value_of(rank, i);
          entry.line.values[i].second = reduced(of_ranks, entry.reduce);
        }
        lines.push_back(std::move(entry.line));
      }
      at += values;
    }
  }
  const std::scoped_lock lock(mutex_);
  entries_.erase(entries_.begin(), entries_.begin() + static_cast<std::ptrdiff_t>(entries));
  return lines;
}

std::vector<MetricLine> SharedValues::take_rest() {
  const std::scoped_lock lock(mutex_);
  std::vector<MetricLine> lines;
  for (SharedEntry& entry : entries_) {
    entry.line.rank = group_.rank();
    lines.push_back(std::move(entry.line));
  }
  entries_.clear();
  return lines;
}

}  // namespace cohort::track
