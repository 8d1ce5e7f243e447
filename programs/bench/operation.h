// Inputs of ranks and expected results, for every type and reduction: small whole numbers that depend on the rank and
// the place, so that results are exact and a part at a wrong place shows. Pure functions; any thread.
// The memory that a rank's calls work on, and the state of the caches before each. Belongs to the rank's thread.
// Buffers live until the Buffers object goes, which has to be before the communicator does.
// One operation of the plan on one rank: calling it, and comparing the result with the expected one. Belongs to the
// rank's thread.
#pragma once

#include "bench/collective.h"

#include <cohort/communicator.h>
#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace cohort::app::bench {

/// Elements that repeat: element i of a buffer is element (first + i) mod kPeriod of its tile. A prime, so that
/// parts do not begin alike.
inline constexpr std::int64_t kPeriod = 251;

/// One period, encoded.
using Tile = std::vector<std::byte>;

/// Input of rank `rank` to a reduction by `op` (to an operation that only moves data: any op).
Tile input_tile(DType dtype, ReduceOp op, int rank);
/// The reduction over ranks 0 .. ranks - 1 of their input tiles.
Tile reduced_tile(DType dtype, ReduceOp op, int ranks);

void fill(void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);
/// Number of elements that differ from those `fill` would write.
std::int64_t count_wrong(const void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);

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

/// Memory for a rank's buffers: `first` for the input, or for both in place; `second` for the output.
struct Regions {
  Region first, second;
  int gpu = -1;  ///< of MemoryKind::Cuda
};

/// Places this rank's buffers. In place, the smaller one is its part of the larger.
Buffers place_buffers(Communicator& comm, Regions& regions, MemoryKind kind, Collective collective, const Shape& shape,
                      DType dtype, bool in_place);

/// Takes the lines out of all caches of all cores, or as much as can be done about it on this processor.
void drop_from_caches(const void* data, std::size_t bytes);

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  bool in_place = true;
  Shape shape;
  Buffers buffers;
  Device device;                    ///< where they are
  Buffers mirror;                   ///< of a GPU's buffers, in the host's memory; else the buffers themselves
  std::optional<GpuSums> gpu_sums;  ///< none: what COHORT_GPU_SUMS says
};

/// Calls it and waits for it. A send_recv is there and back between ranks 0 and 1; a sendrecv goes round the ring.
void call(Communicator& comm, const Operation& operation);

/// Writes this rank's values into its input, and values that must not remain into its output.
void write_input(const Communicator& comm, const Operation& operation);

/// Writes zeros into both: they stay zeros however often they are summed.
void clear(const Operation& operation);

/// After `write_input` and `call` on all ranks: elements of this rank's output that are not what they have to be.
std::int64_t wrong_elements(const Communicator& comm, const Operation& operation);

}  // namespace cohort::app::bench
