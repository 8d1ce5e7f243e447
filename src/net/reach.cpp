#include "net/reach.h"

#include "net/resolve.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::net {
namespace {

/// A connection that has not been answered, or not proved, so far.
struct Attempt {
  Endpoint endpoint;
  sys::UniqueFd socket;                        ///< until it is connected
  std::optional<SecureConnection> connection;  ///< from then on
  std::string failure = "no answer";
  bool over = false;
  bool turned_away = false;

  void fail_with(std::string why) {
    failure = std::move(why);
    over = true;
    socket.reset();
    connection.reset();
  }
  int fd() const { return connection ? connection->fd() : socket.get(); }
};

void begin(Attempt& attempt, const SocketAddress& address) {
  const int family = address.storage.ss_family;
  attempt.socket.reset(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!attempt.socket) return attempt.fail_with(errno_text(errno));
  const int on = 1;
  ::setsockopt(attempt.socket.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (::connect(attempt.socket.get(), reinterpret_cast<const sockaddr*>(&address.storage), address.size) != 0 &&
      errno != EINPROGRESS) {
    attempt.fail_with(errno_text(errno));
  }
}

/// True once the peer has proved itself.
bool go_on(Attempt& attempt, const Secret& secret, const SecureOptions& options) {
  if (!attempt.connection) {
    int error_number = 0;
    socklen_t size = sizeof error_number;
    ::getsockopt(attempt.socket.get(), SOL_SOCKET, SO_ERROR, &error_number, &size);
    if (error_number != 0) {
      attempt.fail_with(errno_text(error_number));
      return false;
    }
    auto made = SecureConnection::with_secret(std::move(attempt.socket), Role::Client, secret, options);
    if (!made) {
      attempt.fail_with(made.error().what());
      return false;
    }
    attempt.connection = *std::move(made);
    attempt.failure = "connected, and no proof of the secret";
  }
  if (auto moved = attempt.connection->advance(); !moved) {
    attempt.turned_away = moved.error().code() == ErrorCode::Unavailable;
    attempt.fail_with(moved.error().what());
    return false;
  }
  return attempt.connection->established();
}

}  // namespace

Result<SecureConnection> reach(std::span<const Endpoint> endpoints, const Secret& secret, const SecureOptions& options,
                               Deadline deadline) {
  std::vector<Attempt> attempts;
  for (const Endpoint& endpoint : endpoints) {
    Attempt& attempt = attempts.emplace_back();
    attempt.endpoint = endpoint;
    auto addresses = resolve(endpoint.tcp, deadline);
    if (!addresses || addresses->empty())
      attempt.fail_with(addresses ? "no address" : addresses.error().what());
    else
      begin(attempt, addresses->front());
  }
  const auto left = [&attempts] {
    return std::any_of(attempts.begin(), attempts.end(), [](const Attempt& attempt) { return !attempt.over; });
  };
  while (left() && !passed(deadline)) {
    std::vector<pollfd> waited;
    std::vector<Attempt*> waiting;
    for (Attempt& attempt : attempts) {
      if (attempt.over) continue;
      const bool writes = !attempt.connection || attempt.connection->wants_write();
      const int events = attempt.connection ? POLLIN | (writes ? POLLOUT : 0) : POLLOUT;
      waited.push_back({attempt.fd(), static_cast<short>(events), 0});
      waiting.push_back(&attempt);
    }
    if (::poll(waited.data(), waited.size(), poll_timeout(deadline)) < 0 && errno != EINTR) {
      return fail(ErrorCode::Io, "poll: {}", errno_text(errno));
    }
    for (std::size_t i = 0; i < waited.size(); ++i) {
      if (waited[i].revents != 0 && go_on(*waiting[i], secret, options)) return *std::move(waiting[i]->connection);
    }
  }
  std::string tried;
  for (const Attempt& attempt : attempts) {
    tried += fmt::format("{}{} ({})", tried.empty() ? "" : ", ", to_string(attempt.endpoint), attempt.failure);
  }
  const bool turned_away =
      std::any_of(attempts.begin(), attempts.end(), [](const Attempt& attempt) { return attempt.turned_away; });
  const ErrorCode code = left() ? ErrorCode::Timeout : turned_away ? ErrorCode::PeerLost : ErrorCode::Unavailable;
  return fail(code, "cannot connect to {}", tried.empty() ? "any address" : tried);
}

}  // namespace cohort::net
