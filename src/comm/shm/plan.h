// Chooses the path of operations on this host, and measures what decides it.
#pragma once

#include "comm/kernels/arrays.h"
#include "comm/shm/control.h"
#include "comm/shm/world.h"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace cohort::comm::local {

// How far the cores of two ranks are apart, measured between the ranks that run operations: the time of a cache line
// there and back, and which way gets a buffer to the other core sooner, through the caches, past them, or by the
// kernel's reading. Virtual cores move over a host, so the first three are measured again from time to time; they
// decide only how stores are made, never what is computed, so ranks need not agree on them. Used by the thread that
// runs operations.

/// Shorter buffers are never read through the kernel; where it cannot be measured, from here on.
inline constexpr std::uint64_t kLeastReading = std::uint64_t{4} << 10;

class Distance {
 public:
  explicit Distance(World& world) noexcept : world_(world) {}

  /// All ranks call it at the same operation, when nothing is staged. Takes tens of microseconds; a partner that does
  /// not come within `patience`, or then does not answer, leaves the values as they were.
  void measure(std::chrono::microseconds patience) noexcept;
  /// All ranks call it once, before operations, if all may read their peers' memory.
  void measure_reading(std::chrono::microseconds patience) noexcept;
  /// Nanoseconds there and back; 0: not known (a rank without a partner, or more ranks than cores).
  double round_trip() const noexcept { return round_trip_; }
  /// Bytes of the trial: as many as go through staging at once, since fewer would lie in favour of streaming.
  std::size_t trial_bytes() const noexcept { return world_.layout().usual_chunk_bytes(); }
  /// Microseconds until the partner has read what this rank has written; 0: not known.
  double cached() const noexcept { return cached_; }
  double streamed() const noexcept { return streamed_; }
  /// Microseconds for reading through the kernel what the partner has just written, to begin with and for each byte;
  /// 0: not known.
  double read_begin() const noexcept { return read_begin_; }
  double read_byte() const noexcept { return read_byte_; }
  /// The bytes from which a buffer gets to the other core sooner through the kernel than through a staging buffer;
  /// nullopt: not known, kNever: at no size.
  std::optional<std::uint64_t> reading_pays_from() const noexcept;
  /// Stores with which buffers for other cores are to be written.
  Stores better() const noexcept {
    return streamed_ > 0 && streamed_ < 0.9 * cached_ ? Stores::NonTemporal : Stores::Cached;
  }

 private:
  bool meet(std::uint64_t turn, std::chrono::microseconds patience) noexcept;
  bool await(std::uint64_t turn) const noexcept;
  bool trips(std::uint64_t first) noexcept;
  bool trial(std::uint64_t first, Stores stores, double& microseconds) noexcept;
  bool read_trial(std::uint64_t first, std::size_t bytes, double& microseconds) noexcept;

  World& world_;
  std::uint64_t turns_ = 0;
  double round_trip_ = 0;
  double cached_ = 0;
  double streamed_ = 0;
  double read_begin_ = 0;
  double read_byte_ = 0;
  std::vector<std::byte> buffer_;
};

// Paths of operations on this host: rank 0 measures what copies cost, decides, and all follow. Every choice gives the
// same bits; COHORT_PLAN forces one, COHORT_LOG=plan reports what was chosen and why.

/// Bytes read from a peer through the kernel at a time before they are folded: they stay in the second-level cache.
inline constexpr std::size_t kPullPiece = std::size_t{64} << 10;

/// Smaller pieces are always written through the caches.
inline constexpr std::size_t kLeastNonTemporal = std::size_t{4} << 10;

/// How staging buffers are written: through the caches, past them, or as measured (Distance).
enum class StorePolicy : std::uint32_t { Auto = 0, Cached = 1, NonTemporal = 2 };

/// Rank 0's decision. `cross`: all ranks may read each other's memory through the kernel. Throws InvalidArgument if
/// COHORT_PLAN cannot be understood.
Plan make_plan(const World& world, bool cross, const Distance& distance);
/// Applies e.g. "inline=8K,cross=off,stores=cached,zero-copy=off,chunk=64K" to `plan`.
Result<void> force(Plan& plan, std::string_view text, const ControlLayout& layout, bool cross);
void log_plan(const World& world, const Plan& plan, bool cross, const Distance& distance);

}  // namespace cohort::comm::local
