#include "launch/supervise/job.h"

#include "launch/output/text.h"
#include "launch/plan/plan.h"

#include <chrono>
#include <cstddef>
#include <utility>
#include <variant>

namespace cohort::launch {
namespace {

/// What comes within this time of each other is one change.
constexpr std::chrono::milliseconds kGather{30};

}  // namespace

Live::Live(Loop& loop, const RunFolder& folder, const RunState& state, Events events)
    : loop_(loop), state_(state), events_(std::move(events)), file_(folder) {}

void Live::begin_epoch() {
  roles_ = state_.plan.roles();
  figures_ = Figures(roles_.workers, roles_.others());
  lines_.assign(static_cast<std::size_t>(roles_.all()), {});
  restarts_.assign(lines_.size(), 0);
  changed();
}

void Live::take(const Reports& reports) {
  for (const RankReport& report : reports.ranks) figures_.report(report, Figures::Clock::now());
  changed();
}

void Live::take(const Output& output) {
  lines_[static_cast<std::size_t>(output.rank)].append(output.stream, output.bytes);
  changed();
}

void Live::process_ended(int process, bool well, const sys::ExitStatus& status) {
  figures_.ended(process, well, sys::to_string(status));
  changed();
}

void Live::starts_again(int process) {
  figures_.begins_anew(process);
  ++restarts_[static_cast<std::size_t>(process)];
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
  soon_ = Timer();
  LiveRun run = look();
  events_.on_summary(run.state == "ended" ? std::string() : summary(run, run.time));
  file_.write(std::move(run));
  if (const auto why = file_.complaint()) events_.on_trouble(*why);
}

LiveRun Live::look() const {
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
  if (lines_.empty()) return run;  // the plan may change until there are ranks
  for (const PlannedHost& host : state_.plan.hosts) run.hosts.push_back({host.name, host.first_rank, host.ranks});
  const std::vector<std::string> hosts = hosts_of_processes(state_.plan);
  std::vector<RankFigures> figures = figures_.look(Figures::Clock::now());
  for (std::size_t i = 0; i < figures.size(); ++i) {
    RankFigures& one = figures[i];
    const int process = static_cast<int>(i);
    if (roles_.is_rank(process))
      run.ranks.push_back({std::move(one), lines_[i].text()});
    else
      run.others.push_back({roles_.name_of(process), hosts[i], one.state, one.memory, lines_[i].text(), restarts_[i]});
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
