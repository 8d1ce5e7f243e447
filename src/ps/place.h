// Where servers listen, and with which secret they are reached. Any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/rpc.h"

#include <string>

namespace cohort::ps {

inline constexpr const char* kPurpose = "parameter server";

/// Where a server listens that was not told: where the other processes of its job reach this host, of COHORT_NETWORK's
/// addresses if that is set; in no job on this host alone. With a port of the system's choice.
Result<std::string> own_endpoint();
/// "HOST:PORT" or "@NAME".
Result<net::Endpoint> parse_endpoint(const std::string& text);
/// How the server is reached: with the secret of the file, or the job's, but for Unix names. Without one: a loopback
/// address by a Unix name made from its port; elsewhere if the network is trusted.
Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file);

}  // namespace cohort::ps
