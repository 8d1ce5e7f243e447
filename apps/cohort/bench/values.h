// What ranks bring and what has to come out, for every type and reduction: small whole numbers that depend on the rank
// and the place, so that results are exact and a part at a wrong place shows. Pure functions; any thread.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace cohort::app::bench {

/// Elements that repeat: element i of a buffer is element (first + i) mod kPeriod of its tile. A prime, so that
/// parts do not begin alike.
inline constexpr std::int64_t kPeriod = 251;

/// One period, encoded.
using Tile = std::vector<std::byte>;

/// What rank `rank` brings to a reduction by `op` (to an operation that only moves data: any op).
Tile input_tile(DType dtype, ReduceOp op, int rank);
/// The reduction over ranks 0 .. ranks - 1 of their input tiles.
Tile reduced_tile(DType dtype, ReduceOp op, int ranks);

void fill(void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);
/// How many elements differ from what `fill` would write.
std::int64_t count_wrong(const void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);

}  // namespace cohort::app::bench
