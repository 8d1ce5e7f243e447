
#include "base/parse.h"
#include "base/thread.h"
#include "net/acceptor.h"
#include "net/secure_connection.h"
#include "net/socket.h"
#include "observe/doctor/probe.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>
#include <string_view>
#include <thread>
#include <utility>

namespace cohort::doctor {

// First messages from one host of `cohort doctor` to another; a transfer follows the second one.

inline constexpr std::string_view kProbe = "probe";
inline constexpr std::string_view kTransfer = "transfer";

inline net::SecureOptions between_hosts() {
  return {.purpose = "doctor", .longest_message = std::size_t{1} << 20, .detachable = true};
}

/// Serves the other end of `measure`.
void receive_transfer(net::SecureConnection connection);

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectLimit(2500);
constexpr milliseconds kTalkLimit(2500);
constexpr milliseconds kVisitLimit(8000);
constexpr std::size_t kLarge = std::size_t{64} << 10;
constexpr std::size_t kPeersAtOnce = 64;
/// Most connections at a time; further ones wait in the kernel's queue.
constexpr int kMostConnections = 512;
constexpr int kPings = 3;

/// Sends this host's index, and echoes what it receives.
void receive_visitor(net::SecureConnection connection, int host) {
  const net::Deadline deadline = net::deadline_in(kVisitLimit);
  if (!connection.send(std::to_string(host), deadline)) return;
  while (true) {
    const auto message = connection.receive(deadline);
    if (!message || !connection.send(*message, deadline)) return;
  }
}

ProbeFacts knock(const PeerAddress& at, const net::Secret& secret) {
  ProbeFacts facts;
  facts.peer = at.peer;
  facts.address = at.address;
  const auto is = [&facts](std::string_view result, std::string detail) {
    facts.result = result;
    facts.detail = std::move(detail);
    return facts;
  };
  auto socket =
      net::connect_once({{at.address, static_cast<std::uint16_t>(at.port)}, {}}, net::deadline_in(kConnectLimit));
  if (!socket) {
    const auto& failed = socket.error();
    // Distinguishes silence from a router, or this host itself, that reports that there is no route.
    const bool silent = failed.error.context().system_error == ETIMEDOUT;
    return is(failed.kind == net::ConnectFailure::Refused ? kRefused
              : silent                                    ? kNoAnswer
                                                          : kNoRoute,
              failed.error.what());
  }
  if (const auto own = net::local_endpoint(socket->get())) facts.from = own->tcp.host;
  auto connection = net::SecureConnection::with_secret(*std::move(socket), net::Role::Client, secret, between_hosts());
  if (!connection) return is(kNoRoute, connection.error().what());
  const net::Deadline deadline = net::deadline_in(kTalkLimit);
  if (const auto proved = connection->handshake(deadline); !proved) {
    return is(proved.error().code() == ErrorCode::Timeout ? kNoAnswer : kSomebodyElse, proved.error().what());
  }
  const auto name =
      connection->send(kProbe, deadline) ? connection->receive(deadline) : fail(ErrorCode::PeerLost, "it went silent");
  if (!name) return is(kNoAnswer, name.error().what());
  if (parse_integer<int>(*name) != at.peer) return is(kSomebodyElse, "another host of the job answers there");
  facts.milliseconds = 1e9;
  for (int i = 0; i < kPings; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    if (!connection->send("ping", deadline) || !connection->receive(deadline)) return is(kNoAnswer, "it went silent");
    const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
    facts.milliseconds = std::min(facts.milliseconds, took.count());
  }
  const std::string large(kLarge, 'x');
  const net::Deadline last = net::deadline_in(kTalkLimit);
  if (!connection->send(large, last) || !connection->receive(last)) return is(kLargeLost, "64 KiB have not come back");
  return is(kReached, {});
}

/// Accepts connections until the process ends.
void keep_open(net::Acceptor& acceptor, int host) {
  const auto connections = std::make_shared<std::atomic<int>>(0);
  while (true) {
    if (connections->load() >= kMostConnections) {
      std::this_thread::sleep_for(milliseconds(5));
      continue;
    }
    pollfd waited{acceptor.fd(), POLLIN, 0};
    ::poll(&waited, 1, 1000);
    auto accepted = acceptor.next();
    if (!accepted) continue;
    connections->fetch_add(1);
    const auto held = std::make_shared<net::Acceptor::Accepted>(*std::move(accepted));
    try {
      sys::start_without_signals([held, host, connections] {
        if (held->first == kTransfer) {
          receive_transfer(std::move(held->connection));
        } else {
          receive_visitor(std::move(held->connection), host);
        }
        connections->fetch_sub(1);
      }).detach();
    } catch (const std::system_error&) {
      connections->fetch_sub(1);  // there is no thread for it, so the peer finds it closed
    }
  }
}

}  // namespace

Result<ProbeServer> ProbeServer::open(int host, const net::Secret& secret) {
  auto listener = net::listen_everywhere(0);
  if (!listener) return tl::unexpected(listener.error());
  ProbeServer server;
  server.port_ = value_or_throw(net::local_endpoint(listener->get())).tcp.port;
  std::vector<sys::UniqueFd> listeners;
  listeners.push_back(*std::move(listener));
  net::Acceptor::Options options;
  options.secret = secret;
  options.secure = between_hosts();
  options.most_pending = kMostConnections;
  const auto acceptor = std::make_shared<net::Acceptor>(std::move(listeners), std::move(options));
  sys::start_without_signals([acceptor, host] { keep_open(*acceptor, host); }).detach();
  return server;
}

std::vector<ProbeFacts> probe(const std::vector<PeerAddress>& addresses, const net::Secret& secret,
                              milliseconds limit) {
  std::vector<ProbeFacts> out(addresses.size());
  std::atomic<std::size_t> next{0};
  // Probes that have begun by then have their own deadline.
  const auto last = std::chrono::steady_clock::now() + limit;
  const auto work = [&] {
    for (std::size_t at = next.fetch_add(1); at < addresses.size(); at = next.fetch_add(1)) {
      if (std::chrono::steady_clock::now() < last) {
        out[at] = knock(addresses[at], secret);
      } else {
        out[at].peer = addresses[at].peer;
        out[at].address = addresses[at].address;
        out[at].result = kNotTried;
      }
    }
  };
  {
    std::vector<std::jthread> threads;
    for (std::size_t i = 0; i < std::min(kPeersAtOnce, addresses.size()); ++i) threads.push_back(beside(work));
  }
  return out;
}

namespace {

// The short transfers of probe.h. After both sides have authenticated, bytes are not encrypted, since otherwise the
// encryption would be measured instead of the network.

using Clock = std::chrono::steady_clock;

/// Sending time in each direction.
constexpr auto kSending = std::chrono::milliseconds(120);
/// Limit that leaves time for data still in the buffers at its end.
constexpr auto kLimit = std::chrono::milliseconds(2000);
constexpr int kPingsOfSpeed = 5;
constexpr std::size_t kPiece = std::size_t{256} << 10;

/// Returns false at the deadline or an error.
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

/// Returns -1 at the deadline or an error, 0 at the end.
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

/// Receives until the end; returns bytes per second, negative if the end does not come.
double receive_to_end(int fd, net::Deadline deadline) {
  std::vector<char> piece(kPiece);
  double bytes = 0;
  Clock::time_point first{}, last{};
  while (true) {
    const ssize_t got = receive_some(fd, piece.data(), piece.size(), deadline);
    if (got < 0) return -1;
    if (got == 0) break;
    last = Clock::now();
    // The clock starts when the first bytes have come, so these do not count.
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
  // The other end sends unencrypted bytes only after this message.
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
  // Measures the round trip again without other traffic, since the first one included the start of a thread there.
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
