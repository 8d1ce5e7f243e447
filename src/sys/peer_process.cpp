#include "sys/peer_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

#ifndef SYS_pidfd_open
#define SYS_pidfd_open 434
#endif

namespace cohort::sys {
namespace {

struct Stat {
  char state = '?';
  unsigned long flags = 0;
  std::uint64_t start_time = 0;
};

// Fields of /proc/PID/stat are counted after the last ')', since the command's name may hold anything.
std::optional<Stat> read_stat(const std::string& path) {
  char text[2048];
  const UniqueFd file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!file) return std::nullopt;
  const ssize_t length = ::read(file.get(), text, sizeof text);
  if (length <= 0) return std::nullopt;
  const std::string_view line(text, static_cast<std::size_t>(length));
  const std::size_t end = line.rfind(')');
  if (end == std::string_view::npos) return std::nullopt;
  std::istringstream fields{std::string(line.substr(end + 1))};
  Stat stat;
  std::string skipped;
  fields >> stat.state;                                        // field 3
  for (int field = 4; field <= 8; ++field) fields >> skipped;  // ppid .. tpgid
  fields >> stat.flags;                                        // field 9
  for (int field = 10; field <= 21; ++field) fields >> skipped;
  fields >> stat.start_time;  // field 22
  if (!fields) return std::nullopt;
  return stat;
}

constexpr unsigned long kExiting = 0x4;  // PF_EXITING, <linux/sched.h>

bool exiting(const Stat& stat) { return (stat.flags & kExiting) != 0 || stat.state == 'Z' || stat.state == 'X'; }

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

// The first thread may end before the others (pthread_exit in main): the process lives while any thread does.
bool all_threads_exiting(pid_t pid) {
  std::error_code ignored;
  for (const auto& task : std::filesystem::directory_iterator(folder_of(pid) + "/task", ignored)) {
    const auto stat = read_stat(task.path().string() + "/stat");
    if (stat && !exiting(*stat)) return false;
  }
  return true;
}

}  // namespace

ProcessId own_process() {
  const pid_t pid = ::getpid();
  const auto stat = read_stat(folder_of(pid) + "/stat");
  return {pid, stat ? stat->start_time : 0};
}

PeerProcess::PeerProcess(ProcessId id) : id_(id) {
  if (id_.pid > 0) pidfd_.reset(static_cast<int>(::syscall(SYS_pidfd_open, id_.pid, 0)));
}

bool PeerProcess::gone() const {
  if (id_.pid <= 0) return false;
  if (pidfd_) {
    pollfd event{pidfd_.get(), POLLIN, 0};
    if (::poll(&event, 1, 0) > 0) return true;
  } else if (::kill(id_.pid, 0) != 0 && errno == ESRCH) {
    return true;
  }
  const auto stat = read_stat(folder_of(id_.pid) + "/stat");
  if (!stat) return ::access("/proc/self/stat", R_OK) == 0;  // where /proc is to be seen, it is not there any more
  if (id_.start_time != 0 && stat->start_time != id_.start_time) return true;
  return exiting(*stat) && all_threads_exiting(id_.pid);
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
