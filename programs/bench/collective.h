// The operations that `cohort bench` knows: their names, a rank's input and output for a size, and the factors by which
// a time becomes a bandwidth. Values and pure functions; any thread.
// The plan of `cohort bench`. Plain values, the same on all ranks; and the words of the command, checked and made a
// plan.
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
  /// Every rank needs all others, so that calls in a row cannot run ahead of each other: their average is a latency.
  bool symmetric;
};

/// All of them, in the order of the enumeration.
const std::vector<Traits>& all_traits();
const Traits& traits_of(Collective collective);

/// Sizes of one rank's input and output.
struct Shape {
  std::size_t bytes = 0;    ///< the size column: the larger of input and output, in a rank that has both
  std::int64_t count = 0;   ///< the count column: elements of one part, or of all where there are no parts
  std::int64_t input = 0;   ///< elements
  std::int64_t output = 0;  ///< elements
  /// Elements that go to (come from) each rank, where there are parts.
  std::vector<std::int64_t> input_parts, output_parts;
  std::int64_t own_part = 0;  ///< first element of this rank's part: the place of the smaller buffer in place
};

/// `bytes` is cut to whole elements, and to whole parts where all parts are equal. In the _v forms rank r's part is as
/// (r + 1)^2 - r^2 to the others', i.e. parts grow; in all_to_all_v each rank's begin elsewhere.
Shape shape_of(Collective collective, std::size_t bytes, DType dtype, int rank, int ranks);

/// The factor between the algorithm's bandwidth (size over time) and the bus's, as nccl-tests define it
/// (doc/PERFORMANCE.md): independent of the number of ranks, comparable with the hardware's.
double bus_factor(Collective collective, int ranks);

/// The bytes that each rank has to read or write at least in ordinary memory, when the ranks share all work evenly.
double touched_bytes(Collective collective, std::size_t bytes, int ranks, bool in_place);

enum class MemoryKind { Arena, Heap, Cuda };
/// Hot: the same buffers again. Touched: their owner has just rewritten its input. Cold: they are in no cache.
enum class State { Hot, Touched, Cold };

std::string_view to_string(MemoryKind kind);
std::string_view to_string(State state);

struct Plan {
  std::vector<Collective> collectives = {Collective::AllReduce};
  std::vector<std::size_t> sizes;
  std::vector<DType> dtypes = {DType::Float32};
  std::vector<ReduceOp> ops = {ReduceOp::Sum};
  std::vector<MemoryKind> memories = {MemoryKind::Arena};
  std::optional<GpuSums> gpu_sums;  ///< of a GPU's memory; none: what COHORT_GPU_SUMS says
  State state = State::Hot;
  bool in_place = true;
  bool out_of_place = true;
  bool check = true;
  int root = 0;
  int iterations = 0;  ///< 0: as many as take a fifth of a second, 20 to 2000
  int warm_up = 5;
  std::chrono::milliseconds timeout = std::chrono::seconds(60);  ///< of one operation
};

/// As the command line has them.
struct Words {
  std::vector<std::string> collectives;
  std::string ranks;  ///< "2,4,8"; empty: one for each core
  std::string least = "8", most = "64M", factor = "2";
  std::string sizes;  ///< instead of the three
  std::string dtypes = "float32", ops = "sum", memory = "arena", state = "hot";
  std::string device = "cpu", gpu_sums;  ///< no gpu_sums: what COHORT_GPU_SUMS says
};

/// "8", "4K", "64M", "1G" (powers of 1024); InvalidArgument names the text.
Result<std::size_t> parse_size(const std::string& text);
/// Every name, number and size of `words`; the other members of the plan keep their defaults.
Result<Plan> plan_of(const Words& words);
/// Numbers of ranks, 1 to 1024 each.
Result<std::vector<int>> parse_ranks(const std::string& text);

}  // namespace cohort::app::bench
