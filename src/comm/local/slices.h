// How the elements of a buffer are divided among ranks: contiguous slices whose borders lie on cache lines. Pure.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace cohort::comm::local {

struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const noexcept { return end - begin; }
};

/// Slice `part` of `parts` of `count` elements of `element` bytes, whose first lies `address` bytes into memory.
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

}  // namespace cohort::comm::local
