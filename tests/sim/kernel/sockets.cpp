// Calls of sockets, addresses and names.
#include "kernel/network.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace sim {
namespace {

Host* host_at(std::uint32_t address) {
  if (address >> 24 == 127 || address == 0) return here()->host;
  const auto found = state->host_at.find(address);
  return found == state->host_at.end() ? nullptr : found->second;
}

/// The same for each way of writing it.
std::string resolved(const std::string& path) {
  const auto slash = path.rfind('/');
  char* const folder = REAL(realpath)(path.substr(0, slash).c_str(), nullptr);
  if (folder == nullptr) return path;
  std::string whole = std::string(folder) + path.substr(slash);
  std::free(folder);
  return whole;
}

std::uint64_t chosen_names = 0;

struct Target {
  std::uint32_t address = 0;
  std::uint16_t port = 0;
  std::string unix_name;
};

Target target_of(const sockaddr* address, socklen_t size) {
  Target target;
  if (address->sa_family == AF_INET) {
    const auto* v4 = reinterpret_cast<const sockaddr_in*>(address);
    target = {ntohl(v4->sin_addr.s_addr), ntohs(v4->sin_port), {}};
  } else if (address->sa_family == AF_INET6) {
    const auto* v6 = reinterpret_cast<const sockaddr_in6*>(address);
    target.port = ntohs(v6->sin6_port);
    if (IN6_IS_ADDR_V4MAPPED(&v6->sin6_addr))
      std::memcpy(&target.address, &v6->sin6_addr.s6_addr[12], 4), target.address = ntohl(target.address);
    if (IN6_IS_ADDR_LOOPBACK(&v6->sin6_addr)) target.address = 0x7f000001;
  } else if (address->sa_family == AF_UNIX) {
    const auto* local = reinterpret_cast<const sockaddr_un*>(address);
    const std::size_t length = size - std::min<std::size_t>(size, offsetof(sockaddr_un, sun_path));
    if (length == 0) {  // the kernel chooses a name
      char name[16];
      std::snprintf(name, sizeof name, "@%05llx", static_cast<unsigned long long>(++chosen_names));
      target.unix_name = name;
    } else if (local->sun_path[0] == '\0')
      target.unix_name = "@" + std::string(local->sun_path + 1, length - 1);
    else
      target.unix_name = resolved(full_path(std::string(local->sun_path, strnlen(local->sun_path, length)).c_str()));
  }
  return target;
}

int put_address(const Socket& socket, std::uint32_t address, std::uint16_t port, const std::string& name, sockaddr* out,
                socklen_t* size) {
  sockaddr_storage storage{};
  socklen_t length = 0;
  if (socket.family_ == AF_INET) {
    auto* v4 = reinterpret_cast<sockaddr_in*>(&storage);
    v4->sin_family = AF_INET;
    v4->sin_port = htons(port);
    v4->sin_addr.s_addr = htonl(address);
    length = sizeof *v4;
  } else if (socket.family_ == AF_INET6) {
    auto* v6 = reinterpret_cast<sockaddr_in6*>(&storage);
    v6->sin6_family = AF_INET6;
    v6->sin6_port = htons(port);
    if (address != 0) {
      v6->sin6_addr.s6_addr[10] = v6->sin6_addr.s6_addr[11] = 0xff;
      const std::uint32_t net = htonl(address);
      std::memcpy(&v6->sin6_addr.s6_addr[12], &net, 4);
    }
    length = sizeof *v6;
  } else {
    auto* local = reinterpret_cast<sockaddr_un*>(&storage);
    local->sun_family = AF_UNIX;
    length = offsetof(sockaddr_un, sun_path);
    if (!name.empty()) {
      std::memcpy(local->sun_path + (name.front() == '@' ? 1 : 0), name.data() + (name.front() == '@' ? 1 : 0),
                  std::min(name.size(), sizeof local->sun_path) - (name.front() == '@' ? 1 : 0));
      length += static_cast<socklen_t>(name.size());
    }
  }
  std::memcpy(out, &storage, std::min(*size, length));
  *size = length;
  return 0;
}

std::shared_ptr<Socket> socket_of(int fd) { return std::dynamic_pointer_cast<Socket>(file_of(fd)); }

}  // namespace
}  // namespace sim

using namespace sim;

CALL(int, socket, int family, int type, int protocol) {
  if (here() == nullptr) return REAL(socket)(family, type, protocol);
  charge(kCallCost);
  if (family != AF_INET && family != AF_INET6 && family != AF_UNIX) return failed(EAFNOSUPPORT);
  auto made = std::make_shared<Socket>(family, type & 0xf);
  made->nonblocking = (type & SOCK_NONBLOCK) != 0;
  return add_descriptor(std::move(made), (type & SOCK_CLOEXEC) != 0);
}

CALL(int, bind, int fd, const sockaddr* address, socklen_t size) {
  if (here() == nullptr) return REAL(bind)(fd, address, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  const Target target = target_of(address, size);
  Host& host = *here()->host;
  if (!target.unix_name.empty()) {
    socket->name_ = "unix:" + target.unix_name;
    socket->unix_name_ = target.unix_name;
    // A name in the file system has a file.
    if (target.unix_name.front() != '@') {
      const int file = REAL(open)(target.unix_name.c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
      if (file < 0) return -1;
      REAL(close)(file);
    }
  } else {
    const bool own = target.address == 0 || target.address >> 24 == 127 || target.address == host.address;
    if (!own) return failed(EADDRNOTAVAIL);
    std::uint16_t port = target.port;
    const auto key = [&](std::uint16_t number) {
      return (socket->family_ == AF_INET6 && socket->only_v6_ ? "tcp6:" : "tcp:") + std::to_string(number);
    };
    while (port == 0 || (target.port == 0 && host.listeners.contains(key(port)))) port = host.next_port++;
    socket->port_ = port;
    socket->address_ = target.address;
    socket->name_ = key(port);
  }
  if (host.listeners.contains(socket->name_)) {
    socket->name_.clear();
    return failed(EADDRINUSE);
  }
  socket->bound_ = true;
  host.listeners[socket->name_] = socket.get();
  return 0;
}

CALL(int, listen, int fd, int backlog) {
  if (here() == nullptr) return REAL(listen)(fd, backlog);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  socket->listening_ = true;
  return 0;
}

CALL(int, accept4, int fd, sockaddr* address, socklen_t* size, int flags) {
  if (here() == nullptr) return REAL(accept4)(fd, address, size, flags);
  const auto listener = socket_of(fd);
  if (listener == nullptr) return failed(ENOTSOCK);
  charge(kMessageCost);
  while (listener->queue_.empty()) {
    if (listener->nonblocking) return failed(EAGAIN);
    listener->waiters.add(*self);
    if (block("accept", kNever, true) == Woke::Signal && !run_handlers()) return failed(EINTR);
  }
  auto made = listener->queue_.front();
  listener->queue_.erase(listener->queue_.begin());
  made->nonblocking = (flags & SOCK_NONBLOCK) != 0;
  made->pid_ = here()->pid;
  if (address != nullptr) put_address(*made, made->peer_address_, made->peer_port_, "", address, size);
  return add_descriptor(std::move(made), (flags & SOCK_CLOEXEC) != 0);
}
CALL(int, accept, int fd, sockaddr* address, socklen_t* size) {
  return here() == nullptr ? REAL(accept)(fd, address, size) : simulated_accept4(fd, address, size, 0);
}

CALL(int, connect, int fd, const sockaddr* address, socklen_t size) {
  if (here() == nullptr) return REAL(connect)(fd, address, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  charge(kMessageCost);
  const Target target = target_of(address, size);
  Host& host = *here()->host;
  if (socket->type_ == SOCK_DGRAM) {
    socket->address_ = host_at(target.address) == &host ? target.address : host.address;
    return 0;
  }
  if (!target.unix_name.empty()) {
    socket->peer_unix_name_ = target.unix_name;
    return answer(socket, host, "unix:" + target.unix_name) != nullptr ? 0 : failed(ECONNREFUSED);
  }
  Host* const there = host_at(target.address);
  socket->peer_address_ = target.address;
  socket->peer_port_ = target.port;
  socket->address_ = there == &host ? target.address : host.address;
  if (socket->port_ == 0) socket->port_ = host.next_port++;
  socket->connecting_ = true;
  const bool v6 = address->sa_family == AF_INET6 && target.address == 0x7f000001;
  const std::string name = "tcp:" + std::to_string(target.port);
  const std::string name6 = "tcp6:" + std::to_string(target.port);
  try_connect(socket, there, v6 && there->listeners.contains(name6) ? name6 : name, 0);
  if (socket->nonblocking) return failed(EINPROGRESS);
  while (socket->connecting_) {
    socket->waiters.add(*self);
    if (block("connect", kNever, true) == Woke::Signal && !run_handlers()) return failed(EINTR);
  }
  return socket->error_ == 0 ? 0 : failed(std::exchange(socket->error_, 0));
}

CALL(ssize_t, send, int fd, const void* bytes, std::size_t size, int flags) {
  if (here() == nullptr) return REAL(send)(fd, bytes, size, flags);
  if (socket_of(fd) == nullptr) return failed(file_of(fd) == nullptr ? EBADF : ENOTSOCK);
  return transfer(fd, const_cast<void*>(bytes), size, flags, false, "send");
}
CALL(ssize_t, recv, int fd, void* bytes, std::size_t size, int flags) {
  if (here() == nullptr) return REAL(recv)(fd, bytes, size, flags);
  if (socket_of(fd) == nullptr) return failed(file_of(fd) == nullptr ? EBADF : ENOTSOCK);
  return transfer(fd, bytes, size, flags, true, "recv");
}
CALL(ssize_t, sendmsg, int fd, const msghdr* message, int flags) {
  if (here() == nullptr) return REAL(sendmsg)(fd, message, flags);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  charge(kCallCost);
  std::vector<FilePtr> files;
  for (cmsghdr* item = CMSG_FIRSTHDR(message); item != nullptr;
       item = CMSG_NXTHDR(const_cast<msghdr*>(message), item)) {
    if (item->cmsg_type != SCM_RIGHTS) continue;
    int given = -1;
    std::memcpy(&given, CMSG_DATA(item), sizeof given);
    files.push_back(file_of(given));
  }
  std::string all;
  for (std::size_t i = 0; i < message->msg_iovlen; ++i)
    all.append(static_cast<const char*>(message->msg_iov[i].iov_base), message->msg_iov[i].iov_len);
  if (files.empty()) return transfer(fd, all.data(), all.size(), flags, false, "sendmsg");
  const ssize_t put = socket->send(all.data(), all.size(), flags, std::move(files));
  return put < 0 ? failed(static_cast<int>(-put)) : put;
}
CALL(ssize_t, recvmsg, int fd, msghdr* message, int flags) {
  if (here() == nullptr) return REAL(recvmsg)(fd, message, flags);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  charge(kCallCost);
  const bool waits = !socket->nonblocking && (flags & MSG_DONTWAIT) == 0;
  while (true) {
    std::vector<FilePtr> files;
    ssize_t total = 0;
    for (std::size_t i = 0; i < message->msg_iovlen; ++i) {
      const ssize_t got = socket->receive(message->msg_iov[i].iov_base, message->msg_iov[i].iov_len, flags, &files);
      if (got < 0 && total == 0) total = got;
      if (got <= 0) break;
      total += got;
      if (static_cast<std::size_t>(got) < message->msg_iov[i].iov_len) break;
    }
    if (total == -EAGAIN && waits) {
      socket->waiters.add(*self);
      if (block("recvmsg", kNever, true) == Woke::Signal && !run_handlers()) return failed(EINTR);
      continue;
    }
    if (total < 0) return failed(static_cast<int>(-total));
    if (!files.empty() && message->msg_controllen >= CMSG_LEN(sizeof(int))) {
      cmsghdr* const item = CMSG_FIRSTHDR(message);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(sizeof(int));
      const int made = add_descriptor(files.front(), (flags & MSG_CMSG_CLOEXEC) != 0);
      std::memcpy(CMSG_DATA(item), &made, sizeof made);
      message->msg_controllen = CMSG_SPACE(sizeof(int));
    } else {
      message->msg_controllen = 0;
    }
    return total;
  }
}

CALL(int, shutdown, int fd, int how) {
  if (here() == nullptr) return REAL(shutdown)(fd, how);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  if (!socket->out_) return failed(ENOTCONN);
  if (how != SHUT_RD && !std::exchange(socket->shut_, true)) {
    Piece last;
    last.end = true;
    launch(socket->out_, std::move(last));
  }
  if (how != SHUT_WR) socket->in_->end = true;
  socket->changed();
  return 0;
}

CALL(int, getsockname, int fd, sockaddr* address, socklen_t* size) {
  if (here() == nullptr) return REAL(getsockname)(fd, address, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  return put_address(*socket, socket->address_, socket->port_, socket->unix_name_, address, size);
}
CALL(int, getpeername, int fd, sockaddr* address, socklen_t* size) {
  if (here() == nullptr) return REAL(getpeername)(fd, address, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  if (!socket->in_) return failed(ENOTCONN);
  return put_address(*socket, socket->peer_address_, socket->peer_port_, socket->peer_unix_name_, address, size);
}

CALL(int, setsockopt, int fd, int level, int name, const void* value, socklen_t size) {
  if (here() == nullptr) return REAL(setsockopt)(fd, level, name, value, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(ENOTSOCK);
  if (level == SOL_SOCKET && (name == SO_ATTACH_FILTER || name == SO_DETACH_FILTER)) return failed(ENOPROTOOPT);
  if (level == SOL_SOCKET && name == SO_RCVTIMEO) {
    const auto& limit = *static_cast<const timeval*>(value);
    socket->receive_limit_ = limit.tv_sec * kSecond + limit.tv_usec * 1000;
    if (socket->receive_limit_ == 0) socket->receive_limit_ = kNever;
  }
  const int number = size >= sizeof(int) ? *static_cast<const int*>(value) : 0;
  if (level == SOL_SOCKET && name == SO_KEEPALIVE) socket->keep_alive_ = number != 0;
  if (level == IPPROTO_TCP && name == TCP_KEEPIDLE) socket->idle_s_ = number;
  if (level == IPPROTO_TCP && name == TCP_KEEPINTVL) socket->between_s_ = number;
  if (level == IPPROTO_TCP && name == TCP_KEEPCNT) socket->probes_ = number;
  if (level == SOL_SOCKET && name == SO_LINGER) socket->linger_reset_ = static_cast<const linger*>(value)->l_onoff != 0;
  if (level == IPPROTO_IPV6 && name == IPV6_V6ONLY) socket->only_v6_ = *static_cast<const int*>(value) != 0;
  return 0;
}
CALL(int, getsockopt, int fd, int level, int name, void* value, socklen_t* size) {
  if (here() == nullptr) return REAL(getsockopt)(fd, level, name, value, size);
  const auto socket = socket_of(fd);
  if (socket == nullptr) return failed(file_of(fd) == nullptr ? EBADF : ENOTSOCK);
  std::memset(value, 0, *size);
  if (level == SOL_SOCKET && name == SO_ERROR) *static_cast<int*>(value) = std::exchange(socket->error_, 0);
  if (level == SOL_SOCKET && name == SO_TYPE) *static_cast<int*>(value) = socket->type_;
  if (level == SOL_SOCKET && name == SO_PEERCRED) {
    auto& credentials = *static_cast<ucred*>(value);
    credentials = {socket->peer_pid_, REAL(getuid)(), REAL(getuid)()};
  }
  if (level == IPPROTO_TCP && name == TCP_INFO) {
    auto& info = *static_cast<tcp_info*>(value);
    info.tcpi_state = TCP_ESTABLISHED;
    if (!socket->in_) return 0;
    // The other kernel answers a probe each second while the link works both ways.
    const Nanoseconds broken = broken_since(*socket);
    const Nanoseconds heard = std::max(socket->in_->last_heard, std::min(state->now - kSecond / 2, broken));
    const Nanoseconds silent = broken == kNever ? 0 : state->now - broken;
    info.tcpi_unacked = silent > 0 && socket->out_->on_way > 0 ? 1 : 0;
    info.tcpi_retransmits = silent > kRetry && socket->out_->on_way > 0 ? 1 : 0;
    info.tcpi_probes = silent > socket->idle_s_ * kSecond && socket->out_->on_way == 0 && socket->keep_alive_ ? 1 : 0;
    info.tcpi_last_ack_recv = info.tcpi_last_data_recv =
        static_cast<std::uint32_t>(std::max<Nanoseconds>(state->now - heard, 0) / kMillisecond);
  }
  return 0;
}

CALL(int, getaddrinfo, const char* name, const char* service, const addrinfo* hints, addrinfo** out) {
  if (here() == nullptr) return REAL(getaddrinfo)(name, service, hints, out);
  std::uint32_t address = 0;
  int family = AF_INET;
  in_addr v4{};
  in6_addr v6{};
  const bool numeric_only = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (name == nullptr || ::inet_pton(AF_INET, name, &v4) == 1) {
    address = ntohl(v4.s_addr);
  } else if (::inet_pton(AF_INET6, name, &v6) == 1) {
    family = AF_INET6;
  } else if (numeric_only) {
    return EAI_NONAME;
  } else {
    charge(kMillisecond);
    if (std::string_view(name) == "localhost") address = 0x7f000001;
    if (const auto host = state->host_of.find(name); host != state->host_of.end()) address = host->second->address;
    if (address == 0) return EAI_NONAME;
  }
  struct Answer {
    addrinfo info{};
    sockaddr_storage storage{};
  };
  auto* const answer = new Answer;
  const auto port = static_cast<std::uint16_t>(service == nullptr ? 0 : std::atoi(service));
  answer->info.ai_family = family;
  answer->info.ai_socktype = hints != nullptr ? hints->ai_socktype : SOCK_STREAM;
  answer->info.ai_addr = reinterpret_cast<sockaddr*>(&answer->storage);
  if (family == AF_INET) {
    auto* to = reinterpret_cast<sockaddr_in*>(&answer->storage);
    to->sin_family = AF_INET;
    to->sin_port = htons(port);
    to->sin_addr.s_addr = htonl(address);
    answer->info.ai_addrlen = sizeof *to;
  } else {
    auto* to = reinterpret_cast<sockaddr_in6*>(&answer->storage);
    to->sin6_family = AF_INET6;
    to->sin6_port = htons(port);
    to->sin6_addr = v6;
    answer->info.ai_addrlen = sizeof *to;
  }
  *out = &answer->info;
  return 0;
}
CALL(void, freeaddrinfo, addrinfo* list) {
  if (here() == nullptr) REAL(freeaddrinfo)(list);  // (a simulated answer is small, and kept)
}
CALL(int, getifaddrs, ifaddrs** out) {
  if (here() == nullptr) return REAL(getifaddrs)(out);
  struct Interface {
    ifaddrs entry{};
    sockaddr_in address{};
  };
  auto* const all = new Interface[2];
  const char* const names[2] = {"lo", "eth0"};
  const std::uint32_t addresses[2] = {0x7f000001, here()->host->address};
  for (int i = 0; i < 2; ++i) {
    all[i].address.sin_family = AF_INET;
    all[i].address.sin_addr.s_addr = htonl(addresses[i]);
    all[i].entry.ifa_addr = reinterpret_cast<sockaddr*>(&all[i].address);
    all[i].entry.ifa_name = const_cast<char*>(names[i]);
    all[i].entry.ifa_flags = IFF_UP | (i == 0 ? IFF_LOOPBACK : 0);
  }
  all[0].entry.ifa_next = &all[1].entry;
  *out = &all[0].entry;
  return 0;
}
CALL(void, freeifaddrs, ifaddrs* list) {
  if (here() == nullptr) REAL(freeifaddrs)(list);
}
