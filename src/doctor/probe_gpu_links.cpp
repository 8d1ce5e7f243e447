#include "base/parse.h"
#include "doctor/gpu_links.h"
#include "doctor/probe.h"
#include "launch/start/starter.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <system_error>

namespace cohort::doctor {
namespace {

namespace fs = std::filesystem;

/// -1: not known.
int numa_node(const fs::path& device) {
  std::ifstream file(device / "numa_node");
  std::string line;
  std::getline(file, line);
  return parse_integer<int>(line).value_or(-1);
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error))
    found.push_back(each->path());
  std::sort(found.begin(), found.end());
  return found;
}

std::string topology(const std::vector<std::string>& options, std::chrono::milliseconds limit) {
  std::vector<std::string> words = {"nvidia-smi", "topo"};
  words.insert(words.end(), options.begin(), options.end());
  const auto asked = launch::capture(words, limit);
  return asked && asked->status == 0 ? asked->text : std::string();
}

}  // namespace

void probe_gpu_links(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit) {
  if (facts.gpus.empty()) return;
  for (const fs::path& gpu : entries(root + "/proc/driver/nvidia/gpus"))
    facts.gpu_nodes.push_back(numa_node(fs::path(root + "/sys/bus/pci/devices") / gpu.filename()));
  for (const char* kind : {"net", "infiniband"}) {
    for (const fs::path& card : entries(fs::path(root + "/sys/class") / kind)) {
      std::error_code error;
      if (fs::exists(card / "device", error)) facts.card_nodes[card.filename().string()] = numa_node(card / "device");
    }
  }
  if (facts.gpus.size() < 2) return;
  facts.gpu_links = describe_ways(parse_gpu_pairs(topology({"-m"}, limit)));
  facts.gpu_strangers = describe_strangers(parse_gpu_pairs(topology({"-p2p", "r"}, limit)));
}

}  // namespace cohort::doctor
