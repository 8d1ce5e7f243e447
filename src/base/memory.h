// SharedSegment: memory that several processes map, an anonymous file (memfd), so that nothing can be left behind. It
// is sealed against shrinking, so a peer cannot turn reads into SIGBUS, and faulted in before use, so running out of
// memory is an error here and not a signal later. Mappings and descriptors have one owner; not thread-safe, owns no
// globals.
// take_hidden_memory: memory for a few small secrets. Core dumps omit it (MADV_DONTDUMP), and it is not swapped if the
// limits allow locking it. It is never returned to the system. Lock-free: any thread may call, and a forked child too.
#pragma once

#include "base/result.h"
#include "base/unique_fd.h"

#include <cstddef>
#include <string>
#include <utility>

namespace cohort::sys {

/// A mapping with one owner, unmapped at the end.
class Mapping {
 public:
  Mapping() noexcept = default;
  Mapping(void* data, std::size_t bytes) noexcept : data_(data), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  void* data() const noexcept { return data_; }
  std::size_t bytes() const noexcept { return bytes_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  void* data_ = nullptr;
  std::size_t bytes_ = 0;
};

struct SharedSegment {
  UniqueFd fd;
  Mapping mapping;
};

/// A zeroed segment of at least `bytes` (rounded up to pages; to huge pages if it is large), all of it in memory.
/// `name` is only visible in /proc/PID/maps. Fails with Unavailable if the host, the cgroup or a process limit does not
/// allow it.
Result<SharedSegment> create_shared_segment(const std::string& name, std::size_t bytes);

/// Maps a segment of another process. Fails with Corrupt if it is smaller than `bytes` or could shrink, Unavailable if
/// it cannot be mapped. Cheap: page tables are filled at first use, or by `populate`.
Result<Mapping> map_shared_segment(int fd, std::size_t bytes);
/// Fills the page tables, so that the first use does not fault. Best effort.
void populate(const Mapping& mapping) noexcept;

/// Number of bytes that may still be allocated: the minimum of the host's available memory and the cgroups' remainders.
std::size_t available_memory();

inline constexpr std::size_t kHiddenBytes = 64;

/// Returns kHiddenBytes zero bytes. Throws std::bad_alloc.
void* take_hidden_memory();
/// Zeroes the memory, and makes it available again.
void give_hidden_memory(void* memory) noexcept;
/// Called in a forked child, which does not inherit the lock against swapping.
void lock_hidden_memory() noexcept;

}  // namespace cohort::sys
