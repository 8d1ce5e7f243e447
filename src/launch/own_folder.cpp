#include "launch/own_folder.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

namespace cohort::launch {
namespace {

namespace fs = std::filesystem;

tl::unexpected<Error> failed(const std::string& path, const std::string& why) {
  return fail(ErrorCode::Io, "{}: {}", path, why);
}

bool is_trusted(uid_t user) { return user == ::geteuid() || user == 0; }

/// Whoever else can rename what is in it could put something else in its place.
Result<void> require_own(int fd, const std::string& path) {
  struct stat status {};
  if (::fstat(fd, &status) != 0) return failed(path, errno_text(errno));
  if (!is_trusted(status.st_uid))
    return failed(path, fmt::format("it belongs to another user (uid {})", status.st_uid));
  if ((status.st_mode & S_IWOTH) != 0 && (status.st_mode & S_ISVTX) == 0)
    return failed(path, "every user may write to it (chmod o-w)");
  return {};
}

/// errno, or 0. Not for others to write to, whatever the umask: such a one would be refused the next time.
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
  if (auto checked = require_own(own.parent.get(), above.string()); !checked) return tl::unexpected(checked.error());
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
  if (auto checked = require_own(own.folder.get(), path); !checked) return tl::unexpected(checked.error());
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

}  // namespace cohort::launch
