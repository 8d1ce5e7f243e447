#include "sys/peer_process.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

namespace cohort::sys {
namespace {

struct Stat {
  char state = '?';
  unsigned long flags = 0;
  int threads = 0;
  std::uint64_t start_time = 0;
};

// Fields of /proc/PID/stat are counted after the last ')', since the command's name may hold anything.
std::optional<Stat> read_stat(int file) {
  char text[2048];
  const ssize_t length = ::pread(file, text, sizeof text, 0);
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
  for (int field = 10; field <= 19; ++field) fields >> skipped;
  fields >> stat.threads >> skipped >> stat.start_time;  // fields 20 to 22
  if (!fields) return std::nullopt;
  return stat;
}

constexpr unsigned long kExiting = 0x4;  // PF_EXITING, <linux/sched.h>

bool exiting(const Stat& stat) { return (stat.flags & kExiting) != 0 || stat.state == 'Z' || stat.state == 'X'; }

std::string folder_of(pid_t pid) { return "/proc/" + std::to_string(pid); }

UniqueFd open_stat(const std::string& folder) {
  return UniqueFd(::open((folder + "/stat").c_str(), O_RDONLY | O_CLOEXEC));
}

// The first thread may end before the others (pthread_exit in main): the process lives while any thread does, and as
// long as they can't be looked at (no descriptor is free) it is not said to be dead.
bool all_threads_exiting(pid_t pid) {
  std::error_code error;
  const std::filesystem::directory_iterator tasks(folder_of(pid) + "/task", error);
  if (error) return error == std::errc::no_such_file_or_directory || error == std::errc::no_such_process;
  for (const auto& task : tasks) {
    const UniqueFd file = open_stat(task.path().string());
    if (!file && errno != ENOENT && errno != ESRCH) return false;
    const auto stat = file ? read_stat(file.get()) : std::nullopt;
    if (stat && !exiting(*stat)) return false;
  }
  return true;
}

}  // namespace

ProcessId own_process() {
  const pid_t pid = ::getpid();
  const UniqueFd file = open_stat(folder_of(pid));
  const auto stat = file ? read_stat(file.get()) : std::nullopt;
  return {pid, stat ? stat->start_time : 0};
}

PeerProcess::PeerProcess(ProcessId id) : id_(id) {
  if (id_.pid > 0) stat_ = open_stat(folder_of(id_.pid));
}

bool PeerProcess::gone() const {
  if (id_.pid <= 0) return false;
  // Without /proc, or without a descriptor when this began, the pid alone has to do.
  if (!stat_) return ::kill(id_.pid, 0) != 0 && errno == ESRCH;
  errno = 0;
  const auto stat = read_stat(stat_.get());
  if (!stat) return errno == ESRCH;  // it has been waited for
  if (id_.start_time != 0 && stat->start_time != id_.start_time) return true;
  return exiting(*stat) && (stat->threads <= 1 || all_threads_exiting(id_.pid));
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
