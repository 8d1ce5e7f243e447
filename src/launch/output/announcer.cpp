#include "launch/output/announcer.h"

#include "base/signals.h"
#include "launch/output/run_folder.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>

namespace cohort::launch {
namespace {

using Json = nlohmann::ordered_json;

Json begin(std::string_view event) {
  Json out;
  out["event"] = event;
  out["time"] = utc_now();
  return out;
}

std::string line_of(const Json& event) { return event.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n"; }

void add(Json& out, const Ending& ending) {
  add_ending(out, ending);
  if (ending.status.signal != 0) {
    out["signal"] = sys::signal_name(ending.status.signal);
    out["core_dumped"] = ending.status.core_dumped;
  } else {
    out["exit_code"] = ending.status.code;
  }
  out["after_seconds"] = ending.after_seconds;
}

Json lines_of(std::string_view text) {
  Json out = Json::array();
  while (!text.empty()) {
    const auto end = text.find('\n');
    out.push_back(text.substr(0, end));
    if (end == std::string_view::npos) break;
    text.remove_prefix(end + 1);
  }
  return out;
}

std::string start_event(const RunState& record, std::string_view run_folder) {
  Json out = begin("start");
  out["job_id"] = record.job_id;
  out["attempt"] = record.attempts.size();
  out["run_folder"] = run_folder;
  if (!record.log_folder.empty()) out["logs"] = record.log_folder;
  out["world_size"] = record.plan.world_size;
  out["hosts"] = host_entries(record.plan);
  add_pids(out, record.plan.roles(), record.pids);
  out["threads_per_rank"] = record.threads;
  return line_of(out);
}

std::string notice_event(std::string_view text) {
  Json out = begin("notice");
  out["text"] = text;
  return line_of(out);
}

std::string warning_event(const Warning& warning) {
  Json out = begin("warning");
  out["kind"] = to_string(warning.kind);
  out["text"] = warning.text;
  if (warning.rank) out["rank"] = *warning.rank;
  if (warning.step) out["step"] = *warning.step;
  return line_of(out);
}

std::string started_again_event(const Ending& before, int pid) {
  Json out = begin("process_started");
  add_process(out, before.role, before.rank);
  out["host"] = before.host;
  out["pid"] = pid;
  out["restarts"] = before.restarts + 1;
  return line_of(out);
}

std::string members_event(const rendezvous::Membership& before, const rendezvous::Membership& now,
                          std::string_view text) {
  const auto missing = [](const std::vector<int>& from, const std::vector<int>& in) {
    std::vector<int> rest;
    std::ranges::copy_if(from, std::back_inserter(rest),
                         [&in](int one) { return std::ranges::find(in, one) == in.end(); });
    return rest;
  };
  const std::vector<int> old = workers_of(before), members = workers_of(now);
  Json out = begin("members");
  out["epoch"] = now.epoch;
  out["workers"] = members;
  out["left"] = missing(old, members);
  out["joined"] = missing(members, old);
  out["cause"] = now.cause;
  out["text"] = text;
  return line_of(out);
}

std::string formed_event(const MembersChange& change, std::string_view text) {
  Json out = begin("members_formed");
  out["epoch"] = change.now.epoch;
  out["size"] = change.now.members.size();
  if (change.form_ms) out["form_ms"] = *change.form_ms;
  out["text"] = text;
  return line_of(out);
}

std::string restart_event(std::string_view text, int number) {
  Json out = begin("restart");
  out["text"] = text;
  out["number"] = number;
  return line_of(out);
}

}  // namespace

std::string output_event(const OutputLine& line) {
  Json out = begin("output");
  add_process(out, line.role, line.rank);
  out["host"] = line.host;
  out["stream"] = line.stream == Stream::Stderr ? "stderr" : "stdout";
  out["line"] = line.text;
  if (line.continued) out["continued"] = true;
  return line_of(out);
}

std::string exit_event(const Ending& ending) {
  Json out = begin(ending.role == Role::Worker ? "rank_ended" : "process_ended");
  add(out, ending);
  if (ending.last.step > 0) out["step"] = ending.last.step;
  if (ending.last.times.steps > 0 || ending.last.times.operations > 0) out["times"] = to_json(ending.last.times);
  return line_of(out);
}

std::string failure_event(const PostMortem& post_mortem) {
  const Ending& first = post_mortem.first;
  Json out = begin("failure");
  add(out, first);
  out["out_of_memory"] = first.out_of_memory;
  if (first.last.has_page) {
    out["doing"] = doing(first);
    out["step"] = first.last.step;
    Json groups = Json::array();
    for (const GroupReport& group : first.last.groups) {
      if (group.id == 0) continue;
      groups.push_back({{"rank", group.rank},
                        {"size", group.size},
                        {"operation", group.operation},
                        {"begun", group.begun},
                        {"ended", group.ended},
                        {"waiting", group.waiting}});
    }
    out["groups"] = groups;
  }
  out["words"] = lines_of(first.words);
  out["last_stderr"] = lines_of(first.last_stderr);
  out["advice"] = advice(first);
  out["world_size"] = post_mortem.world_size;
  out["ended_well_before"] = post_mortem.ended_well;
  out["still_running"] = post_mortem.running;
  out["others"] = post_mortem.others;
  if (!post_mortem.log_folder.empty()) out["logs"] = post_mortem.log_folder;
  return line_of(out);
}

void Announcer::say(const std::string& text) {
  if (form_ == Form::Json) return display_.write(1, notice_event(text));
  display_.say(text);
}

void Announcer::warn(const Warning& warning) {
  if (form_ == Form::Json) return display_.write(1, warning_event(warning));
  display_.say(warning.text);
}

void Announcer::started(const RunState& state, const std::string& run_folder, const std::string& text) {
  if (form_ == Form::Json) return display_.write(1, start_event(state, run_folder));
  if (form_ == Form::Text) display_.say(text);
}

void Announcer::rank_ended(const Ending& ending) {
  if (form_ == Form::Json) display_.write(1, exit_event(ending));
}

void Announcer::members_changed(const rendezvous::Membership& before, const rendezvous::Membership& now,
                                const std::string& text) {
  if (form_ == Form::Json) return display_.write(1, members_event(before, now, text));
  display_.say(text);
}

void Announcer::members_formed(const MembersChange& change, const std::string& text) {
  if (form_ == Form::Json) return display_.write(1, formed_event(change, text));
  if (form_ == Form::Text) display_.say(text);
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
  Json out = begin("end");
  out["exit_status"] = verdict.status;
  if (!verdict.reason.empty()) out["reason"] = verdict.reason;
  out["seconds"] = end.seconds;
  out["again"] = restart.again;  // true: another attempt follows
  if (verdict.requeue) out["requeue"] = true;
  display_.write(1, line_of(out));
}

}  // namespace cohort::launch
