#include "launch/agent/guard.h"

#include "base/log.h"
#include "launch/processes.h"
#include "sys/hidden_memory.h"
#include "sys/signals.h"

#include <poll.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <optional>

namespace cohort::launch {
namespace {

using Clock = std::chrono::steady_clock;

/// Nothing of a job may be left 2 s after its supervisor: the agent gets most of that.
constexpr auto kAgentGrace = std::chrono::milliseconds(1200);
constexpr auto kSweepLimit = std::chrono::seconds(10);

}  // namespace

int run_guarded(int lifeline_fd, const std::function<int()>& agent, Passes pass) {
  value_or_throw(sys::become_subreaper());
  const pid_t guard = ::getpid();
  std::optional<sys::SignalFd> signals =
      value_or_throw(sys::SignalFd::create({SIGCHLD, SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2}));
  const pid_t child = ::fork();
  if (child < 0) raise(ErrorCode::Unavailable, "the agent: {}", sys::to_string(sys::SpawnFailure{errno, "fork"}));
  if (child == 0) {
    signals.reset();
    sys::lock_hidden_memory();
    if (::prctl(PR_SET_PDEATHSIG, SIGTERM) != 0 || ::getppid() != guard) return 1;
    return agent();
  }

  std::optional<sys::ExitStatus> ended;
  const OnReaped on_reaped = [&](pid_t pid, const sys::ExitStatus& status) {
    if (pid == child) ended = status;
  };
  std::optional<Clock::time_point> give_up;
  while (true) {
    reap_children(on_reaped);
    if (ended) break;
    if (give_up && Clock::now() >= *give_up) break;
    pollfd waited[2] = {{signals->fd(), POLLIN, 0}, {lifeline_fd, POLLIN, 0}};
    int timeout = -1;
    if (give_up) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(*give_up - Clock::now());
      timeout = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    }
    if (::poll(waited, give_up ? 1 : 2, timeout) < 0 && errno != EINTR) break;
    while (const auto signal = signals->next()) {
      if (*signal == SIGCHLD) continue;
      const bool passes = pass == Passes::Unchanged || *signal == SIGUSR1 || *signal == SIGUSR2;
      ::kill(child, passes ? *signal : SIGTERM);  // by which the agent ends the job
    }
    if (!give_up && waited[1].revents != 0) {
      char byte = 0;
      if (::read(lifeline_fd, &byte, 1) <= 0) give_up = Clock::now() + kAgentGrace;
    }
  }
  const auto stuck = sweep({}, kSweepLimit, on_reaped);
  if (!stuck.empty()) log::error("launch", "cannot end {}", describe_stuck(stuck));
  return ended && stuck.empty() ? ended->shell_status() : 1;
}

}  // namespace cohort::launch
