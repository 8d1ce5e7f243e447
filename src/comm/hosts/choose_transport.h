// Which transport a world has between its hosts: TCP, or MPI over it. The only place of hosts/ that knows them by name.
#pragma once

#include "comm/communicator_impl.h"
#include "transport/tcp/tcp_transport.h"
#include "transport/transport.h"

#include <memory>

namespace cohort::comm::hosts {

/// Adds to a rank's description what the others need to know for the world's transport. Where that is MPI, the first
/// call in a process begins it, collectively. Throws why it is not there.
void complete_info(transport::tcp::PeerInfo& info, const FormOptions& options);

/// Throws Mismatch where the ranks cannot reach each other by it.
std::unique_ptr<transport::Transport> make_transport(const FormOptions& options,
                                                     transport::tcp::TcpTransport::Options tcp,
                                                     transport::tcp::Listeners listeners,
                                                     transport::TransportEvents& events);

}  // namespace cohort::comm::hosts
