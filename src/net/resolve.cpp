#include "net/resolve.h"

#include <netdb.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

namespace cohort::net {
namespace {

// What getaddrinfo_a works on; it has to live until the lookup is over, even if nobody waits for it any more.
struct Lookup {
  std::string host, port;
  addrinfo hints{};
  gaicb request{};
  ~Lookup() {
    if (request.ar_result != nullptr) ::freeaddrinfo(request.ar_result);
  }
};

// Lookups that could not be cancelled. A later call frees those that have ended; the resolver's own time-out
// (resolv.conf) bounds how long one stays.
class Abandoned {
 public:
  void add(std::unique_ptr<Lookup> lookup) {
    const std::lock_guard lock(mutex_);
    std::erase_if(lookups_, [](const auto& old) { return ::gai_error(&old->request) != EAI_INPROGRESS; });
    lookups_.push_back(std::move(lookup));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<Lookup>> lookups_;
};

Abandoned& abandoned() {
  static Abandoned* instance = new Abandoned;  // never destroyed: the resolver may still write into its lookups
  return *instance;
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
  auto lookup = std::make_unique<Lookup>();
  lookup->host = address.host;
  lookup->port = std::to_string(address.port);
  lookup->hints.ai_socktype = SOCK_STREAM;
  // Numbers need no name service, nor its threads.
  lookup->hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  if (::getaddrinfo(lookup->host.c_str(), lookup->port.c_str(), &lookup->hints, &list) == 0) {
    const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, ::freeaddrinfo);
    return copy_list(list);
  }
  lookup->hints.ai_flags = AI_NUMERICSERV;
  lookup->request.ar_name = lookup->host.c_str();
  lookup->request.ar_service = lookup->port.c_str();
  lookup->request.ar_request = &lookup->hints;
  gaicb* requests[] = {&lookup->request};
  if (const int code = ::getaddrinfo_a(GAI_NOWAIT, requests, 1, nullptr); code != 0) {
    return unknown_name(address.host, code, errno);
  }
  int state = EAI_INPROGRESS;
  while ((state = ::gai_error(&lookup->request)) == EAI_INPROGRESS && !passed(deadline)) {
    const int milliseconds = poll_timeout(deadline);
    const timespec limit{milliseconds / 1000, (milliseconds % 1000) * 1'000'000L};
    const gaicb* const waited_for[] = {&lookup->request};
    ::gai_suspend(waited_for, 1, &limit);
  }
  if (state == EAI_INPROGRESS) {
    if (::gai_cancel(&lookup->request) != EAI_CANCELED) abandoned().add(std::move(lookup));
    return fail(ErrorCode::Unavailable,
                "no answer from the name service about '{}' in time -- check DNS, or give a numeric address",
                address.host);
  }
  if (state != 0) return unknown_name(address.host, state, errno);
  return copy_list(lookup->request.ar_result);
}

}  // namespace cohort::net
