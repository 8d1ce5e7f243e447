#include "launch/show/announcer.h"

#include "launch/show/events.h"

#include <fmt/format.h>

namespace cohort::launch {

void Announcer::say(const std::string& text) {
  if (form_ == Form::Json) return display_.write(1, notice_event(text));
  display_.say(text);
}

void Announcer::warn(const Warning& warning) {
  if (form_ == Form::Json) return display_.write(1, warning_event(warning));
  display_.say(warning.text);
}

void Announcer::started(const StartNotice& notice, const JobRecord& record, const std::string& run_folder) {
  if (form_ == Form::Json) return display_.write(1, start_event(record, run_folder));
  if (form_ == Form::Text) display_.say(to_string(notice));
}

void Announcer::rank_ended(const Ending& ending) {
  if (form_ == Form::Json) display_.write(1, exit_event(ending));
}

void Announcer::started_again(const Ending& before, int pid) {
  if (form_ == Form::Json) display_.write(1, started_again_event(before, pid));
}

void Announcer::failed(const PostMortem& post_mortem) {
  told_ = post_mortem.first.name();
  if (form_ == Form::Json) return display_.write(1, failure_event(post_mortem));
  display_.write(2, to_string(post_mortem));
}

void Announcer::ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart) {
  if (form_ == Form::Json) return ended_as_events(end, verdict, restart);
  const bool told = verdict.post_mortem && told_ == verdict.post_mortem->first.name();
  if (told) {
    display_.say(fmt::format("all ranks have ended, after {:.1f} s", end.seconds));
  } else if (!restart.again && !verdict.text.empty()) {
    display_.write(2, verdict.text);
  }
  if (restart.text.empty()) return;
  display_.say(restart.again && !end.log_folder.empty() ? restart.text + "; logs in " + end.log_folder : restart.text);
}

void Announcer::ended_as_events(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart) {
  if (verdict.post_mortem && told_ != verdict.post_mortem->first.name())
    display_.write(1, failure_event(*verdict.post_mortem));
  if (restart.again) {
    display_.write(1, restart_event(restart.text, restart.number));
  } else if (!restart.text.empty()) {
    say(restart.text);
  }
  EndEvent event;
  event.exit_status = verdict.status;
  event.reason = verdict.reason;
  event.requeue = verdict.requeue;
  event.seconds = end.seconds;
  event.again = restart.again;
  display_.write(1, end_event(event));
}

}  // namespace cohort::launch
