// `cohort doctor --build`: what this build and this machine have, with versions, or the reason why not and what to
// install.
#pragma once

namespace cohort::app {

/// Prints to stdout. Blocks while Python imports the frameworks, 120 s at most.
void print_build();

}  // namespace cohort::app
