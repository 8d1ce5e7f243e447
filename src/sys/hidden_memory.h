// Memory for a few small secrets: no core dump shows it (MADV_DONTDUMP), and it is not swapped out where the limits
// allow that. Never given back to the system. Without locks, so any thread may call, and a forked child too.
#pragma once

#include <cstddef>

namespace cohort::sys {

inline constexpr std::size_t kHiddenBytes = 64;

/// kHiddenBytes bytes, zeros. Throws std::bad_alloc.
void* take_hidden_memory();
/// Fills it with zeros first.
void give_hidden_memory(void* memory) noexcept;
/// For a forked child, which inherits all but the lock against swapping.
void lock_hidden_memory() noexcept;

}  // namespace cohort::sys
