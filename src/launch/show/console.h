// Writes to stdout and stderr on a thread of its own, so that a reader who does not read (a pager, a stopped terminal)
// never stops the supervisor. Memory is bounded by who feeds it: `written` says how much has gone out. Methods belong
// to one thread, except where noted.
#pragma once

#include "sys/unique_fd.h"

#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>

namespace cohort::launch {

class Console {
 public:
  Console();
  /// Drops what has not been written: wait until `idle` to keep it. Never waits for a reader.
  ~Console();
  Console(const Console&) = delete;
  Console& operator=(const Console&) = delete;

  /// `weight` is added to `written()` once the bytes are out (or dropped, if the reader is gone).
  void write(int fd, std::string bytes, std::uint64_t weight = 0);
  /// Readable after anything has changed; reading is `acknowledge`.
  int event_fd() const noexcept { return event_.get(); }
  void acknowledge() const;
  std::uint64_t written() const noexcept { return written_.load(std::memory_order_acquire); }
  bool idle() const;
  /// Bytes that the readers have taken. Any thread.
  std::uint64_t taken() const noexcept { return taken_.load(std::memory_order_relaxed); }
  /// Drops what has not been written; what is being written too, as soon as its reader lets go of us. What comes later
  /// is written.
  void drop();
  /// The reader of stdout (1) or stderr (2) has gone.
  bool reader_gone(int fd) const noexcept { return gone_[fd == 2].load(std::memory_order_relaxed); }
  /// Why (errno) something could not be written to a file that has no room for it, and was dropped; 0 if all could.
  /// Each piece is tried again, so that what comes once there is room is written.
  int no_room(int fd) const noexcept { return no_room_[fd == 2].load(std::memory_order_relaxed); }

 private:
  struct Item {
    int fd;
    std::string bytes;
    std::uint64_t weight;
  };
  void run();
  void put(const Item& item, std::uint64_t generation);
  bool dropped(std::uint64_t generation) const;
  void interrupt();

  sys::UniqueFd event_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Item> queue_;
  bool writing_ = false;
  bool closing_ = false;
  bool ended_ = false;
  std::uint64_t generation_ = 0;  ///< how often `drop` was called
  std::atomic<std::uint64_t> written_{0};
  std::atomic<std::uint64_t> taken_{0};
  std::array<std::atomic<bool>, 2> gone_{};
  std::array<std::atomic<int>, 2> no_room_{};
  std::array<bool, 2> gap_{};       ///< something was dropped in the middle of a line; of the thread
  std::array<bool, 2> mid_line_{};  ///< the last byte that went out ends no line; of the thread
  std::thread thread_;
};

}  // namespace cohort::launch
