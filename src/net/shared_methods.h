// What an RpcClient and an RpcServer say to each other over the connection about calls in shared memory.
#pragma once

#include "base/records.h"
#include "net/shared_calls.h"

#include <cstdint>
#include <optional>
#include <string>

namespace cohort::net {

inline constexpr std::uint8_t kShareMemory = 0xFF;  ///< a call: answered with a segment's descriptor, or why not
inline constexpr std::uint8_t kRing = 0xFE;         ///< there are calls in shared memory; without an answer

/// The answer to kShareMemory.
struct SharedMemory {
  std::optional<Error> refused = {};
  // Over TCP: at this name in the abstract Unix namespace of this host it would be different.
  std::string host = {};
  std::string unix_name = {};
};
template <class M, class A>
void visit_fields(M& m, A& a, const SharedMemory*) {
  a(m.refused, m.host, codec::longest(m.unix_name, 100));
}

// Calls in shared memory are told from others by the numbers that they have here.

inline constexpr std::uint64_t kShared = std::uint64_t{1} << 63;
inline bool is_shared(std::uint64_t id) noexcept { return (id & kShared) != 0; }
inline std::uint64_t number_of(SharedCallId id) noexcept { return kShared | id.value(); }

}  // namespace cohort::net
