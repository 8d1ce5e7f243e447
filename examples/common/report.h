// A training's reports: the run record, a line of progress, a summary at the end. On rank 0; on the
// other ranks, where `begin` is not called, everything here does nothing.
// The record watches the communicator, so declare a Report before it.
#pragma once

#include "data.h"
#include "options.h"

#include <cohort/communicator.h>
#include <cohort/torch/checkpoint.h>
#include <cohort/torch/data.h>
#include <cohort/track.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

struct Score {
  double loss = 0, accuracy = 0;
};

class Report {
 public:
  /// `sampler` is asked for the position from now on; `found` is what the run goes on with.
  void begin(const Options& options, cohort::Communicator& comm, const DigitSets& digits,
             const cohort::data::DistributedSampler& sampler, const std::optional<cohort::CheckpointInfo>& found);
  void begin_epoch();
  /// `loss` of this rank, `samples` over all ranks, `waited`: seconds for reductions after backward had ended.
  void step(int64_t step, double loss, int64_t samples, double waited);
  /// Records the mean loss over all ranks of the steps since the last call, and the learning rate.
  void loss(double mean, double rate);
  void saved(const std::string& checkpoint) { checkpoint_ = checkpoint; }
  void preempted();
  void end_epoch(const Score& score);
  /// Prints where everything is.
  void end(const Score& score);

 private:
  using Clock = std::chrono::steady_clock;

  double epochs_done() const;

  std::optional<cohort::track::RunRecord> record_;
  std::optional<cohort::track::Progress> progress_;
  const cohort::data::DistributedSampler* sampler_ = nullptr;
  std::filesystem::path out_;
  std::string checkpoint_;
  int processes_ = 1;
  int64_t test_images_ = 0, step_ = 0;
  Clock::time_point epoch_begin_, step_begin_, steps_end_;
  bool whole_epoch_ = false;
  int64_t epoch_samples_ = 0, samples_ = 0;
  double seconds_ = 0;
  std::vector<double> speeds_;  ///< one for each whole epoch
};
