#include "observe/doctor/probe.h"

#include "base/env.h"
#include "base/hardware.h"
#include "base/json.h"
#include "base/parse.h"
#include "base/process.h"
#include "base/unique_fd.h"
#include "comm/gpu/nccl.h"
#include "launch/agent/agent.h"
#include "launch/output/text.h"
#include "launch/plan/program.h"
#include "launch/start/invitation.h"
#include "launch/start/starter.h"
#include "launch/version.h"
#include "net/interfaces.h"
#include "net/socket.h"
#include "rendezvous/identity.h"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <arpa/inet.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <thread>

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
  const auto numbers = parse_ranges(text, 1'000'000);
  return numbers ? static_cast<int>(numbers->size()) : 0;
}

/// Returns the value after "NAME:" in a file with such lines.
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

std::int64_t memory_limit(const std::string& root, std::int64_t memory) {
  std::int64_t least = 0;
  const auto take = [&](const std::string& path) {
    const auto value = parse_integer<std::int64_t>(first_line_of_file(path));
    // Version 1 gives a number beyond all memory if there is no limit.
    if (value && *value > 0 && *value < memory) least = least == 0 ? *value : std::min(least, *value);
  };
  for (const std::string& folder : sys::control_groups("", root)) take(folder + "/memory.max");
  for (const std::string& folder : sys::control_groups("memory", root)) take(folder + "/memory.limit_in_bytes");
  return least;
}

std::int64_t limit_of(int which, bool hard) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(which), &limit) != 0) return kUnlimited;
  const rlim_t value = hard ? limit.rlim_max : limit.rlim_cur;
  return value == RLIM_INFINITY ? kUnlimited : static_cast<std::int64_t>(value);
}

std::vector<fs::path> entries(const fs::path& folder) {
  std::error_code error;
  std::vector<fs::path> found;
  for (fs::directory_iterator each(folder, error), end; !error && each != end; each.increment(error))
    found.push_back(each->path());
  std::sort(found.begin(), found.end());
  return found;
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
  facts.processor = sys::processor_name(root);
  facts.processors = count_list(first_line_of_file(root + "/sys/devices/system/cpu/online"));
  facts.affinity = count_list(field(root + "/proc/self/status", "Cpus_allowed_list"));
  if (facts.affinity == 0) facts.affinity = facts.processors;
  facts.quota = sys::quota_cores(root);
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
  // The line is "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 ...".
  std::stringstream words(field(root + "/proc/driver/nvidia/version", "NVRM version"));
  for (std::string word; words >> word;) {
    if (word.find('.') != std::string::npos && word.find_first_not_of("0123456789.") == std::string::npos) {
      facts.gpu_driver = word;
      break;
    }
  }
  for (const fs::path& folder : entries(root + "/proc/driver/nvidia/gpus")) {
    std::string model = field((folder / "information").string(), "Model");
    facts.gpus.push_back(trimmed(model.empty() ? "GPU" : model));
  }
  // The kernel module alone does not make a GPU work: the library has to match, and the devices have to exist.
  const bool there = !facts.gpus.empty() || !facts.gpu_driver.empty();
  auto asked = launch::capture({"nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"}, limit);
  if (!asked) {
    if (there && asked.error().code() == ErrorCode::Timeout) facts.gpu_error = asked.error().what();
    return;
  }
  if (asked->status != 0) {
    // Without the kernel module, nvidia-smi is merely an installed command.
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

namespace {

// Reads only metadata, since an import of torch takes seconds. Prints one line, whatever Python's start-up files print.
constexpr const char* kScript = R"(
import sys
sys.path = [one for one in sys.path if one]  # not the folder in which it is started, whose json.py is the user's
import json, platform
out = {"python": platform.python_version(), "path": sys.executable}
try:
    from importlib.metadata import version
    for name in ("torch", "cohort"):
        try: out[name] = version(name)
        except Exception: pass
except Exception: pass
try:
    import cohort
    out["cohort"] = getattr(cohort, "__version__", out.get("cohort", ""))
except Exception: pass
print("cohort-doctor " + json.dumps(out))
)";
constexpr std::string_view kMark = "cohort-doctor ";

std::string first_line(const std::string& text) { return text.substr(0, text.find('\n')); }

void ask_python(SoftwareFacts& facts, const launch::Environment& environment, std::chrono::milliseconds limit) {
  auto python = launch::active_python(environment);
  if (!python) {
    facts.python_error = python.error().what();
    return;
  }
  facts.python_path = *python;
  const auto answer = launch::capture({*python, "-c", kScript}, limit);
  if (!answer) {
    facts.python_error = answer.error().what();
    return;
  }
  const auto at = answer->text.rfind(kMark);
  if (answer->status != 0 || at == std::string::npos) {
    facts.python_error = fmt::format("{} ended with status {}: {}", *python, answer->status, first_line(answer->text));
    return;
  }
  const auto said = parse_json_or_discard(first_line(answer->text.substr(at + kMark.size())));
  const auto text = [&said](const char* name) { return text_in(said, name); };
  facts.python = text("python");
  if (!text("path").empty()) facts.python_path = text("path");
  facts.torch = text("torch");
  facts.package = text("cohort");
}

/// Asks the process's own network namespace; /sys may show another's.
int mtu_of(const std::string& interface) {
  const sys::UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq request{};
  if (!socket || interface.size() >= sizeof request.ifr_name) return 0;
  interface.copy(request.ifr_name, interface.size());
  return ::ioctl(socket.get(), SIOCGIFMTU, &request) == 0 ? request.ifr_mtu : 0;
}

std::string file_system(const std::string& path) {
  struct Kind {
    unsigned long magic;
    const char* name;
  };
  constexpr std::array kKinds = {Kind{0x6969, "nfs"},         Kind{0x0bd00bd0, "lustre"}, Kind{0x47504653, "gpfs"},
                                 Kind{0xef53, "ext2/3/4"},    Kind{0x58465342, "xfs"},    Kind{0x01021994, "tmpfs"},
                                 Kind{0x794c7630, "overlay"}, Kind{0x9123683e, "btrfs"},  Kind{0x65735546, "fuse"},
                                 Kind{0xff534d42, "cifs"},    Kind{0x19830326, "beegfs"}, Kind{0x00c36400, "ceph"}};
  struct statfs found {};
  if (::statfs(path.c_str(), &found) != 0) return {};
  for (const Kind& kind : kKinds) {
    if (kind.magic == (static_cast<unsigned long>(found.f_type) & 0xffffffffUL)) return kind.name;
  }
  return fmt::format("{:#x}", static_cast<unsigned long>(found.f_type));
}

}  // namespace

SoftwareFacts probe_software(const launch::Environment& environment, std::chrono::milliseconds limit) {
  SoftwareFacts facts;
  facts.version = launch::kVersion;
  facts.build = launch::own_announcement().build;
  facts.path = launch::own_command().value_or("?");
  facts.commit = rendezvous::own_executable();
  ask_python(facts, environment, limit);
  if (launch::find_command("mpirun", environment)) {
    if (const auto answer = launch::capture({"mpirun", "--version"}, limit); answer && answer->status == 0)
      facts.mpi = first_line(answer->text);
  }
  // Hydra prints the version in a table.
  if (facts.mpi.starts_with("HYDRA")) facts.mpi = "MPICH (Hydra)";
  return facts;
}

FolderFacts probe_folder(const std::string& path) {
  FolderFacts facts;
  facts.path = path;
  launch::StartJob job;  // looked for like in a job from another host
  job.folder = path;
  job.path = "/proc/self/exe";
  if (const auto fine = launch::check_host(job); !fine) {
    facts.error = fine.error().what();
    return facts;
  }
  facts.writable = ::access(path.c_str(), W_OK | X_OK) == 0;
  struct statvfs space {};
  if (::statvfs(path.c_str(), &space) == 0)
    facts.free = static_cast<std::int64_t>(space.f_bavail) * static_cast<std::int64_t>(space.f_frsize);
  facts.file_system = file_system(path);
  return facts;
}

std::vector<NetworkFacts> probe_networks(std::string& error) {
  std::vector<NetworkFacts> out;
  auto all = net::interface_addresses();
  if (!all) {
    error = all.error().what();
    return out;
  }
  std::erase_if(*all, [](const net::InterfaceAddress& address) { return address.loopback; });
  std::vector<std::string> offered;
  if (auto chosen = net::offered_addresses(); chosen)
    offered = *std::move(chosen);
  else
    error = chosen.error().what();
  for (const net::InterfaceAddress& address : *all) {
    NetworkFacts facts;
    facts.interface = address.interface;
    facts.address = address.text;
    facts.mtu = mtu_of(address.interface);
    const auto place = std::find(offered.begin(), offered.end(), address.text);
    if (place != offered.end()) facts.offered = static_cast<int>(place - offered.begin());
    out.push_back(std::move(facts));
  }
  std::stable_sort(out.begin(), out.end(), [](const NetworkFacts& a, const NetworkFacts& b) {
    return static_cast<unsigned>(a.offered) < static_cast<unsigned>(b.offered);  // -1: last
  });
  return out;
}

std::vector<NameFacts> resolve_names(const std::vector<std::string>& names, std::chrono::milliseconds limit) {
  std::vector<NameFacts> out(names.size());
  const net::Deadline deadline = net::deadline_in(limit);
  const auto one = [&](std::size_t at) {
    NameFacts& facts = out[at];
    facts.name = names[at];
    const auto found = net::resolve({facts.name, 0}, deadline);
    if (!found) {
      facts.error = found.error().what();
      return;
    }
    for (const net::SocketAddress& address : *found) {
      std::array<char, INET6_ADDRSTRLEN> text{};
      const void* bytes = nullptr;
      if (address.storage.ss_family == AF_INET)
        bytes = &reinterpret_cast<const sockaddr_in&>(address.storage).sin_addr;
      else if (address.storage.ss_family == AF_INET6)
        bytes = &reinterpret_cast<const sockaddr_in6&>(address.storage).sin6_addr;
      if (bytes == nullptr || ::inet_ntop(address.storage.ss_family, bytes, text.data(), text.size()) == nullptr)
        continue;
      if (std::find(facts.addresses.begin(), facts.addresses.end(), text.data()) == facts.addresses.end())
        facts.addresses.emplace_back(text.data());
    }
  };
  // Resolves names in parallel, so that an unresponsive name service costs the deadline once, and not for each name.
  constexpr std::size_t kAtOnce = 16;
  {
    std::vector<std::jthread> threads;
    for (std::size_t first = 0; first < std::min(kAtOnce, names.size()); ++first) {
      threads.push_back(beside([&, first] {
        for (std::size_t at = first; at < names.size(); at += kAtOnce) one(at);
      }));
    }
  }
  return out;
}

std::map<std::string, std::string> variables_that_matter(const launch::Environment& environment) {
  constexpr std::array<std::string_view, 12> kNames = {
      env::kAlone,         env::kNetwork,        env::kPretendHosts,   env::kMasterAddr,   "CUDA_VISIBLE_DEVICES",
      env::kOmpNumThreads, "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "PYTHONPATH",
      "VIRTUAL_ENV",       "LD_LIBRARY_PATH"};
  std::map<std::string, std::string> out;
  for (const std::string_view name : kNames) {
    if (const auto value = environment.find(name)) out[std::string(name)] = *value;
  }
  return out;
}

namespace {

/// Returns 3 for "GPU3".
std::optional<int> number_of_gpu(std::string_view word) {
  if (!word.starts_with("GPU")) return std::nullopt;
  const auto number = parse_integer<int>(word.substr(3));
  return number && *number >= 0 ? std::optional(*number) : std::nullopt;
}

/// Ranks links, the fastest first: NVLink, one switch of PCIe, several, a host bridge, a node's bridges, processors.
std::size_t distance(std::string_view way) {
  constexpr std::array<std::string_view, 6> kWays = {"NV", "PIX", "PXB", "PHB", "NODE", "SYS"};
  const auto found =
      std::find_if(kWays.begin(), kWays.end(), [&](std::string_view each) { return way.starts_with(each); });
  return static_cast<std::size_t>(found - kWays.begin());
}

}  // namespace

std::vector<GpuPair> parse_gpu_pairs(std::string_view text) {
  std::vector<GpuPair> pairs;
  std::vector<int> columns;
  std::stringstream lines{std::string(text)};
  for (std::string line; std::getline(lines, line);) {
    std::stringstream words(launch::plain(line));  // colours and underlines are for terminals
    std::string word;
    std::vector<std::string> row;
    while (words >> word) row.push_back(word);
    if (row.empty()) continue;
    const auto own = number_of_gpu(row.front());
    if (!own) continue;
    if (columns.empty()) {  // the heading, with as many columns as adjacent names of GPUs
      for (const std::string& name : row) {
        const auto number = number_of_gpu(name);
        if (!number) break;
        columns.push_back(*number);
      }
      continue;
    }
    if (row.size() <= columns.size()) continue;
    for (std::size_t column = 0; column < columns.size(); ++column) {
      if (*own < columns[column]) pairs.push_back({*own, columns[column], row[column + 1]});
    }
  }
  return pairs;
}

std::string describe_ways(const std::vector<GpuPair>& pairs) {
  if (pairs.empty()) return {};
  const auto [best, worst] = std::minmax_element(
      pairs.begin(), pairs.end(), [](const GpuPair& a, const GpuPair& b) { return distance(a.way) < distance(b.way); });
  if (distance(best->way) == distance(worst->way)) return fmt::format("{} between all", best->way);
  return fmt::format("{} at best, {} between {} and {}", best->way, worst->way, worst->first, worst->second);
}

std::string describe_strangers(const std::vector<GpuPair>& pairs) {
  const auto is_stranger = [](const GpuPair& pair) { return pair.way != "OK"; };
  const auto first = std::find_if(pairs.begin(), pairs.end(), is_stranger);
  if (first == pairs.end()) return {};
  const auto all = std::count_if(pairs.begin(), pairs.end(), is_stranger);
  return fmt::format("{} and {} ({}){}", first->first, first->second, first->way,
                     all > 1 ? fmt::format(", and {} more", all - 1) : std::string());
}

namespace {

/// Returns the NUMA node of a device; -1: not known.
int numa_node(const fs::path& device) {
  return parse_integer<int>(first_line_of_file((device / "numa_node").string())).value_or(-1);
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
