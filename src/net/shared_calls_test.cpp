#include "net/shared_calls.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <string>
#include <thread>

namespace cohort::net {
namespace {

using namespace std::chrono_literals;

struct Ends {
  SharedCallsServer server;
  std::unique_ptr<SharedCallsClient> client;
};

Ends ends() {
  SharedCallsServer server = value_or_throw(SharedCallsServer::make());
  const sys::UniqueFd descriptor = server.take_descriptor();
  auto client = value_or_throw(SharedCallsClient::map(descriptor));
  return {std::move(server), std::move(client)};
}

TEST(SharedCalls, ComeInOrderAndAreAnsweredInAny) {
  Ends both = ends();
  EXPECT_FALSE(value_or_throw(both.server.next()));
  const auto first = both.client->begin(7, "first", 0);
  const auto second = both.client->begin(8, "second", 1000);
  ASSERT_TRUE(first && second);
  EXPECT_TRUE(both.server.any());
  const auto one = *value_or_throw(both.server.next());
  EXPECT_EQ(one.method, 7);
  EXPECT_EQ(one.body, "first");
  const SharedCallId number = one.id;
  const auto two = *value_or_throw(both.server.next());
  EXPECT_EQ(two.body, "second");
  EXPECT_EQ(both.server.answer(two.id, "head", 900, [](char* rows) { std::memset(rows, 'r', 900); }),
            SharedCallsServer::Answered::Yes);
  EXPECT_EQ(both.client->state(*first), SharedCallsClient::State::UnderWay);
  ASSERT_EQ(both.client->state(*second), SharedCallsClient::State::Answered);
  const std::string_view answer = value_or_throw(both.client->answer(*second));
  EXPECT_EQ(answer, "head" + std::string(900, 'r'));
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(answer.data() + 4) % 64, 0U);
  EXPECT_EQ(both.server.answer(number, ""), SharedCallsServer::Answered::Yes);
  EXPECT_EQ(value_or_throw(both.client->answer(*first)), "");
  EXPECT_EQ(both.server.answer(number, "again"), SharedCallsServer::Answered::NoSuchCall);
  EXPECT_EQ(both.server.answer(SharedCallId(99), ""), SharedCallsServer::Answered::NoSuchCall);
}

TEST(SharedCalls, RoomIsBoundedAndComesBack) {
  Ends both = ends();
  const std::string body(200'000, 'b');
  EXPECT_FALSE(SharedCallsClient::fits(kSharedBytes, 0));
  EXPECT_FALSE(SharedCallsClient::fits(0, kSharedBytes));
  for (int round = 0; round < 3; ++round) {
    std::vector<SharedCallId> begun;
    while (const auto number = both.client->begin(1, body, 0)) begun.push_back(*number);
    EXPECT_EQ(begun.size(), 15U) << "of 4 blocks each";
    for (const SharedCallId number : begun) {
      const auto call = *value_or_throw(both.server.next());
      EXPECT_TRUE(call.id == number);
      EXPECT_EQ(call.body, body);
      EXPECT_EQ(both.server.answer(number, std::string(100'000, 'a')), SharedCallsServer::Answered::TooLong);
      both.server.answer_elsewhere(number);
      EXPECT_EQ(both.client->state(number), SharedCallsClient::State::Elsewhere);
      both.client->free(number);
    }
  }
}

TEST(SharedCalls, WhoSleepsIsWoken) {
  Ends both = ends();
  EXPECT_FALSE(both.client->has_to_ring());
  EXPECT_TRUE(both.server.go_to_sleep());
  const auto number = both.client->begin(1, "x", 0);
  EXPECT_TRUE(both.client->has_to_ring());
  EXPECT_FALSE(both.client->has_to_ring()) << "once";
  EXPECT_FALSE(both.server.go_to_sleep()) << "a call has come";
  (void)both.server.next();
  const std::uint32_t seen = both.client->answers();
  EXPECT_FALSE(both.client->wait(seen, 1ms));
  std::thread later([&] {
    std::this_thread::sleep_for(20ms);
    (void)both.server.answer(*number, "y");
  });
  const auto begin = std::chrono::steady_clock::now();
  while (both.client->state(*number) == SharedCallsClient::State::UnderWay) (void)both.client->wait(seen, 10s);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 5s);
  later.join();
}

// A client that has gone mad: it writes into the memory what it likes.
TEST(SharedCalls, WhatMakesNoSenseIsRefused) {
  const auto segment = value_or_throw(sys::create_shared_segment("test", kSharedBytes));
  for (unsigned seed = 0; seed < 2000; ++seed) {
    auto* const words = static_cast<std::uint32_t*>(segment.mapping.data());
    std::uint32_t state = seed * 2654435761U + 1;
    for (std::size_t i = 0; i < kSharedBlock / 4; ++i) {
      state = state * 1664525U + 1013904223U;
      words[i] = (state >> 8) % (seed % 3 == 0 ? 5 : seed % 3 == 1 ? 70 : 300'000);
    }
    auto mapping = value_or_throw(sys::map_shared_segment(segment.fd.get(), kSharedBytes));
    SharedCallsServer server(sys::SharedSegment{{}, std::move(mapping)});
    for (int i = 0; i < 100; ++i) {
      const auto call = server.next();
      if (!call) {
        EXPECT_EQ(call.error().code(), ErrorCode::Corrupt);
        break;
      }
      if (!*call) break;
      EXPECT_LE((*call)->body.size(), kSharedBytes);
      if (i % 2 == 0) (void)server.answer((*call)->id, "answer", 1000, [](char* to) { std::memset(to, 1, 1000); });
    }
  }
}

}  // namespace
}  // namespace cohort::net
