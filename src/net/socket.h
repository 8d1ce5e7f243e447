// Stream sockets: listen, connect, identify the peer. All sockets are CLOEXEC and non-blocking, TCP ones NODELAY.
// Functions are free of state and may be called from any thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/address.h"

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace cohort::net {

/// Listens. Port 0 lets the system choose one; `local_endpoint` returns it. Fails with Unavailable; if the address is
/// in use, the message names the process that uses it, provided that /proc shows it.
Result<sys::UniqueFd> listen_on(const Endpoint& endpoint);
/// Listens on all addresses of this host, on those of IPv4 alone where it has no IPv6.
Result<sys::UniqueFd> listen_everywhere(std::uint16_t port);
/// Address to which the socket is bound.
Result<Endpoint> local_endpoint(int fd);
/// Address of the other end. IPv4 addresses are in IPv4 notation even on an IPv6 socket.
Result<Endpoint> peer_endpoint(int fd);
/// "127.0.0.1:40312", or "pid 4711 (uid 1000)" over a Unix socket. For messages.
std::string describe_peer(int fd);

/// Accepts one pending connection; nullopt if there is none.
Result<std::optional<sys::UniqueFd>> accept_one(int listener);
/// Also stores the peer's address in `from` and `size`, like accept(2).
Result<std::optional<sys::UniqueFd>> accept_one(int listener, sockaddr_storage& from, socklen_t& size);

enum class ConnectFailure { NameUnknown, Refused, NoAnswer, Other };
struct ConnectError {
  ConnectFailure kind = ConnectFailure::Other;
  Error error;
};
/// Tries each address of the name once. Never waits past the deadline.
tl::expected<sys::UniqueFd, ConnectError> connect_once(const Endpoint& endpoint, Deadline deadline);

/// Waits until `fd` has one of `events` (POLLIN, POLLOUT) or an error. Returns false if the deadline has passed.
Result<bool> wait_ready(int fd, short events, Deadline deadline);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
/// Credentials of the other end of a Unix socket, as the kernel recorded them.
Result<PeerCredentials> peer_credentials(int fd);

/// True if all addresses of the name belong to this host. Fails with Unavailable if the name does not resolve.
Result<bool> is_local_host(const std::string& host, Deadline deadline);

// Resolves host names with a deadline, which getaddrinfo(3) lacks. Any thread may call.

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

/// Returns all stream addresses of the name, in the system's order. Fails with Unavailable if the name is unknown or
/// the name service does not answer by the deadline.
Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline);

// Detects that the host at the other end of a connection has stopped answering. Free of state; any thread may call.

/// Makes the kernel probe the other end once a second, also on an idle connection. The other end's kernel answers, so a
/// process that is stopped or busy is not taken for dead.
void watch_link(int fd);
/// Returns the time since the last sign of life from the other end's kernel. Fails with Io.
Result<std::chrono::milliseconds> link_silence(int fd);

}  // namespace cohort::net
