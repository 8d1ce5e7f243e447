#include "launch/supervise/warning_command.h"

#include "base/env.h"
#include "launch/processes.h"
#include "net/deadline.h"

#include <fmt/format.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <utility>

namespace cohort::launch {
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

}  // namespace cohort::launch
