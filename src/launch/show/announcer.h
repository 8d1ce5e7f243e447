// What `cohort run` itself has to tell about a job: lines on stderr for people, or (--json) events on stdout, where the
// ranks' lines are events too. An event is one line of JSON; every one has "event" and "time" (UTC);
// docs/reference/run.md lists the rest. Names are never changed, only added. Events and notices are pure but for the
// clock; the Announcer belongs to the supervisor and its thread.
#pragma once

#include "launch/messages.h"
#include "launch/plan/plan.h"
#include "launch/record/job_record.h"
#include "launch/show/display.h"
#include "launch/watch/verdict.h"
#include "launch/watch/warning.h"

#include <optional>
#include <string>
#include <string_view>

namespace cohort::launch {

struct OutputLine {
  int rank = 0;
  std::string_view host;
  Stream stream = Stream::Stdout;
  std::string_view text;     ///< bytes that are no UTF-8 are replaced
  bool continued = false;    ///< it goes on with the line before, which was too long for one
  Role role = Role::Worker;  ///< whose number `rank` is
};
std::string output_event(const OutputLine& line);

std::string exit_event(const Ending& ending);
/// The post-mortem.
std::string failure_event(const PostMortem& post_mortem);

struct StartNotice {
  const Plan& plan;
  int threads = 0;  ///< of each rank; 0: not known
  bool bound = false;
  int cores = 0;           ///< that this process may use, where its host has more ranks than that
  std::string run_folder;  ///< empty: not worth a word
  bool launchers = false;  ///< one on each host, whose -np counts there
};
/// "4 processes on 1 host (a: ranks 0-3), 2 threads each, run runs/..."
std::string to_string(const StartNotice& notice);

struct StopNotice {
  std::string reason;  ///< why the job is being ended; empty where that was said before
  int ranks = 0;       ///< still running
  std::string others;  ///< where no rank is: "servers 0-1"
  double seconds_left = 0;
  int next_signal = 0;
  bool at_terminal = false;  ///< somebody there can press Ctrl-C
};
/// "told to end by SIGINT; 3 ranks still running, 4 s until SIGTERM; Ctrl-C again: now"
std::string to_string(const StopNotice& notice);

/// What is said when nobody reads the rest of a job's output.
struct UnreadNotice {
  double seconds = 0;
  std::string log_folder;  ///< empty: there are no logs
};
std::string to_string(const UnreadNotice& notice);

class Announcer {
 public:
  enum class Form { Text, QuietText, Json };
  Announcer(Display& display, Form form) : display_(display), form_(form) {}

  /// Something that a person should be told.
  void say(const std::string& text);
  void warn(const Warning& warning);
  /// All ranks run.
  void started(const StartNotice& notice, const JobRecord& record, const std::string& run_folder);
  void rank_ended(const Ending& ending);
  /// In the place of a process that has ended so.
  void started_again(const Ending& before, int pid);
  /// A rank has failed and others take their time to end: the post-mortem before the end.
  void failed(const PostMortem& post_mortem);
  /// The last word on an attempt: a post-mortem, or why it ended; or that another one follows.
  void ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

 private:
  void ended_as_events(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

  Display& display_;
  const Form form_;
  std::optional<std::string> told_;  ///< who a post-mortem was about that was told before the end
};

}  // namespace cohort::launch
