// Finds the one among several addresses where the right peer listens: all are tried at once, and only who proves the
// secret counts, so that an address which means somebody else here (a docker bridge, a tunnel) does no harm. Blocks
// until the deadline at most; any thread.
#pragma once

#include "net/address.h"
#include "net/deadline.h"
#include "net/secret.h"
#include "net/secure_connection.h"

#include <span>

namespace cohort::net {

/// Addresses are numeric. Fails with PeerLost where somebody has answered and closed before it was proved who is there
/// (a full house: it may be worth another try), else with Unavailable, or Timeout; names what became of each address.
Result<SecureConnection> reach(std::span<const Endpoint> endpoints, const Secret& secret, const SecureOptions& options,
                               Deadline deadline);

}  // namespace cohort::net
