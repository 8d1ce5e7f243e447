// Connects to a StoreServer. The store may be used by several threads: requests are numbered, so a wait in one thread
// does not hold up a set in another. It has no thread of its own. Not usable in a forked child (InvalidArgument).
#pragma once

#include "net/address.h"
#include "net/deadline.h"
#include "net/secret.h"
#include "store/meeting_store.h"

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace cohort::store {

struct StoreClientOptions {
  net::Endpoint endpoint;
  std::optional<net::Secret> secret = {};  ///< as the server's
  std::string meeting = {};                ///< as the server's
  /// For the calls that take no deadline of their own.
  std::chrono::milliseconds call_timeout = std::chrono::seconds(60);
};

/// Tries until the deadline, with growing pauses, since the server may not be up yet. Throws Timeout (nobody listens
/// there, or no answer: says which), Unavailable (the name does not resolve), InvalidArgument (authentication failed).
std::shared_ptr<MeetingStore> connect_store(const StoreClientOptions& options, net::Deadline deadline);

/// The same where one of several numeric addresses leads to the server: all are tried at once, and who proves the
/// secret counts. `options.endpoint` is not used.
std::shared_ptr<MeetingStore> connect_store_at_any(std::span<const net::Endpoint> endpoints,
                                                   const StoreClientOptions& options, net::Deadline deadline);

/// The usual case: TCP and a secret.
std::shared_ptr<MeetingStore> connect_tcp_store(const std::string& host, std::uint16_t port, const net::Secret& secret,
                                                net::Deadline deadline);

}  // namespace cohort::store
