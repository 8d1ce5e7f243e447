// Events of the processes and hosts of an elastic job, and actions that answer them: the values between Membership,
// which decides, and the supervisor, which acts.
#pragma once

#include "launch/plan/plan.h"
#include "rendezvous/membership.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace cohort::launch {

/// Workers are known by their processes' numbers, agents by their hosts' indices; neither is given twice.
namespace event {

/// All agents have been told to start their ranks.
struct Ordered {};
/// All ranks run.
struct Running {
  int agents = 0;                   ///< that there have been, with those that are lost
  std::vector<PlannedHost> usable;  ///< these run nothing, and can be told to start ranks
};
/// The job is being ended; what happens from now on changes no members.
struct Stopping {};
/// Time has passed: due at `Membership::next_look`.
struct Tick {};

/// State that workers report of themselves.
struct Reported {
  struct One {
    int worker = 0;
    bool waits = false;         ///< for a world's other ranks, or to be a member
    bool to_be_member = false;  ///< it waits to be one
    std::int64_t formed_epoch = -1;
    bool has_state = false;
  };
  std::vector<One> workers;
};
/// A worker has ended.
struct Ended {
  enum class How {
    Done,    ///< with 0
    Asked,   ///< as it was asked to, or because all have saved
    Notice,  ///< with kRequeueStatus, for itself alone
    Killed,  ///< by a signal
    Failed,  ///< with another status
  };
  int worker = 0;
  How how = How::Done;
  std::string status;  ///< "exit code 1"
  std::int64_t formed_epoch = -1;
  bool has_state = false;
};
/// It was stopped for longer than it may be.
struct StoppedTooLong {
  int worker = 0;
  std::chrono::seconds since{};
};
/// A worker that was to be started beside others runs, or could not be started.
struct StartedOne {
  int worker = 0;
  std::string why_not;  ///< empty: it runs
};

/// An agent is lost, with all that it runs.
struct AgentLost {
  int agent = 0;
  std::string why;
};
/// An agent that was to come, or to start ranks, cannot.
struct AgentFailed {
  int agent = 0;
  std::string why;
};
/// It is connected.
struct AgentJoined {
  int agent = 0;
};
/// One has come by itself to a job that runs.
struct AgentCame {
  PlannedHost host;
};
/// All ranks that it was told to start run.
struct AgentStarted {
  int agent = 0;
};
/// Nothing that it has started is left.
struct AgentEmpty {
  int agent = 0;
};
/// It has been told to end: its host is about to go.
struct AgentNoticed {
  int agent = 0;
  int signal = 0;
};

/// Those that the discovery script names.
struct Listed {
  std::vector<PlannedHost> hosts;
};
/// The job's user adds a host, or takes one away.
struct Add {
  PlannedHost host;
};
struct TakeAway {
  std::string host;
  bool kill = false;
};

}  // namespace event

using Event = std::variant<event::Ordered, event::Running, event::Stopping, event::Tick, event::Reported, event::Ended,
                           event::StoppedTooLong, event::StartedOne, event::AgentLost, event::AgentFailed,
                           event::AgentJoined, event::AgentCame, event::AgentStarted, event::AgentEmpty,
                           event::AgentNoticed, event::Listed, event::Add, event::TakeAway>;

namespace action {

struct Say {
  std::string text;
};
/// The job goes on with these: everybody can read it before anybody is told.
struct Announce {
  rendezvous::Membership members;
  std::string text;
};
/// All members of the latest epoch are in a world of it.
struct Formed {
  std::chrono::milliseconds took{};
};
/// An agent is wanted on another host; its index is the next one.
struct AddAgent {
  PlannedHost host;
};
/// It runs nothing, and is to start so many ranks, the first of which has this number.
struct StartRanks {
  int agent = 0;
  int ranks = 0;
  int first = 0;
};
/// One rank more, beside those that run there.
struct StartOne {
  int agent = 0;
  int worker = 0;
  int slot = 0;
};
/// It runs nothing, and is not needed any more.
struct Finish {
  int agent = 0;
};
/// It runs nothing until all begin anew.
struct Hold {
  int agent = 0;
};
/// It is ended with all that it runs: nothing more is heard of it, nor of these workers. `failed`: the job has failed
/// with them.
struct Drop {
  int agent = 0;
  std::vector<int> workers;
  bool failed = false;
};
/// Nothing is heard of a worker that was to be started.
struct Lost {
  int worker = 0;
};
/// The job goes on without it: its end is no failure; or is one after all.
struct Excuse {
  int worker = 0;
  bool excused = true;
};
/// The others do not wait for it any more; or do so again.
struct Leaves {
  int worker = 0;
  bool leaves = true;
};
/// The workers of an agent that leave are told to end, those that save by themselves too.
struct StopRanks {
  int agent = 0;
  int signal = 0;
};
struct Kill {
  int agent = 0;
  int worker = 0;
};
/// Failures so far are over: the others have formed a world without those that failed.
struct FailureOver {};
/// All processes that run are to end, although the job has gone well.
struct EndWorkers {};
/// The job ends with this status.
struct EndJob {
  int status = 0;
  std::string why;
  int signal = 0;  ///< that its ranks get
};
/// An agent has been told to end, and the job cannot go on without its ranks: it ends as if it had been told.
struct EndAsTold {
  int agent = 0;
  int signal = 0;
};

}  // namespace action

using Action = std::variant<action::Say, action::Announce, action::Formed, action::AddAgent, action::StartRanks,
                            action::StartOne, action::Finish, action::Hold, action::Drop, action::Lost, action::Excuse,
                            action::Leaves, action::StopRanks, action::Kill, action::FailureOver, action::EndWorkers,
                            action::EndJob, action::EndAsTold>;

}  // namespace cohort::launch
