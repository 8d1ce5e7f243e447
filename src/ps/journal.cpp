#include "ps/journal.h"

#include "base/log.h"
#include "ps/command_record.h"
#include "sys/files.h"
#include "sys/thread.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

constexpr std::string_view kMagic = "cohort ps journal 2\n";
constexpr int kWaiting = -1;  // for the disk

std::string beside(const std::string& path) { return path + ".new"; }

Error failed(const std::string& path, int why) {
  return Error(ErrorCode::Io, fmt::format("journal {}: {}", path, errno_text(why)));
}

/// Where it lies, whatever links lead there: what takes its place has to lie there, too.
std::string resolved(const std::string& path) {
  const std::unique_ptr<char, decltype(&std::free)> real(::realpath(path.c_str(), nullptr), &std::free);
  return real ? std::string(real.get()) : path;
}

bool is_at(int fd, const std::string& path) {
  struct stat here {};
  struct stat there {};
  return ::fstat(fd, &here) == 0 && ::stat(path.c_str(), &there) == 0 && here.st_ino == there.st_ino &&
         here.st_dev == there.st_dev;
}

}  // namespace

struct Journal::Next {
  File file;
  std::atomic<int> written{kWaiting};  // to the disk: 0, or why not
  bool taken = false;
  std::thread thread;

  explicit Next(File made) : file(std::move(made)) {
    thread = sys::start_without_signals([this] { written = ::fdatasync(file.fd.get()) == 0 ? 0 : errno; });
  }
  Next(const Next&) = delete;
  Next& operator=(const Next&) = delete;
  ~Next() {
    thread.join();
    if (!taken) ::unlink(file.path.c_str());
  }
};

Journal::Journal(File file, std::size_t tail) : file_(std::move(file)), tail_(tail) {}
Journal::Journal(Journal&&) noexcept = default;
Journal& Journal::operator=(Journal&&) noexcept = default;
Journal::~Journal() = default;

Result<Journal::File> Journal::lock(const std::string& path) {
  while (true) {
    File file{sys::UniqueFd(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)), path};
    if (!file.fd) return fail_system(errno, ErrorCode::Io, "journal {}: {}", path, errno_text(errno));
    if (::flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0) {
      return fail_system(
          errno, ErrorCode::Unavailable,
          "journal {}: another process has it ({}) -- several servers need a file each: name a folder that exists",
          path, errno_text(errno));
    }
    // Another one may have taken its place meanwhile.
    if (is_at(file.fd.get(), path)) {
      file.path = resolved(path);
      return file;
    }
  }
}

Result<Journal> Journal::open(const std::string& path, State& state, std::size_t tail) {
  auto locked = lock(path);
  if (!locked) return tl::unexpected(locked.error());
  File file = *std::move(locked);
  ::unlink(beside(file.path).c_str());  // its writer died before it was whole
  auto bytes = sys::read_file(file.path);
  if (!bytes) return tl::unexpected(bytes.error());
  std::string_view rest = bytes->text();
  const std::string_view magic = rest.substr(0, kMagic.size());
  if (magic != kMagic.substr(0, magic.size())) return fail(ErrorCode::Corrupt, "{} is no journal", path);
  if (magic.size() < kMagic.size()) {
    if (::ftruncate(file.fd.get(), 0) != 0 ||
        ::pwrite(file.fd.get(), kMagic.data(), kMagic.size(), 0) != static_cast<ssize_t>(kMagic.size()))
      return tl::unexpected(failed(path, errno));
    file.size = kMagic.size();
    return Journal(std::move(file), tail);
  }
  rest.remove_prefix(kMagic.size());
  while (const auto command = next_record(rest)) {
    if (const auto done = state.replay(*command); !done)
      return fail(ErrorCode::Corrupt, "journal {}: {}", path, done.error().what());
    if (command->method == Method::Piece) file.image = bytes->size() - rest.size();
  }
  // The disk had all of it before it was a journal. Nothing is cut off: whoever looks may save some.
  if (state.loading())
    return fail(ErrorCode::Corrupt, "journal {}: the image of the rows in it is damaged at byte {} of {}", path,
                bytes->size() - rest.size(), bytes->size());
  file.size = bytes->size() - rest.size();
  if (::ftruncate(file.fd.get(), static_cast<off_t>(file.size)) != 0) return tl::unexpected(failed(path, errno));
  return Journal(std::move(file), tail);
}

Result<void> Journal::File::append(const Command& command) {
  std::string head = record_head(command);
  const iovec parts[] = {{head.data(), head.size()}, {const_cast<char*>(command.body.data()), command.body.size()}};
  const auto whole = static_cast<ssize_t>(head.size() + command.body.size());
  ssize_t written = 0;
  do {
    written = ::pwritev(fd.get(), parts, 2, static_cast<off_t>(size));
  } while (written < 0 && errno == EINTR);
  if (written != whole) {  // what there is of it is no record, and the next one is written over it
    const int why = written < 0 ? errno : ENOSPC;
    return fail_system(why, ErrorCode::Io, "journal {}: {}", path, errno_text(why));
  }
  size += static_cast<std::uint64_t>(whole);
  return {};
}

Result<void> Journal::append(const Command& command) {
  if (next_ && next_->written != kWaiting) take_over();
  if (auto done = file_.append(command); !done) return done;
  if (!next_) return {};
  if (const auto done = next_->file.append(command); !done) give_up(done.error());
  return {};
}

void Journal::compact_if_long(const State& state) {
  if (next_ || file_.size - file_.image <= std::max<std::uint64_t>(tail_, file_.image)) return;
  auto written = write_image(file_.path, state);
  if (!written) return give_up(written.error());
  log::info("ps", "journal {}: its {} bytes become {}", file_.path, file_.size, written->size);
  next_ = std::make_unique<Next>(*std::move(written));
}

Result<Journal::File> Journal::write_image(const std::string& path, const State& state) {
  File file{sys::UniqueFd(::open(beside(path).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600)),
            beside(path)};
  if (!file.fd || ::flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0 ||
      ::pwrite(file.fd.get(), kMagic.data(), kMagic.size(), 0) != static_cast<ssize_t>(kMagic.size()))
    return tl::unexpected(failed(file.path, errno));
  file.size = kMagic.size();
  Result<void> done;
  state.image([&](const std::string& piece) {
    if (done) done = file.append({.method = Method::Piece, .body = piece});
  });
  if (!done) return tl::unexpected(done.error());
  file.image = file.size;
  return file;
}

/// Both have the same commands.
void Journal::take_over() {
  if (next_->written != 0) return give_up(failed(next_->file.path, next_->written));
  if (::rename(next_->file.path.c_str(), file_.path.c_str()) != 0) return give_up(failed(next_->file.path, errno));
  next_->taken = true;
  const std::string path = file_.path;
  file_ = std::move(next_->file);
  file_.path = path;
  next_.reset();
}

void Journal::give_up(const Error& error) {
  log::warn("ps", "{}; {} stays as long as it is for now", error.what(), file_.path);
  next_.reset();
  ::unlink(beside(file_.path).c_str());
  file_.image = file_.size;  // tried again when it is twice as long
}

}  // namespace cohort::ps
