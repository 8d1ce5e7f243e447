// What `cohort bench` shall measure. Plain values, the same on all ranks; parsing is in options.cpp.
#pragma once

#include "bench/collective.h"

#include <cohort/collective_options.h>

#include <chrono>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::app::bench {

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

}  // namespace cohort::app::bench
