// Tests which workers wait for which others, and which pushes count. Workers are threads, over real connections.
#include "ps/tests/testing.h"
#include "ps/tests/testing_counters.h"

#include <atomic>
#include <random>

namespace cohort::ps {
namespace {

using namespace testing;

TEST(Sync, HasTheBitsOfOneProcessForAnyNumberOfServers) {
  constexpr int kWorkers = 3;
  constexpr std::int64_t kClocks = 20, kDim = 5;
  const std::vector<Optimizer> optimizers{optim::Sgd{.lr = 0.1, .momentum = 0.9}, optim::RowAdagrad{}, optim::Adam{},
                                          optim::Ftrl{}};
  Keys all(40);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  for (const Optimizer& optimizer : optimizers) {
    TableOptions options = counters(Consistency::sync(), kDim);
    options.optimizer = optimizer;
    options.initializer = Initializer::normal(0, 1);
    OneProcess reference(options);
    std::vector<Floats> expected;
    for (std::int64_t clock = 0; clock <= kClocks; ++clock) {
      Floats rows(all.size() * kDim);
      reference.table.read(all.data(), all.size(), rows.data(), 1);
      expected.push_back(rows);
      std::vector<std::pair<Keys, Floats>> of_workers;
      for (int worker = 0; worker < kWorkers; ++worker) of_workers.push_back(batch(worker, clock, kDim));
      reference.clock(of_workers);
    }
    for (const std::size_t count : {1U, 2U, 3U, 5U}) {
      const Servers servers(count);
      run_workers(kWorkers, [&](int worker) {
        Client client = servers.client(worker, kWorkers);
        Table table = client.table("t", options);
        std::mt19937 random(std::random_device{}());
        for (std::int64_t clock = 0; clock <= kClocks; ++clock) {
          Floats rows(all.size() * kDim);
          const Pulled pulled = table.pull(all, rows).wait();
          ASSERT_EQ(rows, expected[static_cast<std::size_t>(clock)]) << "clock " << clock << " of worker " << worker;
          ASSERT_EQ(pulled.clock, clock);
          ASSERT_EQ(pulled.behind, 0);
          if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          const auto [keys, gradients] = batch(worker, clock, kDim);
          Work work = table.push(keys, gradients);
          ASSERT_EQ(client.clock(), clock + 1);
          work.wait();
        }
      });
    }
  }
}

// No read misses what it has to have, and none of it is newer than the fastest; a worker sees its own.
TEST(Bounded, ReadsAreAtMostSoOld) {
  constexpr int kWorkers = 4;
  constexpr std::int64_t kClocks = 30;
  for (const std::int64_t staleness : {0, 1, 4}) {
    const Servers servers(2);
    std::atomic<std::int64_t> oldest{0};
    run_workers(kWorkers, [&](int worker) {
      Client client = servers.client(worker, kWorkers);
      Table table = client.table("t", counters(Consistency::bounded(staleness)));
      std::mt19937 random(static_cast<unsigned>(worker));
      const Keys keys{0, 1, 2, 3};  // a counter for each worker
      for (std::int64_t clock = 0; clock < kClocks; ++clock) {
        Floats counts(kWorkers);
        const Pulled pulled = table.pull(keys, counts).wait();
        ASSERT_LE(pulled.behind, staleness);
        for (int other = 0; other < kWorkers; ++other) {
          const auto count = static_cast<std::int64_t>(counts[static_cast<std::size_t>(other)]);
          ASSERT_GE(count, clock - staleness);
          ASSERT_GE(count, pulled.clock);
          ASSERT_LE(count, clock + staleness + 1);
          ASSERT_TRUE(other != worker || count == clock) << "its own are all there";
        }
        std::int64_t before = oldest;
        while (pulled.behind > before && !oldest.compare_exchange_weak(before, pulled.behind)) {
        }
        if (random() % 4 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(random() % 5));
        table.push(Keys{static_cast<std::uint64_t>(worker)}, Floats{-1}).wait();
        client.clock();
      }
    });
    EXPECT_TRUE(staleness > 0 || oldest == 0);
  }
}

TEST(Async, PushesCountAtOnceAndNobodyWaits) {
  const Servers servers(2);
  Client slow = servers.client(0, 2);  // never ends a clock
  Client client = servers.client(1, 2);
  Table table = client.table("t", counters(Consistency::async()));
  for (int i = 1; i <= 50; ++i) {
    Floats row(1);
    const Pulled pulled = table.push_pull(Keys{9}, Floats{-1}, row).wait();
    EXPECT_EQ(row[0], static_cast<float>(i));
    EXPECT_EQ(pulled.behind, client.now());
    client.clock();
  }
}

// Its memory of a row is scaled by the rate: another one would multiply rows, and 0 make them NaN.
TEST(Push, FtrlKeepsItsRate) {
  const Servers servers(1);
  Client client = servers.client();
  TableOptions options = counters(Consistency::async());
  options.optimizer = optim::Ftrl{.lr = 0.5};
  Table table = client.table("t", options);
  table.push(Keys{1}, Floats{1}, {.lr = 0.5}).wait();
  const Floats before = pull(table, Keys{1});
  for (const double lr : {0.0, 0.25, 1.0}) {
    const Error error = error_of([&] { table.push(Keys{1}, Floats{0}, {.lr = lr}).wait(); });
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_TRUE(contains(error, "and Ftrl's is 0.5 for good"));
  }
  EXPECT_EQ(pull(table, Keys{1}), before);
}

TEST(Sync, AWorkerThatOnlyPushesWaitsForTheOthersAtLast) {
  const Servers servers(2);
  Client slow = servers.client(0, 2);
  ClientOptions options = servers.options(1, 2);
  options.timeout = std::chrono::milliseconds(600);
  Client client = Client::connect(options);
  Table table = client.table("t", counters(Consistency::sync()));
  for (int clock = 0; clock < 16; ++clock) {
    table.push(Keys{1, 2}, Floats{-1, -1}).wait();
    client.clock();
  }
  const Error error = error_of([&] { client.clock(); });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "clock 0, ended long ago by this worker, waits for worker 0"));
  EXPECT_EQ(client.now(), 16);
  slow.clock();
  EXPECT_EQ(client.clock(), 17);
}

TEST(Sync, WhoHoldsTheOthersUpIsNamed) {
  const Servers servers(2);
  Client slow = servers.client(0, 2);
  ClientOptions options = servers.options(1, 2);
  options.timeout = std::chrono::milliseconds(600);
  Client client = Client::connect(options);
  Table table = client.table("t", counters(Consistency::sync()));
  client.clock();
  Floats row(1);
  const Error error = error_of([&] { table.pull(Keys{1}, row).wait(); });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "table \"t\" at clock 1 waits for worker 0 on "));
  slow.clock();
  table.pull(Keys{1}, row).wait();
}

TEST(Sync, AWorkerThatHasNotComeIsNamed) {
  const Servers servers(1);
  ClientOptions options = servers.options(0, 3);
  options.timeout = std::chrono::milliseconds(300);
  Client client = Client::connect(options);
  EXPECT_TRUE(
      contains(error_of([&] { client.barrier(); }), "worker 1 (has not come yet), worker 2 (has not come yet)"));
}

TEST(Sync, ABarrierThatIsTriedAgainIsTheSame) {
  const Servers servers(1);
  ClientOptions impatient = servers.options(0, 2);
  impatient.timeout = std::chrono::milliseconds(300);
  Client first = Client::connect(impatient);
  EXPECT_EQ(error_of([&] { first.barrier(); }).code(), ErrorCode::Timeout);
  Client second = servers.client(1, 2);
  second.barrier();
  first.barrier();
  EXPECT_EQ(error_of([&] { first.barrier(); }).code(), ErrorCode::Timeout) << "the next one is another";
}

TEST(Sync, AClockHasOneLearningRateForATable) {
  const Servers servers(2);
  Client client = servers.client();
  TableOptions options = counters(Consistency::sync());
  Table table = client.table("t", options), same = client.table("t", options), other = client.table("u", options);
  table.push(Keys{1}, Floats{-1}, {.lr = 0.5}).wait();
  const Error error = error_of([&] { same.push(Keys{2}, Floats{-1}, {.lr = 0.25}).wait(); });
  EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
  EXPECT_TRUE(contains(error, "a learning rate of 0.25, and a push before it in clock 0 said 0.5"));
  EXPECT_EQ(error_of([&] { table.push(Keys{2}, Floats{-1}).wait(); }).code(), ErrorCode::InvalidArgument);
  other.push(Keys{1}, Floats{-1}).wait();
  other.push(Keys{1}, Floats{-1}, {.lr = 1}).wait();  // its own
  client.clock();
  same.push(Keys{2}, Floats{-1}, {.lr = 0.25}).wait();
  client.clock();
  EXPECT_EQ(pull(table, {1, 2}), (Floats{0.5F, 0.25F}));
  EXPECT_EQ(pull(other, {1}), Floats{2});
}

TEST(Sync, NobodyWaitsForWhoHasLeft) {
  const Servers servers(2);
  run_workers(3, [&](int worker) {
    Client client = servers.client(worker, 3);
    Table table = client.table("t", counters(Consistency::sync()));
    for (int clock = 0; clock < 10; ++clock) {
      (void)pull(table, {1});
      table.push(Keys{1}, Floats{-1}).wait();
      if (worker == 2 && clock == 4) return;  // the push of this clock does not count
      client.clock();
    }
    EXPECT_EQ(pull(table, {1}), (Floats{24}));
  });
}

TEST(Workers, OneThatIsLostIsTakenOutAndCanComeAgain) {
  ServerOptions quick;
  quick.patience = std::chrono::milliseconds(50);
  const Servers servers(3, quick);
  Client stays = servers.client(0, 2);
  Table table = stays.table("t", counters(Consistency::sync()));
  Keys keys(30);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  const Floats ones(keys.size(), -1);
  {
    // A process that is killed says no good-bye: a client that loses its way to all servers stands for it.
    auto lost = std::make_unique<Client>(servers.client(1, 2));
    Table its = lost->table("t", counters(Consistency::sync()));
    its.push(keys, ones).wait();
    lost->clock();
    its.push(keys, ones).wait();  // of a clock that never ends
    // Another process of the same worker comes, and takes its place.
    Client again = servers.client(1, 2);
    const Error error = error_of([&] {
      its.push(keys, ones).wait();
      its.push(keys, ones).wait();
    });
    EXPECT_EQ(error.code(), ErrorCode::Aborted);
    again.clock();
    stays.clock();
    stays.clock();
    Table of_again = again.table("t", counters(Consistency::sync()));
    again.leave();
    EXPECT_EQ(pull(table, keys), Floats(keys.size(), 1)) << "its ended clock counts, on all servers, and no more";
  }
}

// Pushes of a million rows are carried out on a thread of their own, and calls of all workers wait in their turn.
TEST(Sync, AClockOfManyRowsHasThemAll) {
  const Servers servers(1);
  run_workers(2, [&](int worker) {
    Client client = servers.client(worker, 2);
    Table table = client.table("t", counters(Consistency::sync(), 8));
    Table now = client.table("now", counters(Consistency::async(), 8));
    Keys keys(300'000);
    for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i * 7919;
    const Floats ones(keys.size() * 8, -1);
    for (int clock = 1; clock <= 2; ++clock) {
      std::vector<Work> pushes;
      for (Table* one : {&table, &now}) pushes.push_back(one->push(keys, ones));
      for (Work& push : pushes) push.wait();
      client.clock();
      EXPECT_EQ(pull(table, keys), Floats(ones.size(), static_cast<float>(2 * clock)));
    }
    client.barrier();
    EXPECT_EQ(pull(now, keys), Floats(ones.size(), 4));
    client.barrier();
  });
}

}  // namespace
}  // namespace cohort::ps
