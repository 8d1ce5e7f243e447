// A reducer's part of virtual ranks: what begins and ends with the backwards of one virtual rank, and what a step finds
// in `.grad`. One thread per rank.
#pragma once

#include "train/gradients/accumulation.h"
#include "train/gradients/autograd.h"
#include "train/gradients/step_checks.h"
#include "train/gradients/virtual_ranks.h"

#include <cohort/buffer.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

namespace cohort::gradients {

class VirtualPart {
 public:
  /// Returns a gradient's place.
  using Places = std::function<Buffer(std::size_t parameter)>;

  VirtualPart(int virtual_ranks, std::shared_ptr<step::Ranks> ranks, Autograd& autograd)
      : autograd_(autograd), ranks_(virtual_ranks, std::move(ranks)) {}

  VirtualRanks& ranks() noexcept { return ranks_; }
  const VirtualRanks& ranks() const noexcept { return ranks_; }

  /// Throws InvalidArgument for a second backward of a virtual rank, which would be taken for the next one's.
  void require_forward(const Accumulation& accumulation) const;
  /// Begins a backward. The first one of a virtual rank finds no gradients: those from before the step are put aside.
  void begin_pass(std::size_t parameters, const Places& place_of);
  /// Notes that the virtual rank under way has used a parameter.
  void note_used(std::size_t parameter, double weight);
  /// True if an earlier virtual rank of this rank has used the parameter, with samples.
  bool used(std::size_t parameter) const { return parameter < used_.size() && used_[parameter]; }
  /// Ends the virtual rank under way, whose backward has reached the end.
  void end(double weight, const Accumulation& accumulation);
  /// Makes the virtual rank under way begin anew after a backward that failed. Its micro-batches are dropped.
  void restart(Accumulation& accumulation);
  /// Drops the step under way.
  void drop(Accumulation& accumulation);
  /// Adds the gradients that were there before the step to the averages; those without a use stay as they were.
  void add_gradients_from_before(const StepMessage& message, const Places& place_of);

 private:
  Autograd& autograd_;
  VirtualRanks ranks_;
  Accumulation at_begin_;  // when the virtual rank under way began
  bool begun_ = false;     // it has had a backward
  bool taken_ = false;     // gradients from before the step were put aside
  std::vector<bool> used_;
  std::vector<std::pair<std::size_t, std::vector<std::byte>>> before_;  // parameters, and their gradients then
};

}  // namespace cohort::gradients
