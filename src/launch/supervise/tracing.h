// What the supervisor does for a trace (`--trace`): keeps what agents send of their ranks' timelines, and measures
// their hosts' clocks against its own: when they come, each minute, and when their ranks end. Lives as long as the job,
// and belongs to its thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/record/other_hosts.h"
#include "launch/start/agent_pool.h"

#include <functional>
#include <map>
#include <memory>
#include <string>

namespace cohort::launch {

class Tracing {
 public:
  Tracing(Loop& loop, const std::string& run_folder, std::function<void(std::string)> on_trouble);

  void on_joined(AgentHandle& agent);
  /// True: it was for this.
  bool take(const AgentHandle& agent, const Message& message);
  /// Ranks of this agent begin to end.
  void on_ending(const AgentHandle& agent);
  /// Nothing more comes.
  void finish();

 private:
  void measure_again();

  Loop& loop_;
  TracePieces pieces_;
  std::map<int, std::unique_ptr<ClockSync>> clocks_;  ///< by host, of those that are elsewhere
  Timer again_;
};

}  // namespace cohort::launch
