// Stream sockets: listen, connect, identify the peer. All sockets are CLOEXEC and non-blocking, TCP ones NODELAY.
// Functions are free of state and may be called from any thread.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"
#include "net/address.h"

#include <sys/socket.h>
#include <sys/types.h>

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace cohort::net {

/// Listens. Port 0 lets the system choose one: ask `local_endpoint`. Fails with Unavailable; if the place is taken the
/// message names the process that holds it, where /proc shows it.
Result<sys::UniqueFd> listen_on(const Endpoint& endpoint);
/// Address to which the socket is bound.
Result<Endpoint> local_endpoint(int fd);
/// Address of the other end; IPv4 in its own spelling also where the socket is an IPv6 one.
Result<Endpoint> peer_endpoint(int fd);
/// "127.0.0.1:40312", or "pid 4711 (uid 1000)" over a Unix socket. For messages.
std::string describe_peer(int fd);

/// One pending connection; nullopt if there is none.
Result<std::optional<sys::UniqueFd>> accept_one(int listener);
/// Accepts, and gives where the connection comes from, as accept(2) does.
Result<std::optional<sys::UniqueFd>> accept_one(int listener, sockaddr_storage& from, socklen_t& size);

enum class ConnectFailure { NameUnknown, Refused, NoAnswer, Other };
struct ConnectError {
  ConnectFailure kind = ConnectFailure::Other;
  Error error;
};
/// One attempt over all addresses of the name. Never waits past the deadline.
tl::expected<sys::UniqueFd, ConnectError> connect_once(const Endpoint& endpoint, Deadline deadline);

/// Waits until `events` (POLLIN, POLLOUT) or an error shows on `fd`. False when the deadline has passed.
Result<bool> wait_ready(int fd, short events, Deadline deadline);

struct PeerCredentials {
  pid_t pid = 0;
  uid_t uid = 0;
};
/// Credentials of the other end of a Unix socket, as the kernel recorded them.
Result<PeerCredentials> peer_credentials(int fd);

/// True if all addresses of the name belong to this host. Fails with Unavailable if the name does not resolve.
Result<bool> is_local_host(const std::string& host, Deadline deadline);

// Host names to socket addresses, with a deadline, which getaddrinfo(3) alone does not have. Any thread may call.

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

/// All stream addresses of the name, in the system's order. Fails with Unavailable: name unknown, or no answer from
/// the name service by the deadline.
Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline);

// How long the host at the other end of a connection has been silent. Free of state; any thread may call.

/// Has the kernel ask the other end once a second, also while nothing is said, whether it is still there. Only the
/// other kernel's silence counts, so that a process which is stopped or busy is not taken for dead.
void watch_link(int fd);
/// Since the last sign of life from the other end's kernel. Fails with Io.
Result<std::chrono::milliseconds> link_silence(int fd);

}  // namespace cohort::net
