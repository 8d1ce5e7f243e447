// What of an environment goes along to another host, and what of that host's own takes its place. Pure.
#pragma once

#include "launch/processes.h"

#include <string_view>

namespace cohort::launch {

/// It says something about one host or one login (HOME, TMPDIR, DISPLAY, SSH_..., the GPUs that a scheduler gave).
bool belongs_to_host(std::string_view name);

/// `own` is the agent's environment: what belongs to a host comes from there, unless `travelled` insists on it.
Environment environment_there(const Environment& travelled, const Environment& own);

}  // namespace cohort::launch
