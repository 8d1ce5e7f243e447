// The options of `cohort run`: where they come from, what they show without starting anything, and what they change.
#include "launch_harness.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <map>
#include <regex>
#include <set>

namespace cohort::test {
namespace {

constexpr const char* kAsConfig = "cp input job.toml";

Finished run_with_config(const std::string& config, std::vector<std::string> words,
                         std::vector<std::string> environment = {}) {
  words.insert(words.begin(), {"run", "--config", "job.toml"});
  return run({std::move(words), std::move(environment), config, false, false, kAsConfig});
}

TEST(RunOptions, EachHasAVariable) {
  const std::string help = run({{"run", "--help-all"}}).out;
  const std::string variables = run({{"help", "environment"}}).out;
  // They speak of one command alone.
  const std::set<std::string> command_line_only = {"help", "help-all", "show-config", "owner"};
  const std::set<std::string> second_names = {"nproc", "min-num-proc", "max-num-proc"};
  const std::regex name("(^|[ ,])--([a-z][a-z-]*)");
  int options = 0;
  for (const std::string& line : lines_of(help.substr(help.find("Positionals:"), help.find("Examples:")))) {
    if (line.starts_with("Examples:")) break;
    // Explanations stand further to the right, and may name other options.
    const std::string head = line.substr(0, 30);
    if (!head.starts_with("  -")) continue;
    for (std::sregex_iterator found(head.begin(), head.end(), name); found != std::sregex_iterator(); ++found) {
      const std::string option = (*found)[2];
      if (second_names.count(option) != 0) continue;
      if (command_line_only.count(option) != 0) continue;
      std::string variable = "COHORT_RUN_";
      for (const char c : option) variable += c == '-' ? '_' : static_cast<char>(std::toupper(c));
      EXPECT_NE(variables.find("  " + variable + "="), std::string::npos) << variable << " is not in the table";
      ++options;
    }
  }
  EXPECT_GE(options, 20) << help;
}

TEST(RunOptions, TheTableOfVariablesShowsNoSecret) {
  const std::string shown = run({{"help", "environment"},
                                 {"COHORT_PAGE_TOKEN=0123456789abcdef", "COHORT_SECRET_FILE=/x", "COHORT_LOG=debug"}})
                                .out;
  EXPECT_EQ(shown.find("0123456789abcdef"), std::string::npos) << shown;
  for (const char* const now : {"[now: set, not shown]", "[now: /x]", "[now: debug]"})
    EXPECT_NE(shown.find(now), std::string::npos) << now;
}

TEST(RunOptions, AVariableWhoseValueHasNoMeaningIsRefusedBeforeAnythingStarts) {
  const auto refused = run({{"run", "-np", "2", "--env", "COHORT_ENCRYPT=maybe", "echo", "started"}});
  EXPECT_NE(refused.status, 0);
  EXPECT_EQ(refused.out, "");
  EXPECT_NE(refused.err.find("COHORT_ENCRYPT='maybe' has no meaning -- give 1 (or true, yes, on) or 0"),
            std::string::npos)
      << refused.err;
}

TEST(RunOptions, TheCommandLineCountsBeforeTheVariableAndTheVariableBeforeTheFile) {
  const std::string config =
      "[run]\nnp = 3\ngrace = 7\nprefix = \"full\"\nenv = { A = \"file\", B = \"file\", C = 1 }\n";
  const auto shown = run_with_config(config, {"-np", "1", "--env", "A=words", "--show-config"},
                                     {"COHORT_RUN_GRACE=8", "COHORT_RUN_NP=2", "COHORT_RUN_ENV=A=env;B=env"});
  ASSERT_EQ(shown.status, 0) << shown.err;
  EXPECT_TRUE(std::regex_search(shown.out, std::regex("np = '1' +# command line\n"))) << shown.out;
  EXPECT_TRUE(std::regex_search(shown.out, std::regex("grace = '8' +# COHORT_RUN_GRACE\n"))) << shown.out;
  EXPECT_TRUE(std::regex_search(shown.out, std::regex("prefix = 'full' +# job.toml:4\n"))) << shown.out;
  EXPECT_TRUE(std::regex_search(shown.out, std::regex("bind = 'none' +# default\n"))) << shown.out;
  EXPECT_NE(shown.out.find("# job.toml:5, COHORT_RUN_ENV, command line\n"), std::string::npos) << shown.out;

  const auto ran = run_with_config(
      config, {"-np", "1", "--prefix", "none", "--env", "A=words", "sh", "-c", "echo $WORLD_SIZE $A $B $C"},
      {"COHORT_RUN_NP=2", "COHORT_RUN_ENV=A=env;B=env"});
  EXPECT_EQ(ran.out, "1 words env 1\n") << ran.err;
}

TEST(RunOptions, WhatShowConfigPrintsIsAConfiguration) {
  const auto shown = run({{"run", "-np", "2", "--grace", "3", "-q", "--env", "X=a 'b' \"c\"", "--show-config"}});
  ASSERT_EQ(shown.status, 0) << shown.err;
  const auto again = run_with_config(shown.out, {"--show-config"});
  ASSERT_EQ(again.status, 0) << again.err;
  const auto values = [](const std::string& text) {
    std::vector<std::string> out;
    for (const std::string& line : lines_of(text)) {
      const std::string value = line.substr(0, line.find("  # "));
      if (!value.starts_with("#")) out.push_back(value.substr(0, value.find_last_not_of(' ') + 1));
    }
    return out;
  };
  EXPECT_EQ(values(shown.out), values(again.out));
  EXPECT_NE(again.out.find("quiet = true"), std::string::npos) << again.out;
}

TEST(RunOptions, MistakesNameTheirPlaceAndWhatWasMeant) {
  const auto key = run_with_config("[run]\n\nstart-timeuot = 3\n", {"true"});
  EXPECT_EQ(key.status, 2);
  EXPECT_NE(key.err.find("job.toml:3: `cohort run` has no option 'start-timeuot'; did you mean start-timeout?"),
            std::string::npos)
      << key.err;
  const auto value = run_with_config("[run]\nprefix = \"rnak\"\n", {"true"});
  EXPECT_EQ(value.status, 2);
  EXPECT_NE(value.err.find("--prefix is from job.toml:2"), std::string::npos) << value.err;
  EXPECT_NE(run_with_config("[run]\ngrace = [1, 2]\n", {"true"}).err.find("job.toml:2: grace takes one value"),
            std::string::npos);
  EXPECT_NE(run_with_config("[run]\nnp = 1\nnproc = 2\n", {"true"}).err.find("job.toml:3: nproc is the option that"),
            std::string::npos);
  EXPECT_NE(run_with_config("[run]\nquiet = 7\n", {"true"}).err.find("job.toml:2: quiet: true or false is wanted"),
            std::string::npos);
  EXPECT_NE(run({{"run", "--config", "none.toml", "true"}}).err.find("none.toml: No such file"), std::string::npos);
  const auto variable = run({{"run", "true"}, {"COHORT_RUN_NP=many"}});
  EXPECT_EQ(variable.status, 2);
  EXPECT_NE(variable.err.find("--np is from COHORT_RUN_NP"), std::string::npos) << variable.err;
  const auto unknown = run({{"run", "-np", "1", "true"}, {"COHORT_RUN_TIMOUT=3"}});
  EXPECT_EQ(unknown.status, 0);
  EXPECT_NE(unknown.err.find("COHORT_RUN_TIMOUT is no option's; did you mean COHORT_RUN_TIMEOUT?"), std::string::npos)
      << unknown.err;
  EXPECT_NE(run({{"bench", "--jsn", "x"}}).err.find("did you mean --json?"), std::string::npos);
}

TEST(RunOptions, ThoseThatWentNameWhatTakesTheirPlace) {
  for (const auto& [name, now] : {std::pair("master", "--master-addr HOST"),
                                  {"output-dir", "--run-dir DIR"},
                                  {"output-timeout", "leave it out"},
                                  {"status", "-q or --prefix none"},
                                  {"invitation-fd", "--agents N,FD"},
                                  {"owner-folder", "--owner PID,DIR"}}) {
    const std::string said = std::string(": it was removed; now: ") + now;
    const auto option = run({{"run", std::string("--") + name + "=x", "true"}});
    EXPECT_EQ(option.status, 2);
    EXPECT_NE(option.err.find("has no option --" + (name + said)), std::string::npos) << option.err;
  }
  const auto variable = run({{"run", "-np", "1", "true"}, {"COHORT_RUN_OUTPUT_TIMEOUT=3"}});
  EXPECT_NE(variable.err.find("COHORT_RUN_OUTPUT_TIMEOUT is no option's: it was removed; now: leave it out"),
            std::string::npos)
      << variable.err;
  const auto key = run_with_config("[run]\noutput_timeout = 3\n", {"true"});
  EXPECT_NE(key.err.find("no option 'output_timeout': it was removed"), std::string::npos) << key.err;
}

TEST(RunOptions, AFlagOfTheEnvironmentCanBeTakenBack) {
  EXPECT_EQ(run({{"run", "-np", "1", "true"}, {"COHORT_RUN_QUIET=1"}}).err, "");
  EXPECT_NE(run({{"run", "-np", "1", "--quiet=false", "true"}, {"COHORT_RUN_QUIET=1"}}).err, "");
}

TEST(RunOptions, VariablesOfThisCommandAreNotTheRanks) {
  const auto ran = run({{"run", "-np", "1", "--prefix", "none", "sh", "-c", "echo $COHORT_RUN_RUN_DIR; ls"},
                        {"COHORT_RUN_RUN_DIR=mine", "COHORT_RUN_QUIET=1"}});
  EXPECT_TRUE(ran.out.starts_with("\n")) << ran.out;
  EXPECT_NE(ran.out.find("mine\n"), std::string::npos) << ran.out;
}

TEST(RunOptions, DryRunSaysExactlyWhatWouldBeStarted) {
  const auto dry = run({{"run", "-np", "2", "--dry-run", "--run-dir", "kept", "--env", "X=1 2", "sh", "-c", "env"}});
  ASSERT_EQ(dry.status, 0) << dry.err;
  EXPECT_NE(dry.out.find("sh -c env\n"), std::string::npos) << dry.out;
  Job job({{"run", "-np", "2", "--env", "X=1 2", "sh", "-c", "env"}});
  EXPECT_FALSE(std::filesystem::exists(job.folder() + "/kept"));
  ASSERT_EQ(job.wait(), 0) << job.err();
  // Every variable that a rank has and the command has not was announced, with its value where it is known.
  const auto assignments = lines_of(job.log("rank-1.out"));
  int additions = 0;
  for (const std::string& assignment : assignments) {
    const std::string name = assignment.substr(0, assignment.find('=') + 1);
    if (name == "PWD=" || name == "_=" || name == "SHLVL=" || name == "OLDPWD=" || name == "X=") continue;
    if (const char* own = ::getenv(name.substr(0, name.size() - 1).c_str()); own != nullptr && name + own == assignment)
      continue;
    if (name == "TMPDIR=" || name == "COHORT_E2E_MARK=") continue;
    EXPECT_TRUE(dry.out.find(" " + assignment + "\n") != std::string::npos ||
                dry.out.find(" " + assignment + " ") != std::string::npos ||
                dry.out.find(" " + name + "(chosen at the start)\n") != std::string::npos || name == "COHORT_RUN_DIR=")
        << assignment << "\n"
        << dry.out;
    ++additions;
  }
  EXPECT_GE(additions, 15);
  EXPECT_NE(dry.out.find("    X='1 2'\n"), std::string::npos) << dry.out;
  EXPECT_EQ(run({{"run", "-np", "1", "--dry-run", "no-such-program"}}).status, 127);
}

TEST(RunOptions, AreSpelledAsOtherLaunchersHaveThemAndThoseOfTheProgramStay) {
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"-np", "4"}, {"-np4"}, {"-np=4"}, {"-nproc=4"}, {"-n4"}, {"-n=4"}, {"-qn", "4"}}) {
    std::vector<std::string> all = {"run", "--rdzv-id=", "--node_rank", "0", "--show-config"};
    all.insert(all.begin() + 1, words.begin(), words.end());
    const auto shown = run({all});
    EXPECT_NE(shown.out.find("\nnp = '4' "), std::string::npos) << words.front() << shown.err;
    EXPECT_NE(shown.out.find("\nnode-rank = '0' "), std::string::npos) << shown.out << shown.err;
  }
  const auto dry = run({{"run", "-np2", "--dry-run", "--", "echo", "-np4", "--node_rank", "[a,b]", "--", "-n=", "-h"}});
  EXPECT_NE(dry.out.find("echo -np4 --node_rank '[a,b]' -- -n= -h\n"), std::string::npos) << dry.out << dry.err;
  EXPECT_NE(run({{"run", "-np", "2", "-np", "3", "true"}}).err.find("-np is given twice, with 2 and 3"),
            std::string::npos);
  EXPECT_NE(run({{"run", "-mca", "a", "b", "true"}}).err.find("no option -mca: it is mpirun's"), std::string::npos);
  for (const char* quiet : {"--quiet=maybe", "-q=maybe"})
    EXPECT_NE(run({{"run", quiet, "true"}}).err.find("--quiet: true or false is wanted"), std::string::npos) << quiet;
  EXPECT_NE(run({{"run", "-q=true", "--show-config"}}).out.find("\nquiet = true "), std::string::npos);
}

TEST(RunOptions, BoundRanksKeepToTheirCores) {
  cpu_set_t set;
  ASSERT_EQ(::sched_getaffinity(0, sizeof set, &set), 0);
  const int processors = CPU_COUNT(&set);
  if (processors < 2) GTEST_SKIP() << "one processor only";
  Job job({{"run", "-np", "2", "--bind", "core", "grep", "Cpus_allowed_list", "/proc/self/status"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_NE(job.err().find("each bound to its share of the cores"), std::string::npos) << job.err();
  const std::string zero = job.log("rank-0.out");
  const std::string one = job.log("rank-1.out");
  EXPECT_NE(zero, one);
  const auto dry = run({{"run", "-np", "2", "--bind", "core", "--dry-run", "true"}});
  for (const std::string& list : {zero, one}) {
    const std::string text = list.substr(list.find('\t') + 1, list.size() - list.find('\t') - 2);
    EXPECT_NE(dry.out.find(" " + text + "\n"), std::string::npos) << text << "\n" << dry.out;
  }
  const auto many = run({{"run", "-np", std::to_string(processors + 1), "--bind", "core", "true"}});
  EXPECT_EQ(many.status, 127);
  EXPECT_NE(many.err.find("--bind core: "), std::string::npos) << many.err;
}

TEST(RunOutput, OnlyTheChosenRanksAreShownAndTheLogsHaveAll) {
  Job job({{"run", "-np", "4", "--ranks", "0,2-3", "--run-dir", "far/run", "sh", "-c", "echo from $RANK"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  auto lines = lines_of(job.out());
  EXPECT_EQ(lines.size(), 3U) << job.out();
  EXPECT_EQ(job.out().find("from 1"), std::string::npos) << job.out();
  for (int rank = 0; rank < 4; ++rank) {
    EXPECT_EQ(job.file(fmt::format("far/run/logs/rank-{}.out", rank)), fmt::format("from {}\n", rank));
  }
  EXPECT_FALSE(std::filesystem::exists(job.folder() + "/runs"));
  const auto none = run({{"run", "-np", "2", "--ranks", "2", "true"}});
  EXPECT_EQ(none.status, 2);
  EXPECT_NE(none.err.find("--ranks '2': there is no 2; the last one is 1"), std::string::npos) << none.err;
  EXPECT_EQ(run({{"run", "-np", "2", "--dry-run", "--ranks", "2", "true"}}).status, 2);
  const auto shares = run({{"run", "-np", "2", "--shares", "1,2,3", "true"}});
  EXPECT_EQ(shares.status, 2);
  EXPECT_NE(shares.err.find("--shares 1,2,3: 3 numbers for 1 hosts with 2 ranks"), std::string::npos) << shares.err;
}

TEST(RunOutput, TheSameLineOfAllRanksIsShownOnceWhereThatIsWanted) {
  const std::string program = "echo same; echo own $RANK; [ $RANK = 1 ] || echo but one";
  Job job({{"run", "-np", "3", "--collapse", "always", "sh", "-c", program}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  const std::string out = job.out();
  // Ranks that were slower than the window stand alone, so only the sum is sure.
  std::map<std::string, int> ranks;
  for (const std::string& line : lines_of(out)) {
    const auto bar = line.find(" | ");
    ASSERT_NE(bar, std::string::npos) << out;
    const std::string label = line.substr(0, line.find_last_not_of(' ', bar) + 1);
    int count = 1;
    if (label == "[0-1]" || label == "[1-2]" || label == "[0,2]") count = 2;
    if (label == "[0-2]") count = 3;
    ranks[line.substr(bar + 3)] += count;
  }
  EXPECT_EQ(ranks["same"], 3) << out;
  EXPECT_EQ(ranks["but one"], 2) << out;
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(ranks[fmt::format("own {}", rank)], 1) << out;
  EXPECT_EQ(job.log("rank-1.out"), "same\nown 1\n");
  const auto apart = run({{"run", "-np", "2", "sh", "-c", "echo same"}});
  EXPECT_EQ(lines_of(apart.out).size(), 2U) << "not a terminal";
}

TEST(RunOutput, AFloodOfOneRankNeitherDelaysNorLosesAnything) {
  // Rank 1 prints as fast as it can until rank 0 has said its lines, each with the time at which it was written.
  constexpr int kLines = 20;
  const std::string ranks =
      "import os, sys, time\n"
      "if os.environ['RANK'] == '0':\n"
      "  while not os.path.exists('flood'): time.sleep(0.01)\n"
      "  for i in range(20):\n"
      "    print('tick', time.monotonic(), flush=True); time.sleep(0.05)\n"
      "  open('over', 'w').close()\n"
      "else:\n"
      "  line = b'x' * 99 + b'\\n'\n"
      "  sent = 0\n"
      "  while not os.path.exists('over'):\n"
      "    os.write(1, line * 650); sent += 650\n"
      "    if sent > 20000 and sent < 21000: open('flood', 'w').close()\n"
      "  open('sent', 'w').write(str(sent))\n";
  JobOptions options{{"run", "-q", "-np", "2", "prog.py"}, {}, ranks, false, true, "cp input prog.py"};
  Job job(options);
  std::string pending;
  std::vector<double> delays;
  long flood = 0;
  std::string buffer(1 << 16, '\0');
  for (ssize_t got = 0; (got = ::read(job.output(), buffer.data(), buffer.size())) > 0;) {
    pending.append(buffer, 0, static_cast<std::size_t>(got));
    std::size_t begin = 0;
    for (std::size_t end = 0; (end = pending.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string_view line(pending.data() + begin, end - begin);
      if (const auto tick = line.find("| tick "); tick != std::string_view::npos) {
        timespec now{};
        ::clock_gettime(CLOCK_MONOTONIC, &now);
        delays.push_back(static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec) -
                         std::stod(std::string(line.substr(tick + 7))));
      } else {
        flood += line.ends_with(std::string(99, 'x')) ? 1 : 0;
      }
    }
    pending.erase(0, begin);
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(delays.size(), static_cast<std::size_t>(kLines));
  const double worst = *std::max_element(delays.begin(), delays.end());
  RecordProperty("worst_delay_seconds", fmt::format("{:.3f}", worst));
  RecordProperty("flood_megabytes", static_cast<int>(flood / 10000));
  EXPECT_LT(worst, 5) << "a line waited behind another rank's";
  EXPECT_EQ(std::to_string(flood), job.file("sent"));
}

TEST(RunOutput, ColoursAndCharactersThatComeInPiecesAreWhole) {
  JobOptions options{{"run", "-q", "-np", "1", "prog.py"}, {"TERM=xterm", "NO_COLOR=1"}, {}};
  options.input = "";
  options.terminal = true;
  options.shell_before =
      "printf '%s' 'import os, time\n"
      "for piece in [b\"a\\xe2\", b\"\\x82\", b\"\\xac b\\x1b[3\", b\"1mred\", b\"\\x1b[0m\\n\"]:\n"
      "  os.write(1, piece); time.sleep(0.3)\n' > prog.py";
  Job job(options);
  EXPECT_EQ(job.wait(), 0) << job.screen();
  const std::string& screen = job.screen();
  EXPECT_NE(screen.find("a\xe2\x82\xac b\033[31mred\033[0m"), std::string::npos) << screen;
  // Every screen shown in between ended with a whole character and a whole sequence.
  for (std::size_t at = screen.find("a"); at != std::string::npos; at = screen.find("| a", at + 1)) {
    const std::string shown = screen.substr(at, screen.find('\r', at) - at);
    EXPECT_FALSE(shown.ends_with("\xe2") || shown.ends_with("\x82") || shown.ends_with("\033[3")) << shown;
  }
}

TEST(RunRestarts, TheWholeWorldIsStartedAgainAndTheRecordHasAllAttempts) {
  Job job({{"run", "-np", "2", "--max-restarts", "3", "sh", "-c",
            "echo attempt $COHORT_RESTART $TORCHELASTIC_RESTART_COUNT; [ $RANK = 0 ] || [ $COHORT_RESTART = 2 ] || "
            "exit $((3 + COHORT_RESTART)); [ $COHORT_RESTART = 2 ] || sleep 100"}});
  ASSERT_EQ(job.wait(), 0) << job.err();
  const std::string err = job.err();
  EXPECT_NE(err.find("rank 1 on "), std::string::npos) << err;
  EXPECT_NE(err.find("exit code 3; starting all 2 ranks again (1 of 3)"), std::string::npos) << err;
  EXPECT_NE(err.find("exit code 4; starting all 2 ranks again (2 of 3)"), std::string::npos) << err;
  EXPECT_EQ(job.log("rank-1.out"), "attempt 0 0\n");
  EXPECT_EQ(job.log("restart-1/rank-1.out"), "attempt 1 1\n");
  EXPECT_EQ(job.log("restart-2/rank-0.out"), "attempt 2 2\n");
  const std::string record = job.file("runs/latest/job.json");
  EXPECT_NE(record.find("\"status\": \"exit code 3\""), std::string::npos) << record;
  EXPECT_NE(record.find("\"status\": \"exit code 4\""), std::string::npos) << record;
  EXPECT_NE(record.find("\"exit_status\": 0"), std::string::npos) << record;
  EXPECT_TRUE(job.processes().empty());
}

TEST(RunRestarts, EndWithTheLastAttemptsStatus) {
  const auto finished = run({{"run", "-np", "1", "--max-restarts", "1", "sh", "-c", "exit $((5 + COHORT_RESTART))"}});
  EXPECT_EQ(finished.status, 6) << finished.err;
  EXPECT_NE(finished.err.find("failed after 1 restart (--max-restarts)"), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("rank 0 failed: exit code 6"), std::string::npos) << finished.err;
}

TEST(RunRestarts, AFailureThatComesAgainAtOnceIsNotTriedForEver) {
  const auto finished = run({{"run", "-np", "2", "--max-restarts", "100", "sh", "-c", "exit 9"}});
  EXPECT_EQ(finished.status, 9) << finished.err;
  EXPECT_NE(finished.err.find("3 times in a row"), std::string::npos) << finished.err;
  EXPECT_NE(finished.err.find("(2 of 100)"), std::string::npos) << finished.err;
  EXPECT_EQ(finished.err.find("(3 of 100)"), std::string::npos) << finished.err;
}

TEST(RunRestarts, AJobThatIsToldToEndEnds) {
  Job job({{"run", "-np", "2", "--max-restarts", "5", "sh", "-c", "echo ready; sleep 1000"}});
  ASSERT_TRUE(eventually([&] { return lines_of(job.out()).size() == 2; })) << job.err();
  job.signal(SIGTERM);
  EXPECT_EQ(job.wait(), 143) << job.err();
  EXPECT_EQ(job.err().find("again"), std::string::npos) << job.err();
  EXPECT_TRUE(job.processes().empty());
}

TEST(RunRestarts, TheTimeLimitIsTheWholeJobs) {
  const auto finished = run({{"run", "-np", "1", "--max-restarts", "100000", "--timeout", "2", "sh", "-c",
                              "sleep 0.2; exit $((COHORT_RESTART % 2 + 1))"}});
  EXPECT_EQ(finished.status, 124) << finished.err;
}

TEST(RunRecord, HasTheCommitAndNoSecrets) {
  Job job({{"run", "-np", "1", "--env", "MY_API_KEY=abc123", "sh", "-c", "true", "--token", "abc123", "--keep=yes"},
           {"CUDA_TOKEN=abc123", "NCCL_NET_PROXY=http://user:abc123@host", "OMP_SCHEDULE=static", "SLURM_JWT=abc123",
            "TF_VAR_db_pass=abc123", "TF_VAR_login=abc123", "COHORT_RUN_ENV=LOGIN=abc123", "PGPASSWORD=abc123"},
           {},
           false,
           false,
           "mkdir -p .git/refs/heads; echo 'ref: refs/heads/main' > .git/HEAD; "
           "echo 0123456789012345678901234567890123456789 > .git/refs/heads/main"});
  ASSERT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(std::filesystem::status(job.folder() + "/runs/latest/job.json").permissions(),
            std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  const std::string record = job.file("runs/latest/job.json");
  EXPECT_EQ(record.find("abc123"), std::string::npos) << record;
  EXPECT_NE(record.find("MY_API_KEY=(hidden)"), std::string::npos) << record;
  EXPECT_NE(record.find("--keep=yes"), std::string::npos) << record;
  EXPECT_NE(record.find("\"OMP_SCHEDULE\": \"static\""), std::string::npos) << record;
  EXPECT_NE(record.find("\"commit\": \"0123456789012345678901234567890123456789\""), std::string::npos) << record;
  EXPECT_NE(record.find("\"branch\": \"main\""), std::string::npos) << record;
}

}  // namespace
}  // namespace cohort::test
