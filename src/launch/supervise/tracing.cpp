#include "launch/supervise/tracing.h"

#include <algorithm>
#include <chrono>
#include <variant>

namespace cohort::launch {
namespace {

/// Good clocks drift by some parts in a million: at worst 1 ms in a minute, most of which is corrected.
constexpr auto kMeasureEvery = std::chrono::minutes(1);

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }

status::HostTrace host_of(const AgentHandle& agent) { return {agent.host.index, agent.host.name}; }

}  // namespace

void Tracing::on_joined(AgentHandle& agent) {
  // An agent on this host has the same clock.
  if (agent.host.local) {
    pieces_.keep_offset(host_of(agent), {now_ns(), 0, 0});
    return tell_troubles();
  }
  clocks_.erase(agent.host.index);
  follow(agent, clocks_.emplace(agent.host.index, Clock{agent}).first->second.sync.begin(now_ns()));
  if (!again_) measure_again();
}

// The agent's handle may go before the job's end.
void Tracing::on_closed(const AgentHandle& agent) {
  const auto clock = std::ranges::find_if(clocks_, [&agent](const auto& one) { return &one.second.agent == &agent; });
  if (clock != clocks_.end()) {
    follow(agent, clock->second.sync.end());
    clocks_.erase(clock);
  }
  pieces_.close(agent.host.index);
}

void Tracing::measure_again() {
  again_ = Timer(loop_, kMeasureEvery, [this] {
    for (auto& [host, clock] : clocks_) follow(clock.agent, clock.sync.begin(now_ns()));
    measure_again();
  });
}

void Tracing::follow(const AgentHandle& agent, const ClockSync::Next& next) {
  if (next.ask && agent.channel != nullptr) agent.channel->send(ClockQuestion{*next.ask});
  if (next.found) pieces_.keep_offset(host_of(agent), *next.found);
  tell_troubles();
}

bool Tracing::take(AgentHandle& agent, const Message& message) {
  const auto clock = clocks_.find(agent.host.index);
  if (const auto* piece = std::get_if<TracePiece>(&message)) {
    pieces_.keep(host_of(agent), piece->base_ns, piece->events);
    tell_troubles();
  } else if (const auto* answer = std::get_if<ClockAnswer>(&message)) {
    if (clock != clocks_.end()) follow(agent, clock->second.sync.answer(answer->number, answer->now_ns, now_ns()));
  } else {
    // The message says that the agent's ranks begin to end.
    if (std::holds_alternative<Exited>(message) && clock != clocks_.end())
      follow(agent, clock->second.sync.begin(now_ns()));
    return false;
  }
  return true;
}

void Tracing::finish() {
  again_ = Timer();
  for (auto& [host, clock] : clocks_) follow(clock.agent, clock.sync.end());
}

void Tracing::tell_troubles() {
  for (const std::string& text : pieces_.take_troubles()) run_.say(text);
}

}  // namespace cohort::launch
