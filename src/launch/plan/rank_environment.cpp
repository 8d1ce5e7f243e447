#include "launch/plan/rank_environment.h"

#include <cohort/cluster_spec.h>

#include "base/env.h"
#include "base/files.h"
#include "base/parse.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

namespace cohort::launch {

bool belongs_to_host(std::string_view name) {
  static constexpr std::string_view kNames[] = {"HOME",
                                                "USER",
                                                "LOGNAME",
                                                "SHELL",
                                                "SHLVL",
                                                "PWD",
                                                "OLDPWD",
                                                "_",
                                                "MAIL",
                                                "HOST",
                                                "HOSTNAME",
                                                "TMPDIR",
                                                "TMP",
                                                "TEMP",
                                                "DISPLAY",
                                                "WAYLAND_DISPLAY",
                                                "XAUTHORITY",
                                                "DBUS_SESSION_BUS_ADDRESS",
                                                "CUDA_VISIBLE_DEVICES",
                                                "NVIDIA_VISIBLE_DEVICES",
                                                "ROCR_VISIBLE_DEVICES",
                                                "HIP_VISIBLE_DEVICES",
                                                "ZE_AFFINITY_MASK",
                                                "GPU_DEVICE_ORDINAL",
                                                "SLURMD_NODENAME",
                                                "SLURM_TOPOLOGY_ADDR"};
  if (std::ranges::find(kNames, name) != std::end(kNames)) return true;
  return name.starts_with("SSH_") || name.starts_with("XDG_") || name.starts_with("TMUX") || name.starts_with("STY");
}

Environment environment_there(const Environment& travelled, const Environment& own) {
  Environment out = travelled;
  for (const std::string& assignment : own.assignments()) {
    const std::string name = assignment.substr(0, assignment.find('='));
    if (belongs_to_host(name) && !travelled.find(name)) out.set(assignment);
  }
  return out;
}

Result<std::vector<std::vector<int>>> share_cores(const std::vector<std::vector<int>>& cores, int ranks) {
  std::vector<std::vector<int>> units = cores;
  const auto wanted = static_cast<std::size_t>(std::max(ranks, 1));
  if (units.size() < wanted) {
    units.clear();
    for (const auto& core : cores) {
      for (const int processor : core) units.push_back({processor});
    }
  }
  if (units.size() < wanted) {
    return fail(
        ErrorCode::InvalidArgument,
        "--bind core: {} ranks on this host, and {} processor{} that may be used; start fewer or leave --bind out",
        ranks, units.size(), units.size() == 1 ? "" : "s");
  }
  std::vector<std::vector<int>> shares(wanted);
  for (std::size_t rank = 0; rank < wanted; ++rank) {
    for (std::size_t i = rank * units.size() / wanted; i < (rank + 1) * units.size() / wanted; ++i) {
      shares[rank].insert(shares[rank].end(), units[i].begin(), units[i].end());
    }
    std::ranges::sort(shares[rank]);
  }
  return shares;
}

int threads_of(int cores, int ranks) { return std::max(1, cores / std::max(ranks, 1)); }

namespace {

constexpr std::uint32_t kLowest = 10000;
constexpr std::uint32_t kHighest = 65535;

std::string read_text(const char* path) { return sys::read_text(path).value_or(std::string()); }

sys::UniqueFd lock_name(std::uint16_t port) {
  sys::UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return fd;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const std::string name = fmt::format("cohort-port-{}", port);
  std::memcpy(address.sun_path + 1, name.data(), name.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), size) != 0) fd.reset();
  return fd;
}

bool bind_works(int family, const sockaddr* address, socklen_t size) {
  const sys::UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!fd) return true;  // without this protocol, nobody can hold the port
  const int on = 1;
  // Set as in every server, so that only a listener or another user of the port is in the way, not an old connection.
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  if (family == AF_INET6) ::setsockopt(fd.get(), IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
  return ::bind(fd.get(), address, size) == 0;
}

bool is_free(std::uint16_t port) {
  sockaddr_in v4{};
  v4.sin_family = AF_INET;
  v4.sin_port = htons(port);
  sockaddr_in6 v6{};
  v6.sin6_family = AF_INET6;
  v6.sin6_port = htons(port);
  return bind_works(AF_INET, reinterpret_cast<const sockaddr*>(&v4), sizeof v4) &&
         bind_works(AF_INET6, reinterpret_cast<const sockaddr*>(&v6), sizeof v6);
}

}  // namespace

std::vector<PortRange> usable_ports(std::string_view ephemeral, std::string_view reserved) {
  std::vector<bool> usable(kHighest + 1, false);
  std::fill(usable.begin() + kLowest, usable.end(), true);
  const auto exclude = [&usable](std::uint32_t first, std::uint32_t last) {
    for (std::uint32_t port = first; port <= std::min(last, kHighest); ++port) usable[port] = false;
  };
  const auto trimmed = [](std::string_view text) {
    const auto begin = text.find_first_not_of(" \t\n");
    if (begin == std::string_view::npos) return std::string_view();
    return text.substr(begin, text.find_last_not_of(" \t\n") - begin + 1);
  };
  const std::string_view range = trimmed(ephemeral);
  const auto gap = range.find_first_of(" \t");
  std::optional<std::uint32_t> low;
  std::optional<std::uint32_t> high;
  if (gap != std::string_view::npos) {
    low = parse_integer<std::uint32_t>(range.substr(0, gap));
    high = parse_integer<std::uint32_t>(trimmed(range.substr(gap)));
  }
  exclude(low.value_or(32768), high.value_or(60999));
  std::string_view rest = trimmed(reserved);
  while (!rest.empty()) {
    const auto comma = std::min(rest.find(','), rest.size());
    const std::string_view item = rest.substr(0, comma);
    const auto dash = std::min(item.find('-'), item.size());
    const auto first = parse_integer<std::uint32_t>(item.substr(0, dash));
    const auto last = dash == item.size() ? first : parse_integer<std::uint32_t>(item.substr(dash + 1));
    if (first && last) exclude(*first, *last);
    rest.remove_prefix(std::min(comma + 1, rest.size()));
  }
  std::vector<PortRange> ranges;
  for (std::uint32_t port = kLowest; port <= kHighest; ++port) {
    if (!usable[port]) continue;
    if (!ranges.empty() && ranges.back().second == port - 1)
      ranges.back().second = static_cast<std::uint16_t>(port);
    else
      ranges.emplace_back(static_cast<std::uint16_t>(port), static_cast<std::uint16_t>(port));
  }
  return ranges;
}

Result<PortLease> PortLease::of(std::uint16_t port) {
  sys::UniqueFd lock = lock_name(port);
  if (lock && is_free(port)) return PortLease(port, std::move(lock));
  return fail(ErrorCode::Unavailable, "port {} is in use", port);
}

Result<PortLease> PortLease::take(std::uint64_t seed) {
  const auto ranges = usable_ports(read_text("/proc/sys/net/ipv4/ip_local_port_range"),
                                   read_text("/proc/sys/net/ipv4/ip_local_reserved_ports"));
  std::uint64_t total = 0;
  for (const auto& [first, last] : ranges) total += static_cast<std::uint64_t>(last - first) + 1;
  for (std::uint64_t step = 0; step < total; ++step) {
    std::uint64_t index = (seed + step) % total;
    for (const auto& [first, last] : ranges) {
      const std::uint64_t size = static_cast<std::uint64_t>(last - first) + 1;
      if (index >= size) {
        index -= size;
        continue;
      }
      const auto port = static_cast<std::uint16_t>(first + index);
      sys::UniqueFd lock = lock_name(port);
      if (lock && is_free(port)) return PortLease(port, std::move(lock));
      break;
    }
  }
  return fail(ErrorCode::Unavailable,
              "no port for the job: none of the {} above {} that net.ipv4.ip_local_port_range leaves is free", total,
              kLowest);
}

namespace {

class Assignments {
 public:
  void set(std::string_view name, std::string_view value) { all_.push_back(fmt::format("{}={}", name, value)); }
  void set(std::string_view name, int value) { set(name, std::to_string(value)); }
  std::vector<std::string> take() { return std::move(all_); }

  /// Sets the variables of every process of a job.
  void set_job(const Plan& plan, const PlannedHost& host, int process, const JobFacts& facts) {
    const Roles roles = plan.roles();
    set(env::kRole, to_string(roles.role_of(process)));
    set(env::kRoleNumber, roles.number_of(process));
    set(env::kWorkers, plan.world_size);
    set(env::kServers, plan.servers);
    set(env::kJobId, facts.job_id);
    set(env::kRunDir, facts.run_folder);
    set(env::kStore, facts.store);
    set(env::kHost, host.name);
    set(env::kRestart, facts.restart);
    if (facts.host_timeout.count() > 0) set(env::kHostTimeout, static_cast<int>(facts.host_timeout.count()));
    if (!facts.tf_addresses.empty()) set(env::kTfConfig, tf_config(roles, facts.tf_addresses, process));
  }

 private:
  std::vector<std::string> all_;
};

}  // namespace

std::vector<std::string> rank_environment(const Plan& plan, const PlannedHost& host, int rank, const JobFacts& facts) {
  Assignments out;
  out.set(env::kRank, rank);
  out.set(env::kWorldSize, plan.world_size);
  out.set(env::kLocalRank, host.first_local + rank - host.first_rank);
  out.set(env::kLocalWorldSize, host.local_ranks);
  out.set(env::kMasterAddr, facts.master_address);
  out.set(env::kMasterPort, facts.master_port);
  out.set("GROUP_RANK", host.machine);
  out.set("GROUP_WORLD_SIZE", plan.machines);
  out.set("ROLE_RANK", rank);
  out.set("ROLE_WORLD_SIZE", plan.world_size);
  out.set("ROLE_NAME", "default");
  out.set("TORCHELASTIC_RUN_ID", facts.job_id);
  out.set("TORCHELASTIC_RESTART_COUNT", facts.restart);
  out.set("TORCHELASTIC_MAX_RESTARTS", facts.max_restarts);
  // Rank 0 opens torch's store at MASTER_PORT itself; nobody else listens there.
  out.set("TORCHELASTIC_USE_AGENT_STORE", "False");
  out.set_job(plan, host, rank, facts);
  if (facts.elastic) {
    out.set("COHORT_ELASTIC_TIMEOUT", std::to_string(facts.elastic->count()));
    out.set(env::kWorker, facts.first_worker + rank);
  }
  // For keras.distribution.initialize(): the address at which JAX's processes meet.
  out.set("KERAS_DISTRIBUTION_JOB_ADDRESSES", fmt::format("{}:{}", facts.master_address, facts.master_port));
  out.set("KERAS_DISTRIBUTION_NUM_PROCESSES", plan.world_size);
  out.set("KERAS_DISTRIBUTION_PROCESS_ID", rank);
  // Each rank sees all GPUs, so that LOCAL_RANK numbers them and GPUs of one host reach each other.
  if (!host.devices.empty()) out.set("CUDA_VISIBLE_DEVICES", fmt::format("{}", fmt::join(host.devices, ",")));
  return out.take();
}

std::vector<std::string> other_environment(const Plan& plan, const PlannedHost& host, int process,
                                           const JobFacts& facts) {
  Assignments out;
  out.set_job(plan, host, process, facts);
  if (facts.servers_may_die && plan.roles().role_of(process) == Role::Server) out.set(env::kServerRestart, 0);
  return out.take();
}

void remove_rank_variables(Environment& environment) {
  // Takes the variables that only ranks get from a plan of one rank.
  Environment ranks(rank_environment({.world_size = 1, .machines = 1}, {}, 0, {}));
  for (const std::string& of_all : other_environment({.world_size = 1, .servers = 1, .machines = 1}, {}, 1, {}))
    ranks.remove(of_all.substr(0, of_all.find('=')));
  for (const auto& [name, value] : ranks.variables()) environment.remove(name);
  for (const std::string& of_horovod : horovod_environment({.world_size = 1, .machines = 1}, {}, 0))
    environment.remove(of_horovod.substr(0, of_horovod.find('=')));
}

std::string tf_config(const Roles& roles, const std::vector<std::string>& addresses, int process) {
  const bool chief = roles.servers > 0;
  const auto task_of = [&](int one) -> std::pair<const char*, int> {
    if (roles.role_of(one) == Role::Evaluator) return {"evaluator", 0};
    if (roles.role_of(one) == Role::Server) return {"ps", roles.number_of(one)};
    if (!chief) return {"worker", one};
    return one == 0 ? std::pair("chief", 0) : std::pair("worker", one - 1);
  };
  std::map<std::string, std::vector<std::string>> jobs;
  for (std::size_t i = 0; i < addresses.size(); ++i) jobs[task_of(static_cast<int>(i)).first].push_back(addresses[i]);
  const auto [type, index] = task_of(process);
  return ClusterSpec(jobs).to_tf_config(type, index);
}

std::vector<std::string> horovod_environment(const Plan& plan, const PlannedHost& host, int rank) {
  const int local_rank = host.first_local + rank - host.first_rank;
  int cross_rank = 0;
  int cross_size = 0;
  for (const PlannedHost& other : plan.hosts) {
    if (other.first_local != 0 || other.local_ranks <= local_rank) continue;
    if (other.machine < host.machine) ++cross_rank;
    ++cross_size;
  }
  return {fmt::format("HOROVOD_HOSTNAME={}", host.name),
          fmt::format("HOROVOD_RANK={}", rank),
          fmt::format("HOROVOD_SIZE={}", plan.world_size),
          fmt::format("HOROVOD_LOCAL_RANK={}", local_rank),
          fmt::format("HOROVOD_LOCAL_SIZE={}", host.local_ranks),
          fmt::format("HOROVOD_CROSS_RANK={}", cross_rank),
          fmt::format("HOROVOD_CROSS_SIZE={}", cross_size),
          "HOROVOD_CONTROLLER=gloo",
          "HOROVOD_CPU_OPERATIONS=gloo"};
}

}  // namespace cohort::launch
