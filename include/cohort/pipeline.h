// Pipeline training of a model of several stages: schedules, the memory and idle time they take, and where to cut a
// model so that its stages are equally slow. Pure functions over plain values; any thread. They are run by
// <cohort/torch/pipeline.h>.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::pipeline {

/// Order in which a rank runs the forwards and backwards of its micro-batches. With p ranks, m micro-batches and v
/// chunks, where all stages take the same time, a rank idles for the part of a step that is named its bubble.
enum class Schedule : std::uint8_t {
  GPipe,        ///< all forwards, then all backwards: bubble (p-1)/(m+p-1), m activations
  OneFOneB,     ///< "1F1B", forwards and backwards in turns: the same bubble, at most p activations
  Interleaved,  ///< 1F1B over v chunks for each rank: bubble (p-1)/(v*m+p-1), v times the messages
  ZeroBubble,   ///< 1F1B with weights' gradients computed in the gaps ("ZB-H1"): (p-1)/(3*m+p-1), p activations
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

/// Throws InvalidArgument for what has no schedule: numbers below 1, several chunks without Interleaved, and with it
/// micro-batches that are no multiple of the ranks.
void check(const Layout& layout);

/// How many forwards of one stage and one micro-batch `rank` keeps at once, at most, until their backward has ended.
int most_activations(const Layout& layout, int rank);

/// Costs of a stage for one micro-batch; any unit.
struct StageCost {
  double forward = 1;
  double input = 1;   ///< backward: the gradient of the stage's input
  double weight = 1;  ///< backward: those of its parameters
};

struct Expectation {
  double time = 0;    ///< of a step, in the costs' unit
  double bubble = 0;  ///< the part of it in which a rank idles, on average over ranks
};

/// Estimates a step with stages of these costs (one for each) if messages take no time.
Expectation expect(const Layout& layout, std::span<const StageCost> stages);

/// Cuts layers of these costs into `stages` parts without a gap, none empty, of which the slowest is as fast as can be.
/// Returns the first layer of each part but the first. Layers that all cost nothing count the same. Throws
/// InvalidArgument if there are fewer layers than stages, or a cost is negative or not finite.
std::vector<std::int64_t> cut_by_cost(std::span<const double> layers, int stages);

/// A line or two: the schedule, the cuts, how far the slowest stage is from the mean, the bubble that it expects. A
/// layer's backward is taken to cost twice its forward.
std::string describe(const Layout& layout, std::span<const double> layers, std::span<const std::int64_t> cuts);

}  // namespace cohort::pipeline
