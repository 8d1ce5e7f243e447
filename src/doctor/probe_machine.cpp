#include "base/parse.h"
#include "comm/cuda/nccl.h"
#include "doctor/probe.h"
#include "launch/start/starter.h"
#include "sys/cpus.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>

namespace cohort::doctor {
namespace {

namespace fs = std::filesystem;

std::string first_line_of_file(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// "0-3,8" -> 5; 0 if it is no list.
int count_list(const std::string& text) {
  int count = 0;
  std::stringstream parts(text);
  for (std::string part; std::getline(parts, part, ',');) {
    const auto dash = part.find('-');
    const auto low = parse_integer<int>(std::string_view(part).substr(0, dash));
    const auto high = dash == std::string::npos ? low : parse_integer<int>(std::string_view(part).substr(dash + 1));
    if (!low || !high || *high < *low || *high - *low > 1'000'000) return 0;
    count += *high - *low + 1;
  }
  return count;
}

/// The value after "NAME:" in a file of such lines.
std::string field(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(name)) continue;
    const auto colon = line.find(':');
    if (colon == std::string::npos) continue;
    const auto begin = line.find_first_not_of(" \t", colon + 1);
    return begin == std::string::npos ? std::string() : line.substr(begin);
  }
  return {};
}

std::int64_t kibibytes(const std::string& text) {
  return parse_integer<std::int64_t>(std::string_view(text).substr(0, text.find(' '))).value_or(0) * 1024;
}

/// This process's groups, from its own up to the root of the hierarchy.
std::vector<std::string> groups(const std::string& root, const std::string& controller) {
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

double quota(const std::string& root) {
  double least = 0;
  const auto take = [&least](double value) { least = least == 0 ? value : std::min(least, value); };
  for (const std::string& folder : groups(root, "")) {
    std::ifstream file(folder + "/cpu.max");
    double amount = 0, period = 0;
    if (file >> amount >> period && amount > 0 && period > 0) take(amount / period);
  }
  for (const std::string& folder : groups(root, "cpu")) {
    const auto amount = parse_integer<std::int64_t>(first_line_of_file(folder + "/cpu.cfs_quota_us"));
    const auto period = parse_integer<std::int64_t>(first_line_of_file(folder + "/cpu.cfs_period_us"));
    if (amount && period && *amount > 0 && *period > 0)
      take(static_cast<double>(*amount) / static_cast<double>(*period));
  }
  return least;
}

std::int64_t memory_limit(const std::string& root, std::int64_t memory) {
  std::int64_t least = 0;
  const auto take = [&](const std::string& path) {
    const auto value = parse_integer<std::int64_t>(first_line_of_file(path));
    // Without a limit version 1 has a number beyond all memory.
    if (value && *value > 0 && *value < memory) least = least == 0 ? *value : std::min(least, *value);
  };
  for (const std::string& folder : groups(root, "")) take(folder + "/memory.max");
  for (const std::string& folder : groups(root, "memory")) take(folder + "/memory.limit_in_bytes");
  return least;
}

std::int64_t limit_of(int which, bool hard) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(which), &limit) != 0) return kUnlimited;
  const rlim_t value = hard ? limit.rlim_max : limit.rlim_cur;
  return value == RLIM_INFINITY ? kUnlimited : static_cast<std::int64_t>(value);
}

std::string trimmed(std::string text) {
  while (!text.empty() && (text.back() == ' ' || text.back() == '\n' || text.back() == '\r')) text.pop_back();
  const auto begin = text.find_first_not_of(" \t");
  return begin == std::string::npos ? std::string() : text.substr(begin);
}

}  // namespace

LimitFacts probe_limits() {
  LimitFacts facts;
  facts.open_files = limit_of(RLIMIT_NOFILE, false);
  facts.open_files_most = limit_of(RLIMIT_NOFILE, true);
  facts.processes = limit_of(RLIMIT_NPROC, false);
  facts.locked_memory = limit_of(RLIMIT_MEMLOCK, false);
  facts.core = limit_of(RLIMIT_CORE, false);
  return facts;
}

MachineFacts probe_machine(const std::string& root) {
  MachineFacts facts;
  facts.processor = field(root + "/proc/cpuinfo", "model name");
  facts.processors = count_list(first_line_of_file(root + "/sys/devices/system/cpu/online"));
  facts.affinity = count_list(field(root + "/proc/self/status", "Cpus_allowed_list"));
  if (facts.affinity == 0) facts.affinity = facts.processors;
  facts.quota = quota(root);
  facts.cores = root.empty() ? sys::usable_cores() : facts.affinity;
  if (!root.empty() && facts.quota > 0)
    facts.cores = std::max(1, std::min(facts.affinity, static_cast<int>(facts.quota + 0.999)));
  facts.numa_nodes = count_list(first_line_of_file(root + "/sys/devices/system/node/online"));
  facts.threads = count_list(first_line_of_file(root + "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list"));
  std::ifstream(root + "/proc/loadavg") >> facts.load;
  facts.memory = kibibytes(field(root + "/proc/meminfo", "MemTotal"));
  facts.memory_available = kibibytes(field(root + "/proc/meminfo", "MemAvailable"));
  facts.memory_limit = memory_limit(root, facts.memory);
  struct statvfs shared {};
  const std::string folder = root + "/dev/shm";
  if (::statvfs(folder.c_str(), &shared) != 0) {
    facts.shared_error = errno_text(errno);
  } else {
    facts.shared = static_cast<std::int64_t>(shared.f_blocks) * static_cast<std::int64_t>(shared.f_frsize);
    facts.shared_free = static_cast<std::int64_t>(shared.f_bavail) * static_cast<std::int64_t>(shared.f_frsize);
  }
  std::error_code error;
  facts.infiniband = fs::is_directory(root + "/sys/class/infiniband", error) &&
                     fs::directory_iterator(root + "/sys/class/infiniband", error) != fs::directory_iterator();
  return facts;
}

void probe_gpus(MachineFacts& facts, const std::string& root, std::chrono::milliseconds limit) {
  // "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ..."
  std::stringstream words(field(root + "/proc/driver/nvidia/version", "NVRM version"));
  for (std::string word; words >> word;) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) {
      facts.gpu_driver = word;
      break;
    }
  }
  std::error_code error;
  std::vector<fs::path> folders;
  for (fs::directory_iterator each(root + "/proc/driver/nvidia/gpus", error), end; !error && each != end;
       each.increment(error))
    folders.push_back(each->path());
  std::sort(folders.begin(), folders.end());
  for (const fs::path& folder : folders) {
    std::string model = field((folder / "information").string(), "Model");
    facts.gpus.push_back(trimmed(model.empty() ? "GPU" : model));
  }
  // The kernel's part alone does not make a GPU work: the library has to fit, and the devices to be there.
  const bool there = !facts.gpus.empty() || !facts.gpu_driver.empty();
  auto asked = launch::capture({"nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"}, limit);
  if (!asked) {
    if (there && asked.error().code() == ErrorCode::Timeout) facts.gpu_error = asked.error().what();
    return;
  }
  if (asked->status != 0) {
    // Without the kernel's part it is only a command that was installed.
    if (there) facts.gpu_error = trimmed(asked->text.substr(0, asked->text.find('\n')));
    return;
  }
  std::vector<std::string> names;
  std::stringstream lines(asked->text);
  for (std::string line; std::getline(lines, line);) {
    const auto comma = line.rfind(',');
    if (comma == std::string::npos) continue;
    names.push_back(trimmed(line.substr(0, comma)));
    facts.gpu_driver = trimmed(line.substr(comma + 1));
  }
  if (!names.empty()) facts.gpus = names;
}

void probe_nccl(MachineFacts& facts) {
  if (facts.gpus.empty()) return;
  if (const auto& found = comm::cuda::Nccl::find()) {
    facts.nccl = comm::cuda::Nccl::text_of(found->version);
    facts.nccl_path = found->path;
  } else {
    facts.nccl_error = found.error().what();
  }
}

}  // namespace cohort::doctor
