// Which part of each step's samples each rank gets, where that is not the same for all: given, or by measured speed.
// The parts of a step follow from its place in the epoch alone, the same on all ranks, whoever draws ahead. Where they
// are measured, all ranks change them together, from a step on that none has drawn yet. One thread at a time.
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

/// A step by where it begins: samples of that epoch before it, over all ranks.
using StepPlace = std::pair<std::int64_t, std::int64_t>;

class SampleShares {
 public:
  /// "measured", or a number for each rank ("2,1,1"; not all 0); "even" or empty: all ranks have the same. Throws
  /// InvalidArgument.
  explicit SampleShares(const std::string& text = {});

  bool measured() const noexcept { return measured_; }
  /// The ranks may differ.
  bool uneven() const noexcept { return measured_ || !given_.empty(); }
  /// Throws InvalidArgument where the shares are given for another number of ranks.
  void require_world(int size) const;

  /// How many of the `global` samples of a step come before rank `rank`'s, and how many are its own. With even shares
  /// the first ranks get one more where it does not divide.
  std::pair<std::int64_t, std::int64_t> part(std::int64_t global, int rank, int size, StepPlace place) const;

  /// Its ranks exchange their speeds. Until another world comes.
  void bind(std::shared_ptr<step::Ranks> ranks) { ranks_ = std::move(ranks); }
  /// Another world goes on, with even shares until it has measured.
  void reset();
  /// A step begins, of `global` samples at most; `drawn`: the next that this rank draws. After every kEvery steps
  /// collective, where shares are measured: not between a step and the end of it, where an elastic job has no way back
  /// from a lost rank. Rank 0 logs what changes.
  void begin_step(std::int64_t global, StepPlace drawn);
  /// A step of `own` samples of this rank has ended.
  /// `seconds` of computing it: measured, where they are not given, from the end of the step before and without what
  /// the program waited for collectives.
  void end_step(std::int64_t own, std::optional<double> seconds = {});

  static constexpr int kEvery = 10;      ///< steps
  static constexpr double kGain = 0.05;  ///< of a step: what brings less is left alone

 private:
  using Clock = std::chrono::steady_clock;
  const std::vector<double>& weights_at(StepPlace place) const;
  void exchange(std::int64_t global, StepPlace drawn);

  bool measured_ = false;
  std::vector<double> given_;
  std::vector<std::pair<StepPlace, std::vector<double>>> changes_;  ///< by measuring, in order
  std::shared_ptr<step::Ranks> ranks_;
  std::int64_t steps_ = 0;
  bool due_ = false;           ///< the next step begins with an exchange
  std::vector<double> rates_;  ///< samples per second of computing, of the latest steps
  Clock::time_point last_{};
  std::uint64_t waited_ns_ = 0;  ///< that the program had by then
};

/// `global` samples by these weights: whole numbers, their sum exact; what is left over goes to the largest remainders,
/// to lower ranks first. With `each` no rank gets fewer than 1, where there are enough.
std::vector<std::int64_t> counts_of(const std::vector<double>& weights, std::int64_t global, bool each);

/// Once in a process: shares are asked for, and all ranks have the same.
void warn_of_unused_shares();

}  // namespace cohort::gradients
