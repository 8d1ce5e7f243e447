// Inputs of ranks and expected results, for every type and reduction: small whole numbers that depend on the rank and
// the position, so that results are exact and misplaced parts are detected. Pure functions; any thread. The memory for
// a rank's calls, and the state of the caches before each call. Belongs to the rank's thread. Buffers live as long as
// the Regions object, which has to be destroyed before the communicator. One operation of the plan on one rank: calls
// it, and compares the result with the expected one. Belongs to the rank's thread.
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

/// Period of the elements: element i of a buffer is element (first + i) mod kPeriod of its tile. It is a prime, so that
/// parts begin differently.
inline constexpr std::int64_t kPeriod = 251;

/// One period of elements, encoded.
using Tile = std::vector<std::byte>;

/// Input of rank `rank` to a reduction by `op`. (If the operation only moves data, `op` does not matter.)
Tile input_tile(DType dtype, ReduceOp op, int rank);
/// The reduction of the input tiles of ranks 0 .. ranks - 1.
Tile reduced_tile(DType dtype, ReduceOp op, int ranks);

void fill(void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);
/// Number of elements that differ from those `fill` would write.
std::int64_t count_wrong(const void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first = 0);

/// Memory of each kind, zeroed and touched; grows if more is requested, and stays where it is otherwise.
class Region {
 public:
  /// Returns at least `bytes`, aligned to pages; for Cuda, on the GPU `gpu`. Throws Unavailable if there is not that
  /// much.
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
  std::byte* output = nullptr;  ///< in place: inside `input`, or around it
};

/// Memory for a rank's buffers: `first` for the input, or for both in place; `second` for the output.
struct Regions {
  Region first, second;
  int gpu = -1;  ///< GPU for MemoryKind::Cuda
};

/// Places this rank's buffers. In place, the smaller buffer is the rank's part of the larger.
Buffers place_buffers(Communicator& comm, Regions& regions, MemoryKind kind, Collective collective, const Shape& shape,
                      DType dtype, bool in_place);

/// Removes the lines from all caches of all cores, as far as this processor allows.
void drop_from_caches(const void* data, std::size_t bytes);

struct Operation {
  Collective collective = Collective::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  int root = 0;
  bool in_place = true;
  Shape shape;
  Buffers buffers;
  Device device;                    ///< device of the buffers
  Buffers mirror;                   ///< copies of GPU buffers in host memory; else the buffers themselves
  std::optional<GpuSums> gpu_sums;  ///< nullopt: COHORT_GPU_SUMS decides
};

/// Runs the operation and waits. A send_recv is a round trip between ranks 0 and 1; a sendrecv passes data around the
/// ring of ranks.
void call(Communicator& comm, const Operation& operation);

/// Writes this rank's values into its input, and values into its output that the operation has to overwrite.
void write_input(const Communicator& comm, const Operation& operation);

/// Writes zeros into input and output. They stay zeros in any number of sums.
void clear(const Operation& operation);

/// After `write_input` and `call` on all ranks, returns the number of wrong elements in this rank's output.
std::int64_t wrong_elements(const Communicator& comm, const Operation& operation);

}  // namespace cohort::app::bench
