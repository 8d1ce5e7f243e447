// Chooses the path of operations on this host, by measurements.
#pragma once

#include "comm/kernels/arrays.h"
#include "comm/shm/control.h"
#include "comm/shm/world.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

namespace cohort::comm::local {

// The distance between the cores of two ranks, measured by the threads that run operations: the round trip of a cache
// line, and the time to pass a buffer to the other core through the caches, past them, and by reading through the
// kernel. Virtual cores move within a host, so all times but the last are measured repeatedly. They decide only the
// kind of stores, never results, so ranks need not agree on them. Used by the thread that runs operations.

/// Shortest buffer that is read through the kernel; also the limit if nothing could be measured.
inline constexpr std::uint64_t kLeastReading = std::uint64_t{4} << 10;

class Distance {
 public:
  explicit Distance(World& world) noexcept : world_(world) {}

  /// Measures how buffers are best written. All ranks call `measure` at the same operation, while nothing is staged.
  /// Takes tens of microseconds. Leaves the values as they were if the partner does not come within `patience`, or
  /// stops answering later.
  void measure(std::chrono::microseconds patience) noexcept;
  /// Measures reading through the kernel. All ranks call it once, before operations, if all may read their peers'
  /// memory.
  void measure_reading(std::chrono::microseconds patience) noexcept;
  /// Nanoseconds of a round trip; 0 if not known (a rank without a partner, or more ranks than cores).
  double round_trip() const noexcept { return round_trip_; }
  /// Bytes of a trial: the usual size of a staged chunk, since a smaller trial would be biased towards streaming.
  std::size_t trial_bytes() const noexcept { return world_.layout().usual_chunk_bytes(); }
  /// Microseconds from the write on this rank until the partner has read, by kind of stores; 0 if not known.
  double cached() const noexcept { return cached_; }
  double streamed() const noexcept { return streamed_; }
  /// Microseconds for reading through the kernel what the partner has just written: the fixed cost, and the cost of
  /// each byte; 0 if not known.
  double read_begin() const noexcept { return read_begin_; }
  double read_byte() const noexcept { return read_byte_; }
  /// The size in bytes from which reading through the kernel is faster than a staging buffer; nullopt if not known,
  /// kNever if it never is.
  std::optional<std::uint64_t> reading_pays_from() const noexcept;
  /// True if a long buffer reaches another core faster through staging, where one core writes a chunk while the other
  /// reads the one before, than if the other core reads it through the kernel. False if not known.
  bool staging_is_faster() const noexcept { return cached_ > 0 && read_byte_ > 0 && 2 * read_byte_ > staged_byte(); }
  /// The faster stores for buffers that other cores read next.
  Stores better() const noexcept {
    return streamed_ > 0 && streamed_ < 0.9 * cached_ ? Stores::NonTemporal : Stores::Cached;
  }

 private:
  /// Microseconds in which a byte is written to a staging buffer and read from it.
  double staged_byte() const noexcept {
    return std::max(cached_ - round_trip_ / 1e3, 0.0) / static_cast<double>(trial_bytes());
  }
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

// Paths of operations on this host: rank 0 measures the cost of copies and decides for all ranks. Every choice gives
// the same bits. COHORT_PLAN forces a choice, COHORT_LOG=plan logs the choices and their reasons.

/// Bytes read from a peer through the kernel before they are folded, few enough to stay in the second-level cache.
inline constexpr std::size_t kPullPiece = std::size_t{64} << 10;

/// Smallest piece that may be written past the caches.
inline constexpr std::size_t kLeastNonTemporal = std::size_t{4} << 10;

/// Stores with which staging buffers are written: through the caches, past them, or the faster (Distance).
enum class StorePolicy : std::uint32_t { Auto = 0, Cached = 1, NonTemporal = 2 };

/// Makes the plan, on rank 0. `cross`: all ranks may read each other's memory through the kernel. Throws
/// InvalidArgument if COHORT_PLAN cannot be parsed.
Plan make_plan(const World& world, bool cross, const Distance& distance);
/// Applies e.g. "inline=8K,cross=off,stores=cached,zero-copy=off,chunk=64K" to `plan`.
Result<void> force(Plan& plan, std::string_view text, const ControlLayout& layout, bool cross);
void log_plan(const World& world, const Plan& plan, bool cross, const Distance& distance);

}  // namespace cohort::comm::local
