// Which way operations go on this host: rank 0 measures what copies cost, decides, and all follow. Every choice gives
// the same bits; COHORT_PLAN forces one, COHORT_LOG=plan tells what was chosen and why.
#pragma once

#include "comm/local/control.h"
#include "comm/local/distance.h"
#include "comm/local/world.h"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cohort::comm::local {

/// What is read from a peer through the kernel at a time before it is folded: it stays in the second-level cache.
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
