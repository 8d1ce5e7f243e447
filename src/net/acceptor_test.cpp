// Who comes through an acceptor, and when it is heard of.
#include "net/acceptor.h"

#include "net/socket.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

namespace cohort::net {
namespace {

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
  /// Waits as its owners do, and never without need.
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

TEST(Acceptor, HearsOfOneWhoHasNoSecret) {
  Gate gate({});
  std::thread other([place = gate.places[0].tcp] { tell_of_no_secret(place, deadline_in(10s)); });
  const auto limit = deadline_in(10s);
  while (gate.refusals.empty() && std::chrono::steady_clock::now() < limit) EXPECT_FALSE(gate.wait(10ms));
  other.join();  // as soon as it has been refused
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
  options.patience = 50ms;
  Gate gate(std::move(options));
  const auto stranger = connect_once(gate.places[0], deadline_in(10s));
  SecureConnection silent = gate.client(1);
  for (int i = 0; i < 1000 && gate.refusals.size() < 2; ++i) {
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
  options.patience = 50ms;
  options.public_secret = true;
  Gate gate(std::move(options));
  SecureConnection silent = gate.client(0);
  for (int i = 0; i < 1000 && gate.refusals.empty(); ++i) {
    EXPECT_FALSE(gate.wait(10ms));
    (void)silent.advance();
  }
  ASSERT_EQ(gate.refusals.size(), 1U);
  EXPECT_TRUE(silent.established());
  EXPECT_FALSE(gate.refusals[0].proven);
}

}  // namespace
}  // namespace cohort::net
