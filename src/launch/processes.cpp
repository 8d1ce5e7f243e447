#include "launch/processes.h"

#include "base/parse.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <fstream>
#include <thread>

namespace cohort::launch {

Role Roles::role_of(int process) const noexcept {
  return process < workers ? Role::Worker : process < workers + servers ? Role::Server : Role::Evaluator;
}

int Roles::number_of(int process) const noexcept {
  return process < workers ? process : process < workers + servers ? process - workers : process - workers - servers;
}

int Roles::process_of(Role role, int number) const noexcept {
  return number + (role == Role::Worker ? 0 : role == Role::Server ? workers : workers + servers);
}

std::string Roles::name_of(int process) const { return process_name(role_of(process), number_of(process)); }

std::string Roles::names_of(const std::vector<int>& processes) const {
  std::string text;
  for (const Role role : {Role::Worker, Role::Server, Role::Evaluator}) {
    std::vector<int> numbers;
    for (const int process : processes) {
      if (role_of(process) == role) numbers.push_back(number_of(process));
    }
    if (numbers.empty()) continue;
    if (!text.empty()) text += ", ";
    if (numbers.size() == 1)
      text += process_name(role, numbers.front());
    else
      text += fmt::format("{} {}", role == Role::Worker ? "ranks" : "servers", to_ranges(numbers));
  }
  return text;
}

std::string process_name(Role role, int number) {
  if (role == Role::Evaluator) return to_string(role);
  return fmt::format("{} {}", role == Role::Worker ? "rank" : "server", number);
}

std::string file_name(Role role, int number) {
  std::string name = process_name(role, number);
  std::ranges::replace(name, ' ', '-');
  return name;
}

Environment::Environment(const std::vector<std::string>& assignments) {
  for (const std::string& assignment : assignments) set(assignment);
}

Environment Environment::current() {
  Environment all;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) all.set(std::string_view(*entry));
  return all;
}

void Environment::set(std::string_view name, std::string_view value) {
  variables_.insert_or_assign(std::string(name), std::string(value));
}

void Environment::set(std::string_view assignment) {
  const auto equals = assignment.find('=');
  if (equals == std::string_view::npos || equals == 0) return;
  set(assignment.substr(0, equals), assignment.substr(equals + 1));
}

void Environment::remove(std::string_view name) {
  if (const auto found = variables_.find(name); found != variables_.end()) variables_.erase(found);
}

void Environment::remove_run_options() {
  std::erase_if(variables_, [](const auto& variable) {
    return variable.first.starts_with(env::kRunOptionPrefix) && variable.first != env::kRunDir;
  });
}

std::optional<std::string> Environment::find(std::string_view name) const {
  const auto found = variables_.find(name);
  if (found == variables_.end()) return std::nullopt;
  return found->second;
}

std::vector<std::string> Environment::assignments() const {
  std::vector<std::string> out;
  out.reserve(variables_.size());
  for (const auto& [name, value] : variables_) out.push_back(name + "=" + value);
  return out;
}

Result<Pipe> make_pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    return fail(ErrorCode::Unavailable, "pipe: {}; raise the limit of open files (ulimit -n)", errno_text(errno));
  return Pipe{sys::UniqueFd(ends[0]), sys::UniqueFd(ends[1])};
}

void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

std::optional<std::string> read_piece(int fd, std::size_t most) {
  std::string bytes(most, '\0');
  ssize_t got = 0;
  do {
    got = ::read(fd, bytes.data(), bytes.size());
  } while (got < 0 && errno == EINTR);
  if (got < 0 && errno == EAGAIN) return std::string();
  if (got <= 0) return std::nullopt;
  bytes.resize(static_cast<std::size_t>(got));
  return bytes;
}

namespace {

std::vector<pid_t> left_over(std::span<const pid_t> spared) {
  std::vector<pid_t> pids = sys::descendants(::getpid());
  // The spared processes may have started others since they were listed.
  std::erase_if(pids, [spared](pid_t pid) {
    return std::ranges::any_of(spared, [pid](pid_t root) { return pid == root || sys::descends_from(pid, root); });
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
  // A listing may miss processes that move meanwhile, so only "no child" is proof. With spared children there is
  // nothing better than the listing, and the caller's next call looks again.
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
