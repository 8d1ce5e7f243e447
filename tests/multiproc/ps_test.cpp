// Parameter servers and workers that are processes, and are killed: no update is lost, none counts twice.
#include "child.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace cohort::test {
namespace {

constexpr int kServers = 3;

class Job {
 public:
  Job() {
    std::string folder = std::filesystem::temp_directory_path() / "cohort-ps-XXXXXX";
    if (::mkdtemp(folder.data()) == nullptr) throw std::runtime_error("mkdtemp");
    folder_ = folder;
    for (int i = 0; i < kServers; ++i) {
      names_.push_back("@cohort-ps-" + std::to_string(::getpid()) + "-" + std::to_string(i));
      servers_.push_back(nullptr);
      start(i);
    }
  }
  ~Job() {
    servers_.clear();
    std::filesystem::remove_all(folder_);
  }

  void start(int server) {
    servers_[static_cast<std::size_t>(server)] =
        std::make_unique<Child>(ChildOptions{{COHORT_PS_PEER, "server", names_[static_cast<std::size_t>(server)],
                                              folder_ + "/journal-" + std::to_string(server)},
                                             {},
                                             {}});
    if (!servers_[static_cast<std::size_t>(server)]->wait_for_output("serves"))
      throw std::runtime_error("no server: " + servers_[static_cast<std::size_t>(server)]->output());
  }
  void kill(int server) {
    servers_[static_cast<std::size_t>(server)]->kill(SIGKILL);
    servers_[static_cast<std::size_t>(server)]->wait();
  }
  Child worker(int number, int workers, const std::string& mode, int clocks, bool resets) const {
    ChildOptions options;
    options.command = {COHORT_PS_PEER,         "worker",          std::to_string(number), std::to_string(workers), mode,
                       std::to_string(clocks), resets ? "1" : "0"};
    options.command.insert(options.command.end(), names_.begin(), names_.end());
    return Child(options);
  }

 private:
  std::string folder_;
  std::vector<std::string> names_;
  std::vector<std::unique_ptr<Child>> servers_;
};

/// Less than so many milliseconds, at random: a kill may meet anything.
void pause(std::mt19937& random, int below) {
  std::this_thread::sleep_for(std::chrono::microseconds(random() % static_cast<unsigned>(1000 * below)));
}

TEST(ParameterServer, CountsEachPushOnceThoughServersAreKilledAndConnectionsBreak) {
  constexpr int kWorkers = 2, kClocks = 1500, kKills = 10;
  Job job;
  std::vector<Child> workers;
  for (int i = 0; i < kWorkers; ++i) workers.push_back(job.worker(i, kWorkers, "async", kClocks, true));
  for (Child& worker : workers) ASSERT_TRUE(worker.wait_for_output("works from")) << worker.output();
  std::mt19937 random(11);
  int kills = 0;
  for (; kills < kKills && workers[0].output().find("ended " + std::to_string(kClocks)) == std::string::npos; ++kills) {
    pause(random, 100);
    const int server = static_cast<int>(random() % kServers);
    job.kill(server);
    pause(random, 50);
    job.start(server);
    // So that kills meet pushes of all phases.
    ASSERT_FALSE(workers[0].wait_for_output("ps_peer:", std::chrono::seconds(0))) << workers[0].output();
  }
  RecordProperty("kills", kills);
  EXPECT_GE(kills, 2);
  const std::string exact =
      "counts from " + std::to_string(kWorkers * kClocks) + " to " + std::to_string(kWorkers * kClocks) + ".";
  for (Child& worker : workers) {
    EXPECT_TRUE(worker.wait_for_output(exact, std::chrono::seconds(60)))
        << worker.output().substr(0, 300) << "...\n"
        << worker.output().substr(worker.output().size() > 900 ? worker.output().size() - 900 : 0);
    EXPECT_EQ(worker.wait(), 0);
  }
}

// A worker that is killed in the midst of pushes, or of the end of its clock, over three servers: all have what its
// clocks brought, or none.
TEST(ParameterServer, AKilledWorkersClockCountsOnAllServersOrOnNone) {
  constexpr int kClocks = 400;
  Job job;
  Child stays = job.worker(0, 2, "sync", kClocks, false);
  std::mt19937 random(5);
  int ended = 0, kills = 0;
  while (true) {
    Child dies = job.worker(1, 2, "sync", kClocks, false);
    if (!dies.wait_for_output("works from", std::chrono::seconds(20))) break;
    if (!dies.wait_for_output("ended " + std::to_string(1 + random() % 10), std::chrono::seconds(20))) break;
    pause(random, 3);
    dies.kill(SIGKILL);
    dies.wait();
    ++kills;
    const std::string& said = dies.output();
    const std::size_t last = said.rfind("ended ");
    if (last != std::string::npos) ended += std::atoi(said.c_str() + last + 6);
    if (kills == 6) break;
  }
  EXPECT_EQ(kills, 6);
  ASSERT_TRUE(stays.wait_for_output("counts from", std::chrono::seconds(60))) << stays.output();
  EXPECT_EQ(stays.wait(), 0) << stays.output();
  int least = 0, most = 0;
  const std::string& said = stays.output();
  ASSERT_EQ(std::sscanf(said.c_str() + said.find("counts from"), "counts from %d to %d.", &least, &most), 2);
  EXPECT_EQ(least, most) << "some servers have a clock that others have not";
  EXPECT_GE(least, kClocks + ended) << "what it was told has ended";
  EXPECT_LE(least, kClocks + ended + kills) << "at most the clock in which it was killed";
}

}  // namespace
}  // namespace cohort::test
