// How the launchers of one Slurm step find each other: the one of task 0 hands a fresh secret and its addresses to the
// others through what Slurm gives its tasks (PMI, PMIx, MUNGE), as rank 0 does where srun starts the ranks themselves.
// It happens in a child: a launcher may have no second thread, and PMI is for one process of a task, once.
#pragma once

#include "base/result.h"
#include "cluster/detect.h"
#include "meet/place.h"
#include "net/address.h"

#include <optional>

namespace cohort::launch {

/// Of task 0, `mine`; to be told to all others. Returns what task 0 gave. For task 0 it may return before all others
/// have asked: the child goes on telling them until the deadline, or until this process ends. Unavailable or Timeout
/// where they cannot find each other. Call it before this process has a second thread.
Result<meet::JoinOffer> meet_in_step(const cluster::Detected& step, const cluster::Environment& environment,
                                     const std::optional<meet::JoinOffer>& mine, net::Deadline deadline);

}  // namespace cohort::launch
