// The guard: see agent.h.
#pragma once

#include <functional>

namespace cohort::launch {

/// What becomes of a signal that is to end the guard: its agent gets SIGTERM, by which it ends, or the same one.
enum class Passes { AsTerm, Unchanged };

/// Forks `agent` into a child, waits for it, then ends every process that it has left. If `lifeline_fd` ends, the agent
/// has a moment to end the job by itself. Returns the agent's exit status. The child gets SIGTERM if the guard dies.
int run_guarded(int lifeline_fd, const std::function<int()>& agent, Passes passes = Passes::AsTerm);

}  // namespace cohort::launch
