#include "doctor/peers.h"

#include "base/parse.h"
#include "doctor/beside.h"
#include "doctor/visits.h"
#include "net/acceptor.h"
#include "net/socket.h"
#include "sys/thread.h"

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <thread>
#include <utility>

namespace cohort::doctor {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kConnectLimit(2500);
constexpr milliseconds kTalkLimit(2500);
constexpr milliseconds kVisitLimit(8000);
constexpr std::size_t kLarge = std::size_t{64} << 10;
constexpr std::size_t kPeersAtOnce = 64;
/// Connections at a time; those beyond wait in the kernel's queue.
constexpr int kMostConnections = 512;
constexpr int kPings = 3;

/// Says which host this is, and echoes what comes.
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
    // Silence is another matter than a router, or this host itself, that says that there is no way.
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

/// Takes connections in until the process ends.
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
      connections->fetch_sub(1);  // no thread for it: the connection finds the connection closed
    }
  }
}

Result<sys::UniqueFd> listen_everywhere() {
  auto both = net::listen_on({{"::", 0}, {}});
  return both ? std::move(both) : net::listen_on({{"0.0.0.0", 0}, {}});
}

}  // namespace

Result<ProbeServer> ProbeServer::open(int host, const net::Secret& secret) {
  auto listener = listen_everywhere();
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
  // What begins before has a deadline of its own.
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

}  // namespace cohort::doctor
