// What happens to a job, as one line of JSON for each event: what `cohort run --json` writes. Every line has "event"
// and "time" (UTC); docs/reference/run.md lists the rest. Names are never changed, only added. Pure but for the clock.
#pragma once

#include "launch/messages.h"
#include "launch/record/job_record.h"
#include "launch/watch/post_mortem.h"
#include "launch/watch/warning.h"

#include <string>
#include <string_view>

namespace cohort::launch {

/// All ranks run.
std::string start_event(const JobRecord& record, std::string_view run_folder);

struct OutputLine {
  int rank = 0;
  std::string_view host;
  Stream stream = Stream::Stdout;
  std::string_view text;     ///< bytes that are no UTF-8 are replaced
  bool continued = false;    ///< it goes on with the line before, which was too long for one
  Role role = Role::Worker;  ///< whose number `rank` is
};
std::string output_event(const OutputLine& line);

/// Something that a person should be told.
std::string notice_event(std::string_view text);
std::string warning_event(const Warning& warning);
std::string exit_event(const Ending& ending);
/// In the place of a process that has ended so.
std::string started_again_event(const Ending& before, int pid);
/// The post-mortem.
std::string failure_event(const PostMortem& post_mortem);
std::string restart_event(std::string_view text, int number);

struct EndEvent {
  int exit_status = 0;
  std::string_view reason;  ///< why it did not end by itself, or could not be started
  double seconds = 0;
  bool again = false;    ///< another attempt follows
  bool requeue = false;  ///< the ranks have saved, and ask to be started again
};
std::string end_event(const EndEvent& end);

}  // namespace cohort::launch
