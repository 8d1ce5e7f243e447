// Schedule of each rank of a pipeline: an ordered list of actions. Between two stages on different ranks, a Forward is
// followed by sending its output to the next stage's rank, and a Backward or BackwardInput by sending the gradient
// back; receives are implied in the same way. Pure. Sends do not wait for their receivers. For each stage, forwards and
// backwards are in the order of ascending micro-batches in every schedule, so gradients are summed in the same order.
#pragma once

#include <cohort/pipeline.h>

#include <functional>
#include <vector>

namespace cohort::pipeline {

enum class Kind : std::uint8_t {
  Forward,
  Backward,        ///< both parts
  BackwardInput,   ///< the gradient of the stage's input; the stage before waits for it
  BackwardWeight,  ///< the gradients of the stage's parameters
};
std::string_view to_string(Kind kind) noexcept;

struct Action {
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};

/// Returns the actions of a rank. `layout` has to have been checked.
std::vector<Action> actions_of(const Layout& layout, int rank);
/// Returns only the forwards.
std::vector<Action> forwards_of(const Layout& layout, int rank);

/// Result of a simulation of all ranks.
struct Played {
  bool whole = true;         ///< false: a rank waits for ever; the times end there
  double end = 0;            ///< time when the last action ends
  std::vector<double> busy;  ///< busy time by rank
};
using Duration = std::function<double(int rank, const Action& action)>;
/// Simulates the ranks' actions. `delay`: transfer time of the message that an action waits for.
Played play(const std::vector<std::vector<Action>>& ranks, int stages, const Duration& duration,
            const Duration& delay = {});

}  // namespace cohort::pipeline
