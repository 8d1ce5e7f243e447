// What a person can try after a rank has failed, from how it ended and what it said last. Pure; any thread.
#pragma once

#include "launch/watch/post_mortem.h"

#include <string>

namespace cohort::launch {

/// One sentence or two: the likely reason and the way out. Empty where the rank's own words have to do.
std::string advice(const Ending& ending);

}  // namespace cohort::launch
