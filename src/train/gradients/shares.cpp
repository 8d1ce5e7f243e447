#include "train/gradients/shares.h"

#include "base/log.h"
#include "base/result.h"
#include "telemetry/status_page.h"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <charconv>
#include <numeric>
#include <system_error>

namespace cohort::gradients {

SampleShares::SampleShares(const std::string& text) {
  if (text.empty() || text == "even") return;
  if (text == "measured") {
    measured_ = true;
    return;
  }
  for (std::size_t at = 0; at <= text.size();) {
    const std::size_t end = std::min(text.find(',', at), text.size());
    double number = -1;
    const auto read = std::from_chars(text.data() + at, text.data() + end, number);
    if (read.ec != std::errc() || read.ptr != text.data() + end || !(number >= 0) || number > 1e9) {
      raise(ErrorCode::InvalidArgument, "shares '{}': measured, or a number for each rank is wanted, as 2,1", text);
    }
    given_.push_back(number);
    at = end + 1;
  }
  if (std::accumulate(given_.begin(), given_.end(), 0.0) <= 0)
    raise(ErrorCode::InvalidArgument, "shares '{}': some rank has to have samples", text);
}

void SampleShares::require_world(int size) const {
  if (given_.empty() || given_.size() == static_cast<std::size_t>(size)) return;
  raise(ErrorCode::InvalidArgument, "shares for {} ranks in a world of {} -- give a number for each, or 'measured'",
        given_.size(), size);
}

void warn_of_unused_shares() {
  static std::atomic<bool> said{false};
  if (said.exchange(true)) return;
  log::warn("world",
            "shares (cohort run --shares, COHORT_SHARES, or a sampler's) have no effect: "
            "DistributedDataParallel was given no DistributedSampler with a batch_size, so all ranks have the "
            "same part of a step");
}

const std::vector<double>& SampleShares::weights_at(StepPlace place) const {
  for (auto change = changes_.rbegin(); change != changes_.rend(); ++change)
    if (change->first <= place) return change->second;
  return given_;
}

std::pair<std::int64_t, std::int64_t> SampleShares::part(std::int64_t global, int rank, int size,
                                                         StepPlace place) const {
  const std::vector<double>& weights = weights_at(place);
  if (weights.empty()) {
    const std::int64_t each = global / size, more = global % size;
    return {rank * each + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
  }
  const std::vector<std::int64_t> counts = counts_of(weights, global, measured_);
  return {std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0}),
          counts[static_cast<std::size_t>(rank)]};
}

void SampleShares::reset() {
  changes_.clear();
  rates_.clear();
  ranks_.reset();
  last_ = {};
  steps_ = 0;
  due_ = false;
}

void SampleShares::begin_step(std::int64_t global, StepPlace drawn) {
  if (std::exchange(due_, false)) exchange(global, drawn);
}

void SampleShares::end_step(std::int64_t own, std::optional<double> seconds) {
  if (!measured_ || !ranks_ || ranks_->size() == 1) return;
  const auto waited = [] { return status::StatusPage::own().times().exposed_ns.load(std::memory_order_relaxed); };
  if (!seconds && last_ != Clock::time_point{}) {
    seconds =
        std::chrono::duration<double>(Clock::now() - last_).count() - static_cast<double>(waited() - waited_ns_) * 1e-9;
  }
  if (seconds && own > 0) rates_.push_back(static_cast<double>(own) / std::max(*seconds, 1e-6));
  if (++steps_ % kEvery == 0) due_ = true;
  last_ = Clock::now();
  waited_ns_ = waited();
}

void SampleShares::exchange(std::int64_t global, StepPlace drawn) {
  const auto size = static_cast<std::size_t>(ranks_->size());
  double rate = 0;
  if (rates_.size() >= kEvery / 2) {  // fewer measurements are not used: the shares have just changed
    // The median ignores the outliers that an evaluation or a checkpoint between two steps makes.
    const auto middle = rates_.begin() + static_cast<std::ptrdiff_t>(rates_.size() / 2);
    std::nth_element(rates_.begin(), middle, rates_.end());
    rate = *middle;
  }
  rates_.clear();
  const auto rows =
      step::gather_rows(*ranks_, {std::bit_cast<std::uint64_t>(rate), static_cast<std::uint64_t>(drawn.first),
                                  static_cast<std::uint64_t>(drawn.second)});
  std::vector<double> rates;
  StepPlace from = drawn;  // becomes the first step that no rank has drawn yet
  for (const auto& row : rows) {
    rates.push_back(row.empty() ? 0 : std::bit_cast<double>(row[0]));
    if (!row.empty())
      from = std::max(from, StepPlace{static_cast<std::int64_t>(row[1]), static_cast<std::int64_t>(row[2])});
  }
  if (std::ranges::any_of(rates, [](double one) { return one <= 0; })) return;
  if (!changes_.empty() && from < changes_.back().first) return;  // the last change has not taken effect yet
  const std::vector<double>& weights = weights_at(from);
  const auto before = counts_of(weights.empty() ? std::vector<double>(size, 1) : weights, global, true);
  const auto after = counts_of(rates, global, true);
  double slowest = 0, best = 0;  // seconds of a step, before and after
  for (std::size_t i = 0; i < size; ++i) {
    slowest = std::max(slowest, static_cast<double>(before[i]) / rates[i]);
    best = std::max(best, static_cast<double>(after[i]) / rates[i]);
  }
  if (best > (1 - kGain) * slowest) return;
  constexpr std::size_t kKept = 8;  // enough for steps that are drawn again
  if (changes_.size() == kKept) changes_.erase(changes_.begin());
  changes_.emplace_back(from, rates);
  if (ranks_->rank() != 0) return;
  std::string who;
  for (std::size_t i = 0; i < size && i < 8; ++i) {
    who += fmt::format("{}rank {} {} -> {} ({:.3g} samples/s)", i == 0 ? "" : ", ", i, before[i], after[i], rates[i]);
  }
  log::info("world", "shares by speed: of {} samples a step {}{}; computing a step takes {:.3g} ms instead of {:.3g}",
            global, who, size > 8 ? ", ..." : "", 1e3 * best, 1e3 * slowest);
}

std::vector<std::int64_t> counts_of(const std::vector<double>& weights, std::int64_t global, bool each) {
  double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::vector<std::int64_t> counts(weights.size());
  std::int64_t divided = global;  // samples to divide by weight; ranks that would get fewer than 1 get exactly 1
  for (bool again = each && global >= static_cast<std::int64_t>(weights.size()); again;) {
    again = false;
    for (std::size_t i = 0; i < weights.size(); ++i) {
      if (counts[i] != 0 || static_cast<double>(divided) * weights[i] >= total) continue;
      counts[i] = 1;
      --divided;
      total -= weights[i];
      again = true;
    }
  }
  std::vector<std::pair<double, std::size_t>> remainders;  // the largest first; equal ones by ascending rank
  std::int64_t left = divided;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (counts[i] != 0) continue;
    const double wanted = static_cast<double>(divided) * weights[i] / total;
    counts[i] = std::min(left, static_cast<std::int64_t>(wanted));
    left -= counts[i];
    remainders.emplace_back(static_cast<double>(counts[i]) - wanted, i);
  }
  std::ranges::sort(remainders);
  for (std::size_t i = 0; left > 0; i = (i + 1) % remainders.size()) {
    if (weights[remainders[i].second] <= 0) continue;
    ++counts[remainders[i].second];
    --left;
  }
  return counts;
}

}  // namespace cohort::gradients
