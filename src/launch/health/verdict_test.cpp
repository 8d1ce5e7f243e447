#include "launch/health/verdict.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>

namespace cohort::launch {
namespace {

Ending ending(int rank, int code) {
  Ending out;
  out.rank = rank;
  out.status.code = code;
  return out;
}

JobEnd two_ranks(int first, int second) {
  JobEnd end;
  end.roles.workers = 2;
  end.endings = {ending(0, first), ending(1, second)};
  end.log_folder = "runs/x/logs";
  return end;
}

TEST(Verdict, AGoodEndSaysNothing) {
  const Verdict verdict = judge(two_ranks(0, 0));
  EXPECT_EQ(verdict.status, 0);
  EXPECT_EQ(verdict.text, "");
  EXPECT_FALSE(verdict.post_mortem);
  EXPECT_FALSE(verdict.breakdown);
}

TEST(Verdict, RanksThatFormedNothingAreDoubted) {
  JobEnd end = two_ranks(0, 0);
  EXPECT_NE(doubt_about(end, judge(end)).find("2 independent runs?"), std::string::npos);
  end.endings[1].last.worlds = 1;
  EXPECT_EQ(doubt_about(end, judge(end)), "");
  end = two_ranks(0, 1);
  EXPECT_EQ(doubt_about(end, judge(end)), "");
  end = two_ranks(0, 0);
  end.roles.servers = 1;
  EXPECT_EQ(doubt_about(end, judge(end)), "");
}

TEST(Verdict, WhereNoLogsAreKeptNoneAreNamed) {
  JobEnd end = two_ranks(0, 3);
  end.log_folder.clear();
  EXPECT_EQ(judge(end).text.find("logs"), std::string::npos) << judge(end).text;
  end.stop_status = 130;
  end.stop_reason = "told to end by SIGINT";
  EXPECT_EQ(judge(end).text, "cohort: told to end by SIGINT, after 0.0 s\n");
}

TEST(Verdict, AFailedRankGivesStatusAndPostMortem) {
  const Verdict verdict = judge(two_ranks(0, 3));
  EXPECT_EQ(verdict.status, 3);
  ASSERT_TRUE(verdict.post_mortem && verdict.breakdown);
  EXPECT_EQ(verdict.post_mortem->first.rank, 1);
  EXPECT_EQ(verdict.breakdown->text, "rank 1 on  failed after 0.0 s: exit code 3");
  EXPECT_NE(verdict.text.find("rank 1 failed"), std::string::npos) << verdict.text;
}

TEST(Verdict, TheFailedRankIsNotAmongThoseThatFellWithIt) {
  JobEnd end = two_ranks(1, 1);
  // Rank 0 noticed what became of rank 1, and was gone before it.
  end.endings[0].after_seconds = 1;
  end.endings[0].cause.code = static_cast<int>(ErrorCode::PeerLost);
  end.endings[0].cause.peer = 1;
  end.endings[1].after_seconds = 2;
  end.endings[1].last_stderr = "ValueError: bad batch";
  end.doing_then = {"waiting in barrier(), operation 2", "left the world; its last operation was barrier(), number 1"};
  const Verdict verdict = judge(end);
  ASSERT_TRUE(verdict.post_mortem);
  EXPECT_EQ(verdict.post_mortem->first.rank, 1);
  ASSERT_EQ(verdict.post_mortem->others.size(), 1u);
  EXPECT_EQ(verdict.post_mortem->others[0], "rank 0: waiting in barrier(), operation 2");
}

TEST(Verdict, ARankThatEndedInGoodOrderBeforeTheOthersIsNamedFirst) {
  JobEnd end = two_ranks(1, 0);
  end.endings[0].after_seconds = 2;
  end.endings[0].cause.code = static_cast<int>(ErrorCode::PeerLost);
  end.endings[1].after_seconds = 1;
  EXPECT_TRUE(
      judge(end).text.starts_with("cohort: rank 1 had ended with 0 while rank 0 went on: do all ranks take the same "
                                  "number of steps?\ncohort: rank 0 failed: exit code 1"))
      << judge(end).text;
  end.endings[1].after_seconds = 3;
  EXPECT_TRUE(judge(end).text.starts_with("cohort: rank 0 failed")) << "it ended later";
  end.endings[0].cause.peer = 1;
  EXPECT_TRUE(judge(end).text.starts_with("cohort: rank 1 had ended with 0"))
      << "it is named, and took its time to end";
  end.endings[1].after_seconds = 1;
  end.endings[0].cause = {};
  EXPECT_TRUE(judge(end).text.starts_with("cohort: rank 0 failed")) << "it has reasons of its own";
}

TEST(Verdict, AJobThatDidNotGoOnCanBeStartedAgain) {
  JobEnd end = two_ranks(143, 143);
  end.stop_status = 124;
  end.stop_reason = "ranks 0-1 wait only for each other";
  end.seconds = 12;
  EXPECT_FALSE(judge(end).breakdown) << "a time limit is meant";
  end.stuck = true;
  ASSERT_TRUE(judge(end).breakdown);
  EXPECT_EQ(judge(end).breakdown->text, "ranks 0-1 wait only for each other, after 12.0 s");
}

TEST(Verdict, SilentRanksAreNotSuccess) {
  JobEnd end = two_ranks(0, 0);
  end.endings.pop_back();
  const Verdict verdict = judge(end);
  EXPECT_EQ(verdict.status, 1);
  EXPECT_NE(verdict.text.find("without word from all ranks"), std::string::npos) << verdict.text;
}

TEST(Verdict, WhoStopsTheJobGivesTheStatus) {
  JobEnd end = two_ranks(143, 143);
  end.stop_status = 128 + SIGINT;
  end.stop_reason = "told to end by SIGINT";
  EXPECT_EQ(judge(end).status, 130);
  EXPECT_EQ(judge(end).text, "cohort: told to end by SIGINT, after 0.0 s; logs in runs/x/logs\n");
  EXPECT_FALSE(judge(end).post_mortem);
  end.quiet = true;
  EXPECT_EQ(judge(end).text, "");
}

TEST(Verdict, AJobThatDidNotStartSaysWhy) {
  JobEnd end;
  end.start_failure = "cannot start ./x";
  end.stop_reason = end.start_failure;
  end.stop_status = 127;
  EXPECT_EQ(judge(end).status, 127);
  EXPECT_EQ(judge(end).text, "cohort: cannot start ./x\n");
}

TEST(Verdict, RanksThatSavedAndEndedAskForARequeueAndForNoRestart) {
  JobEnd end = two_ranks(75, 75);
  end.seconds = 3;
  for (Ending& one : end.endings) one.last.preempted_by = SIGUSR1;
  const Verdict verdict = judge(end);
  EXPECT_EQ(verdict.status, 75);
  EXPECT_TRUE(verdict.requeue);
  EXPECT_FALSE(verdict.post_mortem);
  EXPECT_FALSE(verdict.breakdown);
  EXPECT_EQ(verdict.text,
            "cohort: asked to end by SIGUSR1; all 2 ranks have saved and ended, after 3.0 s; exit status 75 asks for a "
            "requeue\n");
  end = two_ranks(75, 0);
  EXPECT_EQ(judge(end).status, 75);
  EXPECT_EQ(judge(end).reason, "1 of 2 ranks has ended");
}

TEST(Verdict, ToldToEndARequeueNeedsAllRanksToHaveSaved) {
  JobEnd end = two_ranks(75, 75);
  end.stop_status = 143;
  end.stop_reason = "told to end by SIGTERM";
  EXPECT_EQ(judge(end).status, 143) << "stopped for another reason";
  end.told_to_end = true;
  EXPECT_EQ(judge(end).status, 75);
  end.endings[1].status = {0, SIGKILL, false};  // its time was over
  EXPECT_EQ(judge(end).status, 143);
  EXPECT_FALSE(judge(end).requeue);
}

Ending server(int number, int code, int signal) {
  Ending out = ending(number, code);
  out.role = Role::Server;
  out.status.signal = signal;
  return out;
}

TEST(Verdict, AServerThatFailsIsAFailureLikeARanks) {
  JobEnd end = two_ranks(1, 143);
  end.roles.servers = 2;
  end.endings.push_back(server(1, 0, SIGSEGV));
  end.endings[0].after_seconds = 2;
  end.endings[2].after_seconds = 3;  // the kernel took its time
  end.endings[1].before_stop = false;
  end.doing_then = {"in barrier(), operation 2", "in barrier(), operation 2", "running", "running"};
  const Verdict verdict = judge(end);
  EXPECT_EQ(verdict.status, 128 + SIGSEGV);
  ASSERT_TRUE(verdict.post_mortem);
  EXPECT_EQ(verdict.post_mortem->first.name(), "server 1");
  EXPECT_NE(verdict.text.find("server 1 failed: "), std::string::npos) << verdict.text;
  EXPECT_NE(verdict.text.find("2 ranks were ended as a result"), std::string::npos) << verdict.text;
  EXPECT_NE(verdict.text.find("full logs: runs/x/logs\n"), std::string::npos) << verdict.text;
  EXPECT_EQ(verdict.post_mortem->others.back(), "server 0: running");
  EXPECT_EQ(verdict.text.find("it was "), std::string::npos) << "it has not reported: " << verdict.text;
  end.endings[2].last.has_page = true;  // and has no world
  EXPECT_NE(judge(end).text.find("it was running, in no world, as servers are"), std::string::npos) << judge(end).text;
}

TEST(Verdict, TheBlockSaysEachSentenceOnceAndLeavesTheStackToTheLog) {
  JobEnd end = two_ranks(0, 143);
  Ending& first = end.endings[0];
  first.status = {0, SIGABRT, true};
  const std::string sentence = "all_reduce(float32[5], sum) refused -- rank 0 (h) -- rank 1 brought 6";
  first.last_stderr =
      "epoch 1\nterminate called after throwing an instance of 'cohort::Error'\n  what():  " + sentence + "\n";
  first.words = "uncaught exception cohort::Error: " + sentence +
                "\n  code Mismatch, rank 0, host h, operation all_reduce(float32[5], sum), number 3\nthe stack at "
                "std::terminate:\n  #0 f()+0x4 in /lib/x.so 0x12\n";
  const std::string text = judge(end).text;
  EXPECT_NE(text.find("last lines of its stderr:\ncohort:   > epoch 1\ncohort:   its own last words:\ncohort:   > "
                      "uncaught exception cohort::Error: " +
                      sentence + "\ncohort:   1 other rank was ended as a result\n"),
            std::string::npos)
      << text;
  EXPECT_EQ(text.find(sentence), text.rfind(sentence)) << text;
  end.log_folder.clear();
  EXPECT_NE(judge(end).text.find("#0 f()"), std::string::npos) << "there is no log to have it";
  end.log_folder = "logs";
  first.status = {0, SIGSEGV, true};
  first.last_stderr = "";
  first.words =
      "fatal signal SIGSEGV at address 0x0\nthe native stack:\n  #0 /bin/x 0x12\n  #1 g()+0x4 in /bin/x 0x13\n";
  EXPECT_NE(judge(end).text.find("> fatal signal SIGSEGV at address 0x0\ncohort:   >   #1 g()+0x4 in /bin/x 0x13\n"),
            std::string::npos)
      << judge(end).text;
  EXPECT_EQ(judge(end).text.find("wrote nothing"), std::string::npos);
}

TEST(Verdict, AnImportThatIsMissingIsNamed) {
  JobEnd end = two_ranks(0, 1);
  end.endings[0].status = {1, 0, false};
  end.endings[0].last_stderr = "AssertionError: Unknown backend type cohort\n";
  EXPECT_NE(judge(end).text.find("`import cohort` before init_process_group"), std::string::npos) << judge(end).text;
}

TEST(Verdict, AServerMayDieOfWhatItWasAskedToEndBy) {
  JobEnd end = two_ranks(0, 0);
  end.roles.servers = 2;
  end.endings.push_back(server(0, 0, SIGTERM));
  end.endings.push_back(server(1, 128 + SIGTERM, 0));  // a shell's
  for (Ending& one : end.endings) one.asked = one.role == Role::Server;
  EXPECT_EQ(judge(end).status, 0) << judge(end).text;
  EXPECT_EQ(judge(end).text, "");
  // The data that it had to save then may be lost.
  end.endings[3].status = {3, 0, false};
  EXPECT_EQ(judge(end).status, 3);
  EXPECT_NE(judge(end).text.find("it had been asked to end"), std::string::npos) << judge(end).text;
}

TEST(Verdict, AFailureBesideARequeueIsAFailure) {
  const Verdict verdict = judge(two_ranks(75, 3));
  EXPECT_EQ(verdict.status, 3);
  EXPECT_FALSE(verdict.requeue);
  ASSERT_TRUE(verdict.post_mortem);
  EXPECT_EQ(verdict.post_mortem->first.rank, 1);
}

TEST(Verdict, InAnElasticJobWhoHasNothingToSaveDoesNotCount) {
  JobEnd end = two_ranks(75, 0);
  end.endings[1].status.signal = SIGTERM;
  end.endings[1].asked = true;
  EXPECT_EQ(judge(end).status, 1) << "a rank that has not saved";
  JobEnd come = end;
  come.excuse_elastic_ranks();
  EXPECT_EQ(judge(come).status, 75);
  JobEnd plain = end;  // nobody speaks of the state
  plain.endings[1].last.formed_epoch = 0;
  plain.excuse_elastic_ranks();
  EXPECT_EQ(judge(plain).status, 1);
  end.endings[1].last.has_state = true;
  end.excuse_elastic_ranks();
  EXPECT_EQ(judge(end).status, 1);

  JobEnd lost = two_ranks(75, 0);
  lost.told_to_end = true;
  lost.stop_status = 143;
  lost.endings[1].status.signal = SIGKILL;
  EXPECT_EQ(judge(lost).status, 143);
  lost.excuse_elastic_ranks();
  EXPECT_EQ(judge(lost).status, 75);
}

}  // namespace
}  // namespace cohort::launch
