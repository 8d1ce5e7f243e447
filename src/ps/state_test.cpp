// Several servers' states, and messages that arrive in any order: what they settle about a lost worker is the same on
// all.

#include "ps/state.h"
#include "ps/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <deque>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace cohort::ps {
namespace {

constexpr std::uint64_t kOnlyIncarnation = 1;

std::string one_row(const Order& order) {
  std::string body = pack(Change{order, 0, 1, {}});
  const std::uint64_t key = 7;
  const float gradient = -1;
  body.append(reinterpret_cast<const char*>(&key), sizeof key);
  return body.append(reinterpret_cast<const char*>(&gradient), sizeof gradient);
}

/// A server as `server.cpp` makes one, without connections.
class StateServer {
 public:
  StateServer(std::uint32_t number, std::uint32_t servers, Mode mode) {
    Hello hello;
    hello.workers = 2;
    hello.incarnation = kOnlyIncarnation;
    hello.server = number;
    hello.servers.resize(servers, "@somewhere");
    for (hello.worker = 0; hello.worker < 2; ++hello.worker) {
      state_.run({1, Method::Joined, hello.worker, kOnlyIncarnation, pack_kept(hello)});
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
    const auto verdict = state_.workers().judge({worker, kOnlyIncarnation, {sequence, sequence - 1}});
    if (!verdict) return false;
    if (*verdict == Workers::Verdict::Made) return true;
    const Command command{1, method, worker, kOnlyIncarnation, body};
    EXPECT_TRUE(state_.check(command, std::size_t{1} << 30));
    state_.run(command);
    return true;
  }
  std::int64_t answer_settle(std::uint32_t worker) {
    const Settle question{worker, kOnlyIncarnation};
    state_.run({1, Method::Settle, worker, 0, pack_kept(question)});
    return state_.ended(question);
  }
  void lose(std::uint32_t worker, std::int64_t ended) {
    state_.run({1, Method::Lost, worker, kOnlyIncarnation, pack_kept(Settled{ended})});
  }
  std::int64_t committed(std::uint32_t worker) const { return state_.workers().at(worker).committed; }
  std::int64_t settled() const { return state_.settled(); }
  float value() const {
    const std::uint64_t key = 7;
    float value = 0;
    state_.table(0)->read(&key, 1, &value, 1);
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

/// What one server does about the worker: asks one after the other, then decides.
struct Asking {
  std::vector<std::size_t> others;
  std::int64_t most = 0;
};

void one_schedule(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](std::size_t n) { return static_cast<std::size_t>(random()) % n; };
  const std::size_t count = 1 + below(4);
  const Mode mode = below(2) == 0 ? Mode::Sync : Mode::Bounded;
  std::deque<StateServer> servers;
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
  for (const StateServer& server : servers) {
    ASSERT_EQ(server.committed(1), servers[0].committed(1)) << "schedule " << seed;
    ASSERT_GE(server.committed(1), whole);
    ASSERT_LE(server.committed(1), whole + (tells ? 1 : 0));
  }
  // The other one goes on alone, and all servers have the same.
  for (std::int64_t mine = 0; mine < 4; ++mine) {
    for (StateServer& server : servers) {
      const auto at = static_cast<std::uint64_t>(3 + mine);
      ASSERT_TRUE(server.deliver(0, Method::Commit, at, pack(Commit{{at, at - 1}, mine})));
    }
  }
  for (const StateServer& server : servers) {
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
  hello.incarnation = kOnlyIncarnation;
  hello.servers = {"@one"};
  const std::string joined = pack(hello), start = pack(Start{{1, 0}, 0});
  state.run({1, Method::Joined, 0, kOnlyIncarnation, joined});
  state.run({1, Method::Start, 0, kOnlyIncarnation, start});
  TableOptions options;
  options.dim = 1000;
  const std::string open = pack(Open{{2, 1}, "t", options, 0});
  const auto refused = state.check({1, Method::Open, 0, kOnlyIncarnation, open}, 1000);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code(), ErrorCode::Unavailable);
  const std::string note = pack(Order{2, 1}).append(pack(Answer{refused.error()}));
  ASSERT_TRUE(state.replay({1, Method::Refused, 0, kOnlyIncarnation, note}));
  EXPECT_EQ(*state.workers().judge({0, kOnlyIncarnation, {2, 1}}), Workers::Verdict::Made);
  EXPECT_EQ(state.workers().at(0).refused.at(2).code(), ErrorCode::Unavailable);
  EXPECT_EQ(*state.workers().judge({0, kOnlyIncarnation, {3, 1}}), Workers::Verdict::New);
  EXPECT_EQ(state.workers().judge({0, kOnlyIncarnation, {4, 1}}).error().code(), ErrorCode::Corrupt);
  EXPECT_EQ(state.workers().judge({0, kOnlyIncarnation + 1, {3, 1}}).error().code(), ErrorCode::Aborted);
  const std::string next = pack(Leave{{3, 2}});
  ASSERT_TRUE(state.replay({1, Method::Leave, 0, kOnlyIncarnation, next}));
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

// Clocks that end without some of the workers, which are threads here, over real connections.

using namespace testing;

Consistency with_backups(std::int64_t backup_workers) { return Consistency::sync({.backup_workers = backup_workers}); }

Keys first_keys(std::size_t count) {
  Keys keys(count);
  for (std::size_t i = 0; i < count; ++i) keys[i] = i;
  return keys;
}

// Whoever comes too late is told, and only what counts is stepped: the bits of one process that has just that.
TEST(BackupWorkers, HaveTheBitsOfOneProcessForAnyNumberOfServers) {
  constexpr int kWorkers = 4;
  constexpr std::int64_t kClocks = 25, kDim = 5;
  const Keys all = first_keys(40);
  TableOptions options = counters(with_backups(1), kDim);
  options.optimizer = optim::Adam{};
  options.initializer = Initializer::normal(0, 1);
  for (const std::size_t count : {1U, 2U, 5U}) {
    const Servers servers(count);
    std::array<std::map<std::int64_t, Floats>, kWorkers> read;  // before pushes that counted, by clock
    std::array<Floats, kWorkers> last;
    std::atomic<int> late{0};
    run_workers(kWorkers, [&](int worker) {
      const auto mine = static_cast<std::size_t>(worker);
      Client client = servers.client(worker, kWorkers);
      Table table = client.table("t", options);
      client.barrier();
      while (client.now() < kClocks) {
        const std::int64_t clock = client.now(), late_before = client.late_clocks();
        const Floats rows = pull(table, all);
        if (worker == static_cast<int>(clock % 6)) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        const auto [keys, gradients] = batch(worker, clock, kDim);
        Work work = table.push(keys, gradients);
        const std::int64_t next = client.clock();
        work.wait();
        ASSERT_GT(next, clock);
        if (client.late_clocks() == late_before) {
          ASSERT_EQ(next, clock + 1);
          read[mine][clock] = rows;
        } else {
          ASSERT_EQ(client.late_clocks(), late_before + 1);
        }
      }
      late += static_cast<int>(client.late_clocks());
      client.barrier();
      last[mine] = pull(table, all);
      client.barrier();
    });
    OneProcess reference(options);
    for (std::int64_t clock = 0; clock < kClocks; ++clock) {
      Floats rows(all.size() * kDim);
      reference.table.read(all.data(), all.size(), rows.data(), 1);
      std::vector<std::pair<Keys, Floats>> of_workers;
      for (int worker = 0; worker < kWorkers; ++worker) {
        const auto& its = read[static_cast<std::size_t>(worker)];
        const auto found = its.find(clock);
        if (found == its.end()) continue;
        EXPECT_EQ(found->second, rows) << "what worker " << worker << " has read at clock " << clock;
        of_workers.push_back(batch(worker, clock, kDim));
      }
      EXPECT_EQ(of_workers.size(), static_cast<std::size_t>(kWorkers - 1)) << "clock " << clock;
      reference.clock(of_workers);
    }
    Floats rows(all.size() * kDim);
    reference.table.read(all.data(), all.size(), rows.data(), 1);
    for (const Floats& one : last) EXPECT_EQ(one, rows) << count << " servers";
    EXPECT_GT(late, 0);
  }
}

TEST(BackupWorkers, OneThatSleepsIsNotWaitedForAndGoesOnWithTheOthers) {
  const Servers servers(2);
  Client sleeps = servers.client(2, 3);
  const Keys keys = first_keys(30);
  Table its = sleeps.table("t", counters(with_backups(1)));
  its.push(keys, Floats(30, -100)).wait();
  run_workers(2, [&](int worker) {
    Client client = servers.client(worker, 3);
    Table table = client.table("t", counters(with_backups(1)));
    for (int clock = 0; clock < 10; ++clock) {
      EXPECT_EQ(pull(table, keys), Floats(30, static_cast<float>(2 * clock)));
      table.push(keys, Floats(30, -1)).wait();
      client.clock();
    }
    EXPECT_EQ(client.late_clocks(), 0);
  });
  its.push(keys, Floats(30, -100)).wait();
  EXPECT_EQ(sleeps.now(), 0);
  EXPECT_EQ(sleeps.clock(), 10);
  EXPECT_EQ(sleeps.late_clocks(), 1);
  its.push(keys, Floats(30, -1)).wait();
  EXPECT_EQ(sleeps.clock(), 11) << "the others have left: nobody is waited for";
  EXPECT_EQ(sleeps.late_clocks(), 1);
  EXPECT_EQ(pull(its, keys), Floats(30, 21));
}

TEST(BackupWorkers, WhatDoesNotGoTogetherIsRefused) {
  const Servers servers(2);
  Client client = servers.client(0, 2);
  const auto refused = [&](const char* name, Consistency consistency, const std::string& why) {
    const Error error = error_of([&] { (void)client.table(name, counters(consistency)); });
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_TRUE(contains(error, why));
  };
  refused("t", {Mode::Bounded, 1, 1}, "1 backup workers without Sync");
  refused("t", {Mode::Async, 0, 1}, "1 backup workers without Sync");
  refused("t", with_backups(-1), "-1 backup workers");
  refused("t", with_backups(2), "2 backup workers, and there are 2 workers");
  (void)client.table("t", counters(with_backups(1)));
  refused("u", Consistency::sync(), "all tables have to be Sync with as many");
  refused("u", Consistency::bounded(1), "all tables have to be Sync with as many");
  refused("u", Consistency::async(), "all tables have to be Sync with as many");
  EXPECT_EQ(error_of([&] { (void)client.table("t", counters(Consistency::sync())); }).code(), ErrorCode::Mismatch);
  (void)client.table("u", counters(with_backups(1)));
  Client without = servers.client(1, 2);
  EXPECT_TRUE(contains(error_of([&] { without.clock(); }), "ends a clock without having opened any"));

  const Servers others(1);
  Client early = others.client(0, 2);
  (void)early.table("s", counters(Consistency::sync()));
  EXPECT_TRUE(contains(error_of([&] { (void)early.table("t", counters(with_backups(1))); }),
                       "\"t\" is Sync(backup_workers=1), and \"s\" is Sync() -- "));
  const Servers more(1);
  Client at_work = more.client(0, 2);
  at_work.clock();
  EXPECT_TRUE(contains(error_of([&] { (void)at_work.table("t", counters(with_backups(1))); }), "open it before any"));
}

TEST(BackupWorkers, AClockThatIsWaitedForInVainCanBeWaitedForAgain) {
  const Servers servers(2);
  Client slow = servers.client(1, 3);
  Table its = slow.table("t", counters(with_backups(1)));
  ClientOptions options = servers.options(0, 3);
  options.timeout = std::chrono::milliseconds(600);
  Client client = Client::connect(options);
  Table table = client.table("t", counters(with_backups(1)));
  const Keys keys = first_keys(10);
  table.push(keys, Floats(10, -1)).wait();
  const Error error = error_of([&] { client.clock(); });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "clock 0, with 1 backup workers, waits for worker 1 on "));
  EXPECT_TRUE(contains(error_of([&] { (void)table.push(keys, Floats(10, -1)); }), "call `clock` again first"));
  its.push(keys, Floats(10, -10)).wait();
  EXPECT_EQ(slow.clock(), 1);
  EXPECT_EQ(client.clock(), 1);
  EXPECT_EQ(client.late_clocks(), 0);
  EXPECT_EQ(pull(table, keys), Floats(10, 11));
}

// One that is lost while it waits for the end of its clock has no part in it, whatever server looks first.
TEST(BackupWorkers, OneThatIsLostWhileItWaitsHasNoPartAndCanComeAgain) {
  ServerOptions quick;
  quick.patience = std::chrono::milliseconds(50);
  const Servers servers(3, quick);
  const Keys keys = first_keys(30);
  Client stays = servers.client(0, 3);
  Table table = stays.table("t", counters(with_backups(1)));
  std::atomic<bool> ends_clock{false};
  std::thread waits([&] {
    Client lost = servers.client(1, 3);
    Table its = lost.table("t", counters(with_backups(1)));
    its.push(keys, Floats(30, -100)).wait();
    ends_clock = true;
    EXPECT_EQ(error_of([&] { lost.clock(); }).code(), ErrorCode::Aborted);
  });
  while (!ends_clock) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  Client again = servers.client(1, 3);  // another process of the same worker: it takes its place
  Table its = again.table("t", counters(with_backups(1)));
  waits.join();
  EXPECT_EQ(again.now(), 0);
  std::thread ends([&] {
    its.push(keys, Floats(30, -10)).wait();
    EXPECT_EQ(again.clock(), 1);
  });
  table.push(keys, Floats(30, -1)).wait();
  EXPECT_EQ(stays.clock(), 1);
  ends.join();
  EXPECT_EQ(pull(table, keys), Floats(30, 11));
}

TEST(BackupWorkers, SnapshotsAndJournalsKeepWhatCounted) {
  const Folder folder;
  const Keys keys = first_keys(30);
  const auto options_of = [&](std::size_t server) {
    ServerOptions options;
    options.journal = folder.path() + "/journal-" + std::to_string(server);
    return options;
  };
  {
    Servers servers(2);
    for (std::size_t i = 0; i < 2; ++i) {
      servers.end(i);
      servers.start(i, options_of(i));
    }
    Client sleeps = servers.client(1, 2);
    Table its = sleeps.table("t", counters(with_backups(1)));
    Client client = servers.client(0, 2);
    Table table = client.table("t", counters(with_backups(1)));
    for (int clock = 0; clock < 6; ++clock) {
      its.push(keys, Floats(30, -100)).wait();
      table.push(keys, Floats(30, -1)).wait();
      const std::size_t dies = static_cast<std::size_t>(clock) % 2;
      servers.end(dies);
      servers.start(dies, options_of(dies));
      EXPECT_EQ(client.clock(), clock + 1);
      EXPECT_EQ(pull(table, keys), Floats(30, static_cast<float>(clock + 1)));
    }
    EXPECT_EQ(sleeps.clock(), 6);
    EXPECT_EQ(sleeps.late_clocks(), 1);
    (void)client.snapshot(folder.path());
  }
  const Servers servers(3);
  Client client = servers.client(0, 2);
  EXPECT_EQ(client.restore(folder.path()), 6);
  Table table = client.table("t", counters(with_backups(1)));
  EXPECT_EQ(pull(table, keys), Floats(30, 6));
  table.push(keys, Floats(30, -1)).wait();
  EXPECT_EQ(client.clock(), 1);
  EXPECT_EQ(pull(table, keys), Floats(30, 7));
}

}  // namespace
}  // namespace cohort::ps
