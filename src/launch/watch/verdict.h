// What is said of a job that has ended, and the exit status that it gives. Pure.
#pragma once

#include "launch/watch/post_mortem.h"
#include "launch/watch/restarts.h"

#include <optional>
#include <string>
#include <vector>

namespace cohort::launch {

/// How a job came to its end.
struct JobEnd {
  Roles roles;
  std::vector<Ending> endings;
  bool early = false;                   ///< processes without an ending still run
  std::string start_failure;            ///< why it could not be started, where it could not
  std::string stop_reason;              ///< why it was stopped, where it was
  std::optional<int> stop_status;       ///< the exit status, where it is not a rank's
  bool told_to_end = false;             ///< it was stopped because somebody wanted that
  bool stuck = false;                   ///< it was stopped because it did not go on
  bool quiet = false;                   ///< nobody is left to read the reason
  double seconds = 0;                   ///< it ran
  std::vector<std::string> doing_then;  ///< by process: what it was doing when the first failure was seen
  std::string log_folder;
  bool colour = false;
};

struct Verdict {
  int status = 0;
  bool requeue = false;                   ///< all ranks have saved what they need, and some ask to be started again
  std::string reason;                     ///< why it ended, where it did not by itself
  std::string text;                       ///< for stderr; whole lines, or nothing
  std::optional<PostMortem> post_mortem;  ///< where a rank's failure ended the job
  std::optional<Breakdown> breakdown;     ///< where starting it again may help
};

Verdict judge(const JobEnd& end);

/// Of a job that has ended well: its ranks may have been so many runs of one rank each. Empty: they were not.
std::string doubt_about(const JobEnd& end, const Verdict& verdict);

}  // namespace cohort::launch
