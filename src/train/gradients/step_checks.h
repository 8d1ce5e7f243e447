// Checks that travel beside the gradients of a step. They show ranks at different places of their program, batches that
// differ though nobody has said how many samples they hold or that are all the same, and parameters that have drifted
// apart. A look at the message costs nothing; only what it finds is exchanged. One thread per rank.
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
  /// Flags of a rank that has samples, but for the last two.
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
  enum Word : std::size_t { Rows, Values, Batches, kWords };

  explicit StepMessage(std::size_t parameters) : Message(parameters, kFlags, kWords) {}
};

class StepChecks {
 public:
  /// `replicas`: whether values are compared.
  StepChecks(std::span<const Parameter> parameters, Autograd& autograd, bool replicas)
      : parameters_(parameters), autograd_(autograd), replicas_(replicas) {}

  /// Whether a step's first forward is to give a digest of its batch.
  bool wants_batch(std::int64_t step) const noexcept;
  void note_batch(std::uint64_t digest);
  /// The first dimension of the last forward's first tensor.
  void note_rows(std::optional<std::int64_t> rows) noexcept { rows_ = rows; }
  /// At a step's first forward. Later in the step a rank may have moved its parameters, to move them back before the
  /// optimizer's step.
  void sample_values(std::int64_t step, int ranks);

  /// Adds this rank's part to the message of the step that ends.
  void show(StepMessage& message, const Accumulation& reduced, std::int64_t step, int ranks);
  /// All ranks have come here, with the same message. Throws Mismatch on all ranks. `step`: the one that has ended.
  void look(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced, std::int64_t step);

 private:
  void raise_different(step::Ranks& ranks, const StepMessage& message, const Accumulation& reduced, std::int64_t step);
  void tell_of_rows(step::Ranks& ranks) const;
  void tell_of_batches(step::Ranks& ranks) const;
  std::size_t compared_bytes(std::size_t sample, std::size_t bytes) const;
  void compare_values(step::Ranks& ranks, std::int64_t step);

  std::span<const Parameter> parameters_;
  Autograd& autograd_;
  const bool replicas_;
  std::optional<std::int64_t> rows_;
  bool told_of_rows_ = false;
  std::uint64_t batches_ = 0;  // a digest of the first of each of the first steps
  int batches_seen_ = 0;
  std::vector<int> sampled_;                  // parameters of which values are compared in this step,
  std::vector<std::uint64_t> sampled_words_;  // some bytes of each, as many words for each, then how many it has,
  std::optional<std::uint64_t> digest_;       // and the digest of these; of a step's first forward
  std::int64_t compare_values_from_ = 0;      // this step on; later where differences are of rounding alone
};

}  // namespace cohort::gradients
