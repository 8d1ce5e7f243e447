// How the elements of a buffer are divided among ranks: contiguous slices. Pure.
#pragma once

#include "comm/api/request.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cohort::comm {

struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const noexcept { return end - begin; }
};

/// Slice `part` of `parts` of `count` elements of `element` bytes, whose first lies `address` bytes into memory.
/// Borders lie on cache lines.
inline Slice slice_of(std::int64_t count, std::size_t element, int part, int parts, std::uint64_t address) noexcept {
  constexpr std::uint64_t kLineBytes = 64;
  const auto per_line = static_cast<std::int64_t>(kLineBytes / element);
  const auto lead = static_cast<std::int64_t>(address % kLineBytes / element);  // elements before it in its line
  const std::int64_t lines = (count + lead + per_line - 1) / per_line;
  const auto border = [&](std::int64_t index) {
    const std::int64_t line = lines / parts * index + lines % parts * index / parts;
    return std::clamp(line * per_line - lead, std::int64_t{0}, count);
  };
  return {border(part), part + 1 == parts ? count : border(part + 1)};
}

/// Part `part` of parts of these counts, one after the other.
inline Slice part_of(std::span<const std::int64_t> counts, int part) noexcept {
  std::int64_t begin = 0;
  for (int before = 0; before < part; ++before) begin += counts[static_cast<std::size_t>(before)];
  return {begin, begin + counts[static_cast<std::size_t>(part)]};
}

/// What a rank keeps of a reduce_scatter, in elements of the input.
inline Slice kept_by(const Request& request, int rank) noexcept {
  if (request.kind == Kind::ReduceScatter) return {rank * request.output_count, (rank + 1) * request.output_count};
  return part_of(request.counts->input, rank);
}

inline const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
inline std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

}  // namespace cohort::comm
