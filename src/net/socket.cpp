#include "net/socket.h"

#include "net/resolve.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstring>
#include <memory>

namespace cohort::net {
namespace {

constexpr int kSocketFlags = SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK;

Result<SocketAddress> unix_address(const std::string& name) {
  SocketAddress result;
  auto* address = reinterpret_cast<sockaddr_un*>(&result.storage);
  if (name.size() + 1 > sizeof address->sun_path) {
    return fail(ErrorCode::InvalidArgument, "the Unix name '{}' is longer than {} bytes", name,
                sizeof address->sun_path - 1);
  }
  address->sun_family = AF_UNIX;
  std::memcpy(address->sun_path + 1, name.data(), name.size());
  result.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  return result;
}

Endpoint to_endpoint(const sockaddr_storage& storage, socklen_t size) {
  Endpoint endpoint;
  char text[INET6_ADDRSTRLEN] = "";
  if (storage.ss_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(&storage);
    ::inet_ntop(AF_INET, &v4->sin_addr, text, sizeof text);
    endpoint.tcp = {text, ntohs(v4->sin_port)};
  } else if (storage.ss_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(&storage);
    // An IPv4 peer of a socket that takes both.
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr))
      ::inet_ntop(AF_INET, &v6->sin6_addr.s6_addr[12], text, sizeof text);
    else
      ::inet_ntop(AF_INET6, &v6->sin6_addr, text, sizeof text);
    endpoint.tcp = {text, ntohs(v6->sin6_port)};
  } else if (storage.ss_family == AF_UNIX && size > offsetof(sockaddr_un, sun_path) + 1) {
    const auto* local = reinterpret_cast<const sockaddr_un*>(&storage);
    endpoint.unix_name.assign(local->sun_path + 1, size - offsetof(sockaddr_un, sun_path) - 1);
  }
  return endpoint;
}

void set_no_delay(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);  // fails on Unix sockets, harmlessly
}

// Connects one socket; the errno of the failure, ETIMEDOUT for "no answer by the deadline", 0 when connected.
int connect_socket(int fd, const SocketAddress& address, Deadline deadline) {
  if (::connect(fd, reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0) return 0;
  if (errno != EINPROGRESS && errno != EINTR) return errno;
  const auto ready = wait_ready(fd, POLLOUT, deadline);
  if (!ready) return EIO;
  if (!*ready) return ETIMEDOUT;
  int error_number = 0;
  socklen_t size = sizeof error_number;
  if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error_number, &size) != 0) return errno;
  return error_number;
}

ConnectError connect_error(ConnectFailure kind, Error error) { return {kind, std::move(error)}; }

}  // namespace

Result<sys::UniqueFd> listen_on(const Endpoint& endpoint) {
  std::vector<SocketAddress> addresses;
  if (endpoint.is_unix()) {
    auto address = unix_address(endpoint.unix_name);
    if (!address) return tl::unexpected(address.error());
    addresses.push_back(*address);
  } else {
    auto resolved = resolve(endpoint.tcp, deadline_in(std::chrono::seconds(30)));
    if (!resolved) return tl::unexpected(resolved.error());
    addresses = *std::move(resolved);
  }
  int error_number = EADDRNOTAVAIL;
  for (const SocketAddress& address : addresses) {
    sys::UniqueFd fd(::socket(address.storage.ss_family, kSocketFlags, 0));
    if (!fd) {
      error_number = errno;
      continue;
    }
    const int on = 1;
    if (!endpoint.is_unix()) ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0 &&
        ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    error_number = errno;
    if (error_number == EADDRINUSE) break;  // another of its addresses would not be where the others look
  }
  if (error_number == EADDRINUSE) {
    const std::string holder = describe_holder(endpoint);
    return fail_system(error_number, ErrorCode::Unavailable,
                       "cannot listen at {}: {}{}{} -- choose another {}, or end that process", to_string(endpoint),
                       errno_text(error_number), holder.empty() ? "" : "; held by ", holder,
                       endpoint.is_unix() ? "name" : "port");
  }
  if (error_number == EADDRNOTAVAIL) {
    return fail_system(error_number, ErrorCode::Unavailable,
                       "cannot listen at {}: {} -- it is not an address of this host", to_string(endpoint),
                       errno_text(error_number));
  }
  return fail_system(error_number, ErrorCode::Unavailable, "cannot listen at {}: {}", to_string(endpoint),
                     errno_text(error_number));
}

Result<Endpoint> local_endpoint(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return fail(ErrorCode::Io, "getsockname: {}", errno_text(errno));
  }
  return to_endpoint(storage, size);
}

Result<Endpoint> peer_endpoint(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) {
    return fail(ErrorCode::Io, "getpeername: {}", errno_text(errno));
  }
  return to_endpoint(storage, size);
}

std::string describe_peer(int fd) {
  sockaddr_storage storage{};
  socklen_t size = sizeof storage;
  if (::getpeername(fd, reinterpret_cast<sockaddr*>(&storage), &size) != 0) return "an unknown peer";
  if (storage.ss_family != AF_UNIX) return to_string(to_endpoint(storage, size).tcp);
  const auto credentials = peer_credentials(fd);
  if (!credentials) return "an unknown process";
  return fmt::format("pid {} (uid {})", credentials->pid, credentials->uid);
}

Result<std::optional<sys::UniqueFd>> accept_one(int listener) {
  sockaddr_storage from{};
  socklen_t size = sizeof from;
  return accept_one(listener, from, size);
}

Result<std::optional<sys::UniqueFd>> accept_one(int listener, sockaddr_storage& from, socklen_t& size) {
  const socklen_t room = size;
  while (true) {
    size = room;
    sys::UniqueFd fd(::accept4(listener, reinterpret_cast<sockaddr*>(&from), &size, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (fd) {
      set_no_delay(fd.get());
      return std::optional<sys::UniqueFd>(std::move(fd));
    }
    switch (errno) {
      // The connection died in the queue: not the listener's trouble (accept(2), "Error handling").
      case EINTR:
      case ECONNABORTED:
      case ENETDOWN:
      case EPROTO:
      case ENOPROTOOPT:
      case EHOSTDOWN:
      case ENONET:
      case EHOSTUNREACH:
      case EOPNOTSUPP:
      case ENETUNREACH: continue;
      case EAGAIN: return std::optional<sys::UniqueFd>();
      default: return fail(ErrorCode::Io, "cannot accept a connection: {}", errno_text(errno));
    }
  }
}

tl::expected<sys::UniqueFd, ConnectError> connect_once(const Endpoint& endpoint, Deadline deadline) {
  std::vector<SocketAddress> addresses;
  if (endpoint.is_unix()) {
    auto address = unix_address(endpoint.unix_name);
    if (!address) return tl::unexpected(connect_error(ConnectFailure::Other, address.error()));
    addresses.push_back(*address);
  } else {
    auto resolved = resolve(endpoint.tcp, deadline);
    if (!resolved) return tl::unexpected(connect_error(ConnectFailure::NameUnknown, resolved.error()));
    addresses = *std::move(resolved);
  }
  int first_error = 0;
  for (std::size_t i = 0; i < addresses.size(); ++i) {
    sys::UniqueFd fd(::socket(addresses[i].storage.ss_family, kSocketFlags, 0));
    int error_number = 0;
    if (!fd) {
      error_number = errno;
    } else {
      // A silent first address must not use up the time of the others.
      const auto left = deadline - std::chrono::steady_clock::now();
      const Deadline share = std::chrono::steady_clock::now() + left / static_cast<int>(addresses.size() - i);
      error_number = connect_socket(fd.get(), addresses[i], share);
    }
    if (error_number == 0) {
      set_no_delay(fd.get());
      return fd;
    }
    if (first_error == 0 || first_error == EAFNOSUPPORT || error_number == ETIMEDOUT) first_error = error_number;
  }
  // EAGAIN: a Unix listener whose queue is full; it will take us later.
  const ConnectFailure kind = first_error == ECONNREFUSED || first_error == EAGAIN ? ConnectFailure::Refused
                              : first_error == ETIMEDOUT || first_error == EHOSTUNREACH || first_error == ENETUNREACH
                                  ? ConnectFailure::NoAnswer
                                  : ConnectFailure::Other;
  auto failed = fail_system(first_error, ErrorCode::Unavailable, "cannot connect to {}: {}", to_string(endpoint),
                            errno_text(first_error));
  return tl::unexpected(connect_error(kind, std::move(failed).value()));
}

Result<bool> wait_ready(int fd, short events, Deadline deadline) {
  while (true) {
    pollfd entry{fd, events, 0};
    const int n = ::poll(&entry, 1, poll_timeout(deadline));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return fail(ErrorCode::Io, "poll: {}", errno_text(errno));
    if (passed(deadline)) return false;
  }
}

Result<PeerCredentials> peer_credentials(int fd) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) {
    return fail(ErrorCode::Io, "SO_PEERCRED: {}", errno_text(errno));
  }
  return PeerCredentials{credentials.pid, credentials.uid};
}

Result<bool> is_local_host(const std::string& host, Deadline deadline) {
  if (is_loopback_name(host)) return true;
  const auto addresses = resolve({host, 0}, deadline);
  if (!addresses) return tl::unexpected(addresses.error());
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) return fail(ErrorCode::Io, "getifaddrs: {}", errno_text(errno));
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, ::freeifaddrs);
  for (const SocketAddress& address : *addresses) {
    const std::string wanted = to_endpoint(address.storage, address.size).tcp.host;
    bool found = is_loopback_name(wanted);
    for (const ifaddrs* entry = list; entry != nullptr && !found; entry = entry->ifa_next) {
      if (entry->ifa_addr == nullptr) continue;
      const int family = entry->ifa_addr->sa_family;
      if (family != AF_INET && family != AF_INET6) continue;
      sockaddr_storage storage{};
      const socklen_t size = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
      std::memcpy(&storage, entry->ifa_addr, size);
      found = to_endpoint(storage, size).tcp.host == wanted;
    }
    if (!found) return false;
  }
  return true;
}

}  // namespace cohort::net
