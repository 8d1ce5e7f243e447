#include "launch_harness.h"

#include "base/files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <pty.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

namespace cohort::test {
namespace fs = std::filesystem;

namespace {

constexpr const char* kMark = "COHORT_E2E_MARK";

std::vector<std::string> environment_with(const std::vector<std::string>& more, const std::string& mark,
                                          const std::string& folder) {
  std::vector<std::string> all = more;
  all.push_back(std::string(kMark) + "=" + mark);
  all.push_back("TMPDIR=" + folder + "/tmp");
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string assignment = *entry;
    const std::string name = assignment.substr(0, assignment.find('=') + 1);
    if (name == "OMP_NUM_THREADS=" || name.starts_with("TF_NUM_") || name.starts_with("COHORT_")) continue;
    bool replaced = false;
    for (const std::string& other : all) replaced = replaced || other.starts_with(name);
    if (!replaced) all.push_back(assignment);
  }
  return all;
}

}  // namespace

std::string read_text(const std::string& path) { return sys::read_text(path).value_or(std::string()); }

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds patience) {
  const auto end = std::chrono::steady_clock::now() + patience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

Job::Job(JobOptions options) : patience_(options.patience) {
  static std::atomic<int> number{0};
  mark_ = fmt::format("{}-{}-{}", ::getpid(), number++, std::chrono::steady_clock::now().time_since_epoch().count());
  folder_ = (fs::temp_directory_path() / ("cohort-e2e-" + mark_)).string();
  fs::create_directories(folder_ + "/tmp");

  sys::SpawnOptions spawn;
  spawn.path = COHORT_COMMAND;
  spawn.arguments = {"cohort"};
  spawn.arguments.insert(spawn.arguments.end(), options.arguments.begin(), options.arguments.end());
  if (!options.shell_before.empty()) {
    spawn.arguments.front() = COHORT_COMMAND;
    spawn.path = "/bin/sh";
    std::vector<std::string> words = {"sh", "-c", options.shell_before + "; exec \"$0\" \"$@\""};
    words.insert(words.end(), spawn.arguments.begin(), spawn.arguments.end());
    spawn.arguments = words;
  }
  spawn.environment = environment_with(options.environment, mark_, folder_);
  spawn.folder = folder_;

  if (options.terminal) {
    // forkpty, and not sys::spawn, because the terminal has to become the controlling one.
    int master = -1;
    std::vector<char*> arguments;
    std::vector<char*> environment;
    for (auto& word : spawn.arguments) arguments.push_back(word.data());
    for (auto& word : spawn.environment) environment.push_back(word.data());
    arguments.push_back(nullptr);
    environment.push_back(nullptr);
    winsize size{};
    size.ws_col = 100;
    size.ws_row = 30;
    pid_ = ::forkpty(&master, nullptr, nullptr, &size);
    if (pid_ == 0) {
      if (::chdir(folder_.c_str()) == 0) ::execve(spawn.path.c_str(), arguments.data(), environment.data());
      ::_exit(126);
    }
    terminal_.reset(master);
    ::fcntl(master, F_SETFD, FD_CLOEXEC);
    ::fcntl(master, F_SETFL, O_NONBLOCK);
    return;
  }
  const std::string input = folder_ + "/input";
  std::ofstream(input, std::ios::binary) << options.input;
  sys::UniqueFd in;
  if (!options.input.empty()) in.reset(::open(input.c_str(), O_RDONLY | O_CLOEXEC));
  sys::UniqueFd out(::open((folder_ + "/stdout").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const sys::UniqueFd err(::open((folder_ + "/stderr").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  if (options.pipe_output) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) == 0) {
      output_.reset(ends[0]);
      out.reset(ends[1]);
    }
  }
  spawn.stdin_fd = in.get();
  spawn.stdout_fd = out.get();
  spawn.stderr_fd = err.get();
  auto pending = sys::spawn(spawn);
  if (!pending) throw std::runtime_error("cannot start the command: " + pending.error().step);
  auto child = std::move(*pending).confirm();
  if (!child) throw std::runtime_error("cannot start the command: " + child.error().step);
  pid_ = child->pid;
}

Job::~Job() {
  for (int round = 0; round < 200; ++round) {
    const auto left = processes();
    if (left.empty()) break;
    for (const pid_t pid : left) ::kill(pid, SIGKILL);
    if (!status_ && ::waitpid(pid_, nullptr, WNOHANG) == pid_) status_ = -1;
    std::this_thread::sleep_for(10ms);
  }
  if (!status_) ::waitpid(pid_, nullptr, WNOHANG);
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

bool Job::running() {
  if (status_) return false;
  int word = 0;
  if (terminal_) screen();
  if (::waitpid(pid_, &word, WNOHANG) != pid_) return true;
  status_ = sys::exit_status_from_wait(word).shell_status();
  return false;
}

int Job::wait() {
  if (!eventually([this] { return !running(); }, patience_)) {
    ADD_FAILURE() << "the command has not ended; stderr: " << err();
    ::kill(pid_, SIGKILL);
    eventually([this] { return !running(); });
  }
  if (terminal_) screen();
  return status_.value_or(-1);
}

std::string Job::out() const { return read_text(folder_ + "/stdout"); }
std::string Job::err() const { return read_text(folder_ + "/stderr"); }
std::string Job::log(const std::string& name) const { return read_text(folder_ + "/runs/latest/logs/" + name); }
std::string Job::file(const std::string& name) const { return read_text(folder_ + "/" + name); }
void Job::signal(int number) const { ::kill(pid_, number); }

std::vector<pid_t> Job::processes() const {
  std::vector<pid_t> found;
  const std::string wanted = std::string(kMark) + "=" + mark_;
  for (const auto& entry : fs::directory_iterator("/proc")) {
    const std::string name = entry.path().filename().string();
    pid_t pid = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
    if (error != std::errc() || end != name.data() + name.size()) continue;
    const std::string environment = read_text("/proc/" + name + "/environ");
    if (environment.find(wanted) == std::string::npos) continue;
    const auto stat = sys::process_stat(pid);
    if (stat && stat->state != 'Z' && stat->state != 'X') found.push_back(pid);
  }
  return found;
}

std::vector<pid_t> Job::processes(const std::string& text) const {
  std::vector<pid_t> found = processes();
  std::erase_if(found, [&text](pid_t pid) { return !sys::command_line(pid).starts_with(text); });
  return found;
}

pid_t Job::guard() const {
  for (const pid_t pid : processes(COHORT_COMMAND " agent --connect")) {
    const auto stat = sys::process_stat(pid);
    if (stat && stat->parent == pid_) return pid;
  }
  return -1;
}

pid_t Job::agent() const {
  const pid_t outer = guard();
  for (const pid_t pid : processes(COHORT_COMMAND " agent --connect")) {
    const auto stat = sys::process_stat(pid);
    if (stat && stat->parent == outer) return pid;
  }
  return -1;
}

const std::string& Job::screen() {
  char buffer[4096];
  while (true) {
    const ssize_t got = ::read(terminal_.get(), buffer, sizeof buffer);
    if (got <= 0) break;
    screen_.append(buffer, static_cast<std::size_t>(got));
  }
  return screen_;
}

Finished run(JobOptions options) {
  Job job(std::move(options));
  Finished finished;
  finished.status = job.wait();
  finished.out = job.out();
  finished.err = job.err();
  EXPECT_TRUE(job.processes().empty()) << "processes are left";
  EXPECT_TRUE(fs::is_empty(job.folder() + "/tmp")) << "temporary files are left";
  return finished;
}

}  // namespace cohort::test
