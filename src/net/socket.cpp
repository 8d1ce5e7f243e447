#include "net/socket.h"

#include "base/files.h"
#include "base/parse.h"
#include "base/thread.h"
#include "net/http.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <condition_variable>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <sstream>
#include <system_error>

namespace cohort::net {
namespace {

tl::unexpected<Error> bad_address(std::string_view text, std::string_view why) {
  return fail(ErrorCode::InvalidArgument,
              "'{}' is not an address: {} -- write host:port or [IPv6]:port, as in node1:29500 or [::1]:29500", text,
              why);
}

}  // namespace

Result<Address> parse_address(std::string_view text) {
  const std::size_t colon = text.rfind(':');
  if (colon == std::string_view::npos) return bad_address(text, "there is no port");
  std::string_view host = text.substr(0, colon);
  const auto port = parse_integer<std::uint16_t>(text.substr(colon + 1));
  if (!port) return bad_address(text, "the port is not a number from 0 to 65535");
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
    const std::string address(host.substr(0, host.find('%')));
    in6_addr ignored{};
    if (::inet_pton(AF_INET6, address.c_str(), &ignored) != 1)
      return bad_address(text, "no IPv6 address in the brackets");
  } else if (host.find(':') != std::string_view::npos) {
    return bad_address(text, "an IPv6 address has to stand in brackets");
  }
  if (host.empty()) return bad_address(text, "there is no host");
  if (host.size() > 255) return bad_address(text, "the host name is longer than 255 bytes");
  for (const char c : host) {
    if (static_cast<unsigned char>(c) <= ' ' || c == '/' || c == '[' || c == ']' || c == 0x7f) {
      return bad_address(text, "a character that no host name has");
    }
  }
  return Address{std::string(host), *port};
}

std::string to_string(const Address& address) {
  const bool v6 = address.host.find(':') != std::string::npos;
  return v6 ? fmt::format("[{}]:{}", address.host, address.port) : fmt::format("{}:{}", address.host, address.port);
}

bool is_loopback_name(std::string_view host) {
  const std::string text(host);
  in_addr v4{};
  if (::inet_pton(AF_INET, text.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6{};
  if (::inet_pton(AF_INET6, text.c_str(), &v6) == 1) return IN6_IS_ADDR_LOOPBACK(&v6);
  return host == "localhost" || host == "ip6-localhost" || host.ends_with(".localhost");
}

Endpoint any_loopback_port() { return {{"127.0.0.1", 0}, {}}; }

std::string to_string(const Endpoint& endpoint) {
  return endpoint.is_unix() ? fmt::format("@{}", endpoint.unix_name) : to_string(endpoint.tcp);
}

namespace {

// A name lookup in a thread, owned by the thread and its caller together. If the caller stops waiting, the resolver's
// own timeout (resolv.conf) limits how long the thread continues.
struct Lookup {
  std::string host, port;
  addrinfo hints{};
  std::mutex mutex;
  std::condition_variable ended;
  bool over = false;
  int code = 0;
  int error_number = 0;
  addrinfo* list = nullptr;
  ~Lookup() {
    if (list != nullptr) ::freeaddrinfo(list);
  }
};

// Starts the thread. glibc's getaddrinfo_a is not used: ThreadSanitizer does not know its thread, and crashes.
void start(const std::shared_ptr<Lookup>& lookup) {
  sys::start_without_signals([lookup] {
    addrinfo* list = nullptr;
    const int code = ::getaddrinfo(lookup->host.c_str(), lookup->port.c_str(), &lookup->hints, &list);
    const int error_number = errno;
    const std::lock_guard lock(lookup->mutex);
    lookup->list = list;
    lookup->code = code;
    lookup->error_number = error_number;
    lookup->over = true;
    lookup->ended.notify_one();
  }).detach();
}

std::vector<SocketAddress> copy_list(const addrinfo* list) {
  std::vector<SocketAddress> result;
  for (; list != nullptr; list = list->ai_next) {
    if (list->ai_addrlen > sizeof(sockaddr_storage)) continue;
    SocketAddress address;
    std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
    address.size = list->ai_addrlen;
    result.push_back(address);
  }
  return result;
}

tl::unexpected<Error> unknown_name(const std::string& host, int code, int error_number) {
  return fail(ErrorCode::Unavailable,
              "the host name '{}' does not resolve: {} -- check its spelling, /etc/hosts and DNS", host,
              code == EAI_SYSTEM ? errno_text(error_number) : ::gai_strerror(code));
}

}  // namespace

Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline) {
  const auto lookup = std::make_shared<Lookup>();
  lookup->host = address.host;
  lookup->port = std::to_string(address.port);
  lookup->hints.ai_socktype = SOCK_STREAM;
  // Numeric addresses need neither a name service nor a thread.
  lookup->hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  if (::getaddrinfo(lookup->host.c_str(), lookup->port.c_str(), &lookup->hints, &lookup->list) == 0)
    return copy_list(lookup->list);
  lookup->hints.ai_flags = AI_NUMERICSERV;
  try {
    start(lookup);
  } catch (const std::system_error& error) {
    return fail(ErrorCode::Unavailable,
                "cannot look up '{}': no thread for it ({}) -- raise ulimit -u, or give a numeric address",
                address.host, error.what());
  }
  std::unique_lock lock(lookup->mutex);
  if (!lookup->ended.wait_until(lock, deadline, [&] { return lookup->over; })) {
    return fail(ErrorCode::Unavailable,
                "no answer from the name service about '{}' in time -- check DNS, or give a numeric address",
                address.host);
  }
  if (lookup->code != 0) return unknown_name(address.host, lookup->code, lookup->error_number);
  return copy_list(lookup->list);
}

namespace {

// Finds the process that holds a port: the socket's inode from /proc/net, its owner from /proc/PID/fd.

std::string inode_of_tcp_listener(std::uint16_t port) {
  const std::string wanted = fmt::format(":{:04X}", port);
  for (const char* path : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream table(path);
    std::string line;
    while (std::getline(table, line)) {
      // sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode
      std::istringstream fields(line);
      std::array<std::string, 10> field;
      for (std::string& text : field) fields >> text;
      if (field[1].ends_with(wanted) && field[3] == "0A") return field[9];
    }
  }
  return {};
}

std::string inode_of_unix_listener(const std::string& name) {
  std::ifstream table("/proc/net/unix");
  std::string line;
  while (std::getline(table, line)) {
    // Num RefCount Protocol Flags Type St Inode Path; flag 00010000 marks a listener
    std::istringstream fields(line);
    std::array<std::string, 8> field;
    for (std::string& text : field) fields >> text;
    if (field[7] == "@" + name && field[3] == "00010000") return field[6];
  }
  return {};
}

bool has_socket(const std::string& process, const std::string& link) {
  const std::string folder = "/proc/" + process + "/fd";
  const std::unique_ptr<DIR, int (*)(DIR*)> descriptors(::opendir(folder.c_str()), ::closedir);
  if (!descriptors) return false;
  while (const dirent* entry = ::readdir(descriptors.get())) {
    char target[64];
    const ssize_t n = ::readlink((folder + "/" + entry->d_name).c_str(), target, sizeof target);
    if (n > 0 && std::string_view(target, static_cast<std::size_t>(n)) == link) return true;
  }
  return false;
}

std::string command_line(const std::string& process) {
  return as_line(sys::read_text("/proc/" + process + "/cmdline").value_or(std::string()), 120);
}

/// Returns the process that listens at the endpoint, e.g. "pid 4711 (python3 train.py)"; empty if /proc does not show
/// it.
std::string describe_holder(const Endpoint& endpoint) {
  const std::string inode =
      endpoint.is_unix() ? inode_of_unix_listener(endpoint.unix_name) : inode_of_tcp_listener(endpoint.tcp.port);
  if (inode.empty() || inode == "0") return {};
  const std::string link = "socket:[" + inode + "]";
  const std::unique_ptr<DIR, int (*)(DIR*)> processes(::opendir("/proc"), ::closedir);
  if (!processes) return {};
  while (const dirent* entry = ::readdir(processes.get())) {
    const std::string process = entry->d_name;
    if (process.find_first_not_of("0123456789") != std::string::npos) continue;
    if (has_socket(process, link)) return fmt::format("pid {} ({})", process, command_line(process));
  }
  return {};
}

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
    // An IPv4 peer of a dual-stack socket.
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

// Connects one socket. Returns 0 when connected, else the errno; ETIMEDOUT if there is no answer by the deadline.
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
    // The wildcard address includes IPv4, regardless of net.ipv6.bindv6only.
    const int off = 0;
    if (address.storage.ss_family == AF_INET6 && endpoint.tcp.host == "::")
      ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) == 0 &&
        ::listen(fd.get(), SOMAXCONN) == 0) {
      return fd;
    }
    error_number = errno;
    if (error_number == EADDRINUSE) break;  // peers would not try another address of this name
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

Result<sys::UniqueFd> listen_everywhere(std::uint16_t port) {
  auto both = listen_on({{"::", port}, {}});
  return both ? std::move(both) : listen_on({{"0.0.0.0", port}, {}});
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
      // The connection has failed while it was queued, which is no error of the listener (accept(2), "Error handling").
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
      // A first address that does not answer must not use up the time of the others.
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
  // EAGAIN: the queue of a Unix listener is full; a later attempt can succeed.
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

void watch_link(int fd) {
  const int on = 1, seconds = 1, probes = 127;  // the callers of `link_silence` limit a peer's silence, not the kernel
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &seconds, sizeof seconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &seconds, sizeof seconds);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &probes, sizeof probes);
}

Result<std::chrono::milliseconds> link_silence(int fd) {
  tcp_info info{};
  socklen_t size = sizeof info;
  if (::getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) != 0) {
    return fail(ErrorCode::Io, "TCP_INFO: {}", errno_text(errno));
  }
  return std::chrono::milliseconds(std::min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv));
}

}  // namespace cohort::net
