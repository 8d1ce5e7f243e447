// The command's words about itself: doctor --build, help, completion.
#include "launch_harness.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <string>

namespace cohort::test {
namespace {

using namespace std::chrono_literals;

TEST(CommandHelp, TopicsAreSectionsOfTheDocumentation) {
  const std::string page = read_text(COHORT_DOCS "/reference/run.md");
  for (const char* topic : {"failures", "output", "config"}) {
    const auto help = run({{"help", topic}});
    ASSERT_EQ(help.status, 0) << help.err;
    ASSERT_TRUE(help.out.starts_with("## ")) << help.out;
    const std::string first = help.out.substr(0, help.out.find("\n\n", 10));
    EXPECT_NE(page.find(first), std::string::npos) << first;
    EXPECT_GT(help.out.size(), 300U);
    EXPECT_EQ(help.out.find("]("), std::string::npos) << help.out;  // a terminal follows no links
  }
  const auto options = run({{"run", "--help-all"}}).out;
  for (const std::string& line : lines_of(options)) EXPECT_LE(line.size(), 124U) << line;
  for (const char* part :
       {"\nProcesses and hosts:\n", "\nA launcher on each node, as torchrun is started:\n", "\n  --rdzv-id "})
    EXPECT_NE(options.find(part), std::string::npos) << part;
  for (const char* part : {"--owner", "\nOptions:\n"}) EXPECT_EQ(options.find(part), std::string::npos) << part;
  EXPECT_TRUE(run({{"--version"}}).out.starts_with("cohort ")) << run({{"--version"}}).out;
  const auto common = run({{"run", "--help"}}).out;
  EXPECT_EQ(run({{"help", "run"}}).out, common);
  const auto shown = lines_of(common);
  const auto options_in = [](const std::string& line) { return line.starts_with("  -"); };
  EXPECT_EQ(std::count_if(shown.begin(), shown.end(), options_in), 15) << common;  // thirteen, --help and --help-all
  for (const char* part : {"\n  --help-all ", "\n  -H,--hosts ", "\nExamples:\n", "`cohort run --help-all`"})
    EXPECT_NE(common.find(part), std::string::npos) << part;
  EXPECT_EQ(common.find("--rdzv-id"), std::string::npos) << common;
  const auto list = run({{"help"}});
  EXPECT_NE(list.out.find("  failures "), std::string::npos) << list.out;
  EXPECT_NE(list.out.find("doctor"), std::string::npos) << list.out;
  const auto typo = run({{"help", "ouptut"}});
  EXPECT_EQ(typo.status, 2);
  EXPECT_NE(typo.err.find("did you mean output?"), std::string::npos) << typo.err;
}

// An agent cannot be told that its job has given it up if a cable breaks between its message and the answer.
TEST(CommandAgent, IsGoneBeforeItsJobHasGivenItUp) {
  Job silence({.arguments = {"agent", "--invited"}, .shell_before = "mkfifo none; exec 0<>none", .patience = 60s});
  const auto began = std::chrono::steady_clock::now();
  EXPECT_EQ(silence.wait(), 1);
  EXPECT_LT(std::chrono::steady_clock::now() - began, 30s);  // --start-timeout
  EXPECT_NE(silence.err().find("no invitation from `cohort run`"), std::string::npos) << silence.err();
  const auto end = run({{"agent", "--invited"}});
  EXPECT_EQ(end.status, 1);
  EXPECT_NE(end.err.find("it was not invited"), std::string::npos) << end.err;
}

TEST(CommandBuild, SaysWhatIsThereAndWhyNotWhatIsNot) {
  // A Python of our own, so that nothing has to be imported.
  JobOptions options{{"doctor", "--build"}, {"PATH=bin:/usr/bin:/bin", "VIRTUAL_ENV="}};
  options.input =
      "#!/bin/sh\n"
      "echo noise\n"
      "echo 'cohort-doctor-build {\"python\": \"9.9\", \"torch\": {\"version\": \"8.8\", \"more\": \"CPU only\"}, "
      "\"numpy\": {\"missing\": true}, \"cloudpickle\": {\"missing\": false, \"why\": \"ImportError: broken\"}}'\n";
  options.shell_before =
      "mkdir bin; cp input bin/python3; printf '#!/bin/sh\\necho slurm 77.1\\n' > bin/srun; "
      "printf '#!/bin/sh\\nexit 4\\n' > bin/mpirun; chmod +x bin/*";
  const auto build = run(options);
  ASSERT_EQ(build.status, 0) << build.err;
  for (const char* wanted :
       {"\n  local        shared memory", "\n  mpi          ", "\n  package      no: ", "Python (bin/python3)",
        "\n  python       9.9\n", "\n  torch        8.8 (CPU only)\n",
        "\n  numpy        no: not installed; pip install numpy\n",
        "\n  cloudpickle  no: it is installed and does not work: ImportError: broken\n",
        "\n  Slurm        slurm 77.1\n", "\n  MPI          no: `mpirun --version` ends with status 4"}) {
    EXPECT_NE(build.out.find(wanted), std::string::npos) << wanted << "\n" << build.out;
  }
  const auto none = run({{"doctor", "--build"}, {"PATH=bin", "VIRTUAL_ENV=/no/such"}});
  ASSERT_EQ(none.status, 0) << none.err;
  EXPECT_NE(none.out.find("\n  ssh          no: there is no ssh in PATH; Debian: apt install openssh-client\n"),
            std::string::npos)
      << none.out;
  EXPECT_NE(none.out.find("VIRTUAL_ENV is /no/such"), std::string::npos) << none.out;
}

TEST(CommandBuild, TheRealPythonAnswers) {
  const auto build = run({{"doctor", "--build"}});
  ASSERT_EQ(build.status, 0) << build.err;
  EXPECT_EQ(build.out.find("it ended with status"), std::string::npos) << build.out;
}

TEST(CommandDoctor, JudgesOnlyThreadsThatSomebodyHasSet) {
  const auto nobody = run({{"doctor", "--json"}});
  EXPECT_NE(nobody.out.find("\"row\": \"launcher\""), std::string::npos) << nobody.out << nobody.err;
  EXPECT_EQ(nobody.out.find("OMP_NUM_THREADS"), std::string::npos) << nobody.out;
  const auto somebody = run({{"doctor", "--json"}, {"OMP_NUM_THREADS=6400"}});
  EXPECT_NE(somebody.out.find("OMP_NUM_THREADS=6400 for each of "), std::string::npos) << somebody.out;
}

TEST(CommandCompletion, CompletesCommandsOptionsAndValues) {
  const auto complete = [](const std::string& words) {
    const std::string program = "source <('" COHORT_COMMAND
                                "' completion bash)\n"
                                "complete -p cohort >/dev/null || exit 3\n"
                                "COMP_WORDS=(" +
                                words + "); COMP_CWORD=$((${#COMP_WORDS[@]} - 1)); _cohort; echo \"${COMPREPLY[*]}\"\n";
    JobOptions options{{"run", "-q", "-np", "1", "--prefix", "none", "bash", "script"}};
    options.input = program;
    options.shell_before = "cp input script";
    const auto finished = run(options);
    EXPECT_EQ(finished.status, 0) << finished.err;
    return finished.out;
  };
  EXPECT_EQ(complete("cohort ru"), "run runs\n");
  EXPECT_EQ(complete("cohort run --pref"), "--prefix\n");
  EXPECT_EQ(complete("cohort run --rdzv-i"), "--rdzv-id\n");  // which --help does not show
  EXPECT_EQ(complete("cohort run --prefix ''"), "none rank full\n");
  EXPECT_EQ(complete("cohort run --prefix = f"), "full\n");
  EXPECT_EQ(complete("cohort run -np 2 --show"), "--show-config\n");
  EXPECT_EQ(complete("cohort run -np 2 ./program --pre"), "\n") << "the program's own";
  EXPECT_EQ(complete("cohort help fail"), "failures\n");
  EXPECT_EQ(run({{"completion", "tcsh"}}).status, 2);
}

}  // namespace
}  // namespace cohort::test
