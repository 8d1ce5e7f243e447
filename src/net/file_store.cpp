// A store in a file, and its locks. Locks are on bytes far behind the log. They belong to the open file description, so
// the kernel drops them with the owner's last descriptor, even if the owner was killed. Any thread; a lock belongs to
// the open file, not to the thread.
#include "base/log.h"
#include "base/result.h"
#include "base/unique_fd.h"
#include "net/address.h"
#include "net/file_log.h"
#include "net/secret.h"
#include "net/store.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

namespace cohort::store {
namespace {

/// Position of the byte locked to read or write the log. Each member holds a lock on another byte while it lives.
constexpr off_t kLogLock = off_t{1} << 40;
constexpr off_t kSlotLocks = kLogLock + 1;

/// Pauses between polls of the file, from the first to the longest.
constexpr std::chrono::milliseconds kShortestPause{1};
constexpr std::chrono::milliseconds kLongestPause{20};

/// The lock of the log, held to read and write it once.
class LogLock {
 public:
  /// Fails with Timeout if another process holds the lock until the deadline.
  static Result<LogLock> take(int fd, net::Deadline deadline);
  LogLock(LogLock&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  LogLock& operator=(LogLock&&) = delete;
  ~LogLock();

 private:
  explicit LogLock(int fd) : fd_(fd) {}
  int fd_;
};

struct flock lock_request(short type, off_t byte) {
  struct flock request {};
  request.l_type = type;
  request.l_whence = SEEK_SET;
  request.l_start = byte;
  request.l_len = 1;
  return request;
}

/// Returns true if the lock was taken, false if another open file holds it. Fails with Io if the file system has no
/// locks.
Result<bool> try_lock(int fd, off_t byte) {
  struct flock request = lock_request(F_WRLCK, byte);
  if (::fcntl(fd, F_OFD_SETLK, &request) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  return fail(ErrorCode::Io, "locking: {} -- choose a file on a local file system, or one with locks",
              errno_text(errno));
}

/// Returns whether another open file holds the lock. On some file systems (see README.md), only locks of this host are
/// known.
bool held_by_another(int fd, off_t byte) {
  struct flock request = lock_request(F_WRLCK, byte);
  return ::fcntl(fd, F_OFD_GETLK, &request) == 0 && request.l_type != F_UNLCK;
}

Result<LogLock> LogLock::take(int fd, net::Deadline deadline) {
  std::chrono::milliseconds pause = kShortestPause;
  while (true) {
    const auto taken = try_lock(fd, kLogLock);
    if (!taken) return tl::unexpected(taken.error());
    if (*taken) return LogLock(fd);
    if (net::passed(deadline))
      return fail(ErrorCode::Timeout, "another process holds its lock -- is one of the ranks stopped?");
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
}

LogLock::~LogLock() {
  if (fd_ < 0) return;
  struct flock request = lock_request(F_UNLCK, kLogLock);
  (void)::fcntl(fd_, F_OFD_SETLK, &request);
}

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kCallTimeout{60};
constexpr milliseconds kLifeCheck{100};

std::string boot_id() {
  std::string text;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> text;
  return text;
}

std::string host_name() {
  std::array<char, 256> name{};
  (void)::gethostname(name.data(), name.size() - 1);
  return name.data();
}

bool write_all(int fd, std::string_view bytes, off_t at) {
  while (!bytes.empty()) {
    const ssize_t n = ::pwrite(fd, bytes.data(), bytes.size(), at);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n;
    bytes.remove_prefix(static_cast<std::size_t>(n));
  }
  return true;
}

std::string describe(const FileHeader& header) {
  std::array<char, 32> when{};
  const std::time_t created = header.created;
  std::tm parts{};
  if (::gmtime_r(&created, &parts) != nullptr) std::strftime(when.data(), when.size(), "%Y-%m-%d %H:%M:%S UTC", &parts);
  return fmt::format("pid {} on host {} (boot {}) for a world of {} at {}", header.pid, header.host,
                     header.boot_id.substr(0, 8), header.size, when.data());
}

class FileStore final : public MeetingStore {
 public:
  explicit FileStore(FileStoreOptions options) : options_(std::move(options)), process_(::getpid()) {}
  ~FileStore() override {
    if (::getpid() != process_ || !joined_) return;
    try {
      leave();
    } catch (const Error& error) {
      log::warn("store", "{}", error.what());
    }
  }

  // Tries once; returns false if the file was removed, or belongs to another meeting that is not over.
  bool open(net::Deadline deadline);

  void set(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    transact([&] { append({RecordKind::Set, slot_, std::string(key), std::string(value)}); });
  }
  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override;
  std::string name() const override { return "file store " + options_.path; }
  std::int64_t add(std::string_view key, std::int64_t amount) override {
    std::int64_t sum = 0;
    transact([&] {
      Table copy;  // only to compute the result or the error
      if (const std::string* value = table_.find(key)) value_or_throw(copy.set(key, *value));
      sum = value_or_throw(copy.add(key, amount));
      append({RecordKind::Set, slot_, std::string(key), std::to_string(sum)});
    });
    return sum;
  }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    value_or_throw(check_sizes(key, desired));
    std::optional<std::string> now;
    transact([&] {
      const std::string* const value = table_.find(key);
      const bool equal = value == nullptr ? !expected.has_value() : expected.has_value() && *expected == *value;
      if (equal) {
        append({RecordKind::Set, slot_, std::string(key), std::string(desired)});
        now = std::string(desired);
      } else if (value != nullptr) {
        now = *value;
      }
    });
    return now;
  }
  bool delete_key(std::string_view key) override {
    bool existed = false;
    transact([&] {
      existed = table_.find(key) != nullptr;
      if (existed) append({RecordKind::Delete, slot_, std::string(key), {}});
    });
    return existed;
  }
  void leave_will(std::string_view key, std::string_view value) override {
    value_or_throw(check_sizes(key, value));
    transact([&] { append({RecordKind::Will, slot_, std::string(key), std::string(value)}); });
  }
  void withdraw_will(std::string_view key) override {
    transact([&] { append({RecordKind::Withdraw, slot_, std::string(key), {}}); });
  }

 private:
  struct Member {
    std::string description;
    bool left = false;
    std::map<std::string, std::string> wills;
  };

  bool create();
  void leave();

  [[noreturn]] void fail_with(ErrorCode code, std::string_view why) const {
    raise(code, "file store {}: {}", options_.path, why);
  }

  // Runs `body` with the log's lock held and all records read.
  template <class Body>
  void transact(Body body) {
    if (::getpid() != process_) {
      fail_with(ErrorCode::InvalidArgument,
                fmt::format("opened by process {}, and this is process {}, forked from it -- open it again after fork",
                            process_, ::getpid()));
    }
    const std::lock_guard guard(mutex_);
    const auto lock = LogLock::take(file_.get(), net::deadline_in(kCallTimeout));
    if (!lock) fail_with(lock.error().code(), lock.error().what());
    catch_up();
    cut_torn();
    body();
  }

  // The functions below need the log's lock.

  void catch_up();
  void cut_torn();
  void apply(const FileRecord& record);
  void append(const FileRecord& record) {
    const std::string bytes = encode(record);
    if (!write_all(file_.get(), bytes, end_)) {
      const int error_number = errno;
      (void)!::ftruncate(file_.get(), end_);
      fail_with(ErrorCode::Io, fmt::format("writing: {}", errno_text(error_number)));
    }
    end_ += static_cast<off_t>(bytes.size());
    apply(record);
  }
  // Executes the wills of members that have died: those whose lock is gone.
  void bury_the_dead() {
    for (std::uint32_t slot = 0; slot < members_.size(); ++slot) {
      if (slot == slot_ || members_[slot].left || held_by_another(file_.get(), kSlotLocks + slot)) continue;
      const auto wills = members_[slot].wills;
      for (const auto& [key, value] : wills) {
        if (table_.find(key) == nullptr) append({RecordKind::Set, slot_, key, value});
      }
      append({RecordKind::Left, slot, {}, {}});
    }
  }
  bool somebody_else_is_there() const {
    for (std::uint32_t slot = 0; slot < members_.size(); ++slot) {
      if (slot != slot_ && !members_[slot].left && held_by_another(file_.get(), kSlotLocks + slot)) return true;
    }
    return false;
  }

  const FileStoreOptions options_;
  const pid_t process_;
  std::mutex mutex_;
  sys::UniqueFd file_;
  FileHeader header_;
  off_t end_ = 0;      // end of the records read so far
  bool torn_ = false;  // an incomplete record follows `end_`
  Table table_;
  std::vector<Member> members_;
  std::uint32_t slot_ = UINT32_MAX;
  bool joined_ = false;
  /// Kept between calls, since a caller may call repeatedly instead of waiting.
  std::atomic<std::chrono::steady_clock::time_point> next_life_check_{};
};

void FileStore::catch_up() {
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) fail_with(ErrorCode::Io, errno_text(errno));
  if (status.st_size < end_) fail_with(ErrorCode::Corrupt, "it has been cut by somebody else");
  std::string bytes(static_cast<std::size_t>(status.st_size - end_), '\0');
  std::size_t have = 0;
  while (have < bytes.size()) {
    const ssize_t n = ::pread(file_.get(), bytes.data() + have, bytes.size() - have, end_ + static_cast<off_t>(have));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) fail_with(ErrorCode::Io, fmt::format("reading: {}", n < 0 ? errno_text(errno) : "short read"));
    have += static_cast<std::size_t>(n);
  }
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const auto record = decode_record(rest);
    if (!record) fail_with(ErrorCode::Corrupt, fmt::format("at byte {}: {}", end_, record.error().what()));
    torn_ = !*record;
    if (torn_) return;
    apply((*record)->value);
    end_ += static_cast<off_t>((*record)->bytes);
    rest.remove_prefix((*record)->bytes);
  }
}

// Removes an incomplete record. Its writer held the lock that this process holds now, so the writer died while writing.
// Only members call this, since other processes cannot rely on that if locks work only within a host.
void FileStore::cut_torn() {
  if (!std::exchange(torn_, false)) return;
  log::info("store", "file store {}: a record torn at byte {} is removed", options_.path, end_);
  if (::ftruncate(file_.get(), end_) != 0) fail_with(ErrorCode::Io, fmt::format("truncating: {}", errno_text(errno)));
}

void FileStore::apply(const FileRecord& record) {
  const bool of_member =
      record.kind == RecordKind::Will || record.kind == RecordKind::Withdraw || record.kind == RecordKind::Left;
  if (of_member && record.slot >= members_.size())
    fail_with(ErrorCode::Corrupt, "a record names a member that never came");
  switch (record.kind) {
    case RecordKind::Set: value_or_throw(table_.set(record.key, record.value)); break;
    case RecordKind::Delete: (void)table_.erase(record.key); break;
    case RecordKind::Member:
      if (record.slot != members_.size()) fail_with(ErrorCode::Corrupt, "a member's number is out of order");
      members_.push_back({record.value, false, {}});
      break;
    case RecordKind::Will: members_[record.slot].wills[record.key] = record.value; break;
    case RecordKind::Withdraw: members_[record.slot].wills.erase(record.key); break;
    case RecordKind::Left:
      members_[record.slot].left = true;
      members_[record.slot].wills.clear();
      break;
  }
}

// Makes the file, with its header and this process's member record; it is complete before others can see it. Returns
// false if another process was first.
bool FileStore::create() {
  const std::size_t slash = options_.path.rfind('/');
  const std::string folder = slash == 0 ? "/" : options_.path.substr(0, slash);
  std::string temporary;
  sys::UniqueFd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  const net::Secret random = value_or_throw(net::Secret::generate());
  if (!file && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {  // no O_TMPFILE: NFS and others
    temporary = fmt::format("{}.{}.{:02x}{:02x}{:02x}{:02x}", options_.path, ::getpid(), random.bytes()[16],
                            random.bytes()[17], random.bytes()[18], random.bytes()[19]);
    file.reset(::open(temporary.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  }
  if (!file) fail_with(ErrorCode::Io, fmt::format("cannot be made: {}", errno_text(errno)));
  FileHeader header;
  header.nonce.assign(reinterpret_cast<const char*>(random.bytes().data()), 16);
  header.boot_id = boot_id();
  header.host = host_name();
  header.pid = process_;
  header.created = std::time(nullptr);
  header.size = options_.size;
  header.meeting = options_.meeting;
  const auto locked = try_lock(file.get(), kSlotLocks);
  const bool written = locked && *locked && write_all(file.get(), encode(header), 0);
  const int write_error = errno;
  int linked = -1;
  if (written) {
    const std::string source = temporary.empty() ? fmt::format("/proc/self/fd/{}", file.get()) : temporary;
    linked =
        ::linkat(AT_FDCWD, source.c_str(), AT_FDCWD, options_.path.c_str(), temporary.empty() ? AT_SYMLINK_FOLLOW : 0);
  }
  const int link_error = errno;
  if (!temporary.empty()) ::unlink(temporary.c_str());
  if (!locked) fail_with(locked.error().code(), locked.error().what());
  if (!written) fail_with(ErrorCode::Io, fmt::format("cannot be written: {}", errno_text(write_error)));
  if (linked != 0) {
    if (link_error == EEXIST) return false;
    fail_with(ErrorCode::Io, fmt::format("cannot be made: {}", errno_text(link_error)));
  }
  struct stat status {};
  if (!temporary.empty() && ::fstat(file.get(), &status) == 0 && status.st_nlink == 0) {
    ::unlink(options_.path.c_str());
    fail_with(
        ErrorCode::Io,
        "cannot be made: this file system takes two names of one file for two files -- choose another one, or host "
        "and port");
  }
  file_ = std::move(file);
  return true;
}

bool FileStore::open(net::Deadline deadline) {
  table_ = {};
  members_.clear();
  end_ = 0;
  torn_ = false;
  slot_ = UINT32_MAX;
  file_.reset(::open(options_.path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
  bool made_by_us = false;
  if (!file_) {
    if (errno != ENOENT) fail_with(ErrorCode::Io, errno_text(errno));
    if (!create()) return false;
    made_by_us = true;
  }
  struct stat status {};
  if (::fstat(file_.get(), &status) != 0) fail_with(ErrorCode::Io, errno_text(errno));
  if (!S_ISREG(status.st_mode)) fail_with(ErrorCode::InvalidArgument, "it is not a regular file");
  if (status.st_uid != ::geteuid()) {
    fail_with(ErrorCode::InvalidArgument,
              fmt::format("it belongs to uid {}, and this process runs as uid {} -- choose a file of your own",
                          status.st_uid, ::geteuid()));
  }
  if ((status.st_mode & 077) != 0) {
    fail_with(ErrorCode::InvalidArgument,
              fmt::format("it has mode {:04o}, so others may read or write it -- remove it: ranks make it themselves",
                          status.st_mode & 07777));
  }
  const auto lock = LogLock::take(file_.get(), deadline);
  if (!lock) fail_with(lock.error().code(), lock.error().what());
  if (::fstat(file_.get(), &status) != 0) fail_with(ErrorCode::Io, errno_text(errno));
  if (status.st_nlink == 0) return false;  // the last member has just removed the file
  std::array<char, 8192> front{};
  const ssize_t n = ::pread(file_.get(), front.data(), front.size(), 0);
  if (n < 0) fail_with(ErrorCode::Io, errno_text(errno));
  const auto header = decode_header(std::string_view(front.data(), static_cast<std::size_t>(n)));
  if (!header || !*header) {
    fail_with(ErrorCode::Corrupt, fmt::format("{} -- give a path where no file is",
                                              header ? "it ends within its header" : header.error().what()));
  }
  header_ = (*header)->value;
  end_ = static_cast<off_t>((*header)->bytes);
  catch_up();
  if (!made_by_us) {
    const bool creator_is_coming = members_.empty() && held_by_another(file_.get(), kSlotLocks);
    if (!creator_is_coming && !somebody_else_is_there()) {
      const bool here = header_.boot_id == boot_id() && header_.host == host_name();
      const std::string_view or_else =
          here ? ""
               : "; if that job runs, this file system keeps locks to each host: take another one, or host and port";
      fail_with(
          ErrorCode::Unavailable,
          fmt::format("it was left by an earlier job: made by {}, none of whose ranks is alive; this is pid {} "
                      "on host {} (boot {}) -- remove it: rm '{}'{}",
                      describe(header_), ::getpid(), host_name(), boot_id().substr(0, 8), options_.path, or_else));
    }
    if (header_.meeting != options_.meeting) return false;
    if (header_.size != options_.size) {
      fail_with(
          ErrorCode::Mismatch,
          fmt::format(
              "it was made by {}, and this process (rank {}) was told {} ranks -- give all the same, or another path",
              describe(header_), options_.rank, options_.size));
    }
    // The first entry is the file's creator, which may not have its lock yet.
    if (creator_is_coming) return false;
    if (members_.size() >= static_cast<std::size_t>(header_.size)) {
      std::string members;
      for (const Member& member : members_)
        members += fmt::format("{}{}", members.empty() ? "" : ", ", member.description);
      fail_with(ErrorCode::Unavailable,
                fmt::format("its world of {} is complete ({}), and this process (rank {}, pid {}) is one more -- give "
                            "each process a rank of its own, or another path",
                            header_.size, members.substr(0, 1000), options_.rank, ::getpid()));
    }
  }
  cut_torn();
  slot_ = static_cast<std::uint32_t>(members_.size());
  const auto alive = try_lock(file_.get(), kSlotLocks + slot_);
  if (!alive || !*alive) fail_with(ErrorCode::Internal, "a free member's lock is held");
  append({RecordKind::Member, slot_, {}, fmt::format("rank {} (pid {})", options_.rank, ::getpid())});
  joined_ = true;
  return true;
}

FileStore::Gathered FileStore::get_all(std::span<const std::string> keys, std::span<const std::string> unless,
                                       Deadline deadline) {
  for (const auto& list : {keys, unless}) {
    for (const std::string& key : list) value_or_throw(check_sizes(key, {}));
  }
  milliseconds pause = kShortestPause;
  off_t seen = -1;
  while (true) {
    struct stat status {};
    if (::fstat(file_.get(), &status) != 0) fail_with(ErrorCode::Io, errno_text(errno));
    const bool late = net::passed(deadline);
    const bool look_for_the_dead = std::chrono::steady_clock::now() >= next_life_check_.load();
    // Take the lock only if there is a reason.
    if (status.st_size != seen || look_for_the_dead || late) {
      std::optional<Gathered> found;
      transact([&] {
        if (look_for_the_dead) {
          bury_the_dead();
          next_life_check_ = std::chrono::steady_clock::now() + kLifeCheck;
        }
        if (late || table_.settles(keys, unless)) found = table_.gather(keys, unless);
        seen = end_;
      });
      if (found) return *std::move(found);
      pause = kShortestPause;
    }
    const auto left = std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
    std::this_thread::sleep_for(std::clamp(left, kShortestPause, pause));
    pause = std::min(pause * 2, kLongestPause);
  }
}

void FileStore::leave() {
  transact([&] {
    append({RecordKind::Left, slot_, {}, {}});
    if (somebody_else_is_there()) return;
    // Remove the file, unless another file has replaced it.
    struct stat ours {};
    struct stat there {};
    if (::fstat(file_.get(), &ours) == 0 && ::lstat(options_.path.c_str(), &there) == 0 &&
        ours.st_ino == there.st_ino && ours.st_dev == there.st_dev) {
      ::unlink(options_.path.c_str());
    }
  });
}

}  // namespace

std::shared_ptr<MeetingStore> open_file_store(const FileStoreOptions& options, net::Deadline deadline) {
  if (options.path.empty() || options.path.front() != '/') {
    raise(ErrorCode::InvalidArgument, "file store '{}': the path has to be absolute", options.path);
  }
  milliseconds pause = kShortestPause;
  auto store = std::make_shared<FileStore>(options);
  while (!store->open(deadline)) {
    if (net::passed(deadline)) {
      raise(ErrorCode::Timeout,
            "file store {}: another meeting still goes on in it -- wait for its end, or give another path",
            options.path);
    }
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, kLongestPause);
  }
  return store;
}

}  // namespace cohort::store
