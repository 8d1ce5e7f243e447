// Keeps what is known of a run while it goes on, and tells everybody: readers of the terminal or of events, the run's
// folder (job.json, live.json, warnings), the page, the commands that take the record elsewhere (--track). Lives as
// long as the job, whose epochs tell it what has happened. Decides nothing. One thread.
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
  /// Makes the run's folders. `id` makes the job's name, and its folder's, unlike others. `setup` outlives this. Throws
  /// cohort::Error.
  RunOutput(Loop& loop, const JobSetup& setup, const std::string& id);

  /// State of the run; a caller that changes it then calls `changed`, or one of the methods below.
  RunState& state() noexcept { return state_; }
  const RunState& state() const noexcept { return state_; }
  const RunFolder& folder() const noexcept { return folder_; }
  /// Path of the logs of this epoch, as the user would type it; those of a restart lie below the first's. Empty: none
  /// are kept.
  std::string shown_logs() const { return logs_below(folder_.shown); }
  void say(const std::string& text);
  /// But for those that were told a moment ago.
  void warn(const Warning& warning) { warnings_.tell(warning); }
  void show(const Warning& warning);
  /// After each step of the loop: what the display has to say to others.
  Display::News take_news();

  // An epoch, from its beginning to its end. `number`: of restarts before it.
  void begin_attempt(int number);
  /// Sets the processes that take part; `shown`: the ranks whose output is shown, empty: all.
  void set_plan(const Plan& plan, const std::vector<int>& shown);
  /// An elastic job has more ranks.
  void grow(const Plan& plan);
  /// These run, as `pids`.
  void started(const std::vector<int>& processes, const std::vector<std::int32_t>& pids);
  /// All ranks run.
  void running();
  /// They are told to end.
  void ending();
  void take(const std::string& host, const Reports& reports);
  void take(std::size_t source, const Output& output);
  /// Before anything follows from it.
  void rank_ended(const Ending& ending);
  /// By its number in the plan's Roles; `well`: it has not failed.
  void process_ended(int process, bool well, const sys::ExitStatus& status);
  /// A server that has failed.
  void starts_again(int process, const Ending& ending);
  void started_again(int process, const Ending& before, int pid);
  /// An elastic job has other members than before; `text` says who, and why.
  void members_changed(const rendezvous::Membership& now, const std::string& text);
  /// All of them have formed a world, so much later.
  void members_formed(std::chrono::milliseconds after);
  void changed();
  /// No more output comes from its processes.
  void end_lines() { display_.end_lines(); }
  /// A rank has failed and others take their time to end: the post-mortem before the end.
  void failed(const PostMortem& post_mortem) { announcer_.failed(post_mortem); }
  /// The last word on it.
  void attempt_ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

  // The end of the job.
  bool reader_gone() const { return display_.reader_gone(); }
  /// Processes that run beside the ranks, and outlive them.
  std::vector<pid_t> helpers() const { return trackers_ ? trackers_->pids() : std::vector<pid_t>(); }
  /// No warnings come any more: waits a moment for the commands that are told of them.
  void finish_warnings() { warnings_.finish(); }
  void finish();
  /// All is out, or nobody takes it.
  bool finished() const { return display_.drained(); }

 private:
  /// As of now.
  LiveRun look() const;
  void write_live();
  void write_usage();
  void write_record();
  void on_no_room(int fd, int error);
  void drain();
  /// "4 processes on 1 host (a: ranks 0-3), 2 threads each, run runs/..."
  std::string start_text() const;
  std::string logs_below(const std::string& run_folder) const;
  /// Says what would make the job's steps shorter; empty if that is not known, or nothing would.
  std::string advice(const Verdict& verdict) const;
  void start_page();

  Loop& loop_;
  const JobSpec& spec_;
  RunState state_;
  RunFolder folder_;
  LogFolder logs_;   ///< where they have a folder of their own
  Display display_;  ///< its sources are the agent pool's members
  Announcer announcer_;
  LiveFile live_file_;
  // By process.
  Figures figures_{0};
  std::vector<LastLine> lines_;
  std::vector<int> restarts_;                        ///< how often it has been started again, alone
  std::map<std::string, std::vector<GpuUse>> gpus_;  ///< by host
  Timer soon_;                                       ///< live.json is written
  Timer usage_;                                      ///< a line for usage.jsonl is due
  Warnings warnings_;
  std::optional<Trackers> trackers_;
  bool awaits_trackers_ = false;  ///< that is all that is left
  std::optional<SideCommand> page_;
};

/// The cores of this host, where it has more ranks than these; else 0.
int crowded_cores(const Plan& plan);

}  // namespace cohort::launch
