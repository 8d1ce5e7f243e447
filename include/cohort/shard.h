// The part of a tensor that a rank holds, if no rank holds all of it: how layers, optimizers and checkpoints describe
// it to each other. A plain value; any thread.
#pragma once

#include <cstdint>
#include <vector>

namespace cohort {

/// A box of the whole tensor (a tensor-parallel layer's part), and a range of the box's elements in row-major order (a
/// sharded optimizer's part). For a parameter that its rank holds whole, box and range cover the whole tensor.
struct Shard {
  std::vector<std::int64_t> sizes;   ///< sizes of the whole tensor
  std::vector<std::int64_t> start;   ///< where the box begins, by dimension
  std::vector<std::int64_t> extent;  ///< sizes of the box, by dimension
  std::int64_t begin = 0;            ///< first element of the range, counted in the box
  std::int64_t count = 0;            ///< number of elements in the range

  bool operator==(const Shard&) const = default;
};

}  // namespace cohort
