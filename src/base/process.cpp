#include "base/process.h"

#include "base/files.h"
#include "base/parse.h"
#include "base/signals.h"

#include <dirent.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

namespace cohort::sys {
namespace {

struct ChildReport {
  int error_number;
  int step;
};
constexpr const char* kSteps[] = {
    "prctl(PR_SET_PDEATHSIG)", "setsid", "setpgid", "dup2", "close_range and /proc/self/fd", "chdir", "setrlimit",
    "sched_setaffinity",       "execve"};
enum Step { kDeathSignal, kSession, kGroup, kDup, kClose, kFolder, kLimit, kProcessors, kExec };

/// Everything that the child needs, prepared before fork, since only async-signal-safe calls are allowed after it.
struct Prepared {
  const char* path;
  std::vector<char*> arguments;
  std::vector<char*> environment;
  const char* folder;
  std::array<int, 3> stdio;
  std::vector<std::pair<int, int>> moved;  ///< (source above every target, target)
  int highest_target = 2;
  Group group;
  int death_signal;
  pid_t parent;
  std::uint64_t open_files;
  bool bound;
  cpu_set_t processors;
  std::array<bool, NSIG> ignored;
  int report;
};

[[noreturn]] void give_up(const Prepared& prepared, Step step, int error) {
  const ChildReport report{error, step};
  [[maybe_unused]] const auto written = ::write(prepared.report, &report, sizeof report);
  ::_exit(127);
}

void reset_signals(const std::array<bool, NSIG>& ignored) {
  for (int number = 1; number < NSIG; ++number) {
    struct sigaction action {};
    action.sa_handler = ignored[static_cast<std::size_t>(number)] ? SIG_IGN : SIG_DFL;
    ::sigaction(number, &action, nullptr);  // fails for KILL and STOP, which is fine
  }
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

/// Sets CLOEXEC on all descriptors from `first` on. Async-signal-safe.
bool close_on_exec_from(int first) {
  if (::syscall(SYS_close_range, static_cast<unsigned>(first), ~0U, 1U << 2 /* CLOEXEC */) == 0) return true;
  // Before Linux 5.11, or if a filter refuses the system call, takes the descriptors from /proc. Does not use readdir,
  // since readdir allocates.
  const int folder = ::open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  alignas(long) char entries[4096];
  long size = 0;
  while ((size = ::syscall(SYS_getdents64, folder, entries, sizeof entries)) > 0) {
    for (long at = 0; at < size;) {
      // Layout of struct linux_dirent64: two 64-bit words, then the entry's length (16 bits), type (8 bits) and name.
      unsigned short length = 0;
      std::memcpy(&length, entries + at + 16, sizeof length);
      int number = 0;
      const char* digit = entries + at + 19;
      while (*digit >= '0' && *digit <= '9') number = 10 * number + (*digit++ - '0');
      if (*digit == '\0' && number >= first) ::fcntl(number, F_SETFD, FD_CLOEXEC);
      at += length;
    }
  }
  ::close(folder);
  return size == 0;
}

[[noreturn]] void run_child(Prepared& prepared) {
  if (prepared.death_signal != 0) {
    if (::prctl(PR_SET_PDEATHSIG, prepared.death_signal) != 0) give_up(prepared, kDeathSignal, errno);
    // If the parent has died before the prctl, no signal will come.
    if (::getppid() != prepared.parent) ::_exit(127);
  }
  if (prepared.group == Group::Session && ::setsid() < 0) give_up(prepared, kSession, errno);
  if (prepared.group == Group::Own && ::setpgid(0, 0) < 0) give_up(prepared, kGroup, errno);
  for (int target = 0; target < 3; ++target) {
    const int source = prepared.stdio[static_cast<std::size_t>(target)];
    if (source == target) continue;  // the caller's own descriptor, which is not CLOEXEC
    if (::dup2(source, target) < 0) give_up(prepared, kDup, errno);
  }
  for (const auto& [source, target] : prepared.moved) {
    if (::dup2(source, target) < 0) give_up(prepared, kDup, errno);
  }
  // Close everything else, by number: workers must not get descriptors that libraries opened without CLOEXEC.
  if (!close_on_exec_from(prepared.highest_target + 1)) give_up(prepared, kClose, errno);
  for (int fd = 3; fd <= prepared.highest_target; ++fd) {
    const bool wanted = std::any_of(prepared.moved.begin(), prepared.moved.end(),
                                    [fd](const std::pair<int, int>& move) { return move.second == fd; });
    if (!wanted && fd != prepared.report) ::close(fd);
  }
  if (prepared.folder != nullptr && ::chdir(prepared.folder) != 0) give_up(prepared, kFolder, errno);
  if (prepared.open_files != 0) {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) give_up(prepared, kLimit, errno);
    limit.rlim_cur = std::min<rlim_t>(prepared.open_files, limit.rlim_max);
    if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) give_up(prepared, kLimit, errno);
  }
  if (prepared.bound && ::sched_setaffinity(0, sizeof prepared.processors, &prepared.processors) != 0) {
    give_up(prepared, kProcessors, errno);
  }
  reset_signals(prepared.ignored);
  ::execve(prepared.path, prepared.arguments.data(), prepared.environment.data());
  give_up(prepared, kExec, errno);
}

std::vector<char*> pointers(const std::vector<std::string>& texts) {
  std::vector<char*> out;
  out.reserve(texts.size() + 1);
  for (const std::string& text : texts) out.push_back(const_cast<char*>(text.c_str()));  // NOLINT: execve's signature
  out.push_back(nullptr);
  return out;
}

std::string read_small_file(const std::string& path) { return read_text(path).value_or(std::string()); }

}  // namespace

ExitStatus exit_status_from_wait(int wait_status) noexcept {
  ExitStatus status;
  if (WIFSIGNALED(wait_status)) {
    status.signal = WTERMSIG(wait_status);
    status.core_dumped = WCOREDUMP(wait_status);
  } else {
    status.code = WEXITSTATUS(wait_status);
  }
  return status;
}

std::optional<ExitStatus> peek_exit_status(pid_t pid) {
  siginfo_t info{};
  if (::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid != pid) return {};
  ExitStatus status;
  if (info.si_code == CLD_EXITED) {
    status.code = info.si_status;
  } else {
    status.signal = info.si_status;
    status.core_dumped = info.si_code == CLD_DUMPED;
  }
  return status;
}

std::string to_string(const ExitStatus& status) {
  if (status.signal == 0) return fmt::format("exit code {}", status.code);
  return fmt::format("killed by {}{}", signal_name(status.signal), status.core_dumped ? ", core dumped" : "");
}

std::string limit_of_processes() {
  rlimit limit{};
  const bool known = ::getrlimit(RLIMIT_NPROC, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY;
  return fmt::format(
      "the limit of processes and threads is reached: of this user, with all that run on this host (ulimit -u{}), or "
      "of "
      "this control group (pids.max)",
      known ? fmt::format(": {}", limit.rlim_cur) : "");
}

std::string to_string(const SpawnFailure& failure) {
  return fmt::format("{}: {}{}", failure.step, errno_text(failure.error_number),
                     failure.error_number == EAGAIN ? "; " + limit_of_processes() : "");
}

tl::expected<PendingSpawn, SpawnFailure> spawn(const SpawnOptions& options) {
  int report[2];
  if (::pipe2(report, O_CLOEXEC) != 0) return tl::unexpected(SpawnFailure{errno, "pipe2"});
  UniqueFd read_end(report[0]);
  UniqueFd write_end(report[1]);
  Prepared prepared{};
  prepared.path = options.path.c_str();
  prepared.arguments = pointers(options.arguments);
  prepared.environment = pointers(options.environment);
  prepared.folder = options.folder.empty() ? nullptr : options.folder.c_str();
  prepared.group = options.group;
  prepared.death_signal = options.parent_death_signal;
  prepared.parent = ::getpid();
  prepared.open_files = options.open_files;
  prepared.bound = !options.processors.empty();
  CPU_ZERO(&prepared.processors);
  for (const int number : options.processors) {
    if (number < 0 || number >= CPU_SETSIZE) return tl::unexpected(SpawnFailure{EINVAL, "sched_setaffinity"});
    CPU_SET(static_cast<std::size_t>(number), &prepared.processors);
  }

  for (const int number : options.ignored) {
    if (number > 0 && number < NSIG) prepared.ignored[static_cast<std::size_t>(number)] = true;
  }

  // Moves sources above every target first, so that no dup2 overwrites a source that is still needed.
  int highest = 2;
  for (const auto& [source, target] : options.inherited) highest = std::max(highest, target);
  prepared.highest_target = highest;
  std::vector<UniqueFd> lifted;
  const auto lift = [&](int fd) {
    const int copy = ::fcntl(fd, F_DUPFD_CLOEXEC, highest + 1);
    if (copy >= 0) lifted.emplace_back(copy);
    return copy;
  };
  UniqueFd null_device;
  const int given[3] = {options.stdin_fd, options.stdout_fd, options.stderr_fd};
  for (int target = 0; target < 3; ++target) {
    int source = given[target];
    if (source < 0 && target == 0) {
      null_device.reset(::open("/dev/null", O_RDONLY | O_CLOEXEC));
      if (!null_device) return tl::unexpected(SpawnFailure{errno, "open(/dev/null)"});
      source = null_device.get();
    }
    if (source < 0) source = target;
    if (source != target && (source = lift(source)) < 0) return tl::unexpected(SpawnFailure{errno, "dup"});
    prepared.stdio[static_cast<std::size_t>(target)] = source;
  }
  for (const auto& [source, target] : options.inherited) {
    const int copy = lift(source);
    if (copy < 0) return tl::unexpected(SpawnFailure{errno, "dup"});
    prepared.moved.emplace_back(copy, target);
  }
  prepared.report = lift(write_end.get());
  if (prepared.report < 0) return tl::unexpected(SpawnFailure{errno, "dup"});
  write_end.reset();

  // Blocks signals, so that no handler of the parent runs in the child.
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  ::pthread_sigmask(SIG_BLOCK, &all, &before);
  const pid_t pid = ::fork();
  if (pid == 0) run_child(prepared);
  const int fork_error = errno;
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
  if (pid < 0) return tl::unexpected(SpawnFailure{fork_error, "fork"});

  PendingSpawn pending;
  pending.child_.pid = pid;
  // The child has not been waited for, so its pid cannot have been reused.
  pending.child_.pidfd.reset(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!pending.child_.pidfd) {
    const int error = errno;
    ::kill(pid, SIGKILL);
    while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
    }
    return tl::unexpected(SpawnFailure{error, "pidfd_open"});
  }
  ::fcntl(pending.child_.pidfd.get(), F_SETFD, FD_CLOEXEC);
  pending.report_ = std::move(read_end);
  return pending;
}

tl::expected<ChildProcess, SpawnFailure> PendingSpawn::confirm() && {
  ChildReport report{};
  ssize_t got = 0;
  do {
    got = ::read(report_.get(), &report, sizeof report);
  } while (got < 0 && errno == EINTR);
  // End of file means that exec has closed the other end (or that the child was killed, as its status will show).
  if (got != static_cast<ssize_t>(sizeof report)) return std::move(child_);
  while (::waitpid(child_.pid, nullptr, 0) < 0 && errno == EINTR) {
  }
  return tl::unexpected(SpawnFailure{report.error_number, kSteps[report.step]});
}

std::optional<ProcessStat> parse_process_stat(std::string_view text) {
  // "pid (name, which may contain anything) S ppid ...": fields are counted from after the last parenthesis.
  const auto close = text.rfind(')');
  if (close == std::string_view::npos || close + 2 >= text.size()) return std::nullopt;
  std::vector<std::string_view> fields;
  std::string_view rest = text.substr(close + 2);
  while (!rest.empty()) {
    const auto space = rest.find_first_of(" \n");
    fields.push_back(rest.substr(0, space));
    if (space == std::string_view::npos) break;
    rest.remove_prefix(space + 1);
  }
  constexpr std::size_t kFirst = 3;  // proc(5) numbers the first of `fields` 3
  constexpr std::uint64_t kExiting = 0x4;
  if (fields.size() < 22 - kFirst + 1 || fields[0].size() != 1) return std::nullopt;
  ProcessStat stat;
  stat.state = fields[0][0];
  const auto parent = parse_integer<pid_t>(fields[4 - kFirst]);
  const auto flags = parse_integer<std::uint64_t>(fields[9 - kFirst]);
  const auto threads = parse_integer<int>(fields[20 - kFirst]);
  const auto start = parse_integer<std::uint64_t>(fields[22 - kFirst]);
  if (!parent || !flags || !threads || !start) return std::nullopt;
  stat.parent = *parent;
  stat.exiting = (*flags & kExiting) != 0;
  stat.threads = *threads;
  stat.start_ticks = *start;
  stat.cpu_ticks = parse_integer<std::uint64_t>(fields[14 - kFirst]).value_or(0) +
                   parse_integer<std::uint64_t>(fields[15 - kFirst]).value_or(0);
  if (fields.size() > 24 - kFirst) {
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    stat.memory = parse_integer<std::uint64_t>(fields[24 - kFirst]).value_or(0) * page;
  }
  if (fields.size() > 52 - kFirst) stat.exit_word = parse_integer<int>(fields[52 - kFirst]).value_or(0);
  return stat;
}

std::optional<ProcessStat> process_stat(pid_t pid) {
  char buffer[1024];
  const UniqueFd fd(::open(fmt::format("/proc/{}/stat", pid).c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return std::nullopt;
  const ssize_t got = ::read(fd.get(), buffer, sizeof buffer);
  if (got <= 0) return std::nullopt;
  return parse_process_stat({buffer, static_cast<std::size_t>(got)});
}

std::optional<SignalFate> parse_signal_fate(std::string_view text, int number) {
  if (number < 1 || number > 64) return std::nullopt;
  const auto mask_of = [&](std::string_view name) -> std::optional<std::uint64_t> {
    const auto at = text.find(name);
    if (at == std::string_view::npos) return std::nullopt;
    std::string_view digits = text.substr(at + name.size());
    digits = digits.substr(0, digits.find('\n'));
    std::uint64_t mask = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), mask, 16);
    if (error != std::errc() || end != digits.data() + digits.size()) return std::nullopt;
    return mask;
  };
  const auto blocked = mask_of("\nSigBlk:\t");
  const auto ignored = mask_of("\nSigIgn:\t");
  const auto caught = mask_of("\nSigCgt:\t");
  if (!blocked || !ignored || !caught) return std::nullopt;
  const auto bit = [](int signal) { return std::uint64_t{1} << (signal - 1); };
  const std::uint64_t all = (bit(32) - 1) & ~bit(SIGKILL) & ~bit(SIGSTOP);
  if ((*ignored & bit(number)) != 0) return SignalFate::Ignored;
  if ((*blocked & all) == all) return SignalFate::Default;
  return ((*caught | *blocked) & bit(number)) != 0 ? SignalFate::Taken : SignalFate::Default;
}

std::optional<SignalFate> signal_fate(pid_t pid, int number) {
  const auto stat = process_stat(pid);
  if (!stat || stat->state == 'Z' || stat->exiting) return std::nullopt;
  return parse_signal_fate(read_small_file(fmt::format("/proc/{}/status", pid)), number);
}

/// Finds a process's children on kernels without /proc/PID/task/TID/children.
static std::vector<pid_t> children_by_scan(pid_t parent) {
  std::vector<pid_t> found;
  std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc"), &::closedir);
  while (const dirent* entry = folder == nullptr ? nullptr : ::readdir(folder.get())) {
    const auto pid = parse_integer<pid_t>(entry->d_name);
    if (!pid) continue;
    const auto stat = process_stat(*pid);
    if (stat && stat->parent == parent) found.push_back(*pid);
  }
  return found;
}

std::vector<pid_t> descendants(pid_t ancestor) {
  static const bool kernel_lists = ::access("/proc/thread-self/children", R_OK) == 0;
  std::vector<pid_t> found{ancestor};
  for (std::size_t next = 0; next < found.size(); ++next) {
    // The kernel has one file per thread, since children belong to the thread that forked them.
    if (!kernel_lists) {
      for (const pid_t pid : children_by_scan(found[next])) {
        if (std::find(found.begin(), found.end(), pid) == found.end()) found.push_back(pid);
      }
      continue;
    }
    const std::string tasks = fmt::format("/proc/{}/task", found[next]);
    std::string listing;
    std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir(tasks.c_str()), &::closedir);
    if (folder == nullptr) continue;
    while (const dirent* entry = ::readdir(folder.get())) {
      if (entry->d_name[0] == '.') continue;
      listing += read_small_file(tasks + "/" + entry->d_name + "/children");
    }
    std::string_view rest = listing;
    while (!rest.empty()) {
      const auto space = std::min(rest.find(' '), rest.size());
      if (const auto pid = parse_integer<pid_t>(rest.substr(0, space))) {
        if (std::find(found.begin(), found.end(), *pid) == found.end()) found.push_back(*pid);
      }
      rest.remove_prefix(std::min(space + 1, rest.size()));
    }
  }
  found.erase(found.begin());
  std::erase_if(found, [](pid_t pid) {
    const auto stat = process_stat(pid);
    return !stat || stat->state == 'Z' || stat->state == 'X';
  });
  return found;
}

bool descends_from(pid_t pid, pid_t ancestor) {
  while (pid > 1) {
    const auto stat = process_stat(pid);
    if (!stat) return false;
    if (stat->parent == ancestor) return true;
    pid = stat->parent;
  }
  return false;
}

bool signal_if(pid_t pid, int number, const std::function<bool(pid_t)>& is_meant) {
  if (pid <= 0) return false;  // kill(2) would take such a pid for a group
  const auto held = open_pidfd(pid);
  return held && is_meant(pid) && ::syscall(SYS_pidfd_send_signal, held->get(), number, nullptr, 0) == 0;
}

Result<void> become_subreaper() {
  if (::prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) {
    return fail(ErrorCode::Unavailable, "prctl(PR_SET_CHILD_SUBREAPER): {}", errno_text(errno));
  }
  return {};
}

std::string command_line(pid_t pid) {
  std::string line = read_small_file(fmt::format("/proc/{}/cmdline", pid)).substr(0, 200);
  std::replace(line.begin(), line.end(), '\0', ' ');
  while (!line.empty() && line.back() == ' ') line.pop_back();
  return line;
}

std::pair<std::uint64_t, std::uint64_t> raise_open_files_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return {0, 0};
  const std::uint64_t before = limit.rlim_cur;
  limit.rlim_cur = limit.rlim_max;
  if (::setrlimit(RLIMIT_NOFILE, &limit) != 0) return {before, before};
  return {before, limit.rlim_cur};
}

std::vector<std::string> own_arguments() {
  const std::string text = read_small_file("/proc/self/cmdline");
  std::vector<std::string> words;
  for (std::size_t begin = 0; begin < text.size();) {
    const auto end = std::min(text.find('\0', begin), text.size());
    words.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return words;
}

Result<UniqueFd> open_pidfd(pid_t pid) {
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  if (!fd) return fail(ErrorCode::Unavailable, "process {}: pidfd_open: {}", pid, errno_text(errno));
  ::fcntl(fd.get(), F_SETFD, FD_CLOEXEC);
  return fd;
}

Result<std::string> own_executable() {
  char path[4096];
  const ssize_t size = ::readlink("/proc/self/exe", path, sizeof path);
  if (size <= 0)
    return fail(ErrorCode::Unavailable, "cannot find this program: readlink(/proc/self/exe): {}", errno_text(errno));
  return std::string(path, static_cast<std::size_t>(size));
}

namespace {

std::optional<ProcessStat> read_stat(int file) {
  char text[2048];
  const ssize_t length = ::pread(file, text, sizeof text, 0);
  if (length <= 0) return std::nullopt;
  return parse_process_stat({text, static_cast<std::size_t>(length)});
}

bool ended(const ProcessStat& stat) { return stat.exiting || stat.state == 'Z' || stat.state == 'X'; }

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

UniqueFd open_stat(const std::string& folder) {
  return UniqueFd(::open((folder + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
}

// The first thread may end before the others (pthread_exit in main), but a process lives while any thread does. Returns
// false if the threads cannot be read (no free descriptor), so that the process does not count as dead.
bool all_threads_exiting(pid_t pid) {
  std::error_code error;
  const std::filesystem::directory_iterator tasks(folder_of(pid) + "/task", error);
  if (error) return error == std::errc::no_such_file_or_directory || error == std::errc::no_such_process;
  for (const auto& task : tasks) {
    const UniqueFd file = open_stat(task.path().string());
    if (!file && errno != ENOENT && errno != ESRCH) return false;
    const auto stat = file ? read_stat(file.get()) : std::nullopt;
    if (stat && !ended(*stat)) return false;
  }
  return true;
}

}  // namespace

ProcessId own_process() {
  const pid_t pid = ::getpid();
  // Reads the first thread's file, since the first thread is as old as the process, and qemu's user emulation invents
  // the process's own file.
  const UniqueFd file = open_stat(fmt::format("{}/task/{}", folder_of(pid), pid));
  const auto stat = file ? read_stat(file.get()) : std::nullopt;
  return {pid, stat ? stat->start_ticks : 0};
}

PeerProcess::PeerProcess(ProcessId id) : id_(id) {
  if (id_.pid > 0) stat_ = open_stat(folder_of(id_.pid));
}

bool PeerProcess::gone() const {
  if (id_.pid <= 0) return false;
  // Without /proc, or if no descriptor was free at construction, only the pid is checked.
  if (!stat_) return ::kill(id_.pid, 0) != 0 && errno == ESRCH;
  errno = 0;
  const auto stat = read_stat(stat_.get());
  if (!stat) return errno == ESRCH;  // the process has been reaped
  if (id_.start_time != 0 && stat->start_ticks != id_.start_time) return true;
  return ended(*stat) && (stat->threads <= 1 || all_threads_exiting(id_.pid));
}

CoreSet allowed_cores() {
  CoreSet cores{};
  if (::syscall(SYS_sched_getaffinity, 0, sizeof cores, cores.data()) <= 0) cores[0] = 1;
  return cores;
}

int count(const CoreSet& cores) {
  int total = 0;
  for (const std::uint64_t word : cores) total += std::popcount(word);
  return std::max(total, 1);
}

}  // namespace cohort::sys
