#include "launch/supervise/side_commands.h"

#include <cohort/error.h>

#include "base/env.h"
#include "base/result.h"
#include "launch/processes.h"
#include "launch/record/live_run.h"
#include "net/address.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <utility>

namespace cohort::launch {

SideCommand::SideCommand(Loop& loop, Options options) : options_(std::move(options)) {
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC) != 0) raise(ErrorCode::Unavailable, "pipe: {}", errno_text(errno));
  output_.reset(ends[0]);
  const sys::UniqueFd theirs(ends[1]);
  const sys::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
  (void)::fcntl(output_.get(), F_SETFL, O_NONBLOCK);
  sys::SpawnOptions spawn;
  spawn.path = value_or_throw(sys::own_executable());
  spawn.arguments = {"cohort"};
  spawn.arguments.insert(spawn.arguments.end(), options_.arguments.begin(), options_.arguments.end());
  spawn.environment = Environment::current().assignments();
  spawn.stdout_fd = options_.output == Output::All ? theirs.get() : nowhere.get();
  spawn.stderr_fd = theirs.get();
  spawn.group = sys::Group::Session;
  spawn.parent_death_signal = options_.parent_death_signal;
  auto pending = sys::spawn(spawn);
  auto child = pending ? std::move(*pending).confirm() : tl::unexpected(pending.error());
  if (!child) {
    raise(ErrorCode::Unavailable, "cannot start {}: {}", spawn.path, sys::to_string(child.error()));
  }
  process_ = *std::move(child);
  output_watch_ = Watch(loop, output_.get());
  output_watch_.on_readable([this] { read(); });
  process_watch_ = Watch(loop, process_.pidfd.get());
  process_watch_.on_readable([this] { on_ended(); });
}

void SideCommand::read() {
  char bytes[4096];
  while (true) {
    const ssize_t got = ::read(output_.get(), bytes, sizeof bytes);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && errno == EAGAIN) return;
    if (got <= 0) {
      output_watch_ = Watch();
      return;
    }
    for (const Line& line : lines_.feed({bytes, static_cast<std::size_t>(got)})) options_.say(line.text);
  }
}

void SideCommand::on_ended() {
  process_watch_ = Watch();
  read();
  const auto status = sys::peek_exit_status(process_.pid);
  const auto told = options_.on_ended;  // a copy: it may destroy this
  if (told) told(status.value_or(sys::ExitStatus{}));
}

SideCommand::~SideCommand() {
  if (output_watch_) read();
  // (Swept already, perhaps, where the job has ended as a whole: then the pid may be somebody else's.)
  if (::syscall(SYS_pidfd_send_signal, process_.pidfd.get(), SIGKILL, nullptr, 0) != 0) return;
  while (::waitpid(process_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
}

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

namespace {

/// The command and what it has started, but for what has left its process group.
void kill_all(const sys::ChildProcess& process) { ::kill(-process.pid, SIGKILL); }

sys::UniqueFd file_of(const std::string& text) {
  sys::UniqueFd file(::memfd_create("cohort-warning", MFD_CLOEXEC));
  if (!file || ::pwrite(file.get(), text.data(), text.size(), 0) != static_cast<ssize_t>(text.size())) return {};
  return file;
}

}  // namespace

WarningCommand::WarningCommand(Loop& loop, WarningCommandOptions options) : loop_(loop), options_(std::move(options)) {}

WarningCommand::~WarningCommand() {
  for (const Running& running : running_) kill_all(running.process);
}

void WarningCommand::run(const Warning& warning, const std::string& line) {
  if (waiting_.size() >= options_.most_waiting)
    return complain(fmt::format("{} warnings wait for it; more are left out", waiting_.size()));
  Environment environment = Environment::current();
  environment.remove_run_options();
  environment.set(env::kWarningKind, to_string(warning.kind));
  environment.set(env::kWarningText, warning.text);
  environment.set(env::kWarningRank, warning.rank ? std::to_string(*warning.rank) : "");
  environment.set(env::kWarningStep, warning.step ? std::to_string(*warning.step) : "");
  environment.set(env::kJobId, options_.job_id);
  environment.set(env::kRunDir, options_.run_folder);
  waiting_.push_back({environment.assignments(), line});
  start_next();
}

void WarningCommand::start_next() {
  while (!waiting_.empty() && running_.size() < options_.at_once) {
    Call call = std::move(waiting_.front());
    waiting_.pop_front();
    const sys::UniqueFd input = file_of(call.line);
    const sys::UniqueFd output(::open((options_.run_folder + "/on-warning.log").c_str(),
                                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
    const sys::UniqueFd nowhere(::open("/dev/null", O_WRONLY | O_CLOEXEC));
    const int out = output ? output.get() : nowhere.get();
    auto started = sys::spawn({.path = "/bin/sh",
                               .arguments = {"sh", "-c", options_.command},
                               .environment = std::move(call.environment),
                               .folder = {},
                               .stdin_fd = input ? input.get() : -1,
                               .stdout_fd = out,
                               .stderr_fd = out,
                               .group = sys::Group::Own,
                               .parent_death_signal = SIGKILL});
    auto child = started ? std::move(*started).confirm() : tl::unexpected(started.error());
    if (!child) {
      complain("it cannot be started: " + sys::to_string(child.error()));
      continue;
    }
    running_.push_back({.process = std::move(*child), .ended = {}, .limit = {}});
    const auto which = std::prev(running_.end());
    which->ended = Watch(loop_, which->process.pidfd.get());
    which->ended.on_readable([this, which] { on_ended(which); });
    which->limit = Timer(loop_, options_.limit, [this, which] {
      complain(fmt::format("it has not ended in {:g} s", std::chrono::duration<double>(options_.limit).count()));
      kill_all(which->process);
    });
  }
}

void WarningCommand::on_ended(std::list<Running>::iterator which) {
  const auto status = sys::peek_exit_status(which->process.pid);
  kill_all(which->process);  // what it has left in the background
  while (::waitpid(which->process.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  running_.erase(which);
  if (status && !status->success())
    complain(
        fmt::format("it failed: {} ({}/on-warning.log has its output)", sys::to_string(*status), options_.run_folder));
  start_next();
}

void WarningCommand::complain(const std::string& why) {
  if (!std::exchange(complained_, true)) options_.say(fmt::format("the command of --on-warning: {}", why));
}

void WarningCommand::finish() {
  const net::Deadline until = net::deadline_in(options_.at_end);
  while (!running_.empty()) {
    pollfd waiting{running_.front().process.pidfd.get(), POLLIN, 0};
    if (::poll(&waiting, 1, net::poll_timeout(until)) > 0) {
      on_ended(running_.begin());
      continue;
    }
    if (!net::passed(until)) continue;
    waiting_.clear();
    complain(fmt::format("the job has ended, and it has not, {:g} s later",
                         std::chrono::duration<double>(options_.at_end).count()));
    for (const Running& running : running_) kill_all(running.process);
    for (const Running& running : running_) ::waitpid(running.process.pid, nullptr, 0);
    running_.clear();
  }
}

namespace {

constexpr std::chrono::seconds kLookAtDiskEvery{1};

}  // namespace

Warnings::Warnings(Loop& loop, const RunFolder& folder, WarningsOptions options)
    : loop_(loop), folder_(folder), options_(std::move(options)), file_(folder) {
  if (!options_.on_warning.empty()) {
    command_.emplace(
        loop,
        WarningCommandOptions{
            .command = options_.on_warning, .job_id = options_.job_id, .run_folder = folder.path, .say = options_.say});
  }
  look_at_disk();
}

void Warnings::tell(const Warning& warning) {
  const double uptime = std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  if (!repeats_.lets_through(warning, uptime)) return;
  const std::string line = warning_line(warning, seconds_now());
  options_.show(warning);
  file_.append(line);
  if (command_) command_->run(warning, line);
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
  if (command_) command_->finish();
}

}  // namespace cohort::launch
