#include "launch/record/warnings_file.h"

#include "base/log.h"
#include "sys/thread.h"
#include "sys/unique_fd.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <utility>

namespace cohort::launch {
namespace {

constexpr std::chrono::seconds kWakeEvery{5};

std::optional<DiskRoom> look(int folder) {
  struct statvfs found {};
  if (::fstatvfs(folder, &found) != 0 || found.f_blocks == 0) return std::nullopt;
  return DiskRoom{static_cast<std::uint64_t>(found.f_blocks) * found.f_frsize,
                  static_cast<std::uint64_t>(found.f_bavail) * found.f_frsize};
}

/// Only this user may read it, as job.json. A line that does not fit is taken back whole.
void append_to(int folder, const std::string& lines) {
  const sys::UniqueFd file(
      ::openat(folder, kWarningsFile, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
  struct stat status {};
  if (!file || ::fstat(file.get(), &status) != 0 || !S_ISREG(status.st_mode)) {
    log::warn("launch", "{} cannot be written: {}", kWarningsFile, errno_text(errno));
    return;
  }
  const ssize_t wrote = ::write(file.get(), lines.data(), lines.size());
  if (wrote == static_cast<ssize_t>(lines.size())) return;
  log::warn("launch", "{} cannot be written: {}", kWarningsFile, wrote < 0 ? errno_text(errno) : "no room is left");
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

void WarningsFile::append(const std::string& lines) {
  {
    const std::scoped_lock lock(mutex_);
    waiting_ += lines;
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
    const std::string lines = std::exchange(waiting_, {});
    const bool last = closing_;
    lock.unlock();
    if (!lines.empty()) append_to(folder_.fd.get(), lines);
    const auto room = last ? std::nullopt : look(folder_.fd.get());
    lock.lock();
    if (room) room_ = room;
    if (last && waiting_.empty()) return;
    changed_.wait_for(lock, kWakeEvery, [this] { return closing_ || !waiting_.empty(); });
  }
}

}  // namespace cohort::launch
