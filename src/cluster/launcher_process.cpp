#include "cluster/launcher_process.h"

#include "sys/process.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <string_view>

namespace cohort::cluster {
namespace {

// As the kernel cuts names: 15 bytes.
constexpr std::array<std::string_view, 9> kDaemons = {"hydra_pmi_proxy", "pmi_proxy", "mpispawn",   "orted", "prted",
                                                      "prterun",         "mpirun",    "slurmstepd", "jsmd"};
constexpr int kMostAncestors = 256;

}  // namespace

std::optional<std::string> launcher_process() {
  pid_t pid = ::getppid();
  for (int i = 0; i < kMostAncestors && pid > 1; ++i) {
    const auto stat = sys::process_stat(pid);
    if (!stat) return std::nullopt;
    std::string name;
    std::getline(std::ifstream(fmt::format("/proc/{}/comm", pid)), name);
    if (std::find(kDaemons.begin(), kDaemons.end(), name) != kDaemons.end())
      return fmt::format("{} {} {}", name, pid, stat->start_ticks);
    pid = stat->parent;
  }
  return std::nullopt;
}

}  // namespace cohort::cluster
