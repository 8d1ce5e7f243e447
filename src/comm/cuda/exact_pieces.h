// How a sum with the CPU's bits is cut into pieces that fit in the scratch memory (exact_sums.cpp, exact_columns.cpp):
// the same on all ranks. Pure.
#pragma once

#include "comm/cuda/exact_sums.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace cohort::comm::cuda {

inline constexpr std::size_t kLine = ExactSums::kAlignment;
// Up to here every rank is sent everything, and folds it all: one exchange instead of two.
inline constexpr std::size_t kSmall = std::size_t{64} << 10;
inline constexpr std::size_t kSmallOfAll = std::size_t{1} << 20;

constexpr std::size_t lines(std::size_t bytes) noexcept { return (bytes + kLine - 1) / kLine; }

inline bool is_small(const Request& request, int ranks) noexcept {
  const std::size_t bytes = request.input_bytes();
  const bool whole = request.kind == Kind::AllReduce || request.kind == Kind::Reduce;
  return whole && bytes <= kSmall && bytes * static_cast<std::size_t>(ranks) <= kSmallOfAll;
}

/// Room for the largest slice of so many bytes.
inline std::size_t slot_of_slice(std::size_t bytes, int ranks) noexcept {
  return (lines(bytes) / static_cast<std::size_t>(ranks) + 1) * kLine;
}

/// The most that one rank keeps of a reduce_scatter, in elements.
inline std::int64_t longest_part(const Request& request, int ranks) noexcept {
  std::int64_t longest = 0;
  for (int rank = 0; rank < ranks; ++rank) longest = std::max(longest, kept_by(request, rank).count());
  return longest;
}

/// Of so many bytes of an all_reduce or reduce that are exchanged at once.
inline std::size_t scratch_of_slices(std::size_t bytes, const ExactWorld& world) noexcept {
  const std::size_t flat = slot_of_slice(bytes, world.size) * static_cast<std::size_t>(world.size);
  if (world.columns == 0) return flat;
  const std::size_t slot = slot_of_slice(bytes, world.columns);
  const int hosts = static_cast<int>(world.on.size());
  return std::max(flat, slot * static_cast<std::size_t>(world.columns) +
                            slot_of_slice(slot, hosts) * static_cast<std::size_t>(hosts));
}
/// Of so many bytes of each rank's part.
inline std::size_t scratch_of_parts(std::size_t bytes, const ExactWorld& world) noexcept {
  const std::size_t slots = static_cast<std::size_t>(world.size) + (world.columns > 0 ? world.on.size() : 0);
  return lines(bytes) * kLine * slots;
}
/// Of a whole request.
inline std::size_t scratch_of_one(const Request& request, const ExactWorld& world) noexcept {
  if (request.input_count == 0) return 0;
  if (is_small(request, world.size)) return lines(request.input_bytes() * static_cast<std::size_t>(world.size)) * kLine;
  if (request.kind == Kind::AllReduce || request.kind == Kind::Reduce)
    return scratch_of_slices(request.input_bytes(), world);
  return scratch_of_parts(static_cast<std::size_t>(longest_part(request, world.size)) * size_of(request.dtype), world);
}

/// As many elements as may be exchanged at once: `bytes` are too many, or fit.
template <class Scratch>
std::int64_t most_of(std::size_t bytes, std::size_t element, std::size_t most, const Scratch& scratch) noexcept {
  std::size_t fitting = lines(bytes);
  while (fitting > 1 && scratch(std::min(fitting * kLine, bytes)) > most) fitting -= (fitting + 15) / 16;
  return static_cast<std::int64_t>(std::min(fitting * kLine, bytes) / element);
}

/// What a rank keeps of a reduce_scatter, of so many elements of each part from `begin` on.
inline Slice stretch_of(const Request& request, int rank, std::int64_t begin, std::int64_t count) noexcept {
  const Slice kept = kept_by(request, rank);
  const std::int64_t first = std::min(kept.begin + begin, kept.end);
  return {first, std::min(first + count, kept.end)};
}
/// Where this rank keeps it.
inline std::byte* kept_at(const Request& request, int rank, const Slice& range) noexcept {
  return at(request.output, range.begin - kept_by(request, rank).begin, size_of(request.dtype));
}

inline std::size_t bytes_of(const Slice& slice, std::size_t element) noexcept {
  return static_cast<std::size_t>(slice.count()) * element;
}

}  // namespace cohort::comm::cuda
