#include "launch/supervise/live.h"

#include "launch/show/text.h"

#include <cstddef>
#include <utility>

namespace cohort::launch {
namespace {

/// What comes within this time of each other is one change.
constexpr std::chrono::milliseconds kGather{30};
constexpr std::size_t kMostNotices = 20;

}  // namespace

Live::Live(Loop& loop, const RunFolder& folder, Events events)
    : loop_(loop), events_(std::move(events)), file_(folder) {}

void Live::begin(const std::string& job, const std::string& program) {
  run_.job = job;
  run_.program = program;
}

void Live::begin_epoch(const Plan& plan, int restarts, const std::string& logs) {
  run_.state = "starting";
  run_.exit_status.reset();
  run_.reason.clear();
  run_.restarts = restarts;
  run_.logs = logs;
  run_.hosts.clear();
  for (const PlannedHost& host : plan.hosts) run_.hosts.push_back({host.name, host.first_rank, host.ranks});
  roles_ = plan.roles();
  figures_ = Figures(roles_.workers);
  others_ = Figures(roles_.others());
  run_.others.clear();
  const std::vector<std::string> hosts = hosts_of_processes(plan);
  for (int process = roles_.workers; process < roles_.all(); ++process)
    run_.others.push_back({roles_.name_of(process), hosts[static_cast<std::size_t>(process)], {}, 0, {}, 0});
  lines_.assign(static_cast<std::size_t>(roles_.all()), {});
  changed();
}

void Live::started() {
  run_.state = "running";
  run_.start = seconds_now();
  changed();
}

void Live::ending() {
  run_.state = "ending";
  changed();
}

void Live::epoch_ended(int exit_status, const std::string& reason) {
  run_.state = "ended";
  run_.exit_status = exit_status;
  run_.reason = reason;
  soon_ = Timer();
  write();
}

void Live::take(const Reports& reports) {
  for (const RankReport& report : reports.ranks) {
    if (roles_.is_rank(report.rank)) {
      figures_.report(report, Figures::Clock::now());
    } else {
      RankReport other = report;
      other.rank -= roles_.workers;
      others_.report(other, Figures::Clock::now());
    }
  }
  changed();
}

void Live::take(const Output& output) {
  lines_[static_cast<std::size_t>(output.rank)].append(output.stream, output.bytes);
  changed();
}

void Live::process_ended(int process, bool well, const sys::ExitStatus& status) {
  if (roles_.is_rank(process))
    figures_.ended(process, well, sys::to_string(status));
  else
    others_.ended(process - roles_.workers, well, sys::to_string(status));
  changed();
}

void Live::starts_again(int process) {
  const int other = process - roles_.workers;
  others_.begins_anew(other);
  ++run_.others[static_cast<std::size_t>(other)].restarts;
  changed();
}

void Live::note(const std::string& text) {
  if (run_.notices.size() >= kMostNotices) run_.notices.erase(run_.notices.begin());
  run_.notices.push_back({seconds_now(), text});
  changed();
}

void Live::changed() {
  if (!soon_)
    soon_ = Timer(loop_, kGather, [this] {
      soon_ = Timer();
      if (!file_.due()) return changed();
      write();
    });
}

void Live::write() {
  LiveRun run = look();
  events_.on_summary(run.state == "ended" ? std::string() : summary(run, run.time));
  file_.write(std::move(run));
  if (const auto why = file_.complaint()) events_.on_trouble(*why);
}

LiveRun Live::look() const {
  LiveRun run = run_;
  run.time = seconds_now();
  std::vector<RankFigures> figures = figures_.look(Figures::Clock::now());
  run.ranks.resize(figures.size());
  for (std::size_t i = 0; i < figures.size(); ++i) run.ranks[i] = {std::move(figures[i]), lines_[i].text()};
  std::vector<RankFigures> others = others_.look(Figures::Clock::now());
  for (std::size_t i = 0; i < others.size(); ++i) {
    LiveOther& other = run.others[i];
    other.state = std::move(others[i].state);
    other.memory = others[i].memory;
    other.line = lines_[static_cast<std::size_t>(roles_.workers) + i].text();
  }
  return run;
}

}  // namespace cohort::launch
