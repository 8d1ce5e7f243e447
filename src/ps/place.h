// Where servers listen, and with which secret they are reached. Any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/rpc.h"

#include <string>

namespace cohort::ps {

inline constexpr const char* kPurpose = "parameter server";

/// "HOST:PORT" or "@NAME".
Result<net::Endpoint> parse_endpoint(const std::string& text);
/// How the server is reached: with the secret of the file, or the job's, but for Unix names.
Result<net::RpcPlace> place_of(const std::string& endpoint, const std::string& secret_file);

}  // namespace cohort::ps
