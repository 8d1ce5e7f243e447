#include "launch/show/console.h"

#include "base/result.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

bool is_full(int error) { return error == ENOSPC || error == EDQUOT || error == EFBIG; }

}  // namespace

Console::Console() : event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!event_) raise(ErrorCode::Unavailable, "eventfd: {}", errno_text(errno));
}

Console::~Console() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
    queue_.clear();
  }
  changed_.notify_all();
  if (!thread_.joinable()) return;
  {
    std::unique_lock lock(mutex_);
    while (!changed_.wait_for(lock, std::chrono::milliseconds(20), [this] { return ended_; })) interrupt();
  }
  thread_.join();
}

void Console::interrupt() {
  // A terminal that has room for one byte counts as ready and then holds a write of more: a signal, whose handler does
  // nothing, gets the thread out of it.
  static const bool handled = [] {
    struct sigaction nothing {};
    nothing.sa_handler = [](int) {};
    return ::sigaction(SIGRTMIN, &nothing, nullptr) == 0;
  }();
  if (handled && thread_.joinable()) ::pthread_kill(thread_.native_handle(), SIGRTMIN);
}

void Console::drop() {
  const std::lock_guard lock(mutex_);
  for (const Item& item : queue_) written_.fetch_add(item.weight, std::memory_order_release);
  queue_.clear();
  ++generation_;
  if (writing_) interrupt();
}

bool Console::dropped(std::uint64_t generation) const {
  const std::lock_guard lock(mutex_);
  return closing_ || generation != generation_;
}

void Console::write(int fd, std::string bytes, std::uint64_t weight) {
  {
    const std::lock_guard lock(mutex_);
    queue_.push_back({fd, std::move(bytes), weight});
    // Made late: short jobs that print nothing never need it.
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  }
  changed_.notify_one();
}

void Console::acknowledge() const {
  std::uint64_t count = 0;
  [[maybe_unused]] const auto got = ::read(event_.get(), &count, sizeof count);
}

bool Console::idle() const {
  const std::lock_guard lock(mutex_);
  return queue_.empty() && !writing_;
}

void Console::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !queue_.empty(); });
    if (closing_) break;
    const Item item = std::move(queue_.front());
    queue_.pop_front();
    writing_ = true;
    const std::uint64_t generation = generation_;
    lock.unlock();
    put(item, generation);
    written_.fetch_add(item.weight, std::memory_order_release);
    lock.lock();
    writing_ = false;
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto put_one = ::write(event_.get(), &one, sizeof one);
  }
  ended_ = true;
  changed_.notify_all();
}

void Console::put(const Item& item, std::uint64_t generation) {
  const std::size_t which = item.fd == 2;
  std::atomic<bool>& gone = gone_[which];
  std::string after_gap;
  std::string_view rest(item.bytes);
  if (gap_[which] && !rest.empty()) {
    after_gap = "\n" + item.bytes;
    rest = after_gap;
  }
  while (!rest.empty() && !gone.load(std::memory_order_relaxed) && !dropped(generation)) {
    // Looked at first, and in pieces that a ready pipe takes whole, so that giving up is possible at any time.
    pollfd waited{item.fd, POLLOUT, 0};
    if (::poll(&waited, 1, 100) <= 0) continue;
    const ssize_t put = ::write(item.fd, rest.data(), std::min<std::size_t>(rest.size(), 4096));
    if (put > 0) {
      mid_line_[which] = rest[static_cast<std::size_t>(put) - 1] != '\n';
      gap_[which] = false;
      rest.remove_prefix(static_cast<std::size_t>(put));
      taken_.fetch_add(static_cast<std::uint64_t>(put), std::memory_order_relaxed);
    } else if (put < 0 && is_full(errno)) {
      no_room_[which].store(errno, std::memory_order_relaxed);
      gap_[which] = mid_line_[which];
      return;
    } else if (put < 0 && errno != EINTR && errno != EAGAIN) {
      gone.store(true, std::memory_order_relaxed);
    }
  }
}

}  // namespace cohort::launch
