#include "disk_fault.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <stdexcept>

namespace cohort::testing {
namespace {

std::atomic<DiskFault> armed{DiskFault::None};
std::atomic<std::int64_t> strike_at{0}, calls{0};
std::atomic<bool> struck{false};

/// The errno to fail with, or 0. `before_end` does a part of what was asked for, for those that die in its midst.
template <class Part>
int next_call(const Part& part) {
  const std::int64_t number = calls.fetch_add(1) + 1;
  const DiskFault fault = armed.load();
  if (fault == DiskFault::None || number < strike_at.load()) return 0;
  if (number > strike_at.load() && fault != DiskFault::NoSpace) return 0;
  struck = true;
  switch (fault) {
    case DiskFault::Kill:
    case DiskFault::KillJob:
      part();
      ::kill(fault == DiskFault::Kill ? ::getpid() : 0, SIGKILL);
      while (true) ::pause();
    case DiskFault::NoSpace: return ENOSPC;
    case DiskFault::Broken: return EIO;
    case DiskFault::None: break;
  }
  return 0;
}

long call(int error, long number, long a, long b = 0, long c = 0, long d = 0) {
  if (error != 0) {
    errno = error;
    return -1;
  }
  return ::syscall(number, a, b, c, d);
}

long pointer(const void* value) { return reinterpret_cast<long>(value); }

int nothing_before() {
  return next_call([] {});
}

/// For what a full disk does not refuse.
int needs_no_space() {
  const int error = nothing_before();
  return error == ENOSPC ? 0 : error;
}

}  // namespace

DiskFault disk_fault_of(const std::string& name) {
  if (name == "none") return DiskFault::None;
  if (name == "kill") return DiskFault::Kill;
  if (name == "kill-job") return DiskFault::KillJob;
  if (name == "enospc") return DiskFault::NoSpace;
  if (name == "eio") return DiskFault::Broken;
  throw std::invalid_argument("no such fault: " + name);
}

void arm_disk_fault(DiskFault fault, std::int64_t at) {
  calls = 0;
  struck = false;
  strike_at = at;
  armed = fault;
}
std::int64_t disk_calls() { return calls; }
bool disk_fault_struck() { return struck; }
void mend_disk() { armed = DiskFault::None; }

}  // namespace cohort::testing

// In place of the C library's, for everything in this process.
extern "C" {

using namespace cohort::testing;

int open(const char* path, int flags, ...) {
  mode_t mode = 0;
  if ((flags & (O_CREAT | O_TMPFILE)) != 0) {
    va_list arguments;
    va_start(arguments, flags);
    mode = va_arg(arguments, mode_t);
    va_end(arguments);
  }
  const int error = (flags & O_CREAT) != 0 ? nothing_before() : 0;
  return static_cast<int>(call(error, SYS_openat, AT_FDCWD, pointer(path), flags, static_cast<long>(mode)));
}

ssize_t write(int fd, const void* bytes, size_t size) {
  struct stat status {};
  const bool file = ::fstat(fd, &status) == 0 && S_ISREG(status.st_mode);
  const int error = file ? next_call([&] { ::syscall(SYS_write, fd, bytes, size / 2); }) : 0;
  return call(error, SYS_write, fd, pointer(bytes), static_cast<long>(size));
}

int fsync(int fd) { return static_cast<int>(call(nothing_before(), SYS_fsync, fd)); }

int rename(const char* from, const char* to) noexcept {
  return static_cast<int>(call(needs_no_space(), SYS_rename, pointer(from), pointer(to)));
}

int mkdir(const char* path, mode_t mode) noexcept {
  return static_cast<int>(call(nothing_before(), SYS_mkdirat, AT_FDCWD, pointer(path), static_cast<long>(mode)));
}

int unlinkat(int folder, const char* path, int flags) noexcept {
  return static_cast<int>(call(needs_no_space(), SYS_unlinkat, folder, pointer(path), flags));
}

}  // extern "C"
