// Pipeline training of a model of several stages: schedules, their memory and idle time, and where to cut a model so
// that its stages take equally long. Pure functions over plain values; any thread. <cohort/torch/pipeline.h> runs the
// schedules.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::pipeline {

/// Order in which a rank runs the forwards and backwards of its micro-batches. A bubble is the part of a step in which
/// a rank idles, given here for p ranks, m micro-batches and v chunks if all stages take the same time.
enum class Schedule : std::uint8_t {
  GPipe,        ///< all forwards, then all backwards: bubble (p-1)/(m+p-1), m activations
  OneFOneB,     ///< "1F1B", forwards and backwards in turns: the same bubble, at most p activations
  Interleaved,  ///< 1F1B over v chunks for each rank: bubble (p-1)/(v*m+p-1), v times the messages
  ZeroBubble,   ///< 1F1B with weights' gradients computed in gaps ("ZB-H1"): bubble (p-1)/(3*m+p-1), p activations
};
std::string_view to_string(Schedule schedule) noexcept;

/// Stage s of the model is on rank s % ranks, where it is chunk s / ranks.
struct Layout {
  Schedule schedule = Schedule::OneFOneB;
  int ranks = 1;
  int micro_batches = 1;
  int chunks = 1;  ///< stages of each rank; more than 1 with Interleaved only

  int stages() const noexcept { return ranks * chunks; }
};

/// Throws InvalidArgument for a layout without a schedule: numbers below 1, several chunks without Interleaved, or with
/// Interleaved a number of micro-batches that is no multiple of the ranks.
void check(const Layout& layout);

/// The largest number of activations, each of one stage and one micro-batch, that `rank` keeps at a time until their
/// backward has ended.
int most_activations(const Layout& layout, int rank);

/// Costs of a stage for one micro-batch; any unit.
struct StageCost {
  double forward = 1;
  double input = 1;   ///< backward: the gradient of the stage's input
  double weight = 1;  ///< backward: the gradients of the stage's parameters
};

struct Expectation {
  double time = 0;    ///< time of a step, in the costs' unit
  double bubble = 0;  ///< the part of the step in which a rank idles, on average over ranks
};

/// Estimates a step whose stages have these costs (one entry per stage) if messages take no time.
Expectation expect(const Layout& layout, std::span<const StageCost> stages);

/// Cuts layers of these costs into `stages` consecutive, non-empty parts so that the slowest part is as fast as
/// possible. Returns the first layer of each part but the first. If all costs are 0, all layers count the same. Throws
/// InvalidArgument if there are fewer layers than stages, or a cost is negative or not finite.
std::vector<std::int64_t> cut_by_cost(std::span<const double> layers, int stages);

/// Describes a plan in a line or two: the schedule, the cuts, how far the slowest stage is from the mean, the expected
/// bubble. Assumes that a layer's backward costs twice its forward.
std::string describe(const Layout& layout, std::span<const double> layers, std::span<const std::int64_t> cuts);

}  // namespace cohort::pipeline
