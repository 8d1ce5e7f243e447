#include "launch/sweep.h"

#include <sys/wait.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <thread>

namespace cohort::launch {
namespace {

std::vector<pid_t> left_over(std::span<const pid_t> spared) {
  std::vector<pid_t> pids = sys::descendants(::getpid());
  // What is spared may have started others since it was listed.
  std::erase_if(pids, [spared](pid_t pid) {
    return std::any_of(spared.begin(), spared.end(),
                       [pid](pid_t root) { return pid == root || sys::descends_from(pid, root); });
  });
  return pids;
}

}  // namespace

bool is_ours(pid_t pid) { return sys::descends_from(pid, ::getpid()); }

bool reap_children(const OnReaped& on_reaped) {
  while (true) {
    int status = 0;
    const pid_t pid = ::waitpid(-1, &status, WNOHANG | __WALL);
    if (pid > 0) {
      if (on_reaped) on_reaped(pid, sys::exit_status_from_wait(status));
    } else if (pid == 0) {
      return true;
    } else if (errno != EINTR) {
      return false;
    }
  }
}

SweepStep sweep_once(std::span<const pid_t> spared, const OnReaped& on_reaped) {
  SweepStep step;
  if (!reap_children(on_reaped)) {
    step.clean = true;
    return step;
  }
  for (const pid_t pid : left_over(spared)) {
    if (sys::signal_if(pid, SIGKILL, is_ours)) ++step.killed;
  }
  // A listing may miss what moves while it is made, so only "no child" is proof; where children are spared it is
  // the best there is, and the caller's next step looks again.
  if (!spared.empty()) step.clean = step.killed == 0 && left_over(spared).empty();
  return step;
}

std::vector<pid_t> sweep(std::span<const pid_t> spared, std::chrono::milliseconds longest, const OnReaped& on_reaped) {
  const auto end = std::chrono::steady_clock::now() + longest;
  std::chrono::microseconds pause(200);
  while (!sweep_once(spared, on_reaped).clean) {
    if (std::chrono::steady_clock::now() >= end) return left_over(spared);
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(10'000));
  }
  return {};
}

std::string describe_stuck(std::span<const pid_t> pids) {
  std::string text;
  for (const pid_t pid : pids) {
    const auto stat = sys::process_stat(pid);
    std::ifstream file(fmt::format("/proc/{}/wchan", pid));
    std::string where;
    file >> where;
    if (!text.empty()) text += "; ";
    text += fmt::format("pid {} ({}), in state {}{}", pid, sys::command_line(pid), stat ? stat->state : '?',
                        where.empty() || where == "0" ? "" : " at " + where);
  }
  return text;
}

}  // namespace cohort::launch
