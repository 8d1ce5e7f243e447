// Files: real ones, of a file system that all hosts share, but for /proc, some of /sys, and the programs of a scenario.
#include "kernel/kernel.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>

namespace sim {

const Program* program_of(const std::string& path);

std::string full_path(const char* path) {
  std::string text = path;
  if (!text.empty() && text.front() != '/') text = here()->folder + "/" + text;
  constexpr std::string_view kSelf = "/proc/self/", kThread = "/proc/thread-self/";
  const std::string own = "/proc/" + std::to_string(here()->pid) + "/";
  if (text == "/proc/self") text = own.substr(0, own.size() - 1);
  if (text.starts_with(kSelf)) text = own + text.substr(kSelf.size());
  if (text.starts_with(kThread)) text = own + "task/" + std::to_string(self->tid) + "/" + text.substr(kThread.size());
  const std::string descriptors = own + "fd/";
  if (text.starts_with(descriptors)) {
    const auto slash = text.find('/', descriptors.size());
    const int fd = std::atoi(text.substr(descriptors.size()).c_str());
    if (const FilePtr file = file_of(fd); file != nullptr && file->real() >= 0)
      text = "/proc/self/fd/" + std::to_string(file->real()) + (slash == std::string::npos ? "" : text.substr(slash));
  }
  return text;
}

bool is_program(const std::string& path) {
  return path.starts_with("/simulated/") ? program_of(path) != nullptr
                                         : path.ends_with("/exe") && path.starts_with("/proc/");
}

int change_disk() {
  const Host& host = *here()->host;
  if (self->fork == nullptr) {
    const Nanoseconds until = state->now + host.disk_takes;
    while (state->now < until) block("the disk", until);
  }
  return host.disk == Disk::Full ? ENOSPC : host.disk == Disk::Broken ? EIO : 0;
}

namespace {

std::string stat_text(const Process& process) {
  const char phase = process.ended ? 'Z' : process.stopped ? 'T' : 'S';
  const auto threads =
      std::count_if(process.threads.begin(), process.threads.end(), [](const auto& one) { return !one->gone; });
  std::string text =
      std::to_string(process.pid) + " (" + process.path.substr(process.path.rfind('/') + 1).substr(0, 15) + ") " +
      phase + " " + std::to_string(process.parent) + " " + std::to_string(process.group) + " " +
      std::to_string(process.group) + " 0 -1 " + (process.ended ? "4" : "0") + " 0 0 0 0 10 5 0 0 20 0 " +
      std::to_string(std::max<std::ptrdiff_t>(threads, process.ended ? 0 : 1)) + " 0 " +
      std::to_string(process.start_ticks) + " 100000000 2000";
  for (int field = 25; field < 52; ++field) text += " 0";
  return text + " " + std::to_string(process.ended ? process.wait_status : 0) + "\n";
}

std::string hexadecimal(const std::function<bool(int)>& in) {
  std::uint64_t mask = 0;
  for (int number = 1; number < 65; ++number) mask |= in(number) ? std::uint64_t{1} << (number - 1) : 0;
  char text[20];
  std::snprintf(text, sizeof text, "%016lx", mask);
  return text;
}

std::string status_text(const Process& process) {
  const auto has = [&process](int number, bool ignored) {
    const auto found = process.actions.find(number);
    if (found == process.actions.end() || found->second.sa_handler == SIG_DFL) return false;
    return ignored == (found->second.sa_handler == SIG_IGN);
  };
  const Thread* first = nullptr;
  for (const auto& thread : process.threads) {
    if (first == nullptr && !thread->gone) first = thread.get();
  }
  return "Name:\tprogram\nState:\tS (sleeping)\nSigBlk:\t" +
         hexadecimal([&](int n) { return first != nullptr && sigismember(&first->blocked, n) == 1; }) + "\nSigIgn:\t" +
         hexadecimal([&](int n) { return has(n, true); }) + "\nSigCgt:\t" +
         hexadecimal([&](int n) { return has(n, false); }) + "\n";
}

std::string children_text(const Process& process) {
  std::string text;
  for (const Process* other : process.host->processes) {
    if (other->parent == process.pid && !other->reaped) text += std::to_string(other->pid) + " ";
  }
  return text;
}

/// "/proc/PID/REST" of a process of this host.
std::pair<Process*, std::string> split_proc(const std::string& path) {
  constexpr std::string_view kProc = "/proc/";
  if (!path.starts_with(kProc)) return {};
  const auto slash = path.find('/', kProc.size());
  const std::string number = path.substr(kProc.size(), slash == std::string::npos ? slash : slash - kProc.size());
  if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return {};
  Process* const process = find(static_cast<pid_t>(std::stol(number)));
  if (process == nullptr || process->host != here()->host) return {nullptr, number};
  return {process, slash == std::string::npos ? "" : path.substr(slash + 1)};
}

bool is_of_process(const std::string& path) {
  return !split_proc(path).second.empty() || split_proc(path).first != nullptr;
}

std::optional<std::vector<std::string>> listed(const std::string& path) {
  std::vector<std::string> names;
  if (path == "/proc") {
    for (const Process* process : here()->host->processes) {
      if (!process->reaped) names.push_back(std::to_string(process->pid));
    }
    return names;
  }
  const auto [process, rest] = split_proc(path);
  if (process == nullptr) return std::nullopt;
  if (rest == "task") {
    names.push_back(std::to_string(process->pid));
    for (const auto& thread : process->threads) {
      if (!thread->gone && thread->tid != process->pid) names.push_back(std::to_string(thread->tid));
    }
    return names;
  }
  if (rest == "fd") {
    for (const int fd : process->descriptors.numbers()) names.push_back(std::to_string(fd));
    return names;
  }
  return std::nullopt;
}

struct Listing {
  std::vector<std::string> names;
  std::size_t next = 0;
  dirent entry{};
};
std::set<void*>* listings = nullptr;

DIR* open_listing(std::vector<std::string> names) {
  auto* const made = new Listing{std::move(names), 0, {}};
  if (listings == nullptr) listings = new std::set<void*>;
  listings->insert(made);
  return reinterpret_cast<DIR*>(made);
}

class ListingFile : public File {
 public:
  explicit ListingFile(std::vector<std::string> all) : names(std::move(all)) {}
  short ready() override { return POLLIN; }
  std::vector<std::string> names;
};

}  // namespace

std::optional<std::string> generated(const std::string& path) {
  if (path == "/proc/sys/kernel/random/boot_id") {
    char text[64];
    std::snprintf(text, sizeof text, "00000000-0000-4000-8000-%012d\n", here()->host->number + 1);
    return text;
  }
  if (path == "/proc/meminfo") return "MemTotal: 268435456 kB\nMemFree: 268435456 kB\nMemAvailable: 268435456 kB\n";
  if (path.starts_with("/proc/net/")) return "";
  if (path.ends_with("/cgroup") && path.starts_with("/proc/")) return "0::/\n";
  if (path.starts_with("/sys/fs/cgroup")) return "";
  const auto [process, rest] = split_proc(path);
  if (process == nullptr) return std::nullopt;
  std::string name = rest;
  if (name.starts_with("task/")) {
    const auto slash = name.find('/', 5);
    if (slash == std::string::npos) return std::nullopt;
    const bool first = name.substr(5, slash - 5) == std::to_string(process->pid);
    name = name.substr(slash + 1);
    if (name == "children" && !first) return "";
  }
  if (name == "stat") return stat_text(*process);
  if (name == "status") return status_text(*process);
  if (name == "children") return children_text(*process);
  if (name == "comm") return process->path.substr(process->path.rfind('/') + 1) + "\n";
  if (name == "cmdline") {
    std::string text;
    for (const std::string& word : process->arguments) text += word + '\0';
    return text;
  }
  return std::nullopt;
}

namespace {

/// A call that changes a folder: first the disk's time and failure.
int changing(const std::function<int()>& call) {
  const int error = change_disk();
  return error == 0 ? call() : failed(error);
}

int open_file(int folder, const char* given, int flags, mode_t mode) {
  const bool changes = (flags & (O_CREAT | O_TRUNC)) != 0;  // (O_TMPFILE is followed by what fails)
  if (given[0] != '/' && folder != AT_FDCWD) {
    const FilePtr base = file_of(folder);
    const auto open_it = [&] { return REAL(openat)(base != nullptr ? base->real() : folder, given, flags, mode); };
    const int real = changes ? changing(open_it) : open_it();
    return real < 0 ? -1 : add_descriptor(real_file(real, given, true), (flags & O_CLOEXEC) != 0);
  }
  charge(kCallCost);
  const std::string path = full_path(given);
  if (auto names = listed(path))
    return add_descriptor(std::make_shared<ListingFile>(*std::move(names)), (flags & O_CLOEXEC) != 0);
  if (generated(path)) {
    // The process, not a later one of the same number.
    Process* const process = split_proc(path).first;
    Host* const host = here()->host;
    return add_descriptor(generated_file([path, process, host]() -> std::optional<std::string> {
                            if (process != nullptr && (process->reaped || !host->alive)) return std::nullopt;
                            return generated(path);
                          }),
                          (flags & O_CLOEXEC) != 0);
  }
  if (is_of_process(path) && !path.starts_with("/proc/self/fd/")) return failed(ENOENT);
  const std::string real_path = is_program(path) ? "/dev/null" : path;
  const bool on_disk = !real_path.starts_with("/dev/") && !real_path.starts_with("/proc/");
  const auto open_it = [&] { return REAL(open)(real_path.c_str(), flags, mode); };
  const int real = changes && on_disk ? changing(open_it) : open_it();
  if (real < 0) return -1;
  return add_descriptor(real_file(real, path, on_disk), (flags & O_CLOEXEC) != 0);
}

int status_of(const char* given, struct stat* about, bool follow) {
  const std::string path = full_path(given);
  if (is_program(path)) {
    std::memset(about, 0, sizeof *about);
    about->st_mode = S_IFREG | 0755;
    about->st_size = 1'000'000;
    about->st_ino = 7;
    return 0;
  }
  if (listed(path)) {
    std::memset(about, 0, sizeof *about);
    about->st_mode = S_IFDIR | 0555;
    return 0;
  }
  return follow ? REAL(stat)(path.c_str(), about) : REAL(lstat)(path.c_str(), about);
}

}  // namespace
}  // namespace sim

using namespace sim;

CALL(int, open, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const auto mode = static_cast<mode_t>(va_arg(list, int));
  va_end(list);
  return here() == nullptr ? REAL(open)(path, flags, mode) : open_file(AT_FDCWD, path, flags, mode);
}
CALL(int, open64, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const auto mode = static_cast<mode_t>(va_arg(list, int));
  va_end(list);
  return here() == nullptr ? REAL(open)(path, flags, mode) : open_file(AT_FDCWD, path, flags, mode);
}
CALL(int, openat, int folder, const char* path, int flags, ...) {
  va_list list;
  va_start(list, flags);
  const auto mode = static_cast<mode_t>(va_arg(list, int));
  va_end(list);
  return here() == nullptr ? REAL(openat)(folder, path, flags, mode) : open_file(folder, path, flags, mode);
}
CALL(FILE*, fopen64, const char* path, const char* mode) {
  if (here() == nullptr) return REAL(fopen64)(path, mode);
  const std::string whole = full_path(path);
  if (const auto text = generated(whole)) {
    const int fd = REAL(memfd_create)("generated", 0);
    (void)REAL(write)(fd, text->data(), text->size());
    (void)REAL(lseek)(fd, 0, SEEK_SET);
    return fdopen(fd, "r");
  }
  if (is_of_process(whole)) {
    failed(ENOENT);
    return nullptr;
  }
  return REAL(fopen64)(whole.c_str(), mode);
}
CALL(FILE*, fopen, const char* path, const char* mode) {
  return here() == nullptr ? REAL(fopen)(path, mode) : simulated_fopen64(path, mode);
}
CALL(int, memfd_create, const char* name, unsigned flags) {
  const int fd = REAL(memfd_create)(name, flags);
  if (here() == nullptr || fd < 0) return fd;
  return add_descriptor(real_file(fd, name), true);
}

CALL(int, stat, const char* path, struct stat* about) {
  return here() == nullptr ? REAL(stat)(path, about) : status_of(path, about, true);
}
CALL(int, lstat, const char* path, struct stat* about) {
  return here() == nullptr ? REAL(lstat)(path, about) : status_of(path, about, false);
}
CALL(int, fstat, int fd, struct stat* about) {
  if (here() == nullptr) return REAL(fstat)(fd, about);
  const FilePtr file = file_of(fd);
  if (file == nullptr) return REAL(fstat)(fd, about);
  if (file->real() >= 0) return REAL(fstat)(file->real(), about);
  std::memset(about, 0, sizeof *about);
  about->st_mode = S_IFIFO | 0600;
  about->st_ino = reinterpret_cast<ino_t>(file.get());
  return 0;
}
CALL(int, fstat64, int fd, struct stat* about) {
  return here() == nullptr ? REAL(fstat)(fd, about) : simulated_fstat(fd, about);
}
CALL(int, fstatat, int folder, const char* path, struct stat* about, int flags) {
  if (here() == nullptr) return REAL(fstatat)(folder, path, about, flags);
  if (path[0] == '/' || folder == AT_FDCWD) return status_of(path, about, (flags & AT_SYMLINK_NOFOLLOW) == 0);
  const FilePtr base = file_of(folder);
  return REAL(fstatat)(base != nullptr ? base->real() : folder, path, about, flags);
}
CALL(int, fstatvfs, int fd, struct statvfs* about) {
  const FilePtr file = here() == nullptr ? nullptr : file_of(fd);
  return REAL(fstatvfs)(file != nullptr ? file->real() : fd, about);
}
CALL(int, access, const char* path, int mode) {
  if (here() == nullptr) return REAL(access)(path, mode);
  const std::string whole = full_path(path);
  if (is_program(whole) || generated(whole) || listed(whole)) return 0;
  return REAL(access)(whole.c_str(), mode);
}
CALL(int, faccessat, int folder, const char* path, int mode, int flags) {
  if (here() == nullptr) return REAL(faccessat)(folder, path, mode, flags);
  if (folder == AT_FDCWD || path[0] == '/') return simulated_access(path, mode);
  const FilePtr base = file_of(folder);
  return REAL(faccessat)(base != nullptr ? base->real() : folder, path, mode, flags);
}
CALL(ssize_t, readlink, const char* path, char* out, std::size_t size) {
  if (here() == nullptr) return REAL(readlink)(path, out, size);
  const std::string whole = full_path(path);
  const auto put = [&](const std::string& text) {
    std::memcpy(out, text.data(), std::min(size, text.size()));
    return static_cast<ssize_t>(std::min(size, text.size()));
  };
  if (std::string_view(path) == "/proc/self") return put(std::to_string(here()->pid));
  const auto [process, rest] = split_proc(whole);
  if (process != nullptr && rest == "exe") return put(process->path);
  // Each rank has namespaces of its own, as in a container: ranks of a host speak by TCP, since what goes by shared
  // memory waits without calls, and would keep the turn for ever.
  if (process != nullptr && rest.starts_with("ns/")) {
    const bool command = process->path.ends_with("/cohort");
    return put(rest.substr(3) + ":[" +
               std::to_string(4026531000 + (command ? process->host->number : 10'000 + process->pid)) + "]");
  }
  return REAL(readlink)(whole.c_str(), out, size);
}

/// Calls whose first parameter is a path.
#define OF_PATH(result, name, parameters, ...)                                         \
  CALL(result, name, const char* path parameters) {                                    \
    return REAL(name)(here() == nullptr ? path : full_path(path).c_str() __VA_ARGS__); \
  }
#define COMMA ,
OF_PATH(int, rmdir, , )
OF_PATH(int, unlink, , )
OF_PATH(int, remove, , )
OF_PATH(int, chmod, COMMA mode_t mode, COMMA mode)
OF_PATH(int, truncate, COMMA off_t size, COMMA size)
OF_PATH(int, statvfs, COMMA struct statvfs* about, COMMA about)

CALL(int, mkdir, const char* path, mode_t mode) {
  if (here() == nullptr) return REAL(mkdir)(path, mode);
  return changing([&] { return REAL(mkdir)(full_path(path).c_str(), mode); });
}
CALL(int, rename, const char* from, const char* to) {
  if (here() == nullptr) return REAL(rename)(from, to);
  return changing([&] { return REAL(rename)(full_path(from).c_str(), full_path(to).c_str()); });
}
CALL(int, link, const char* from, const char* to) {
  if (here() == nullptr) return REAL(link)(from, to);
  return REAL(link)(full_path(from).c_str(), full_path(to).c_str());
}
CALL(int, symlink, const char* target, const char* path) {
  return REAL(symlink)(target, here() == nullptr ? path : full_path(path).c_str());
}

namespace {

int real_folder(int folder) {
  if (folder == AT_FDCWD) return folder;
  const FilePtr file = file_of(folder);
  return file != nullptr ? file->real() : folder;
}
std::string path_at(int folder, const char* path) { return folder == AT_FDCWD ? full_path(path) : std::string(path); }

}  // namespace

CALL(int, mkdirat, int folder, const char* path, mode_t mode) {
  if (here() == nullptr) return REAL(mkdirat)(folder, path, mode);
  return changing([&] { return REAL(mkdirat)(real_folder(folder), path_at(folder, path).c_str(), mode); });
}
CALL(int, unlinkat, int folder, const char* path, int flags) {
  if (here() == nullptr) return REAL(unlinkat)(folder, path, flags);
  return REAL(unlinkat)(real_folder(folder), path_at(folder, path).c_str(), flags);
}
CALL(int, symlinkat, const char* target, int folder, const char* path) {
  if (here() == nullptr) return REAL(symlinkat)(target, folder, path);
  return changing([&] { return REAL(symlinkat)(target, real_folder(folder), path_at(folder, path).c_str()); });
}
CALL(int, renameat, int from, const char* old, int to, const char* path) {
  if (here() == nullptr) return REAL(renameat)(from, old, to, path);
  return changing([&] {
    return REAL(renameat)(real_folder(from), path_at(from, old).c_str(), real_folder(to), path_at(to, path).c_str());
  });
}
CALL(int, linkat, int from, const char* old, int to, const char* path, int flags) {
  if (here() == nullptr) return REAL(linkat)(from, old, to, path, flags);
  return changing([&] {
    return REAL(linkat)(real_folder(from), path_at(from, old).c_str(), real_folder(to), path_at(to, path).c_str(),
                        flags);
  });
}
CALL(int, fchmodat, int folder, const char* path, mode_t mode, int flags) {
  if (here() == nullptr) return REAL(fchmodat)(folder, path, mode, flags);
  return REAL(fchmodat)(real_folder(folder), path_at(folder, path).c_str(), mode, flags);
}
CALL(int, utimensat, int folder, const char* path, const timespec* times, int flags) {
  if (here() == nullptr) return REAL(utimensat)(folder, path, times, flags);
  return REAL(utimensat)(real_folder(folder), path_at(folder, path).c_str(), times, flags);
}
CALL(int, chdir, const char* path) {
  if (here() == nullptr) return REAL(chdir)(path);
  struct stat about {};
  const std::string whole = full_path(path);
  if (REAL(stat)(whole.c_str(), &about) != 0) return -1;
  here()->folder = whole;
  return 0;
}
CALL(char*, getcwd, char* out, std::size_t size) {
  if (here() == nullptr) return REAL(getcwd)(out, size);
  if (out == nullptr) return ::strdup(here()->folder.c_str());
  std::snprintf(out, size, "%s", here()->folder.c_str());
  return out;
}
CALL(char*, get_current_dir_name) {
  return here() == nullptr ? REAL(get_current_dir_name)() : ::strdup(here()->folder.c_str());
}
CALL(char*, realpath, const char* path, char* out) {
  if (here() == nullptr) return REAL(realpath)(path, out);
  const std::string whole = full_path(path);
  if (is_program(whole)) return out == nullptr ? ::strdup(whole.c_str()) : std::strcpy(out, whole.c_str());
  return REAL(realpath)(whole.c_str(), out);
}

CALL(DIR*, opendir, const char* path) {
  if (here() == nullptr) return REAL(opendir)(path);
  const std::string whole = full_path(path);
  if (auto names = listed(whole)) return open_listing(*std::move(names));
  if (is_of_process(whole) && !whole.starts_with("/proc/self/fd/")) {
    failed(ENOENT);
    return nullptr;
  }
  return REAL(opendir)(whole.c_str());
}
CALL(DIR*, fdopendir, int fd) {
  if (here() == nullptr) return REAL(fdopendir)(fd);
  const FilePtr file = file_of(fd);
  if (file == nullptr) return REAL(fdopendir)(fd);
  here()->descriptors.erase(fd);
  if (auto* const list = dynamic_cast<ListingFile*>(file.get())) return open_listing(list->names);
  return REAL(fdopendir)(REAL(fcntl)(file->real(), F_DUPFD_CLOEXEC, 5'000));
}
CALL(dirent*, readdir, DIR* folder) {
  if (listings == nullptr || !listings->contains(folder)) return REAL(readdir)(folder);
  auto& list = *reinterpret_cast<Listing*>(folder);
  if (list.next == list.names.size()) return nullptr;
  list.entry = {};
  list.entry.d_type = DT_DIR;
  std::snprintf(list.entry.d_name, sizeof list.entry.d_name, "%s", list.names[list.next++].c_str());
  return &list.entry;
}
CALL(int, closedir, DIR* folder) {
  if (listings == nullptr || listings->erase(folder) == 0) return REAL(closedir)(folder);
  delete reinterpret_cast<Listing*>(folder);
  return 0;
}
CALL(int, dirfd, DIR* folder) {
  if (listings != nullptr && listings->contains(folder)) return -1;
  return REAL(dirfd)(folder);
}
