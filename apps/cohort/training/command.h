// The sub-command of `cohort bench`.
#pragma once

#include <CLI/CLI.hpp>

namespace cohort::app::training {

/// Adds `training`, and `trainee`, which it starts.
void add_training(CLI::App& bench);

}  // namespace cohort::app::training
