// How kernels write their results. Plain data: any thread may use it.
#pragma once

#include <cstdint>

namespace cohort::comm {

/// The bytes written are the same.
enum class Stores : std::uint8_t {
  Cached,       ///< ordinary stores
  NonTemporal,  ///< past the caches, for memory that a distant core reads next or that does not fit; fenced on return
};

}  // namespace cohort::comm
