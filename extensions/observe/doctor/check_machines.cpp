// Rows about a host's hardware: cores, memory, GPUs; and whether all hosts are alike.

#include "observe/doctor/check.h"
#include "rendezvous/detect.h"

#include <algorithm>
#include <set>

namespace cohort::doctor {
namespace {

void check_cores(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  std::string text = fmt::format("{} usable of {}", machine.cores, machine.processors);
  const bool few = host.slots > machine.cores;
  if (few) text = fmt::format("{} ranks on {} usable cores (of {})", host.slots, machine.cores, machine.processors);
  if (machine.affinity < machine.processors) text += fmt::format("; affinity leaves {}", machine.affinity);
  add(out, "cores", few ? Level::Warning : Level::Ok, host.name, text,
      fmt::format("-H {}:{}; or ask the scheduler for more (`taskset -p $$` shows what it left)", host.name,
                  machine.cores));
  if (machine.quota > 0 && machine.quota < machine.affinity) {
    const bool whole = machine.quota >= host.slots;
    add(out, "quota", Level::Warning, host.name,
        fmt::format("the control group gives {:g} of {} cores' time", machine.quota, machine.affinity),
        whole ? "bind the container to whole cores (--cpuset-cpus) instead of a quota (--cpus)"
              : fmt::format("a larger quota, or at most {:.0f} ranks", std::max(1.0, machine.quota)));
  }
  // Allows for the load that the doctor and its children cause.
  const bool busy = machine.cores > 0 && machine.load > 0.5 * machine.cores + 1;
  add(out, "load", busy ? Level::Warning : Level::Ok, host.name, fmt::format("{:.1f}", machine.load),
      host.here ? "what runs there? top -bn1" : fmt::format("what runs there? ssh {} top -bn1", host.name));
  if (machine.numa_nodes > 0 || machine.threads > 0) {
    add(out, "numa", Level::Ok, host.name,
        fmt::format("{} NUMA node{}, {} thread{} a core", std::max(1, machine.numa_nodes),
                    machine.numa_nodes > 1 ? "s" : "", std::max(1, machine.threads), machine.threads > 1 ? "s" : ""));
  }
}

void check_memory(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  if (machine.memory <= 0) return;
  std::int64_t left = machine.memory_available;
  std::string text = fmt::format("{} of {} available", size_text(machine.memory_available), size_text(machine.memory));
  if (machine.memory_limit > 0) {
    text += fmt::format("; the control group may have {}", size_text(machine.memory_limit));
    left = std::min(left, machine.memory_limit);
  }
  // A process with torch needs about 512 MiB before it does anything.
  const bool little = left < std::max(512 * kMiB * host.slots, machine.memory / 20);
  add(out, "memory", little ? Level::Warning : Level::Ok, host.name, text,
      fmt::format("fewer ranks on {}, or end what uses it: ssh {} ps aux --sort -rss", host.name, host.name));
}

/// Number of GPUs that a rank would see, limited by CUDA_VISIBLE_DEVICES.
int visible_gpus(const HostFacts& facts) {
  const auto all = static_cast<int>(facts.machine.gpus.size());
  const auto chosen = facts.environment.find("CUDA_VISIBLE_DEVICES");
  if (chosen == facts.environment.end()) return all;
  return rendezvous::devices_named(chosen->second);
}

void check_gpu_pairs(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  if (!machine.gpu_strangers.empty()) {
    add(out, "gpu-pairs", Level::Warning, host.name,
        fmt::format("GPUs may not read each other's memory: {}{}{}", machine.gpu_strangers,
                    machine.gpu_links.empty() ? "" : "; ", machine.gpu_links),
        "nvidia-smi topo -p2p r; IOMMU and ACS off, or GPUs of one switch");
  } else if (!machine.gpu_links.empty()) {
    add(out, "gpu-pairs", Level::Ok, host.name, machine.gpu_links);
  }
}

/// Reports GPUs with no network card near them, though another NUMA node has one.
void check_gpu_cards(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  std::set<int> with_cards;
  std::string cards;
  for (const auto& [name, node] : machine.card_nodes) {
    if (node < 0) return;  // the node is not known
    with_cards.insert(node);
    cards += fmt::format("{}{} (node {})", cards.empty() ? "" : ", ", name, node);
  }
  std::string far;
  for (std::size_t gpu = 0; gpu < machine.gpu_nodes.size(); ++gpu) {
    if (machine.gpu_nodes[gpu] >= 0 && !with_cards.contains(machine.gpu_nodes[gpu]))
      far += fmt::format("{}{} (node {})", far.empty() ? "" : ", ", gpu, machine.gpu_nodes[gpu]);
  }
  if (with_cards.empty() || far.empty()) return;
  add(out, "gpu-cards", Level::Warning, host.name,
      fmt::format("GPUs far from network cards: {}; cards: {}", far, cards),
      "a card for each node, or fewer ranks, with CUDA_VISIBLE_DEVICES those near it");
}

void check_gpus(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  if (!machine.gpu_error.empty()) {
    add(out, "gpus", Level::Failed, host.name,
        fmt::format("driver {}: nvidia-smi: {}", machine.gpu_driver, machine.gpu_error),
        "the driver's module and library have to be of one version: reboot after an upgrade");
    return;
  }
  if (machine.gpus.empty()) return;
  add(out, "gpus", Level::Ok, host.name,
      fmt::format("{} x {}, driver {}; the rank with LOCAL_RANK r is to use cuda:r", machine.gpus.size(),
                  machine.gpus.front(), machine.gpu_driver));
  if (const int seen = visible_gpus(*host.facts); seen > 0 && host.slots > seen) {
    add(out, "gpu-shared", Level::Warning, host.name,
        fmt::format("{} ranks for {} GPU{}", host.slots, seen, seen == 1 ? "" : "s"),
        fmt::format("-H {}:{}", host.name, seen));
  }
  if (machine.nccl.empty() && machine.nccl_error.empty()) return;
  const bool found = machine.nccl_error.empty();
  add(out, "nccl", found ? Level::Ok : Level::Warning, host.name,
      found ? fmt::format("{} ({})", machine.nccl, machine.nccl_path) : machine.nccl_error,
      "pip install nvidia-nccl-cu12 (or -cu13, as the driver is)");
}

/// Reports values that differ as "8 (a, b), 4 (c)", with the fewest hosts first.
template <class Value>
void compare(const Checkup& checkup, const char* what, Value value, std::vector<Finding>& out) {
  std::vector<std::pair<std::string, std::vector<std::string>>> groups;
  std::vector<std::string> hosts;
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const std::string text = value(host.facts->machine);
    auto found = std::find_if(groups.begin(), groups.end(), [&text](const auto& group) { return group.first == text; });
    if (found == groups.end()) found = groups.insert(groups.end(), {text, {}});
    found->second.push_back(host.name);
    hosts.push_back(host.name);
  }
  if (groups.size() < 2) return;
  std::string text;
  for (const auto& [each, some] : groups)
    text += fmt::format("{}{} ({}{})", text.empty() ? "" : ", ", each, some.front(),
                        some.size() > 1 ? fmt::format(" and {} more", some.size() - 1) : "");
  out.push_back({"alike",
                 Level::Warning,
                 hosts,
                 {},
                 fmt::format("{}: {}", what, text),
                 {},
                 "leave the slower ones out, or give them fewer ranks: -H a:4,b:2"});
}

}  // namespace

void check_machines(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    check_cores(host, out);
    check_memory(host, out);
    check_gpus(host, out);
    check_gpu_pairs(host, out);
    if (checkup.hosts.size() > 1) check_gpu_cards(host, out);
  }
  compare(
      checkup, "cores", [](const MachineFacts& m) { return std::to_string(m.cores); }, out);
  compare(
      checkup, "processor", [](const MachineFacts& m) { return m.processor.empty() ? "?" : m.processor; }, out);
  // Compares whole GiB, since the kernel's own part differs.
  compare(
      checkup, "memory", [](const MachineFacts& m) { return fmt::format("{} GiB", (m.memory + 512 * kMiB) >> 30); },
      out);
  compare(
      checkup, "GPUs",
      [](const MachineFacts& m) {
        return m.gpus.empty() ? std::string("none") : fmt::format("{} x {}", m.gpus.size(), m.gpus.front());
      },
      out);
  compare(
      checkup, "GPU driver", [](const MachineFacts& m) { return m.gpu_driver.empty() ? "none" : m.gpu_driver; }, out);
  compare(
      checkup, "NCCL", [](const MachineFacts& m) { return m.nccl.empty() ? "none" : m.nccl; }, out);
}

namespace {

// Rows about the limits of a job's ranks on each host.

bool below(std::int64_t limit, std::int64_t wanted) { return limit != kUnlimited && limit < wanted; }

std::string number(std::int64_t limit) { return limit == kUnlimited ? "unlimited" : std::to_string(limit); }

void check_shared(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  const std::string fix =
      fmt::format("on {}: mount -o remount,size=50% /dev/shm (containers: --shm-size=8g)", host.name);
  if (!machine.shared_error.empty()) {
    add(out, "shm", Level::Warning, host.name, machine.shared_error, fix);
    return;
  }
  // Containers have 64 MiB by default.
  const bool small = machine.shared < 256 * kMiB;
  const bool full = machine.shared_free < 64 * kMiB;
  add(out, "shm", small || full ? Level::Warning : Level::Ok, host.name,
      fmt::format("{} free of {}", size_text(machine.shared_free), size_text(machine.shared)),
      small ? fix : fmt::format("on {}: what is left there of ended programs? ls -la /dev/shm", host.name));
}

}  // namespace

void check_limits(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const LimitFacts& limits = host.facts->limits;
    // An agent has five descriptors for each rank.
    const std::int64_t needed = 64 + 5 * std::int64_t{host.slots};
    const bool too_few = below(limits.open_files_most, needed);
    const bool few = below(limits.open_files, std::max<std::int64_t>(1024, needed));
    add(out, "open-files",
        too_few ? Level::Failed
        : few   ? Level::Warning
                : Level::Ok,
        host.name,
        limits.open_files == limits.open_files_most
            ? number(limits.open_files)
            : fmt::format("{}, up to {}", number(limits.open_files), number(limits.open_files_most)),
        fmt::format("on {}: ulimit -n 65536; for good: nofile in /etc/security/limits.conf", host.name));
    const bool few_processes = below(limits.processes, 512 + 64 * std::int64_t{host.slots});
    add(out, "processes", few_processes ? Level::Warning : Level::Ok, host.name, number(limits.processes),
        fmt::format("on {}: ulimit -u 32768; for good: nproc in /etc/security/limits.conf", host.name));
    const bool pinned = host.facts->machine.infiniband && below(limits.locked_memory, 1024 * kMiB);
    add(out, "locked", pinned ? Level::Warning : Level::Ok, host.name,
        fmt::format("{}{}", size_text(limits.locked_memory),
                    host.facts->machine.infiniband ? "; there is InfiniBand" : "; no InfiniBand that needs it"),
        fmt::format("on {}: memlock unlimited in /etc/security/limits.conf", host.name));
    add(out, "core-dumps", Level::Ok, host.name, limits.core == 0 ? "off" : "up to " + size_text(limits.core));
    check_shared(host, out);
  }
}

}  // namespace cohort::doctor
