// What the supervisor keeps of a run while it goes on: for those who watch it (Live), and of its ranks' timelines
// (Tracing). Belong to the Job and its thread.
#pragma once

#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/job_record.h"
#include "launch/output/live_run.h"
#include "launch/output/other_hosts.h"
#include "launch/output/text.h"
#include "launch/start/agent_pool.h"

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace cohort::launch {

/// What the launcher knows of a run, for those who watch it: gathers what agents report and ranks print, and hands it
/// to live.json a few times a second.
class Live {
 public:
  struct Events {
    /// live.json cannot be written, and why.
    std::function<void(const std::string&)> on_trouble;
    /// How the run is, in a line; empty: there is nothing to say any more.
    std::function<void(std::string)> on_summary;
  };
  /// `folder` and `state` outlive this.
  Live(Loop& loop, const RunFolder& folder, const RunState& state, Events events);

  /// Ranks of the state's plan are about to be started.
  void begin_epoch();
  void take(const Reports& reports);
  void take(const Output& output);
  /// By its number in the plan's Roles; `well`: it has not failed.
  void process_ended(int process, bool well, const sys::ExitStatus& status);
  /// A server that has failed.
  void starts_again(int process);
  /// The state, too.
  void changed();
  /// At once.
  void write();

 private:
  /// As of now.
  LiveRun look() const;

  Loop& loop_;
  const RunState& state_;
  Events events_;
  Roles roles_;
  Figures figures_{0};
  std::vector<LastLine> lines_;
  std::vector<int> restarts_;  ///< by process: how often it has been started again, alone
  Timer soon_;
  LiveFile file_;
};

/// What the supervisor does for a trace (`--trace`): keeps what agents send of their ranks' timelines, and measures
/// their hosts' clocks against its own: when they come, each minute, and when their ranks end.
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
