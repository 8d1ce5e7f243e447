// A launcher for each node of one job, here all on one machine: node 0 supervises, the others are its agents.
#include "launch_harness.h"
#include "net/socket.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace cohort::test {
namespace {

/// The launchers of a job of two nodes. Node 1 has a folder and a secret file of its own, as on another host.
class Nodes : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto free = value_or_throw(net::listen_on({{"0.0.0.0", 0}, {}}));
    port_ = std::to_string(value_or_throw(net::local_endpoint(free.get())).tcp.port);
    // The folder of this job keeps the secret.
    keeper_ = std::make_unique<Job>(JobOptions{{"secret", "secret"}});
    ASSERT_EQ(keeper_->wait(), 0);
  }

  std::unique_ptr<Job> start(int rank, std::vector<std::string> words, std::vector<std::string> environment = {},
                             const std::string& count = "2") {
    words.insert(words.begin(), {"run", "--nnodes", count, "--node-rank", std::to_string(rank), "--master-addr",
                                 "localhost", "--master-port", port_});
    environment.push_back("COHORT_SECRET_FILE=" + keeper_->folder() + "/secret");
    return std::make_unique<Job>(JobOptions{std::move(words), std::move(environment)});
  }

  static std::vector<std::string> said(const Job& job) {
    std::vector<std::string> lines;
    for (const std::string& line : lines_of(job.out())) lines.push_back(line.substr(line.find("| ") + 2));
    std::sort(lines.begin(), lines.end());
    return lines;
  }

  std::string port_;
  std::unique_ptr<Job> keeper_;
};

TEST_F(Nodes, MakeOneJobAndEachLaunchersWordsCountThere) {
  const std::string says = "echo $RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $WORLD_SIZE $WHO";
  const auto other = start(1, {"--nproc_per_node", "3", "--env", "WHO=other", "sh", "-c", says});
  const auto first = start(0, {"-np", "1", "sh", "-c", says + " first"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(other->wait(), 0) << other->err();
  EXPECT_EQ(said(*first), (std::vector<std::string>{"0 0/1 0/2 4 first", "1 0/3 1/2 4 other", "2 1/3 1/2 4 other",
                                                    "3 2/3 1/2 4 other"}));
  EXPECT_EQ(other->out(), "");
  EXPECT_NE(other->err().find("ranks 1-3 here; output and logs are at node 0"), std::string::npos) << other->err();
  EXPECT_NE(first->err().find("4 processes on 2 hosts"), std::string::npos) << first->err();
  EXPECT_NE(first->err().find("a launcher on each with its own -np"), std::string::npos) << first->err();
}

TEST_F(Nodes, AFailureGivesTheStatusOfBothAndLeavesNothing) {
  const std::vector<std::string> words = {"-np", "2", "sh", "-c",
                                          "[ $RANK != 3 ] || exit 7; (setsid sleep 1000 &); sleep 1000"};
  const auto first = start(0, words);
  const auto other = start(1, words);
  EXPECT_EQ(first->wait(), 7) << first->err();
  EXPECT_EQ(other->wait(), 7) << other->err();
  EXPECT_NE(first->err().find("rank 3 failed: exit code 7"), std::string::npos) << first->err();
  EXPECT_NE(other->err().find("the job has ended with status 7; node 0 "), std::string::npos) << other->err();
  EXPECT_TRUE(eventually([&] { return first->processes().empty() && other->processes().empty(); }));
}

TEST_F(Nodes, OneThatIsLostBeforeTheJobBeginsIsAwaitedAgain) {
  const std::vector<std::string> words = {"-np", "1", "--start-timeout", "40", "sh", "-c", "echo rank $RANK"};
  const auto first = start(0, words, {}, "3");
  const auto is_awaited = [&] {
    return first->err().find(" is lost before the job has begun, and is awaited again") != std::string::npos;
  };
  for (int tries = 0; tries < 10 && !is_awaited(); ++tries) {  // nothing says when it has come
    const auto lost = start(1, words, {}, "3");
    std::this_thread::sleep_for(std::chrono::seconds(1));
    lost->signal(SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(500));
  }
  ASSERT_TRUE(is_awaited()) << first->err();
  const auto again = start(1, words, {}, "3");
  const auto last = start(2, words, {}, "3");
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(again->wait(), 0) << again->err();
  EXPECT_EQ(last->wait(), 0) << last->err();
  EXPECT_EQ(said(*first), (std::vector<std::string>{"rank 0", "rank 1", "rank 2"}));
}

// torchrun's MIN:MAX.
TEST_F(Nodes, AJobBeginsAndGoesOnWithTheFewestOfThem) {
  const std::vector<std::string> words = {"-np",
                                          "2",
                                          "--start-timeout",
                                          "12",
                                          "sh",
                                          "-c",
                                          "touch up.$COHORT_WORKER; while [ ! -e end ]; do sleep 0.05; done"};
  const auto first = start(0, words, {}, "2:3");
  const auto other = start(1, words, {}, "2:3");
  const auto up = [&](const Job& job, int worker) {
    return ::access(fmt::format("{}/up.{}", job.folder(), worker).c_str(), F_OK) == 0;
  };
  ASSERT_TRUE(eventually([&] { return up(*first, 0) && up(*first, 1) && up(*other, 2) && up(*other, 3); }))
      << first->err();
  EXPECT_NE(first->err().find("2 of 3 nodes are there, and 2 are enough: the job begins in 6 s"), std::string::npos)
      << first->err();
  other->signal(SIGKILL);
  EXPECT_EQ(first->wait(), 1) << first->err();
  EXPECT_NE(first->err().find("the job cannot go on: 2 workers are left, and 4 are wanted"), std::string::npos)
      << first->err();
}

TEST_F(Nodes, AJobGoesOnWithoutANodeThatItCanSpare) {
  const std::vector<std::string> words = {"-np", "2", "sh", "-c",
                                          "touch up.$COHORT_WORKER; while [ ! -e end ]; do sleep 0.05; done"};
  const auto first = start(0, words, {}, "1:2");
  const auto other = start(1, words, {}, "1:2");
  ASSERT_TRUE(eventually([&] { return first->err().find("4 processes on 2 hosts") != std::string::npos; }))
      << first->err();
  other->signal(SIGKILL);
  ASSERT_TRUE(eventually([&] { return first->err().find("epoch 1 goes on with 2 of 4 workers") != std::string::npos; }))
      << first->err();
  (void)!::system(("touch " + first->folder() + "/end").c_str());
  EXPECT_EQ(first->wait(), 0) << first->err();
}

TEST_F(Nodes, OneThatComesLateJoinsAJobThatMayGrow) {
  const std::string worker = "touch up.$COHORT_WORKER; while [ ! -e end ]; do sleep 0.05; done";
  const std::vector<std::string> words = {"-np", "1",   "--max-restarts", "1", "--start-timeout", "4", "sh",
                                          "-c",  worker};
  const auto first = start(0, words, {}, "1:2");
  const auto up = [](const Job& job, int number) {
    return ::access(fmt::format("{}/up.{}", job.folder(), number).c_str(), F_OK) == 0;
  };
  ASSERT_TRUE(eventually([&] { return up(*first, 0); })) << first->err();
  const auto late = start(1, words, {}, "1:2");
  // Its ranks have no world of Cohort's, so that it takes part when all begin anew.
  ASSERT_TRUE(eventually([&] { return first->err().find("it takes part once all ranks are st") != std::string::npos; }))
      << first->err();
  // (While the shell starts a `sleep`, there are two for a moment.)
  auto ranks = first->processes("sh -c " + worker);
  ASSERT_TRUE(eventually([&] {
    ranks = first->processes("sh -c " + worker);
    return ranks.size() == 1;
  }));
  ::kill(ranks.front(), SIGKILL);
  ASSERT_TRUE(eventually([&] { return up(*first, 1) && up(*late, 2); })) << first->err() << late->err();
  EXPECT_TRUE(eventually([&] { return first->err().find("2 processes on 2 hosts") != std::string::npos; }))
      << first->err();
  (void)!::system(("touch " + first->folder() + "/end " + late->folder() + "/end").c_str());
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(late->wait(), 0) << late->err();
}

TEST_F(Nodes, OneThatCannotStartItsProgramEndsTheJobOfAll) {
  const auto first = start(0, {"-np", "1", "--start-timeout", "60", "sleep", "1000"});
  ASSERT_TRUE(eventually([&] { return first->err().find("for node 1") != std::string::npos; })) << first->err();
  const auto other = start(1, {"-np", "1", "./no/such"});
  EXPECT_EQ(other->wait(), 127) << other->err();
  EXPECT_NE(other->err().find("cannot start ./no/such: No such file"), std::string::npos) << other->err();
  EXPECT_EQ(first->wait(), 127) << first->err();
  EXPECT_NE(first->err().find(": cannot start ./no/such: No such file"), std::string::npos) << first->err();
  EXPECT_EQ(first->err().find("no sign of"), std::string::npos) << first->err();  // it has not waited for its time
}

// As torchrun's words for each host, the same on all.
TEST_F(Nodes, NobodyHasToBeToldWhichItIs) {
  const auto launcher = [&](std::vector<std::string> words, std::vector<std::string> environment = {}) {
    words.insert(words.begin(), "run");
    environment.push_back("COHORT_SECRET_FILE=" + keeper_->folder() + "/secret");
    return std::make_unique<Job>(JobOptions{std::move(words), std::move(environment)});
  };
  const std::string says = "echo $RANK $GROUP_RANK/$GROUP_WORLD_SIZE $COHORT_RESTART; [ $RANK$COHORT_RESTART != 10 ]";
  const std::vector<std::string> words = {
      "--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv_id=77", "--max-restarts",
      "1",          "--rdzv_endpoint",    "localhost:" + port_,  "sh",           "-c",
      says};
  const auto one = launcher(words);
  const auto two =
      launcher({"--max-restarts", "1", "sh", "-c", says},
               {"PET_NNODES=2", "PET_NPROC_PER_NODE=1", "PET_RDZV_ID=77", "PET_RDZV_ENDPOINT=localhost:" + port_});
  EXPECT_EQ(one->wait(), 0) << one->err();
  EXPECT_EQ(two->wait(), 0) << two->err();
  const auto& first = one->out().empty() ? *two : *one;
  const auto lines = said(first);  // rank 0 of the first attempt may have been ended before it spoke
  for (const char* wanted : {"0 0/2 1", "1 1/2 0", "1 1/2 1"})
    EXPECT_NE(std::find(lines.begin(), lines.end(), wanted), lines.end()) << wanted << "\n" << first.out();
}

TEST_F(Nodes, ALauncherOfAnotherJobIsTurnedAway) {
  const auto first = start(0, {"-np", "1", "--rdzv-id", "77", "true"});
  ASSERT_TRUE(eventually([&] { return first->err().find("for node 1") != std::string::npos; })) << first->err();
  const auto wrong = start(1, {"-np", "1", "--rdzv-id", "78", "true"});
  EXPECT_EQ(wrong->wait(), 1) << wrong->err();
  EXPECT_NE(wrong->err().find("--rdzv-id there is 78, and that of node rank 0 is 77"), std::string::npos)
      << wrong->err();
  const auto right = start(1, {"-np", "1", "--rdzv-id", "77", "true"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(right->wait(), 0) << right->err();
}

TEST_F(Nodes, ARestartTakesBothAlong) {
  const std::vector<std::string> words = {"--max-restarts",
                                          "1",
                                          "-np",
                                          "1",
                                          "sh",
                                          "-c",
                                          "echo $RANK try $COHORT_RESTART; [ $RANK$COHORT_RESTART != 10 ] || exit 5; [ "
                                          "$COHORT_RESTART = 1 ] || sleep 1000"};
  const auto other = start(1, words);
  const auto first = start(0, words);
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(other->wait(), 0) << other->err();
  const auto lines = said(*first);
  for (const char* wanted : {"0 try 1", "1 try 0", "1 try 1"})
    EXPECT_NE(std::find(lines.begin(), lines.end(), wanted), lines.end()) << wanted << "\n" << first->out();
}

TEST_F(Nodes, TheSupervisorOrTheOtherLauncherIsKilled) {
  for (const int victim : {0, 1}) {
    const std::vector<std::string> words = {"-np", "1", "sh", "-c", "echo up; (setsid sleep 1000 &); sleep 1000"};
    const auto first = start(0, words);
    const auto other = start(1, words);
    ASSERT_TRUE(eventually([&] { return said(*first).size() == 2; })) << first->err() << other->err();
    (victim == 0 ? *first : *other).signal(SIGKILL);
    (victim == 0 ? *other : *first).wait();
    const std::string err = (victim == 0 ? *other : *first).err();
    EXPECT_NE(err.find(victim == 0 ? "is lost; ending what runs here" : "ending the job"), std::string::npos) << err;
    EXPECT_TRUE(eventually([&] { return first->processes().empty() && other->processes().empty(); })) << victim;
  }
}

TEST_F(Nodes, AnInterruptAtEitherIsTheJobs) {
  for (const int told : {0, 1}) {
    const std::vector<std::string> words = {"-np", "1", "sh", "-c",
                                            "trap 'kill $!; echo asked; exit 0' INT; echo up; sleep 1000 & wait"};
    const auto first = start(0, words);
    const auto other = start(1, words);
    ASSERT_TRUE(eventually([&] { return said(*first).size() == 2; })) << first->err() << other->err();
    (told == 0 ? *first : *other).signal(SIGINT);
    EXPECT_EQ(first->wait(), 130) << first->err();
    EXPECT_EQ(other->wait(), 130) << other->err();
    EXPECT_EQ(said(*first), (std::vector<std::string>{"asked", "asked", "up", "up"}));
  }
}

TEST_F(Nodes, OneThatWaitsForTheFirstHearsAnInterrupt) {
  const auto other = start(1, {"-np", "1", "true"});
  ASSERT_TRUE(eventually([&] { return other->err().find("node 1 waits for node 0 at ") != std::string::npos; }));
  other->signal(SIGINT);
  EXPECT_EQ(other->wait(), 130) << other->err();
}

TEST_F(Nodes, WhoDoesNotFitIsToldAndDoesNoHarm) {
  const auto first = start(0, {"-np", "1", "echo", "here"});
  ASSERT_TRUE(eventually([&] {
    return first->err().find("for node 1; on each: cohort run --nnodes 2") != std::string::npos;
  })) << first->err();
  const auto second = start(0, {"-np", "1", "echo", "here"});
  EXPECT_EQ(second->wait(), 127);
  EXPECT_NE(second->err().find("node rank 0 cannot listen at port"), std::string::npos) << second->err();
  const std::string secret = "COHORT_SECRET_FILE=" + keeper_->folder() + "/secret";
  const auto third = run({{"run", "--nnodes", "3", "--node-rank", "1", "--master-addr", "localhost", "--master-port",
                           port_, "-np", "1", "true"},
                          {secret}});
  EXPECT_EQ(third.status, 1);
  EXPECT_NE(third.err.find("was started with --nnodes 3, and node rank 0 with 2"), std::string::npos) << third.err;
  const auto other = start(1, {"-np", "1", "echo", "here"});
  EXPECT_EQ(first->wait(), 0) << first->err();
  EXPECT_EQ(said(*first), (std::vector<std::string>{"here", "here"}));
  EXPECT_EQ(other->wait(), 0) << other->err();
}

TEST_F(Nodes, WithoutASecretThereAreTwoWaysOut) {
  const auto done =
      run({{"run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost", "-np", "1", "true"}});
  EXPECT_EQ(done.status, 127);
  for (const char* wanted :
       {"`cohort secret FILE`", "--secret-file FILE or COHORT_SECRET_FILE", "cohort run -H a:2,b:2"})
    EXPECT_NE(done.err.find(wanted), std::string::npos) << done.err;
}

TEST(SeveralLaunchers, AreRefusedUnlessEachIsMeantToBeAlone) {
  const std::vector<std::string> task = {"OMPI_COMM_WORLD_SIZE=2", "OMPI_COMM_WORLD_RANK=1"};
  const auto refused = run({{"run", "-np", "2", "true"}, task});
  EXPECT_NE(refused.status, 0);
  EXPECT_NE(refused.err.find("`mpirun -np 2 PROGRAM`"), std::string::npos) << refused.err;
  auto alone = task;
  alone.push_back("COHORT_ALONE=1");
  const auto meant = run({{"run", "-q", "-np", "2", "sh", "-c", "echo $WORLD_SIZE [$COHORT_ALONE]"}, alone});
  EXPECT_EQ(meant.status, 0) << meant.err;
  EXPECT_EQ(std::count(meant.out.begin(), meant.out.end(), '2'), 2) << meant.out;
  EXPECT_NE(meant.out.find("2 []"), std::string::npos) << meant.out;  // its ranks are one world
}

TEST(SeveralLaunchers, ADryRunShowsThePlanOfAllNodes) {
  const auto plan =
      run({{"run", "--nnodes", "2", "--node-rank", "1", "--master-addr", "h1", "--dry-run", "-np", "2", "true"}});
  EXPECT_EQ(plan.status, 0) << plan.err;
  EXPECT_NE(plan.out.find("4 processes on 2 hosts (node 0: ranks 0-1, "), std::string::npos) << plan.out;
}

}  // namespace
}  // namespace cohort::test
