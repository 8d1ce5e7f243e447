// The memory that a rank's calls work on, and the state of the caches before each. Belongs to the rank's thread.
// Buffers live until the Buffers object goes, which has to be before the communicator does.
#pragma once

#include "bench/plan.h"
#include "bench/values.h"

#include <cohort/communicator.h>

#include <cstddef>
#include <memory>

namespace cohort::app::bench {

/// Memory of each kind, zeroed and touched; grown when more is wanted, never moved by asking for less.
class Region {
 public:
  /// At least `bytes`, aligned to pages; Cuda: of the GPU `gpu`. Throws Unavailable when there is not so much.
  std::byte* get(Communicator& comm, MemoryKind kind, std::size_t bytes, int gpu);

 private:
  struct Free {
    void operator()(void* data) const noexcept;
  };
  Memory arena_, gpu_;
  std::unique_ptr<void, Free> heap_;
  std::size_t heap_bytes_ = 0;
};

/// One row's buffers on one rank.
struct Buffers {
  std::byte* input = nullptr;
  std::byte* output = nullptr;  ///< in place: inside `input`, or `input` inside it
};

/// What a rank's buffers are taken from: of an input, or of both in place; and of an output.
struct Regions {
  Region first, second;
  int gpu = -1;  ///< of MemoryKind::Cuda
};

/// Where this rank's buffers lie. In place, the smaller one is its part of the larger.
Buffers place_buffers(Communicator& comm, Regions& regions, MemoryKind kind, Collective collective, const Shape& shape,
                      DType dtype, bool in_place);

/// Takes the lines out of all caches of all cores, or as much as can be done about it on this processor.
void drop_from_caches(const void* data, std::size_t bytes);

}  // namespace cohort::app::bench
