// The guard: see agent.h.
#pragma once

#include <functional>

namespace cohort::launch {

/// Forks `agent` into a child, waits for it, then ends every process that it has left. If `lifeline_fd` ends, the agent
/// has a moment to end the job by itself. Returns the agent's exit status. The child gets SIGTERM if the guard dies.
int run_guarded(int lifeline_fd, const std::function<int()>& agent);

}  // namespace cohort::launch
