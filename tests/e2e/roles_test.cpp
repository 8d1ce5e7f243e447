// Processes beside the ranks: what servers and the evaluator are told, how long they live, and that a job with them
// ends as cleanly as any other, whatever part of it dies.
#include "launch_harness.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <csignal>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace cohort::test {
namespace {

/// Servers serve until they are asked to end, and workers wait until all of them do.
constexpr const char* kProgram =
    "case $COHORT_ROLE in\n"
    "server) trap 'echo bye; exit 0' TERM\n"
    "  echo serving $COHORT_ROLE_NUMBER/$COHORT_SERVERS for $COHORT_WORKERS "
    "rank=${RANK-none}${WORLD_SIZE-}${LOCAL_RANK-}\n"
    "  touch ready.$COHORT_ROLE_NUMBER; while :; do sleep 0.02; done ;;\n"
    "*) for n in $(seq 0 $((COHORT_SERVERS - 1))); do while [ ! -e ready.$n ]; do sleep 0.02; done; done\n"
    "  echo worker $COHORT_ROLE $COHORT_ROLE_NUMBER is $RANK/$WORLD_SIZE ;;\n"
    "esac";

/// Servers as above; workers never end by themselves. Each leaves a grandchild in a session of its own.
constexpr const char* kLasting =
    "setsid sleep 1001 &\n"
    "touch ready.$COHORT_ROLE.$COHORT_ROLE_NUMBER\n"
    "if [ $COHORT_ROLE = server ]; then exec sleep 1002; else exec sleep 1000; fi";

std::vector<std::string> words(std::vector<std::string> options, const char* script) {
  std::vector<std::string> all = {"run"};
  all.insert(all.end(), options.begin(), options.end());
  all.insert(all.end(), {"sh", "-c", script});
  return all;
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Roles, ServersRunBesideTheRanksAndEndWithThem) {
  Job job({words({"-np", "2", "--servers", "2"}, kProgram)});
  ASSERT_EQ(job.wait(), 0) << job.err();
  for (const char* line : {":server 0 | serving 0/2 for 2 rank=none\n", ":server 1 | serving 1/2 for 2 rank=none\n",
                           "| worker worker 0 is 0/2\n", "| worker worker 1 is 1/2\n", "| bye\n"}) {
    EXPECT_TRUE(contains(job.out(), line)) << line << job.out();
  }
  EXPECT_TRUE(contains(job.err(), "2 processes and 2 servers on 1 host (")) << job.err();
  EXPECT_EQ(lines_of(job.log("server-1.out")).back(), "bye");
  const auto record = nlohmann::json::parse(job.file("runs/latest/job.json"));
  EXPECT_EQ(record["world_size"], 2);
  EXPECT_EQ(record["pids"].size(), 2U);
  EXPECT_EQ(record["server_pids"].size(), 2U);
  EXPECT_EQ(record["hosts"][0]["servers"], 2);
  EXPECT_EQ(record["exit_status"], 0);
  const auto live = nlohmann::json::parse(job.file("runs/latest/live.json"));
  EXPECT_EQ(live["world_size"], 2);
  ASSERT_EQ(live["others"].size(), 2U);
  EXPECT_EQ(live["others"][1]["name"], "server 1");
  EXPECT_EQ(live["others"][1]["state"], "ended");
  EXPECT_TRUE(job.processes().empty());
}

TEST(Roles, AreInThePlanThatIsPrinted) {
  const auto dry = run({words({"-np", "3", "--servers", "2", "-H", "a:2,b:2", "--starter", "local", "--dry-run",
                               "--server-program", "sh -c 'exec sleep 7'"},
                              "true")});
  ASSERT_EQ(dry.status, 0) << dry.err;
  EXPECT_TRUE(contains(dry.out, "3 processes and 2 servers on 2 hosts (a: ranks 0-1, server 0, b: rank 2, server 1)"))
      << dry.out;
  EXPECT_TRUE(contains(dry.out, "server 1  b     -\n")) << dry.out;
  EXPECT_TRUE(contains(dry.out, "sh -c 'exec sleep 7'")) << dry.out;
  EXPECT_TRUE(contains(dry.out, "COHORT_ROLE=server COHORT_ROLE_NUMBER=1 COHORT_WORKERS=3 COHORT_SERVERS=2"))
      << dry.out;
  const auto refused = run({words({"-np", "1", "--server-program", "x"}, "true")});
  EXPECT_EQ(refused.status, 2);
  EXPECT_TRUE(contains(refused.err, "--servers N or colocated")) << refused.err;
  EXPECT_TRUE(contains(run({words({"--servers", "some"}, "true")}).err, "--servers some: a number from 0"))
      << refused.err;
}

TEST(Roles, ColocatedIsOneServerOnEachHost) {
  Job job({words({"-np", "4", "-H", "a:2,b:2", "--starter", "local", "--servers", "colocated"}, kProgram)});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.out(), "a:server 0 | serving 0/2 for 4 rank=none\n")) << job.out();
  EXPECT_TRUE(contains(job.out(), "b:server 1 | serving 1/2 for 4 rank=none\n")) << job.out();
  EXPECT_TRUE(contains(job.out(), "worker worker 3 is 3/4\n")) << job.out();
}

TEST(Roles, ServersHaveHostsOfTheirOwn) {
  Job job({words({"-np", "3", "-H", "a:2,b:1", "--starter", "local", "--server-hosts", "c:2,b"}, kProgram)});
  ASSERT_EQ(job.wait(), 0) << job.err();
  for (const char* line : {"c:server 0 | serving 0/3 for 3 rank=none\n", "c:server 1 | serving 1/3 for 3 rank=none\n",
                           "b:server 2 | serving 2/3 for 3 rank=none\n", "worker worker 2 is 2/3\n"}) {
    EXPECT_TRUE(contains(job.out(), line)) << line << job.out();
  }
  EXPECT_TRUE(contains(job.err(), "on 3 hosts (a: ranks 0-1, b: rank 2, server 2, c: servers 0-1)")) << job.err();
  // A launcher that is to be the only one may have them as any other.
  const auto alone = run({words({"--nnodes", "1", "-np", "1", "--server-hosts", "localhost", "--dry-run"}, "true")});
  EXPECT_EQ(alone.status, 0) << alone.err;
  EXPECT_TRUE(contains(alone.out, "1 process and 1 server on 1 host")) << alone.out;
  const auto refused = run({words({"--server-hosts", "c", "--servers", "colocated"}, "true")});
  EXPECT_EQ(refused.status, 2);
  EXPECT_TRUE(contains(refused.err, "one of them says where servers run")) << refused.err;
}

TEST(Roles, AServerThatDoesNotEndIsKilledAfterTheGraceAndNamed) {
  Job job({words({"-np", "1", "--servers", "1", "--grace", "0.3"},
                 "if [ $COHORT_ROLE = server ]; then trap '' TERM; touch deaf; while :; do sleep 0.02; done; fi\n"
                 "while [ ! -e deaf ]; do sleep 0.02; done")});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.err(), "server 0 has not ended within its grace, and was killed")) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(Roles, AServerThatFailsEndsTheJobAndIsNamedFirst) {
  // A rank that cannot go on without it fails, too.
  Job job({words({"-np", "2", "--servers", "2"},
                 "case $COHORT_ROLE$COHORT_ROLE_NUMBER in server1) echo no room >&2; echo $$ >dying; exit 3 ;;\n"
                 "worker1) while [ ! -s dying ]; do sleep 0.02; done\n"
                 "  while kill -0 $(cat dying) 2>/dev/null; do sleep 0.02; done; exit 1 ;;\n"
                 "*) exec sleep 1000 ;; esac")});
  EXPECT_EQ(job.wait(), 3) << job.err();
  EXPECT_TRUE(contains(job.err(), "server 1 failed: exit code 3")) << job.err();
  EXPECT_TRUE(contains(job.err(), "> no room")) << job.err();
  EXPECT_TRUE(contains(job.err(), "full logs: ")) << job.err();
  EXPECT_TRUE(job.processes().empty());
  const auto record = nlohmann::json::parse(job.file("runs/latest/job.json"));
  EXPECT_EQ(record["failure"]["role"], "server");
  EXPECT_EQ(record["failure"]["number"], 1);
}

TEST(Roles, AJobGoesOnWithoutAServerWhereItMay) {
  const char* const program =
      "case $COHORT_ROLE$COHORT_ROLE_NUMBER in server1) echo $$ >dying; kill -9 $$ ;;\n"
      "server*) exec sleep 1000 ;; esac\n"
      "while [ ! -s dying ]; do sleep 0.02; done; while kill -0 $(cat dying) 2>/dev/null; do sleep 0.02; done\n"
      "sleep 0.5; echo trained";
  Job job({words({"-np", "1", "--servers", "2", "--lost-servers", "1"}, program)});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.err(), "server 1 on ")) << job.err();
  EXPECT_TRUE(contains(job.err(), "the job goes on without it (1 of 1 that may be, --lost-servers)")) << job.err();
  Job last({words({"-np", "1", "--servers", "1", "--lost-servers", "1"},
                  "[ $COHORT_ROLE = server ] && kill -9 $$; exec sleep 1000")});
  EXPECT_EQ(last.wait(), 137) << "the last one is not spared: " << last.err();
}

/// Server 1 dies as often as there are letters in the file `dies`, which workers wait for; each start leaves a line.
constexpr const char* kDies =
    "if [ $COHORT_ROLE = server ]; then trap 'exit 0' TERM\n"
    "  echo server $COHORT_ROLE_NUMBER start $COHORT_SERVER_RESTART\n"
    "  [ $COHORT_ROLE_NUMBER = 1 ] && [ $COHORT_SERVER_RESTART -lt $DIES ] && kill -9 $$\n"
    "  [ $COHORT_ROLE_NUMBER = 1 ] && touch lives; while :; do sleep 0.02; done; fi\n"
    "while [ ! -e lives ]; do sleep 0.02; done; echo trained";

TEST(Roles, AServerThatDiesIsStartedAgainWhereItWas) {
  // Its host has one more that runs, or nothing else.
  for (const char* const hosts : {"c:2", "c:1,d:1"}) {
    Job job(
        {words({"-np", "2", "-H", "a:1,b:1", "--starter", "local", "--server-hosts", hosts, "--server-restarts", "3"},
               kDies),
         {"DIES=2"}});
    ASSERT_EQ(job.wait(), 0) << job.err();
    EXPECT_EQ(job.log("server-1.out"), "server 1 start 0\nserver 1 start 1\nserver 1 start 2\n");
    EXPECT_EQ(job.log("server-0.out"), "server 0 start 0\n");
    EXPECT_TRUE(
        contains(job.err(), "is lost (killed by SIGKILL); it is started again (2 of 3 times, --server-restarts)"))
        << job.err();
    const auto record = nlohmann::json::parse(job.file("runs/latest/job.json"));
    ASSERT_EQ(record["server_restarts"].size(), 2U);
    EXPECT_EQ(record["server_restarts"][1]["number"], 1);
    EXPECT_NE(record["server_restarts"][1]["pid"], record["server_pids"][1]);
    EXPECT_FALSE(record.contains("failure"));
    const auto live = nlohmann::json::parse(job.file("runs/latest/live.json"));
    EXPECT_EQ(live["others"][1]["restarts"], 2);
    EXPECT_EQ(live["others"][0]["restarts"], 0);
    EXPECT_TRUE(job.processes().empty());
  }
}

TEST(Roles, TheLogOfAServerOfThisHostGoesOn) {
  Job job({words({"-np", "1", "--servers", "2", "--server-restarts", "1", "--json"}, kDies), {"DIES=1"}});
  ASSERT_EQ(job.wait(), 0) << job.out();
  EXPECT_EQ(job.log("server-1.out"), "server 1 start 0\nserver 1 start 1\n");
  std::vector<std::string> of_servers;
  int pid = 0;
  for (const std::string& line : lines_of(job.out())) {
    const auto event = nlohmann::json::parse(line);
    if (event["event"] != "process_ended" && event["event"] != "process_started") continue;
    if (event["number"] == 1) of_servers.push_back(event["event"]);
    if (event["event"] == "process_started") {
      EXPECT_EQ(event["restarts"], 1);
      pid = event["pid"];
    } else if (pid != 0 && event["number"] == 1) {
      EXPECT_EQ(event["pid"], pid);
    }
  }
  EXPECT_EQ(of_servers, (std::vector<std::string>{"process_ended", "process_started", "process_ended"}));
}

TEST(Roles, AServerThatDiesAgainAndAgainEndsTheJob) {
  for (const std::vector<std::string>& where :
       {std::vector<std::string>{"--servers", "1"}, {"-H", "a:1", "--starter", "local", "--server-hosts", "c"}}) {
    std::vector<std::string> options = {"-np", "1", "--server-restarts", "3"};
    options.insert(options.end(), where.begin(), where.end());
    Job job({words(options,
                   "[ $COHORT_ROLE = server ] || exec sleep 1000\n"
                   "[ $COHORT_SERVER_RESTART = 0 ] && exit 4; echo no room >&2; exit 5")});
    EXPECT_EQ(job.wait(), 5) << job.err();
    EXPECT_TRUE(contains(job.err(), "server 0 failed: exit code 5")) << job.err();
    EXPECT_TRUE(contains(job.err(), "it had been started again 3 times; the first time it had failed by: exit code 4"))
        << job.err();
    EXPECT_TRUE(contains(job.err(), "> no room")) << job.err();
    EXPECT_TRUE(job.processes().empty());
  }
}

TEST(Roles, AServerIsStartedAgainFirstAndGoneOnWithoutThen) {
  Job job({words({"-np", "1", "-H", "a:1", "--starter", "local", "--server-hosts", "c:1,d:1", "--server-restarts", "1",
                  "--lost-servers", "1"},
                 "case $COHORT_ROLE$COHORT_ROLE_NUMBER in server1) echo $COHORT_SERVER_RESTART >>dead; kill -9 $$ ;;\n"
                 "server*) exec sleep 1000 ;; esac\n"
                 "while ! grep -q 1 dead; do sleep 0.02; done; sleep 0.3; echo trained")});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.err(), "it is started again (1 of 1 times")) << job.err();
  EXPECT_TRUE(contains(job.err(), "the job goes on without it (1 of 1 that may be")) << job.err();
  EXPECT_EQ(job.file("dead"), "0\n1\n");
}

TEST(Roles, WhatAServerHasForkedIsGoneBeforeItIsStartedAgain) {
  Job job(
      {words({"-np", "1", "--servers", "1", "--server-restarts", "1"},
             "if [ $COHORT_ROLE = server ]; then\n"
             "  [ $COHORT_SERVER_RESTART = 1 ] && { pgrep -f '^sleep 1017$' >left; touch again; exec sleep 1000; }\n"
             "  sleep 1017 & while ! pgrep -f '^sleep 1017$'; do sleep 0.02; done; kill -9 $$; fi\n"
             "while [ ! -e again ]; do sleep 0.02; done")});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.file("left"), "");
}

TEST(Roles, AServerThatCannotSaveWhenItIsAskedToEndIsAFailure) {
  Job job({words({"-np", "1", "--servers", "1"},
                 "if [ $COHORT_ROLE = server ]; then trap 'echo disk full >&2; exit 4' TERM; touch ready;\n"
                 "while :; do sleep 0.02; done; fi; while [ ! -e ready ]; do sleep 0.02; done")});
  EXPECT_EQ(job.wait(), 4) << job.err();
  EXPECT_TRUE(contains(job.err(), "server 0 failed: exit code 4")) << job.err();
  EXPECT_TRUE(contains(job.err(), "it had been asked to end, since the workers were done")) << job.err();
}

TEST(Roles, WhoIsToldToEndHasItsServersUntilItsRanksHaveSaved) {
  Job job({words({"-np", "2", "--servers", "1", "--grace", "20"},
                 "if [ $COHORT_ROLE = server ]; then trap 'ls saved.*; exit 0' TERM; touch ready.server;\n"
                 "else trap 'sleep 0.3; touch saved.$RANK; exit 0' TERM; touch ready.$RANK; fi\n"
                 "while :; do sleep 0.02; done")});
  ASSERT_TRUE(eventually([&job] {
    return std::filesystem::exists(job.folder() + "/ready.server") &&
           std::filesystem::exists(job.folder() + "/ready.0") && std::filesystem::exists(job.folder() + "/ready.1") &&
           contains(job.err(), "2 processes and 1 server");  // who is told before that has not started yet
  })) << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
  EXPECT_EQ(job.log("server-0.out"), "saved.0\nsaved.1\n");
}

TEST(Roles, AllAreStartedAgainWhenAServerFails) {
  Job job({words({"-np", "1", "--servers", "1", "--max-restarts", "1"},
                 "if [ $COHORT_ROLE = server ]; then [ $COHORT_RESTART = 0 ] && exit 5; exec sleep 1000; fi\n"
                 "[ $COHORT_RESTART = 1 ] || exec sleep 1000")});
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.err(), "server 0 on ")) << job.err();
  EXPECT_TRUE(contains(job.err(), "failed after")) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(Roles, EventsTellOthersFromRanks) {
  Job job({words({"-np", "1", "--servers", "1", "--json"}, kProgram)});
  ASSERT_EQ(job.wait(), 0) << job.out();
  int of_servers = 0;
  for (const std::string& line : lines_of(job.out())) {
    const auto event = nlohmann::json::parse(line);
    if (event["event"] == "start") {
      EXPECT_EQ(event["server_pids"].size(), 1U);
    }
    if (event["event"] == "rank_ended") {
      EXPECT_EQ(event["rank"], 0);
    }
    if (event["event"] != "process_ended") continue;
    ++of_servers;
    EXPECT_EQ(event["role"], "server");
    EXPECT_EQ(event["number"], 0);
    EXPECT_FALSE(event.contains("rank"));
  }
  EXPECT_EQ(of_servers, 1);
}

TEST(Roles, TheEvaluatorHasTimeForTheLastCheckpoint) {
  Job job({words({"-np", "1", "--grace", "0.2", "--evaluator",
                  "sh -c 'trap \"sleep 0.6; echo last; exit 0\" TERM; echo evaluates; touch ready;"
                  " while :; do sleep 0.02; done'"},
                 "while [ ! -e ready ]; do sleep 0.02; done; echo $COHORT_ROLE")});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_TRUE(contains(job.out(), ":evaluator | evaluates\n")) << job.out();
  EXPECT_EQ(job.log("evaluator.out"), "evaluates\nlast\n") << job.err();
  EXPECT_TRUE(contains(job.err(), "1 process and an evaluator on 1 host")) << job.err();
}

TEST(Roles, OfTfConfigAreAChiefWorkersAndServersWithPortsOfTheirOwn) {
  Job job({words({"-np", "2", "--servers", "1", "--tf-config"},
                 "echo $TF_CONFIG; touch said.${RANK:-2}; "
                 "while [ ! -e said.0 ] || [ ! -e said.1 ] || [ ! -e said.2 ]; do sleep 0.02; done")});
  ASSERT_EQ(job.wait(), 0) << job.err();
  std::set<std::string> tasks, addresses;
  for (const char* log : {"rank-0.out", "rank-1.out", "server-0.out"}) {
    const auto config = nlohmann::json::parse(job.log(log));
    const auto& task = config["task"];
    const std::string type = task["type"];
    tasks.insert(fmt::format("{} {}", type, task["index"].get<int>()));
    addresses.insert(config["cluster"][type][task["index"].get<std::size_t>()].get<std::string>());
  }
  EXPECT_EQ(tasks, (std::set<std::string>{"chief 0", "ps 0", "worker 0"}));
  EXPECT_EQ(addresses.size(), 3U);
}

TEST(Roles, WorkersOfAChiefEndWithIt) {
  const char* const program =
      "if [ \"$RANK\" = 0 ]; then while [ ! -e up.1 ] || [ ! -e up.2 ]; do sleep 0.02; done; exit $STATUS; fi; "
      "touch up.${RANK:-2}; exec sleep 1000";
  Job well({words({"-np", "2", "--servers", "1", "--tf-config", "--env", "STATUS=0"}, program)});
  EXPECT_EQ(well.wait(), 0) << well.err();
  EXPECT_FALSE(contains(well.err(), "failed")) << well.err();
  Job failed({words({"-np", "2", "--servers", "1", "--tf-config", "--env", "STATUS=3"}, program)});
  EXPECT_EQ(failed.wait(), 3) << failed.err();
  EXPECT_TRUE(contains(failed.err(), "rank 0 failed: exit code 3")) << failed.err();
}

class RolesThatDie : public testing::Test {
 protected:
  void start(std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"-np", "2", "--servers", "2", "--grace", "0.5"});
    job_ = std::make_unique<Job>(JobOptions{words(std::move(more), kLasting)});
    ASSERT_TRUE(eventually([this] { return job_->processes("sleep 100").size() == 8; })) << job_->err();
  }
  /// The promise is 2 s; a loaded machine gets some more.
  void expect_nothing_left() {
    const auto since = std::chrono::steady_clock::now();
    EXPECT_TRUE(eventually(
        [this] {
          job_->running();
          return job_->processes().empty();
        },
        10s))
        << "processes are left";
    const auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
    RecordProperty("seconds", fmt::format("{:.3f}", seconds));
    EXPECT_LT(seconds, 4);
  }
  std::unique_ptr<Job> job_;
};

TEST_F(RolesThatDie, AKilledServer) {
  start();
  ::kill(job_->processes("sleep 1002").front(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 137);
  EXPECT_TRUE(contains(job_->err(), "cohort: server ")) << job_->err();
  EXPECT_TRUE(contains(job_->err(), " failed: killed by SIGKILL")) << job_->err();
}

TEST_F(RolesThatDie, AServerThatWasStartedAgain) {
  start({"--server-restarts", "1"});
  for (int kill = 0; kill < 2; ++kill) {
    const auto before = job_->processes("sleep 1002");
    ASSERT_EQ(before.size(), 2U);
    ::kill(before.front(), SIGKILL);
    if (kill == 1) break;
    ASSERT_TRUE(eventually([&] {
      const auto now = job_->processes("sleep 1002");
      return now.size() == 2 && now != before;
    })) << job_->err();
  }
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 137);
  EXPECT_TRUE(contains(job_->err(), "started again 1 time; the first time") ||
              contains(job_->err(), " failed: killed by SIGKILL"))
      << job_->err();
}

/// While servers, one of them alone on its host, are killed and started again without a pause.
class RolesStartedAgainAndAgain : public RolesThatDie {
 protected:
  void start(const std::vector<std::string>& more, const std::string& ranks) {
    std::vector<std::string> options = {"-np",
                                        "1",
                                        "-H",
                                        "a:1",
                                        "--starter",
                                        "local",
                                        "--server-hosts",
                                        "a:1,c:1",
                                        "--grace",
                                        "0.5",
                                        "--server-restarts",
                                        "1000000"};
    options.insert(options.end(), more.begin(), more.end());
    job_ = std::make_unique<Job>(
        JobOptions{words(options, ("[ $COHORT_ROLE = server ] && kill -9 $$; " + ranks).c_str())});
    ASSERT_TRUE(eventually([this] { return contains(job_->err(), "(50 of"); })) << job_->err();
  }
};

TEST_F(RolesStartedAgainAndAgain, AKilledSupervisor) {
  start({}, "exec sleep 1000");
  job_->signal(SIGKILL);
  expect_nothing_left();
}

TEST_F(RolesStartedAgainAndAgain, AKilledAgent) {
  start({}, "exec sleep 1000");
  ::kill(job_->agent(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 1);
}

TEST_F(RolesStartedAgainAndAgain, WhoIsToldToEnd) {
  start({}, "exec sleep 1000");
  job_->signal(SIGTERM);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 143) << job_->err();
}

TEST_F(RolesStartedAgainAndAgain, TheEndOfTheRanksIsThatOfTheServersAndThenOfTheEvaluator) {
  start({"--evaluator", "sh -c 'trap \"echo last; exit 0\" TERM; while :; do sleep 0.02; done'"}, "sleep 1; exit 0");
  EXPECT_EQ(job_->wait(), 0) << job_->err();
  EXPECT_EQ(job_->log("evaluator.out"), "last\n");
  EXPECT_TRUE(job_->processes().empty());
}

TEST_F(RolesThatDie, AKilledRank) {
  start();
  ::kill(job_->processes("sleep 1000").front(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 137);
  EXPECT_TRUE(contains(job_->err(), "cohort: rank ")) << job_->err();
}

TEST_F(RolesThatDie, AKilledSupervisor) {
  start();
  job_->signal(SIGKILL);
  expect_nothing_left();
}

TEST_F(RolesThatDie, AKilledAgent) {
  start();
  ::kill(job_->agent(), SIGKILL);
  expect_nothing_left();
  EXPECT_EQ(job_->wait(), 1);
}

TEST_F(RolesThatDie, TheEndOfAllRanksIsThatOfWhatServersHaveStarted) {
  start();
  for (const pid_t pid : job_->processes("sleep 1000")) ::kill(pid, SIGKILL);
  expect_nothing_left();
}

}  // namespace
}  // namespace cohort::test
