// Host names to socket addresses, with a deadline, which getaddrinfo(3) alone does not have. Any thread may call.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/deadline.h"

#include <sys/socket.h>

#include <vector>

namespace cohort::net {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;
};

/// All stream addresses of the name, in the system's order. Fails with Unavailable: name unknown, or no answer from
/// the name service by the deadline.
Result<std::vector<SocketAddress>> resolve(const Address& address, Deadline deadline);

}  // namespace cohort::net
