#include "ps/journal.h"

#include "base/files.h"
#include "base/log.h"
#include "base/thread.h"
#include "net/file_log.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <thread>
#include <utility>

namespace cohort::ps {
namespace {

struct Head {
  std::uint64_t incarnation;
  std::uint32_t now;
  std::uint32_t worker;
  std::uint32_t method;
};
constexpr std::size_t kHead = kRecordHead - store::kFrame;
static_assert(offsetof(Head, method) + sizeof(Head::method) == kHead);

constexpr std::size_t kLongest = kLongestMessage + (std::size_t{64} << 10);

}  // namespace

std::string record_head(const Command& command) {
  const Head head{command.incarnation, command.now, command.worker, static_cast<std::uint32_t>(command.method)};
  const std::string_view bytes(reinterpret_cast<const char*>(&head), kHead);
  return store::frame_of(bytes, command.body).append(bytes);
}

std::optional<Command> next_record(std::string_view& bytes, std::optional<Error>* damaged) {
  const auto framed = store::unframe(bytes, kLongest);
  if (!framed) {
    if (damaged != nullptr) *damaged = framed.error();
    return std::nullopt;
  }
  if (!*framed) return std::nullopt;
  const std::string_view body = **framed;
  if (body.size() < kHead) {
    if (damaged != nullptr) *damaged = Error(ErrorCode::Corrupt, fmt::format("a record of {} bytes", body.size()));
    return std::nullopt;
  }
  Head head;
  std::memcpy(&head, body.data(), kHead);
  bytes.remove_prefix(store::kFrame + body.size());
  return Command{head.now, static_cast<Method>(head.method), head.worker, head.incarnation, body.substr(kHead)};
}

namespace {

constexpr std::string_view kJournalMagic = "cohort ps journal 4\n";
constexpr std::size_t kVersion = kJournalMagic.size() - 2;  // position of the version digit
constexpr std::size_t kCopied = std::size_t{1} << 20;       // bytes copied in one step

std::string beside(const std::string& path) { return path + ".new"; }

Error failed(const std::string& path, int why) {
  return Error(ErrorCode::Io, fmt::format("journal {}: {}", path, errno_text(why)));
}

/// Returns the file's real path behind any links: its replacement has to be written beside that.
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
  enum class Step : std::uint8_t {
    Image,  // the thread writes the image, and most commands since then
    Disk,   // the file has all commands; the thread waits for the disk
  };
  File file;
  Step step = Step::Image;
  std::uint64_t copied;              // bytes of the old file that are copied, or replaced by the image
  std::atomic<std::uint64_t> there;  // size of the old file
  std::atomic<bool> done{false};     // the thread has finished its work
  std::optional<Error> failed;
  bool taken = false;
  std::thread thread;

  Next(File made, std::shared_ptr<const FrozenState> state, int old, std::uint64_t size)
      : file(std::move(made)), copied(size), there(size) {
    start([this, old, state = std::move(state)]() mutable -> Result<void> {
      {
        Image image(std::exchange(state, nullptr));
        while (const auto piece = image.next()) {
          if (auto written = file.append(record_head({.method = Method::Piece, .body = *piece}), *piece); !written)
            return written;
        }
      }
      file.image = file.size;
      // After this loop the rest is small, or grows faster than it is copied.
      for (int turn = 0; turn < 8 && there - copied > kCopied; ++turn) {
        const std::uint64_t to = there;
        if (auto written = file.append_from(old, copied, to); !written) return written;
        copied = to;
      }
      return {};
    });
  }
  Next(const Next&) = delete;
  Next& operator=(const Next&) = delete;
  ~Next() {
    thread.join();
    if (!taken) ::unlink(file.path.c_str());
  }
  void wait_for_disk() {
    step = Step::Disk;
    thread.join();
    done = false;
    start([this]() -> Result<void> {
      if (::fdatasync(file.fd.get()) != 0) return tl::unexpected(::cohort::ps::failed(file.path, errno));
      return {};
    });
  }

 private:
  template <class Body>
  void start(Body body) {
    thread = sys::start_without_signals([this, body = std::make_shared<Body>(std::move(body))] {
      try {
        if (const auto result = (*body)(); !result) failed = result.error();
      } catch (const std::exception& error) {  // out of memory
        failed = Error(ErrorCode::Io, fmt::format("journal {}: {}", file.path, error.what()));
      }
      done = true;
    });
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
          "journal {}: another process has it ({}) -- each server needs a file of its own, and each job a folder", path,
          errno_text(errno));
    }
    // Another file may have been renamed to this path meanwhile.
    if (is_at(file.fd.get(), path)) {
      file.path = resolved(path);
      return file;
    }
  }
}

Result<void> Journal::remove(const std::string& path) {
  const auto file = lock(path);
  if (!file) return tl::unexpected(file.error());
  if (::unlink(file->path.c_str()) != 0) return tl::unexpected(failed(path, errno));
  return {};
}

/// An earlier job's workers and servers had other clocks and places.
Result<void> Journal::set_aside(const std::string& path) {
  const auto file = lock(path);
  if (!file) return tl::unexpected(file.error());
  if (struct stat status{};
      ::fstat(file->fd.get(), &status) == 0 && status.st_size <= static_cast<off_t>(kJournalMagic.size()))
    return {};
  for (int number = 1;; ++number) {
    const std::string aside = number == 1 ? file->path + ".earlier" : fmt::format("{}.earlier-{}", file->path, number);
    // glibc has renameat2 only from 2.28 on.
    if (::syscall(SYS_renameat2, AT_FDCWD, file->path.c_str(), AT_FDCWD, aside.c_str(), RENAME_NOREPLACE) != 0) {
      if (errno == EEXIST) continue;
      return fail_system(errno, ErrorCode::Io, "journal {} is of an earlier job, and cannot be renamed to {}: {}", path,
                         aside, errno_text(errno));
    }
    log::warn("ps", "journal {} is of an earlier job: it is {} now, and the tables begin anew", path, aside);
    return {};
  }
}

/// Cuts off the record that was being written when the writer died, and keeps it in a file for inspection.
Result<void> Journal::cut(File& file, std::string_view torn) {
  std::string kept;
  sys::UniqueFd to;
  for (int number = 1; !to; ++number) {
    kept = fmt::format("{}.cut-{}", file.path, number);
    to = sys::UniqueFd(::open(kept.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    if (!to && errno != EEXIST) return tl::unexpected(failed(kept, errno));
  }
  File copy{std::move(to), kept};
  if (auto written = copy.append(torn, {}); !written) return written;
  if (::ftruncate(file.fd.get(), static_cast<off_t>(file.size)) != 0) return tl::unexpected(failed(file.path, errno));
  log::warn("ps",
            "journal {}: its last {} bytes, from byte {} on, are the beginning of a change that was being written when "
            "its server died, and that nobody was told of; they are cut off, and kept in {}",
            file.path, torn.size(), file.size, kept);
  return {};
}

Result<Journal> Journal::open(const std::string& path, State& state, std::size_t tail) {
  auto locked = lock(path);
  if (!locked) return tl::unexpected(locked.error());
  File& file = *locked;
  ::unlink(beside(file.path).c_str());  // left by a writer that died before the file was complete
  auto bytes = sys::read_file(file.path);
  if (!bytes) return tl::unexpected(bytes.error());
  std::string_view rest = bytes->text();
  const std::string_view magic = rest.substr(0, kJournalMagic.size());
  if (magic.size() == kJournalMagic.size() && magic != kJournalMagic &&
      magic.substr(0, kVersion) == kJournalMagic.substr(0, kVersion)) {
    return fail(
        ErrorCode::Corrupt,
        "journal {} was written by another version of Cohort -- start its servers by that one, save a snapshot, "
        "and restore that by this one with another journal",
        path);
  }
  if (magic != kJournalMagic.substr(0, magic.size())) return fail(ErrorCode::Corrupt, "{} is no journal", path);
  if (magic.size() < kJournalMagic.size()) {
    if (::ftruncate(file.fd.get(), 0) != 0 || ::pwrite(file.fd.get(), kJournalMagic.data(), kJournalMagic.size(), 0) !=
                                                  static_cast<ssize_t>(kJournalMagic.size()))
      return tl::unexpected(failed(path, errno));
    file.size = kJournalMagic.size();
    return Journal(std::move(file), tail);
  }
  rest.remove_prefix(kJournalMagic.size());
  // The file is left as it is: a person may recover part of it.
  const auto damaged = [&](const char* why) {
    return fail(
        ErrorCode::Corrupt,
        "journal {} is damaged at byte {} of {}: {}. It is left as it is. Put a copy of the file in its place, or "
        "move it away and restore a snapshot; `truncate -s {}` gives up all changes from there on",
        path, file.size, bytes->size(), why, file.size);
  };
  while (true) {
    file.size = bytes->size() - rest.size();
    std::optional<Error> why;
    const auto command = next_record(rest, &why);
    if (why) return damaged(why->what());
    if (!command) break;
    if (const auto done = state.replay(*command); !done) return damaged(done.error().what());
    if (command->method == Method::Piece) file.image = bytes->size() - rest.size();
  }
  // A process that has no more than a part of an image has never been a backup, so this means damage.
  if (state.loading()) return damaged("the image of the rows ends there");
  if (!rest.empty()) {
    if (auto done = cut(file, rest); !done) return tl::unexpected(done.error());
  }
  return Journal(std::move(file), tail);
}

Result<void> Journal::File::append(std::string_view first, std::string_view second) {
  const iovec parts[] = {{const_cast<char*>(first.data()), first.size()},
                         {const_cast<char*>(second.data()), second.size()}};
  const auto whole = static_cast<ssize_t>(first.size() + second.size());
  ssize_t written = 0;
  do {
    written = ::pwritev(fd.get(), parts, 2, static_cast<off_t>(size));
  } while (written < 0 && errno == EINTR);
  if (written != whole) {
    const int why = written < 0 ? errno : ENOSPC;
    // A partial record must not precede the next one.
    if (written > 0) (void)!::ftruncate(fd.get(), static_cast<off_t>(size));
    return fail_system(why, ErrorCode::Io, "journal {}: {}", path, errno_text(why));
  }
  size += static_cast<std::uint64_t>(whole);
  return {};
}

Result<void> Journal::File::append_from(int other, std::uint64_t from, std::uint64_t to) {
  std::string bytes;
  while (from < to) {
    bytes.resize(static_cast<std::size_t>(std::min<std::uint64_t>(kCopied, to - from)));
    const ssize_t read = ::pread(other, bytes.data(), bytes.size(), static_cast<off_t>(from));
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) return tl::unexpected(failed(path, read < 0 ? errno : EIO));
    bytes.resize(static_cast<std::size_t>(read));
    if (auto written = append(bytes, {}); !written) return written;
    from += static_cast<std::uint64_t>(read);
  }
  return {};
}

Result<void> Journal::append(Method method, std::string_view head, std::string_view body) {
  if (next_ && next_->done) go_on_with_next();
  if (auto done = file_.append(head, body); !done) return done;
  if (method == Method::Piece) file_.image = file_.size;
  if (!next_) return {};
  next_->there = file_.size;
  if (next_->step == Next::Step::Image) return {};
  if (const auto done = next_->file.append(head, body); !done) give_up(done.error());
  return {};
}

void Journal::compact_if_long(State& state) {
  if (next_ || file_.size - file_.image <= std::max<std::uint64_t>(tail_, file_.image)) return;
  auto begun = begin_next(file_.path);
  if (!begun) return give_up(begun.error());
  next_ = std::make_unique<Next>(*std::move(begun), state.freeze(), file_.fd.get(), file_.size);
}

Result<Journal::File> Journal::begin_next(const std::string& path) {
  File file{sys::UniqueFd(::open(beside(path).c_str(), O_RDWR | O_CREAT | O_TRUNC | O_NOFOLLOW | O_CLOEXEC, 0600)),
            beside(path)};
  if (!file.fd || ::flock(file.fd.get(), LOCK_EX | LOCK_NB) != 0 ||
      ::pwrite(file.fd.get(), kJournalMagic.data(), kJournalMagic.size(), 0) !=
          static_cast<ssize_t>(kJournalMagic.size()))
    return tl::unexpected(failed(file.path, errno));
  file.size = kJournalMagic.size();
  return file;
}

/// Continues with the next file after its thread has finished a step.
void Journal::go_on_with_next() {
  Next& next = *next_;
  if (next.failed) return give_up(*next.failed);
  if (next.step == Next::Step::Image) {
    if (const auto done = next.file.append_from(file_.fd.get(), next.copied, file_.size); !done)
      return give_up(done.error());
    next.wait_for_disk();
    return;
  }
  // Both files have the same commands now.
  if (::rename(next.file.path.c_str(), file_.path.c_str()) != 0) return give_up(failed(next.file.path, errno));
  log::info("ps", "journal {}: its {} bytes are {} now", file_.path, file_.size, next.file.size);
  next.taken = true;
  const std::string path = file_.path;
  file_ = std::move(next.file);
  file_.path = path;
  next_.reset();
}

void Journal::give_up(const Error& error) {
  log::warn("ps", "{}; {} stays as long as it is for now", error.what(), file_.path);
  next_.reset();
  ::unlink(beside(file_.path).c_str());
  file_.image = file_.size;  // tried again when the file is twice as long
}

}  // namespace cohort::ps
