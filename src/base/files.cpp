#include "base/files.h"

#include <dirent.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/random.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <system_error>

namespace cohort::sys {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kLargestCall = std::size_t{1} << 30;  // read(2) and write(2) move at most 2 GiB per call

std::string folder_of(const std::string& path) {
  const std::string parent = fs::path(path).parent_path().string();
  return parent.empty() ? "." : parent;
}

/// Returns an unused short name in the folder of `path`. It fits the limits on names if `path` does.
std::string name_aside(const std::string& path) {
  return fmt::format("{}/.cohort-{:x}-{}.tmp", folder_of(path), ::getpid(), random_hex(8));
}

tl::unexpected<Error> io_error(std::string_view what, std::string_view path, int error_number,
                               std::string_view advice) {
  const bool missing = error_number == ENOENT || error_number == ENOTDIR;
  return fail(missing ? ErrorCode::Unavailable : ErrorCode::Io, "{} {} -- {} -- {}", what, path,
              errno_text(error_number), advice);
}

std::string_view write_advice(int error_number) {
  switch (error_number) {
    case ENOSPC:
    case EDQUOT: return "free some space there, or choose another place";
    case EFBIG: return "the limit on file sizes is too low (ulimit -f)";
    case EIO: return "the disk reports an error: choose another one and look at the kernel's log";
    case EROFS:
    case EACCES:
    case EPERM: return "choose a folder that this user may write to";
    case ENOENT: return "create the folder first";
    default: return "check the path and its file system";
  }
}

constexpr std::string_view kReadAdvice = "check the path and that this user may read it";

/// Returns the number of bytes read: less than the size of `bytes` only at the file's end.
Result<std::size_t> read_into(std::span<std::byte> bytes, int fd, const std::string& path) {
  std::size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t got = ::read(fd, bytes.data() + done, std::min(bytes.size() - done, kLargestCall));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return io_error("cannot read", path, errno, kReadAdvice);
    if (got == 0) break;
    done += static_cast<std::size_t>(got);
  }
  return done;
}

}  // namespace

FileBytes::FileBytes(std::size_t size)
    : data_(static_cast<std::byte*>(::operator new[](std::max<std::size_t>(size, 1), std::align_val_t(64)))),
      size_(size) {}

Result<FileBytes> read_file(const std::string& path, const ReadFileOptions& options) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!fd) return io_error("cannot open", path, errno, kReadAdvice);
  struct stat status {};
  if (::fstat(fd.get(), &status) != 0) return io_error("cannot examine", path, errno, kReadAdvice);
  if (!S_ISREG(status.st_mode)) {
    return fail(ErrorCode::Io, "cannot read {} -- it is {} -- give the path of a regular file", path,
                S_ISDIR(status.st_mode) ? "a folder" : "not a regular file");
  }
  const auto size = static_cast<std::uint64_t>(status.st_size);
  if (size > options.max_bytes) {
    return fail(ErrorCode::Corrupt,
                "cannot read {} -- it has {} bytes where at most {} make sense -- is it the right file?", path, size,
                options.max_bytes);
  }
  FileBytes bytes;
  try {
    bytes = FileBytes(static_cast<std::size_t>(size));
  } catch (const std::bad_alloc&) {
    return fail(ErrorCode::Unavailable, "cannot read {} -- its {} bytes do not fit into memory -- free some memory",
                path, size);
  }
  const auto done = read_into({bytes.data(), bytes.size()}, fd.get(), path);
  if (!done) return tl::unexpected(done.error());
  if (*done < bytes.size()) {
    return fail(ErrorCode::Io, "cannot read {} -- it shrank from {} to {} bytes while it was read -- who writes to it?",
                path, size, *done);
  }
  return bytes;
}

Result<std::string> read_text(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return io_error("cannot open", path, errno, kReadAdvice);
  std::string text;
  std::array<std::byte, 4096> part{};
  while (true) {
    const auto got = read_into(part, fd.get(), path);
    if (!got) return tl::unexpected(got.error());
    text.append(reinterpret_cast<const char*>(part.data()), *got);
    if (*got < part.size()) return text;
  }
}

Result<FileReader> FileReader::open(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd) return io_error("cannot open", path, errno, kReadAdvice);
  return FileReader(std::move(fd), path);
}

Result<void> FileReader::read(std::span<std::byte> bytes) {
  const auto done = read_into(bytes, fd_.get(), path_);
  if (!done) return tl::unexpected(done.error());
  if (*done < bytes.size())
    return fail(ErrorCode::Io, "cannot read {} -- it ends too early -- who writes to it?", path_);
  return {};
}

Result<void> FileReader::seek(std::uint64_t offset) {
  if (::lseek(fd_.get(), static_cast<off_t>(offset), SEEK_SET) < 0)
    return io_error("cannot read", path_, errno, kReadAdvice);
  return {};
}

Result<FileWriter> FileWriter::create(const std::string& path) {
  UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!fd) return io_error("cannot create", path, errno, write_advice(errno));
  return FileWriter(std::move(fd), path);
}

Result<void> FileWriter::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t put = ::write(fd_.get(), bytes.data(), std::min(bytes.size(), kLargestCall));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) return io_error("cannot write", path_, errno, write_advice(errno));
    size_ += static_cast<std::uint64_t>(put);
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
  return {};
}

Result<void> FileWriter::sync() {
  if (::fsync(fd_.get()) != 0) return io_error("cannot sync", path_, errno, write_advice(errno));
  return {};
}

Result<AtomicFile> AtomicFile::create(const std::string& path) {
  std::string target = path;
  std::error_code ignored;
  if (fs::is_symlink(path, ignored)) {
    const fs::path resolved = fs::weakly_canonical(path, ignored);
    if (!ignored) target = resolved.string();
  }
  std::string aside;
  UniqueFd fd(::open(folder_of(target).c_str(), O_TMPFILE | O_WRONLY | O_CLOEXEC, 0666));
  if (!fd) {
    aside = name_aside(target);
    fd.reset(::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
    if (!fd) return io_error("cannot write", path, errno, write_advice(errno));
  }
  struct stat status {};
  if (::stat(target.c_str(), &status) == 0) {
    // The file may be private: the new content must not be more visible than the old.
    if (S_ISDIR(status.st_mode)) {
      if (!aside.empty()) ::unlink(aside.c_str());
      return io_error("cannot write", path, EISDIR, "give the path of a file");
    }
    if (::fchmod(fd.get(), status.st_mode & 07777) != 0) {
      const int error_number = errno;
      if (!aside.empty()) ::unlink(aside.c_str());
      return io_error("cannot keep the mode of", path, error_number, write_advice(error_number));
    }
  }
  return AtomicFile(FileWriter(std::move(fd), path), std::move(target), std::move(aside));
}

AtomicFile::~AtomicFile() {
  if (!aside_.empty()) ::unlink(aside_.c_str());
}

Result<void> AtomicFile::commit() {
  if (auto synced = writer_.sync(); !synced) return synced;
  if (aside_.empty()) {
    const std::string self = fmt::format("/proc/self/fd/{}", writer_.fd_.get());
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, path_.c_str(), AT_SYMLINK_FOLLOW) == 0) {
      return sync_folder(folder_of(path_));
    }
    // linkat cannot replace a file, so the new file needs a hidden name until rename.
    std::string aside = name_aside(path_);
    if (::linkat(AT_FDCWD, self.c_str(), AT_FDCWD, aside.c_str(), AT_SYMLINK_FOLLOW) != 0) {
      return io_error("cannot name", path_, errno, write_advice(errno));
    }
    aside_ = std::move(aside);
  }
  if (::rename(aside_.c_str(), path_.c_str()) != 0)
    return io_error("cannot replace", path_, errno, write_advice(errno));
  aside_.clear();
  return sync_folder(folder_of(path_));
}

Result<void> write_file_atomically(const std::string& path, std::span<const std::byte> bytes) {
  auto file = AtomicFile::create(path);
  if (!file) return tl::unexpected(file.error());
  if (auto written = file->writer().write(bytes); !written) return written;
  return file->commit();
}

Result<void> write_file_atomically(const std::string& path, std::string_view text) {
  return write_file_atomically(path, std::as_bytes(std::span(text.data(), text.size())));
}

Result<void> sync_folder(const std::string& path) {
  const UniqueFd fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd) return io_error("cannot open the folder", path, errno, write_advice(errno));
  // Some network file systems do not sync folders: they return EINVAL, and keep names safe in their own way.
  if (::fsync(fd.get()) != 0 && errno != EINVAL)
    return io_error("cannot sync the folder", path, errno, write_advice(errno));
  return {};
}

Result<void> rename_path(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    return io_error("cannot rename", fmt::format("{} to {}", from, to), errno, write_advice(errno));
  }
  return {};
}

Result<void> make_folders(const std::string& path) {
  std::string clean = path;
  while (clean.size() > 1 && clean.back() == '/') clean.pop_back();
  if (::mkdir(clean.c_str(), 0777) == 0) return sync_folder(folder_of(clean));
  if (errno == ENOENT && folder_of(clean) != clean) {
    if (auto made = make_folders(folder_of(clean)); !made) return made;
    if (::mkdir(clean.c_str(), 0777) == 0) return sync_folder(folder_of(clean));
  }
  const int error_number = errno;
  struct stat status {};
  if (error_number == EEXIST && ::stat(clean.c_str(), &status) == 0 && S_ISDIR(status.st_mode)) return {};
  return io_error("cannot create the folder", path, error_number == EEXIST ? ENOTDIR : error_number,
                  write_advice(error_number));
}

Result<void> remove_tree(const std::string& path) {
  std::error_code error;
  fs::remove_all(path, error);
  if (error && error != std::errc::no_such_file_or_directory) {
    return io_error("cannot remove", path, error.value(), write_advice(error.value()));
  }
  return {};
}

Result<std::vector<std::string>> list_folder(const std::string& path) {
  DIR* const folder = ::opendir(path.c_str());
  if (folder == nullptr) return io_error("cannot list the folder", path, errno, kReadAdvice);
  std::vector<std::string> names;
  errno = 0;
  while (const dirent* entry = ::readdir(folder)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
    errno = 0;
  }
  const int error_number = errno;
  ::closedir(folder);
  if (error_number != 0) return io_error("cannot list the folder", path, error_number, kReadAdvice);
  std::sort(names.begin(), names.end());
  return names;
}

std::string random_hex(std::size_t bytes) {
  std::array<std::uint8_t, 256> random;
  if (::getrandom(random.data(), bytes, 0) != static_cast<ssize_t>(bytes))
    raise(ErrorCode::Io, "getrandom: {}", errno_text(errno));
  std::string text;
  for (std::size_t i = 0; i < bytes; ++i) text += fmt::format("{:02x}", random[i]);
  return text;
}

bool write_all(int fd, std::string_view text) {
  while (!text.empty()) {
    const ssize_t put = ::write(fd, text.data(), text.size());
    if (put < 0 && errno == EINTR) continue;
    if (put < 0 && errno == EAGAIN) {  // another process has made the terminal non-blocking
      pollfd waiting{fd, POLLOUT, 0};
      ::poll(&waiting, 1, 1000);
      continue;
    }
    if (put <= 0) return false;
    text.remove_prefix(static_cast<std::size_t>(put));
  }
  return true;
}

}  // namespace cohort::sys
