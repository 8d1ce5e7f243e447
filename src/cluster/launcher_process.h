// The launcher's process on this host, from which all ranks of its job descend: it tells one job from another where the
// launcher's variables do not (Hydra's). Reads /proc; any thread.
#pragma once

#include <optional>
#include <string>

namespace cohort::cluster {

/// The nearest ancestor that is a launcher's daemon, as "hydra_pmi_proxy 4711 8836124" (name, pid, start time): equal
/// for the ranks that it has started, whatever shells stand in between. nullopt if there is none.
std::optional<std::string> launcher_process();

}  // namespace cohort::cluster
