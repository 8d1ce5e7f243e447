// Events of an elastic job's processes and hosts, and the actions that answer them: the values exchanged between
// Membership, which decides, and the supervisor, which acts.
#pragma once

#include "launch/plan/plan.h"
#include "rendezvous/membership.h"

#include <chrono>
#include <cstdint>
#include <string>
#include <variant>
#include <vector>

namespace cohort::launch {

/// Workers are identified by their processes' numbers, agents by their hosts' indices; no number is given twice.
namespace event {

/// All agents have been told to start their ranks.
struct Ordered {};
/// All ranks run.
struct Running {
  int agents = 0;                   ///< agents so far, including lost ones
  std::vector<PlannedHost> usable;  ///< hosts that run nothing, and can be told to start ranks
};
/// The job is being ended; later events change no members.
struct Stopping {};
/// Time has passed: due at `Membership::next_look`.
struct Tick {};

/// States that workers report of themselves.
struct Reported {
  struct One {
    int worker = 0;
    bool waits = false;         ///< the worker waits for a world's other ranks, or to be a member
    bool to_be_member = false;  ///< the worker waits to be a member
    std::int64_t formed_epoch = -1;
    bool has_state = false;
  };
  std::vector<One> workers;
};
/// A worker has ended.
struct Ended {
  enum class How {
    Done,    ///< with status 0
    Asked,   ///< as asked, or because all ranks have saved
    Notice,  ///< with kRequeueStatus, while the others do not save
    Killed,  ///< by a signal
    Failed,  ///< with another status
  };
  int worker = 0;
  How how = How::Done;
  std::string status;  ///< "exit code 1"
  std::int64_t formed_epoch = -1;
  bool has_state = false;
};
/// A worker was stopped for longer than is allowed.
struct StoppedTooLong {
  int worker = 0;
  std::chrono::seconds since{};
};
/// A worker that was ordered beside running ones now runs, or could not be started.
struct StartedOne {
  int worker = 0;
  std::string why_not;  ///< empty: the worker runs
};

/// An agent is lost, with all its processes.
struct AgentLost {
  int agent = 0;
  std::string why;
};
/// An agent failed to come, or to start its ranks.
struct AgentFailed {
  int agent = 0;
  std::string why;
};
/// An agent has connected.
struct AgentJoined {
  int agent = 0;
};
/// An agent has come by itself to a job that runs.
struct AgentCame {
  PlannedHost host;
};
/// All ranks that the agent was told to start are running.
struct AgentStarted {
  int agent = 0;
};
/// No process that the agent has started is left.
struct AgentEmpty {
  int agent = 0;
};
/// The agent has been told to end: its host is about to go.
struct AgentNoticed {
  int agent = 0;
  int signal = 0;
};

/// The hosts that the discovery script has named.
struct Listed {
  std::vector<PlannedHost> hosts;
};
/// An order of the job's user to add a host. (TakeAway is the order to take one away.)
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
/// The job goes on with these members. The record is published before any rank is told.
struct Announce {
  rendezvous::Membership members;
  std::string text;
};
/// All members of the latest epoch are in a world of that epoch.
struct Formed {
  std::chrono::milliseconds took{};
};
/// An agent is wanted on another host; it gets the next index.
struct AddAgent {
  PlannedHost host;
};
/// Tells an agent that runs nothing to start ranks; `first`: number of the first.
struct StartRanks {
  int agent = 0;
  int ranks = 0;
  int first = 0;
};
/// Tells an agent to start one more rank, beside those that it runs.
struct StartOne {
  int agent = 0;
  int worker = 0;
  int slot = 0;
};
/// An agent that runs nothing is not needed any more.
struct Finish {
  int agent = 0;
};
/// An agent that runs nothing stays until all workers begin anew.
struct Hold {
  int agent = 0;
};
/// Ends an agent with all that it runs: nothing more comes from it, nor from these workers. `failed`: the job fails
/// with them.
struct Drop {
  int agent = 0;
  std::vector<int> workers;
  bool failed = false;
};
/// A worker that was to be started has not been heard of.
struct Lost {
  int worker = 0;
};
/// The job goes on without a worker, so that worker's end is no failure; with `excused` false, it is one after all.
struct Excuse {
  int worker = 0;
  bool excused = true;
};
/// The others do not wait for this worker any more; with `leaves` false, they wait for it again.
struct Leaves {
  int worker = 0;
  bool leaves = true;
};
/// Tells the leaving workers of an agent to end, including those that save by themselves.
struct StopRanks {
  int agent = 0;
  int signal = 0;
};
struct Kill {
  int agent = 0;
  int worker = 0;
};
/// Earlier failures are over: the others have formed a world without the workers that failed.
struct FailureOver {};
/// Ends all running processes, although the job has gone well.
struct EndWorkers {};
/// The job ends with this status.
struct EndJob {
  int status = 0;
  std::string why;
  int signal = 0;  ///< sent to the ranks
};
/// An agent has been told to end, and the job cannot go on without its ranks: the job ends as if told to end.
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
