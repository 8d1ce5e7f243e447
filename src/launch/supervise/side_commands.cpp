#include "launch/supervise/side_commands.h"

#include <cohort/error.h>

#include "base/env.h"
#include "base/result.h"
#include "launch/output/live_run.h"
#include "launch/processes.h"
#include "launch/supervise/run_output.h"
#include "net/address.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <utility>

namespace cohort::launch {

namespace {

constexpr auto kTrackNoticeTime = std::chrono::seconds(2);
constexpr std::string_view kOwnPrefix = "cohort: ";  // removed from lines, since `say` adds it to each

}  // namespace

Trackers::Trackers(Loop& loop, RunOutput& run, const std::vector<std::string>& destinations) : loop_(loop), run_(run) {
  for (const std::string& destination : destinations) {
    trackers_.push_back(std::make_unique<Tracker>());
    trackers_.back()->destination = destination;
    try {
      start(*trackers_.back());
    } catch (const Error& error) {
      trackers_.pop_back();
      run_.say(fmt::format("--track {}: {}", destination, error.what()));
    }
  }
}

void Trackers::start(Tracker& tracker) {
  auto command = SideCommand::cohort({"export", run_.folder().shown, "--to", tracker.destination, "--follow"}, SIGTERM);
  command.output = SideCommand::Options::Output::Errors;
  command.on_output = by_lines([this](const std::string& line) {
    run_.say(line.starts_with(kOwnPrefix) ? line.substr(kOwnPrefix.size()) : line);
  });
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
    run_.say(fmt::format("--track {}: ended with {}; {}", tracker.destination, to_string(status), way_out(tracker)));
  tracker.command.reset();
}

std::string Trackers::way_out(const Tracker& tracker) const {
  return fmt::format("what is missing there: cohort export {} --to '{}'", run_.folder().shown, tracker.destination);
}

void Trackers::finish(std::chrono::milliseconds limit) {
  limit_ = Timer(loop_, limit, [this] { on_limit(); });
  notice_ = Timer(loop_, kTrackNoticeTime, [this, limit] {
    for (const auto& tracker : trackers_) {
      if (!tracker->command) continue;
      run_.say(fmt::format("waiting for --track {} to catch up, for {:g} s at most (Ctrl-C ends that; {})",
                           tracker->destination, std::chrono::duration<double>(limit).count(), way_out(*tracker)));
    }
  });
}

void Trackers::on_limit() {
  for (const auto& tracker : trackers_) {
    if (!tracker->command) continue;
    tracker->command.reset();
    run_.say(fmt::format("--track {}: it has not caught up in time; {}", tracker->destination, way_out(*tracker)));
  }
}

bool Trackers::all_ended() const {
  return std::ranges::all_of(trackers_, [](const auto& one) { return !one->command; });
}

namespace {

constexpr std::chrono::seconds kLookAtDiskEvery{1};
// Limits on commands of --on-warning.
constexpr std::size_t kMostAtOnce = 4, kMostWaiting = 64;
constexpr std::chrono::seconds kCommandLimit{60};
constexpr std::chrono::seconds kAtEnd{5};  ///< time for commands that still run when the job has ended

sys::UniqueFd file_of(const std::string& text) {
  sys::UniqueFd file(::memfd_create("cohort-warning", MFD_CLOEXEC));
  if (!file || ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) return {};
  return file;
}

}  // namespace

Warnings::Warnings(Loop& loop, RunOutput& run, std::string on_warning, std::string job_id)
    : loop_(loop),
      run_(run),
      folder_(run.folder()),
      on_warning_(std::move(on_warning)),
      job_id_(std::move(job_id)),
      file_(folder_) {
  look_at_disk();
}

void Warnings::tell(const Warning& warning) {
  const double uptime = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (!repeats_.lets_through(warning, uptime)) return;
  const std::string line = warning_line(warning, seconds_now());
  run_.show(warning);
  file_.append("warnings.jsonl", line);
  if (!on_warning_.empty()) run_command(warning, line);
}

void Warnings::run_command(const Warning& warning, const std::string& line) {
  if (waiting_.size() >= kMostWaiting)
    return complain(fmt::format("{} warnings wait for it; more are left out", waiting_.size()));
  Environment environment = Environment::current();
  environment.remove_run_options();
  environment.set(env::kWarningText, warning.text);
  environment.set(env::kJobId, job_id_);
  environment.set(env::kRunDir, folder_.path);
  waiting_.push_back({environment.assignments(), line});
  start_next();
}

void Warnings::start_next() {
  while (!waiting_.empty() && running_.size() < kMostAtOnce) {
    Call call = std::move(waiting_.front());
    waiting_.pop_front();
    const sys::UniqueFd input = file_of(call.line);
    const sys::UniqueFd output(::open((folder_.path + "/on-warning.log").c_str(),
                                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    SideCommand::Options command;
    command.shell = on_warning_;
    command.spawn.environment = std::move(call.environment);
    command.spawn.stdin_fd = input.get();
    command.spawn.stdout_fd = command.spawn.stderr_fd = output.get();
    command.spawn.group = sys::Group::Own;
    command.spawn.parent_death_signal = SIGKILL;
    const auto which = running_.emplace(running_.end());
    command.on_ended = [this, which](const sys::ExitStatus& status) {
      running_.erase(which);
      if (!status.success())
        complain(fmt::format("it failed: {} ({}/on-warning.log has its output)", sys::to_string(status), folder_.path));
      start_next();
    };
    try {
      which->command.emplace(loop_, std::move(command));
    } catch (const Error& error) {
      running_.erase(which);
      complain(error.what());
      continue;
    }
    which->limit = Timer(loop_, kCommandLimit, [this, which] {
      complain(fmt::format("it has not ended in {:g} s", std::chrono::duration<double>(kCommandLimit).count()));
      running_.erase(which);
      start_next();
    });
  }
}

void Warnings::complain(const std::string& why) {
  if (!std::exchange(complained_, true)) run_.say(fmt::format("the command of --on-warning: {}", why));
}

void Warnings::look_at_disk() {
  const auto room = file_.room();
  const bool full = room && nearly_full(*room);
  if (full && !full_) {
    constexpr double kMega = 1e6;
    tell({.kind = WarningKind::DiskFull,
          .text = fmt::format("{:.0f} MB of {:.0f} MB are free where {} is: checkpoints and logs may not fit",
                              static_cast<double>(room->free) / kMega, static_cast<double>(room->size) / kMega,
                              folder_.shown),
          .rank = {},
          .step = {}});
  }
  full_ = full;
  look_ = Timer(loop_, kLookAtDiskEvery, [this] { look_at_disk(); });
}

void Warnings::finish() {
  look_ = Timer();
  const net::Deadline until = net::deadline_in(kAtEnd);
  while (!running_.empty()) {
    if (running_.front().command->wait(until)) {
      running_.front().command->end();
      continue;
    }
    waiting_.clear();
    complain(
        fmt::format("the job has ended, and it has not, {:g} s later", std::chrono::duration<double>(kAtEnd).count()));
    running_.clear();
  }
}

}  // namespace cohort::launch
