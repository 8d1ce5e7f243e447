// Addresses of a job's servers: each server announces its own address, and callers wait until all servers have
// (docs/roles.md). Addresses go through the store of `cohort run`; without it, TF_CONFIG lists them. Any thread; each
// call makes its own connection.
#pragma once

#include <chrono>
#include <string>
#include <vector>

namespace cohort {

/// Announces the address at which this server already listens ("10.0.0.7:4711", or any text by which others reach the
/// server) to `server_addresses` in the job's other processes. Throws InvalidArgument in a process that is no server,
/// Unavailable without `cohort run`. Does nothing if TF_CONFIG, without `cohort run`, lists the servers.
void announce_server(const std::string& address);

/// Waits until all servers have announced their addresses, and returns them by the servers' numbers; empty if the job
/// has no servers. Throws Timeout, naming the servers that have not announced, and Unavailable, naming a server that
/// ended without announcing.
std::vector<std::string> server_addresses(std::chrono::milliseconds timeout = std::chrono::seconds(60));

}  // namespace cohort
