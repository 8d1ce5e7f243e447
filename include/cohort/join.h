// How a process becomes a rank: find out who it is, meet the others, form the communicator.
// `join` may be called from several threads at once; each call makes its own communicator.
#pragma once

#include <cohort/communicator.h>
#include <cohort/join_options.h>

#include <string>

namespace cohort {

/// Throws InvalidArgument when sources contradict each other (the message names both), Mismatch when ranks differ in
/// what they run: the program, the build of Cohort, or the version of the libtorch that they have loaded; Timeout when
/// ranks do not appear (it names them), Unavailable when there is no secret and one is needed, PeerLost when one dies
/// meanwhile. In an elastic job (`cohort run --min-np`) the job's membership says which rank of how many this process
/// is; a rank that dies meanwhile is no error, since the others form the next epoch's world, and Aborted says that the
/// job has removed this process.
Communicator join(const JoinOptions& options = {});

/// Forms, in an elastic job, a group of some members of the epoch whose world this process has joined last under the
/// group_name `world`. Only they call it; `options` has world_size, this process's rank in the group, a group_name that
/// is the group's alone, and timeouts. Throws what `join` does, and Aborted when a later epoch begins.
Communicator join_part(const std::string& world, const JoinOptions& options);

}  // namespace cohort
