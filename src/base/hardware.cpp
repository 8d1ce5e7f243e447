#include "base/hardware.h"

#include "base/parse.h"

#include <fmt/format.h>

#include <sched.h>
#include <sys/utsname.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>

namespace cohort::sys {
namespace {

std::optional<std::string> first_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  if (!(file >> word)) return std::nullopt;
  return word;
}

std::optional<std::uint64_t> counter(const std::string& path) {
  std::ifstream file(path);
  std::string name;
  std::uint64_t value = 0;
  while (file >> name >> value) {
    if (name == "oom_kill") return value;
  }
  return std::nullopt;
}

}  // namespace

std::vector<std::string> control_groups(const std::string& controller, const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup" + (controller.empty() ? "" : "/" + controller);
  std::ifstream file(root + "/proc/self/cgroup");
  std::string group;
  for (std::string line; std::getline(file, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string names = "," + line.substr(first + 1, second - first - 1) + ",";
    if (controller.empty() ? names == ",," : names.find("," + controller + ",") != std::string::npos)
      group = line.substr(second + 1);
  }
  std::vector<std::string> out;
  while (group.size() > 1) {
    out.push_back(mount + group);
    group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
  }
  out.push_back(mount);
  return out;
}

double quota_cores(const std::string& root) {
  double least = 0;
  const auto take = [&least](double amount, double period) {
    if (amount > 0 && period > 0) least = least == 0 ? amount / period : std::min(least, amount / period);
  };
  for (const std::string& folder : control_groups("", root)) {
    std::ifstream file(folder + "/cpu.max");  // "max" is not a number
    double amount = 0, period = 0;
    if (file >> amount >> period) take(amount, period);
  }
  for (const std::string& folder : control_groups("cpu", root)) {
    const auto number = [&folder](const char* name) {
      return static_cast<double>(parse_integer<std::int64_t>(first_word(folder + name).value_or("")).value_or(0));
    };
    take(number("/cpu.cfs_quota_us"), number("/cpu.cfs_period_us"));
  }
  return least;
}

int usable_cores() {
  cpu_set_t set;
  int cores = 0;
  // More than 1024 cores do not fit into a cpu_set_t; then all cores are assumed.
  if (::sched_getaffinity(0, sizeof set, &set) == 0) cores = CPU_COUNT(&set);
  if (cores <= 0) cores = static_cast<int>(std::thread::hardware_concurrency());
  const double quota = quota_cores();
  if (quota > 0 && quota < cores) cores = static_cast<int>(quota + 0.999);
  return std::max(cores, 1);
}

std::vector<std::vector<int>> cores_of_process() {
  cpu_set_t set;
  std::vector<std::tuple<int, int, int>> found;  // package, core, number
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {};
  for (int number = 0; number < CPU_SETSIZE; ++number) {
    if (!CPU_ISSET(static_cast<std::size_t>(number), &set)) continue;
    const std::string folder = "/sys/devices/system/cpu/cpu" + std::to_string(number) + "/topology/";
    const auto place = [&folder](const char* file) {
      return parse_integer<int>(first_word(folder + file).value_or("")).value_or(-1);
    };
    const int core = place("core_id");
    // If the kernel does not say, each processor counts as a core.
    found.emplace_back(place("physical_package_id"), core < 0 ? number : core, number);
  }
  std::sort(found.begin(), found.end());
  std::vector<std::vector<int>> cores;
  for (std::size_t i = 0; i < found.size(); ++i) {
    const auto& [package, core, number] = found[i];
    const bool same = i > 0 && std::get<0>(found[i - 1]) == package && std::get<1>(found[i - 1]) == core;
    if (!same) cores.emplace_back();
    cores.back().push_back(number);
  }
  return cores;
}

std::optional<std::uint64_t> out_of_memory_kills() {
  for (const std::string& folder : control_groups("")) {
    if (const auto kills = counter(folder + "/memory.events")) return kills;
  }
  for (const std::string& folder : control_groups("memory")) {
    if (const auto kills = counter(folder + "/memory.oom_control")) return kills;
  }
  return counter("/proc/vmstat");
}

std::string processor_name(const std::string& root) {
  std::ifstream file(root + "/proc/cpuinfo");
  std::string maker;
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(": ");
    if (colon == std::string::npos) continue;
    const std::string value = line.substr(colon + 2);
    if (line.starts_with("model name")) return value;
    // On 64-bit ARM the kernel gives only numbers, no name.
    if (line.starts_with("CPU implementer")) maker = value;
    if (line.starts_with("CPU part")) return fmt::format("ARM, implementer {}, part {}", maker, value);
  }
  return {};
}

std::string host_name() {
  utsname name{};
  if (::uname(&name) != 0) return "localhost";
  const std::string node = name.nodename;
  const std::string first = node.substr(0, node.find('.'));
  return first.empty() ? "localhost" : first;
}

namespace {

namespace fs = std::filesystem;

bool is_nvidia(const fs::path& device) {
  const std::string name = device.filename();
  constexpr std::string_view kName = "nvidia";
  return name.starts_with(kName) && name.size() > kName.size() &&
         name.find_first_not_of("0123456789", kName.size()) == std::string::npos;
}

/// True if the node is a GPU. Nodes of processors have gpu_id 0.
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
