// Reports of `cohort run` itself about a job: lines on stderr for people, or (--json) events on stdout, where the
// ranks' lines are events too. An event is one line of JSON, with at least "event" and "time" (UTC);
// docs/reference/run.md lists the other fields. Names are never changed, only added. Events and notices are pure except
// for the clock; the Announcer belongs to the supervisor and its thread.
#pragma once

#include "launch/health/health.h"
#include "launch/health/verdict.h"
#include "launch/messages.h"
#include "launch/output/display.h"
#include "launch/output/job_record.h"
#include "launch/plan/plan.h"

#include <optional>
#include <string>
#include <string_view>

namespace cohort::launch {

struct OutputLine {
  int rank = 0;
  std::string_view host;
  Stream stream = Stream::Stdout;
  std::string_view text;     ///< bytes that are no UTF-8 are replaced
  bool continued = false;    ///< continues the line before, which was too long for one event
  Role role = Role::Worker;  ///< the role in which `rank` is the number
};
std::string output_event(const OutputLine& line);

std::string exit_event(const Ending& ending);
/// Returns the post-mortem as an event.
std::string failure_event(const PostMortem& post_mortem);

class Announcer {
 public:
  enum class Form { Text, QuietText, Json };
  Announcer(Display& display, Form form) : display_(display), form_(form) {}

  /// Reports a text for people.
  void say(const std::string& text);
  void warn(const Warning& warning);
  /// Reports that all ranks run; `text` describes the job.
  void started(const RunState& state, const std::string& run_folder, const std::string& text);
  void rank_ended(const Ending& ending);
  /// Reports that the members have formed a world.
  void members_formed(const MembersChange& change, const std::string& text);
  /// Reports that an elastic job has changed its members; `text` says who has changed, and why.
  void members_changed(const rendezvous::Membership& before, const rendezvous::Membership& now,
                       const std::string& text);
  /// Reports that a process has been started in place of the one that ended with `before`.
  void started_again(const Ending& before, int pid);
  /// Reports the post-mortem before the job's end, when a rank has failed and others are slow to end.
  void failed(const PostMortem& post_mortem);
  /// Reports the end of an attempt: a post-mortem or the reason, and whether another attempt follows.
  void ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

 private:
  void ended_as_events(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart);

  Display& display_;
  const Form form_;
  std::optional<std::string> told_;  ///< subject of the post-mortem that was reported before the end
};

}  // namespace cohort::launch
