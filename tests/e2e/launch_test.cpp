// Environment, output, input, exit statuses and messages of a job.
#include "base/hardware.h"
#include "base/testing/sanitized.h"
#include "launch_harness.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <thread>

namespace cohort::test {
namespace {

using testing::TestWithParam;

std::map<std::string, std::string> environment_of(const std::string& text) {
  std::map<std::string, std::string> out;
  for (const std::string& line : lines_of(text)) {
    const auto equals = line.find('=');
    if (equals != std::string::npos) out[line.substr(0, equals)] = line.substr(equals + 1);
  }
  return out;
}

TEST(Launch, WorkersFindWhatTorchrunAndCohortPromise) {
  Job job({{"run", "-np", "3", "--env", "EXTRA=a=b", "env", "-u", "NOT_SET"}});  // options of the program's are its own
  ASSERT_EQ(job.wait(), 0) << job.err();
  std::set<std::string> ports;
  for (int rank = 0; rank < 3; ++rank) {
    auto env = environment_of(job.log(fmt::format("rank-{}.out", rank)));
    EXPECT_EQ(env["RANK"], std::to_string(rank));
    EXPECT_EQ(env["LOCAL_RANK"], std::to_string(rank));
    EXPECT_EQ(env["ROLE_RANK"], std::to_string(rank));
    EXPECT_EQ(env["WORLD_SIZE"], "3");
    EXPECT_EQ(env["LOCAL_WORLD_SIZE"], "3");
    EXPECT_EQ(env["ROLE_WORLD_SIZE"], "3");
    EXPECT_EQ(env["GROUP_RANK"], "0");
    EXPECT_EQ(env["GROUP_WORLD_SIZE"], "1");
    EXPECT_EQ(env["MASTER_ADDR"], "127.0.0.1");
    EXPECT_EQ(env["TORCHELASTIC_USE_AGENT_STORE"], "False");
    EXPECT_EQ(env["TORCHELASTIC_RUN_ID"], env["COHORT_JOB_ID"]);
    EXPECT_EQ(env["EXTRA"], "a=b");
    EXPECT_EQ(env["PYTHONUNBUFFERED"], "1");
    EXPECT_GE(std::stoi(env["OMP_NUM_THREADS"]), 1);
    EXPECT_TRUE(env["COHORT_STORE"].starts_with("127.0.0.1:")) << env["COHORT_STORE"];
    EXPECT_TRUE(std::filesystem::equivalent(env["COHORT_RUN_DIR"], job.folder() + "/runs/latest"));
    EXPECT_FALSE(env["COHORT_HOST"].empty());
    ports.insert(env["MASTER_PORT"]);
  }
  ASSERT_EQ(ports.size(), 1U);
  int low = 0;
  int high = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> low >> high;
  const int port = std::stoi(*ports.begin());
  EXPECT_TRUE(port < low || port > high) << port << " is ephemeral";
}

TEST(Launch, ThreadsAreSetUnlessTheUserHasSetThem) {
  const auto finished = run({{"run", "-np", "2", "--prefix", "none", "sh", "-c",
                              "echo $OMP_NUM_THREADS $TF_NUM_INTEROP_THREADS; test $TF_NUM_INTRAOP_THREADS -ge 1"},
                             {"OMP_NUM_THREADS=7", "TF_NUM_INTEROP_THREADS=3"}});
  EXPECT_EQ(finished.status, 0) << finished.err;
  EXPECT_EQ(finished.out, "7 3\n7 3\n");
  EXPECT_NE(finished.err.find("7 threads each"), std::string::npos) << finished.err;
}

TEST(Launch, RanksLeadGroupsInOneSessionSoThatTheyCanYieldToEachOther) {
  Job job({{"run", "-np", "2", "--", "sh", "-c",
            "read -r pid name state parent group session rest </proc/self/stat; echo leads=$((group == $$)); "
            "echo session=$session"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  auto first = environment_of(job.log("rank-0.out"));
  auto second = environment_of(job.log("rank-1.out"));
  EXPECT_EQ(first["leads"] + second["leads"], "11");
  EXPECT_EQ(first["session"], second["session"]);
  EXPECT_NE(first["session"], std::to_string(::getsid(0)));
}

TEST(Launch, SecretAndStatusPageAreMemoryFilesAndNothingElseIsInherited) {
  const auto finished = run({{"run", "-np", "1", "--prefix", "none", "sh", "-c",
                              "readlink /proc/$$/fd/$COHORT_SECRET_FD; wc -c < /proc/$$/fd/$COHORT_SECRET_FD;"
                              "readlink /proc/$$/fd/$COHORT_STATUS_FD;"
                              "ls /proc/$$/fd; exit 0"}});
  ASSERT_EQ(finished.status, 0) << finished.err;
  const auto lines = lines_of(finished.out);
  ASSERT_EQ(lines.size(), 8U) << finished.out;
  EXPECT_TRUE(lines[0].starts_with("/memfd:cohort-secret")) << lines[0];
  EXPECT_EQ(lines[1], "32");
  EXPECT_TRUE(lines[2].starts_with("/memfd:cohort-status")) << lines[2];
  EXPECT_EQ(lines[3] + " " + lines[4] + " " + lines[5] + " " + lines[6] + " " + lines[7], "0 1 100 101 2");
}

TEST(Launch, ClosedStandardDescriptorsBecomeNobodyElses) {
  Job job({{"run", "-np", "1", "--run-dir", "kept", "sh", "-c", "echo said; while [ ! -e go ]; do sleep 0.02; done"},
           {},
           {},
           false,
           false,
           "exec <&- >&- 2>&-"});
  ASSERT_TRUE(eventually([&] { return job.file("kept/logs/rank-0.out") == "said\n"; }));
  for (const char* fd : {"0", "1", "2"}) {
    std::error_code error;
    EXPECT_EQ(std::filesystem::read_symlink(fmt::format("/proc/{}/fd/{}", job.pid(), fd), error), "/dev/null") << fd;
  }
  std::ofstream(job.folder() + "/go") << "";
  EXPECT_EQ(job.wait(), 0);
}

TEST(Launch, FirstLineSaysWhatWasFormed) {
  const auto finished = run({{"run", "-np", "2", "true"}});
  EXPECT_EQ(finished.status, 0);
  const auto lines = lines_of(finished.err);
  ASSERT_EQ(lines.size(), 2U) << finished.err;  // (the second doubts it)
  EXPECT_TRUE(lines[0].starts_with("cohort: 2 processes on 1 host (")) << lines[0];
  EXPECT_NE(lines[0].find(": ranks 0-1), "), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("run runs/"), std::string::npos) << lines[0];
  EXPECT_EQ(run({{"run", "-q", "-np", "2", "true"}}).err, "");
  const int cores = sys::usable_cores();
  const auto crowded = run({{"run", "-np", std::to_string(cores + 1), "true"}});
  EXPECT_NE(crowded.err.find(fmt::format("), more than the {} core{} here, ", cores, cores == 1 ? "" : "s")),
            std::string::npos)
      << crowded.err;
}

TEST(Launch, OutputComesInWholeLinesInOrderAndLosesNothing) {
  constexpr int kLines = 20000;
  Job job({{"run", "-np", "4", "sh", "-c", fmt::format("seq -f \"$RANK-%.0f-{}\" {}", std::string(60, 'x'), kLines)}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  std::vector<int> next(4, 1);
  for (const std::string& line : lines_of(job.out())) {
    const auto bar = line.find(" | ");
    ASSERT_NE(bar, std::string::npos) << line;
    const int rank = line[bar - 1] - '0';
    ASSERT_TRUE(rank >= 0 && rank < 4) << line;
    ASSERT_EQ(line.substr(bar + 3),
              fmt::format("{}-{}-{}", rank, next[static_cast<std::size_t>(rank)]++, std::string(60, 'x')));
  }
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(next[static_cast<std::size_t>(rank)], kLines + 1);
    EXPECT_EQ(lines_of(job.log(fmt::format("rank-{}.out", rank))).size(), static_cast<std::size_t>(kLines));
  }
}

TEST(Launch, PartialLinesAndProgressBars) {
  Job job(
      {{"run", "-np", "1", "sh", "-c", R"(printf 'one\r\n10%%\r50%%\r100%%\n'; printf 'no end'; printf 'bad' >&2)"}});
  ASSERT_EQ(job.wait(), 0);
  std::vector<std::string> texts;
  for (const auto& line : lines_of(job.out())) texts.push_back(line.substr(line.find(" | ") + 3));
  EXPECT_EQ(texts, (std::vector<std::string>{"one", "100%", "no end"}));
  EXPECT_NE(job.err().find(":0 | bad\n"), std::string::npos) << job.err();
  EXPECT_EQ(job.log("rank-0.out"), "one\r\n10%\r50%\r100%\nno end");
  EXPECT_EQ(job.log("rank-0.err"), "bad");
}

TEST(Launch, WithoutPrefixBytesPassAsTheyAre) {
  const auto finished = run({{"run", "-np", "1", "--prefix", "none", "printf", R"(a\0b\r\377)"}});
  EXPECT_EQ(finished.out, std::string("a\0b\r\377", 5));
}

TEST(Launch, InputGoesToRankZeroAndEndsThere) {
  std::string input;
  for (int i = 0; i < 100000; ++i) input += fmt::format("line {}\n", i);
  const auto finished = run({{"run", "-np", "2", "sh", "-c", "echo $RANK $(wc -c)"}, {}, input});
  ASSERT_EQ(finished.status, 0) << finished.err;
  EXPECT_NE(finished.out.find(fmt::format("| 0 {}\n", input.size())), std::string::npos) << finished.out;
  EXPECT_NE(finished.out.find("| 1 0\n"), std::string::npos) << finished.out;
}

TEST(Launch, InputThatNobodyReadsDoesNoHarm) {
  EXPECT_EQ(run({{"run", "-np", "2", "true"}, {}, std::string(1 << 20, 'x')}).status, 0);
}

struct EndCase {
  const char* script;
  int status;
  const char* words;
};
class LaunchEnd : public TestWithParam<EndCase> {};
TEST_P(LaunchEnd, FirstFailureGivesStatusAndMessage) {
  const auto finished =
      run({{"run", "-np", "3", "sh", "-c",
            fmt::format("[ $RANK = 1 ] && {{ echo 'last words' >&2; {}; }}; exec sleep 100", GetParam().script)}});
  EXPECT_EQ(finished.status, GetParam().status) << finished.err;
  EXPECT_NE(finished.err.find(fmt::format("rank 1 failed: {}", GetParam().words)), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("> last words\n"), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("full logs: runs/"), std::string::npos) << finished.err;
}
INSTANTIATE_TEST_SUITE_P(Ways, LaunchEnd,
                         testing::Values(EndCase{"exit 3", 3, "exit code 3"},
                                         EndCase{"kill -9 $$", 137, "killed by SIGKILL"},
                                         EndCase{"kill -SEGV $$", 139, "killed by SIGSEGV"},
                                         EndCase{"kill -TERM $$", 143, "killed by SIGTERM"}));

TEST(Launch, LastTwentyLinesOfStderr) {
  const auto finished = run({{"run", "-np", "1", "sh", "-c", "seq 1 1000 >&2; exit 1"}});
  EXPECT_EQ(finished.status, 1);
  EXPECT_NE(finished.err.find("cohort:   > 981\ncohort:   > 982\n"), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("cohort:   > 1000\n"), std::string::npos);
  EXPECT_EQ(finished.err.find("cohort:   > 980\n"), std::string::npos);
}

TEST(Launch, TheRankThatDiedIsBlamedAndNotThoseThatMissedIt) {
  // Rank 2 dies; the others notice it by themselves and fail at once, as Gloo makes them.
  const auto finished = run(
      {{"run", "-np", "4", "sh", "-c",
        "echo $$ > pid.$RANK.new; mv pid.$RANK.new pid.$RANK;"
        "while [ ! -e pid.2 ]; do sleep 0.01; done; p=$(cat pid.2);"
        "if [ $RANK = 2 ]; then while [ ! -e pid.0 -o ! -e pid.1 -o ! -e pid.3 ]; do sleep 0.01; done; kill -9 $$; fi;"
        "while kill -0 $p 2>/dev/null; do :; done; echo Connection closed by peer >&2; exit 1"}});
  EXPECT_EQ(finished.status, 137) << finished.err;
  EXPECT_NE(finished.err.find("rank 2 failed: killed by SIGKILL"), std::string::npos) << finished.err;
}

TEST(Launch, ARankMayEndWellBeforeTheOthers) {
  const auto finished = run({{"run", "-np", "3", "sh", "-c", "[ $RANK = 0 ] || { sleep 0.3; echo late $RANK; }"}});
  EXPECT_EQ(finished.status, 0) << finished.err;
  EXPECT_NE(finished.out.find("late 1"), std::string::npos);
  EXPECT_NE(finished.out.find("late 2"), std::string::npos);
}

TEST(Launch, ManyRanks) {
  const auto finished = run({{"run", "-np", "64", "true"}});
  EXPECT_EQ(finished.status, 0) << finished.err;
}

TEST(Launch, AutoIsTheNumberOfUsableCores) {
  const auto finished = run({{"run", "-np", "auto", "--prefix", "none", "sh", "-c", "echo $WORLD_SIZE"}});
  ASSERT_EQ(finished.status, 0) << finished.err;
  const auto lines = lines_of(finished.out);
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(std::to_string(lines.size()), lines[0]);
}

TEST(Launch, WhatCannotBeRunIsSaidBeforeAnythingStarts) {
  const auto none = run({{"run", "-np", "2", "no-such-program"}});
  EXPECT_EQ(none.status, 127);
  EXPECT_NE(none.err.find("no such program in PATH ("), std::string::npos) << none.err;
  EXPECT_EQ(lines_of(none.err).size(), 1U) << none.err;
  EXPECT_NE(run({{"run", "-np", "2", "./nothing"}}).err.find("No such file or directory (ENOENT)"), std::string::npos);
  EXPECT_EQ(run({{"run", "-np", "2", "/"}}).status, 127);
  // PATH has nothing to do with a .py file, nor with a folder.
  const auto python = run({{"run", "-np", "2", "nosuch.py"}});
  EXPECT_NE(python.err.find("cannot start nosuch.py: there is no such file in /"), std::string::npos) << python.err;
  EXPECT_EQ(python.err.find("PATH"), std::string::npos) << python.err;
  for (const char* folder : {"folder.py", "."}) {
    const auto refused = run({{"run", "-np", "2", folder}, {}, {}, false, false, "mkdir folder.py"});
    EXPECT_NE(refused.err.find(std::string("cannot start ") + folder + ": it is a folder"), std::string::npos)
        << refused.err;
  }
  const auto debian = run({{"run", "-np", "2", "python", "x.py"}, {"PATH=/nowhere"}});
  EXPECT_NE(debian.err.find("did you mean python3, or `cohort run PROGRAM.py`?"), std::string::npos) << debian.err;

  const auto script = run({{"run", "-np", "2", "./input"}, {}, "echo not a script\n"});
  EXPECT_EQ(script.status, 127);
  EXPECT_NE(script.err.find("chmod +x"), std::string::npos) << script.err;
  EXPECT_NE(run({{"run", "-np", "2", "input"}, {}, "x"}).err.find("did you mean ./input?"), std::string::npos);
  const auto no_head = run({{"run", "-np", "2", "./input"}, {}, "echo x\n", false, false, "chmod +x input"});
  EXPECT_NE(no_head.err.find("nor does it begin with #!"), std::string::npos) << no_head.err;
  const auto no_interpreter =
      run({{"run", "-np", "2", "./input"}, {}, "#!/no/such/sh\n", false, false, "chmod +x input"});
  EXPECT_NE(no_interpreter.err.find("/no/such/sh, which is not there"), std::string::npos) << no_interpreter.err;
  const auto windows = run({{"run", "-np", "2", "./input"}, {}, "#!/bin/sh\r\n", false, false, "chmod +x input"});
  EXPECT_NE(windows.err.find("its first line ends with a carriage return"), std::string::npos) << windows.err;
  EXPECT_NE(windows.err.find("sed -i 's/\\r$//' ./input"), std::string::npos) << windows.err;
}

TEST(Launch, WrongOptionsAreExplained) {
  for (const char* number : {"0", "-3", "x", "70000", "2.5"}) {
    const auto finished = run({{"run", "-np", number, "true"}});
    EXPECT_EQ(finished.status, 2) << number << finished.err;
    EXPECT_NE(finished.err.find("-np"), std::string::npos) << finished.err;
  }
  const auto typo = run({{"run", "--tiemout", "3", "true"}});
  EXPECT_EQ(typo.status, 2);
  EXPECT_NE(typo.err.find("did you mean --timeout?"), std::string::npos) << typo.err;
  EXPECT_NE(run({{"rnu"}}).err.find("did you mean `cohort run`?"), std::string::npos);
  for (const auto& [words, said] : std::vector<std::pair<std::vector<std::string>, std::string>>{
           {{"trace", "summary", "x"}, "there is no `cohort trace summary`; there are merge and report"},
           {{"trace", "reprot"}, "did you mean report?"},
           {{"runs", "remove", "x"}, "there is no `cohort runs remove`; there are rm and compare"},
           {{"ctl", "x"}, "cohort ctl x: what is it to do?"},
           {{"ctl", "x", "foo"}, "cohort ctl x foo: there is no such action"},
           {{"ctl", "x", "drain"}, "cohort ctl x drain: which host?"}}) {
    const auto wrong = run({words});
    EXPECT_EQ(wrong.status, 2) << wrong.err;
    EXPECT_NE(wrong.err.find(said), std::string::npos) << wrong.err;
  }
  // Options of other launchers.
  const auto torchrun = run({{"run", "--local_ranks_filter=0", "true"}});
  EXPECT_EQ(torchrun.status, 2);
  EXPECT_NE(torchrun.err.find("`cohort run` has no option --local-ranks-filter: it is torchrun's; here: --ranks 0"),
            std::string::npos)
      << torchrun.err;
  EXPECT_EQ(lines_of(run({{"run", "--nproc_per_node=3", "-q", "echo", "x"}}).out).size(), 3U);
  EXPECT_NE(run({{"run", "-x", "A=1", "true"}}).err.find("it is mpirun's; here: --env NAME"), std::string::npos);
  EXPECT_NE(run({{"run", "-npernode", "2", "true"}}).err.find("it is mpirun's; here: --per-node N"), std::string::npos);
  const auto horovodrun = run({{"-np", "2", "true"}});
  EXPECT_EQ(horovodrun.status, 2);
  EXPECT_NE(horovodrun.err.find("`cohort run -np ...`"), std::string::npos) << horovodrun.err;
  EXPECT_EQ(lines_of(run({{"run", "-np3", "-q", "echo", "x"}}).out).size(), 3U);
  EXPECT_EQ(run({{"run", "-np", "2"}}).status, 2);
  EXPECT_EQ(run({{"run", "-np"}}).status, 2);
  EXPECT_EQ(run({{"run", "--env", "SURELY_NOT_SET", "true"}}).status, 2);
}

TEST(Launch, OptionsAfterTheProgramAreItsOwn) {
  const auto finished = run({{"run", "-np", "1", "--prefix", "none", "echo", "-np", "--help", "--", "-n", "7"}});
  EXPECT_EQ(finished.out, "-np --help -- -n 7\n");
  EXPECT_EQ(run({{"run", "-np=1", "--prefix=none", "--", "echo", "a"}}).out, "a\n");
}

TEST(Launch, StdinIsReadOnlyWhenRank0ReadsIt) {
  JobOptions options{{"run", "-np", "2", "--prefix", "none", "sh", "-c", "[ $RANK = 1 ] || cat"}};
  options.input = "a\nb\nc\nd\ne\n";
  options.shell_before =
      "read first; echo first $first; $0 run -q -np 2 sleep 0.3; read second; echo second $second;"
      "$0 run -q -np 2 --prefix none sh -c '[ $RANK = 1 ] || { read x; echo rank $x; }'";
  const auto finished = run(options);
  EXPECT_EQ(finished.status, 0) << finished.err;
  EXPECT_EQ(finished.out, "first a\nsecond b\nrank c\nd\ne\n") << finished.err;
}

TEST(Launch, WhatTheCallerIgnoresStaysIgnored) {
  // As under nohup, and in the background of a shell.
  const char* const kShows = "grep SigIgn /proc/self/status; touch ready.$RANK; while [ ! -e go ]; do sleep 0.05; done";
  JobOptions options{{"run", "-np", "2", "--prefix", "none", "sh", "-c", kShows}};
  options.shell_before = "trap '' HUP INT QUIT CHLD";
  Job job(options);
  ASSERT_TRUE(eventually([&] {
    return std::filesystem::exists(job.folder() + "/ready.0") && std::filesystem::exists(job.folder() + "/ready.1");
  })) << job.err();
  for (const int number : {SIGHUP, SIGINT, SIGQUIT}) job.signal(number);
  std::ofstream(job.folder() + "/go") << "";
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(job.out(), "SigIgn:\t0000000000000007\nSigIgn:\t0000000000000007\n") << job.err();
  const auto plain = run({{"run", "-np", "1", "--prefix", "none", "grep", "SigIgn", "/proc/self/status"}});
  EXPECT_EQ(plain.out, "SigIgn:\t0000000000000000\n") << plain.err;
}

TEST(Launch, RanksThatNeverFormAWorldAreDoubted) {
  const char* const kDoubt = "cohort: 2 ranks ended without forming a world of Cohort's: 2 independent runs?";
  const auto two = run({{"run", "-np", "2", "true"}});
  EXPECT_EQ(two.status, 0);
  EXPECT_NE(two.err.find(kDoubt), std::string::npos) << two.err;
  EXPECT_EQ(run({{"run", "-np", "1", "true"}}).err.find("independent"), std::string::npos);
  EXPECT_EQ(run({{"run", "-q", "-np", "2", "true"}}).err, "");
  EXPECT_EQ(run({{"run", "-np", "2", "false"}}).err.find("independent"), std::string::npos);
}

TEST(Launch, RunFolderIsWhereTheUserWantsItOrSaysWhyNot) {
  Job job({{"run", "-np", "1", "--run-dir", "my/run", "sh", "-c", "echo $COHORT_RUN_DIR"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.out().find(job.folder() + "/my/run"), std::string::npos) << job.out();
  EXPECT_NE(job.file("my/run/job.json").find("\"exit_status\": 0"), std::string::npos);
  EXPECT_EQ(job.file("my/run/logs/rank-0.out"), job.folder() + "/my/run\n");
  EXPECT_FALSE(std::filesystem::exists(job.folder() + "/runs"));
  const auto refused = run({{"run", "-np", "1", "--run-dir", "/proc/nowhere", "true"}});
  EXPECT_EQ(refused.status, 127);
  EXPECT_NE(refused.err.find("--run-dir"), std::string::npos) << refused.err;
}

TEST(Launch, ARunFolderThatIsUsedAgainKeepsWhatTheRunBeforeHasLeft) {
  // As somebody who goes on with a training, in the folder that has its checkpoints.
  JobOptions options{{"run", "-np", "1", "--run-dir", "my", "sh", "-c",
                      "cd $COHORT_RUN_DIR; cat mine 2>/dev/null; echo mine >> mine; cat mine >> samples-0.jsonl; "
                      "[ ! -e wait ] || exec sleep 1000"}};
  const std::string folder = testing::TempDir() + "cohort-again-" + std::to_string(::getpid());
  std::filesystem::create_directories(folder);
  options.shell_before = "cd '" + folder + "'";
  const auto first = run(options);
  ASSERT_EQ(first.status, 0) << first.err;
  EXPECT_EQ(first.err.find("before"), std::string::npos) << first.err;
  EXPECT_EQ(run(options).status, 0);
  const auto third = run(options);
  EXPECT_EQ(third.status, 0);
  EXPECT_NE(third.err.find("my has a run before this one; its job.json and logs are now in my/earlier-2\n"),
            std::string::npos)
      << third.err;
  EXPECT_EQ(read_text(folder + "/my/earlier-1/logs/rank-0.out"), "");
  EXPECT_EQ(read_text(folder + "/my/earlier-2/logs/rank-0.out"), "mine\n");
  EXPECT_EQ(read_text(folder + "/my/logs/rank-0.out"), "mine\nmine\n");
  EXPECT_EQ(read_text(folder + "/my/earlier-2/samples-0.jsonl"), "mine\nmine\n");
  EXPECT_EQ(read_text(folder + "/my/samples-0.jsonl"), "mine\nmine\nmine\n");
  EXPECT_NE(read_text(folder + "/my/earlier-2/job.json").find("\"logs\": \"" + folder + "/my/earlier-2/logs\""),
            std::string::npos);
  // Not while another job writes there.
  std::ofstream(folder + "/my/wait");
  Job running(options);
  ASSERT_TRUE(eventually([&] { return lines_of(read_text(folder + "/my/mine")).size() == 4; })) << running.err();
  const auto refused = run(options);
  EXPECT_EQ(refused.status, 127);
  EXPECT_NE(refused.err.find("cannot make the run's folder my: "), std::string::npos) << refused.err;
  EXPECT_NE(refused.err.find("another job is running in it; choose another with --run-dir"), std::string::npos)
      << refused.err;
  EXPECT_EQ(read_text(folder + "/my/logs/rank-0.out"), "mine\nmine\nmine\n");
  running.signal(SIGTERM);
  EXPECT_EQ(running.wait(), 128 + SIGTERM) << running.err();
  std::filesystem::remove_all(folder);
}

TEST(Launch, ThePlotOfARunWithoutARecordSaysWhatIsMissing) {
  Job job({{"run", "-np", "1", "true"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  const auto plot = run({{"plot", job.folder() + "/runs/latest"}});
  EXPECT_EQ(plot.status, 1);
  EXPECT_NE(plot.err.find("the program of this run writes no run record"), std::string::npos) << plot.err;
}

TEST(Launch, RecordTellsTheFailure) {
  Job job({{"run", "-np", "2", "sh", "-c", "exit 5"}});
  EXPECT_EQ(job.wait(), 5);
  const std::string record = job.file("runs/latest/job.json");
  EXPECT_NE(record.find("\"exit_status\": 5"), std::string::npos) << record;
  EXPECT_NE(record.find("\"status\": \"exit code 5\""), std::string::npos) << record;
  EXPECT_NE(record.find("\"world_size\": 2"), std::string::npos) << record;
}

TEST(Launch, TimeLimit) {
  const auto finished = run({{"run", "-np", "2", "--timeout", "0.3", "sleep", "100"}});
  EXPECT_EQ(finished.status, 124);
  EXPECT_NE(finished.err.find("the time limit of 0.3 s is over"), std::string::npos) << finished.err;
}

TEST(Launch, TwoJobsAtOnceGetDifferentPorts) {
  const std::vector<std::string> words = {
      "run", "-np", "1", "--prefix", "none", "sh", "-c", "echo $MASTER_PORT; while [ ! -e go ]; do sleep 0.02; done"};
  Job one({words});
  Job two({words});
  ASSERT_TRUE(eventually([&] { return !one.out().empty() && !two.out().empty(); }));
  EXPECT_NE(one.out(), two.out());
  std::ofstream(one.folder() + "/go");
  std::ofstream(two.folder() + "/go");
  EXPECT_EQ(one.wait(), 0);
  EXPECT_EQ(two.wait(), 0);
}

TEST(Launch, AFullLogDoesNotEndTheJob) {
  Job job({{"run", "-np", "1", "sh", "-c", "seq 1 200000"}, {}, {}, false, true, "ulimit -f 100"});
  std::string out;
  char buffer[65536];
  for (ssize_t got = 0; (got = ::read(job.output(), buffer, sizeof buffer)) > 0;)
    out.append(buffer, static_cast<std::size_t>(got));
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(lines_of(out).size(), 200000U);
  EXPECT_NE(job.err().find("rank-0.out ends here, the job goes on: File too large (EFBIG)"), std::string::npos)
      << job.err();
}

TEST(Launch, AFullDiskUnderStdoutDoesNotEndTheJob) {
  const std::vector<std::string> prints = {"run",     "-np", "2", "sh", "-c", "echo on its way; echo done > done.$RANK",
                                           "program", "text"};
  const std::string said = "stdout: No space left on device (ENOSPC); the job goes on, and what does not fit there is ";
  Job full({prints, {}, {}, false, false, "exec > /dev/full"});
  EXPECT_EQ(full.wait(), 0) << full.err();
  EXPECT_EQ(full.file("done.0") + full.file("done.1"), "done\ndone\n");
  EXPECT_NE(full.err().find("cohort: " + said + "only in runs/"), std::string::npos) << full.err();
  EXPECT_EQ(full.err().find(said), full.err().rfind(said)) << full.err();
  EXPECT_EQ(full.log("rank-1.out"), "on its way\n");
  EXPECT_NE(full.file("runs/latest/job.json").find("\"output_lost\": \"" + said), std::string::npos);
  // No notice can go where nothing fits.
  Job json({{"run", "-np", "1", "--json", "--no-logs", "echo", "text"}, {}, {}, false, false, "exec > /dev/full"});
  EXPECT_EQ(json.wait(), 0) << json.err();
  EXPECT_NE(json.err().find(said + "lost"), std::string::npos) << json.err();
  // A closed one is nobody's loss.
  Job closed({prints, {}, {}, false, false, "exec >&-"});
  EXPECT_EQ(closed.wait(), 0) << closed.err();
}

TEST(Launch, AFileAtItsLimitUnderStdoutKeepsWholeLines) {
  // The limit (blocks of 512 bytes) ends in the middle of a line; the file then gets room again, for more than what was
  // still on its way then.
  const auto lines_printed = 55000 / (sys::host_name().size() + std::string_view(":0 | line 0001\n").size());
  const std::string script = fmt::format(
      "i=0; while [ $i -lt {} ]; do i=$((i+1)); printf 'line %04d\n' $i; done; while [ ! -e go ]; do sleep 0.02; done; "
      "echo the last one",
      lines_printed);
  Job job({{"run", "-np", "1", "--no-logs", "sh", "-c", script},
           {},
           {},
           false,
           false,
           "exec >> out.txt; ulimit -S -f 100"});
  ASSERT_TRUE(eventually([&] { return job.err().find("stdout: File too large (EFBIG)") != std::string::npos; }))
      << job.err();
  EXPECT_EQ(job.file("out.txt").size(), 100U * 512);
  std::filesystem::resize_file(job.folder() + "/out.txt", 40000);
  std::ofstream(job.folder() + "/go");
  EXPECT_EQ(job.wait(), 0) << job.err();
  const std::vector<std::string> lines = lines_of(job.file("out.txt"));
  ASSERT_FALSE(lines.empty());
  EXPECT_NE(lines.back().find("| the last one"), std::string::npos) << lines.back();
  EXPECT_TRUE(lines.back().starts_with(lines.front().substr(0, lines.front().find('|')))) << lines.back();
}

TEST(Launch, TooFewOpenFilesAreNamedAtStart) {
  const auto finished = run({{"run", "-np", "64", "true"}, {}, {}, false, false, "ulimit -n 128"});
  EXPECT_EQ(finished.status, 127);
  EXPECT_NE(finished.err.find("open files and the limit is 128"), std::string::npos) << finished.err;
}

TEST(Launch, AFloodWaitsForASlowReaderInBoundedMemory) {
  constexpr std::size_t kBytes = 64 << 20;
  Job job({{"run", "-q", "-np", "2", "--prefix", "none", "sh", "-c", fmt::format("head -c {} /dev/zero", kBytes / 2)},
           {},
           {},
           false,
           true});
  std::this_thread::sleep_for(300ms);  // nobody reads
  std::size_t total = 0;
  long peak = 0;
  const pid_t agent = job.agent();
  std::size_t looked_at = 0;
  std::vector<char> buffer(1 << 20);
  for (ssize_t got = 0; (got = ::read(job.output(), buffer.data(), buffer.size())) > 0;) {
    total += static_cast<std::size_t>(got);
    if (total - looked_at < (8 << 20)) continue;  // now and then is enough
    looked_at = total;
    for (const pid_t pid : {job.pid(), agent}) {
      for (const auto& line : lines_of(read_text(fmt::format("/proc/{}/status", pid)))) {
        if (line.starts_with("VmHWM:")) peak = std::max(peak, std::stol(line.substr(6)));
      }
    }
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(total, kBytes);
  EXPECT_GT(peak, 0);
  // ThreadSanitizer's shadow is memory too; all of the output would still be more.
  EXPECT_LT(peak, (kThreadSanitizer ? 60L : 40L) << 10) << "KiB of memory for output that waits";
}

TEST(Launch, PythonProgramsAndModules) {
  const std::string program = "import os, sys\nprint(sys.argv[1:], os.environ['RANK'])\n";
  const auto script = run(
      {{"run", "-np", "1", "--prefix", "none", "prog.py", "-x", "--y"}, {}, program, false, false, "cp input prog.py"});
  EXPECT_EQ(script.out, "['-x', '--y'] 0\n") << script.err;
  const auto module = run({{"run", "-np", "1", "--prefix", "none", "-m", "json.tool", "input"}, {}, "[1]"});
  EXPECT_EQ(module.status, 0) << module.err;
  EXPECT_NE(module.out.find('1'), std::string::npos);
  const auto no_python =
      run({{"run", "-np", "1", "prog.py"}, {"VIRTUAL_ENV=/no/such/env"}, program, false, false, "cp input prog.py"});
  EXPECT_EQ(no_python.status, 127);
  EXPECT_NE(no_python.err.find("VIRTUAL_ENV is /no/such/env"), std::string::npos) << no_python.err;
}

TEST(Launch, ThePythonTracebackOfTheFailingRankIsShownWhole) {
  const std::string program =
      "import os, sys, time\n"
      "def f(n):\n"
      "  if n: return f(n - 1)\n"
      "  raise ValueError('the cause')\n"
      "if os.environ['RANK'] == '0': time.sleep(100)\n"
      "try: f(2)\n"
      "except ValueError as error:\n"
      "  import traceback; traceback.print_exc()\n"
      "  for i in range(25): print('noise', i, file=sys.stderr)\n"
      "  sys.exit(5)\n";
  const auto finished = run({{"run", "-np", "2", "prog.py"}, {}, program, false, false, "cp input prog.py"});
  EXPECT_EQ(finished.status, 5);
  EXPECT_NE(finished.err.find("cohort:   > Traceback (most recent call last):\n"), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("cohort:   > ValueError: the cause\ncohort:   > noise 0\n"), std::string::npos)
      << finished.err;
  EXPECT_NE(finished.err.find("cohort:   > noise 24\n"), std::string::npos) << finished.err;
}

TEST(Launch, WithoutLogsTheRunFolderHasTheRecordOnly) {
  const auto finished =
      run({{"run", "-np", "1", "--no-logs", "--run-dir", "kept", "sh", "-c",
            "echo shown; while [ ! -e kept/job.json ]; do sleep 0.01; done; ls kept > /dev/stderr; exit 3"}});
  EXPECT_EQ(finished.status, 3);
  EXPECT_NE(finished.out.find("shown"), std::string::npos);
  EXPECT_NE(finished.err.find("job.json"), std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find("logs"), std::string::npos) << finished.err;
}

TEST(Launch, AnOwnerThatIsNotTheParentIsRefused) {
  const auto finished = run({{"run", "-np", "1", "--owner", "1", "--", "sh", "-c", "echo started"}});
  EXPECT_EQ(finished.status, 127);
  EXPECT_EQ(finished.out, "");
  EXPECT_NE(finished.err.find("(pid 1) has ended or is not the one"), std::string::npos) << finished.err;
  // A word that an owner hands on as an option, and that is none, is no program.
  const auto word = run({{"run", "-np", "1", "--owner", "1", "ls", "--", "true"}});
  EXPECT_EQ(word.status, 2);
  EXPECT_NE(word.err.find("'ls' is no option of `cohort run`"), std::string::npos) << word.err;
}

TEST(Launch, NothingOfADiscoveryScriptOutlivesTheLauncher) {
  Job job(
      {.arguments = {"run", "--min-np", "1", "--starter", "local", "--host-discovery-script",
                     "echo a:1; sleep 1000 & [ ! -e started ] || sleep 1000", "sh", "-c", ": >started; sleep 1000"}});
  const auto sleeping = [&] { return job.processes("sleep 1000").size(); };
  ASSERT_TRUE(eventually([&] { return sleeping() == 3; })) << job.err();  // the rank's, and two of the script
  job.signal(SIGKILL);
  EXPECT_EQ(job.wait(), 128 + SIGKILL);
  EXPECT_TRUE(eventually([&] { return job.processes().empty(); })) << sleeping() << " are left";
}

TEST(Launch, AJobOfManyHostsCanBeTriedOnOne) {
  std::string hosts;
  for (int host = 0; host < 40; ++host) hosts += (hosts.empty() ? "n" : ",n") + std::to_string(host) + ":2";
  const auto finished =
      run({{"run", "-q", "--prefix", "none", "--starter", "local", "-H", hosts, "sh", "-c",
            "echo $RANK $COHORT_HOST $LOCAL_RANK $GROUP_RANK; [ $RANK != 79 ] || exit 3; sleep 1000"}});
  EXPECT_EQ(finished.status, 3) << finished.err;
  EXPECT_NE(finished.err.find("rank 79 failed: exit code 3 (host n39,"), std::string::npos) << finished.err;
  EXPECT_NE(finished.out.find("79 n39 1 39\n"), std::string::npos) << finished.out;
}

TEST(Launch, DryRunShowsHowOtherHostsAreReached) {
  const auto finished = run({{"run", "--dry-run", "-H", "localhost:1,far-away:2", "--ssh", "ssh -p 2222", "true"}});
  EXPECT_EQ(finished.status, 0) << finished.err;
  EXPECT_NE(finished.out.find("3 processes on 2 hosts (localhost: rank 0, far-away: ranks 1-2)"), std::string::npos);
  EXPECT_NE(finished.out.find("  ssh -p 2222 -o BatchMode=yes"), std::string::npos) << finished.out;
  EXPECT_EQ(finished.out.find("ssh -p 2222", finished.out.find("ssh -p 2222") + 1), std::string::npos);
}

TEST(Launch, TheSshCommandIsDividedAsAShellDoesIt) {
  const auto quoted =
      run({{"run", "--dry-run", "-H", "far-away", "--ssh", R"(ssh -i 'my key' -l "a \"b\" c\d" -F x\ y '' )", "true"}});
  EXPECT_EQ(quoted.status, 0) << quoted.err;
  EXPECT_NE(quoted.out.find(R"(  ssh -i 'my key' -l 'a "b" c\d' -F 'x y' '' -o BatchMode=yes)"), std::string::npos)
      << quoted.out;
  for (const auto& [command, words] :
       {std::pair(R"(ssh -i 'my key)", "it ends within quotes (')"),
        std::pair(R"(ssh -i "my key\")", "it ends within quotes (\")"), std::pair("  ", ": a command is wanted")}) {
    const auto refused = run({{"run", "-H", "far-away", "--ssh", command, "true"}});
    EXPECT_EQ(refused.status, 2);
    EXPECT_NE(refused.err.find(words), std::string::npos) << refused.err;
  }
}

TEST(Launch, UnmodifiedTorchDistributedProgramRuns) {
  const auto has = run({{"run", "-q", "-np", "1", "probe.py"},
                        {},
                        "import importlib.util, sys\nsys.exit(importlib.util.find_spec('torch') is None)\n",
                        false,
                        false,
                        "cp input probe.py"});
  if (has.status != 0) GTEST_SKIP() << "the active Python has no torch";
  const std::string program =
      "import torch, torch.distributed as dist\n"
      "dist.init_process_group('gloo')\n"
      "t = torch.tensor([dist.get_rank() + 1.0])\n"
      "dist.all_reduce(t)\n"
      "print('sum', t.item(), dist.get_world_size(), dist.is_torchelastic_launched())\n"
      "dist.destroy_process_group()\n";
  // On a busy machine to import torch takes long.
  const auto finished = run({{"run", "-np", "3", "train.py"}, {}, program, false, false, "cp input train.py", 150s});
  ASSERT_EQ(finished.status, 0) << finished.err;
  const auto lines = lines_of(finished.out);
  ASSERT_EQ(lines.size(), 3U) << finished.out;
  for (const auto& line : lines) EXPECT_NE(line.find("| sum 6.0 3 True"), std::string::npos) << line;
}

}  // namespace
}  // namespace cohort::test
