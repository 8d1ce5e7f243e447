// Checks whose data travels beside the gradients of a step. They detect ranks at different places of their program,
// batches that differ in size without declared sample counts, or are of different epochs, batches that are the same on
// all ranks, and parameters that have drifted apart. Reading the message is free; more is exchanged only if a check
// fails. One thread per rank.
#pragma once

#include "train/gradients/accumulation.h"
#include "train/gradients/autograd.h"
#include "train/gradients/buckets.h"
#include "train/step/decision.h"
#include "train/step/ranks.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

namespace cohort::gradients {

struct StepMessage final : step::Message {
  /// Flags. Only ranks that have samples set them, except the last two.
  enum Flag : std::size_t {
    Samples,
    NonFinite,
    Declared,
    Undeclared,
    AfterForward,
    WithoutForward,
    Mixed,
    AverageNotFinite,
    kFlags
  };
  enum Word : std::size_t { Rows, Epoch, Values, Batches, kWords };

  explicit StepMessage(std::size_t parameters) : Message(parameters, kFlags, kWords) {}
};

class StepChecks {
 public:
  /// `replicas`: true if parameter values are compared.
  StepChecks(std::span<const Parameter> parameters, Autograd& autograd, bool replicas)
      : parameters_(parameters), autograd_(autograd), replicas_(replicas) {}

  /// Returns whether the first forward of the step has to give a digest of its batch.
  bool wants_batch(std::int64_t step) const noexcept;
  void note_batch(std::uint64_t digest);
  /// Notes the first dimension of the last forward's first tensor, and the epoch of its sampler. Ranks' epochs are
  /// compared if all forwards of a step have the same one.
  void note_forward(std::optional<std::int64_t> rows, std::optional<std::int64_t> epoch) noexcept;
  /// Samples parameter values at a step's first forward. Later in the step a program may have changed its parameters
  /// temporarily, to restore them before the optimizer's step.
  void sample_values(std::int64_t step, int ranks);

  /// Adds this rank's part to the message of the step that ends.
  void show(StepMessage& message, const Accumulation& reduced, std::int64_t step, int ranks);
  /// Checks the message, which is the same on all ranks. Throws Mismatch on all ranks. `step`: the step that has ended.
  void look(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced, std::int64_t step);

 private:
  void raise_different(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced, std::int64_t step);
  void tell_of_rows(step::Ranks& ranks, const Accumulation& reduced) const;
  void tell_of_batches(step::Ranks& ranks, const Accumulation& reduced) const;
  void tell_of_epochs(step::Ranks& ranks, const Accumulation& reduced) const;
  std::size_t compared_bytes(std::size_t sample, std::size_t bytes) const;
  void compare_values(step::Ranks& ranks, std::int64_t step);

  std::span<const Parameter> parameters_;
  Autograd& autograd_;
  const bool replicas_;
  std::optional<std::int64_t> rows_;
  bool told_of_rows_ = false, told_of_epochs_ = false;
  std::optional<std::int64_t> epoch_, shown_epoch_;  // of this step's forwards, and of the reduced one
  bool several_epochs_ = false;
  std::uint64_t batches_ = 0;  // digest of the first batches of the first steps
  int batches_seen_ = 0;
  std::vector<int> sampled_;                  // the parameters whose values are compared in this step,
  std::vector<std::uint64_t> sampled_words_;  // equally many words of bytes of each, then the size of each,
  std::optional<std::uint64_t> digest_;       // and the digest of these words, from the step's first forward
  std::int64_t compare_values_from_ = 0;      // first step to compare values in; moved after a rounding difference
};

}  // namespace cohort::gradients
