// What this process runs, as facts that ranks of one job share: the executable by its build id, and the libtorch that
// is loaded. Two ranks that differ here would train different things and agree on nothing. Any thread.
#pragma once

#include <string>

namespace cohort::cluster {

/// The executable: "train (build id 1f0c...)"; "train (4711 bytes)" where the linker wrote none.
std::string own_executable();

/// "2.5.1+cpu" of the libtorch that this process has loaded, "1.13" where only the library's name says it; empty if it
/// has loaded none (yet).
std::string loaded_torch();

}  // namespace cohort::cluster
