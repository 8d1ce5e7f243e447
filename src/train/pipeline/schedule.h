// Schedule of each rank of a pipeline: a list of actions, in order. Between two stages on different ranks a Forward is
// followed by sending its output to the next stage's, and a Backward or BackwardInput by sending the gradient back;
// receives are implied in the same way. Pure. Sends do not wait for their receivers, and for each stage both forwards
// and backwards come by ascending micro-batch, whatever the schedule: so gradients are summed in the same order.
#pragma once

#include <cohort/pipeline.h>

#include <functional>
#include <vector>

namespace cohort::pipeline {

enum class Kind : std::uint8_t {
  Forward,
  Backward,        ///< both parts
  BackwardInput,   ///< the gradient of the stage's input, which the stage before waits for
  BackwardWeight,  ///< those of its parameters
};
std::string_view to_string(Kind kind) noexcept;

struct Action {
  Kind kind = Kind::Forward;
  int stage = 0;
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
};

/// `layout` has been checked.
std::vector<Action> actions_of(const Layout& layout, int rank);
/// Forwards alone.
std::vector<Action> forwards_of(const Layout& layout, int rank);

/// Plays what all ranks do.
struct Played {
  bool whole = true;         ///< false: a rank waits for ever; times are those until then
  double end = 0;            ///< of the last action
  std::vector<double> busy;  ///< by rank
};
using Duration = std::function<double(int rank, const Action& action)>;
/// `delay` is that of the message which the action waits for.
Played play(const std::vector<std::vector<Action>>& ranks, int stages, const Duration& duration,
            const Duration& delay = {});

}  // namespace cohort::pipeline
