#include "sys/gpus.h"

#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>

namespace cohort::sys {
namespace {

namespace fs = std::filesystem;

bool is_nvidia(const fs::path& device) {
  const std::string name = device.filename();
  constexpr std::string_view kName = "nvidia";
  return name.starts_with(kName) && name.size() > kName.size() &&
         name.find_first_not_of("0123456789", kName.size()) == std::string::npos;
}

/// Nodes of processors have the number 0.
bool is_amd(const fs::path& node) {
  std::ifstream file(node / "gpu_id");
  long number = 0;
  return (file >> number) && number != 0;
}

int count(const fs::path& folder, bool (*is_one)(const fs::path&)) {
  std::error_code error;
  int found = 0;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error))
    found += is_one(entry->path()) ? 1 : 0;
  return found;
}

}  // namespace

int gpus_here(const std::string& root) {
  const int nvidia = count(fs::path(root) / "dev", is_nvidia);
  return nvidia > 0 ? nvidia : count(fs::path(root) / "sys/class/kfd/kfd/topology/nodes", is_amd);
}

}  // namespace cohort::sys
