// Several servers' states, and messages that arrive in any order: what they settle about a lost worker is the same on
// all.

#include "ps/state.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace cohort::ps {
namespace {

constexpr std::uint64_t kModelIncarnation = 1;

std::string one_row(const Order& order) {
  std::string body = pack(Change{order, 0, 1, {}});
  const std::uint64_t key = 7;
  const float gradient = -1;
  body.append(reinterpret_cast<const char*>(&key), sizeof key);
  return body.append(reinterpret_cast<const char*>(&gradient), sizeof gradient);
}

/// A server as `server.cpp` makes one, without connections.
class ModelServer {
 public:
  ModelServer(std::uint32_t number, std::uint32_t servers, Mode mode) {
    Hello hello;
    hello.workers = 2;
    hello.incarnation = kModelIncarnation;
    hello.server = number;
    hello.servers.resize(servers, "@somewhere");
    for (hello.worker = 0; hello.worker < 2; ++hello.worker) {
      state_.run({1, Method::Joined, hello.worker, kModelIncarnation, pack_kept(hello)});
      deliver(hello.worker, Method::Start, 1, pack(Start{{1, 0}, 0}));
    }
    TableOptions options;
    options.dim = 1;
    options.optimizer = optim::Sgd{.lr = 1};
    options.consistency.mode = mode;
    deliver(0, Method::Open, 2, pack(Open{{2, 1}, "t", options, 0}));
  }

  /// False: nothing is taken from that worker any more.
  bool deliver(std::uint32_t worker, Method method, std::uint64_t sequence, const std::string& body) {
    const auto verdict = state_.workers().judge({worker, kModelIncarnation, {sequence, sequence - 1}});
    if (!verdict) return false;
    if (*verdict == Workers::Verdict::Made) return true;
    const Command command{1, method, worker, kModelIncarnation, body};
    EXPECT_TRUE(state_.check(command, std::size_t{1} << 30));
    state_.run(command);
    return true;
  }
  std::int64_t answer_settle(std::uint32_t worker) {
    const Settle question{worker, kModelIncarnation};
    state_.run({1, Method::Settle, worker, 0, pack_kept(question)});
    return state_.ended(question);
  }
  void lose(std::uint32_t worker, std::int64_t ended) {
    state_.run({1, Method::Lost, worker, kModelIncarnation, pack_kept(Settled{ended})});
  }
  std::int64_t committed(std::uint32_t worker) const { return state_.workers().at(worker).committed; }
  std::int64_t settled() const { return state_.settled(); }
  float value() const {
    const std::uint64_t key = 7;
    float value = 0;
    state_.tables().at(0).read(&key, 1, &value, 1);
    return value;
  }

 private:
  template <class T>
  std::string_view pack_kept(const T& record) {
    kept_ = pack(record);
    return kept_;
  }
  State state_;
  std::string kept_;
};

/// A message of the worker that dies, on its way to one server.
struct OnItsWay {
  std::size_t server;
  Method method;
  std::uint64_t sequence;
  std::string body;
};

/// One server's progress with the worker: it asks the other servers one after the other, then decides.
struct Asking {
  std::vector<std::size_t> others;
  std::int64_t most = 0;
};

void one_schedule(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  const std::size_t count = 1 + below(4);
  const Mode mode = below(2) == 0 ? Mode::Sync : Mode::Bounded;
  std::deque<ModelServer> servers;
  for (std::size_t i = 0; i < count; ++i)
    servers.emplace_back(static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(count), mode);

  // Worker 1 ends some clocks, then dies with messages on their way. A clock's end is told when all have its pushes.
  std::vector<OnItsWay> on_their_way;
  const std::int64_t whole = static_cast<std::int64_t>(below(3));
  std::uint64_t sequence = 1;
  std::int64_t clock = 0;
  const auto send_all = [&](Method method) {
    ++sequence;
    for (std::size_t i = 0; i < count; ++i) {
      const Order order{sequence, sequence - 1};
      on_their_way.push_back(
          {i, method, sequence, method == Method::Push ? one_row(order) : pack(Commit{order, clock})});
    }
    std::shuffle(on_their_way.begin(), on_their_way.end(), random);
  };
  const auto arrive = [&] {
    const OnItsWay message = on_their_way.back();
    on_their_way.pop_back();
    return servers[message.server].deliver(1, message.method, message.sequence, message.body);
  };
  for (; clock < whole; ++clock) {
    for (const Method method : {Method::Push, Method::Commit}) {
      send_all(method);
      while (!on_their_way.empty()) ASSERT_TRUE(arrive());
    }
  }
  const bool tells = below(4) != 0;
  send_all(Method::Push);
  if (tells) {
    while (!on_their_way.empty()) ASSERT_TRUE(arrive());
    send_all(Method::Commit);
  }

  // Each server finds out in its own time, while messages still arrive, or never do.
  std::vector<std::optional<Asking>> asking(count);
  std::vector<bool> decided(count, false);
  while (std::find(decided.begin(), decided.end(), false) != decided.end()) {
    if (!on_their_way.empty() && below(3) == 0) {
      if (below(4) == 0) {
        on_their_way.pop_back();
      } else {
        (void)arrive();
      }
    }
    const std::size_t i = below(count);
    if (decided[i]) continue;
    if (!asking[i]) {
      asking[i].emplace();
      asking[i]->most = servers[i].answer_settle(1);
      for (std::size_t other = 0; other < count; ++other) {
        if (other != i) asking[i]->others.push_back(other);
      }
    } else if (!asking[i]->others.empty()) {
      asking[i]->most = std::max(asking[i]->most, servers[asking[i]->others.back()].answer_settle(1));
      asking[i]->others.pop_back();
    } else {
      servers[i].lose(1, asking[i]->most);
      decided[i] = true;
    }
  }
  for (const ModelServer& server : servers) {
    ASSERT_EQ(server.committed(1), servers[0].committed(1)) << "schedule " << seed;
    ASSERT_GE(server.committed(1), whole);
    ASSERT_LE(server.committed(1), whole + (tells ? 1 : 0));
  }
  // The other one goes on alone, and all servers have the same.
  for (std::int64_t mine = 0; mine < 4; ++mine) {
    for (ModelServer& server : servers) {
      const auto at = static_cast<std::uint64_t>(3 + mine);
      ASSERT_TRUE(server.deliver(0, Method::Commit, at, pack(Commit{{at, at - 1}, mine})));
    }
  }
  for (const ModelServer& server : servers) {
    ASSERT_EQ(server.settled(), 4);
    ASSERT_EQ(server.value(), static_cast<float>(server.committed(1))) << "schedule " << seed;
  }
}

TEST(State, ServersSettleTheSameAboutALostWorkerInAnySchedule) {
  for (unsigned seed = 0; seed < 20'000 && !::testing::Test::HasFatalFailure(); ++seed) one_schedule(seed);
}

TEST(State, WhatWasRefusedIsRefusedAgainAndTakesItsTurn) {
  State state;
  Hello hello;
  hello.incarnation = kModelIncarnation;
  hello.servers = {"@one"};
  const std::string joined = pack(hello), start = pack(Start{{1, 0}, 0});
  state.run({1, Method::Joined, 0, kModelIncarnation, joined});
  state.run({1, Method::Start, 0, kModelIncarnation, start});
  TableOptions options;
  options.dim = 1000;
  const std::string open = pack(Open{{2, 1}, "t", options, 0});
  const auto refused = state.check({1, Method::Open, 0, kModelIncarnation, open}, 1000);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::Unavailable);
  const std::string note = pack(Order{2, 1}).append(pack(Answer{refused.error()}));
  ASSERT_TRUE(state.replay({1, Method::Refused, 0, kModelIncarnation, note}));
  EXPECT_EQ(*state.workers().judge({0, kModelIncarnation, {2, 1}}), Workers::Verdict::Made);
  EXPECT_EQ(state.workers().at(0).refused.at(2).code(), ErrorCode::Unavailable);
  EXPECT_EQ(*state.workers().judge({0, kModelIncarnation, {3, 1}}), Workers::Verdict::New);
  EXPECT_EQ(state.workers().judge({0, kModelIncarnation, {4, 1}}).error().code(), ErrorCode::Corrupt);
  EXPECT_EQ(state.workers().judge({0, kModelIncarnation + 1, {3, 1}}).error().code(), ErrorCode::Aborted);
  const std::string next = pack(Leave{{3, 2}});
  ASSERT_TRUE(state.replay({1, Method::Leave, 0, kModelIncarnation, next}));
  EXPECT_TRUE(state.workers().at(0).refused.empty()) << "its answer has come";
}

TEST(State, AJournalThatCouldNotHaveBeenWrittenIsRefused) {
  State state;
  const std::string leave = pack(Leave{{1, 0}});
  EXPECT_FALSE(state.replay({1, Method::Leave, 0, 1, leave})) << "nobody has joined";
  Hello hello;
  hello.incarnation = 1;
  hello.servers = {"@one"};
  const std::string joined = pack(hello);
  EXPECT_FALSE(state.replay({1, Method::Joined, 1, 1, joined})) << "another worker";
  ASSERT_TRUE(state.replay({1, Method::Joined, 0, 1, joined}));
  EXPECT_FALSE(state.replay({1, Method::Leave, 1, 1, leave})) << "a worker beyond all";
  const std::string late = pack(Leave{{2, 0}});
  EXPECT_FALSE(state.replay({1, Method::Leave, 0, 1, late})) << "a gap";
  EXPECT_FALSE(state.replay({1, static_cast<Method>(77), 0, 1, leave}));
  EXPECT_TRUE(state.replay({1, Method::Leave, 0, 1, leave}));
}

}  // namespace
}  // namespace cohort::ps
