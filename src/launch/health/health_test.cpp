// Whether a job goes on, judged from made-up reports and a made-up clock.
#include "launch/health/health.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class Job {
 public:
  /// The last `servers` of the processes are no ranks.
  explicit Job(int size, HealthLimits limits = {}, int servers = 0)
      : size_(size),
        health_(std::vector<std::string>(static_cast<std::size_t>(size), "host"), {size - servers, servers, false},
                limits),
        muted_(static_cast<std::size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) {
      RankReport report;
      report.rank = rank;
      report.pid = 100 + rank;
      report.has_page = true;
      report.state = 'S';
      GroupReport world;
      world.id = 7;
      world.rank = rank;
      world.size = size;
      report.groups.push_back(world);
      reports_.push_back(report);
    }
  }

  RankReport& operator[](int rank) { return reports_[static_cast<std::size_t>(rank)]; }
  GroupReport& world(int rank) { return (*this)[rank].groups[0]; }
  Health& health() { return health_; }

  void comes(int rank, std::uint64_t number, bool waiting = true, const std::string& operation = "barrier()") {
    world(rank).begun = number;
    world(rank).operation = operation;
    world(rank).waiting = waiting;
    if (!waiting) world(rank).ended = number;
  }
  Health::Clock::time_point now() const { return now_; }
  void sleep(seconds time) { now_ += time; }
  void mute(int rank, bool on = true) { muted_[static_cast<std::size_t>(rank)] = on; }
  /// Lets the time pass without any change, and returns all findings.
  Health::Findings pass(seconds time, bool busy = false) {
    Health::Findings all;
    for (seconds passed(0); passed < time; passed += seconds(1)) {
      now_ += seconds(1);
      for (int rank = 0; rank < size_; ++rank) {
        if (busy && !world(rank).waiting) (*this)[rank].cpu_ms += 1000;
        if (!muted_[static_cast<std::size_t>(rank)]) health_.report((*this)[rank], now_);
      }
      Health::Findings found = health_.judge(now_);
      all.warnings.insert(all.warnings.end(), found.warnings.begin(), found.warnings.end());
      if (found.end && !all.end) all.end = found.end;
      if (all.stopped.empty() || found.stopped.empty()) all.stopped = found.stopped;  // as first found
    }
    return all;
  }

 private:
  int size_;
  Health health_;
  std::vector<bool> muted_;
  std::vector<RankReport> reports_;
  Health::Clock::time_point now_{seconds(1000)};
};

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST(Health, AWorldOfAllWaitsForNobodyWhoHasEnded) {
  Job job(3);
  job[0].forming = job[2].forming = 3;
  EXPECT_FALSE(job.pass(seconds(60)).end);  // rank 1 may come
  job.health().ended(1, job.now());
  job.mute(1);
  const auto end = job.pass(seconds(2)).end;
  ASSERT_TRUE(end);
  EXPECT_NE(end->find("rank 1 had ended with 0 before it formed the world that ranks 0,2 wait for"), std::string::npos)
      << *end;
}

TEST(Health, WhoHasBeenInAWorldIsNotMissedThere) {
  Job job(2);
  job.mute(1);
  job.health().ended(1, job.now(), 1);
  job[0].forming = 2;  // its report is older than that end
  EXPECT_FALSE(job.pass(seconds(60)).end);
  job[0].worlds = 1;  // and it waits again
  EXPECT_TRUE(job.pass(seconds(5)).end);
}

TEST(Health, AWorldOfFewerMayNotNeedTheOneThatHasEnded) {
  Job job(3);
  job.mute(1);
  job.health().ended(1, job.now());
  job[0].forming = job[2].forming = 2;
  EXPECT_FALSE(job.pass(seconds(60)).end);
}

TEST(Health, SaysWhoHasWaitedHowLong) {
  Job job(3);
  EXPECT_EQ(job.health().waiting_times(), "");
  job.world(0).waited_ns = 2'500'000'000;
  job.world(0).longest_ns = 2'000'000'000;
  job.world(0).longest_number = 17;
  job.pass(seconds(1));
  EXPECT_EQ(job.health().waiting_times(),
            "waited for others in collectives: rank 0: 2.5 s (longest 2 s, operation 17)");
  // A wait that has not ended counts, too.
  job.comes(0, 18);
  job.comes(1, 17, false);
  job.pass(seconds(1));  // now it is seen to wait
  job.pass(seconds(45));
  EXPECT_EQ(job.health().waiting_times(),
            "waited for others in collectives: rank 0: 47.5 s (longest 45 s, operation 18)");
}

void waits_by_name(RankReport& report, const std::string& name) {
  report.named.waiting = true;
  report.named.name = name;
}

TEST(Health, RanksThatWaitForDifferentNamesEndTheJob) {
  Job job(2);
  waits_by_name(job[0], "a");
  waits_by_name(job[1], "b");
  const auto found = job.pass(seconds(15));
  ASSERT_TRUE(found.end);
  EXPECT_NE(found.end->find("rank 0 (host, pid 100) waits for 'a' (by name); rank 1 (host, pid 101) waits for 'b'"),
            std::string::npos)
      << *found.end;
}

TEST(Health, ANameWaitsForNobodyWhileSomebodyIsElsewhereOrItIsCarriedOut) {
  Job elsewhere(3);
  waits_by_name(elsewhere[0], "a");
  elsewhere.comes(2, 1);  // and that one waits for rank 0
  EXPECT_FALSE(elsewhere.pass(seconds(25)).end) << "rank 1 may bring it";
  Job under_way(2);
  for (int rank = 0; rank < 2; ++rank) {
    waits_by_name(under_way[rank], "a");
    under_way.comes(rank, 5);
  }
  EXPECT_FALSE(under_way.pass(seconds(25)).end) << "a slow network";
}

TEST(Health, ARankThatIsElsewhereIsNamedAtDoubledIntervalsAndGivenUpAtTheLimit) {
  Job job(3);
  job.comes(0, 4);
  job.comes(2, 4);
  job.comes(1, 3, false);
  const auto first = job.pass(seconds(100), true);
  ASSERT_EQ(first.warnings.size(), 2u);  // after 30 and 60 s
  EXPECT_TRUE(contains(first.warnings[0].text,
                       "ranks 0,2 have waited for 30 s in barrier(), operation 4 for rank 1 (host, pid 101)"))
      << first.warnings[0].text;
  EXPECT_FALSE(first.end);
  // A rank without a sign of life is in no deadlock either, since it waits for nobody.
  const auto second = job.pass(seconds(1650));
  EXPECT_FALSE(second.end);
  EXPECT_EQ(second.warnings.size(), 4u);  // 120, 240, 480, 960
  const auto third = job.pass(seconds(60));
  ASSERT_TRUE(third.end);
  EXPECT_TRUE(contains(*third.end, "rank 1 (host, pid 101) did not call barrier(), operation 4 within")) << *third.end;
}

TEST(Health, WhoComesAfterAllIsForgiven) {
  Job job(2);
  job.comes(0, 1);
  EXPECT_EQ(job.pass(seconds(40), true).warnings.size(), 1u);
  job.comes(0, 1, false);
  job.comes(1, 1, false);
  EXPECT_TRUE(job.pass(seconds(5)).warnings.empty());
  job.comes(0, 2);
  EXPECT_TRUE(job.pass(seconds(29)).warnings.empty());
  EXPECT_EQ(job.pass(seconds(10)).warnings.size(), 1u);
}

TEST(Health, RanksThatWaitForEachOtherEndTheJobSoon) {
  Job job(3);
  // Rank 0 waits for a message of rank 1, which is in a collective that rank 0 has not reached; rank 2 is elsewhere.
  job.world(0).message = "recv(float32[4])";
  job.world(0).peer = 1;
  job.comes(1, 1);
  const auto early = job.pass(seconds(9));
  EXPECT_FALSE(early.end);
  const auto late = job.pass(seconds(5));
  ASSERT_TRUE(late.end);
  EXPECT_TRUE(contains(*late.end, "rank 0 (host, pid 100) waits in recv(float32[4]) for rank 1")) << *late.end;
  EXPECT_TRUE(contains(*late.end, "rank 1 (host, pid 101) waits in barrier(), operation 1 for ranks 0,2")) << *late.end;
  EXPECT_FALSE(contains(*late.end, "rank 2 (")) << *late.end;
}

TEST(Health, WhoIsSeenBetweenTwoSlicesOfAWaitStillWaits) {
  Job job(2);
  job.world(0).message = "recv(float32[4])";
  job.world(0).peer = 1;
  job.comes(1, 1);
  job.pass(seconds(5));
  job.world(1).waiting = false;
  job.pass(seconds(1));
  job.world(1).waiting = true;
  EXPECT_TRUE(job.pass(seconds(6)).end);
}

TEST(Health, TheTimeInWhichNobodyLookedDoesNotCount) {
  Job job(2);
  job.world(0).message = "recv(float32[4])";
  job.world(0).peer = 1;
  job.comes(1, 1);
  EXPECT_FALSE(job.pass(seconds(5)).end);
  job.sleep(seconds(3600));
  EXPECT_FALSE(job.pass(seconds(8)).end);
  EXPECT_TRUE(job.pass(seconds(5)).end);
}

TEST(Health, ItIsNoDeadlockWhileOneOfThemMovesOrComputes) {
  Job job(2);
  job.world(0).message = "recv(float32[4])";
  job.world(0).peer = 1;
  job.comes(1, 1);
  for (int i = 0; i < 40; ++i) {
    job[1].cpu_ms += 300;
    EXPECT_FALSE(job.pass(seconds(1)).end);
  }
  for (int i = 0; i < 10; ++i) {
    job.world(0).message_number += 1;
    EXPECT_FALSE(job.pass(seconds(5)).end);
  }
  HealthLimits never;
  never.deadlock = seconds(0);
  Job other(2, never);
  other.world(0).message = "recv(float32[4])";
  other.world(0).peer = 1;
  other.comes(1, 1);
  EXPECT_FALSE(other.pass(seconds(100)).end);
}

TEST(Health, ARankThatHasEndedIsNotWaitedForByTheJudge) {
  Job job(2);
  job.comes(0, 1);
  job.health().ended(1, job.now());
  const auto found = job.pass(seconds(100));
  EXPECT_TRUE(found.warnings.empty());  // whoever waits for it finds out by itself
  EXPECT_FALSE(found.end);
}

TEST(Health, AStoppedRankIsNamedAfterSecondsAndEndsTheJobAfterAMinute) {
  Job job(2);
  job[1].state = 'T';
  job.comes(0, 1);
  const auto found = job.pass(seconds(59));
  ASSERT_EQ(found.warnings.size(), 1u);
  EXPECT_TRUE(contains(found.warnings[0].text, "rank 1 (host, pid 101) has been stopped for 5 s"))
      << found.warnings[0].text;
  EXPECT_TRUE(contains(found.warnings[0].text, "kill -CONT 101"));
  EXPECT_TRUE(contains(found.warnings[0].text, "at 60 s the job ends"));
  EXPECT_TRUE(found.stopped.empty());
  const auto later = job.pass(seconds(3));
  ASSERT_EQ(later.stopped.size(), 1u);
  EXPECT_EQ(later.stopped[0].process, 1);
  EXPECT_EQ(later.stopped[0].why, "rank 1 (host, pid 101) has been stopped for 60 s");
  EXPECT_FALSE(later.stopped[0].with_its_host);
  job.health().left(1);
  EXPECT_EQ(job.pass(seconds(3)).stopped.size(), 1U) << "the others wait for it until they have gone on without it";
  job.health().ended(1, job.now());
  EXPECT_TRUE(job.pass(seconds(3)).stopped.empty());

  HealthLimits limits;
  limits.elastic = true;
  Job again(2, limits);
  again[1].state = 'T';
  const auto warned = again.pass(seconds(50)).warnings;
  ASSERT_EQ(warned.size(), 1u);
  EXPECT_TRUE(contains(warned[0].text, "at 60 s it is killed where the others can go on without it, and else the job "))
      << warned[0].text;
  again[1].state = 'S';
  again.pass(seconds(2));
  again[1].state = 'T';
  EXPECT_TRUE(again.pass(seconds(50)).stopped.empty());
}

TEST(Health, AnAgentThatSaysNothingIsNamedAfterSecondsAndEndsTheJobAfterAMinute) {
  Job job(3);
  job.comes(0, 2);
  job.comes(1, 2);
  job.comes(2, 1);  // waits as well, when it is heard last
  job.pass(seconds(2));
  job.mute(1);
  job.mute(2);
  EXPECT_TRUE(job.pass(seconds(3)).warnings.empty());
  const auto found = job.pass(seconds(40));
  ASSERT_EQ(found.warnings.size(), 1u);
  EXPECT_TRUE(contains(found.warnings[0].text, "nothing has come from the agent of host (ranks 1-2) for 5 s"))
      << found.warnings[0].text;
  EXPECT_TRUE(found.stopped.empty());
  job.mute(1, false);
  job.mute(2, false);
  EXPECT_TRUE(job.pass(seconds(3)).warnings.empty());
  job.mute(2);
  const auto later = job.pass(seconds(70));
  ASSERT_FALSE(later.stopped.empty());
  EXPECT_TRUE(later.stopped[0].with_its_host);
  EXPECT_TRUE(contains(later.stopped[0].why, "nothing has come from the agent of host (rank 2) for 60 s"))
      << later.stopped[0].why;

  HealthLimits limits;
  limits.elastic = true;
  limits.stopped_end = seconds(2);
  Job elastic(2, limits);
  elastic.mute(1);
  const auto silent = elastic.pass(seconds(6));
  ASSERT_EQ(silent.stopped.size(), 1u);
  EXPECT_EQ(silent.stopped[0].process, 1);
  EXPECT_TRUE(silent.stopped[0].with_its_host);
  ASSERT_EQ(silent.warnings.size(), 1u);
  EXPECT_TRUE(contains(silent.warnings[0].text, "at 5 s the others go on without it where they can, and else the job "))
      << silent.warnings[0].text;
}

TEST(Health, AnAgentThatHasNeverSaidAnythingIsNamedAsWell) {
  Job job(2);
  job.mute(1);
  const auto found = job.pass(seconds(70));
  EXPECT_EQ(found.warnings.size(), 1u);
  ASSERT_FALSE(found.stopped.empty());
  EXPECT_TRUE(found.stopped[0].with_its_host);
  EXPECT_TRUE(contains(found.stopped[0].why, "nothing has come from the agent of host (rank 1) for 60 s"))
      << found.stopped[0].why;
}

TEST(Health, AnAgentThatSaysNothingAfterItsLastRankIsNamedAsWell) {
  Job job(2);
  for (const int rank : {0, 1}) {
    job.mute(rank);
    job.health().ended(rank, job.now());
    EXPECT_TRUE(job.pass(seconds(3)).warnings.empty());
  }
  const auto found = job.pass(seconds(60));
  ASSERT_EQ(found.warnings.size(), 1u);
  EXPECT_TRUE(contains(found.warnings[0].text, "nothing has come from the agent of host (ranks 0-1) for 5 s"));
  ASSERT_FALSE(found.stopped.empty());
  EXPECT_TRUE(found.stopped[0].with_its_host);
  EXPECT_TRUE(contains(found.stopped[0].why, "nothing has come from the agent of host (ranks 0-1) for 60 s"))
      << found.stopped[0].why;

  // An agent that reports nothing about its ranks is at work: the ranks may take long to free their memory.
  Job busy(2);
  for (const int rank : {0, 1}) {
    busy.mute(rank);
    busy.health().ended(rank, busy.now());
  }
  for (int second = 0; second < 120; ++second) {
    busy.health().heard_of_host({0, 1}, busy.now());
    const auto at_work = busy.pass(seconds(1));
    EXPECT_TRUE(at_work.warnings.empty());
    EXPECT_FALSE(at_work.end);
  }
  EXPECT_EQ(busy.pass(seconds(6)).warnings.size(), 1u);

  // A host that has said that nothing is left need not report any more.
  Job over(2);
  over.health().ended(0, over.now());
  over.health().ended(1, over.now());
  over.mute(0);
  over.mute(1);
  over.health().host_ended({0, 1});
  const auto nothing = over.pass(seconds(120));
  EXPECT_TRUE(nothing.warnings.empty());
  EXPECT_FALSE(nothing.end);
}

TEST(Health, ASlowRankIsNamedOnce) {
  Job job(4);
  // A step takes 100 ms, of which the fast ranks wait 60.
  const auto steps = [&](seconds time) {
    std::vector<Warning> notices;
    for (seconds passed(0); passed < time; passed += seconds(1)) {
      for (int rank = 0; rank < 4; ++rank) {
        job[rank].step += 10;
        if (rank != 2) job.world(rank).waited_ns += 600'000'000;
      }
      const auto found = job.pass(seconds(1), true);
      notices.insert(notices.end(), found.warnings.begin(), found.warnings.end());
    }
    return notices;
  };
  EXPECT_TRUE(steps(seconds(3)).empty());  // windows enough, but not long enough
  const auto notices = steps(seconds(20));
  ASSERT_EQ(notices.size(), 1u);
  EXPECT_TRUE(contains(notices[0].text, "rank 2 (host, pid 102) is slow: 100 ms of its own work per step"))
      << notices[0].text;
  EXPECT_TRUE(contains(notices[0].text, "median of the ranks is 40 ms")) << notices[0].text;
}

TEST(Health, ServersAreInNoWorldAndMayBeStoppedLikeAnybody) {
  Job job(4, {}, 2);
  job[2].groups.clear();
  job[3].groups.clear();
  job[3].state = 'T';
  // Both ranks wait for each other in operations matched by name, and not for the servers.
  for (const int rank : {0, 1}) {
    job[rank].named.waiting = true;
    job[rank].named.name = "grad";
  }
  const auto found = job.pass(seconds(12));
  ASSERT_TRUE(found.end);
  EXPECT_TRUE(contains(*found.end, "nothing can go on: rank 0 (host, pid 100) waits for 'grad'")) << *found.end;
  ASSERT_EQ(found.warnings.size(), 1u);
  EXPECT_TRUE(contains(found.warnings[0].text, "server 1 (host, pid 103) has been stopped")) << found.warnings[0].text;
  EXPECT_FALSE(found.warnings[0].rank);
  EXPECT_EQ(folded(job.health().doing_now(), {2, 2, false})[1], "server 0: running");
}

TEST(Health, TheOverviewFoldsRanksThatDoTheSame) {
  Job job(5);
  for (int rank = 0; rank < 4; ++rank) job.comes(rank, 9, true, "all_reduce(float32[10], sum)");
  for (int rank = 0; rank < 4; ++rank) job[rank].step = 3;
  job.comes(4, 8, false);
  job.pass(seconds(1));
  const auto lines = folded(job.health().doing_now(), {5, 0, false}, 1);
  ASSERT_EQ(lines.size(), 2u);
  EXPECT_EQ(lines[0], "ranks 0,2-3: waiting in all_reduce(float32[10], sum), operation 9, step 3");
  EXPECT_EQ(lines[1], "rank 4: outside collectives after barrier(), operation 8");
}

using std::chrono::milliseconds;
using std::chrono::seconds;

/// Two ranks that report once a second.
class Progress {
 public:
  explicit Progress(const StepLimits& limits = {}) : watch_(limits) {}

  std::vector<Warning> steps(int number, milliseconds each) {
    std::vector<Warning> all;
    for (int i = 0; i < number; ++i) {
      now_ += each;
      ++step_;
      if (now_ - looked_ >= seconds(1)) add(all);
    }
    return all;
  }
  std::vector<Warning> nothing(seconds time) {
    std::vector<Warning> all;
    for (seconds passed(0); passed < time; passed += seconds(1)) {
      now_ += seconds(1);
      add(all);
    }
    return all;
  }
  StepWatch& watch() { return watch_; }
  RankReport report(int rank) const {
    RankReport report;
    report.rank = rank;
    report.step = step_;
    return report;
  }
  void sleep(seconds time) { now_ += time; }
  StepWatch::Clock::time_point now() const { return now_; }

 private:
  void add(std::vector<Warning>& all) {
    looked_ = now_;
    for (int rank = 0; rank < 2; ++rank) watch_.report(report(rank), now_);
    for (Warning& warning : watch_.judge(now_)) all.push_back(std::move(warning));
  }

  StepWatch watch_;
  std::int64_t step_ = 0;
  StepWatch::Clock::time_point now_{seconds(1000)}, looked_{};
};

TEST(StepWatch, StepsThatTakeTwiceAsLongAreToldOnce) {
  Progress run;
  EXPECT_TRUE(run.steps(200, milliseconds(100)).empty());
  EXPECT_TRUE(run.steps(200, milliseconds(190)).empty()) << "not twice as long";
  EXPECT_TRUE(run.steps(200, milliseconds(100)).empty());
  const auto slow = run.steps(100, milliseconds(350));
  ASSERT_EQ(slow.size(), 1U);
  EXPECT_EQ(slow[0].kind, WarningKind::StepTime);
  EXPECT_NE(slow[0].text.find("a step takes 350 ms, "), std::string::npos) << slow[0].text;
  EXPECT_GT(*slow[0].step, 600);
  EXPECT_TRUE(run.steps(50, milliseconds(100)).empty());
  EXPECT_EQ(run.steps(100, milliseconds(400)).size(), 1U) << "again, after it was well";
}

TEST(StepWatch, AnEvaluationNowAndThenIsNoSlowStep) {
  Progress run;
  for (int epoch = 0; epoch < 10; ++epoch) {
    EXPECT_TRUE(run.steps(100, milliseconds(100)).empty());
    EXPECT_TRUE(run.nothing(seconds(60)).empty());
  }
}

TEST(StepWatch, AStandstillIsToldOnce) {
  Progress run;
  EXPECT_TRUE(run.nothing(seconds(2000)).empty()) << "it counts no steps";
  EXPECT_TRUE(run.steps(20, milliseconds(100)).empty());
  EXPECT_TRUE(run.nothing(seconds(590)).empty());
  const auto still = run.nothing(seconds(1000));
  ASSERT_EQ(still.size(), 1U);
  EXPECT_EQ(still[0].kind, WarningKind::NoStep);
  EXPECT_EQ(still[0].step, 20);
  EXPECT_TRUE(run.steps(20, milliseconds(100)).empty());
  EXPECT_EQ(run.nothing(seconds(700)).size(), 1U) << "once more, after it went on";
  for (int rank = 0; rank < 2; ++rank) run.watch().ended(rank);
  run.sleep(seconds(1));
  EXPECT_TRUE(run.watch().judge(run.now() + seconds(5000)).empty()) << "nobody runs";
  Progress never({.no_step = seconds(0)});
  never.steps(20, milliseconds(100));
  EXPECT_TRUE(never.nothing(seconds(5000)).empty());
}

TEST(StepWatch, WhileTheLauncherDidNotRunNothingIsLate) {
  Progress run;
  run.steps(20, milliseconds(100));
  run.sleep(seconds(3600));
  EXPECT_TRUE(run.nothing(seconds(500)).empty());
}

TEST(StepWatch, ALossThatIsNoNumberIsToldOnceForEachRank) {
  Progress run;
  RankReport report = run.report(1);
  report.not_finite = "train_loss is NaN";
  report.not_finite_step = 7;
  for (int i = 0; i < 3; ++i) run.watch().report(report, run.now());
  const auto found = run.watch().judge(run.now());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, WarningKind::NotFinite);
  EXPECT_EQ(found[0].rank, 1);
  EXPECT_EQ(found[0].step, 7);
  EXPECT_TRUE(found[0].text.starts_with("train_loss is NaN at step 7, reported by rank 1")) << found[0].text;
}

TEST(StepWatch, DataThatANetworkDropsIsToldWithItsHost) {
  Progress run;
  EXPECT_TRUE(run.watch().judge(run.now()).empty());
  const auto lose = [&](int rank, LossReport losses) {
    RankReport report = run.report(rank);
    report.losses = std::move(losses);
    run.watch().report(report, run.now());
  };
  run.sleep(seconds(10));
  lose(0, {100, 10, 2000, "c"});
  lose(1, {200, 31, 2600, "c"});
  lose(2, {900, 1, 200, "b"});
  EXPECT_TRUE(run.watch().judge(run.now()).empty()) << "within the window";
  run.sleep(seconds(20));
  const auto found = run.watch().judge(run.now());
  ASSERT_EQ(found.size(), 1U);
  EXPECT_EQ(found[0].kind, WarningKind::LostData);
  EXPECT_TRUE(
      found[0].text.starts_with("the network drops data for host c: in 30 s 300 segments were sent again by 2 of "
                                "the ranks, 41 time-outs passed, and connections of one waited 2.6 s for that"))
      << found[0].text;
  // Counts of later windows are differences; a process in the rank's place counts from 0.
  run.sleep(seconds(30));
  lose(1, {210, 32, 2700, "c"});
  EXPECT_TRUE(run.watch().judge(run.now()).empty());
  run.sleep(seconds(30));
  lose(1, {5, 9, 1900, "c"});
  const auto again = run.watch().judge(run.now());
  ASSERT_EQ(again.size(), 1U);
  EXPECT_NE(again[0].text.find("5 segments were sent again by 1 of the ranks"), std::string::npos) << again[0].text;
}

TEST(Repeats, EachKindAndRankComesAgainLaterAndLater) {
  Repeats repeats;
  const Warning late{.kind = WarningKind::LateRank, .text = "a", .rank = 1, .step = 3};
  int told = 0;
  for (int second = 0; second < 36'000; ++second) told += repeats.lets_through(late, second) ? 1 : 0;
  // At 0, 1, 3, 7, 15, 31, 63 and 123 minutes, then each hour.
  EXPECT_EQ(told, 15);
  EXPECT_TRUE(repeats.lets_through({.kind = WarningKind::LateRank, .text = "a", .rank = 2, .step = {}}, 36'000));
  EXPECT_TRUE(repeats.lets_through({.kind = WarningKind::Stopped, .text = "a", .rank = 1, .step = {}}, 36'000));
  for (int rank = 10; rank < 10'000; ++rank)
    (void)repeats.lets_through({.kind = WarningKind::Stopped, .text = "", .rank = rank, .step = {}}, 0);
  EXPECT_FALSE(repeats.lets_through({.kind = WarningKind::DiskFull, .text = "a", .rank = {}, .step = {}}, 1e9))
      << "bounded";
}

TEST(Warning, IsALineOfJson) {
  const std::string line =
      warning_line({.kind = WarningKind::NoStep, .text = "a \"b\"\n\xFF", .rank = {}, .step = 3}, 12.3456);
  EXPECT_TRUE(line.ends_with("\n"));
  EXPECT_EQ(line.find('\n'), line.size() - 1);
  const auto read = nlohmann::json::parse(line);
  EXPECT_EQ(read["event"], "warning");
  EXPECT_EQ(read["kind"], "no_step");
  EXPECT_EQ(read["time"], 12.346);
  EXPECT_EQ(read["step"], 3);
  EXPECT_FALSE(read.contains("rank"));
}

}  // namespace
}  // namespace cohort::launch
