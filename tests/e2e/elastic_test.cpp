// Jobs that go on when ranks fail (`cohort run --min-np`): who leaves, what is said of it, and how such a job ends.
// Ranks of most tests are shells, which need no world.
#include "launch_harness.h"

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <sys/stat.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace cohort::test {
namespace {

using nlohmann::json;

/// Each waits for its orders, a file "KIND.NUMBER"; what it has started must not outlive it.
constexpr const char* kWorker =
    "n=$COHORT_WORKER; if [ $n = \"$KILLS_ITS_AGENT\" ]; then kill -9 $PPID; fi; sleep 1000 & echo \"worker $n "
    "came\"; touch ready.$n; "
    "while true; do "
    "if [ -e end.$n ]; then kill $!; exit 0; fi; "
    "if [ -e kill.$n ]; then kill -9 $$; fi; "
    "if [ -e stop.$n ]; then kill -STOP $$; fi; "
    "if [ -e fail.$n ]; then exit 5; fi; "
    "if [ -e leave.$n ]; then kill $!; exit 75; fi; "
    "sleep 0.02; done";

class ElasticJob : public testing::Test {
 protected:
  void start(const std::vector<std::string>& options, int workers) {
    JobOptions job;
    job.arguments = {"run", "--grace", "1"};
    job.arguments.insert(job.arguments.end(), options.begin(), options.end());
    if (program_.empty())
      job.arguments.insert(job.arguments.end(), {"sh", "-c", kWorker});
    else
      job.arguments.push_back(program_);
    job_.emplace(job);
    for (int worker = 0; worker < workers; ++worker)
      ASSERT_TRUE(eventually([&] { return !file("ready", worker).empty(); })) << job_->err();
  }
  std::string file(const std::string& kind, int worker) const {
    const std::string path = job_->folder() + "/" + kind + "." + std::to_string(worker);
    return std::ifstream(path).good() ? path : std::string();
  }
  void order(const std::string& kind, int worker) const {
    std::ofstream(job_->folder() + "/" + kind + "." + std::to_string(worker)) << "now";
  }
  void expect_said(const std::string& text) const {
    EXPECT_TRUE(eventually([&] { return job_->err().find(text) != std::string::npos; })) << text << "\nin\n"
                                                                                         << job_->err();
  }
  void expect_silent_about(const std::string& text) const {
    EXPECT_EQ(job_->err().find(text), std::string::npos) << job_->err();
  }
  void expect_ready(int worker) const {
    EXPECT_TRUE(eventually([&] { return !file("ready", worker).empty(); })) << job_->err();
  }
  bool waits_to_be_member(std::size_t worker) const {
    const json live = json::parse(job_->file("r/live.json"), nullptr, false);
    const json ranks = live.is_object() ? live.value("ranks", json()) : json();
    return ranks.size() > worker && ranks[worker][1] == "waiting";  // [number, state, ...]
  }
  /// In the order of the hosts.
  std::vector<pid_t> guards_of_agents() const {
    std::vector<pid_t> guards;
    for (const pid_t pid : job_->processes(COHORT_COMMAND " agent --connect")) {
      const auto stat = sys::process_stat(pid);
      if (stat && stat->parent == job_->pid()) guards.push_back(pid);
    }
    return guards;
  }
  std::optional<Job> job_;
  std::string program_;  ///< empty: the shell's
};

/// Hosts are what a file says, all of them this one.
class ElasticHosts : public ElasticJob {
 protected:
  ElasticHosts() : folder_(testing::TempDir() + "/cohort-hosts-XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("mkdtemp");
  }
  ~ElasticHosts() override { std::filesystem::remove_all(folder_); }
  /// The script copies it: "exit 3" or "sleep 9" in it are done.
  void list(const std::string& text) const {
    std::ofstream(folder_ + "/new") << text;
    std::filesystem::rename(folder_ + "/new", folder_ + "/hosts");
  }
  void start_on(const std::string& text, std::vector<std::string> options, int workers) {
    std::ofstream(folder_ + "/script") << "sed /^!/d " << folder_ << "/hosts; . " << folder_ << "/then";
    std::ofstream(folder_ + "/then") << "";
    list(text);
    program_ = ELASTIC_PEER;
    options.insert(options.end(), {"--starter", "local", "--host-discovery-script", "sh " + folder_ + "/script"});
    start(options, workers);
  }
  void then(const std::string& command) const {
    std::ofstream(folder_ + "/new") << command;
    std::filesystem::rename(folder_ + "/new", folder_ + "/then");
  }
  std::string folder_;
};

TEST_F(ElasticHosts, ThatComeGetWorkers) {
  start_on("a\nb:2\n", {"--min-np", "1", "--max-np", "5", "--run-dir", "r"}, 3);
  list("a\nb:2\nc:4 # as many as there is room for\n");
  expect_said("host c has come with workers 3-4; epoch 1 goes on with 5 workers, 2 of them new\n");
  expect_ready(4);
  EXPECT_TRUE(eventually([this] { return job_->out().find("c:4 | worker 4 came") != std::string::npos; }))
      << job_->out();
  order("fail", 0);
  expect_said("epoch 2 goes on with 4 of 5 workers (ranks 0-3 are workers 1-4)\n");
  list("a\nc:4\n");
  expect_said("workers 1-2 leave: host b is listed no more; epoch 3 goes on with 2 of 4 workers");
  for (const int worker : {1, 2, 3, 4}) order(worker < 3 ? "fail" : "end", worker);
  EXPECT_EQ(job_->wait(), 0);
  expect_silent_about("epoch 4");
  EXPECT_NE(job_->file("r/logs/rank-4.out"), "");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticHosts, AreAwaitedWhereTooFewAreLeft) {
  start_on("a\nb\n", {"--min-np", "2"}, 2);
  order("kill", 1);
  expect_said("1 worker is left, and 2 are wanted: waiting up to 600 s for hosts\n");
  list("a\nb\nc\n");
  expect_said(
      "host c has come with worker 2; epoch 1 goes on with 2 workers, 1 of them new (ranks 0-1 are workers 0,2)\n");
  order("end", 0);
  order("end", 2);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticHosts, AreAwaitedNoLongerThanTheTimeout) {
  start_on("a\nb\n", {"--min-np", "2", "--elastic-timeout", "1"}, 2);
  order("fail", 1);
  EXPECT_EQ(job_->wait(), 75);
  expect_said("no hosts have come within 1 s (--elastic-timeout); exit status 75 asks for the job to be started again");
}

TEST_F(ElasticHosts, AreUsedAgainOnceTheyHaveCooledDown) {
  start_on("a\nb\n", {"--min-np", "1", "--blacklist-cooldown-range", "1", "4"}, 2);
  order("kill", 1);
  expect_said("epoch 1 goes on with 1 of 2 workers\n");
  expect_said("host b has come with worker 2; epoch 2 goes on with 2 workers, 1 of them new");
  order("end", 0);
  order("end", 2);
  EXPECT_EQ(job_->wait(), 0);
}

// All are replaced in one edit: those that know the training stay until others have it.
TEST_F(ElasticHosts, AreNotLeftBeforeOthersHaveTheTraining) {
  start_on("a\n", {"--min-np", "1"}, 1);
  EXPECT_TRUE(eventually([&] { return job_->err().find("epoch 0: rank 0 of 1") != std::string::npos; }));
  order("busy", 0);
  list("b\n");
  expect_said("host b has come with worker 1; epoch 1 goes on with 2 workers");
  expect_said("host a is listed no more, and its worker 0 stays: no other has the training's state yet\n");
  expect_silent_about("epoch 2");
  std::filesystem::remove(file("busy", 0));
  expect_said("worker 0 leaves: host a is listed no more; epoch 2 goes on with 1 of 2 workers (rank 0 is worker 1)\n");
  expect_said("epoch 2: rank 0 of 1 (worker 1)");
  order("end", 0);
  order("end", 1);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticHosts, AreDrainedOnceOthersHaveTheTraining) {
  start_on("a\n", {"--min-np", "1", "--run-dir", "r"}, 1);
  EXPECT_TRUE(eventually([&] { return job_->err().find("epoch 0: rank 0 of 1") != std::string::npos; }));
  order("busy", 0);
  EXPECT_EQ(run({{"ctl", job_->folder() + "/r", "add", "b"}}).status, 0);
  expect_said("host b has come with worker 1; epoch 1 goes on with 2 workers");
  EXPECT_EQ(run({{"ctl", job_->folder() + "/r", "drain", "a"}}).out,
            "no other worker has the training's state yet: host a is drained once another has it\n");
  std::filesystem::remove(file("busy", 0));
  expect_said("worker 0 leaves: host a is drained (cohort ctl); epoch 2 goes on with 1 of 2 workers");
  order("end", 0);
  order("end", 1);
  EXPECT_EQ(job_->wait(), 0);
}

// Until these have formed a world without those that leave: these are members again.
TEST_F(ElasticHosts, StayWhereTheOthersAreLostAsTheyLeave) {
  start_on("a\nb\n", {"--min-np", "1", "--run-dir", "r"}, 2);
  for (const char* const rank : {"0 of 2", "1 of 2"})
    EXPECT_TRUE(
        eventually([&] { return job_->err().find(std::string("epoch 0: rank ") + rank) != std::string::npos; }));
  order("busy", 0);
  order("busy", 1);
  EXPECT_EQ(run({{"ctl", job_->folder() + "/r", "drain", "a"}}).out,
            "worker 0 leaves: host a is drained (cohort ctl); epoch 1 goes on with 1 of 2 workers\n");
  order("kill", 1);
  expect_said("was killed by SIGKILL; worker 0 stays after all; epoch 2 goes on with 1 of 1 workers\n");
  std::filesystem::remove(file("busy", 0));
  expect_said("epoch 2: rank 0 of 1 (worker 0)");
  order("end", 0);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticHosts, ThatHaveFewerSlotsLetWorkersGo) {
  start_on("a:3\n", {"--min-np", "1"}, 3);
  EXPECT_TRUE(eventually([&] { return job_->err().find("epoch 0: rank 2 of 3") != std::string::npos; }));
  list("a:1\n");
  expect_said("workers 1-2 leave: host a is listed with 1 slot; epoch 1 goes on with 1 of 3 workers\n");
  EXPECT_TRUE(eventually([&] { return job_->processes(ELASTIC_PEER).size() == 1; })) << "they are killed at last";
  list("a:2\n");
  expect_said("worker 3 has come on a; epoch 2 goes on with 2 workers, 1 of them new");
  list("a:0\n");
  expect_said("host a is listed no more, and its workers 0,3 stay: fewer than --min-np 1 would be left\n");
  order("end", 0);
  order("end", 3);
  EXPECT_EQ(job_->wait(), 0);
}

// Nobody waits for a host that was let go while it started, however it was.
TEST_F(ElasticHosts, ThatAreGivenUpWhileTheyStartEndNothing) {
  start_on("a\n", {"--min-np", "1", "--run-dir", "r", "--stopped-timeout", "2"}, 1);
  const auto ctl = [&](const std::string& action, const std::string& host) {
    return run({{"ctl", job_->folder() + "/r", action, host}}).status;
  };
  EXPECT_EQ(ctl("add", "b:40"), 0);
  EXPECT_EQ(ctl("drain", "b"), 0);
  expect_said("host b is taken away (cohort ctl); the job goes on without b\n");
  EXPECT_EQ(ctl("add", "c:40"), 0);
  ASSERT_TRUE(eventually([&] { return guards_of_agents().size() >= 2; }));
  ::kill(guards_of_agents().back(), SIGKILL);
  expect_said("; the job goes on without c\n");
  std::this_thread::sleep_for(std::chrono::seconds(6));
  expect_silent_about("nothing has come from the agent");
  expect_silent_about("b is lost");
  EXPECT_EQ(job_->processes(ELASTIC_PEER).size(), 1U);
  // It was asked for, and is no failure.
  list("a\nb\n");
  expect_said("host b has come with worker");
  order("end", 0);
  for (int worker = 1; worker < 200; ++worker) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticHosts, GetWorkersInThePlaceOfThoseThatFailed) {
  start_on("a:3\n", {"--min-np", "1", "--blacklist-cooldown-range", "1", "4"}, 3);
  order("kill", 1);
  expect_said("epoch 1 goes on with 2 of 3 workers");
  expect_said("worker 3 has come on a; epoch 2 goes on with 3 workers, 1 of them new");
  EXPECT_NE(job_->out().find("worker 3 came, local rank 1"), std::string::npos) << job_->out();
  for (const int worker : {0, 2, 3}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticJob, HasSparesThatTakeThePlaceOfWhoIsLost) {
  program_ = ELASTIC_PEER;
  start({"-np", "2", "--min-np", "2", "--spares", "1", "--run-dir", "r", "--blacklist-cooldown-range", "1", "4"}, 3);
  EXPECT_TRUE(eventually([this] { return waits_to_be_member(2); })) << job_->file("r/live.json");
  order("kill", 0);
  expect_said(") was killed by SIGKILL; worker 2 takes its place; epoch 1 goes on with 2 workers, 1 of them new");
  // Another spare comes where it was, once the host has cooled down.
  ASSERT_TRUE(eventually([this] { return !file("ready", 3).empty() && waits_to_be_member(3); })) << job_->err();
  order("fail", 1);
  expect_said("worker 3 takes its place; epoch 2 goes on with 2 workers");
  for (const int worker : {2, 3}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
}

// Its spare has never had it.
TEST_F(ElasticJob, EndsWhereTheTrainingIsLost) {
  program_ = ELASTIC_PEER;
  start({"-np", "1", "--min-np", "1", "--spares", "1", "--run-dir", "r"}, 2);
  EXPECT_TRUE(eventually([&] { return job_->err().find("epoch 0: rank 0 of 1") != std::string::npos; }));
  EXPECT_TRUE(eventually([this] { return waits_to_be_member(1); })) << job_->file("r/live.json");
  order("kill", 0);
  EXPECT_EQ(job_->wait(), 75);
  expect_said("was killed by SIGKILL; the job cannot go on: no worker that is left has the training's state\n");
  expect_said("exit status 75 asks for the job to be started again, from its last checkpoint");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, KeepsNothingOfWorkersThatHaveEnded) {
  start({"-np", "2", "--min-np", "1", "--blacklist-cooldown-range", "1", "1"}, 2);
  const auto open_files = [this] {
    std::size_t count = 0;
    for (const pid_t pid : job_->processes(COHORT_COMMAND " agent --connect")) {
      const std::filesystem::path folder = "/proc/" + std::to_string(pid) + "/fd";
      count += static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
    }
    return count;
  };
  order("kill", 1);
  expect_ready(2);
  const std::size_t before = open_files();
  for (int worker = 2; worker < 5; ++worker) {
    order("kill", worker);
    expect_ready(worker + 1);
  }
  EXPECT_LE(open_files(), before + 2);
  order("end", 0);
  order("end", 5);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticJob, BeginsWithoutAHostThatCannotBeHad) {
  start({"-H", "nowhere:1,localhost:2", "--min-np", "2", "--ssh", "false"}, 2);
  expect_said("; the job begins without nowhere\n");
  expect_said("2 processes on 1 host (localhost: ranks 0-1)");
  for (const int worker : {0, 1}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
  const auto failed = run({{"run", "-H", "nowhere:1,localhost:2", "--min-np", "3", "--ssh", "false", "true"}});
  EXPECT_EQ(failed.status, 127) << failed.err;
}

// Before the agent has said that its ranks run: it starts many more.
TEST_F(ElasticJob, GoesOnWithoutAHostThatIsLostWhileRanksStart) {
  start({"-H", "a:1,b:40,c:1", "--starter", "local", "--min-np", "2", "--env", "KILLS_ITS_AGENT=1"}, 1);
  expect_ready(41);
  expect_said("workers 1-40 are lost with their host b (");
  expect_said("epoch 1 goes on with 2 of 42 workers (ranks 0-1 are workers 0,41)\n");
  for (const int worker : {0, 41}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
  EXPECT_TRUE(job_->processes().empty());
}

// torchrun's: ranks that have no world of Cohort's, or too few of them, begin anew on the hosts that there are.
TEST_F(ElasticJob, BeginsAnewWhereItsRanksCannotGoOn) {
  start({"-H", "a:1,b:2,c:1", "--starter", "local", "--min-np", "2", "--max-restarts", "2"}, 4);
  ::kill(guards_of_agents()[1], SIGKILL);
  expect_said("workers 1-2 are lost with their host b (");
  expect_said("starting all 2 ranks again (1 of 2)");
  for (const int worker : {4, 5}) expect_ready(worker);
  EXPECT_TRUE(eventually([this] { return job_->out().find("c:1 | worker 5 came") != std::string::npos; }))
      << job_->out();
  order("fail", 4);
  expect_said("starting all 2 ranks again (2 of 2)");
  for (const int worker : {6, 7}) expect_ready(worker);
  for (const int worker : {6, 7}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, GoesOnWithoutWorkersBeforeItBeginsAnew) {
  program_ = ELASTIC_PEER;
  start({"-np", "3", "--min-np", "2", "--max-restarts", "1"}, 3);
  EXPECT_TRUE(eventually([this] { return job_->err().find("epoch 0: rank 2 of 3") != std::string::npos; }));
  order("kill", 1);
  expect_said("epoch 1 goes on with 2 of 3 workers");
  order("kill", 0);
  expect_said("the job cannot go on: 1 worker is left, and 2 are wanted\n");
  expect_said("starting all 3 ranks again (1 of 1)");
  for (const int worker : {3, 4, 5}) expect_ready(worker);
  EXPECT_TRUE(eventually([this] { return job_->err().find("epoch 2: rank 2 of 3 (worker 5)") != std::string::npos; }))
      << job_->err();
  for (const int worker : {3, 4, 5}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticJob, TakesOrdersOfItsUser) {
  program_ = ELASTIC_PEER;
  start({"-H", "a,b:2", "--starter", "local", "--min-np", "2", "--run-dir", "r"}, 3);
  const std::string run_folder = job_->folder() + "/r";
  struct stat info {};
  ASSERT_EQ(::stat((run_folder + "/control").c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0600U);
  const auto ctl = [&](const std::string& action, const std::string& host) {
    return run({{"ctl", run_folder, action, host}});
  };
  Finished asked = ctl("drain", "h");
  EXPECT_EQ(asked.status, 1);
  EXPECT_NE(asked.err.find("nothing of the job runs on h; it runs on a, b\n"), std::string::npos) << asked.err;
  EXPECT_NE(ctl("drain", "b").err.find("fewer than --min-np 2 would be left"), std::string::npos);
  asked = ctl("add", "c:2");
  EXPECT_EQ(asked.out, "2 workers are started on c\n") << asked.err;
  expect_said("host c has come with workers 3-4; epoch 1 goes on with 5 workers, 2 of them new");
  EXPECT_NE(ctl("add", "c:2").out.find("there is no place"), std::string::npos);
  asked = ctl("drain", "b");
  EXPECT_EQ(asked.out, "workers 1-2 leave: host b is drained (cohort ctl); epoch 2 goes on with 3 of 5 workers\n");
  for (const int worker : {1, 2}) order("fail", worker);
  EXPECT_NE(ctl("add", "c:3").out.find("1 worker is started on c"), std::string::npos);
  expect_said("worker 5 has come on c; epoch 3");
  asked = ctl("remove", "a");
  EXPECT_EQ(asked.status, 0) << asked.err;
  expect_said("worker 0 leaves: host a is removed (cohort ctl); epoch 4 goes on with 3 of 4 workers");
  EXPECT_TRUE(eventually([&] { return job_->processes(ELASTIC_PEER).size() == 3; }));
  EXPECT_EQ(ctl("add", "a").out, "1 worker is started on a\n") << "it is used again";
  expect_said("host a has come with worker 6");
  for (const int worker : {3, 4, 5, 6}) order("end", worker);
  EXPECT_EQ(job_->wait(), 0);
  EXPECT_NE(ctl("drain", "b").err.find("the job has ended"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(run_folder + "/control"));
}

TEST_F(ElasticHosts, StayAsTheyAreWhereTheScriptFails) {
  start_on("a\nb\n", {"--min-np", "1"}, 2);
  then("echo a; exit 3");
  expect_said("exit code 3; the hosts stay as they are\n");
  then("echo 'two words'");
  expect_said("host file, line 3");
  then("");
  list("");  // nobody at all: all but as many as are needed could go
  expect_said("worker 1 leaves: host b is listed no more; epoch 1 goes on with 1 of 2 workers");
  expect_said("host a is listed no more, and its worker 0 stays: fewer than --min-np 1 would be left\n");
  order("end", 0);
  order("end", 1);
  EXPECT_EQ(job_->wait(), 0);
}

TEST_F(ElasticJob, GoesOnWithoutWorkersThatFail) {
  start({"-np", "4", "--min-np", "2"}, 4);
  order("kill", 1);
  expect_said("worker 1 (");
  expect_said(") was killed by SIGKILL; epoch 1 goes on with 3 of 4 workers (ranks 0-2 are workers 0,2-3)\n");
  EXPECT_TRUE(eventually([this] { return job_->processes("sleep 1000").size() == 3; }))
      << "what it has started is left";
  order("fail", 3);
  expect_said(") ended with exit code 5; epoch 2 goes on with 2 of 3 workers (ranks 0-1 are workers 0,2)\n");
  EXPECT_NE(job_->out().find("0 | worker 0 came"), std::string::npos) << job_->out();
  order("end", 0);
  order("end", 2);
  EXPECT_EQ(job_->wait(), 0);
  expect_silent_about("failed");
}

TEST_F(ElasticJob, GoesOnWithoutAWorkerThatIsStopped) {
  start({"-np", "3", "--min-np", "2", "--stopped-timeout", "1"}, 3);
  order("stop", 1);
  expect_said(" s and is killed; epoch 1 goes on with 2 of 3 workers (ranks 0-1 are workers 0,2)\n");
  EXPECT_TRUE(eventually([this] { return job_->processes("sleep 1000").size() == 2; }));
  order("stop", 2);  // the others cannot go on without it
  EXPECT_EQ(job_->wait(), 124);
  expect_said("has been stopped for ");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, EndsWithTheFirstCauseWhereTooFewAreLeft) {
  start({"-np", "3", "--min-np", "2"}, 3);
  order("kill", 2);
  expect_said("epoch 1 goes on with 2 of 3 workers\n");
  order("fail", 0);
  EXPECT_EQ(job_->wait(), 128 + SIGKILL);
  expect_said("the job cannot go on: 1 worker is left, and 2 are wanted\n");
  // Nobody had formed a world since: that one may be why the other has failed.
  expect_said("rank 2 failed: killed by SIGKILL");
}

TEST_F(ElasticJob, ChangesNoMoreOftenThanItMay) {
  start({"-np", "3", "--min-np", "1", "--reset-limit", "1"}, 3);
  order("fail", 0);
  expect_said("epoch 1 goes on with 2 of 3 workers (ranks 0-1 are workers 1-2)\n");
  order("fail", 1);
  EXPECT_EQ(job_->wait(), 5);
  expect_said("the job cannot go on: its members have changed 1 time (--reset-limit)\n");
}

TEST_F(ElasticJob, GoesOnWithoutAHostThatIsLost) {
  start({"-H", "a:1,b:2,c:1", "--starter", "local", "--min-np", "2"}, 4);
  const std::vector<pid_t> guards = guards_of_agents();
  ASSERT_EQ(guards.size(), 3U);
  ::kill(guards[1], SIGKILL);
  expect_said("workers 1-2 are lost with their host b (");
  expect_said("epoch 1 goes on with 2 of 4 workers (ranks 0-1 are workers 0,3)\n");
  EXPECT_TRUE(eventually([this] { return job_->processes("sleep 1000").size() == 2; }));
  order("end", 0);
  order("end", 3);
  EXPECT_EQ(job_->wait(), 0);
  EXPECT_TRUE(job_->processes().empty());
}

// The kernel of its host answers, and nothing more comes of it.
TEST_F(ElasticJob, GoesOnWithoutAHostWhoseAgentIsStopped) {
  start({"-H", "a:1,b:2,c:1", "--starter", "local", "--min-np", "2", "--stopped-timeout", "1"}, 4);
  const pid_t guard = guards_of_agents().at(1);
  for (const pid_t pid : job_->processes(COHORT_COMMAND " agent --connect")) {
    const auto stat = sys::process_stat(pid);
    if (stat && stat->parent == guard) ::kill(pid, SIGSTOP);
  }
  expect_said("workers 1-2 are lost with their host b (nothing has come from the agent of b (ranks 1-2) for ");
  expect_said("epoch 1 goes on with 2 of 4 workers (ranks 0-1 are workers 0,3)\n");
  EXPECT_TRUE(eventually([this] { return job_->processes("sleep 1000").size() == 2; }));
  order("end", 0);
  order("end", 3);
  EXPECT_EQ(job_->wait(), 0);
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, GoesOnWithoutAHostWhoseAgentIsToldToEnd) {
  start({"-H", "a:1,b:2,c:1", "--starter", "local", "--min-np", "2", "--preempt-grace", "1"}, 4);
  ASSERT_EQ(guards_of_agents().size(), 3U);
  ::kill(guards_of_agents()[1], SIGTERM);
  expect_said("workers 1-2 leave: the agent of b was told to end by SIGTERM; epoch 1 goes on with 2 of 4 workers");
  order("leave", 1);
  // Worker 2 never asks: it is told when the time is over. Then the agent ends, too.
  EXPECT_TRUE(eventually([this] { return guards_of_agents().size() == 2; })) << job_->err();
  EXPECT_TRUE(eventually([this] { return job_->processes("sleep 1000").size() == 2; }));
  // The others are needed: now it is the job that is told.
  ::kill(guards_of_agents()[1], SIGTERM);
  EXPECT_EQ(job_->wait(), 128 + SIGTERM);
  expect_said("the agent of c was told to end by SIGTERM");
  expect_silent_about("epoch 2");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, GoesOnWithoutWorkersThatLeaveOnNotice) {
  start({"-np", "4", "--min-np", "2"}, 4);
  order("leave", 1);
  expect_said(") left on notice; epoch 1 goes on with 3 of 4 workers (ranks 0-2 are workers 0,2-3)\n");
  order("leave", 0);
  expect_said(") left on notice; epoch 2 goes on with 2 of 3 workers (ranks 0-1 are workers 2-3)\n");
  order("end", 2);
  order("end", 3);
  EXPECT_EQ(job_->wait(), 0);
  expect_silent_about("requeue");
}

TEST_F(ElasticJob, AsksForARequeueWhereTooManyLeaveOnNotice) {
  start({"-np", "3", "--min-np", "2"}, 3);
  order("leave", 1);
  expect_said("epoch 1 goes on with 2 of 3 workers");
  order("leave", 2);
  EXPECT_EQ(job_->wait(), 75);
  expect_said(") left on notice; the job cannot go on: 1 worker is left, and 2 are wanted\n");
  expect_said("exit status 75 asks for the job to be started again");
}

TEST_F(ElasticJob, EndsAsAnyOtherWhereItIsToldTo) {
  start({"-np", "3", "--min-np", "1"}, 3);
  order("kill", 0);
  expect_said("epoch 1 goes on with 2 of 3 workers");
  job_->signal(SIGTERM);
  EXPECT_EQ(job_->wait(), 128 + SIGTERM);
  expect_silent_about("epoch 2");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(ElasticJob, IsToldInEventsAndInItsRecord) {
  start({"-np", "3", "--min-np", "1", "--json", "--run-dir", "r"}, 3);
  order("kill", 1);
  const auto live = [this]() -> json {
    const json read = json::parse(job_->file("r/live.json"), nullptr, false);
    return read.is_object() ? read.value("members", json()) : json();
  };
  ASSERT_TRUE(eventually([&] { return live().is_object() && live().at("epoch") == 1; })) << job_->file("r/live.json");
  EXPECT_EQ(live().at("workers"), "0,2");
  EXPECT_EQ(live().at("size"), 2);
  order("end", 0);
  order("end", 2);
  EXPECT_EQ(job_->wait(), 0);
  std::vector<json> changes;
  std::istringstream lines(job_->out());
  for (std::string line; std::getline(lines, line);) {
    if (json event = json::parse(line); event.at("event") == "members") changes.push_back(std::move(event));
  }
  ASSERT_EQ(changes.size(), 1U) << job_->out();
  EXPECT_EQ(changes[0].at("epoch"), 1);
  EXPECT_EQ(changes[0].at("workers"), json({0, 2}));
  EXPECT_EQ(changes[0].at("left"), json({1}));
  const json record = json::parse(job_->file("r/job.json"));
  ASSERT_EQ(record.at("members").size(), 2U);
  EXPECT_EQ(record.at("members")[0].at("workers"), json({0, 1, 2}));
  EXPECT_EQ(record.at("members")[1].at("workers"), json({0, 2}));
  EXPECT_EQ(record.at("exit_status"), 0);
  EXPECT_FALSE(record.contains("failure"));
}

TEST(ElasticOptions, AreRefusedWhereTheyCannotBeMet) {
  const auto refused = [](std::vector<std::string> options, const std::string& why) {
    options.insert(options.begin(), "run");
    options.emplace_back("true");
    const auto finished = run({options});
    EXPECT_EQ(finished.status, 2) << finished.err;
    EXPECT_NE(finished.err.find(why), std::string::npos) << finished.err;
  };
  refused({"--max-np", "2"}, "--max-np: --min-np is wanted, too");
  refused({"--elastic-timeout", "9"}, "--elastic-timeout: --min-np is wanted, too");
  refused({"-np", "2", "--min-np", "3"}, "--min-np 3: the job would begin with 2 ranks");
  refused({"-np", "4", "--min-np", "1", "--max-np", "3"}, "--min-np 1 --max-np 3: the job would begin with 4 ranks");
  refused({"-np", "2", "--min-np", "2", "--max-num-proc", "1"}, "the least is more than the most");
  refused({"-np", "2", "--min-np", "1", "--servers", "1"}, "--min-np and --servers: ");
  refused({"-np", "2", "--min-np", "1", "--evaluator", "true"}, "--min-np and --evaluator: ");
  refused({"-np", "2", "--min-num-proc", "1", "--tf-config"}, "--min-np and --tf-config: ");
  refused({"-np", "2", "--spares", "1"}, "--spares: --min-np is wanted, too");
  refused({"-H", "a:2", "-np", "2", "--min-np", "1", "--spares", "1"}, "3 processes do not fit the 2 slots of 1 host");
  refused({"-np", "2", "--host-discovery-script", "true"}, "--host-discovery-script: --min-np is wanted, too");
  refused({"-H", "a", "--min-np", "1", "--host-discovery-script", "true"}, "leave out -H");
  refused({"-np", "2", "--min-np", "1", "--slots-per-host", "2"}, "is for hosts of --host-discovery-script");
}

}  // namespace
}  // namespace cohort::test
