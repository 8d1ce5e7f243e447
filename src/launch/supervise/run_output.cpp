#include "launch/supervise/run_output.h"

#include "base/files.h"
#include "base/hardware.h"
#include "base/log.h"
#include "base/parse.h"
#include "launch/output/other_hosts.h"
#include "launch/step_costs.h"
#include "telemetry/last_words.h"

#include <fcntl.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr const char* kPageFile = "page.url";
/// Time without a byte taken, after the job's end, after which the remaining output is dropped.
constexpr std::chrono::seconds kOutputTime(10);
/// Changes within this time are gathered into one write of live.json.
constexpr std::chrono::milliseconds kGather{30};
/// Interval between lines of usage.jsonl.
constexpr std::chrono::seconds kUsageEvery{5};
/// Time after the job's end for the exporters of --track to finish.
constexpr auto kTrackersTime = std::chrono::seconds(30);

}  // namespace

int crowded_cores(const Plan& plan) {
  const int cores = sys::usable_cores();
  const bool crowded =
      std::ranges::any_of(plan.hosts, [cores](const PlannedHost& host) { return host.local && host.ranks > cores; });
  return crowded ? cores : 0;
}

RunOutput::RunOutput(Loop& loop, const JobSetup& setup, const std::string& id)
    : loop_(loop),
      spec_(setup.spec),
      folder_(value_or_throw(make_run_folder({spec_.run_folder, setup.program.name, id.substr(0, 4)}))),
      display_(loop),
      announcer_(display_, spec_.json    ? Announcer::Form::Json
                           : spec_.quiet ? Announcer::Form::QuietText
                                         : Announcer::Form::Text),
      live_file_(folder_),
      warnings_(loop, *this, spec_.on_warning, fmt::format("{}-{}", setup.program.name, id)) {
  state_.job_id = fmt::format("{}-{}", setup.program.name, id);
  state_.program = setup.program;
  state_.command_line = spec_.command_line;
  state_.max_restarts = spec_.max_restarts;
  if (!folder_.earlier.empty() && !spec_.quiet)
    say(fmt::format("{} has a run before this one; its job.json and logs are now in {}", folder_.shown,
                    folder_.earlier));
}

void RunOutput::say(const std::string& text) {
  announcer_.say(text);
  state_.note(text);
  changed();
}

void RunOutput::show(const Warning& warning) {
  announcer_.warn(warning);
  state_.note(warning.text);
  changed();
}

void RunOutput::begin_attempt(int number) {
  static_cast<Attempt&>(state_) = {};
  state_.restarts = number;
  state_.start = utc_now();
  if (spec_.keep_logs) state_.log_folder = absolute_path(logs_below(folder_.path));
}

void RunOutput::set_plan(const Plan& plan, const std::vector<int>& shown) {
  display_.set_up(spec_, plan, shown);
  const Roles roles = plan.roles();
  state_.plan = plan;
  state_.stage = "starting";
  state_.pids.assign(static_cast<std::size_t>(roles.all()), 0);
  figures_ = Figures(roles.workers, roles.others());
  lines_.assign(state_.pids.size(), {});
  restarts_.assign(lines_.size(), 0);
  changed();
}

void RunOutput::grow(const Plan& plan) {
  const auto all = static_cast<std::size_t>(plan.world_size);
  state_.plan = plan;
  state_.pids.resize(all, 0);
  figures_.grow(plan.world_size);
  lines_.resize(all);
  restarts_.resize(all, 0);
  display_.grow(plan);
  changed();
}

void RunOutput::started(const std::vector<int>& processes, const std::vector<std::int32_t>& pids) {
  for (std::size_t i = 0; i < processes.size(); ++i) state_.pids[static_cast<std::size_t>(processes[i])] = pids[i];
  changed();
}

void RunOutput::ending() {
  state_.stage = "ending";
  changed();
}

void RunOutput::running() {
  announcer_.started(state_, folder_.path, start_text());
  log::info("launch", "job {} is not contained: {}", state_.job_id, kNotContained);
  state_.stage = "running";
  state_.running_since = seconds_now();
  changed();
  start_page();
  write_record();
  if (trackers_ || spec_.track.empty()) return;
  // The exporters learn from job.json how the job goes on.
  trackers_.emplace(loop_, *this, spec_.track);
}

std::string RunOutput::start_text() const {
  const Plan& plan = state_.plan;
  std::string text = to_string(plan);
  if (plan.method == StartMethod::Launcher) {
    const int ranks = plan.hosts.front().ranks;
    const bool same = std::ranges::all_of(plan.hosts, [ranks](const PlannedHost& host) { return host.ranks == ranks; });
    text += same ? fmt::format(", -np {} of a launcher on each", ranks) : ", a launcher on each with its own -np";
  }
  if (const int cores = crowded_cores(plan); cores > 0)
    text += fmt::format(", more than the {} core{} here", cores, cores == 1 ? "" : "s");
  if (spec_.bind == Binding::Core) text += ", each bound to its share of the cores";
  if (const int threads = state_.threads; threads > 0)
    text += fmt::format(", {} thread{} each", threads, threads == 1 ? "" : "s");
  if (!spec_.shares.empty()) text += ", shares " + (spec_.shares == "measured" ? "by measured speed" : spec_.shares);
  return spec_.keep_logs ? text + ", run " + folder_.shown : text;
}

void RunOutput::start_page() {
  if (page_ || !spec_.page) return;
  // Anyone with the page's address can open it, so only a terminal shows it: others may read batch systems' output.
  auto page = SideCommand::cohort({"watch", folder_.path, "--page"}, SIGKILL);
  page.output = SideCommand::Options::Output::All;
  page.on_output = by_lines([this](const std::string& line) {
    if (line.find("?token=") == std::string::npos || ::isatty(STDERR_FILENO) != 0) return announcer_.say(line);
    if (auto kept = replace_file(folder_, kPageFile, line + "\n"); !kept) return announcer_.say(kept.error().what());
    announcer_.say(fmt::format("the page's address, with its token: cat {}/{}", folder_.shown, kPageFile));
  });
  try {
    page_.emplace(loop_, std::move(page));
  } catch (const Error& error) {
    say(fmt::format("no page: {}", error.what()));
  }
}

void RunOutput::take(const std::string& host, const Reports& reports) {
  gpus_[host] = reports.gpus;
  if (!usage_) usage_ = Timer(loop_, kUsageEvery, [this] { write_usage(); });
  for (const RankReport& report : reports.ranks) figures_.report(report, Figures::Clock::now());
  changed();
}

void RunOutput::take(std::size_t source, const Output& output) {
  lines_[static_cast<std::size_t>(output.rank)].append(output.stream, output.bytes);
  changed();
  display_.feed(source, output);
}

void RunOutput::rank_ended(const Ending& ending) {
  announcer_.rank_ended(ending);
  if (ending.role == Role::Worker && ending.status.success() && ending.last.times.steps > 0)
    state_.trained.push_back(ending);
  // The stack of an exception or a crash is long; it is at the end of the log.
  const bool stack = ending.words.find(status::kThrowStack) != std::string::npos ||
                     ending.words.find(status::kNativeStack) != std::string::npos;
  if (!stack || !spec_.keep_logs) return;
  const auto folder = open_folder(state_.log_folder);
  if (!folder) return;
  const std::string name = log_name(ending.role, ending.rank, Stream::Stderr);
  const sys::UniqueFd log(::openat(folder->get(), name.c_str(), O_WRONLY | O_APPEND | O_NOFOLLOW | O_CLOEXEC));
  const std::string text = fmt::format("cohort: its own last words:\n{}", ending.words);
  if (log) static_cast<void>(!::write(log.get(), text.data(), text.size()));  // a full disk has been reported already
}

void RunOutput::process_ended(int process, bool well, const sys::ExitStatus& status) {
  figures_.ended(process, well, sys::to_string(status));
  changed();
}

void RunOutput::starts_again(int process, const Ending& ending) {
  figures_.begins_anew(process);
  ++restarts_[static_cast<std::size_t>(process)];
  state_.server_failures.push_back(ending);
  changed();
  write_record();
}

void RunOutput::started_again(int process, const Ending& before, int pid) {
  state_.pids[static_cast<std::size_t>(process)] = pid;
  announcer_.started_again(before, pid);
  write_record();
}

void RunOutput::members_changed(const rendezvous::Membership& now, const std::string& text) {
  announcer_.members_changed(state_.members.back().now, now, text);
  state_.members.push_back({utc_now(), now});
  state_.members_since = seconds_now();
  state_.note(text);
  changed();
  write_record();
}

void RunOutput::members_formed(std::chrono::milliseconds after) {
  MembersChange& change = state_.members.back();
  change.form_ms = after.count();
  const std::size_t size = change.now.members.size();
  announcer_.members_formed(
      change, fmt::format("epoch {} is formed: {} in a world of it after {} ms", change.now.epoch,
                          size == 1 ? "its member is" : fmt::format("its {} members are", size), after.count()));
  changed();
  write_record();
}

void RunOutput::changed() {
  if (!soon_)
    soon_ = Timer(loop_, kGather, [this] {
      soon_ = Timer();
      if (!live_file_.due()) return changed();
      write_live();
    });
}

void RunOutput::write_live() {
  soon_ = Timer();
  LiveRun run = look();
  if (!spec_.quiet) display_.set_status(run.state == "ended" ? std::string() : summary(run, run.time));
  live_file_.write(std::move(run));
  if (const auto why = live_file_.complaint()) say(fmt::format("{}; the job goes on, but nobody can watch it", *why));
}

void RunOutput::write_usage() {
  usage_ = Timer();  // the next report starts this timer again
  const LiveRun run = look();
  warnings_.record_usage(usage_line(run, gpus_));
}

LiveRun RunOutput::look() const {
  LiveRun run;
  run.time = seconds_now();
  run.job = state_.job_id;
  run.program = state_.program.name;
  run.state = state_.stage;
  run.start = state_.running_since;
  run.exit_status = state_.exit_status;
  run.reason = state_.reason;
  run.restarts = state_.restarts;
  run.logs = state_.log_folder;
  run.notices = state_.notices;
  if (!state_.members.empty()) {
    const rendezvous::Membership& now = state_.members.back().now;
    run.members = {now.epoch,
                   static_cast<int>(now.members.size()),
                   to_ranges(workers_of(now)),
                   now.cause,
                   state_.members_since,
                   state_.members.back().form_ms.value_or(-1)};
  }
  for (const PlannedHost& host : state_.plan.hosts) {
    LiveHost& live = run.hosts.emplace_back(LiveHost{host.name, host.first_rank, host.ranks});
    if (const auto gpus = gpus_.find(host.name); gpus != gpus_.end()) describe_gpus(gpus->second, live);
  }
  const Roles roles = state_.plan.roles();
  const std::vector<std::string> hosts = hosts_of_processes(state_.plan);
  std::vector<RankFigures> figures = figures_.look(Figures::Clock::now());
  for (std::size_t i = 0; i < figures.size(); ++i) {
    RankFigures& one = figures[i];
    const int process = static_cast<int>(i);
    if (roles.is_rank(process))
      run.ranks.push_back({std::move(one), lines_[i].text()});
    else
      run.others.push_back({roles.name_of(process), hosts[i], one.state, one.memory, lines_[i].text(), restarts_[i]});
  }
  return run;
}

void RunOutput::on_no_room(int fd, int error) {
  const std::string logs = shown_logs();
  const std::string text =
      fmt::format("{}: {}; the job goes on, and what does not fit there is {}", fd == 1 ? "stdout" : "stderr",
                  errno_text(error), logs.empty() ? "lost" : "only in " + logs);
  display_.say(text);  // on stderr in any form: stdout may be the full one
  state_.output_lost = text;
  if (state_.stage != "starting") write_record();
}

void RunOutput::attempt_ended(const JobEnd& end, const Verdict& verdict, const Restarts::Decision& restart) {
  if (const std::string doubt = doubt_about(end, verdict); !doubt.empty() && !spec_.quiet && !spec_.tf_config)
    say(doubt);
  if (const std::string text = advice(verdict); !text.empty()) say(text);
  announcer_.ended(end, verdict, restart);
  if (verdict.post_mortem) state_.failure = verdict.post_mortem->first;
  state_.end = utc_now();
  state_.exit_status = verdict.status;
  state_.reason = verdict.reason;
  state_.attempts.push_back(static_cast<const Attempt&>(state_));
  state_.stage = "ended";
  write_live();
  if (restart.again) {  // the record lists this end as the attempt's, and not as the job's
    state_.end.clear();
    state_.exit_status.reset();
  }
  write_record();
}

std::string RunOutput::advice(const Verdict& verdict) const {
  constexpr double kFewest = 20;  // steps; fewer are too few for a typical step
  if (verdict.status != 0 || spec_.quiet || !state_.members.empty() ||
      static_cast<int>(state_.trained.size()) != state_.plan.world_size) {
    return {};
  }
  std::vector<RankTimes> ranks;
  for (const Ending& one : state_.trained) ranks.push_back(times_of(one.rank, one.host, one.last.times));
  if (!takes_steps(ranks) || ranks.front().steps < kFewest) return {};
  const std::string text = advice_of(costs_of(ranks, state_.plan.machines), {});
  return text.empty() ? text : fmt::format("{}; `cohort bench plan {}` has more", text, folder_.shown);
}

Display::News RunOutput::take_news() {
  Display::News news = display_.take();
  for (const auto& [fd, error] : news.no_room) on_no_room(fd, error);
  if (awaits_trackers_ && trackers_->all_ended()) drain();
  return news;
}

void RunOutput::finish() {
  page_.reset();
  ::unlinkat(folder_.fd.get(), kPageFile, 0);
  if (!trackers_) return drain();
  trackers_->finish(kTrackersTime);
  awaits_trackers_ = true;
}

void RunOutput::drain() {
  awaits_trackers_ = false;
  const std::string logs = shown_logs();
  display_.drain(
      kOutputTime,
      fmt::format("the job is over and its output has not been read for {} s, so the rest of it is not shown{}",
                  kOutputTime.count(), logs.empty() ? "" : "; the complete logs are in " + logs));
}

std::string RunOutput::logs_below(const std::string& run_folder) const {
  if (!spec_.keep_logs) return {};
  const std::string first = run_folder + "/logs";
  return state_.restarts == 0 ? first : fmt::format("{}/restart-{}", first, state_.restarts);
}

void RunOutput::write_record() {
  if (auto written = write_job_record(folder_, to_json(state_)); !written) say(written.error().what());
}

}  // namespace cohort::launch
