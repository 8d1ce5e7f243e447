#include "net/reach.h"

#include "net/link_watch.h"
#include "net/socket.h"

#include <gtest/gtest.h>
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace cohort::net {
namespace {

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
  const Endpoint closed = Listener().endpoint;  // nobody is there any more
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
