// A peer's input and output: allocated and touched once, and put into the state that the task asks for before each
// call. Belongs to the loop's thread.
#pragma once

#include "peer_values.h"

#include <emmintrin.h>

#include <algorithm>

namespace peers {

struct Buffers {
  void* input = nullptr;
  void* output = nullptr;  ///< the same as `input` where the operation is in place
  std::size_t input_count = 0, output_count = 0;
};

/// `allocate(bytes, memory)` gives memory that lives as long as the library.
template <class Library>
class BufferPool {
 public:
  explicit BufferPool(Library& library) : library_(library) {}

  /// All reductions over all ranks, broadcasts and messages work in place; what has parts has a buffer for each side.
  Buffers get(const Task& task) {
    const std::size_t count = count_of(task, library_.size());
    const std::size_t all = count * static_cast<std::size_t>(library_.size());
    Buffers buffers;
    buffers.input_count = count;
    buffers.output_count = count;
    bool in_place = false;
    switch (task.collective) {
      case Collective::AllReduce:
      case Collective::Broadcast:
      case Collective::SendRecv:
      case Collective::Barrier: in_place = true; break;
      case Collective::AllGather:
      case Collective::Gather: buffers.output_count = all; break;
      case Collective::Scatter:
      case Collective::ReduceScatter: buffers.input_count = all; break;
      case Collective::AllToAll: buffers.input_count = buffers.output_count = all; break;
      case Collective::Reduce: break;
    }
    const std::size_t bytes = std::max<std::size_t>(task.bytes, 64);
    buffers.input = memory(0, task.memory, bytes);
    buffers.output = in_place ? buffers.input : memory(1, task.memory, bytes);
    return buffers;
  }

 private:
  struct Held {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  void* memory(int side, Memory kind, std::size_t bytes) {
    Held& held = held_[side][static_cast<int>(kind)];
    if (held.bytes < bytes) {
      held.data = library_.allocate(bytes, kind);
      held.bytes = bytes;
      std::memset(held.data, 0, bytes);
    }
    return held.data;
  }

  Library& library_;
  Held held_[2][2];
};

/// Takes every line out of all caches of all cores, which no array of any size does as surely.
inline void drop_from_caches(const void* data, std::size_t bytes) {
  for (std::size_t at = 0; at < bytes; at += 64) _mm_clflush(static_cast<const char*>(data) + at);
  _mm_mfence();
}

inline void prepare(const Task& task, const Buffers& buffers, const Pattern& own) {
  const std::size_t element = size_of(task.type);
  if (task.state == State::Hot) return;
  fill(buffers.input, buffers.input_count, task.type, own);
  if (task.state != State::Cold) return;
  drop_from_caches(buffers.input, buffers.input_count * element);
  if (buffers.output != buffers.input) drop_from_caches(buffers.output, buffers.output_count * element);
}

}  // namespace peers
