// The short transfers of peers.h. Plain bytes, once the two have proved each other: encryption would be measured
// instead of the network.
#include "doctor/peers.h"
#include "doctor/visits.h"
#include "net/socket.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace cohort::doctor {

namespace {

using Clock = std::chrono::steady_clock;

/// Of each direction.
constexpr auto kSending = std::chrono::milliseconds(120);
/// What is in the buffers at the end of it has to get through as well.
constexpr auto kLimit = std::chrono::milliseconds(2000);
constexpr int kPingsOfSpeed = 5;
constexpr std::size_t kPiece = std::size_t{256} << 10;

/// False at the deadline or an error.
bool send_all(int fd, const char* data, std::size_t bytes, net::Deadline deadline) {
  while (bytes > 0) {
    const ssize_t put = ::send(fd, data, bytes, MSG_NOSIGNAL);
    if (put > 0) {
      data += put;
      bytes -= static_cast<std::size_t>(put);
    } else if (put < 0 && errno == EAGAIN) {
      if (!net::wait_ready(fd, POLLOUT, deadline).value_or(false)) return false;
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

/// -1 at the deadline or an error, 0 at the end.
ssize_t receive_some(int fd, char* data, std::size_t most, net::Deadline deadline) {
  while (true) {
    const ssize_t got = ::recv(fd, data, most, 0);
    if (got >= 0) return got;
    if (errno == EINTR) continue;
    if (errno != EAGAIN || !net::wait_ready(fd, POLLIN, deadline).value_or(false)) return -1;
  }
}

bool receive_all(int fd, char* data, std::size_t bytes, net::Deadline deadline) {
  while (bytes > 0) {
    const ssize_t got = receive_some(fd, data, bytes, deadline);
    if (got <= 0) return false;
    data += got;
    bytes -= static_cast<std::size_t>(got);
  }
  return true;
}

bool send_for_a_while(int fd, net::Deadline deadline) {
  const std::vector<char> piece(kPiece, 'x');
  const auto end = Clock::now() + kSending;
  while (Clock::now() < end) {
    if (!send_all(fd, piece.data(), piece.size(), deadline)) return false;
  }
  return ::shutdown(fd, SHUT_WR) == 0;
}

/// Bytes per second of what comes until the end; negative where that does not come.
double receive_to_end(int fd, net::Deadline deadline) {
  std::vector<char> piece(kPiece);
  double bytes = 0;
  Clock::time_point first{}, last{};
  while (true) {
    const ssize_t got = receive_some(fd, piece.data(), piece.size(), deadline);
    if (got < 0) return -1;
    if (got == 0) break;
    last = Clock::now();
    // The clock begins with the first bytes, which therefore do not count.
    if (first == Clock::time_point{})
      first = last;
    else
      bytes += static_cast<double>(got);
  }
  const double seconds = std::chrono::duration<double>(last - first).count();
  return seconds > 0 ? bytes / seconds : 0;
}

}  // namespace

void receive_transfer(net::SecureConnection connection) {
  const net::Deadline deadline = net::deadline_in(2 * kLimit);
  // Not before this has come does the other end send what is not encrypted.
  if (!connection.send(kTransfer, deadline)) return;
  const auto detached = connection.detach(net::SecureConnection::Encryption::Ends);
  if (!detached) return;
  const sys::UniqueFd& socket = detached->socket;
  for (int i = 0; i < kPingsOfSpeed; ++i) {
    char byte = 0;
    if (!receive_all(socket.get(), &byte, 1, deadline) || !send_all(socket.get(), &byte, 1, deadline)) return;
  }
  const double rate = receive_to_end(socket.get(), deadline);
  std::array<char, sizeof rate> bytes{};
  std::memcpy(bytes.data(), &rate, sizeof rate);
  if (send_all(socket.get(), bytes.data(), bytes.size(), deadline)) send_for_a_while(socket.get(), deadline);
}

SpeedFacts measure(const SpeedRequest& request, const net::Secret& secret) {
  SpeedFacts facts;
  facts.from = request.from;
  facts.to = request.to;
  facts.address = request.address;
  const auto failed = [&facts](std::string why) {
    facts.error = std::move(why);
    return facts;
  };
  auto socket =
      net::connect_once({{request.address, static_cast<std::uint16_t>(request.port)}, {}}, net::deadline_in(kLimit));
  if (!socket) return failed(socket.error().error.what());
  const net::Deadline deadline = net::deadline_in(kLimit);
  auto connection = net::SecureConnection::with_secret(*std::move(socket), net::Role::Client, secret, between_hosts());
  if (!connection) return failed(connection.error().what());
  if (auto sent = connection->send(kTransfer, deadline); !sent) return failed(sent.error().what());
  if (!connection->receive(deadline)) return failed("it went silent");
  const auto detached = connection->detach(net::SecureConnection::Encryption::Ends);
  if (!detached) return failed(detached.error().what());
  const int fd = detached->socket.get();
  // Now that nobody else talks: the first one waits for a thread to begin there.
  facts.milliseconds = 1e9;
  for (int i = 0; i < kPingsOfSpeed; ++i) {
    char byte = 'x';
    const auto begin = Clock::now();
    if (!send_all(fd, &byte, 1, deadline) || !receive_all(fd, &byte, 1, deadline)) return failed("it went silent");
    const std::chrono::duration<double, std::milli> took = Clock::now() - begin;
    facts.milliseconds = std::min(facts.milliseconds, took.count());
  }
  if (!send_for_a_while(fd, deadline)) return failed("the transfer there did not get through");
  std::array<char, sizeof facts.there> bytes{};
  if (!receive_all(fd, bytes.data(), bytes.size(), deadline)) return failed("the transfer there was not confirmed");
  std::memcpy(&facts.there, bytes.data(), bytes.size());
  facts.back = receive_to_end(fd, net::deadline_in(kLimit));
  if (!(facts.there >= 0) || !(facts.back >= 0)) return failed("the transfer did not get through");
  return facts;
}

}  // namespace cohort::doctor
