// Policies: division of cores, restarts of a job, the contents of its record and of a file of options.
#include "base/hardware.h"
#include "launch/health/verdict.h"
#include "launch/output/job_record.h"
#include "launch/plan/program.h"
#include "launch/plan/rank_environment.h"
#include "launch/start/starter.h"
#include "launch/supervise/supervisor.h"

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

namespace cohort::launch {
namespace {

using Shares = std::vector<std::vector<int>>;

TEST(BindingTest, WholeCoresStayTogether) {
  // Four cores of two processors each, numbered as Linux does it.
  const Shares cores = {{0, 4}, {1, 5}, {2, 6}, {3, 7}};
  EXPECT_EQ(*share_cores(cores, 2), (Shares{{0, 1, 4, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(*share_cores(cores, 3), (Shares{{0, 4}, {1, 5}, {2, 3, 6, 7}}));
  EXPECT_EQ(*share_cores(cores, 4), cores);
  // More ranks than cores share them by processors.
  EXPECT_EQ(*share_cores(cores, 8), (Shares{{0}, {4}, {1}, {5}, {2}, {6}, {3}, {7}}));
  EXPECT_FALSE(share_cores(cores, 9));
  EXPECT_FALSE(share_cores({}, 1));
}

TEST(BindingTest, ThisProcessHasCores) {
  std::size_t processors = 0;
  for (const auto& core : sys::cores_of_process()) processors += core.size();
  EXPECT_GE(processors, 1U);
  EXPECT_LE(static_cast<std::size_t>(sys::usable_cores()), processors);
}

Breakdown breakdown(int code, double seconds) { return {"it broke", fmt::format("exit code {}", code), seconds}; }

TEST(RestartsTest, AreCounted) {
  Restarts none(0);
  EXPECT_FALSE(none.after(breakdown(1, 10), 2).again);
  EXPECT_EQ(none.after(breakdown(1, 10), 2).text, "");
  Restarts two(2);
  EXPECT_EQ(two.after(breakdown(1, 10), 2).text, "it broke; starting all 2 ranks again (1 of 2)");
  EXPECT_TRUE(two.after(breakdown(1, 10), 2).again);
  EXPECT_EQ(two.done(), 2);
  const auto last = two.after(breakdown(1, 10), 2);
  EXPECT_FALSE(last.again);
  EXPECT_EQ(last.text, "failed after 2 restarts (--max-restarts)");
}

TEST(RestartsTest, TheSameFailureThreeTimesAtTheStartIsTheEnd) {
  Restarts many(100);
  EXPECT_TRUE(many.after(breakdown(1, 1), 2).again);
  EXPECT_TRUE(many.after(breakdown(1, 1), 2).again);
  EXPECT_FALSE(many.after(breakdown(1, 1), 2).again);
  Restarts others(100);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(others.after(breakdown(1 + i % 2, 1), 2).again) << "not the same";
  Restarts late(100);
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(late.after(breakdown(1, i % 2 == 0 ? 1 : 60), 2).again) << "not in a row";
}

TEST(RecordTest, PrivateNamesAreKnown) {
  for (const char* name : {"API_KEY", "HF_TOKEN", "hf-token", "--api-key", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY",
                           "MYPASSWORD", "GITHUBTOKEN", "SLURM_JWT", "TF_VAR_db_pass", "PGPASSWORD", "GH_PAT",
                           "AZURE_SAS", "SENTRY_DSN", "DB_PWD", "GOOGLE_APPLICATION_CREDENTIALS", "X_CREDS"}) {
    EXPECT_TRUE(looks_private(name)) << name;
  }
  for (const char* name : {"PYTHONPATH", "OMP_NUM_THREADS", "--monkey", "KEYBOARD", "TOKENIZERS_PARALLELISM", ""}) {
    EXPECT_FALSE(looks_private(name)) << name;
  }
}

TEST(RecordTest, OnlyVariablesOfTheListAreRecorded) {
  for (const char* name : {"SLURM_JWT",
                           "SLURM_JOB_COMMENT",
                           "SLURM_ANYTHING",
                           "TF_VAR_db_pass",
                           "TF_VAR_region",
                           "TF_TOKEN_app",
                           "HOROVOD_SECRET_KEY",
                           "PYTHON_KEYRING_BACKEND",
                           "CUDA_TOKEN",
                           "TORCH_X",
                           "NCCL_AUTH_TOKEN",
                           "OMP_PASS",
                           "COHORT_RUN_ENV",
                           "COHORT_RUN_SSH",
                           "COHORT_RUN_ON_WARNING",
                           "COHORT_ANYTHING",
                           "COHORT_SECRET_FILE",
                           "AWS_REGION",
                           "HOME",
                           "MASTER_KEY",
                           "LD_PRELOAD_TOKEN",
                           "",
                           "OMP"}) {
    EXPECT_FALSE(is_recorded(name, "1")) << name;
  }
  for (const char* name : {"COHORT_LOG", "COHORT_RUN_NP", "OMP_SCHEDULE", "NCCL_DEBUG", "PYTHONPATH", "LD_LIBRARY_PATH",
                           "CUDA_VISIBLE_DEVICES", "SLURM_JOB_ID", "MASTER_ADDR", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}) {
    EXPECT_TRUE(is_recorded(name, "1")) << name;
  }
  EXPECT_FALSE(is_recorded("NCCL_NET_PROXY", "http://me:abc@host"));
}

TEST(RecordTest, WordsOfACommandGiveNothingAway) {
  const std::vector<std::string> words = {"run", "--env=MY_KEY=a", "--env", "DB_PASS=b", "--token",
                                          "c",   "--jwt=d",        "x=1"};
  const std::vector<std::string> shown = {"run",      "--env=MY_KEY=(hidden)", "--env", "DB_PASS=(hidden)", "--token",
                                          "(hidden)", "--jwt=(hidden)",        "x=1"};
  EXPECT_EQ(without_secrets(words), shown);
}

class Git : public testing::Test {
 protected:
  void SetUp() override {
    folder_ = std::filesystem::temp_directory_path() / ("cohort-git-" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder_ / ".git/refs/heads/feature");
    std::filesystem::create_directories(folder_ / "a/b");
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  void write(const std::string& name, const std::string& text) { std::ofstream(folder_ / name) << text; }
  std::filesystem::path folder_;
  const std::string commit_ = std::string(40, 'a');
};

TEST_F(Git, TheCommitOfABranchIsFoundFromBelow) {
  EXPECT_FALSE(git_revision(folder_)) << "no commit yet";
  write(".git/HEAD", "ref: refs/heads/feature/x\n");
  EXPECT_FALSE(git_revision(folder_));
  write(".git/refs/heads/feature/x", commit_ + "\n");
  const auto found = git_revision((folder_ / "a/b").string());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->commit, commit_);
  EXPECT_EQ(found->branch, "feature/x");
}

TEST_F(Git, PackedBranchesDetachedHeadsAndWorktrees) {
  write(".git/HEAD", "ref: refs/heads/main\n");
  write(".git/packed-refs", "# pack-refs\n" + std::string(40, 'b') + " refs/heads/main\n");
  EXPECT_EQ(git_revision(folder_)->commit, std::string(40, 'b'));
  write(".git/HEAD", commit_ + "\n");
  EXPECT_EQ(git_revision(folder_)->commit, commit_);
  EXPECT_EQ(git_revision(folder_)->branch, "");
  std::filesystem::create_directories(folder_ / ".git/worktrees/b");
  write("a/b/.git", "gitdir: " + (folder_ / ".git/worktrees/b").string() + "\n");
  write(".git/worktrees/b/HEAD", "ref: refs/heads/main\n");
  write(".git/worktrees/b/commondir", "../..\n");
  const auto found = git_revision((folder_ / "a/b").string());
  ASSERT_TRUE(found);
  EXPECT_EQ(found->commit, std::string(40, 'b'));
  write(".git/HEAD", "nonsense\n");
  EXPECT_FALSE(git_revision(folder_));
}

TEST(DryRunTest, WordsAreQuotedForAShell) {
  EXPECT_EQ(shell_quoted("plain-1.0"), "plain-1.0");
  EXPECT_EQ(shell_quoted("two words"), "'two words'");
  EXPECT_EQ(shell_quoted("it's"), "'it'\\''s'");
  EXPECT_EQ(shell_quoted(""), "''");
  EXPECT_EQ(shell_quoted("$HOME"), "'$HOME'");
}

std::string why_not(const std::string& text) {
  const auto got = parse_config(text, "f.toml");
  EXPECT_FALSE(got) << text;
  return got ? "" : got.error().what();
}

TEST(ConfigFile, GivesTheEntriesOfRunInTheirOrder) {
  const auto got = parse_config(
      "# a comment\n[run]\nnp = 4\ngrace = 2.5\nquiet = true\nprefix = \"full\"\nenv = [\"A=1\", \"B=x y\"]\n",
      "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 5U);
  EXPECT_EQ((*got)[0].key, "np");
  EXPECT_EQ((*got)[0].line, 3);
  EXPECT_EQ((*got)[0].values, std::vector<std::string>{"4"});
  EXPECT_EQ((*got)[1].values, std::vector<std::string>{"2.5"});
  EXPECT_EQ((*got)[2].values, std::vector<std::string>{"true"});
  EXPECT_EQ((*got)[3].values, std::vector<std::string>{"full"});
  EXPECT_FALSE((*got)[3].is_list);
  EXPECT_TRUE((*got)[4].is_list);
  EXPECT_EQ((*got)[4].values, (std::vector<std::string>{"A=1", "B=x y"}));
}

TEST(ConfigFile, ATableIsAListOfAssignments) {
  const auto got = parse_config("[run.env]\nOMP_NUM_THREADS = 2\nX = \"a\"\n", "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 1U);
  EXPECT_EQ((*got)[0].values, (std::vector<std::string>{"OMP_NUM_THREADS=2", "X=a"}));
}

TEST(ConfigFile, SaysInWhichLineItIsWrong) {
  EXPECT_EQ(why_not("[run]\nnp = \n").rfind("f.toml:2: ", 0), 0U) << why_not("[run]\nnp = \n");
  EXPECT_NE(why_not("[run]\n\n[rnu]\nnp = 1\n").find("f.toml:3: 'rnu' is not known"), std::string::npos);
  EXPECT_NE(why_not("np = 1\n").find("f.toml:1: 'np' is not known here; options stand in the table [run]"),
            std::string::npos);
  EXPECT_NE(why_not("[run]\nnp = 1979-05-27\n").find("f.toml:2: np: a text, a number"), std::string::npos);
  EXPECT_NE(why_not("[run]\nenv = [[1]]\n").find("f.toml:2: env: "), std::string::npos);
}

TEST(ConfigFile, OtherThanAsciiStandsInQuotesAndComments) {
  for (const char* stray : {"[run]\n\xef\xaf\xaf = 1\n", "[run]\n\xc3\xa4 = 1\n", "#\xc3\xa4\n[\xc3\xa4\n"}) {
    EXPECT_NE(why_not(stray).find("f.toml:2: "), std::string::npos) << why_not(stray);
  }
  const auto got = parse_config(
      "\xef\xbb\xbf[run] # \xc3\xa4 \"\na = \"\\\"\xc3\xa4\" # '\nb = '\\\xc3\xa4'\nc = \"\"\"\n\"\xc3\xa4\"\"\"\"\nd "
      "= '''\xc3\xa4'''\ne = \"\" # \xc3\xa4\n",
      "f.toml");
  ASSERT_TRUE(got) << got.error().what();
  ASSERT_EQ(got->size(), 5U);
  EXPECT_EQ((*got)[0].values[0], "\"\xc3\xa4");
  EXPECT_EQ((*got)[1].values[0], "\\\xc3\xa4");
  EXPECT_EQ((*got)[2].values[0], "\"\xc3\xa4\"");
  EXPECT_EQ((*got)[3].values[0], "\xc3\xa4");
}

TEST(ConfigFile, AFileThatCannotBeReadIsNamed) {
  EXPECT_NE(std::string(read_config("/nowhere/x.toml").error().what()).find("/nowhere/x.toml: No such file"),
            std::string::npos);
  EXPECT_FALSE(read_config("/"));
  EXPECT_NE(std::string(read_config("/dev/zero").error().what()).find("longer than 1 MiB"), std::string::npos);
}

TEST(ConfigFile, TextsComeBackAsTheyWere) {
  for (const std::string text : {"plain", "a\"b\\c", "tab\tline\n", "\xc3\xa4"}) {
    const auto got = parse_config("[run]\nx = " + toml_text(text) + "\n", "f");
    ASSERT_TRUE(got) << toml_text(text) << got.error().what();
    EXPECT_EQ((*got)[0].values[0], text);
  }
}

}  // namespace
}  // namespace cohort::launch
