// The supervisor's part of a trace (--trace): keeps the ranks' timelines that agents send, and measures the hosts'
// clocks against its own when the hosts join, each minute, and when their ranks end. One thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/other_hosts.h"
#include "launch/start/agent_pool.h"
#include "launch/supervise/run_output.h"

#include <map>
#include <string>

namespace cohort::launch {

class Tracing {
 public:
  Tracing(Loop& loop, RunOutput& run) : loop_(loop), run_(run), pieces_(run.folder().path) {}

  void on_joined(AgentHandle& agent);
  void on_closed(const AgentHandle& agent);
  /// Takes the message and returns true if it belongs to the trace.
  bool take(AgentHandle& agent, const Message& message);
  /// Called when nothing more comes.
  void finish();

 private:
  struct Clock {
    AgentHandle& agent;
    ClockSync sync = {};
  };
  void measure_again();
  void follow(const AgentHandle& agent, const ClockSync::Next& next);
  void tell_troubles();

  Loop& loop_;
  RunOutput& run_;
  TracePieces pieces_;
  std::map<int, Clock> clocks_;  ///< by host; only of other hosts
  Timer again_;
};

}  // namespace cohort::launch
