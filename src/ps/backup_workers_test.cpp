// Clocks that end without some of the workers, which are threads here, over real connections.
#include "ps/testing.h"

#include <array>
#include <atomic>
#include <map>

namespace cohort::ps {
namespace {

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
