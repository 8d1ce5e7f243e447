// Random schedules of everything that can happen to an elastic job: Membership decides, and the test plays agents and
// ranks that are as slow and as unlucky as they may be. The invariants are those of membership.h.
#include "launch/membership/membership.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using How = event::Ended::How;

struct TrueWorker {
  int agent = 0;
  bool runs = false;   ///< its agent has started it
  bool asked = false;  ///< it has asked by itself to be a member
  bool stopped = false, dying = false, member = false;
  bool removed = false;  ///< it has seen that the others have formed a world without it
  std::int64_t formed = -1;
  bool has_state = false;
};
struct TrueAgent {
  std::string host;
  bool joined = false, has_orders = false, lost = false, all_gone = false, told = false;
};

/// One schedule.
class Play {
 public:
  explicit Play(unsigned seed) : random_(seed) {
    Plan plan;
    const int hosts = 1 + below(3);
    for (int i = 0; i < hosts; ++i) {
      PlannedHost host;
      host.name = fmt::format("h{}", i);
      host.index = i;
      host.first_rank = plan.world_size;
      host.slots = host.ranks = host.local_ranks = 1 + below(3);
      plan.world_size += host.ranks;
      plan.hosts.push_back(host);
      agents_[i] = {host.name, true, true};
      for (int j = 0; j < host.ranks; ++j) workers_[host.first_rank + j] = {i, true};
    }
    plan.spares = below(3) == 0 ? below(plan.world_size) : 0;
    options_.least = 1 + below(plan.world_size - plan.spares);
    options_.spares = plan.spares;
    options_.most = below(2) == 0 ? 0 : plan.world_size - plan.spares + below(3);
    if (plan.spares > 0 && options_.most == 0) options_.most = plan.world_size - plan.spares;
    if (below(5) == 0) options_.most_changes = 1 + below(6);
    options_.asks_script = below(2) == 0;
    options_.restarts = below(4) == 0;
    if (below(2) == 0) options_.cooldown = std::pair(seconds(1), seconds(4));
    options_.others_may_come = options_.asks_script || options_.cooldown.has_value();
    options_.come_by_themselves = below(6) == 0;
    options_.timeout = seconds(20);
    options_.start_timeout = seconds(10);
    options_.grace = seconds(2);
    options_.preempt_grace = seconds(6);
    says_state_ = below(3) != 0;
    trains_ = below(8) != 0;
    membership_.emplace(options_, plan, Membership::Past{{}, static_cast<std::uint64_t>(below(3))});
    latest_ = membership_->current();
    for (const auto& member : latest_.members) workers_.at(member.worker).member = true;
    tell(event::Ordered{});
    while (below(6) == 0) random_event();  // while ranks start
    if (!over_) tell(running());
  }
  void run(int events) {
    for (int i = 0; i < events && !testing::Test::HasFatalFailure(); ++i) random_event();
    finish();
  }

 private:
  int below(int most) { return static_cast<int>(random_() % static_cast<unsigned>(most)); }
  event::Running running() {
    begun_running_ = true;
    event::Running event{static_cast<int>(agents_.size()), {}};
    for (const auto& [index, agent] : agents_) {
      PlannedHost host;
      host.name = agent.host;
      host.index = index;
      if (agent.all_gone && !agent.lost) event.usable.push_back(host);
    }
    return event;
  }
  template <typename Map, typename Wanted>
  auto any(Map& map, Wanted wanted) {
    std::vector<typename Map::iterator> found;
    for (auto at = map.begin(); at != map.end(); ++at) {
      if (wanted(at->second)) found.push_back(at);
    }
    return found.empty() ? map.end() : found[static_cast<std::size_t>(below(static_cast<int>(found.size())))];
  }

  // ---- what follows from decisions ----
  Membership::Answer tell(const Event& event) {
    const bool was_over = over_;
    Membership::Answer answer = membership_->on(event, now_);
    for (const Action& action : answer.actions) {
      std::visit([this, was_over](const auto& one) { carry_out(one, was_over); }, action);
    }
    return answer;
  }
  void carry_out(const action::Announce& announce, bool was_over) {
    EXPECT_FALSE(was_over || over_) << "one verdict";
    const auto& now = announce.members;
    EXPECT_EQ(now.epoch, latest_.epoch + 1);
    std::set<int> once;
    for (const auto& member : now.members) {
      EXPECT_TRUE(once.insert(member.worker).second) << "each worker counts once";
      // (It may be let go by what follows from the same event, and be forgotten.)
      const auto known = membership_->roster().all().find(member.worker);
      EXPECT_TRUE(known == membership_->roster().all().end() || known->second.running()) << member.worker;
      EXPECT_TRUE(now.epoch != membership_->current().epoch || known != membership_->roster().all().end());
    }
    for (const auto& member : latest_.members) {
      if (!once.contains(member.worker)) dropped_at_[member.worker] = now.epoch;
    }
    EXPECT_TRUE(finished_ || static_cast<int>(once.size()) >= options_.least);
    EXPECT_TRUE(options_.most == 0 || static_cast<int>(once.size()) <= options_.most);
    EXPECT_TRUE(!options_.most_changes || ++changes_ <= *options_.most_changes);
    EXPECT_TRUE(now.epoch != membership_->current().epoch ||
                membership_->roster().knows(membership_->roster().all().at(now.members.front().worker)));
    const auto read = rendezvous::decode_membership(rendezvous::encode(now));
    EXPECT_TRUE(read && *read == now);
    latest_ = now;
    for (const int worker : once) {
      const auto there = workers_.find(worker), end = workers_.end();
      const auto dropped = dropped_at_.find(worker);
      if (there == end) continue;
      there->second.member = true;
      if (dropped == dropped_at_.end()) continue;
      there->second.removed |= formed_ >= static_cast<std::int64_t>(dropped->second);
      dropped_at_.erase(dropped);
    }
  }
  void carry_out(const action::AddAgent& add, bool) { agents_[static_cast<int>(agents_.size())] = {add.host.name}; }
  void carry_out(const action::StartRanks& start, bool) {
    agents_[start.agent].has_orders = true;
    agents_[start.agent].all_gone = false;
    for (int i = 0; i < start.ranks; ++i) {
      EXPECT_TRUE(workers_.emplace(start.first + i, TrueWorker{start.agent}).second) << "numbers are given once";
      ordered_[start.agent].insert(start.first + i);
    }
  }
  void carry_out(const action::StartOne& start, bool) {
    EXPECT_TRUE(workers_.emplace(start.worker, TrueWorker{start.agent}).second);
    ones_.insert(start.worker);
  }
  void carry_out(const action::Finish& finish, bool) {
    agents_[finish.agent].all_gone = agents_[finish.agent].lost = true;
  }
  void carry_out(const action::Drop& drop, bool) {
    agents_[drop.agent].lost = agents_[drop.agent].all_gone = true;
    std::erase_if(workers_, [&](const auto& one) { return one.second.agent == drop.agent; });
    ordered_.erase(drop.agent);
    if (drop.failed) over_ = true;
  }
  void carry_out(const action::Lost& lost, bool) {
    workers_.erase(lost.worker);
    ones_.erase(lost.worker);
  }
  void carry_out(const action::Excuse& excuse, bool) {
    if (!excuse.excused) over_ = true;
  }
  void carry_out(const action::Say& say, bool) {
    // A leaving worker that the others have not gone on without may become a member again.
    if (say.text.find("the job cannot go on: no worker") == std::string::npos || finished_) return;
    for (const auto& [number, known] : membership_->roster().all()) {
      const auto there = workers_.find(number);
      if (!known.running() || !known.leaving || !membership_->roster().knows(known) || there == workers_.end())
        continue;
      if (!there->second.member || there->second.dying || !there->second.runs) continue;
      const auto dropped = dropped_at_.find(number);
      EXPECT_TRUE(dropped == dropped_at_.end() ||
                  membership_->roster().latest_formed() >= static_cast<std::int64_t>(dropped->second) ||
                  options_.most_changes)
          << "worker " << number << " has the training's state";
    }
  }
  void carry_out(const action::StopRanks& stop, bool) {
    // SIGTERM within a step makes all ranks end the job. (A rank that has been in no world yet passes it on to nobody.)
    for (const auto& [number, worker] : workers_) {
      if (stop.signal != SIGTERM || worker.agent != stop.agent || !worker.runs || worker.formed < 0 || worker.dying)
        continue;
      const auto dropped = dropped_at_.find(number);
      EXPECT_TRUE(dropped != dropped_at_.end() && formed_ >= static_cast<std::int64_t>(dropped->second))
          << "worker " << number << " is told to end while it takes part in a step";
    }
    for (auto& [number, worker] : workers_) worker.dying = worker.dying || worker.agent == stop.agent;
  }
  void carry_out(const action::Kill& kill, bool) {
    if (const auto found = workers_.find(kill.worker); found != workers_.end()) found->second.dying = true;
  }
  void carry_out(const action::EndWorkers&, bool) {
    for (auto& [number, worker] : workers_) worker.dying = true;
  }
  void carry_out(const action::EndJob& end, bool) {
    EXPECT_FALSE(std::exchange(ended_, true)) << "one verdict";
    EXPECT_FALSE(end.why.empty());
    over_ = true;
  }
  void carry_out(const action::EndAsTold&, bool) { over_ = true; }
  template <typename A>
  void carry_out(const A&, bool) {}  // texts and notices need nothing here

  // ---- what ranks do by themselves ----
  /// Forms the latest epoch's world. After that all members have the state, if one had it or nobody has begun.
  void form() {
    std::vector<TrueWorker*> members;
    for (const auto& member : latest_.members) {
      const auto found = workers_.find(member.worker);
      if (found == workers_.end() || !found->second.runs || found->second.stopped || found->second.removed) return;
      members.push_back(&found->second);
    }
    for (TrueWorker* const member : members) member->formed = static_cast<std::int64_t>(latest_.epoch);
    formed_ = static_cast<std::int64_t>(latest_.epoch);
    if (!trains_) return;
    const bool given = std::ranges::any_of(members, [](const TrueWorker* one) { return one->has_state; });
    EXPECT_TRUE(given || !begun_) << "fresh workers begin a training anew that others had begun";
    // A member may be lost before. (Where ranks do not report the state, that is not known.)
    if (says_state_ && below(3) == 0) return;
    for (TrueWorker* const member : members) member->has_state = true;
    begun_ = true;
  }
  event::Reported::One report_of(int number, const TrueWorker& worker) {
    const bool member = rendezvous::place_of(latest_, number).has_value();
    return {number, worker.asked || below(4) == 0, !member && worker.asked, worker.formed,
            says_state_ && worker.has_state};
  }
  void end(int number, How how) {
    const TrueWorker worker = workers_.at(number);
    const bool known = !worker.runs;
    workers_.erase(number);
    if (known) return;
    tell(event::Ended{number, how, "killed by SIGKILL", worker.formed, says_state_ && worker.has_state});
    look_for_empty(worker.agent);
  }
  void look_for_empty(int agent) {
    TrueAgent& one = agents_[agent];
    const bool any = std::ranges::any_of(workers_, [&](const auto& worker) { return worker.second.agent == agent; });
    if (any || one.lost || one.all_gone || !one.joined || !one.has_orders) return;
    one.all_gone = true;
    tell(event::AgentEmpty{agent});
  }

  void random_event() {
    if (over_ || testing::Test::HasFailure()) return;
    now_ += milliseconds(below(4) == 0 ? below(3000) : below(100));
    const auto runs = [](const TrueWorker& one) { return one.runs; };
    const auto worker = any(workers_, runs);
    switch (below(24)) {
      case 0:
      case 1:
        if (worker != workers_.end()) end(worker->first, below(3) == 0 ? How::Failed : How::Killed);
        break;
      case 2:
        if (worker != workers_.end() && below(3) == 0) end(worker->first, How::Notice);
        break;
      case 3:
        // (Only a worker that has got the training's state can finish its part.)
        if (worker != workers_.end() && below(12) == 0 && (worker->second.has_state || !trains_)) {
          finished_ = true;
          end(worker->first, below(4) == 0 ? How::Asked : How::Done);
        }
        break;
      case 4: {
        const auto agent = any(agents_, [](const TrueAgent& one) { return !one.lost && !one.all_gone; });
        if (agent == agents_.end()) break;
        const int index = agent->first;
        if (!tell(event::AgentLost{index, "gone"}).taken) stop();
        agents_[index].lost = true;
        std::erase_if(workers_, [&](const auto& one) { return one.second.agent == index; });
        break;
      }
      case 5: {
        const auto agent = any(agents_, [](const TrueAgent& one) { return !one.lost && !one.all_gone; });
        if (agent != agents_.end() && membership_->is_newcomer(agent->first))
          tell(event::AgentFailed{agent->first, "no"});
        break;
      }
      case 6:
      case 7: {
        const auto agent = any(agents_, [](const TrueAgent& one) { return !one.joined && !one.lost; });
        if (agent == agents_.end()) break;
        agent->second.joined = true;
        tell(event::AgentJoined{agent->first});
        break;
      }
      case 8:
      case 9: start_some(); break;
      case 10: {
        const auto agent = any(agents_, [](const TrueAgent& one) { return one.joined && !one.lost && !one.told; });
        if (agent == agents_.end() || below(3) != 0 || !begun_running_) break;
        agent->second.told = true;
        if (!tell(event::AgentNoticed{agent->first, SIGTERM}).taken) stop();
        break;
      }
      case 11:
      case 12:
        if (options_.asks_script) list();
        break;
      case 13: tell(event::Add{host()}); break;
      case 14: tell(event::TakeAway{fmt::format("h{}", below(5)), below(3) == 0}); break;
      case 15:
        if (worker != workers_.end() && begun_running_) {
          worker->second.stopped = true;
          if (!tell(event::StoppedTooLong{worker->first, seconds(9)}).taken) stop();
        }
        break;
      case 16:
        if (options_.come_by_themselves && begun_running_) {
          PlannedHost came = host();
          came.name = fmt::format("n{}", agents_.size());
          came.index = static_cast<int>(agents_.size());
          agents_[came.index] = {came.name, true};
          agents_[came.index].all_gone = true;
          tell(event::AgentCame{came});
        }
        break;
      case 17:
      case 18: form(); break;
      case 19:
        if (const auto dying = any(workers_, [](const TrueWorker& one) { return one.dying && one.runs; });
            dying != workers_.end())
          end(dying->first, How::Killed);
        break;
      case 20: leave_by_themselves(); break;
      default: report(below(4) == 0); break;
    }
    tick();
    check();
  }
  /// The supervisor ends the job.
  void stop() {
    over_ = true;
    tell(event::Stopping{});
  }
  void tick() {
    if (over_) return;
    if (const auto next = membership_->next_look(); next && *next <= now_) tell(event::Tick{});
  }
  void start_some() {
    if (!ones_.empty() && below(2) == 0) {
      const int number = *ones_.begin();
      ones_.erase(number);
      if (!workers_.contains(number)) return;  // lost with its host
      const bool well = below(5) != 0;
      workers_[number].runs = well;
      const int agent = workers_[number].agent;
      if (!well) workers_.erase(number);
      tell(event::StartedOne{number, well ? "" : "no memory"});
      if (!well) look_for_empty(agent);
    } else if (!ordered_.empty()) {
      const auto [agent, numbers] = *ordered_.begin();
      ordered_.erase(agent);
      for (const int number : numbers) workers_.at(number).runs = true;
      tell(event::AgentStarted{agent});
    }
  }
  /// Workers leave by themselves once the others have formed a world.
  void leave_by_themselves() {
    for (const auto& [number, worker] : std::map(workers_)) {
      if (worker.removed && worker.runs && workers_.contains(number)) return end(number, How::Notice);
    }
    if (formed_ < static_cast<std::int64_t>(latest_.epoch)) return;
    for (const auto& [number, worker] : std::map(workers_)) {
      const bool member = rendezvous::place_of(membership_->current(), number).has_value();
      if (worker.runs && !member && worker.formed >= 0 && workers_.contains(number)) return end(number, How::Done);
    }
  }
  void report(bool all) {
    event::Reported reported;
    for (auto& [number, worker] : workers_) {
      if (!worker.runs || (!all && below(3) != 0)) continue;
      worker.asked = worker.asked || below(2) == 0;
      reported.workers.push_back(report_of(number, worker));
    }
    tell(reported);
  }
  PlannedHost host() {
    PlannedHost host;
    host.name = fmt::format("h{}", below(5));
    host.slots = 1 + below(3);
    return host;
  }
  void list() {
    event::Listed listed;
    for (int i = 0; i < 5; ++i) {
      PlannedHost one = host();
      one.name = fmt::format("h{}", i);
      one.slots -= below(3) == 0 ? 1 : 0;
      if (below(3) != 0) listed.hosts.push_back(one);
    }
    tell(listed);
  }

  void check() {
    if (!begun_running_) return;
    if (over_) return;
    EXPECT_TRUE(membership_->roster().all().empty() || !membership_->over() || over_);
    int counted = 0;
    bool state = false;
    for (const auto& [number, known] : membership_->roster().all()) {
      const bool there = workers_.contains(number);
      EXPECT_TRUE(known.ended() || there) << number << ": nothing of it is heard any more, and it counts as running";
      EXPECT_FALSE(known.ended() && known.counted) << number;
      EXPECT_FALSE(known.leaving && known.counted) << number;
      counted += known.counted ? 1 : 0;
      // (A worker that was taken back although it has seen the others' world ends next, and Membership learns of that.)
      state = state || (known.counted && there && (workers_.at(number).has_state || workers_.at(number).removed));
    }
    for (const auto& [number, worker] : workers_) EXPECT_TRUE(membership_->roster().all().contains(number));
    // Somebody with the state goes on, or it is not known yet who has the state, or the training is over.
    EXPECT_TRUE(state || !begun_ || finished_ || membership_->next_look()) << "the training is lost in silence";
    EXPECT_TRUE(options_.most == 0 || counted <= options_.most);
    EXPECT_LE(membership_->roster().all().size(), workers_.size() + membership_->current().members.size());
  }
  /// Lets time pass, in which only processes that have to end do so: no worker remains that nobody waits for.
  void finish() {
    for (int i = 0; i < 40 && !over_ && !testing::Test::HasFailure(); ++i) {
      now_ += seconds(1);
      form();
      report(true);
      leave_by_themselves();
      for (const auto& [number, worker] : std::map(workers_)) {
        if (workers_.contains(number) && worker.dying && worker.runs) end(number, How::Killed);
      }
      while (!ones_.empty() || !ordered_.empty()) start_some();
      tick();
      check();
    }
    if (over_ || testing::Test::HasFailure()) return;
    // (Health ends a job if one of its ranks has ended before anybody trained.)
    if (finished_ && !membership_->roster().formed()) return;
    for (const auto& [number, known] : membership_->roster().all()) {
      EXPECT_FALSE(known.leaving && !known.ended()) << number << " leaves, and was never told to end";
    }
  }

  std::mt19937 random_;
  Membership::Options options_;
  std::optional<Membership> membership_;
  Membership::Time now_{seconds(1000)};
  bool says_state_ = false, trains_ = true;
  std::map<int, TrueAgent> agents_;
  std::map<int, TrueWorker> workers_;
  std::map<int, std::set<int>> ordered_;
  std::set<int> ones_;
  rendezvous::Membership latest_;
  bool begun_running_ = false, begun_ = false, finished_ = false, over_ = false, ended_ = false;
  int changes_ = 0;
  std::int64_t formed_ = -1;                 ///< the latest epoch that has formed a world
  std::map<int, std::uint64_t> dropped_at_;  ///< by worker: the first epoch without it
};

// COHORT_TEST_TIMES multiplies the number of schedules.
TEST(MembershipRandom, InvariantsHoldInAnyOrderOfEvents) {
  const char* const times = std::getenv("COHORT_TEST_TIMES");
  const unsigned schedules = 100'000U * static_cast<unsigned>(std::max(1, times == nullptr ? 1 : std::atoi(times)));
  for (unsigned seed = 0; seed < schedules && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(fmt::format("seed {}", seed));
    Play(seed).run(40);
  }
}

}  // namespace
}  // namespace cohort::launch
