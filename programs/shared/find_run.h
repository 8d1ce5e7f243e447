// The run that a command is about (two commands ask).
#pragma once

#include <filesystem>

namespace cohort::app {

/// The folder of a run: as given, or the newest in ./runs. Throws Unavailable where there is none.
std::filesystem::path find_run(const std::filesystem::path& given);

}  // namespace cohort::app
