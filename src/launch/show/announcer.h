// What `cohort run` itself has to tell about a job: lines on stderr for people, or (--json) events on stdout, where the
// ranks' lines are events too. Belongs to the supervisor and its thread.
#pragma once

#include "launch/record/job_record.h"
#include "launch/show/display.h"
#include "launch/show/notices.h"
#include "launch/watch/restarts.h"
#include "launch/watch/verdict.h"
#include "launch/watch/warning.h"

#include <optional>
#include <string>

namespace cohort::launch {

class Announcer {
 public:
  enum class Form { Text, QuietText, Json };
  Announcer(Display& display, Form form) : display_(display), form_(form) {}

  void say(const std::string& text);
  void warn(const Warning& warning);
  void started(const StartNotice& notice, const JobRecord& record, const std::string& run_folder);
  void rank_ended(const Ending& ending);
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
