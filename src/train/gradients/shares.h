// Shares of each step's samples by rank, which are equal, given, or follow the measured speeds. The shares of a step
// depend only on its place in the epoch, and are the same on all ranks, also if a rank draws ahead. If shares are
// measured, all ranks change them together, from a step that no rank has drawn yet. One thread at a time.
#pragma once

#include "train/step/ranks.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::gradients {

/// The place of a step: its epoch, and the samples of that epoch before the step, over all ranks.
using StepPlace = std::pair<std::int64_t, std::int64_t>;

class SampleShares {
 public:
  /// `text`: "measured", or a number for each rank ("2,1,1"; not all 0). "even" or empty: all ranks get the same share.
  /// Throws InvalidArgument for any other text.
  explicit SampleShares(const std::string& text = {});

  bool measured() const noexcept { return measured_; }
  /// True if the ranks' shares may differ.
  bool uneven() const noexcept { return measured_ || !given_.empty(); }
  /// Throws InvalidArgument if the shares are given for another number of ranks.
  void require_world(int size) const;

  /// Returns how many of the `global` samples of a step come before those of rank `rank`, and how many samples the rank
  /// gets. With even shares that do not divide evenly, the first ranks get one sample more.
  std::pair<std::int64_t, std::int64_t> part(std::int64_t global, int rank, int size, StepPlace place) const;

  /// Sets the ranks that exchange their speeds, until `reset`.
  void bind(std::shared_ptr<step::Ranks> ranks) { ranks_ = std::move(ranks); }
  /// Prepares for a new world, which has even shares until it has measured.
  void reset();
  /// Begins a step of at most `global` samples; `drawn`: the next step that this rank draws. Collective after every
  /// kEvery steps, if shares are measured. The exchange is not within a step, since an elastic job could not recover
  /// from a lost rank there. Rank 0 logs changes.
  void begin_step(std::int64_t global, StepPlace drawn);
  /// Ends a step in which this rank had `own` samples.
  /// `seconds`: the computing time. By default, measured from the end of the step before, without the time that the
  /// program waited for collectives.
  void end_step(std::int64_t own, std::optional<double> seconds = {});

  static constexpr int kEvery = 10;      ///< steps from one exchange to the next
  static constexpr double kGain = 0.05;  ///< share of a step's time; changes that gain less are not made

 private:
  using Clock = std::chrono::steady_clock;
  const std::vector<double>& weights_at(StepPlace place) const;
  void exchange(std::int64_t global, StepPlace drawn);

  bool measured_ = false;
  std::vector<double> given_;
  std::vector<std::pair<StepPlace, std::vector<double>>> changes_;  ///< measured weights, in order of their first steps
  std::shared_ptr<step::Ranks> ranks_;
  std::int64_t steps_ = 0;
  bool due_ = false;           ///< the next step begins with an exchange
  std::vector<double> rates_;  ///< samples per second of computing, in the latest steps
  Clock::time_point last_{};
  std::uint64_t waited_ns_ = 0;  ///< total waiting time at `last_`
};

/// Divides `global` samples by these weights into whole numbers with the exact sum. Left-over samples go to the largest
/// remainders (if equal, to lower ranks). With `each`, every rank gets at least 1 if there are enough.
std::vector<std::int64_t> counts_of(const std::vector<double>& weights, std::int64_t global, bool each);

/// Warns, once in a process, that shares were requested but all ranks have the same part of a step.
void warn_of_unused_shares();

}  // namespace cohort::gradients
