#include "net/shared_calls.h"
#include "net/rpc.h"

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

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
  while (both.client->state(*number) == SharedCallsClient::State::UnderWay) (void)both.client->wait(seen, 20s);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  later.join();
}

// A faulty client that writes arbitrary bytes into the memory.
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

// Tests calls through shared memory, between an RpcServer and an RpcClient.

using namespace std::chrono_literals;

/// Answers a call with the number of bytes that it asks for and its body, at once, when another call comes, or never.
class Echo final : public RpcServer::Service {
 public:
  enum Method : std::uint8_t { kEcho = 1, kPark, kRelease, kNever, kNonsense };
  std::atomic<RpcServer*> server{nullptr};  // the server listens before this is set

  Result<void> on_call(const RpcServer::ClientPtr& client, const RpcServer::Call& call) override {
    switch (call.method) {
      case kEcho: {
        const std::size_t bytes = std::stoul("0" + std::string(call.body.substr(0, 8)));
        server.load()->answer(client, call.id, call.body, bytes, [&](char* to) { std::fill_n(to, bytes, 'e'); });
        break;
      }
      case kPark: parked_.emplace_back(client, call.id); break;
      case kRelease:
        for (const auto& [of, id] : parked_) server.load()->answer(of, id, "released");
        parked_.clear();
        server.load()->answer(client, call.id, "");
        break;
      case kNever: break;
      default: return fail(ErrorCode::Corrupt, "nonsense");
    }
    return {};
  }
  void on_gone(const RpcServer::ClientPtr& client) override {
    std::erase_if(parked_, [&](const auto& one) { return one.first == client; });
  }

 private:
  std::vector<std::pair<RpcServer::ClientPtr, std::uint64_t>> parked_;
};

struct Served {
  Echo echo;
  RpcServer server;
  explicit Served(bool shared_memory, const std::string& name = "cohort-rpc-test-" + std::to_string(::getpid()))
      : server(options(shared_memory, name), echo) {
    echo.server = &server;
  }
  static RpcServer::Options options(bool shared_memory, const std::string& name) {
    RpcServer::Options options;
    options.name = "echo";
    options.endpoint.unix_name = name;
    options.shared_memory = shared_memory;
    return options;
  }
};

std::unique_ptr<RpcClient> connect(const Endpoint& endpoint) {
  RpcPlace place;
  place.endpoints = {endpoint};
  place.secure.descriptors = true;
  std::unique_ptr<RpcClient> client;
  rpc_connect(place, deadline_in(20s), [&](SecureConnection connection, const std::string& at, Deadline limit) {
    client = std::make_unique<RpcClient>(std::move(connection), "echo", at);
    (void)client->call(Echo::kEcho, "", limit);
  });
  return client;
}

void share(RpcClient& client) {
  const auto shared = client.share_memory("this host", deadline_in(20s));
  ASSERT_TRUE(shared) << shared.error().what();
  EXPECT_FALSE(*shared);
}

TEST(RpcShared, CallsOfAllLengths) {
  Served served(true);
  const auto client = connect(served.server.endpoint());
  share(*client);
  // Answers go through shared memory, or over the socket if the answer or the call does not fit there.
  for (const std::size_t bytes : {0U, 10U, 1000U, 5000U, 300'000U, 3'000'000U, 5'000'000U}) {
    for (const std::size_t body : {8U, 100'000U, 2'000'000U, 4'300'000U}) {
      std::string asked = std::to_string(bytes);
      asked.resize(body, ' ');
      const RpcAnswer answer = client->finish(client->begin(Echo::kEcho, asked, bytes + body), deadline_in(20s));
      ASSERT_EQ(answer.body().size(), body + bytes);
      EXPECT_EQ(answer.body().substr(0, body), asked);
      EXPECT_EQ(answer.body().find_first_not_of('e', body), std::string_view::npos);
    }
  }
}

TEST(RpcShared, MoreThanThereIsRoomForInWhateverOrderTheyAreFinished) {
  Served served(true);
  const auto client = connect(served.server.endpoint());
  share(*client);
  std::vector<std::uint64_t> calls;
  for (int i = 0; i < 40; ++i) {
    std::string asked = "500000  " + std::to_string(i);
    calls.push_back(client->begin(Echo::kEcho, asked, 500'100));
  }
  for (int i = 39; i >= 0; --i) {
    const RpcAnswer answer = client->finish(calls[static_cast<std::size_t>(i)], deadline_in(20s));
    EXPECT_EQ(answer.body().substr(8, 2), std::to_string(i).substr(0, 2) + (i < 10 ? "e" : ""));
  }
}

TEST(RpcShared, ManyThreadsAndAnswersThatWait) {
  Served served(true);
  const auto client = connect(served.server.endpoint());
  share(*client);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&, thread] {
      for (int i = 0; i < 200; ++i) {
        if (thread == 0) {
          EXPECT_EQ(client->call(Echo::kRelease, "", deadline_in(20s)), "");
        } else if (thread == 1) {
          const std::uint64_t call = client->begin(Echo::kPark, "");
          (void)client->call(Echo::kRelease, "", deadline_in(20s));
          EXPECT_EQ(client->finish(call, deadline_in(20s)).body(), "released");
        } else {
          const std::size_t bytes = static_cast<std::size_t>(i) * 1000;
          const RpcAnswer answer =
              client->finish(client->begin(Echo::kEcho, std::to_string(bytes), bytes), deadline_in(20s));
          EXPECT_GE(answer.body().size(), bytes);
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

TEST(RpcShared, WhatIsNotAnsweredTimesOutAndTheRestGoesOn) {
  Served served(true);
  const auto client = connect(served.server.endpoint());
  share(*client);
  for (int i = 0; i < 100; ++i) {
    const std::uint64_t call = client->begin(Echo::kPark, "");
    try {
      (void)client->finish(call, deadline_in(1ms));
      ADD_FAILURE() << "an answer";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Timeout);
    }
    if (i % 50 == 49) (void)client->call(Echo::kRelease, "", deadline_in(20s));
  }
  EXPECT_EQ(client->call(Echo::kEcho, "5", deadline_in(20s)), "5eeeee");
}

TEST(RpcShared, WhyNotIsSaidAndCallsGoOverTheSocket) {
  Served served(false);
  const auto client = connect(served.server.endpoint());
  const auto shared = client->share_memory("this host", deadline_in(20s));
  ASSERT_FALSE(shared);
  EXPECT_EQ(shared.error().code(), ErrorCode::Unavailable);
  EXPECT_EQ(client->call(Echo::kEcho, "5", deadline_in(20s)), "5eeeee");
}

TEST(RpcShared, WhoTalksNonsenseIsClosed) {
  Served served(true);
  const auto client = connect(served.server.endpoint());
  share(*client);
  try {
    (void)client->call(Echo::kNonsense, "", deadline_in(20s));
    ADD_FAILURE() << "an answer";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::PeerLost);
  }
  share(*connect(served.server.endpoint()));
}

TEST(RpcShared, AServerThatIsKilledIsFoundAtOnce) {
  Endpoint endpoint;
  endpoint.unix_name = "cohort-rpc-killed-" + std::to_string(::getpid());
  const pid_t process = ::fork();
  ASSERT_GE(process, 0);
  if (process == 0) {
    Served served(true, endpoint.unix_name);
    while (true) ::pause();
  }
  const auto client = connect(endpoint);
  share(*client);
  const std::uint64_t call = client->begin(Echo::kNever, "");
  std::thread killer([process] {
    std::this_thread::sleep_for(50ms);
    ::kill(process, SIGKILL);
  });
  const auto begin = std::chrono::steady_clock::now();
  try {
    (void)client->finish(call, deadline_in(20s));
    ADD_FAILURE() << "an answer";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::PeerLost);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 15s);
  killer.join();
  ::waitpid(process, nullptr, 0);
}

}  // namespace

}  // namespace cohort::net
