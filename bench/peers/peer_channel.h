// Channels by which a peer's ranks get requests from the driver and wait for each other. The driver's folder holds, for
// each rank R, the FIFOs in.R and out.R, and the file `flags`. A rank that has nothing to do blocks in read(), so it
// disturbs nobody; it ends when the driver does, because its FIFO then does. Throws std::runtime_error; used by one
// thread.
#pragma once

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

namespace peers {

class Channel {
 public:
  Channel(const std::string& folder, int rank, int ranks)
      : rank_(rank), ranks_(ranks), oversubscribed_(ranks > usable_cores()) {
    input_ = open_file(folder + "/in." + std::to_string(rank), O_RDONLY);
    output_ = open_file(folder + "/out." + std::to_string(rank), O_WRONLY);
    const int flags = open_file(folder + "/flags", O_RDWR);
    void* const shared = ::mmap(nullptr, kFlagBytes, PROT_READ | PROT_WRITE, MAP_SHARED, flags, 0);
    ::close(flags);
    if (shared == MAP_FAILED || ranks > kMostRanks) throw std::runtime_error("cannot map " + folder + "/flags");
    flags_ = static_cast<Flag*>(shared);
  }
  ~Channel() {
    ::munmap(flags_, kFlagBytes);
    ::close(input_);
    ::close(output_);
  }
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  /// The next command; nothing once the driver has gone.
  std::optional<std::string> next_line() {
    while (true) {
      if (const auto end = pending_.find('\n'); end != std::string::npos) {
        std::string line = pending_.substr(0, end);
        pending_.erase(0, end + 1);
        return line;
      }
      char bytes[512];
      const ssize_t got = ::read(input_, bytes, sizeof bytes);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) return std::nullopt;
      pending_.append(bytes, static_cast<std::size_t>(got));
    }
  }

  void answer(std::string text) {
    text += '\n';
    for (std::string_view rest = text; !rest.empty();) {
      const ssize_t put = ::write(output_, rest.data(), rest.size());
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) throw std::runtime_error("the driver does not read any more");
      rest.remove_prefix(static_cast<std::size_t>(put));
    }
  }

  /// Waits for all ranks through flags of our own, the same for every library: a library's own barrier would put its
  /// own skew into what is measured. `progress` moves what the library still has to do for others.
  template <class Progress>
  void align(Progress progress) {
    flags_[rank_].word.store(++round_, std::memory_order_release);
    for (int other = 0; other < ranks_; ++other) {
      for (unsigned spins = 0; flags_[other].word.load(std::memory_order_acquire) < round_; ++spins) {
        if (spins % 64 == 63) progress();
        if (oversubscribed_ || spins > 20000) {
          ::sched_yield();
        } else {
          __builtin_ia32_pause();
        }
      }
    }
  }

 private:
  static constexpr int kMostRanks = 256;
  struct alignas(128) Flag {
    std::atomic<std::uint64_t> word;
  };
  static constexpr std::size_t kFlagBytes = kMostRanks * sizeof(Flag);

  static int open_file(const std::string& path, int how) {
    const int fd = ::open(path.c_str(), how | O_CLOEXEC);
    if (fd < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
    return fd;
  }
  static int usable_cores() {
    cpu_set_t cores;
    return ::sched_getaffinity(0, sizeof cores, &cores) == 0 ? CPU_COUNT(&cores) : 1;
  }

  int rank_, ranks_;
  bool oversubscribed_;
  int input_ = -1, output_ = -1;
  std::string pending_;
  Flag* flags_ = nullptr;
  std::uint64_t round_ = 0;
};

}  // namespace peers
