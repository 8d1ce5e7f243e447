// Memory that several processes map: anonymous files (memfd) without a name, so nothing can be left behind. Sealed
// against shrinking, so a peer cannot turn reads into SIGBUS, and faulted in before use, so running out of memory is
// an error here and not a signal later. Mappings and descriptors have one owner; not thread-safe, owns no globals.
// Memory for a few small secrets: no core dump shows it (MADV_DONTDUMP), and it is not swapped out where the limits
// allow that. Never given back to the system. Without locks, so any thread may call, and a forked child too.
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
/// `name` shows in /proc/PID/maps only. Unavailable if the host, the cgroup or a limit of the process does not allow
/// it.
Result<SharedSegment> create_shared_segment(const std::string& name, std::size_t bytes);

/// Maps a segment that another process made. Corrupt if it is smaller than `bytes` or could shrink; Unavailable if it
/// cannot be mapped. Cheap: page tables are filled at first use, or by `populate`.
Result<Mapping> map_shared_segment(int fd, std::size_t bytes);
/// Fills the page tables, so that the first use does not fault. Only a wish: it may do nothing.
void populate(const Mapping& mapping) noexcept;

/// How many bytes may still be allocated: the least of the host's available memory and what the cgroups leave.
std::size_t available_memory();

inline constexpr std::size_t kHiddenBytes = 64;

/// kHiddenBytes bytes, zeros. Throws std::bad_alloc.
void* take_hidden_memory();
/// Fills it with zeros first.
void give_hidden_memory(void* memory) noexcept;
/// For a forked child, which inherits all but the lock against swapping.
void lock_hidden_memory() noexcept;

}  // namespace cohort::sys
