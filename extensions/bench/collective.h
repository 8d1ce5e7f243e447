// The operations of `cohort bench`: their names, a rank's input and output for a size, and the factors from times to
// bandwidths. Also the plan of `cohort bench`, the same on all ranks, and its parsing from the command line. Plain
// values and pure functions; any thread.
#pragma once

#include "base/result.h"

#include <cohort/collective_options.h>
#include <cohort/dtype.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app::bench {

enum class Collective {
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  AllGatherV,
  Gather,
  Scatter,
  ReduceScatter,
  ReduceScatterV,
  AllToAll,
  AllToAllV,
  PingPong,
  Exchange,
  Barrier,
};

struct Traits {
  Collective collective;
  std::string_view name;
  bool reduces;       ///< has a reduction
  bool rooted;        ///< has a root
  bool in_place;      ///< can be done in place
  bool out_of_place;  ///< can be done out of place
  /// True if every rank needs data from all others. Then consecutive calls cannot overlap, and their average time is a
  /// latency.
  bool symmetric;
};

/// Traits of all operations, in the order of the enumeration.
const std::vector<Traits>& all_traits();
const Traits& traits_of(Collective collective);

/// Sizes of one rank's input and output.
struct Shape {
  std::size_t bytes = 0;    ///< for the size column: the larger of input and output, on a rank that has both
  std::int64_t count = 0;   ///< for the count column: elements of one part, or of the buffer if there are no parts
  std::int64_t input = 0;   ///< elements
  std::int64_t output = 0;  ///< elements
  /// Elements that go to each rank, and that come from each rank, if there are parts.
  std::vector<std::int64_t> input_parts, output_parts;
  std::int64_t own_part = 0;  ///< first element of this rank's part, where the smaller buffer lies if in place
};

/// Rounds `bytes` down to whole elements, and to whole parts if all parts are equal. In the _v forms rank r's part is
/// proportional to (r + 1)^2 - r^2, so parts grow; in all_to_all_v each rank begins with another part.
Shape shape_of(Collective collective, std::size_t bytes, DType dtype, int rank, int ranks);

/// The factor from algorithm bandwidth (size over time) to bus bandwidth, as nccl-tests define it (doc/PERFORMANCE.md).
/// Bus bandwidth does not depend on the number of ranks, so it can be compared with that of the hardware.
double bus_factor(Collective collective, int ranks);

/// The least number of bytes that each rank reads or writes in ordinary memory, if the ranks share all work evenly.
double touched_bytes(Collective collective, std::size_t bytes, int ranks, bool in_place);

enum class MemoryKind { Arena, Heap, Cuda };
/// Hot: calls reuse the same buffers. Touched: the owner has just rewritten its input. Cold: the buffers are in no
/// cache.
enum class State { Hot, Touched, Cold };

std::string_view to_string(MemoryKind kind);
std::string_view to_string(State state);

struct Plan {
  std::vector<Collective> collectives = {Collective::AllReduce};
  std::vector<std::size_t> sizes;
  std::vector<DType> dtypes = {DType::Float32};
  std::vector<ReduceOp> ops = {ReduceOp::Sum};
  std::vector<MemoryKind> memories = {MemoryKind::Arena};
  std::optional<GpuSums> gpu_sums;  ///< for GPU memory; nullopt: COHORT_GPU_SUMS decides
  State state = State::Hot;
  bool in_place = true;
  bool out_of_place = true;
  bool check = true;
  int root = 0;
  int iterations = 0;  ///< 0: as many as take a fifth of a second, 20 to 2000
  int warm_up = 5;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< limit of one operation
};

/// Values of the plan as the command line gives them, as text.
struct Words {
  std::vector<std::string> collectives;
  std::string ranks;  ///< "2,4,8"; empty: one for each core
  std::string least = "8", most = "64M", factor = "2";
  std::string sizes;  ///< replaces the three above
  std::string dtypes = "float32", ops = "sum", memory = "arena", state = "hot";
  std::string device = "cpu", gpu_sums;  ///< gpu_sums empty: COHORT_GPU_SUMS decides
};

/// Parses "8", "4K", "64M", "1G" (powers of 1024); fails with InvalidArgument, naming the text.
Result<std::size_t> parse_size(const std::string& text);
/// Parses every name, number and size of `words`; the other members of the plan keep their defaults.
Result<Plan> plan_of(const Words& words);
/// Parses numbers of ranks, 1 to 1024 each.
Result<std::vector<int>> parse_ranks(const std::string& text);

}  // namespace cohort::app::bench
