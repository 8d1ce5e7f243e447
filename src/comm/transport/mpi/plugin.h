// Finds the plug-in for the MPI whose launcher started this process, and loads it: the one library through which an
// MPI is reached. It is never unloaded. Any thread.
#pragma once

#include "base/result.h"
#include "comm/transport/mpi/cohort_mpi.h"
#include "rendezvous/detect.h"

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::mpi {

struct Plugin {
  const CohortMpi* mpi = nullptr;
  std::string path;
};

/// The folders in which plug-ins are looked for, the user's own first.
std::vector<std::filesystem::path> plugin_folders(const rendezvous::Environment& environment);

/// That of this process and its environment: loaded at the first call that succeeds.
Result<Plugin> plugin_of_process();

/// The plug-ins that may be used, for whichever MPI.
std::vector<std::filesystem::path> installed_plugins(const rendezvous::Environment& environment);

/// Loads this one and checks its table.
Result<Plugin> open_plugin(const std::filesystem::path& path);

/// What a plug-in's file is called: "cohort-mpi-FAMILY-VERSION.so".
inline constexpr std::string_view kPluginPrefix = "cohort-mpi-";

}  // namespace cohort::mpi
