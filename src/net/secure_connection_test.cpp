#include "net/secure_connection.h"
#include "net/socket.h"

#include <gtest/gtest.h>

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::net {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

struct Pair {
  sys::UniqueFd client, server;
};

Pair tcp_pair() {
  auto listener = value_or_throw(listen_on({{"127.0.0.1", 0}, {}}));
  const auto endpoint = value_or_throw(local_endpoint(listener.get()));
  auto client = connect_once(endpoint, deadline_in(seconds(10)));
  if (!client) throw client.error().error;
  if (!value_or_throw(wait_ready(listener.get(), 1 /* POLLIN */, deadline_in(seconds(10)))))
    throw std::runtime_error("no connection");
  auto server = value_or_throw(accept_one(listener.get()));
  return {*std::move(client), *std::move(server)};
}

Secret secret_of(std::uint8_t byte) {
  std::array<std::uint8_t, Secret::kBytes> bytes;
  bytes.fill(byte);
  return Secret::from_bytes(bytes);
}

struct Outcome {
  Result<void> client, server;
};

// Runs both handshakes, each on its own thread.
Outcome shake(SecureConnection& client, SecureConnection& server) {
  Outcome outcome;
  std::thread other([&] { outcome.server = server.handshake(deadline_in(seconds(10))); });
  outcome.client = client.handshake(deadline_in(seconds(10)));
  other.join();
  return outcome;
}

TEST(SecureConnection, CarriesMessagesBothWays) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(7)));
  auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(7)));
  const Outcome outcome = shake(client, server);
  ASSERT_TRUE(outcome.client) << outcome.client.error().what();
  ASSERT_TRUE(outcome.server) << outcome.server.error().what();
  ASSERT_TRUE(client.send("hello", deadline_in(seconds(10))));
  ASSERT_TRUE(client.send("", deadline_in(seconds(10))));
  EXPECT_EQ(value_or_throw(server.receive(deadline_in(seconds(10)))), "hello");
  EXPECT_EQ(value_or_throw(server.receive(deadline_in(seconds(10)))), "");
  std::string large(5'000'000, 'x');
  for (std::size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 2654435761U >> 24);
  std::thread sender([&] { EXPECT_TRUE(server.send(large, deadline_in(seconds(30)))); });
  EXPECT_TRUE(value_or_throw(client.receive(deadline_in(seconds(30)))) == large);
  sender.join();
}

TEST(SecureConnection, MessagesQueuedBeforeTheHandshakeArrive) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(7)));
  auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(7)));
  ASSERT_TRUE(client.queue("early"));
  ASSERT_TRUE(server.queue("bird"));
  const Outcome outcome = shake(client, server);
  ASSERT_TRUE(outcome.client && outcome.server);
  ASSERT_TRUE(client.advance());
  EXPECT_EQ(value_or_throw(server.receive(deadline_in(seconds(10)))), "early");
  EXPECT_EQ(value_or_throw(client.receive(deadline_in(seconds(10)))), "bird");
}

TEST(SecureConnection, RefusesAnotherSecretOnBothSides) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(1)));
  auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(2)));
  ASSERT_TRUE(client.queue("payload"));
  const Outcome outcome = shake(client, server);
  ASSERT_FALSE(outcome.client);
  ASSERT_FALSE(outcome.server);
  EXPECT_NE(std::string(outcome.client.error().what()).find("the secret differs"), std::string::npos)
      << outcome.client.error().what();
  EXPECT_NE(std::string(outcome.server.error().what()).find("the secret differs"), std::string::npos)
      << outcome.server.error().what();
  EXPECT_EQ(outcome.client.error().code(), ErrorCode::InvalidArgument);
  EXPECT_FALSE(client.established());
  EXPECT_FALSE(server.established());
  EXPECT_FALSE(server.next_message());
}

TEST(SecureConnection, RefusesAnotherPurpose) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(
      SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(1), {.purpose = "store"}));
  auto server = value_or_throw(
      SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1), {.purpose = "agent"}));
  const Outcome outcome = shake(client, server);
  EXPECT_FALSE(outcome.client);
  EXPECT_FALSE(outcome.server);
}

TEST(SecureConnection, PlainTextGetsNothing) {
  for (const std::string& probe :
       {std::string("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), std::string("COHORT1\n"), std::string(5000, '\x16')}) {
    Pair pair = tcp_pair();
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1)));
    ASSERT_EQ(::send(pair.client.get(), probe.data(), probe.size(), MSG_NOSIGNAL), static_cast<ssize_t>(probe.size()));
    const auto result = server.handshake(deadline_in(seconds(10)));
    ASSERT_FALSE(result);
    EXPECT_NE(std::string(result.error().what()).find("authentication failed"), std::string::npos)
        << result.error().what();
    EXPECT_FALSE(server.established());
  }
}

TEST(SecureConnection, GarbageAtAnyPointIsAnErrorNotAMessage) {
  std::mt19937 random(1);
  for (int round = 0; round < 50; ++round) {
    Pair pair = tcp_pair();
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1)));
    std::string probe(1 + random() % 6000, '\0');
    for (char& c : probe) c = static_cast<char>(random());
    if (round % 2 == 0)
      probe.replace(0, std::min<std::size_t>(probe.size(), 6),
                    std::string("\x16\x03\x01\x0f\xff\x01", 6).substr(0, probe.size()));
    ASSERT_GT(::send(pair.client.get(), probe.data(), probe.size(), MSG_NOSIGNAL), 0);
    ::shutdown(pair.client.get(), SHUT_WR);
    EXPECT_FALSE(server.handshake(deadline_in(seconds(10))));
    EXPECT_FALSE(server.established());
    EXPECT_FALSE(server.next_message());
  }
}

TEST(SecureConnection, CutStreamIsPeerLostAndGoodByeIsNot) {
  for (const bool cut : {true, false}) {
    Pair pair = tcp_pair();
    const int raw = pair.client.get();
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1)));
    {
      auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(1)));
      const Outcome outcome = shake(client, server);
      ASSERT_TRUE(outcome.client && outcome.server);
      if (cut) ::shutdown(raw, SHUT_RDWR);
    }
    const auto message = server.receive(deadline_in(seconds(10)));
    ASSERT_FALSE(message);
    EXPECT_EQ(message.error().code(), ErrorCode::PeerLost);
    EXPECT_EQ(server.at_end(), !cut);
  }
}

TEST(SecureConnection, RefusesMessagesThatAreTooLong) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(1)));
  auto server = value_or_throw(
      SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1), {.longest_message = 100}));
  const Outcome outcome = shake(client, server);
  ASSERT_TRUE(outcome.client && outcome.server);
  EXPECT_FALSE(server.queue(std::string(101, 'x')));
  ASSERT_TRUE(client.queue(std::string(101, 'x')));
  const auto message = server.receive(deadline_in(seconds(10)));
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), ErrorCode::Corrupt);
}

TEST(SecureConnection, WaitsEndAtTheirDeadline) {
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(1)));
  const auto shaken = client.handshake(deadline_in(milliseconds(50)));
  ASSERT_FALSE(shaken);
  EXPECT_EQ(shaken.error().code(), ErrorCode::Timeout);
  auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(1)));
  const Outcome outcome = shake(client, server);
  ASSERT_TRUE(outcome.client && outcome.server);
  const auto message = client.receive(deadline_in(milliseconds(50)));
  ASSERT_FALSE(message);
  EXPECT_EQ(message.error().code(), ErrorCode::Timeout);
  ASSERT_TRUE(server.send("late", deadline_in(seconds(10))));
  EXPECT_EQ(value_or_throw(client.receive(deadline_in(seconds(10)))), "late");
}

TEST(SecureConnection, SameUserWorksWithoutASecret) {
  int fds[2];
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
  auto client = value_or_throw(SecureConnection::same_user(sys::UniqueFd(fds[0]), Role::Client));
  auto server = value_or_throw(SecureConnection::same_user(sys::UniqueFd(fds[1]), Role::Server));
  const Outcome outcome = shake(client, server);
  ASSERT_TRUE(outcome.client && outcome.server);
  ASSERT_TRUE(client.send("hello", deadline_in(seconds(10))));
  EXPECT_EQ(value_or_throw(server.receive(deadline_in(seconds(10)))), "hello");
}

TEST(SecureConnection, SaysSoWhenOnlyOneSideHasASecret) {
  for (const bool server_has_it : {true, false}) {
    int fds[2];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds), 0);
    const auto make = [&](int fd, Role role, bool secret) {
      return value_or_throw(secret ? SecureConnection::with_secret(sys::UniqueFd(fd), role, secret_of(1))
                                   : SecureConnection::same_user(sys::UniqueFd(fd), role));
    };
    auto client = make(fds[0], Role::Client, !server_has_it);
    auto server = make(fds[1], Role::Server, server_has_it);
    // The end without a secret sends first. The other may read that before it has sent anything, and closes at once.
    SecureConnection& without = server_has_it ? client : server;
    SecureConnection& with = server_has_it ? server : client;
    ASSERT_TRUE(without.advance());
    for (SecureConnection* const end : {&with, &without}) {
      const auto advanced = end->advance();
      ASSERT_FALSE(advanced);
      EXPECT_NE(std::string(advanced.error().what()).find("COHORT_SECRET_FILE"), std::string::npos)
          << advanced.error().what();
    }
  }
}

/// Two ends that have connected, and the bytes that each has sent, as recorded on the wire.
struct Recorded {
  std::string of_client, of_server;
};
Recorded record_a_conversation(const Secret& secret) {
  Pair left = tcp_pair(), right = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(left.client), Role::Client, secret));
  auto server = value_or_throw(SecureConnection::with_secret(std::move(right.server), Role::Server, secret));
  Recorded recorded;
  const auto pass = [](int from, int to, std::string& record) {
    char bytes[4096];
    for (ssize_t n = 0; (n = ::recv(from, bytes, sizeof bytes, MSG_DONTWAIT)) > 0;) {
      record.append(bytes, static_cast<std::size_t>(n));
      EXPECT_EQ(::send(to, bytes, static_cast<std::size_t>(n), MSG_NOSIGNAL), n);
    }
  };
  EXPECT_TRUE(client.queue("a command"));
  const auto limit = deadline_in(seconds(20));
  std::optional<std::string> message;
  while (!message && !passed(limit)) {
    EXPECT_TRUE(client.advance());
    pass(left.server.get(), right.client.get(), recorded.of_client);
    EXPECT_TRUE(server.advance());
    pass(right.client.get(), left.server.get(), recorded.of_server);
    message = server.next_message();
  }
  EXPECT_EQ(message, "a command");
  return recorded;
}

TEST(SecureConnection, WhatWasRecordedIsWorthNothingLater) {
  const Secret secret = secret_of(7);
  const Recorded recorded = record_a_conversation(secret);
  ASSERT_GT(recorded.of_client.size(), 300U);
  // Replays them to a server, in one piece and in pieces.
  for (const std::size_t piece : {recorded.of_client.size(), std::size_t{50}}) {
    Pair pair = tcp_pair();
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret));
    Result<void> moved;
    std::string answer;
    for (std::string_view rest = recorded.of_client; !rest.empty() && moved;) {
      const std::string_view now = rest.substr(0, piece);
      rest.remove_prefix(now.size());
      ASSERT_EQ(::send(pair.client.get(), now.data(), now.size(), MSG_NOSIGNAL), static_cast<ssize_t>(now.size()));
      ASSERT_TRUE(value_or_throw(wait_ready(server.fd(), POLLIN, deadline_in(seconds(10)))));
      moved = server.advance();
    }
    EXPECT_FALSE(moved);
    EXPECT_FALSE(server.established());
    EXPECT_FALSE(server.next_message());
  }
  // Replays them to a client.
  Pair pair = tcp_pair();
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret));
  ASSERT_TRUE(client.queue("for the true server"));
  ASSERT_TRUE(client.advance());
  ASSERT_GT(::send(pair.server.get(), recorded.of_server.data(), recorded.of_server.size(), MSG_NOSIGNAL), 0);
  EXPECT_FALSE(client.handshake(deadline_in(seconds(10))));
  EXPECT_FALSE(client.established());
  EXPECT_EQ(client.unsent_bytes(), 4 + std::string_view("for the true server").size());  // not sent
}

TEST(SecureConnection, AServerKnowsWhoHasMadeABeginningWithTheSecret) {
  for (const std::uint8_t theirs : {std::uint8_t{7}, std::uint8_t{8}}) {
    Pair pair = tcp_pair();
    auto client =
        value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret_of(theirs)));
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret_of(7)));
    EXPECT_FALSE(server.credible());
    ASSERT_TRUE(client.advance());
    ASSERT_TRUE(value_or_throw(wait_ready(server.fd(), POLLIN, deadline_in(seconds(10)))));
    EXPECT_EQ(server.advance().has_value(), theirs == 7);
    EXPECT_EQ(server.credible(), theirs == 7);
    EXPECT_FALSE(server.established());
  }
}

TEST(SecureConnection, FirstWordsCountOnceForAListener) {
  const Secret secret = secret_of(7);
  const std::string of_client = record_a_conversation(secret).of_client;
  const std::size_t hello = 5 + (static_cast<std::size_t>(static_cast<unsigned char>(of_client[3])) << 8 |
                                 static_cast<unsigned char>(of_client[4]));  // length of the hello's record
  ReplayFilter heard;
  // Repeated in one piece and, since an attacker may choose the pieces, in several.
  std::size_t times = 0;
  for (const std::size_t piece : {hello, hello, std::size_t{100}}) {
    Pair pair = tcp_pair();
    auto server =
        value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret, {.heard = &heard}));
    Result<void> moved;
    for (std::string_view rest = std::string_view(of_client).substr(0, hello); !rest.empty() && moved;) {
      const std::string_view now = rest.substr(0, piece);
      rest.remove_prefix(now.size());
      ASSERT_EQ(::send(pair.client.get(), now.data(), now.size(), MSG_NOSIGNAL), static_cast<ssize_t>(now.size()));
      ASSERT_TRUE(value_or_throw(wait_ready(server.fd(), POLLIN, deadline_in(seconds(10)))));
      moved = server.advance();
    }
    EXPECT_EQ(moved.has_value(), times == 0);
    EXPECT_EQ(server.credible(), times == 0);
    ++times;
  }
}

TEST(SecureConnection, WhatIsLeftOfItIsASocketAndAKeyOfItsOwn) {
  const Secret secret = secret_of(7);
  const SecureOptions options{.purpose = "bulk", .detachable = true};
  std::array<std::uint8_t, 32> before{};
  for (const auto encryption : {SecureConnection::Encryption::Ends, SecureConnection::Encryption::Stays}) {
    Pair pair = tcp_pair();
    auto server = value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret, options));
    auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret, options));
    const auto deadline = deadline_in(seconds(10));
    std::thread other([&] { EXPECT_TRUE(client.handshake(deadline)); });
    EXPECT_TRUE(server.handshake(deadline));
    other.join();
    ASSERT_TRUE(server.send("the last", deadline));
    auto theirs = value_or_throw(server.detach(encryption));
    // Bytes right behind the last message do not belong to the connection any more.
    const std::string_view bytes = "bulk";
    if (theirs.stream) {
      ASSERT_EQ(value_or_throw(theirs.stream->write(std::as_bytes(std::span(bytes)))), bytes.size());
    } else {
      ASSERT_EQ(::send(theirs.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL), 4);
    }
    EXPECT_EQ(value_or_throw(client.receive(deadline)), "the last");
    auto ours = value_or_throw(client.detach(encryption));
    EXPECT_EQ(ours.key, theirs.key);
    EXPECT_NE(ours.key, before);
    before = ours.key;
    std::array<char, 16> got{};
    std::size_t count = 0;
    while (count < bytes.size()) {
      ASSERT_TRUE(value_or_throw(wait_ready(ours.socket.get(), POLLIN, deadline)));
      if (ours.stream) {
        count += value_or_throw(ours.stream->read(std::as_writable_bytes(std::span(got)).subspan(count))).value_or(0);
      } else {
        count += static_cast<std::size_t>(::recv(ours.socket.get(), got.data() + count, got.size() - count, 0));
      }
    }
    EXPECT_EQ(std::string_view(got.data(), count), bytes);
  }
}

TEST(SecureConnection, WhoDetachesHearsNoGoodByeOfTheOtherEnd) {
  const Secret secret = secret_of(7);
  const SecureOptions options{.purpose = "bulk", .detachable = true};
  Pair pair = tcp_pair();
  const auto deadline = deadline_in(seconds(10));
  auto client = value_or_throw(SecureConnection::with_secret(std::move(pair.client), Role::Client, secret, options));
  std::optional server =
      value_or_throw(SecureConnection::with_secret(std::move(pair.server), Role::Server, secret, options));
  std::thread other([&] { EXPECT_TRUE(client.handshake(deadline)); });
  EXPECT_TRUE(server->handshake(deadline));
  other.join();
  auto ours = value_or_throw(client.detach(SecureConnection::Encryption::Ends));
  server.reset();
  ASSERT_TRUE(value_or_throw(wait_ready(ours.socket.get(), POLLIN, deadline)));
  char byte = 0;
  EXPECT_EQ(::recv(ours.socket.get(), &byte, 1, 0), 0);
}

using namespace std::chrono_literals;

Secret new_secret() { return value_or_throw(Secret::generate()); }

struct Listener {
  sys::UniqueFd fd = value_or_throw(listen_on({{"127.0.0.1", 0}, {}}));
  Endpoint endpoint = value_or_throw(local_endpoint(fd.get()));
};

/// Answers one connection with the secret.
std::thread serve(const Listener& listener, const Secret& secret) {
  return std::thread([&listener, secret] {
    const Deadline deadline = deadline_in(20s);
    while (value_or_throw(wait_ready(listener.fd.get(), POLLIN, deadline))) {
      auto socket = value_or_throw(accept_one(listener.fd.get()));
      if (!socket) continue;
      auto connection = value_or_throw(SecureConnection::with_secret(*std::move(socket), Role::Server, secret));
      if (connection.handshake(deadline)) (void)connection.receive(deadline);
      return;
    }
  });
}

TEST(Reach, TheOneThatProvesTheSecretIsFoundAmongOthers) {
  const Secret secret = new_secret(), other = new_secret();
  Listener right, wrong, silent;
  std::thread right_server = serve(right, secret);
  std::thread wrong_server = serve(wrong, other);
  const Endpoint closed = Listener().endpoint;  // nothing listens there any more
  const std::vector<Endpoint> endpoints = {wrong.endpoint, silent.endpoint, closed, right.endpoint};
  {
    auto connection = reach(endpoints, secret, {}, deadline_in(20s));
    ASSERT_TRUE(connection) << connection.error().what();
    EXPECT_EQ(value_or_throw(peer_endpoint(connection->fd())).tcp, right.endpoint.tcp);
    EXPECT_TRUE(connection->send("hello", deadline_in(10s)));
  }
  right_server.join();
  wrong_server.join();
}

TEST(Reach, WhatBecameOfEachAddressIsSaid) {
  Listener silent;
  const Endpoint closed = Listener().endpoint;
  const std::vector<Endpoint> endpoints = {closed, silent.endpoint};
  const auto connection = reach(endpoints, new_secret(), {}, deadline_in(200ms));
  ASSERT_FALSE(connection);
  const std::string why = connection.error().what();
  EXPECT_EQ(connection.error().code(), ErrorCode::Timeout);
  EXPECT_NE(why.find(to_string(closed) + " (Connection refused"), std::string::npos) << why;
  EXPECT_NE(why.find(to_string(silent.endpoint) + " (connected, and no proof"), std::string::npos) << why;
}

TEST(Reach, FailsAtOnceWhereNobodyIs) {
  const std::vector<Endpoint> nobody = {Listener().endpoint};
  const auto connection = reach(nobody, new_secret(), {}, deadline_in(60s));
  ASSERT_FALSE(connection);
  EXPECT_EQ(connection.error().code(), ErrorCode::Unavailable);
}

TEST(LinkWatch, AListenerOfBothFamiliesNamesAnIPv4PeerByItsOwnAddress) {
  auto listener = listen_on({{"::", 0}, {}});
  if (!listener) GTEST_SKIP() << "no IPv6: " << listener.error().what();
  const std::uint16_t port = value_or_throw(local_endpoint(listener->get())).tcp.port;
  auto socket = connect_once({{"127.0.0.1", port}, {}}, deadline_in(10s));
  ASSERT_TRUE(socket);
  ASSERT_TRUE(value_or_throw(wait_ready(listener->get(), POLLIN, deadline_in(10s))));
  auto accepted = value_or_throw(accept_one(listener->get()));
  ASSERT_TRUE(accepted);
  EXPECT_EQ(value_or_throw(peer_endpoint(accepted->get())).tcp.host, "127.0.0.1");
  EXPECT_EQ(value_or_throw(local_endpoint(accepted->get())).tcp.host, "127.0.0.1");
  watch_link(accepted->get());
  ASSERT_TRUE(link_silence(accepted->get()));
  EXPECT_LT(*link_silence(accepted->get()), 60s);
}

}  // namespace

}  // namespace cohort::net
