#include "launch/membership/membership.h"

#include <gtest/gtest.h>

#include <csignal>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using How = event::Ended::How;

PlannedHost planned(const std::string& name, int index, int ranks, int first = 0) {
  PlannedHost host;
  host.name = name;
  host.index = index;
  host.slots = host.ranks = host.local_ranks = ranks;
  host.first_rank = first;
  return host;
}

/// Returns a plan of the hosts h0, h1, ..., with this many workers on each.
Plan plan_with(const std::vector<int>& ranks, int spares = 0) {
  Plan plan;
  for (const int count : ranks) {
    plan.hosts.push_back(
        planned(fmt::format("h{}", plan.hosts.size()), static_cast<int>(plan.hosts.size()), count, plan.world_size));
    plan.world_size += count;
  }
  plan.spares = spares;
  return plan;
}

class MembershipTest : public testing::Test {
 protected:
  void begin(Membership::Options options, const Plan& plan) {
    options.grace = seconds(5);
    options.preempt_grace = seconds(30);
    options.start_timeout = seconds(60);
    options.timeout = seconds(600);
    membership_.emplace(options, plan, Membership::Past());
    on(event::Ordered{});
    on(event::Running{static_cast<int>(plan.hosts.size()), {}});
  }
  Membership::Answer on(const Event& event) {
    Membership::Answer answer = membership_->on(event, now_);
    said_.clear();
    epochs_.clear();
    ended_.reset();
    for (const Action& action : answer.actions) {
      if (const auto* say = std::get_if<action::Say>(&action)) said_ += say->text + "\n";
      if (const auto* announce = std::get_if<action::Announce>(&action)) {
        said_ += announce->text + "\n";
        epochs_.push_back(announce->members);
      }
      if (const auto* end = std::get_if<action::EndJob>(&action)) ended_ = *end;
    }
    return answer;
  }
  template <typename A>
  static std::vector<A> those(const Membership::Answer& answer) {
    std::vector<A> found;
    for (const Action& action : answer.actions) {
      if (const A* one = std::get_if<A>(&action)) found.push_back(*one);
    }
    return found;
  }
  Membership::Answer end(int worker, How how = How::Killed) {
    return on(event::Ended{worker, how, how == How::Killed ? "killed by SIGKILL" : "exit code 5"});
  }
  Membership::Answer report(int worker, std::int64_t formed, bool has_state) {
    return on(event::Reported{{{worker, false, false, formed, has_state}}});
  }
  Membership::Answer arrive(int worker) { return on(event::Reported{{{worker, true, true}}}); }
  /// Adds a host, which comes with one worker of this number.
  void come(const std::string& name, int agent, int worker) {
    on(event::Add{planned(name, 0, 1)});
    const auto joined = on(event::AgentJoined{agent});
    ASSERT_EQ(those<action::StartRanks>(joined).size(), 1U);
    ASSERT_EQ(those<action::StartRanks>(joined)[0].first, worker);
    on(event::AgentStarted{agent});
    arrive(worker);
  }
  Membership::Answer after(milliseconds time) {
    now_ += time;
    return on(event::Tick{});
  }
  std::vector<int> members() const {
    std::vector<int> all;
    for (const auto& member : membership_->current().members) all.push_back(member.worker);
    return all;
  }
  std::optional<Membership> membership_;
  Membership::Time now_{seconds(1000)};
  std::string said_;
  std::vector<rendezvous::Membership> epochs_;
  std::optional<action::EndJob> ended_;
};

TEST_F(MembershipTest, GoesOnWithoutThoseThatFail) {
  begin({.least = 2}, plan_with({2, 2}));
  EXPECT_EQ(membership_->current().epoch, 0U);
  end(1);
  EXPECT_EQ(said_,
            "worker 1 (h0) was killed by SIGKILL; epoch 1 goes on with 3 of 4 workers (ranks 0-2 are workers "
            "0,2-3)\n");
  EXPECT_EQ(members(), (std::vector<int>{0, 2, 3}));
  EXPECT_TRUE(those<action::Excuse>(end(0, How::Failed))[0].excused);
  EXPECT_EQ(membership_->current().members.front().host_number, 0) << "hosts are numbered anew";
  const auto last = end(2);
  EXPECT_NE(said_.find("the job cannot go on: 1 worker is left, and 2 are wanted"), std::string::npos) << said_;
  // Nobody has formed a world since, so the earlier failures may be why the last worker has failed.
  ASSERT_EQ(those<action::Excuse>(last).size(), 4U);
  EXPECT_FALSE(those<action::Excuse>(last).back().excused);
  EXPECT_TRUE(membership_->over());
}

TEST_F(MembershipTest, WhoHasOnlyComeDoesNotDecideHowAJobThatIsToldToEndEnds) {
  begin({.least = 1, .others_may_come = true}, plan_with({2}));
  report(0, 0, true);
  come("b", 1, 2);
  on(event::Add{planned("c", 0, 1)});
  on(event::AgentJoined{2});
  on(event::AgentStarted{2});
  EXPECT_EQ(members(), (std::vector<int>{0, 1, 2}));
  on(event::Stopping{});
  for (const int newcomer : {2, 3}) {
    const auto excused = those<action::Excuse>(end(newcomer));
    ASSERT_EQ(excused.size(), 1U) << newcomer << ": it cannot save yet";
    EXPECT_EQ(excused[0].worker, newcomer);
    EXPECT_TRUE(excused[0].excused);
  }
  EXPECT_TRUE(those<action::Excuse>(end(0)).empty()) << "a member";
  EXPECT_TRUE(those<action::Excuse>(end(1, How::Asked)).empty());
}

TEST_F(MembershipTest, WaitsForOthersBelowTheLeast) {
  begin({.least = 2, .most = 3, .others_may_come = true}, plan_with({1, 1}));
  end(0);
  EXPECT_NE(said_.find("1 worker is left, and 2 are wanted: waiting up to 600 s for hosts"), std::string::npos);
  come("c", 2, 2);
  EXPECT_EQ(members(), (std::vector<int>{1, 2}));
  end(2);
  after(seconds(600));
  ASSERT_TRUE(ended_);
  EXPECT_EQ(ended_->status, 75);
}

// The worker is counted, but it is in no epoch yet.
TEST_F(MembershipTest, ForgetsWorkersThatEndWhileTheJobWaitsForMore) {
  for (const char* const how : {"killed", "lost", "drained", "75"}) {
    begin({.least = 3, .others_may_come = true}, plan_with({1, 2}));
    on(event::AgentLost{1, "gone"});
    come("c", 2, 3);
    EXPECT_EQ(said_, "host c has come with worker 3; waiting for more hosts\n");
    if (how[0] == 'k') end(3);
    if (how[0] == '7') end(3, How::Notice);
    if (how[0] == 'l') on(event::AgentLost{2, "gone"});
    if (how[0] == 'd') on(event::TakeAway{"c"});
    EXPECT_NE(said_, "") << how;
    come("d", 3, 4);
    EXPECT_EQ(membership_->current().epoch, 0U) << how << ": 2 of 3 are there";
    come("e", 4, 5);
    EXPECT_EQ(members(), (std::vector<int>{0, 4, 5})) << how;
  }
}

TEST_F(MembershipTest, PlansLetNobodyGoThatAloneHasTheState) {
  begin({.least = 1, .others_may_come = true}, plan_with({1}));
  report(0, 0, true);
  come("b", 1, 1);
  EXPECT_EQ(members(), (std::vector<int>{0, 1}));
  EXPECT_EQ(*on(event::TakeAway{"h0"}).reply,
            "no other worker has the training's state yet: host h0 is drained once another has it");
  EXPECT_EQ(membership_->current().epoch, 1U);
  report(1, 1, false);  // it has formed the world
  EXPECT_EQ(membership_->current().epoch, 1U);
  report(1, 1, true);
  EXPECT_EQ(said_,
            "worker 0 leaves: host h0 is drained (cohort ctl); epoch 2 goes on with 1 of 2 workers (rank 0 is "
            "worker 1)\n");
}

// A signal before its step has ended would tell all ranks that the job is to end.
TEST_F(MembershipTest, WhoIsDrainedAgainWhileItLeavesIsToldNothing) {
  begin({.least = 1}, plan_with({1, 2}));
  for (const int worker : {0, 1, 2}) report(worker, 0, true);
  EXPECT_TRUE(those<action::StopRanks>(on(event::TakeAway{"h1"})).empty());
  const auto again = on(event::TakeAway{"h1"});
  EXPECT_TRUE(those<action::StopRanks>(again).empty());
  EXPECT_EQ(*again.reply, "h1 leaves");
  EXPECT_EQ(members(), (std::vector<int>{0}));
  EXPECT_FALSE(those<action::StopRanks>(on(event::TakeAway{"h1", true})).empty()) << "to be removed, it is killed";
}

// Nobody has formed a world without it when the others are lost.
TEST_F(MembershipTest, WhoLeavesIsAMemberAgainWhereTheOthersAreLost) {
  for (const char* const how : {"order", "notice", "list"}) {
    begin({.least = 1, .others_may_come = true, .asks_script = true}, plan_with({1, 1}));
    for (const int worker : {0, 1}) report(worker, 0, true);
    if (how[0] == 'o') on(event::TakeAway{"h0"});
    if (how[0] == 'l') on(event::Listed{{planned("h1", 0, 1)}});
    if (how[0] == 'n') {
      on(event::AgentNoticed{0, SIGTERM});
      after(milliseconds(200));
    }
    EXPECT_EQ(members(), (std::vector<int>{1})) << how;
    const auto lost = how[0] == 'o' ? end(1) : on(event::AgentLost{1, "gone"});
    EXPECT_NE(said_.find("; worker 0 stays after all; epoch 2 goes on with 1 of 1 workers\n"), std::string::npos)
        << how << said_;
    EXPECT_FALSE(ended_) << how;
    EXPECT_EQ(members(), (std::vector<int>{0})) << how;
    if (how[0] != 'o') {
      EXPECT_FALSE(those<action::Leaves>(lost).back().leaves);
    }
    report(0, 2, true);
    EXPECT_TRUE(those<action::StopRanks>(after(seconds(6))).empty()) << how << ": it leaves no more";
    // It leaves once another worker has the state.
    come("c", 2, 2);
    if (how[0] == 'n') continue;
    report(2, 3, true);
    EXPECT_EQ(members(), (std::vector<int>{2})) << how;
  }
}

TEST_F(MembershipTest, WhoLeavesIsAMemberAgainWhereTooFewWouldBeLeft) {
  begin({.least = 2}, plan_with({1, 1, 1}));
  for (const int worker : {0, 1, 2}) report(worker, 0, true);
  on(event::TakeAway{"h2"});
  end(1);
  EXPECT_EQ(members(), (std::vector<int>{0, 2})) << said_;
  report(0, 2, true);
  EXPECT_EQ(said_, "host h2 stays: fewer than --min-np 2 would be left\n");
}

// The worker ends by itself or has been killed, so nobody has the training.
TEST_F(MembershipTest, WhoHasLeftIsNoMemberAgain) {
  for (const bool removed : {false, true}) {
    begin({.least = 1}, plan_with({1, 1}));
    for (const int worker : {0, 1}) report(worker, 0, true);
    on(event::TakeAway{"h0", removed});
    if (!removed) report(1, 1, true);
    end(1);
    EXPECT_NE(said_.find("the job cannot go on: no worker is left"), std::string::npos) << said_;
  }
}

TEST_F(MembershipTest, ForgetsWorkersAndAgentsThatNoEpochHas) {
  begin({.least = 1, .others_may_come = true, .cooldown = std::pair(seconds(1), seconds(1))}, plan_with({1}));
  report(0, 0, true);
  int worker = 1;
  for (int i = 1; i <= 300; ++i) {
    on(event::Add{planned(fmt::format("b{}", i), 0, 1)});
    on(event::AgentJoined{i});
    on(event::AgentStarted{i});
    arrive(worker);
    for (const int one : {0, worker}) report(one, static_cast<std::int64_t>(membership_->current().epoch), true);
    if (i % 2 == 0) {
      on(event::AgentLost{i, "gone"});
    } else {
      on(event::TakeAway{fmt::format("b{}", i)});
      end(worker, How::Notice);
      on(event::AgentEmpty{i});
    }
    ++worker;
    EXPECT_LE(membership_->roster().all().size(), 3U) << i;
  }
  EXPECT_EQ(members(), (std::vector<int>{0}));
}

TEST_F(MembershipTest, AListThatIsReplacedWaitsForTheState) {
  begin({.least = 1, .others_may_come = true, .asks_script = true}, plan_with({1}));
  report(0, 0, true);
  on(event::Listed{{planned("b", 0, 1)}});
  on(event::AgentJoined{1});
  on(event::AgentStarted{1});
  arrive(1);
  on(event::Listed{{planned("b", 0, 1)}});
  EXPECT_EQ(said_, "host h0 is listed no more, and its worker 0 stays: no other has the training's state yet\n");
  on(event::Listed{{planned("b", 0, 1)}});
  EXPECT_EQ(said_, "") << "once";
  report(1, 1, true);
  EXPECT_EQ(members(), (std::vector<int>{1}));
}

TEST_F(MembershipTest, AListWithFewerSlotsLetsTheYoungestGo) {
  begin({.least = 1, .others_may_come = true, .asks_script = true}, plan_with({3}));
  on(event::Listed{{planned("h0", 0, 2)}});
  EXPECT_EQ(said_, "worker 2 leaves: host h0 is listed with 2 slots; epoch 1 goes on with 2 of 3 workers\n");
  EXPECT_TRUE(those<action::Kill>(report(0, 1, true)).empty());
  const auto late = after(seconds(5));
  ASSERT_EQ(those<action::Kill>(late).size(), 1U) << "it has not ended within its grace";
  end(2);
  on(event::Listed{{planned("h0", 0, 3)}});
  EXPECT_EQ(those<action::StartOne>(on(event::Listed{{planned("h0", 0, 4)}})).size(), 1U) << "and one before";
  on(event::Listed{{}});
  EXPECT_EQ(said_, "host h0 is listed no more, and its workers 0-1 stay: fewer than --min-np 1 would be left\n");
}

TEST_F(MembershipTest, NoticesWaitForTheStateHalfOfTheirTime) {
  for (const bool in_time : {true, false}) {
    begin({.least = 1, .others_may_come = true}, plan_with({1}));
    report(0, 0, true);
    come("b", 1, 1);
    on(event::AgentNoticed{0, SIGTERM});
    after(milliseconds(200));
    EXPECT_EQ(membership_->current().epoch, 1U);
    if (in_time) {
      report(1, 1, true);
      EXPECT_EQ(members(), (std::vector<int>{1}));
    } else {
      EXPECT_EQ(those<action::EndAsTold>(after(seconds(15))).size(), 1U);
    }
  }
}

TEST_F(MembershipTest, EndsWhereAllThatHaveTheStateAreLost) {
  begin({.least = 2, .most = 2, .spares = 2}, plan_with({2, 2}, 2));
  for (const int worker : {0, 1}) report(worker, 0, true);
  for (const int spare : {2, 3}) arrive(spare);
  end(0);
  EXPECT_NE(said_.find("worker 2 takes its place; epoch 1"), std::string::npos) << said_;
  end(1);
  EXPECT_EQ(said_, "") << "worker 2 may have got it";
  after(seconds(2));
  ASSERT_TRUE(ended_);
  EXPECT_EQ(ended_->status, 75);
  EXPECT_NE(said_.find("the job cannot go on: no worker that is left has the training's state"), std::string::npos);
}

TEST_F(MembershipTest, GoesOnWhereItIsHeardThatOneHasTheState) {
  begin({.least = 1, .most = 2, .spares = 2}, plan_with({2, 2}, 2));
  for (const int worker : {0, 1}) report(worker, 0, true);
  arrive(2);
  end(0);
  end(1);
  report(2, 1, true);
  EXPECT_EQ(members(), (std::vector<int>{2}));
  EXPECT_NE(said_.find("worker 1 (h0) was killed by SIGKILL; epoch 2"), std::string::npos) << said_;
}

// In programs that never report the state, a worker that has formed a world has it.
TEST_F(MembershipTest, CountsWorldsWhereNobodySpeaksOfTheState) {
  begin({.least = 1, .others_may_come = true}, plan_with({1}));
  report(0, 0, false);
  come("b", 1, 1);
  on(event::TakeAway{"h0"});
  EXPECT_EQ(membership_->current().epoch, 1U);
  report(1, 1, false);
  EXPECT_EQ(members(), (std::vector<int>{1}));
}

TEST_F(MembershipTest, BeginsAnewWhereThatWasAskedFor) {
  begin({.least = 1, .most = 1, .spares = 1, .restarts = true}, plan_with({1, 1}, 1));
  const auto first = end(0);
  EXPECT_FALSE(those<action::Excuse>(first)[0].excused) << "nobody has trained: it is a failure";
  begin({.least = 1, .most = 1, .spares = 1, .restarts = true}, plan_with({1, 1}, 1));
  report(0, 0, true);
  arrive(1);
  const auto lost = end(0);
  EXPECT_FALSE(ended_) << "the failure leads to another attempt";
  EXPECT_FALSE(those<action::Excuse>(lost).back().excused);
}

// First its process ends, then its connection.
TEST_F(MembershipTest, LosesAHostOnce) {
  for (const bool starts : {false, true}) {
    begin({.least = 1}, plan_with({1, 1}));
    if (starts) {
      membership_.emplace(Membership::Options{.least = 1}, plan_with({1, 1}), Membership::Past());
      on(event::Ordered{});
    }
    EXPECT_TRUE(on(event::AgentLost{1, "gone"}).taken);
    const auto again = on(event::AgentLost{1, "gone"});
    EXPECT_TRUE(again.taken);
    EXPECT_TRUE(again.actions.empty());
    EXPECT_FALSE(on(event::AgentLost{2, "none of the job's"}).taken);
  }
}

TEST_F(MembershipTest, GivesUpNewcomersAtEachPhase) {
  for (const int phase : {0, 1, 2, 3}) {
    begin({.least = 1, .others_may_come = true}, plan_with({1}));
    on(event::Add{planned("b", 0, 2)});
    if (phase > 0) on(event::AgentJoined{1});
    if (phase > 1) on(event::AgentStarted{1});
    if (phase > 2) arrive(1);
    const auto gone = on(event::TakeAway{"b"});
    const auto dropped = those<action::Drop>(gone);
    EXPECT_EQ(dropped.size(), phase < 2 ? 1U : 0U);
    if (phase < 2) {
      EXPECT_EQ(dropped[0].workers.size(), phase == 0 ? 0U : 2U);
      EXPECT_TRUE(on(event::Add{planned("b", 0, 1)}).reply->find("started on b") != std::string::npos) << "no failure";
    } else {
      EXPECT_EQ(those<action::StopRanks>(gone).size(), 1U);
    }
  }
}

TEST_F(MembershipTest, ADrainedNewcomerHasNotFailed) {
  begin({.least = 1, .others_may_come = true, .asks_script = true}, plan_with({1}));
  on(event::Add{planned("b", 0, 1)});
  on(event::TakeAway{"b"});
  on(event::Listed{{planned("h0", 0, 1)}});
  EXPECT_EQ(those<action::AddAgent>(on(event::Listed{{planned("h0", 0, 1), planned("b", 0, 1)}})).size(), 1U);
}

TEST_F(MembershipTest, LeaversAreToldOnceTheirOwnEpochIsFormed) {
  begin({.least = 1}, plan_with({1, 1, 1}));
  for (const int worker : {0, 1, 2}) report(worker, 0, true);
  end(1);
  on(event::TakeAway{"h2"});
  EXPECT_EQ(membership_->current().epoch, 2U);
  report(0, 1, true);  // the world of the epoch before
  EXPECT_TRUE(those<action::StopRanks>(after(seconds(5))).empty());
  EXPECT_EQ(those<action::Formed>(report(0, 2, true)).size(), 1U);
  EXPECT_EQ(those<action::StopRanks>(after(seconds(5))).size(), 1U);
}

TEST_F(MembershipTest, WhoHasEndedWithZeroIsInNoLaterEpoch) {
  begin({.least = 1, .others_may_come = true}, plan_with({3}));
  for (const int worker : {0, 1, 2}) report(worker, 0, true);
  end(0, How::Done);
  EXPECT_EQ(membership_->current().epoch, 0U);
  end(1);
  EXPECT_EQ(members(), (std::vector<int>{2}));
}

TEST_F(MembershipTest, WorkersThatHaveOnlyComeAreEndedOnceTheTrainingIsOver) {
  begin({.least = 1, .others_may_come = true}, plan_with({1}));
  report(0, 0, true);
  come("b", 1, 1);
  end(0, How::Done);
  EXPECT_EQ(those<action::EndWorkers>(on(event::Reported{{{1, true, false}}})).size(), 1U);
}

TEST_F(MembershipTest, WhoHasNoStateIsEndedOnceAllThatHaveItHaveSaved) {
  begin({.least = 1, .others_may_come = true}, plan_with({2}));
  report(0, 0, true);
  report(1, 0, true);
  come("b", 1, 2);
  EXPECT_EQ(members(), (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(those<action::EndWorkers>(end(0, How::Asked)).empty()) << "worker 1 saves";
  EXPECT_TRUE(those<action::EndWorkers>(end(1, How::Asked)).empty())
      << "worker 2 may have got it since its last report";
  EXPECT_EQ(those<action::EndWorkers>(arrive(2)).size(), 1U);
}

TEST_F(MembershipTest, ChangesNoMoreOftenThanItMay) {
  begin({.least = 1, .most_changes = 1}, plan_with({3}));
  end(2);
  end(1);
  EXPECT_NE(said_.find("its members have changed 1 time (--reset-limit)"), std::string::npos);
}

TEST_F(MembershipTest, StoppedWorkersAreKilledWhereTheOthersAreEnough) {
  begin({.least = 2}, plan_with({3}));
  EXPECT_EQ(those<action::Kill>(on(event::StoppedTooLong{1, seconds(7)})).size(), 1U);
  EXPECT_FALSE(on(event::StoppedTooLong{2, seconds(7)}).taken);
  end(1);
  EXPECT_EQ(said_,
            "worker 1 (h0) was stopped for 7 s and is killed; epoch 1 goes on with 2 of 3 workers (ranks 0-1 are "
            "workers 0,2)\n");
}

TEST_F(MembershipTest, TheLastOneIsKilledWhereWhoLeavesMayComeBack) {
  begin({.least = 1}, plan_with({1, 1}));
  for (const int worker : {0, 1}) report(worker, 0, true);
  on(event::TakeAway{"h0"});
  EXPECT_EQ(those<action::Kill>(on(event::StoppedTooLong{1, seconds(7)})).size(), 1U);
  end(1);
  EXPECT_EQ(members(), (std::vector<int>{0}));
  EXPECT_FALSE(on(event::StoppedTooLong{0, seconds(7)}).taken);
}

TEST(KnownHosts, RestTwiceAsLongAfterEachFailure) {
  KnownHosts hosts(std::pair(seconds(2), seconds(5)), {});
  KnownHosts::Time now{seconds(1000)};
  for (const int pause : {2, 4, 5, 5}) {
    hosts.note_failure("a", now);
    EXPECT_TRUE(hosts.may_use("b", now));
    now += seconds(pause) - seconds(1);
    hosts.note_failure("a", now);  // while it rests, so it counts as the same trouble
    EXPECT_FALSE(hosts.may_use("a", now));
    now += seconds(1);
    EXPECT_TRUE(hosts.may_use("a", now));
  }
  now += seconds(6);  // the last failure is long ago
  hosts.note_failure("a", now);
  EXPECT_TRUE(hosts.may_use("a", now + seconds(2)));
  hosts.hold("a", 0, now);
  EXPECT_TRUE(hosts.is_held("a", 0, now));
  EXPECT_FALSE(hosts.is_held("a", 0, now + seconds(2)));
  KnownHosts strict(std::nullopt, {});
  strict.note_failure("a", now);
  EXPECT_FALSE(strict.may_use("a", now + seconds(1000000)));
  strict.add(planned("a", 0, 1));
  EXPECT_TRUE(strict.may_use("a", now)) << "its user says so";
}

TEST(KnownHosts, ThatAreTakenAwayAreUsedOnceTheyAreListedAnew) {
  KnownHosts hosts({}, {});
  const KnownHosts::Time now{};
  hosts.come(planned("a", 0, 1));
  hosts.bar("a");
  hosts.list({planned("a", 0, 2), planned("b", 0, 1)});
  EXPECT_FALSE(hosts.may_use("a", now));
  hosts.list({planned("b", 0, 1)});
  EXPECT_EQ(hosts.slots_of("a"), 0);
  hosts.list({planned("a", 0, 2), planned("b", 0, 1)});
  EXPECT_TRUE(hosts.may_use("a", now));
  hosts.add(planned("c", 0, 1));
  hosts.add(planned("c", 0, 3));
  hosts.list({planned("a", 0, 2), planned("c", 0, 9)});
  ASSERT_EQ(hosts.listed().size(), 2U) << "once each";
  EXPECT_EQ(hosts.slots_of("c"), 3) << "as its user said";
  hosts.take_away("c");
  EXPECT_FALSE(hosts.may_use("c", now));
  hosts.list({});
  EXPECT_EQ(hosts.slots_of("c"), 0);
}

}  // namespace
}  // namespace cohort::launch
