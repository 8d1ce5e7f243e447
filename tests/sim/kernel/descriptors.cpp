// Descriptors: the table of each process, pipes, events, timers, signals, processes, epoll and poll.
#include "kernel/kernel.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstring>

namespace sim {

struct File::Watch {
  std::weak_ptr<File> file;
  File* epoll = nullptr;  ///< owner; the watch dies with it
  epoll_event wanted{};
  bool queued = false;
};

namespace {

class Epoll : public File {
 public:
  ~Epoll() override {
    for (const auto& [fd, watch] : watched_) watch->epoll = nullptr;
  }
  short ready() override { return ready_.empty() ? 0 : POLLIN; }

  int control(int operation, int fd, const FilePtr& file, const epoll_event* event) {
    const auto found = watched_.find(fd);
    const bool there = found != watched_.end() && found->second->file.lock() == file;
    if (operation == EPOLL_CTL_DEL) {
      if (!there) return failed(ENOENT);
      found->second->epoll = nullptr;
      std::erase(ready_, found->second);
      watched_.erase(found);
      return 0;
    }
    if (file->real() >= 0) return failed(EPERM);  // a regular file
    if (operation == EPOLL_CTL_ADD ? there : !there) return failed(there ? EEXIST : ENOENT);
    if (operation == EPOLL_CTL_ADD) {
      if (found != watched_.end()) {
        std::erase(ready_, found->second);
        watched_.erase(found);
      }
      auto watch = std::make_shared<Watch>();
      watch->file = file;
      watch->epoll = this;
      watched_[fd] = watch;
      std::erase_if(file->watches, [](const auto& one) { return one.expired(); });
      file->watches.push_back(watch);
    }
    Watch& watch = *watched_[fd];
    watch.wanted = *event;
    if ((file->ready() & mask(watch)) != 0) queue(watched_[fd]);
    return 0;
  }

  static int mask(const Watch& watch) {
    return static_cast<int>((watch.wanted.events & (EPOLLIN | EPOLLOUT | EPOLLPRI | EPOLLRDHUP)) | EPOLLERR | EPOLLHUP);
  }

  void queue(const std::shared_ptr<Watch>& watch) {
    if (watch->queued) return;
    watch->queued = true;
    ready_.push_back(watch);
    changed();
  }

  int collect(epoll_event* out, int most) {
    int count = 0;
    auto pending = std::exchange(ready_, {});
    while (!pending.empty()) {
      const auto watch = pending.front();
      pending.pop_front();
      watch->queued = false;
      const FilePtr file = watch->file.lock();
      if (file == nullptr || watch->epoll != this) continue;
      const int events = file->ready() & mask(*watch);
      if (events == 0) continue;
      if (count == most) {
        watch->queued = true;
        ready_.push_back(watch);
        continue;
      }
      out[count].events = static_cast<std::uint32_t>(events);
      out[count].data = watch->wanted.data;
      ++count;
      if ((watch->wanted.events & EPOLLONESHOT) != 0) watch->wanted.events = 0;
      if ((watch->wanted.events & EPOLLET) == 0) {
        watch->queued = true;
        ready_.push_back(watch);
      }
    }
    return count;
  }

 private:
  std::map<int, std::shared_ptr<Watch>> watched_;
  std::deque<std::shared_ptr<Watch>> ready_;
};

struct PipeBytes {
  static constexpr std::size_t kRoom = 65'536, kWhole = 4096;
  std::deque<char> bytes;
  File* reader = nullptr;
  File* writer = nullptr;
};

class PipeEnd : public File {
 public:
  PipeEnd(std::shared_ptr<PipeBytes> pipe, bool reads) : pipe_(std::move(pipe)), reads_(reads) {
    (reads ? pipe_->reader : pipe_->writer) = this;
  }
  ~PipeEnd() override {
    (reads_ ? pipe_->reader : pipe_->writer) = nullptr;
    if (File* const other = reads_ ? pipe_->writer : pipe_->reader) other->changed();
  }
  short ready() override {
    if (reads_)
      return static_cast<short>((pipe_->bytes.empty() ? 0 : POLLIN) | (pipe_->writer == nullptr ? POLLHUP : 0));
    if (pipe_->reader == nullptr) return POLLERR | POLLOUT;
    return pipe_->bytes.size() < PipeBytes::kRoom ? POLLOUT : 0;
  }
  ssize_t read(void* bytes, std::size_t size, int) override {
    if (!reads_) return -EBADF;
    if (pipe_->bytes.empty()) return pipe_->writer == nullptr ? 0 : -EAGAIN;
    const std::size_t count = std::min(size, pipe_->bytes.size());
    std::copy_n(pipe_->bytes.begin(), count, static_cast<char*>(bytes));
    pipe_->bytes.erase(pipe_->bytes.begin(), pipe_->bytes.begin() + static_cast<std::ptrdiff_t>(count));
    if (pipe_->writer != nullptr) pipe_->writer->changed();
    return static_cast<ssize_t>(count);
  }
  ssize_t write(const void* bytes, std::size_t size, int flags) override {
    if (reads_) return -EBADF;
    if (pipe_->reader == nullptr) return -EPIPE;
    std::size_t room = PipeBytes::kRoom - std::min(PipeBytes::kRoom, pipe_->bytes.size());
    if ((flags & 1 << 30) != 0) room = size;
    // Small writes are whole or not at all.
    if (room == 0 || (size <= PipeBytes::kWhole && room < size)) return -EAGAIN;
    const std::size_t count = std::min(size, room);
    const auto* const from = static_cast<const char*>(bytes);
    pipe_->bytes.insert(pipe_->bytes.end(), from, from + count);
    pipe_->reader->changed();
    return static_cast<ssize_t>(count);
  }

 private:
  std::shared_ptr<PipeBytes> pipe_;
  bool reads_;
};

class EventCounter : public File {
 public:
  explicit EventCounter(std::uint64_t value) : value_(value) {}
  short ready() override { return static_cast<short>(POLLOUT | (value_ != 0 ? POLLIN : 0)); }
  ssize_t read(void* bytes, std::size_t size, int) override {
    if (size < 8) return -EINVAL;
    if (value_ == 0) return -EAGAIN;
    std::memcpy(bytes, &value_, 8);
    value_ = 0;
    return 8;
  }
  ssize_t write(const void* bytes, std::size_t size, int) override {
    if (size < 8) return -EINVAL;
    std::uint64_t more = 0;
    std::memcpy(&more, bytes, 8);
    value_ += more;
    changed();
    return 8;
  }

 private:
  std::uint64_t value_;
};

class TimerFile : public File {
 public:
  short ready() override { return expirations_ != 0 ? POLLIN : 0; }
  ssize_t read(void* bytes, std::size_t size, int) override {
    if (size < 8) return -EINVAL;
    if (expirations_ == 0) return -EAGAIN;
    std::memcpy(bytes, &expirations_, 8);
    expirations_ = 0;
    return 8;
  }
  void set(Nanoseconds at, Nanoseconds interval) {
    ++generation_;
    expirations_ = 0;
    interval_ = interval;
    if (at == kNever) return;
    arm(at);
  }

 private:
  void arm(Nanoseconds at) {
    schedule(at, [weak = weak_from_this(), generation = generation_] {
      const auto file = std::static_pointer_cast<TimerFile>(weak.lock());
      if (file == nullptr || file->generation_ != generation) return;
      ++file->expirations_;
      file->changed();
      if (file->interval_ > 0) file->arm(state->now + file->interval_);
    });
  }
  std::uint64_t expirations_ = 0, generation_ = 0;
  Nanoseconds interval_ = 0;
};

class SignalFile : public File {
 public:
  SignalFile(Process& process, const sigset_t& set) : process_(process), set_(set) {
    process.signal_files.insert(this);
  }
  ~SignalFile() override { process_.signal_files.erase(this); }
  short ready() override { return signals_pending(process_, set_) ? POLLIN : 0; }
  ssize_t read(void* bytes, std::size_t size, int) override {
    if (size < sizeof(signalfd_siginfo)) return -EINVAL;
    const int number = take_signal(*here(), set_);
    if (number == 0) return -EAGAIN;
    signalfd_siginfo info{};
    info.ssi_signo = static_cast<std::uint32_t>(number);
    std::memcpy(bytes, &info, sizeof info);
    return sizeof info;
  }

 private:
  Process& process_;
  sigset_t set_;
};

class ProcessFile : public File {
 public:
  explicit ProcessFile(Process& meant) : process(meant) {}
  short ready() override { return process.ended ? POLLIN : 0; }
  Process& process;
};

class RealFile : public File {
 public:
  RealFile(int fd, std::string path, bool on_disk) : path_(std::move(path)), fd_(fd), on_disk_(on_disk) {}
  ~RealFile() override { REAL(close)(fd_); }
  short ready() override { return POLLIN | POLLOUT; }
  ssize_t read(void* bytes, std::size_t size, int) override {
    const ssize_t got = REAL(read)(fd_, bytes, size);
    return got < 0 ? -errno : got;
  }
  ssize_t write(const void* bytes, std::size_t size, int) override {
    if (const int error = on_disk_ ? change_disk() : 0) return -error;
    const ssize_t put = REAL(write)(fd_, bytes, size);
    return put < 0 ? -errno : put;
  }
  int real() const override { return fd_; }
  bool on_disk() const noexcept { return on_disk_; }

 private:
  std::string path_;
  int fd_;
  bool on_disk_;
};

/// As change_disk, for a file that may be none of a disk.
int change_disk_of(const FilePtr& file) {
  const auto* const real = dynamic_cast<RealFile*>(file.get());
  return real != nullptr && real->on_disk() ? change_disk() : 0;
}

/// A file in /proc: made anew whenever it is read from its beginning.
class GeneratedFile : public File {
 public:
  explicit GeneratedFile(std::function<std::optional<std::string>()> contents) : contents_(std::move(contents)) {}
  short ready() override { return POLLIN; }
  ssize_t read(void* bytes, std::size_t size, int) override {
    const ssize_t got = read_at(bytes, size, at_);
    if (got > 0) at_ += static_cast<std::size_t>(got);
    return got;
  }
  ssize_t read_at(void* bytes, std::size_t size, std::size_t at) {
    if (at == 0) {
      auto now = contents_();
      if (!now) return -ESRCH;
      text_ = *std::move(now);
    }
    if (at >= text_.size()) return 0;
    const std::size_t count = std::min(size, text_.size() - at);
    std::memcpy(bytes, text_.data() + at, count);
    return static_cast<ssize_t>(count);
  }

 private:
  std::function<std::optional<std::string>()> contents_;
  std::string text_;
  std::size_t at_ = 0;
};

}  // namespace

File::~File() = default;
ssize_t File::read(void*, std::size_t, int) { return -EINVAL; }
ssize_t File::write(const void*, std::size_t, int) { return -EINVAL; }

void File::changed() {
  waiters.wake_all();
  if (watches.empty()) return;
  for (const auto& weak : watches) {
    const auto watch = weak.lock();
    if (watch != nullptr && watch->epoll != nullptr) static_cast<Epoll*>(watch->epoll)->queue(watch);
  }
}

int failed(int error_number) {
  errno = error_number;
  return -1;
}

FilePtr file_of(int fd) {
  const Slot* const found = here()->descriptors.find(fd);
  return found == nullptr ? nullptr : found->file;
}

void Descriptors::set(int fd, Slot slot) {
  auto& slots = fd < kFirst ? chosen_ : others_;
  const auto at = static_cast<std::size_t>(fd < kFirst ? fd : fd - kFirst);
  if (at >= slots.size()) slots.resize(at + 1);
  const FilePtr before = std::exchange(slots[at], std::move(slot)).file;  // closed when this is complete
}

int Descriptors::add(Slot slot, int least) {
  int fd = std::max(least, 0);
  if (fd >= kFirst) fd = std::max(fd, kFirst + static_cast<int>(full_));
  while (find(fd) != nullptr) ++fd;
  if (fd >= kFirst && least <= kFirst + static_cast<int>(full_)) full_ = static_cast<std::size_t>(fd - kFirst) + 1;
  set(fd, std::move(slot));
  return fd;
}

void Descriptors::erase(int fd) {
  Slot* const found = find(fd);
  if (found == nullptr) return;
  if (fd >= kFirst) full_ = std::min(full_, static_cast<std::size_t>(fd - kFirst));
  const FilePtr before = std::exchange(*found, {}).file;
}

std::vector<int> Descriptors::numbers() {
  std::vector<int> all;
  for (int fd = 0; fd < kFirst + static_cast<int>(others_.size()); ++fd) {
    if (fd == static_cast<int>(chosen_.size())) fd = kFirst;
    if (find(fd) != nullptr) all.push_back(fd);
  }
  return all;
}

int add_descriptor(FilePtr file, bool close_on_exec, int least) {
  return here()->descriptors.add({std::move(file), close_on_exec}, least);
}

void close_all(Process& process) { const auto all = std::exchange(process.descriptors, {}); }

FilePtr real_file(int fd, std::string path, bool on_disk) {
  // Above the numbers that programs choose for descriptors of their children.
  const int high = REAL(fcntl)(fd, F_DUPFD_CLOEXEC, 5'000);
  REAL(close)(fd);
  return std::make_shared<RealFile>(high, std::move(path), on_disk);
}

FilePtr generated_file(std::function<std::optional<std::string>()> contents) {
  return std::make_shared<GeneratedFile>(std::move(contents));
}

std::pair<FilePtr, FilePtr> make_pipe() {
  auto bytes = std::make_shared<PipeBytes>();
  FilePtr reader = std::make_shared<PipeEnd>(bytes, true);
  FilePtr writer = std::make_shared<PipeEnd>(bytes, false);
  return {reader, writer};
}

FilePtr process_file(Process& process) {
  auto file = std::make_shared<ProcessFile>(process);
  process.watchers.push_back(file);
  return file;
}

ssize_t transfer(int fd, void* bytes, std::size_t size, int flags, bool reads, const char* where) {
  const FilePtr file = file_of(fd);
  charge(kCallCost);
  std::size_t done = 0;
  const Nanoseconds deadline = reads && file->receive_limit() != kNever ? state->now + file->receive_limit() : kNever;
  while (true) {
    const ssize_t moved = reads ? file->read(bytes, size, flags)
                                : file->write(static_cast<const char*>(bytes) + done, size - done, flags);
    const bool waits = !file->nonblocking && (flags & MSG_DONTWAIT) == 0;
    if (moved == -EPIPE && (flags & MSG_NOSIGNAL) == 0) {
      send_signal(*here(), SIGPIPE);
      if (here()->ended) end_thread();
    }
    if (moved < 0 && (moved != -EAGAIN || !waits || state->now >= deadline))
      return done > 0 ? static_cast<ssize_t>(done) : failed(static_cast<int>(-moved));
    if (moved >= 0) {
      done += static_cast<std::size_t>(moved);
      if (reads || !waits || done == size) return static_cast<ssize_t>(done);
      continue;  // a blocking write goes on
    }
    file->waiters.add(*self);
    if (block(where, deadline, true) == Woke::Signal && !run_handlers())
      return done > 0 ? static_cast<ssize_t>(done) : failed(EINTR);
  }
}

}  // namespace sim

using namespace sim;

CALL(ssize_t, read, int fd, void* bytes, std::size_t size) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(read)(fd, bytes, size);
  return transfer(fd, bytes, size, 0, true, "read");
}
CALL(ssize_t, write, int fd, const void* bytes, std::size_t size) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(write)(fd, bytes, size);
  return transfer(fd, const_cast<void*>(bytes), size, 0, false, "write");
}
CALL(ssize_t, writev, int fd, const iovec* parts, int count) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(writev)(fd, parts, count);
  std::string all;
  for (int i = 0; i < count; ++i) all.append(static_cast<const char*>(parts[i].iov_base), parts[i].iov_len);
  return transfer(fd, all.data(), all.size(), 0, false, "writev");
}
CALL(ssize_t, readv, int fd, const iovec* parts, int count) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(readv)(fd, parts, count);
  ssize_t total = 0;
  for (int i = 0; i < count; ++i) {
    if (parts[i].iov_len == 0) continue;
    const ssize_t got = transfer(fd, parts[i].iov_base, parts[i].iov_len, total > 0 ? MSG_DONTWAIT : 0, true, "readv");
    if (got < 0) return total > 0 ? total : -1;
    total += got;
    if (static_cast<std::size_t>(got) < parts[i].iov_len) break;
  }
  return total;
}
CALL(ssize_t, pread, int fd, void* bytes, std::size_t size, off_t at) {
  if (here() == nullptr) return REAL(pread)(fd, bytes, size, at);
  const FilePtr file = file_of(fd);
  if (file == nullptr) return REAL(pread)(fd, bytes, size, at);
  if (auto* const made = dynamic_cast<GeneratedFile*>(file.get())) {
    const ssize_t got = made->read_at(bytes, size, static_cast<std::size_t>(at));
    return got < 0 ? failed(static_cast<int>(-got)) : got;
  }
  return file->real() >= 0 ? REAL(pread)(file->real(), bytes, size, at) : failed(ESPIPE);
}

/// Calls of regular files, which go on to the real descriptor.
#define OF_REAL_FILE(result, name, parameters, ...)                   \
  CALL(result, name, int fd, parameters) {                            \
    if (here() == nullptr) return REAL(name)(fd, __VA_ARGS__);        \
    const FilePtr file = file_of(fd);                                 \
    if (file == nullptr) return REAL(name)(fd, __VA_ARGS__);          \
    if (file->real() < 0) return static_cast<result>(failed(EINVAL)); \
    return REAL(name)(file->real(), __VA_ARGS__);                     \
  }
#define COMMA ,
#define OF_DISK(result, name, parameters, ...)                                             \
  CALL(result, name, int fd, parameters) {                                                 \
    if (here() == nullptr || file_of(fd) == nullptr) return REAL(name)(fd, __VA_ARGS__);   \
    const FilePtr file = file_of(fd);                                                      \
    if (file->real() < 0) return static_cast<result>(failed(EINVAL));                      \
    if (const int error = change_disk_of(file)) return static_cast<result>(failed(error)); \
    return REAL(name)(file->real(), __VA_ARGS__);                                          \
  }
OF_DISK(ssize_t, pwrite, const void* bytes COMMA std::size_t size COMMA off_t at, bytes, size, at)
OF_REAL_FILE(off_t, lseek, off_t at COMMA int whence, at, whence)
OF_REAL_FILE(off_t, lseek64, off_t at COMMA int whence, at, whence)
OF_DISK(int, ftruncate, off_t size, size)
OF_REAL_FILE(int, posix_fallocate, off_t at COMMA off_t size, at, size)
OF_REAL_FILE(int, fchmod, mode_t mode, mode)

CALL(int, fsync, int fd) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(fsync)(fd);
  if (const int error = change_disk_of(file_of(fd))) return failed(error);
  constexpr Nanoseconds kSyncCost = 2 * kMillisecond;
  const Nanoseconds until = state->now + kSyncCost;
  while (state->now < until) block("fsync", until);
  return 0;
}
CALL(int, flock, int fd, int operation) {
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(flock)(fd, operation);
  while (REAL(flock)(file_of(fd)->real(), operation | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK || (operation & LOCK_NB) != 0) return -1;
    block("flock", state->now + kMillisecond);
  }
  return 0;
}

CALL(int, close, int fd) {
  Process* const process = here();
  if (process == nullptr) return REAL(close)(fd);
  if (process->descriptors.find(fd) == nullptr) return failed(EBADF);
  process->descriptors.erase(fd);
  return 0;
}
extern "C" int simulated_close_range(unsigned first, unsigned last, unsigned flags) {
  constexpr unsigned kCloseOnExec = 1U << 2;
  Descriptors& all = here()->descriptors;
  for (const int fd : all.numbers()) {
    if (static_cast<unsigned>(fd) < first || static_cast<unsigned>(fd) > last) continue;
    if ((flags & kCloseOnExec) != 0)
      all.find(fd)->close_on_exec = true;
    else
      all.erase(fd);
  }
  return 0;
}
CALL(int, dup2, int from, int to) {
  if (here() == nullptr || file_of(from) == nullptr) return here() == nullptr ? REAL(dup2)(from, to) : failed(EBADF);
  if (from != to) here()->descriptors.set(to, {file_of(from), false});
  return to;
}
CALL(int, dup, int from) {
  if (here() == nullptr || file_of(from) == nullptr) return REAL(dup)(from);
  return add_descriptor(file_of(from), false);
}

namespace {

int control(int fd, int command, long argument) {
  Process& process = *here();
  Slot* const found = process.descriptors.find(fd);
  if (found == nullptr) return fd >= 5'000 ? REAL(fcntl)(fd, command, argument) : failed(EBADF);
  const Slot slot = *found;
  switch (command) {
    case F_DUPFD: return add_descriptor(slot.file, false, static_cast<int>(argument));
    case F_DUPFD_CLOEXEC: return add_descriptor(slot.file, true, static_cast<int>(argument));
    case F_GETFD: return slot.close_on_exec ? FD_CLOEXEC : 0;
    case F_SETFD: found->close_on_exec = (argument & FD_CLOEXEC) != 0; return 0;
    case F_GETFL:
      return (slot.file->real() >= 0 ? REAL(fcntl)(slot.file->real(), F_GETFL) & ~O_NONBLOCK : O_RDWR) |
             (slot.file->nonblocking ? O_NONBLOCK : 0);
    case F_SETFL: slot.file->nonblocking = (argument & O_NONBLOCK) != 0; return 0;
    default: return slot.file->real() >= 0 ? REAL(fcntl)(slot.file->real(), command, argument) : failed(EINVAL);
  }
}

}  // namespace

CALL(int, fcntl, int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  return here() == nullptr ? REAL(fcntl)(fd, command, argument) : control(fd, command, argument);
}
CALL(int, fcntl64, int fd, int command, ...) {
  va_list list;
  va_start(list, command);
  const long argument = va_arg(list, long);
  va_end(list);
  return here() == nullptr ? REAL(fcntl)(fd, command, argument) : control(fd, command, argument);
}
CALL(int, ioctl, int fd, unsigned long request, ...) {
  va_list list;
  va_start(list, request);
  void* const argument = va_arg(list, void*);
  va_end(list);
  if (here() == nullptr || file_of(fd) == nullptr) return REAL(ioctl)(fd, request, argument);
  if (request == FIONBIO) {
    file_of(fd)->nonblocking = *static_cast<int*>(argument) != 0;
    return 0;
  }
  return failed(ENOTTY);
}
CALL(int, isatty, int fd) { return here() == nullptr ? REAL(isatty)(fd) : 0; }
CALL(int, tcgetattr, int fd, termios* settings) {
  return here() == nullptr ? REAL(tcgetattr)(fd, settings) : failed(ENOTTY);
}
CALL(pid_t, tcgetpgrp, int fd) { return here() == nullptr ? REAL(tcgetpgrp)(fd) : failed(ENOTTY); }

CALL(int, pipe2, int* ends, int flags) {
  if (here() == nullptr) return REAL(pipe2)(ends, flags);
  charge(kCallCost);
  const auto [reader, writer] = make_pipe();
  reader->nonblocking = writer->nonblocking = (flags & O_NONBLOCK) != 0;
  ends[0] = add_descriptor(reader, (flags & O_CLOEXEC) != 0);
  ends[1] = add_descriptor(writer, (flags & O_CLOEXEC) != 0);
  return 0;
}
CALL(int, pipe, int* ends) { return here() == nullptr ? REAL(pipe)(ends) : simulated_pipe2(ends, 0); }

CALL(int, eventfd, unsigned value, int flags) {
  if (here() == nullptr) return REAL(eventfd)(value, flags);
  auto file = std::make_shared<EventCounter>(value);
  file->nonblocking = (flags & EFD_NONBLOCK) != 0;
  return add_descriptor(std::move(file), (flags & EFD_CLOEXEC) != 0);
}
CALL(int, timerfd_create, int clock, int flags) {
  if (here() == nullptr) return REAL(timerfd_create)(clock, flags);
  auto file = std::make_shared<TimerFile>();
  file->nonblocking = (flags & TFD_NONBLOCK) != 0;
  return add_descriptor(std::move(file), (flags & TFD_CLOEXEC) != 0);
}
CALL(int, timerfd_settime, int fd, int flags, const itimerspec* time, itimerspec* before) {
  if (here() == nullptr) return REAL(timerfd_settime)(fd, flags, time, before);
  const auto timer = std::dynamic_pointer_cast<TimerFile>(file_of(fd));
  if (timer == nullptr) return failed(EINVAL);
  if (before != nullptr) std::memset(before, 0, sizeof *before);
  const Nanoseconds first = time->it_value.tv_sec * kSecond + time->it_value.tv_nsec;
  constexpr Nanoseconds kMonotonicBase = 100'000 * kSecond;
  const Nanoseconds at = first == 0                         ? kNever
                         : (flags & TFD_TIMER_ABSTIME) != 0 ? first - kMonotonicBase
                                                            : state->now + first;
  timer->set(at, time->it_interval.tv_sec * kSecond + time->it_interval.tv_nsec);
  return 0;
}
CALL(int, signalfd, int fd, const sigset_t* set, int flags) {
  if (here() == nullptr) return REAL(signalfd)(fd, set, flags);
  auto file = std::make_shared<SignalFile>(*here(), *set);
  file->nonblocking = (flags & SFD_NONBLOCK) != 0;
  return add_descriptor(std::move(file), (flags & SFD_CLOEXEC) != 0);
}
extern "C" int simulated_pidfd_open(pid_t pid) {
  Process* const process = find(pid);
  if (process == nullptr || process->host != here()->host) return failed(ESRCH);
  return add_descriptor(process_file(*process), true);
}
extern "C" int simulated_pidfd_send_signal(int fd, int number) {
  const auto file = std::dynamic_pointer_cast<ProcessFile>(file_of(fd));
  if (file == nullptr) return failed(EBADF);
  charge(kCallCost);
  if (file->process.reaped || file->process.ended) return failed(ESRCH);
  send_signal(file->process, number);
  if (here()->ended) end_thread();
  return 0;
}

CALL(int, epoll_create1, int flags) {
  if (here() == nullptr) return REAL(epoll_create1)(flags);
  return add_descriptor(std::make_shared<Epoll>(), (flags & EPOLL_CLOEXEC) != 0);
}
CALL(int, epoll_create, int size) { return here() == nullptr ? REAL(epoll_create)(size) : simulated_epoll_create1(0); }
CALL(int, epoll_ctl, int epoll, int operation, int fd, epoll_event* event) {
  if (here() == nullptr) return REAL(epoll_ctl)(epoll, operation, fd, event);
  const auto file = std::dynamic_pointer_cast<Epoll>(file_of(epoll));
  const FilePtr other = file_of(fd);
  if (file == nullptr || other == nullptr) return failed(EBADF);
  return file->control(operation, fd, other, event);
}
CALL(int, epoll_wait, int epoll, epoll_event* events, int most, int timeout) {
  if (here() == nullptr) return REAL(epoll_wait)(epoll, events, most, timeout);
  const auto file = std::dynamic_pointer_cast<Epoll>(file_of(epoll));
  if (file == nullptr) return failed(EBADF);
  charge(kCallCost);
  const Nanoseconds deadline = timeout < 0 ? kNever : state->now + timeout * kMillisecond;
  while (true) {
    const int count = file->collect(events, most);
    if (count > 0 || state->now >= deadline) return count;
    file->waiters.add(*self);
    if (block("epoll_wait", deadline, true) == Woke::Signal) {
      run_handlers();
      return failed(EINTR);
    }
  }
}

CALL(int, poll, pollfd* all, nfds_t count, int timeout) {
  if (here() == nullptr) return REAL(poll)(all, count, timeout);
  charge(kCallCost);
  const Nanoseconds deadline = timeout < 0 ? kNever : state->now + timeout * kMillisecond;
  while (true) {
    int ready = 0;
    for (nfds_t i = 0; i < count; ++i) {
      all[i].revents = 0;
      if (all[i].fd < 0) continue;
      const FilePtr file = file_of(all[i].fd);
      all[i].revents = file == nullptr ? static_cast<short>(POLLNVAL)
                                       : static_cast<short>(file->ready() & (all[i].events | POLLERR | POLLHUP));
      ready += all[i].revents != 0 ? 1 : 0;
    }
    if (ready > 0 || state->now >= deadline) return ready;
    for (nfds_t i = 0; i < count; ++i) {
      if (all[i].fd >= 0) file_of(all[i].fd)->waiters.add(*self);
    }
    if (block("poll", deadline, true) == Woke::Signal) {
      run_handlers();
      return failed(EINTR);
    }
  }
}
CALL(int, select, int count, fd_set* in, fd_set* out, fd_set* error, timeval* limit) {
  if (here() == nullptr) return REAL(select)(count, in, out, error, limit);
  const Nanoseconds until = limit == nullptr ? kNever : state->now + limit->tv_sec * kSecond + limit->tv_usec * 1000;
  while (state->now < until) block("select", until);
  return 0;
}
