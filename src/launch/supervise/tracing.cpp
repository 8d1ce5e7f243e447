#include "launch/supervise/tracing.h"

#include <chrono>
#include <utility>
#include <variant>

namespace cohort::launch {
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
