// Parameter servers and workers that are processes, and are killed: no update is lost, none counts twice.
#include "base/result.h"
#include "base/unique_fd.h"
#include "child.h"
#include "net/address.h"
#include "net/secret.h"
#include "net/served_store.h"
#include "ps/server_map.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace cohort::test {
namespace {

constexpr int kServers = 3;

/// With a store, where servers have replicas.
struct Replicated {
  std::string slow_fsync = {};  ///< seconds that the disk takes for a snapshot's file; not empty: snapshots are taken
  bool journals = false;        ///< servers have journals, too
  std::string full_disk = {};   ///< end of the path of server 1's journal for which there is no more room soon
};

class Job {
 public:
  explicit Job(const Replicated& how)
      : slow_fsync_(how.slow_fsync), full_disk_(how.full_disk), journals_(how.journals) {
    secret_ = value_or_throw(net::Secret::generate());
    store_ = std::make_unique<store::StoreServer>(store::StoreServerOptions{.secret = secret_});
    inherited_ = sys::UniqueFd(::dup(value_or_throw(secret_->to_sealed_memfd()).get()));  // children have it
    begin();
    for (int i = 0; i < kServers; ++i) start(i);
    for (int i = 0; i < kServers; ++i) wait_until_served(i);
  }
  /// `patience`: milliseconds after which a silent worker is lost.
  explicit Job(int patience = 1500) : patience_(std::to_string(patience)) {
    begin();
    for (int i = 0; i < kServers; ++i) {
      start(i);
      wait_until_served(i);
    }
  }
  void begin() {
    std::string folder = std::filesystem::temp_directory_path() / "cohort-ps-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = folder;
    for (int i = 0; i < kServers; ++i) {
      names_.push_back("@cohort-ps-" + std::to_string(::getpid()) + "-" + std::to_string(i));
      servers_.push_back(nullptr);
    }
  }
  ~Job() {
    servers_.clear();
    std::filesystem::remove_all(folder_);
  }

  void start(int server) {
    ChildOptions options;
    options.command = {COHORT_PS_PEER, store_ ? "replicated" : "server", names_[static_cast<std::size_t>(server)]};
    if (store_) {
      options.command.push_back(std::to_string(server));
      options.command.push_back(std::to_string(kServers));
      if (journals_) options.command.push_back(journal_of(server));
      options.environment = {{"COHORT_STORE", net::to_string(store_->endpoint())},
                             {"COHORT_SECRET_FD", std::to_string(inherited_.get())}};
      if (!slow_fsync_.empty()) options.environment.emplace("COHORT_TEST_SLOW_FSYNC", slow_fsync_);
      if (server == 1 && !full_disk_.empty()) options.environment.emplace("COHORT_TEST_FULL_DISK", full_disk_);
    } else {
      options.command.push_back(journal_of(server));
      options.environment = {{"COHORT_TEST_PATIENCE", patience_}};
    }
    servers_[static_cast<std::size_t>(server)] = std::make_unique<Child>(options);
  }
  Child& server(int number) { return *servers_[static_cast<std::size_t>(number)]; }
  void wait_until_served(int number) {
    if (!server(number).wait_for_output("serves")) throw std::runtime_error("no server: " + server(number).output());
  }
  static std::string described(const ps::ServerMap& map) {
    std::string text = fmt::format("map {}: ", map.version);
    for (const ps::Serving& one : map.rows) {
      text +=
          fmt::format("[epoch {}: {}{} {}{}] ", one.epoch, one.primary.server, map.lives(one.primary) ? "" : "(dead)",
                      one.backup.server, map.lives(one.backup) ? "" : "(none)");
    }
    return text;
  }
  /// By the map in the store.
  void wait_until_all_have_backups() {
    wait_for_map([](const ps::ServerMap& map) {
      return std::all_of(map.rows.begin(), map.rows.end(),
                         [&](const ps::Serving& one) { return map.lives(one.primary) && map.lives(one.backup); });
    });
  }
  void give_journals() { journals_ = true; }
  bool wait_until_served_by_other(std::size_t rows) {
    wait_for_map([&](const ps::ServerMap& map) { return map.rows[rows].primary.server != rows; });
    return true;
  }
  template <class Is>
  void wait_for_map(Is&& is) {
    const auto deadline = net::deadline_in(std::chrono::seconds(60));
    const auto store =
        store::connect_tcp_store(store_->endpoint().tcp.host, store_->endpoint().tcp.port, *secret_, deadline);
    while (true) {
      const auto text = store->get("ps/0/map", deadline);
      const auto map = value_or_throw(codec::decode<ps::ServerMap>(text, {.longest_text = 1024}));
      if (map.formed() && is(map)) return;
      if (net::passed(deadline)) throw std::runtime_error("not yet: " + described(map) + said());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }
  /// Output of the servers that are running.
  std::string said() {
    std::string all;
    for (int i = 0; i < kServers; ++i) {
      (void)server(i).wait_for_output("nothing of the kind", std::chrono::seconds(0));
      all += "server " + std::to_string(i) + ": " + server(i).output() + "\n";
    }
    return all;
  }
  void kill(int server) {
    servers_[static_cast<std::size_t>(server)]->kill(SIGKILL);
    servers_[static_cast<std::size_t>(server)]->wait();
  }
  void stop(int number) { server(number).kill(SIGSTOP); }
  void go_on(int number) { server(number).kill(SIGCONT); }
  Child watcher(int seconds, const std::string& how = "watch") const {
    ChildOptions options;
    options.command = {COHORT_PS_PEER, how, std::to_string(seconds)};
    return client(options);
  }
  Child worker(int number, int workers, const std::string& mode, int clocks, bool resets) const {
    ChildOptions options;
    options.command = {COHORT_PS_PEER,         "worker",          std::to_string(number), std::to_string(workers), mode,
                       std::to_string(clocks), resets ? "1" : "0"};
    return client(options);
  }

  std::string journal_of(int server) const { return folder_ + "/journal-" + std::to_string(server); }

 private:
  Child client(ChildOptions& options) const {
    options.command.insert(options.command.end(), names_.begin(), names_.end());
    if (!slow_fsync_.empty()) options.environment.emplace("COHORT_TEST_SAVES", folder_ + "/snapshots");
    return Child(options);
  }

  std::string slow_fsync_, full_disk_, patience_;
  bool journals_ = false;
  std::string folder_;
  std::unique_ptr<store::StoreServer> store_;
  std::optional<net::Secret> secret_;
  sys::UniqueFd inherited_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Child>> servers_;
};

/// Less than so many milliseconds, at random: a kill may meet anything.
void pause(std::mt19937& random, int below) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(1000 * below)));
}

/// Number of clocks that a worker has ended, by its latest line.
int ended_by(const Child& worker) {
  const std::string& said = worker.output();
  int ended = 0;
  if (const std::size_t last = said.rfind("ended "); last != std::string::npos)
    (void)std::sscanf(said.c_str() + last, "ended %d.", &ended);
  return ended;
}

constexpr int kEndless = 1'000'000;  // clocks for which there is no time: a worker is told when to end

TEST(ParameterServer, CountsEachPushOnceThoughServersAreKilledAndConnectionsBreak) {
  constexpr int kWorkers = 2, kKills = 10;
  Job job(30'000);  // no worker is lost
  std::vector<Child> workers;
  for (int i = 0; i < kWorkers; ++i) workers.push_back(job.worker(i, kWorkers, "async", kEndless, true));
  for (Child& worker : workers) ASSERT_TRUE(worker.wait_for_output("works from")) << worker.output();
  std::mt19937 random(11);
  for (int kills = 0; kills < kKills; ++kills) {
    pause(random, 100);
    const int server = static_cast<int>(random() % kServers);
    job.kill(server);
    pause(random, 50);
    job.start(server);
    job.wait_until_served(server);
    // So that kills meet pushes of all phases.
    ASSERT_FALSE(workers[0].wait_for_output("ps_peer:", std::chrono::seconds(0))) << workers[0].output();
  }
  for (Child& worker : workers) EXPECT_TRUE(worker.wait_for_output("ended 20.")) << worker.output();
  for (const Child& worker : workers) worker.kill(SIGTERM);
  int clocks = 0;
  for (Child& worker : workers) {
    EXPECT_TRUE(worker.wait_for_output("counts from")) << worker.output();
    clocks += ended_by(worker);
  }
  const std::string exact = "counts from " + std::to_string(clocks) + " to " + std::to_string(clocks) + ".";
  for (Child& worker : workers) {
    EXPECT_TRUE(worker.wait_for_output(exact))
        << worker.output().substr(0, 300) << "...\n"
        << worker.output().substr(worker.output().size() > 900 ? worker.output().size() - 900 : 0);
    EXPECT_EQ(worker.wait(), 0);
  }
}

// A worker that is killed in the midst of pushes, or of the end of its clock, over three servers: all have what its
// clocks brought, or none.
TEST(ParameterServer, AKilledWorkersClockCountsOnAllServersOrOnNone) {
  Job job;
  Child stays = job.worker(0, 2, "sync", kEndless, false);
  std::mt19937 random(5);
  int ended = 0, kills = 0;
  while (true) {
    Child dies = job.worker(1, 2, "sync", kEndless, false);
    if (!dies.wait_for_output("works from", std::chrono::seconds(20))) break;
    if (!dies.wait_for_output("ended " + std::to_string(1 + random() % 10), std::chrono::seconds(20))) break;
    pause(random, 3);
    dies.kill(SIGKILL);
    dies.wait();
    ++kills;
    ended += ended_by(dies);
    if (kills == 6) break;
  }
  EXPECT_EQ(kills, 6);
  stays.kill(SIGTERM);
  ASSERT_TRUE(stays.wait_for_output("counts from", std::chrono::seconds(60))) << stays.output();
  EXPECT_EQ(stays.wait(), 0) << stays.output();
  ended += ended_by(stays);
  int least = 0, most = 0;
  const std::string& said = stays.output();
  ASSERT_EQ(std::sscanf(said.c_str() + said.find("counts from"), "counts from %d to %d.", &least, &most), 2);
  EXPECT_EQ(least, most) << "some servers have a clock that others have not";
  EXPECT_GE(least, ended) << "what it was told has ended";
  EXPECT_LE(least, ended + kills) << "at most the clock in which it was killed";
}

// Primaries are killed in the midst of pushes, with no journal: their backups have all that was acknowledged.
TEST(ParameterServer, ABackupTakesThePlaceOfAKilledPrimaryAndNothingIsLost) {
  constexpr int kWorkers = 2, kClocks = 1500, kKills = 4;
  Job job(Replicated{.slow_fsync = "0.2"});
  std::vector<Child> workers;
  for (int i = 0; i < kWorkers; ++i) workers.push_back(job.worker(i, kWorkers, "async", kClocks, false));
  for (Child& worker : workers) ASSERT_TRUE(worker.wait_for_output("works from")) << worker.output();
  std::mt19937 random(12);
  int kills = 0;
  for (; kills < kKills; ++kills) {
    const int server = static_cast<int>(random() % kServers);
    job.wait_until_all_have_backups();
    pause(random, 100);
    job.kill(server);
    job.start(server);
    job.wait_until_served(server);  // by then the map knows that the killed one is gone
    ASSERT_FALSE(workers[0].wait_for_output("ps_peer:", std::chrono::seconds(0))) << workers[0].output();
  }
  const std::string exact =
      "counts from " + std::to_string(kWorkers * kClocks) + " to " + std::to_string(kWorkers * kClocks) + ".";
  for (Child& worker : workers) {
    EXPECT_TRUE(worker.wait_for_output(exact, std::chrono::seconds(60)))
        << worker.output().substr(worker.output().size() > 900 ? worker.output().size() - 900 : 0) << job.said();
    EXPECT_EQ(worker.wait(), 0);
  }
}

// It says nothing, and nobody can know whether it is dead. When it goes on it is not the primary any more.
TEST(ParameterServer, AStoppedPrimaryHasNoSayWhenItGoesOn) {
  constexpr int kWorkers = 2, kClocks = 1200;
  Job job(Replicated{});
  std::vector<Child> workers;
  for (int i = 0; i < kWorkers; ++i) workers.push_back(job.worker(i, kWorkers, "sync", kClocks, false));
  for (Child& worker : workers) ASSERT_TRUE(worker.wait_for_output("ended 20")) << worker.output();
  job.wait_until_all_have_backups();
  job.stop(1);
  ASSERT_TRUE(job.wait_until_served_by_other(1));
  job.go_on(1);
  const std::string exact =
      "counts from " + std::to_string(kWorkers * kClocks) + " to " + std::to_string(kWorkers * kClocks) + ".";
  for (Child& worker : workers) {
    EXPECT_TRUE(worker.wait_for_output(exact, std::chrono::seconds(60)))
        << worker.output().substr(worker.output().size() > 900 ? worker.output().size() - 900 : 0) << job.said();
    EXPECT_EQ(worker.wait(), 0);
  }
  EXPECT_TRUE(job.server(1).wait_for_output("this process was taken for lost")) << job.said();
}

// One of the others has its copy on the killed server, and goes on without it.
TEST(ParameterServer, OthersDoNotPauseWhenAServerIsKilled) {
  Job job(Replicated{});
  Child watcher = job.watcher(4);
  ASSERT_TRUE(watcher.wait_for_output("works from")) << watcher.output();
  job.wait_until_all_have_backups();
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  job.kill(1);
  ASSERT_TRUE(watcher.wait_for_output("watched.")) << watcher.output() << job.said();
  const std::size_t at = watcher.output().find("server 1: longest ");
  ASSERT_NE(at, std::string::npos) << watcher.output();
  double longest = 0;
  int of_0 = 0, of_1 = 0, of_2 = 0;
  const char* const line = watcher.output().c_str() + at;
  ASSERT_EQ(std::sscanf(line, "server 1: longest %lf ms, meanwhile %d %d %d", &longest, &of_0, &of_1, &of_2), 4);
  EXPECT_GE(longest, 250) << "the lease has to pass";
  EXPECT_LT(longest, 2900) << "a server that says nothing is waited for 3 s";
  EXPECT_EQ(of_1, 0);
  EXPECT_GT(of_0, 3) << watcher.output();
  EXPECT_GT(of_2, 3) << watcher.output();
  EXPECT_EQ(watcher.output().find("not exact"), std::string::npos) << watcher.output();
}

// A disk that takes longer than the silence after which a server is taken for dead.
TEST(ParameterServer, ServersKeepTheirPlacesAndServeWhileRowsAreSaved) {
  Job job(Replicated{.slow_fsync = "4"});
  Child watcher = job.watcher(6, "flood");
  ASSERT_TRUE(watcher.wait_for_output("watched.")) << watcher.output() << job.said();
  EXPECT_EQ(watcher.wait(), 0);
  EXPECT_NE(watcher.output().find("2 snapshots."), std::string::npos) << watcher.output();
  EXPECT_EQ(watcher.output().find("not exact"), std::string::npos) << watcher.output();
  for (const std::string who : {"server 0", "server 1", "server 2", "bulk"}) {
    const std::string head = who + ": longest ";
    const std::size_t at = watcher.output().find(head);
    ASSERT_NE(at, std::string::npos);
    EXPECT_LT(std::atof(watcher.output().c_str() + at + head.size()), 3500) << watcher.output();
  }
  job.wait_for_map([](const ps::ServerMap& map) {
    for (std::size_t i = 0; i < map.rows.size(); ++i) EXPECT_EQ(map.rows[i].primary.server, i);
    return true;
  });
  EXPECT_EQ(job.said().find("is lost"), std::string::npos) << job.said();
}

TEST(ParameterServer, WhenBothAreKilledWhatIsLostIsSaid) {
  Job job(Replicated{});
  Child worker = job.worker(0, 1, "async", 1'000'000, false);
  ASSERT_TRUE(worker.wait_for_output("ended 20")) << worker.output();
  job.wait_until_all_have_backups();
  job.kill(0);
  job.kill(1);  // has the copy of 0's rows
  job.start(0);
  job.start(1);
  EXPECT_TRUE(worker.wait_for_output("changes are lost", std::chrono::seconds(30))) << worker.output() << job.said();
  EXPECT_NE(worker.wait(), 0);
  const bool said = job.server(0).wait_for_output("they begin anew", std::chrono::seconds(5)) ||
                    job.server(1).wait_for_output("they begin anew", std::chrono::seconds(5));
  EXPECT_TRUE(said) << job.said();
}

std::string exactly(int count) { return fmt::format("counts from {0} to {0}.", count); }

// Servers with replicas and journals, all of which are killed: whoever is started first, the rows are those of the
// journal that the last primary had, to which a torn record does no harm. Then their backups take places again.
TEST(ParameterServer, WhenAllAreKilledTheirJournalsHaveEverything) {
  Job job(Replicated{.journals = true});
  Child worker = job.worker(0, 1, "async", kEndless, false);
  std::mt19937 random(13);
  std::string said;
  const auto goes_on = [&] { return worker.wait_for_output(fmt::format("ended {}.", ended_by(worker) + 20)); };
  for (int turn = 0; turn < 4; ++turn) {
    ASSERT_TRUE(goes_on()) << worker.output() << job.said();
    job.wait_until_all_have_backups();
    pause(random, 50);
    const int first = static_cast<int>(random() % kServers);
    if (turn == 1) {  // so that a process serves rows that were another one's
      job.kill(first);
      job.start(first);
      job.wait_until_served(first);
      job.wait_until_all_have_backups();
    }
    for (int i = 0; i < kServers; ++i) job.kill((first + i) % kServers);
    std::ofstream(job.journal_of(first), std::ios::app | std::ios::binary) << "torn";
    for (int i = 0; i < kServers; ++i) job.start((first + 1 + turn + i) % kServers);
    EXPECT_TRUE(goes_on()) << worker.output() << job.said();
    for (int i = 0; i < kServers; ++i) {
      job.wait_until_served(i);
      if (turn == 0) {
        EXPECT_TRUE(job.server(i).wait_for_output("as this process's journal has them")) << job.said();
      }
      said += job.server(i).output();
    }
  }
  worker.kill(SIGTERM);
  EXPECT_TRUE(worker.wait_for_output("counts from", std::chrono::seconds(60))) << worker.output() << job.said();
  EXPECT_NE(worker.output().find(exactly(ended_by(worker))), std::string::npos) << worker.output();
  EXPECT_EQ(worker.wait(), 0) << worker.output();
  EXPECT_EQ(said.find("begin anew"), std::string::npos) << said;
  bool cut = false;
  for (int i = 0; i < kServers; ++i) cut = cut || std::filesystem::exists(job.journal_of(i) + ".cut-1");
  EXPECT_TRUE(cut) << job.said();
}

TEST(ParameterServer, ADamagedJournalOfRowsThatNobodyHasIsNamed) {
  Job job(Replicated{.journals = true});
  Child worker = job.worker(0, 1, "async", kEndless, false);
  ASSERT_TRUE(worker.wait_for_output("ended 20.")) << worker.output();
  job.wait_until_all_have_backups();
  for (int i = 0; i < kServers; ++i) job.kill(i);
  std::fstream(job.journal_of(0), std::ios::in | std::ios::out | std::ios::binary).seekp(200) << "damage";
  for (int i = 0; i < kServers; ++i) job.start(i);
  EXPECT_TRUE(worker.wait_for_output(fmt::format("journal {} is damaged at byte", job.journal_of(0))))
      << worker.output() << job.said();
  EXPECT_NE(worker.wait(), 0);
}

TEST(ParameterServer, AServerWhoseDiskIsFullMakesNoChangesAndSaysSo) {
  Job job(Replicated{.journals = true, .full_disk = "/journal-1"});
  Child worker = job.worker(0, 1, "async", kEndless, false);
  EXPECT_TRUE(worker.wait_for_output("this server makes no changes any more: journal " + job.journal_of(1)))
      << worker.output() << job.said();
  EXPECT_NE(worker.wait(), 0);
}

// The rows go on with the copy of another server.
TEST(ParameterServer, AServerWhoseDiskIsFullHasNoCopyAndSaysSo) {
  constexpr int kClocks = 600;
  Job job(Replicated{.journals = true, .full_disk = "/journal-1.rows-0"});
  Child worker = job.worker(0, 1, "async", kClocks, false);
  EXPECT_TRUE(job.server(1).wait_for_output("the copy of the rows of parameter server 0 is given up: journal " +
                                            job.journal_of(1) + ".rows-0: No space left on device"))
      << job.said();
  job.wait_for_map([](const ps::ServerMap& map) { return map.rows[0].backup == ps::Holder{2, map.members[2].life}; });
  EXPECT_TRUE(worker.wait_for_output(exactly(kClocks), std::chrono::seconds(60))) << worker.output() << job.said();
  EXPECT_EQ(worker.wait(), 0) << worker.output();
}

TEST(ParameterServer, ServersThatDifferInTheirJournalsAreRefused) {
  Job job(Replicated{});
  job.wait_for_map([](const ps::ServerMap&) { return true; });
  job.kill(2);
  job.give_journals();
  job.start(2);
  EXPECT_TRUE(
      job.server(2).wait_for_output("parameter server 2 has 1 replicas and a journal -- the first one has 1 "
                                    "replicas and no journal"))
      << job.said();
}

}  // namespace
}  // namespace cohort::test
