// Keeps the state of a run while it goes on, and publishes it: to the terminal or as events, into the run's folder
// (job.json, live.json, warnings), to the page, and to the commands that export the record (--track). Lives as long as
// the job; the job's epochs report to it what has happened. Decides nothing. One thread.
#pragma once

#include "base/result.h"
#include "launch/health/health.h"
#include "launch/loop.h"
#include "launch/messages.h"
#include "launch/output/announcer.h"
#include "launch/output/display.h"
#include "launch/output/job_record.h"
#include "launch/output/live_run.h"
#include "launch/output/run_folder.h"
#include "launch/output/text.h"
#include "launch/supervise/side_commands.h"
#include "launch/supervise/supervisor.h"

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

class RunOutput {
 public:
  /// Makes the run's folders. `id` makes the names of the job and of its folder unique. `setup` outlives this. Throws
  /// cohort::Error.
  RunOutput(Loop& loop, const JobSetup& setup, const std::string& id);

  /// State of the run; a caller that changes it then calls `changed`, or one of the methods below.
  RunState& state() noexcept { return state_; }
  const RunState& state() const noexcept { return state_; }
  const RunFolder& folder() const noexcept { return folder_; }
  /// Returns the path of this epoch's logs, as the user would type it; a restart's logs lie below the first epoch's.
  /// Empty: no logs are kept.
  std::string shown_logs() const { return logs_below(folder_.shown); }
  void say(const std::string& text);
  /// Delivers the warning, unless it is one that was delivered a moment ago.
  void warn(const Warning& warning) { warnings_.tell(warning); }
  void show(const Warning& warning);
  /// Returns the display's news; to be called after each step of the loop.
  Display::News take_news();

  // The next methods report the events of an epoch, from its beginning to its end. `number`: restarts before it.
  void begin_attempt(int number);
  /// Sets the processes of the epoch; `shown`: the ranks whose output is shown, empty: all.
  void set_plan(const Plan& plan, const std::vector<int>& shown);
  /// Called when an elastic job has more ranks.
  void grow(const Plan& plan);
  /// Called when these processes run, with these pids.
  void started(const std::vector<int>& processes, const std::vector<std::int32_t>& pids);
  /// Called when all ranks run.
  void running();
  /// Called when the ranks are told to end.
  void ending();
  void take(const std::string& host, const Reports& reports);
  void take(std::size_t source, const Output& output);
  /// Called before anything else is done about the rank's end.
  void rank_ended(const Ending& ending);
  /// `process`: number in the plan's Roles; `well`: the process has not failed.
  void process_ended(int process, bool well, const sys::ExitStatus& status);
  /// Called when a failed server is started again.
  void starts_again(int process, const Ending& ending);
  void started_again(int process, const Ending& before, int pid);
  /// Called when an elastic job has changed its members; `text` says who has changed, and why.
  void members_changed(const rendezvous::Membership& now, const std::string& text);
  /// Called when all members have formed a world, this long after the change.
  void members_formed(std::chrono::milliseconds after);
  void changed();
  /// Called when the epoch's processes print nothing more.
  void end_lines() { display_.end_lines(); }
  /// Called when a rank has failed and others are slow to end: shows the post-mortem before the end.
  void failed(const PostMortem& post_mortem) { announcer_.failed(post_mortem); }
  /// Reports how the attempt ended.
  void attempt_ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

  // Methods for the end of the job.
  bool reader_gone() const { return display_.reader_gone(); }
  /// Returns the processes that run beside the ranks, and outlive them.
  std::vector<pid_t> helpers() const { return trackers_ ? trackers_->pids() : std::vector<pid_t>(); }
  /// Called when no warnings come any more: waits a moment for the commands that get them.
  void finish_warnings() { warnings_.finish(); }
  void finish();
  /// Returns true when all output is written, or nobody reads it.
  bool finished() const { return display_.drained(); }

 private:
  /// Returns the state of the run now.
  LiveRun look() const;
  void write_live();
  void write_usage();
  void write_record();
  void on_no_room(int fd, int error);
  void drain();
  /// Returns "4 processes on 1 host (a: ranks 0-3), 2 threads each, run runs/..."
  std::string start_text() const;
  std::string logs_below(const std::string& run_folder) const;
  /// Says what would make the job's steps shorter; empty if that is not known, or nothing would.
  std::string advice(const Verdict& verdict) const;
  void start_page();

  Loop& loop_;
  const JobSpec& spec_;
  RunState state_;
  RunFolder folder_;
  Display display_;  ///< its sources are numbered by the agents' positions in the agent pool
  Announcer announcer_;
  LiveFile live_file_;
  // By process.
  Figures figures_{0};
  std::vector<LastLine> lines_;
  std::vector<int> restarts_;                        ///< by process: how often only this one has been started again
  std::map<std::string, std::vector<GpuUse>> gpus_;  ///< by host
  Timer soon_;                                       ///< live.json is to be written
  Timer usage_;                                      ///< a line for usage.jsonl is due
  Warnings warnings_;
  std::optional<Trackers> trackers_;
  bool awaits_trackers_ = false;  ///< only the trackers are left
  std::optional<SideCommand> page_;
};

/// Returns the number of this host's cores if it has more ranks than cores; else 0.
int crowded_cores(const Plan& plan);

}  // namespace cohort::launch
