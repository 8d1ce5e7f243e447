// Reading and writing memory as fast as one core can, to learn what the machine allows. Any thread, own memory.
#pragma once

#include <cstddef>

namespace cohort::app::bench {

/// The ways that are tried: into how many streams the buffer is cut, which are walked side by side. One stream does not
/// reach the machine's rate: prefetchers stop at page ends and follow each stream with few requests.
inline constexpr std::size_t kStreams[] = {1, 4, 8, 16};

/// Adds 1 to every float32 of `data`, in as many streams. Bytes beyond whole vectors of all streams are left alone.
void read_and_write(void* data, std::size_t bytes, std::size_t streams);

}  // namespace cohort::app::bench
