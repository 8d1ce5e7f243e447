// How the ranks of a host come together: through the store they learn each other's Unix sockets, connect, prove that
// they belong to the same world (same user, and the token that only the store's users know), and map rank 0's control
// memory. Blocks the calling thread until all have met or the deadline has passed.
#pragma once

#include "comm/communicator_impl.h"
#include "comm/local/control.h"
#include "comm/local/mesh.h"
#include "sys/shared_memory.h"

#include <chrono>
#include <memory>

namespace cohort::comm::local {

struct Meeting {
  std::unique_ptr<Mesh> mesh;
  sys::Mapping control;
};

/// Throws Timeout naming the ranks that did not come, PeerLost if one dies meanwhile, Unavailable if there is not
/// enough memory, and the first failing rank's reason where another rank could not go on.
Meeting meet(const FormOptions& options);

}  // namespace cohort::comm::local
