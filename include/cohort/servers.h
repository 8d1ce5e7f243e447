// Addresses of a job's servers: each server announces its own, and callers wait until all have (docs/roles.md). They go
// through the store of `cohort run`; under TF_CONFIG alone the cluster gives them. Any thread; each call connects anew.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace cohort {

/// Says where this server listens ("10.0.0.7:4711", or what else others reach it by), for `server_addresses` of the
/// job's other processes; once it does. Throws InvalidArgument in a process that is no server, Unavailable without
/// `cohort run`. Under TF_CONFIG alone nothing is to be done.
void announce_server(const std::string& address);

/// Addresses by number, once all servers have announced theirs; none if the job has none. Throws Timeout, naming the
/// servers that have not, and Unavailable, naming one that has ended before it did.
std::vector<std::string> server_addresses(std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace cohort
