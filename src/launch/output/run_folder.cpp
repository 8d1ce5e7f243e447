#include "launch/output/run_folder.h"

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/thread.h"
#include "base/unique_fd.h"

#include <fcntl.h>
#include <fmt/chrono.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>
#include <nlohmann/json.hpp>

#include <cerrno>
#include <chrono>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

tl::unexpected<Error> failed(const std::string& path, const std::string& why) {
  return fail(ErrorCode::Io, "{}: {}", path, why);
}

bool is_trusted(uid_t user) { return user == ::geteuid() || user == 0; }

/// Fails if another user could rename the contents of the folder and replace them, or add to those of a run's folder.
Result<void> require_own(int fd, const std::string& path, bool run_folder) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return failed(path, errno_text(errno));
  if (!is_trusted(status.st_uid))
    return failed(path, fmt::format("it belongs to another user (uid {})", status.st_uid));
  if ((status.st_mode & S_IWOTH) != 0 && (run_folder || (status.st_mode & S_ISVTX) == 0))
    return failed(path, "every user may write to it (chmod o-w, or name a new folder in it)");
  return {};
}

/// Makes a folder with those above it; returns errno, or 0. Only its owner can write to it: others are refused later.
int make_all(const fs::path& folder) {
  std::error_code ignored;
  if (fs::is_directory(folder, ignored)) return 0;
  if (const fs::path above = folder.parent_path(); above != folder) {
    if (const int why = make_all(above); why != 0) return why;
  }
  return ::mkdir(folder.c_str(), 0755) == 0 || errno == EEXIST ? 0 : errno;
}

}  // namespace

Result<sys::UniqueFd> open_folder(const std::string& path) {
  struct stat status {};
  if (::lstat(path.c_str(), &status) != 0) return failed(path, errno_text(errno));
  const bool link = S_ISLNK(status.st_mode);
  if (link && !is_trusted(status.st_uid))
    return failed(path, fmt::format("it is a link of another user (uid {})", status.st_uid));
  sys::UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC | (link ? 0 : O_NOFOLLOW)));
  if (!fd) return failed(path, errno_text(errno));
  return fd;
}

Result<OwnFolder> make_own_folder(const std::string& path, Existing existing) {
  const fs::path above = fs::path(path).parent_path();
  const std::string name = fs::path(path).filename().string();
  if (const int why = make_all(above); why != 0) return failed(above.string(), errno_text(why));
  OwnFolder own;
  auto parent = open_folder(above.string());
  if (!parent) return tl::unexpected(parent.error());
  own.parent = *std::move(parent);
  if (auto checked = require_own(own.parent.get(), above.string(), false); !checked)
    return tl::unexpected(checked.error());
  own.made = ::mkdirat(own.parent.get(), name.c_str(), 0755) == 0;
  if (!own.made && (errno != EEXIST || existing == Existing::Refused)) return failed(path, errno_text(errno));
  if (own.made) {
    own.folder.reset(::openat(own.parent.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!own.folder) return failed(path, errno_text(errno));
    return own;
  }
  auto folder = open_folder(path);
  if (!folder) return tl::unexpected(folder.error());
  own.folder = *std::move(folder);
  if (auto checked = require_own(own.folder.get(), path, true); !checked) return tl::unexpected(checked.error());
  return own;
}

Result<sys::UniqueFd> make_file(int folder, const std::string& name, mode_t mode) {
  ::unlinkat(folder, name.c_str(), 0);
  sys::UniqueFd fd(
      ::openat(folder, name.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!fd) return failed(name, errno_text(errno));
  return fd;
}

Result<sys::UniqueFd> continue_file(int folder, const std::string& name, mode_t mode) {
  sys::UniqueFd fd(::openat(folder, name.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_NOFOLLOW | O_CLOEXEC, mode));
  if (!fd) return failed(name, errno_text(errno));
  return fd;
}

bool write_or_close(sys::UniqueFd& file, std::string_view bytes) {
  if (!file || sys::write_all(file.get(), bytes)) return true;
  const int error = errno;
  file.reset();
  errno = error;
  return false;
}

namespace {

/// Sets a link for the user's convenience: failure is no error, and several jobs may try at the same time.
void point_latest_to(int runs, const std::string& name) {
  struct stat status {};
  if (::fstatat(runs, "latest", &status, AT_SYMLINK_NOFOLLOW) == 0 && !S_ISLNK(status.st_mode)) return;
  const std::string aside = ".latest-" + name;
  if (::symlinkat(name.c_str(), runs, aside.c_str()) != 0) return;
  if (::renameat(runs, aside.c_str(), runs, "latest") != 0) ::unlinkat(runs, aside.c_str(), 0);
}

/// Locks the folder. The lock belongs to the open file: it ends with the last process of the job that holds it.
Result<sys::UniqueFd> lock(int folder) {
  auto file = continue_file(folder, kLockFile, 0600);
  // (On a file system without locks, the folder is not locked.)
  if (file && ::flock(file->get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK)
    return fail(ErrorCode::Io, "another job is running in it");
  return file;
}

/// Corrects the paths of the logs in an earlier run's record, since they have been moved.
void correct_record(const fs::path& aside, const std::string& before) {
  const std::string text = sys::read_text(aside / "job.json").value_or(std::string());
  auto record = parse_json_or_discard<nlohmann::ordered_json>(text);
  if (!record.is_object()) return;
  const auto correct = [&](nlohmann::ordered_json& of) {
    if (!of.is_object() || !of.contains("logs") || !of["logs"].is_string()) return;
    const std::string logs = of["logs"];
    if (logs == before + "/logs" || logs.starts_with(before + "/logs/"))
      of["logs"] = aside.string() + logs.substr(before.size());
  };
  correct(record);
  if (record.contains("attempts") && record["attempts"].is_array()) {
    for (auto& attempt : record["attempts"]) correct(attempt);
  }
  auto folder = open_folder(aside.string());
  if (folder) (void)write_job_record({aside.string(), aside.string(), std::move(*folder), {}, {}}, record);
}

/// Moves these names into a new folder below `folder`. Returns the new folder's name.
Result<std::string> put_aside(int folder, const std::vector<std::string>& what) {
  std::string name;
  for (int number = 1;; ++number) {
    name = fmt::format("earlier-{}", number);
    if (::mkdirat(folder, name.c_str(), 0755) == 0) break;
    if (errno != EEXIST) return fail(ErrorCode::Io, "making {} for the run before: {}", name, errno_text(errno));
  }
  for (const std::string& each : what) {
    if (::renameat(folder, each.c_str(), folder, (name + "/" + each).c_str()) != 0 && errno != ENOENT)
      return fail(ErrorCode::Io, "moving {} of the run before to {}: {}", each, name, errno_text(errno));
  }
  return name;
}

/// Moves an earlier run's files aside. Returns the name of their folder below `folder`; empty if there were none.
Result<std::string> put_earlier_aside(int folder, const fs::path& path) {
  if (::faccessat(folder, "job.json", F_OK, AT_SYMLINK_NOFOLLOW) != 0) return std::string();
  std::vector<std::string> what = {"logs", "job.json", "live.json", "trace", "trace.json"};
  // The records of an elastic training's worlds belong to one run.
  std::error_code error;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end; entry.increment(error)) {
    const std::string file = entry->path().filename();
    if (file.starts_with("samples-") && file.ends_with(".jsonl")) what.push_back(file);
  }
  auto name = put_aside(folder, what);
  if (name) correct_record(path / *name, path.string());
  return name;
}

}  // namespace

std::string utc_now() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  return fmt::format("{:%Y-%m-%dT%H:%M:%S}.{:03}Z", fmt::gmtime(now.tv_sec), now.tv_nsec / 1'000'000);
}

Result<RunFolder> make_run_folder(const RunFolderRequest& request) {
  const bool own_name = request.path.empty();
  const std::string shown =
      own_name ? fmt::format("runs/{}-{}-{}", fmt::format("{:%Y%m%d-%H%M%S}", fmt::gmtime(std::time(nullptr))),
                             request.program_name, request.id)
               : request.path;
  const auto failed = [&shown](const std::string& why) {
    return fail(ErrorCode::Io, "cannot make the run's folder {}: {}; choose another with --run-dir", shown, why);
  };
  std::error_code error;
  fs::path path = fs::absolute(shown, error);
  if (error) return failed(error.message());
  path = path.lexically_normal();
  if (path.filename().empty()) path = path.parent_path();
  auto own = make_own_folder(path.string(), own_name ? Existing::Refused : Existing::Taken);
  if (!own) return failed(own.error().what());
  if (::faccessat(own->folder.get(), ".", W_OK | X_OK, 0) != 0) return failed(errno_text(errno));
  auto locked = lock(own->folder.get());
  if (!locked) return failed(locked.error().what());
  auto earlier = put_earlier_aside(own->folder.get(), path);
  if (!earlier) return failed(earlier.error().what());
  if (own_name) point_latest_to(own->parent.get(), path.filename().string());
  RunFolder made{path.string(), shown, std::move(own->folder), {}, *std::move(locked)};
  if (!earlier->empty()) made.earlier = (fs::path(shown) / *earlier).string();
  return made;
}

namespace {

/// Overwrites a file in place, where there is no space for another one. Changes nothing if the text does not fit.
bool overwrite(int folder, const std::string& name, std::string_view text) {
  const sys::UniqueFd fd(::openat(folder, name.c_str(), O_WRONLY | O_NOFOLLOW | O_CLOEXEC));
  const auto size = static_cast<off_t>(text.size());
  return fd && ::fallocate(fd.get(), FALLOC_FL_KEEP_SIZE, 0, size) == 0 && sys::write_all(fd.get(), text) &&
         ::ftruncate(fd.get(), size) == 0;
}

}  // namespace

Result<void> replace_file(const RunFolder& folder, const std::string& name, std::string_view text) {
  const std::string path = folder.path + "/" + name;
  const std::string aside = "." + name + ".new";
  const auto fd = make_file(folder.fd.get(), aside, 0600);
  if (!fd) return fail(ErrorCode::Io, "{}: {}", path, fd.error().what());
  if (!sys::write_all(fd->get(), text)) {
    const int why = errno;
    ::unlinkat(folder.fd.get(), aside.c_str(), 0);
    if ((why == ENOSPC || why == EDQUOT) && overwrite(folder.fd.get(), name, text)) return {};
    return fail(ErrorCode::Io, "{}: {}", path, errno_text(why));
  }
  if (::renameat(folder.fd.get(), aside.c_str(), folder.fd.get(), name.c_str()) != 0)
    return fail(ErrorCode::Io, "{}: {}", path, errno_text(errno));
  return {};
}

Result<void> write_job_record(const RunFolder& folder, const nlohmann::ordered_json& record) {
  // Arguments and paths need not be UTF-8, but JSON has to be.
  return replace_file(folder, "job.json", record.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

namespace {

constexpr std::chrono::seconds kWakeEvery{5};

std::optional<DiskRoom> look(int folder) {
  struct statvfs found {};
  if (::fstatvfs(folder, &found) != 0 || found.f_blocks == 0) return std::nullopt;
  return DiskRoom{static_cast<std::uint64_t>(found.f_blocks) * found.f_frsize,
                  static_cast<std::uint64_t>(found.f_bavail) * found.f_frsize};
}

/// Appends lines. As with job.json, only this user may read the file. A line that does not fit is removed as a whole.
void append_to(int folder, const std::string& name, const std::string& lines) {
  const sys::UniqueFd file(
      ::openat(folder, name.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    log::warn("launch", "{} cannot be written: {}", name, errno_text(errno));
    return;
  }
  const ssize_t wrote = ::write(file.get(), lines.data(), lines.size());
  if (wrote == static_cast<ssize_t>(lines.size())) return;
  log::warn("launch", "{} cannot be written: {}", name, wrote < 0 ? errno_text(errno) : "no room is left");
  if (wrote > 0) (void)!::ftruncate(file.get(), status.st_size);
}

}  // namespace

bool nearly_full(const DiskRoom& room) noexcept {
  return room.size > 0 && room.free < room.size / 20 && room.free < std::uint64_t{10} << 30;
}

WarningsFile::WarningsFile(const RunFolder& folder)
    : folder_(folder), thread_(sys::start_without_signals([this] { work(); })) {}

WarningsFile::~WarningsFile() {
  {
    const std::scoped_lock lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WarningsFile::append(const std::string& file, const std::string& lines) {
  {
    const std::scoped_lock lock(mutex_);
    waiting_[file] += lines;
  }
  changed_.notify_all();
}

std::optional<DiskRoom> WarningsFile::room() {
  const std::scoped_lock lock(mutex_);
  return room_;
}

void WarningsFile::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    const auto all = std::exchange(waiting_, {});
    const bool last = closing_;
    lock.unlock();
    for (const auto& [file, lines] : all) append_to(folder_.fd.get(), file, lines);
    const auto room = last ? std::nullopt : look(folder_.fd.get());
    lock.lock();
    if (room) room_ = room;
    if (last && waiting_.empty()) return;
    changed_.wait_for(lock, kWakeEvery, [this] { return closing_ || !waiting_.empty(); });
  }
}

}  // namespace cohort::launch
