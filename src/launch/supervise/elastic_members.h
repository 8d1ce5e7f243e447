// The members of an elastic job while its ranks run: who fails leaves and the others go on, in processes that they
// keep; hosts come and go. What follows from what happens is Elastic's to decide (health/); this class acts on it, for
// an Epoch. One thread.
#pragma once

#include "launch/health/elastic.h"
#include "launch/health/health.h"
#include "launch/health/places.h"
#include "launch/health/verdict.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/start/agent_pool.h"
#include "launch/start/discovery.h"
#include "launch/supervise/control.h"
#include "launch/supervise/members.h"
#include "launch/supervise/run_output.h"
#include "launch/supervise/supervisor.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {

/// What goes on when all workers of a job begin anew.
struct ElasticPast {
  std::set<std::string> barred;  ///< hosts that get no workers although they are there, until they are listed anew
  std::uint64_t next_epoch = 0;  ///< of members; those before it are in the job's store
  int workers = 0;               ///< that there were: numbers are never given again
};

class ElasticMembers {
 public:
  struct Events {
    /// All ranks run, and nobody ends the job.
    std::function<bool()> running;
    /// They do not all run yet, and all are about to be started.
    std::function<bool()> starting;
    /// The job goes on with these: everybody can read it once this returns. Throws cohort::Error.
    std::function<void(const rendezvous::Membership&)> on_members;
    /// So many ranks more are to be started by this agent, which runs none: it is ordered, and the plan has them.
    std::function<void(AgentHandle&, int ranks)> on_more;
    /// And one more by an agent that runs some. Returns its number.
    std::function<int(AgentHandle&, int local_rank)> on_one_more;
    /// Nothing more will be heard of this process: it has ended, and the last of the endings is its.
    std::function<void(int process)> end_lost;
    /// Members that failed have left, and the failure is over.
    std::function<void()> on_failure_over;
    /// Whatever runs is to end, although the job has gone well.
    std::function<void()> end_workers;
    /// The job cannot go on, and no rank is to blame: it ends with this status.
    std::function<void(int status, const std::string& why)> end;
    /// An agent has been told to end, and the job cannot go on without its ranks.
    std::function<void(const AgentHandle&, int signal)> on_told;
    /// Endings may have become failures.
    std::function<void()> look_for_failure;
    /// Nothing may run any more.
    std::function<void()> check_end;
  };
  /// What it acts for: all outlive this. `endings` in the order in which they were heard of.
  struct Scene {
    Loop& loop;
    const JobSetup& setup;
    AgentPool& agents;
    RunOutput& run;
    const Members& members;
    HealthWatch& health;
    std::vector<Ending>& endings;
    ElasticPast& past;
  };
  ElasticMembers(Scene scene, Events events);

  const rendezvous::Membership& current() const noexcept { return elastic_.current(); }
  /// All ranks run: hosts may come and go.
  void begin();
  /// The job is being ended.
  void stop();

  /// Ranks that have failed leave, if the others are enough to go on.
  void let_failed_leave();
  /// With their host. False: the job cannot go on.
  bool goes_on_without(AgentHandle& agent, const std::string& why);
  /// It was stopped for so long. False: the job cannot go on without it.
  bool kills_stopped(AgentHandle& agent, int worker, std::chrono::seconds since);
  /// Once none runs any more, what else runs is asked to end: workers of hosts that were listed no more, or came late.
  void look_for_members();
  void take(const Reports& reports);
  /// An agent has been told to end: its host is about to go. False: the job is not one that may go on.
  bool take_notice(AgentHandle& agent, int signal);
  /// What has been done, or why not.
  Result<std::string> obey(const ControlOrder& order);
  /// Nothing of the job is left there.
  void on_all_gone(AgentHandle& agent);

  /// It is on its way to a job that runs.
  bool is_newcomer(AgentHandle& agent) const { return newcomers_.contains(&agent); }
  /// One that has joined: it is told to start its ranks, or to end.
  void take_newcomer(AgentHandle& agent);
  /// Its ranks run; they are members once they wait to be.
  void on_newcomer_started(AgentHandle& agent);
  void give_up_newcomer(AgentHandle& agent, const std::string& why);
  /// A worker that was ordered beside others has been started, or not.
  bool awaits(int worker) const { return ordered_.contains(worker); }
  void on_one_started(const StartedAgain& started);
  /// Nobody waits for those that are still on their way.
  void drop_newcomers();
  /// A node that has come by itself.
  void take_late(AgentHandle& agent);
  /// The plan has more ranks.
  void grow();

 private:
  using Clock = std::chrono::steady_clock;

  void say(const std::string& text) { run_.say(text); }
  /// No rank has formed a world, so that the program may be one that cannot form it anew.
  bool nobody_trains() const;
  bool begins_anew() const { return spec_.max_restarts > 0 && nobody_trains(); }
  bool may_change() const { return events_.running() && !elastic_.over(); }
  /// True: it goes on, or waits for others.
  bool follow(const Elastic::Decision& decision, const std::string& cause);
  void announce();
  /// "worker 3 (h2) was killed by SIGKILL".
  std::string how_left(const Ending& ending) const;
  void end_lost(int process);
  /// Once somebody's part is done: whether all who run wait for a world that is never formed.
  void look_for_waiting();
  void end_workers();
  Result<std::string> add_host(const std::string& typed);
  Result<std::string> take_away(const ControlOrder& order);
  /// What `--host-discovery-script` names.
  void on_hosts(const std::vector<PlannedHost>& listed);
  void drain_unlisted();
  /// Has workers started where there are free slots, as many as there may be.
  void fill();
  void fill_again();
  /// By local rank.
  std::vector<int> free_slots(const PlannedHost& host) const;
  /// Of the host, those places.
  void bring(const PlannedHost& host, const std::vector<int>& slots);
  /// That wait to be members.
  std::vector<Elastic::Worker> ready() const;
  /// As Elastic, with those that are ready in their place.
  bool leave(const std::vector<int>& workers, const std::string& cause);
  /// Its members, by number.
  std::vector<int> members_on(const AgentHandle& agent) const;
  void act_on_notices(int signal);
  /// All that runs there leaves: the others go on without.
  void leave(const std::set<AgentHandle*>& agents, const std::string& why);
  void end_leavers(AgentHandle& agent, int signal);
  void end_for_requeue(const std::string& why);
  AgentHandle* latest_of(const std::string& host) const;
  void take_arrivals();
  void look_for_formed();

  Loop& loop_;
  const JobSetup& setup_;
  const JobSpec& spec_ = setup_.spec;
  AgentPool& agents_;
  RunOutput& run_;
  const Members& members_;
  HealthWatch& health_;
  std::vector<Ending>& endings_;
  const Events events_;
  const std::chrono::milliseconds start_timeout_ = start_timeout_of(spec_, setup_.plan);
  Places places_;
  Elastic elastic_;
  std::size_t considered_ = 0;  ///< endings from which `elastic_` has drawn what follows
  /// Endings of ranks that have left, until those that go on have formed a world: till then they may be why the others
  /// fail, too.
  std::vector<std::size_t> fresh_leavers_;
  std::set<int> waiting_;  ///< to be a member, or for a world's other ranks; reported since the last part was done
  std::vector<std::uint32_t> worlds_, worlds_then_;  ///< by rank: that it has formed, and had when the members changed
  std::map<AgentHandle*, Timer> newcomers_;      ///< agents whose ranks do not run yet, and for how long they may not
  std::map<int, Elastic::Worker> arrivals_;      ///< that run and are no members yet
  std::set<int> waiting_arrivals_;               ///< of these, that wait to be, so that nobody has to wait for them
  std::map<int, std::chrono::seconds> stopped_;  ///< workers that are killed for it, and for how long they were
  std::map<int, Elastic::Worker> ordered_;       ///< workers beside others that do not run yet
  struct Leaving {
    bool others_went_on = false;  ///< to the next world
    Timer limit;                  ///< until those that still run are told to end
  };
  std::map<AgentHandle*, Leaving> leaving_;  ///< agents whose members leave as planned
  std::set<AgentHandle*> noticed_;           ///< that have been told to end,
  Timer notice_;                             ///< and until that is acted on: all may have been told
  std::set<std::string> unspared_;           ///< hosts that are listed no more, and that the job needs
  bool workers_ended_ = false;               ///< they were asked to
  std::optional<Discovery> discovery_;
  Timer patience_;  ///< for other hosts to come
  Timer fill_;
  std::optional<Clock::time_point> announced_at_;  ///< the latest epoch, whose members have formed no world yet
};

}  // namespace cohort::launch
