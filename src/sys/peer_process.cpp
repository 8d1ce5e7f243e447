#include "sys/peer_process.h"

#include "sys/process.h"

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
#include <string>
#include <string_view>
#include <system_error>

namespace cohort::sys {
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
    if (stat && !ended(*stat)) return false;
  }
  return true;
}

}  // namespace

ProcessId own_process() {
  const pid_t pid = ::getpid();
  const UniqueFd file = open_stat(folder_of(pid));
  const auto stat = file ? read_stat(file.get()) : std::nullopt;
  return {pid, stat ? stat->start_ticks : 0};
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
