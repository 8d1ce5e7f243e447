// `cohort doctor --build`: lists what this build and this machine have, with versions, or why something is missing and
// what to install.
#pragma once

namespace cohort::app {

/// Prints to stdout. Blocks while Python imports the frameworks, at most 120 s.
void print_build();

}  // namespace cohort::app
