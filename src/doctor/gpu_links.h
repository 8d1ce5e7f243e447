// How a host's GPUs reach each other, as `nvidia-smi topo` prints it: a matrix whose rows and columns are GPUs, network
// cards and what processors are near. Pure; any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

struct GpuPair {
  int first = 0;
  int second = 0;
  std::string way;  ///< of -m: "NV18", "PIX", "PXB", "PHB", "NODE", "SYS"; of -p2p r: "OK", or why not: "CNS", ...
};
/// Each pair once. Empty if the text is no such matrix, or has one GPU.
std::vector<GpuPair> parse_gpu_pairs(std::string_view text);

/// "NV18 between all", or "NV18 at best, SYS between 0 and 4"; nothing of no pairs.
std::string describe_ways(const std::vector<GpuPair>& pairs);
/// "0 and 1 (CNS)": the first pair that may not read each other's memory, and how many more; nothing if all may.
std::string describe_strangers(const std::vector<GpuPair>& pairs);

}  // namespace cohort::doctor
