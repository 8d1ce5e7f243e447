#include "net/resolve.h"

#include "sys/thread.h"

#include <netdb.h>

#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>

namespace cohort::net {
namespace {

// What a thread looks up. It and its caller hold it, whoever is last: the resolver's own time-out (resolv.conf) bounds
// how long it goes on where nobody waits for it any more.
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

// glibc's own thread for this (getaddrinfo_a) is one that ThreadSanitizer does not know, and crashes on.
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
  // Numbers need no name service, nor a thread.
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

}  // namespace cohort::net
