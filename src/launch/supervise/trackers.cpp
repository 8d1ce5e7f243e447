#include "launch/supervise/trackers.h"

#include <cohort/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <utility>

namespace cohort::launch {
namespace {

constexpr auto kNoticeTime = std::chrono::seconds(2);
constexpr std::string_view kOwnPrefix = "cohort: ";  // which `say` puts before each line anyway

}  // namespace

Trackers::Trackers(Loop& loop, Options options) : loop_(loop), options_(std::move(options)) {
  for (const std::string& destination : options_.destinations) {
    trackers_.push_back(std::make_unique<Tracker>());
    trackers_.back()->destination = destination;
    try {
      start(*trackers_.back());
    } catch (const Error& error) {
      trackers_.pop_back();
      options_.say(fmt::format("--track {}: {}", destination, error.what()));
    }
  }
}

void Trackers::start(Tracker& tracker) {
  SideCommand::Options command;
  command.arguments = {"export", options_.run_folder, "--to", tracker.destination, "--follow"};
  command.output = SideCommand::Output::Errors;
  command.parent_death_signal = SIGTERM;
  command.say = [this](const std::string& line) {
    options_.say(line.starts_with(kOwnPrefix) ? line.substr(kOwnPrefix.size()) : line);
  };
  command.on_ended = [this, &tracker](const sys::ExitStatus& status) { on_ended(tracker, status); };
  tracker.command.emplace(loop_, std::move(command));
}

std::vector<pid_t> Trackers::pids() const {
  std::vector<pid_t> pids;
  for (const auto& tracker : trackers_) {
    if (tracker->command) pids.push_back(tracker->command->pid());
  }
  return pids;
}

void Trackers::on_ended(Tracker& tracker, const sys::ExitStatus& status) {
  if (!status.success())
    options_.say(
        fmt::format("--track {}: ended with {}; {}", tracker.destination, to_string(status), way_out(tracker)));
  tracker.command.reset();
  check_done();
}

std::string Trackers::way_out(const Tracker& tracker) const {
  return fmt::format("what is missing there: cohort export {} --to '{}'", options_.run_folder, tracker.destination);
}

void Trackers::finish(std::chrono::milliseconds limit, std::function<void()> on_done) {
  on_done_ = std::move(on_done);
  limit_ = Timer(loop_, limit, [this] { on_limit(); });
  notice_ = Timer(loop_, kNoticeTime, [this, limit] {
    for (const auto& tracker : trackers_) {
      if (!tracker->command) continue;
      options_.say(fmt::format("waiting for --track {} to catch up, for {:g} s at most (Ctrl-C ends that; {})",
                               tracker->destination, std::chrono::duration<double>(limit).count(), way_out(*tracker)));
    }
  });
  check_done();
}

void Trackers::on_limit() {
  for (const auto& tracker : trackers_) {
    if (!tracker->command) continue;
    tracker->command.reset();
    options_.say(fmt::format("--track {}: it has not caught up in time; {}", tracker->destination, way_out(*tracker)));
  }
  check_done();
}

void Trackers::check_done() {
  const bool all = std::all_of(trackers_.begin(), trackers_.end(), [](const auto& one) { return !one->command; });
  if (!all || !on_done_) return;
  limit_ = Timer();
  notice_ = Timer();
  // Not from within a callback of what this has to do with.
  done_ = Timer(loop_, {}, [call = std::exchange(on_done_, nullptr)] { call(); });
}

}  // namespace cohort::launch
