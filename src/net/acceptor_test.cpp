#include "net/acceptor.h"
#include "base/testing/sanitized.h"
#include "net/interfaces.h"
#include "net/socket.h"
#include "net/tls.h"

#include <gtest/gtest.h>

#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace cohort::net {
namespace {

using namespace std::chrono_literals;
using Clock = RateLimiter::Clock;

/// A listener at all addresses, and peers that connect.
struct House {
  sys::UniqueFd listener = value_or_throw(listen_on({{"0.0.0.0", 0}, {}}));
  std::uint16_t port = value_or_throw(local_endpoint(listener.get())).tcp.port;
  std::vector<sys::UniqueFd> callers;

  /// Connects; returns false if nobody answers.
  bool knock(const std::string& at = "127.0.0.1", std::chrono::milliseconds patience = 10s) {
    auto socket = connect_once({{at, port}, {}}, deadline_in(patience));
    if (!socket) return false;
    callers.push_back(*std::move(socket));
    return true;
  }
  bool somebody_waits() const { return value_or_throw(wait_ready(listener.get(), POLLIN, deadline_in(0ms))); }
};

/// Returns the address of this host that peers on other hosts would use; empty if there is none.
std::string outer_address() {
  for (const InterfaceAddress& each : value_or_throw(interface_addresses())) {
    if (!each.loopback && each.length == 4) return each.text;
  }
  return {};
}

/// Returns host `host` of an IPv6 network with a prefix of 64 bits.
Source of_network(std::uint8_t network, std::uint8_t host) {
  sockaddr_storage address{};
  auto& v6 = reinterpret_cast<sockaddr_in6&>(address);
  v6.sin6_family = AF_INET6;
  v6.sin6_addr.s6_addr[0] = 0xFD;
  v6.sin6_addr.s6_addr[7] = network;
  v6.sin6_addr.s6_addr[15] = host;
  return Source::of(address);
}

RateLimiter::Limits few() {
  RateLimiter::Limits limits;
  limits.burst = 8;
  limits.per_second = 10;
  limits.failures_to_block = 4;
  return limits;
}

TEST(RateLimiter, TakesStrangersSlowlyOnceManyHaveFailed) {
  House house;
  RateLimiter::Limits limits = few();
  limits.failures_to_block = 100;  // no single source is blocked
  RateLimiter limiter(house.listener.get(), limits);
  auto now = Clock::now();
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(house.knock());
    ASSERT_TRUE(limiter.next(now)) << i;
    limiter.record_failure(of_network(1, 1), now);
  }
  ASSERT_TRUE(house.knock());
  EXPECT_TRUE(house.somebody_waits());
  EXPECT_FALSE(limiter.next(now));
  ASSERT_TRUE(limiter.paused_until(now));
  EXPECT_GT(*limiter.paused_until(now), now);
  EXPECT_LE(*limiter.paused_until(now), now + 200ms);
  EXPECT_EQ(limiter.blocked(), 0U);
  now += 250ms;
  EXPECT_FALSE(limiter.paused_until(now));
  EXPECT_TRUE(limiter.next(now));
}

TEST(RateLimiter, ThoseOfThisHostDoNotWaitBehindItsStrangers) {
  House house;
  RateLimiter limiter(house.listener.get(), few());
  const auto now = Clock::now();
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(house.knock());
    auto incoming = limiter.next(now);
    ASSERT_TRUE(incoming) << i;
    EXPECT_TRUE(incoming->source.loopback());
    limiter.record_failure(incoming->source, now);
  }
  EXPECT_EQ(limiter.blocked(), 0U);
  EXPECT_FALSE(limiter.paused_until(now));
}

TEST(RateLimiter, AProofMakesRoomForOthers) {
  House house;
  RateLimiter::Limits limits = few();
  limits.failures_to_block = 100;
  limits.per_second = 0;
  RateLimiter limiter(house.listener.get(), limits);
  const auto now = Clock::now();
  const Source elsewhere = of_network(1, 1);
  for (int i = 0; i < 8; ++i) limiter.record_failure(elsewhere, now);
  ASSERT_TRUE(house.knock());
  EXPECT_FALSE(limiter.next(now));
  limiter.record_success(elsewhere);
  EXPECT_TRUE(limiter.next(now + limits.pause));
}

TEST(RateLimiter, TheKernelDoesNotAnswerWhoFailsAgainAndAgain) {
  const std::string outer = outer_address();
  if (outer.empty()) GTEST_SKIP() << "this host has no address but loopback";
  House house;
  RateLimiter limiter(house.listener.get(), few());
  auto now = Clock::now();
  for (int i = 0; i < 8; ++i) {
    ASSERT_TRUE(house.knock(outer));
    auto incoming = limiter.next(now);
    ASSERT_TRUE(incoming);
    EXPECT_FALSE(incoming->source.loopback());
    limiter.record_failure(incoming->source, now);
  }
  EXPECT_EQ(limiter.blocked(), 1U);
  EXPECT_FALSE(house.knock(outer, 300ms));
  // Others are accepted, and their bytes are read.
  ASSERT_TRUE(house.knock());
  auto incoming = limiter.next(now);
  ASSERT_TRUE(incoming);
  ASSERT_EQ(::send(house.callers.back().get(), "hello", 5, MSG_NOSIGNAL), 5);
  EXPECT_TRUE(value_or_throw(wait_ready(incoming->socket.get(), POLLIN, deadline_in(10s))));
  // The block ends after a while.
  now += 11s;
  EXPECT_FALSE(limiter.next(now));
  EXPECT_EQ(limiter.blocked(), 0U);
  EXPECT_TRUE(house.knock(outer));
  EXPECT_TRUE(limiter.next(now));
}

TEST(RateLimiter, WhereAPeerIsNobodyIsShutOut) {
  const std::string outer = outer_address();
  if (outer.empty()) GTEST_SKIP() << "this host has no address but loopback";
  House house;
  RateLimiter limiter(house.listener.get(), few());
  const auto now = Clock::now();
  ASSERT_TRUE(house.knock(outer));
  limiter.record_success(limiter.next(now).value().source);
  for (int i = 0; i < 200; ++i) {
    ASSERT_TRUE(house.knock(outer));
    auto incoming = limiter.next(now);
    if (!incoming) break;
    limiter.record_failure(incoming->source, now);
  }
  EXPECT_EQ(limiter.blocked(), 0U);
  EXPECT_TRUE(limiter.paused_until(now));
}

TEST(RateLimiter, WithoutDescriptorsItWaits) {
  if (kUndefinedBehaviorSanitizer) GTEST_SKIP() << "UBSan looks at objects through a pipe";
  House house;
  RateLimiter limiter(house.listener.get());
  ASSERT_TRUE(house.knock());
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit none = before;
  none.rlim_cur = 0;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const auto now = Clock::now();
  const bool taken = limiter.next(now).has_value();
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_FALSE(taken);
  EXPECT_TRUE(limiter.paused_until(now));  // a thread that watches the listener does not spin
  EXPECT_TRUE(house.somebody_waits());
  EXPECT_TRUE(limiter.next(now + 200ms));
}

TEST(RateLimiter, OfAForeignIpv6NetworkAllAddressesCountAsOne) {
  EXPECT_EQ(of_network(1, 1).network_of(), of_network(1, 2).network_of());
  EXPECT_NE(of_network(1, 1).network_of(), of_network(2, 1).network_of());
  EXPECT_FALSE(of_network(1, 1).v4() || of_network(1, 1).loopback());
  // The kernel accepts the filter for such a network, too.
  House house;
  RateLimiter limiter(house.listener.get(), few());
  const auto now = Clock::now();
  for (std::uint8_t host = 1; host <= 8; ++host) limiter.record_failure(of_network(1, host), now);
  EXPECT_EQ(limiter.blocked(), 1U);
  EXPECT_TRUE(house.knock());
  EXPECT_TRUE(limiter.next(now));
}

TEST(RateLimiter, WhereAPeerHasComeFromEachIpv6AddressCountsForItself) {
  House house;
  RateLimiter limiter(house.listener.get(), few());
  const auto now = Clock::now();
  limiter.record_success(of_network(1, 1));
  // A host in the peer's network fails, and then the peer's own address. Only the first is blocked.
  for (int i = 0; i < 50; ++i) {
    limiter.record_failure(of_network(1, 2), now);
    limiter.record_failure(of_network(1, 1), now);
  }
  EXPECT_EQ(limiter.blocked(), 1U);
  // A peer that proves itself although its whole network is blocked unblocks the network.
  for (int i = 0; i < 50; ++i) limiter.record_failure(of_network(2, 2), now);
  EXPECT_EQ(limiter.blocked(), 2U);
  limiter.record_success(of_network(2, 1));
  EXPECT_EQ(limiter.blocked(), 1U);
}

TEST(RateLimiter, OfAnIpv6NetworkThatThisHostIsInEachAddressCountsForItself) {
  const auto all = value_or_throw(interface_addresses());
  const auto here = std::find_if(all.begin(), all.end(),
                                 [](const InterfaceAddress& each) { return !each.loopback && each.length == 16; });
  if (here == all.end()) GTEST_SKIP() << "this host has no IPv6 address but loopback";
  House house;
  RateLimiter limiter(house.listener.get(), few());
  const auto now = Clock::now();
  // No single address of this LAN fails often, though all together do.
  Source neighbour{here->bytes};
  for (std::uint8_t host = 0; host < 50; ++host) {
    neighbour.bytes[15] = host;
    limiter.record_failure(neighbour, now);
  }
  EXPECT_EQ(limiter.blocked(), 0U);
}

TEST(RateLimiter, TheKernelDropsOneIpv6AddressAndNotItsNeighbour) {
  sys::UniqueFd listener = value_or_throw(listen_on({{"::", 0}, {}}));
  const std::uint16_t port = value_or_throw(local_endpoint(listener.get())).tcp.port;
  std::string outer;
  for (const InterfaceAddress& each : value_or_throw(interface_addresses())) {
    if (!each.loopback && each.length == 16) outer = each.text;
  }
  if (outer.empty()) GTEST_SKIP() << "this host has no IPv6 address but loopback";
  RateLimiter limiter(listener.get(), few());
  const auto now = Clock::now();
  const auto knock = [&](std::chrono::milliseconds patience) {
    return connect_once({{outer, port}, {}}, deadline_in(patience)).has_value();
  };
  ASSERT_TRUE(knock(10s));
  Source neighbour = limiter.next(now).value().source;
  const Source own = neighbour;
  neighbour.bytes[15] ^= 1;
  for (int i = 0; i < 8; ++i) limiter.record_failure(neighbour, now);
  EXPECT_EQ(limiter.blocked(), 1U);
  EXPECT_TRUE(knock(10s));
  for (int i = 0; i < 8; ++i) limiter.record_failure(own, now);
  EXPECT_EQ(limiter.blocked(), 2U);
  EXPECT_FALSE(knock(300ms));
}

TEST(RateLimiter, WhoIsNewDoesNotGoForThoseWhoAreSilent) {
  struct Waiting {
    int number;
    bool credible;
  };
  const auto goes = [](std::vector<Waiting> waiting) {
    return pick_eviction(waiting, [](const Waiting& each) { return each.credible; })->number;
  };
  EXPECT_EQ(goes({{1, true}, {2, false}, {3, false}}), 2);
  EXPECT_EQ(goes({{1, true}, {2, true}, {3, false}}), 1);
  EXPECT_EQ(goes({{1, true}, {2, true}, {3, true}}), 1);
  EXPECT_EQ(goes({{1, false}}), 1);
}

TEST(ReplayFilter, WordsCountOnceAndTheOldestAreForgotten) {
  ReplayFilter heard(3);
  const auto words = [](std::uint8_t number) { return ReplayFilter::Words{number}; };
  for (std::uint8_t number = 1; number <= 3; ++number) EXPECT_TRUE(heard.first_time(words(number)));
  for (std::uint8_t number = 1; number <= 3; ++number) EXPECT_FALSE(heard.first_time(words(number)));
  EXPECT_TRUE(heard.first_time(words(4)));
  EXPECT_FALSE(heard.first_time(words(2)));
  EXPECT_FALSE(heard.first_time(words(4)));
  EXPECT_TRUE(heard.first_time(words(1)));
}

// Tests which connections an acceptor admits, and when it reports them.

using namespace std::chrono_literals;

struct Gate {
  explicit Gate(Acceptor::Options options) {
    options.secret = secret;
    options.on_refused = [this](const Acceptor::Refusal& refused) { refusals.push_back(refused); };
    std::vector<sys::UniqueFd> listeners;
    for (int i = 0; i < 2; ++i) {
      listeners.push_back(value_or_throw(listen_on(any_loopback_port())));
      places.push_back(value_or_throw(local_endpoint(listeners.back().get())));
    }
    acceptor.emplace(std::move(listeners), std::move(options));
  }
  SecureConnection client(std::size_t place) const {
    auto socket = connect_once(places[place], deadline_in(10s));
    if (!socket) throw socket.error().error;
    return value_or_throw(SecureConnection::with_secret(*std::move(socket), Role::Client, secret));
  }
  /// Waits like the acceptor's owners, who call `next` only when its descriptor is ready.
  std::optional<Acceptor::Accepted> wait(std::chrono::milliseconds limit) {
    for (const auto deadline = deadline_in(limit); wait_ready(acceptor->fd(), POLLIN, deadline).value_or(false);) {
      if (auto accepted = acceptor->next()) return accepted;
    }
    return std::nullopt;
  }
  Secret secret = value_or_throw(Secret::generate());
  std::vector<Endpoint> places;
  std::vector<Acceptor::Refusal> refusals;
  std::optional<Acceptor> acceptor;
};

/// Returns a short time that is long enough for a handshake on this machine, which may be an emulated one.
std::chrono::milliseconds short_patience() {
  Acceptor::Options options;
  options.patience = 60s;
  Gate gate(std::move(options));
  const auto since = Clock::now();
  SecureConnection client = gate.client(0);
  while (!client.established()) {
    (void)gate.wait(1ms);
    if (!client.advance()) throw std::runtime_error("no handshake in a minute");
  }
  return 50ms + 3 * std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - since);
}

TEST(Acceptor, HearsOfOneWhoHasNoSecret) {
  Gate gate({});
  std::thread other([place = gate.places[0].tcp] { tell_of_no_secret(place, deadline_in(10s)); });
  const auto limit = deadline_in(10s);
  while (gate.refusals.empty() && std::chrono::steady_clock::now() < limit) EXPECT_FALSE(gate.wait(10ms));
  other.join();  // the thread ends as soon as it has been refused
  ASSERT_EQ(gate.refusals.size(), 1u);
  EXPECT_NE(std::string(gate.refusals[0].why.what()).find("it brings no secret"), std::string::npos)
      << gate.refusals[0].why.what();
}

TEST(Acceptor, GivesAwayWhoHasProvedItselfAndSpoken) {
  Gate gate({});
  for (const std::size_t place : {0U, 1U}) {
    SecureConnection client = gate.client(place);
    while (!client.established()) {
      EXPECT_FALSE(gate.wait(1ms)) << "it has said nothing";
      ASSERT_TRUE(client.advance());
    }
    EXPECT_FALSE(gate.wait(20ms));
    ASSERT_TRUE(client.queue("first"));
    ASSERT_TRUE(client.queue("second"));
    auto accepted = gate.wait(10s);
    ASSERT_TRUE(accepted);
    EXPECT_EQ(accepted->first, "first");
    EXPECT_EQ(value_or_throw(accepted->connection.receive(deadline_in(10s))), "second");
  }
  EXPECT_TRUE(gate.refusals.empty());
}

TEST(Acceptor, ItsDescriptorTellsOfDeadlines) {
  Acceptor::Options options;
  options.patience = short_patience();
  Gate gate(std::move(options));
  const auto stranger = connect_once(gate.places[0], deadline_in(10s));
  SecureConnection silent = gate.client(1);
  for (int i = 0; i < 6000 && gate.refusals.size() < 2; ++i) {
    EXPECT_FALSE(gate.wait(10ms));
    (void)silent.advance();
  }
  ASSERT_EQ(gate.refusals.size(), 2U);
  EXPECT_FALSE(gate.refusals[0].proven);
  EXPECT_TRUE(gate.refusals[1].proven);
  for (const auto& refused : gate.refusals) EXPECT_EQ(refused.why.code(), ErrorCode::Timeout);
}

TEST(Acceptor, ASecretThatAnybodyCanMakeProvesNothing) {
  Acceptor::Options options;
  options.patience = short_patience();
  options.public_secret = true;
  Gate gate(std::move(options));
  SecureConnection silent = gate.client(0);
  for (int i = 0; i < 6000 && gate.refusals.empty(); ++i) {
    EXPECT_FALSE(gate.wait(10ms));
    (void)silent.advance();
  }
  ASSERT_EQ(gate.refusals.size(), 1U);
  EXPECT_TRUE(silent.established());
  EXPECT_FALSE(gate.refusals[0].proven);
}

}  // namespace

}  // namespace cohort::net
