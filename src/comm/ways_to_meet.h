// What a process has with which it can meet ranks on other hosts, for those who choose a way for all ranks of a world
// (Python's init_process_group and init). Any thread.
#pragma once

#include "cluster/detect.h"
#include "net/secret.h"

#include <optional>

namespace cohort::comm {

enum class WayToMeet {
  None,      ///< neither of the following
  Secret,    ///< the job's (COHORT_SECRET_FD, COHORT_SECRET_FILE), or that of a world formed through the launcher
  Launcher,  ///< its own meeting place (PMI, PMIx, MUNGE): `join` without options forms the world of this rank and size
  TorchsStore,  ///< torchrun on several hosts: its agent holds MASTER_PORT, and torch's store is there
};

/// For the world of `size` ranks in which this process is `rank`; -1: of the size that its launcher says. Does not
/// throw: whatever is wrong with the environment is for `join` to say.
WayToMeet way_to_meet(int rank, int size, const cluster::Environment& environment);

/// The ranks of a world that has been formed through a launcher's meeting place have a secret in common from then on.
void keep_launchers_secret(const net::Secret& of_the_meeting);
std::optional<net::Secret> launchers_secret();

}  // namespace cohort::comm
