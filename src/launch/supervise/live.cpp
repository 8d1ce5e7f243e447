#include "launch/supervise/live.h"

#include "launch/show/text.h"

#include <chrono>
#include <cstddef>
#include <utility>
#include <variant>

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

namespace {

/// Good clocks drift by some parts in a million: 1 ms in a minute at the worst, most of which is taken out again.
constexpr auto kMeasureEvery = std::chrono::minutes(1);

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

status::HostTrace host_of(const AgentHandle& agent) { return {agent.host.index, agent.host.name}; }

}  // namespace

Tracing::Tracing(Loop& loop, const std::string& run_folder, std::function<void(std::string)> on_trouble)
    : loop_(loop), pieces_(run_folder, std::move(on_trouble)) {}

void Tracing::on_joined(AgentHandle& agent) {
  // An agent on this host has this very clock.
  if (agent.host.local) return pieces_.keep_offset(host_of(agent), {now_ns(), 0, 0});
  ClockSync::Ports ports;
  ports.now = now_ns;
  ports.send = [&agent](std::uint64_t number) { agent.channel->send(ClockQuestion{number}); };
  ports.found = [this, &agent](const ClockOffset& offset) { pieces_.keep_offset(host_of(agent), offset); };
  auto& clock = clocks_[agent.host.index];
  clock = std::make_unique<ClockSync>(std::move(ports));
  clock->begin();
  if (!again_) measure_again();
}

void Tracing::measure_again() {
  again_ = Timer(loop_, kMeasureEvery, [this] {
    for (const auto& [host, clock] : clocks_) clock->begin();
    measure_again();
  });
}

bool Tracing::take(const AgentHandle& agent, const Message& message) {
  if (const auto* piece = std::get_if<TracePiece>(&message)) {
    pieces_.keep(host_of(agent), piece->base_ns, piece->packets);
  } else if (const auto* answer = std::get_if<ClockAnswer>(&message)) {
    if (const auto clock = clocks_.find(agent.host.index); clock != clocks_.end())
      clock->second->answer(answer->number, answer->now_ns);
  } else {
    return false;
  }
  return true;
}

void Tracing::on_ending(const AgentHandle& agent) {
  if (const auto clock = clocks_.find(agent.host.index); clock != clocks_.end()) clock->second->begin();
}

void Tracing::finish() {
  again_ = Timer();
  for (const auto& [host, clock] : clocks_) clock->end();
}

}  // namespace cohort::launch
