// Forms a world: finds out this process's rank, meets the other ranks, and makes their communicator. `init` keeps no
// global state: each call, from any thread, forms a world of its own.
#pragma once

#include <cohort/communicator.h>
#include <cohort/init_options.h>

#include <string>

namespace cohort {

/// Throws InvalidArgument when sources (options, variables) contradict each other (the message names both), Mismatch
/// when ranks differ in what they run: the program, the build of Cohort, or the version of the libtorch that they have
/// loaded; Timeout when ranks do not appear (the message names them), Unavailable when a secret is needed and there is
/// none, PeerLost when a rank dies meanwhile. In an elastic job (`cohort run --min-np`) the job's membership determines
/// this process's rank and the world's size. There, a rank that dies meanwhile is no error, since the others form the
/// next epoch's world; Aborted means that the job has removed this process.
Communicator init(const InitOptions& options = {});

/// In an elastic job, forms a group of some members of an epoch, the one whose world this process formed last under the
/// group_name `world`. Only those members call it; `options` has world_size, this process's rank in the group, a
/// group_name that no other group has, and timeouts. Throws what `init` does, and Aborted when a later epoch begins.
Communicator init_part(const std::string& world, const InitOptions& options);

}  // namespace cohort
