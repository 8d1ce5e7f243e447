#include "launch/plan/plan.h"

#include <algorithm>
#include <cstddef>

namespace cohort::launch {
namespace {

/// The sum of their slots.
Result<long long> slots_of(const std::vector<HostSlots>& hosts) {
  long long slots = 0;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i].slots < 1)
      return fail(ErrorCode::InvalidArgument, "host {} has {} slots", hosts[i].name, hosts[i].slots);
    slots += hosts[i].slots;
    for (std::size_t j = 0; j < i; ++j) {
      if (hosts[j].name == hosts[i].name && hosts[i].machine.empty())
        return fail(ErrorCode::InvalidArgument, "host {} is named twice", hosts[i].name);
    }
  }
  return slots;
}

void spread_servers(Plan& plan, int servers) {
  const int hosts = static_cast<int>(plan.hosts.size());
  plan.servers = servers;
  int next = 0;
  for (PlannedHost& host : plan.hosts) {
    host.first_server = next;
    host.servers = plan.servers / hosts + (host.index < plan.servers % hosts ? 1 : 0);
    next += host.servers;
  }
}

Result<void> place_servers(Plan& plan, const OtherRoles& others) {
  const auto slots = slots_of(others.server_hosts);
  if (!slots) return tl::unexpected(slots.error());
  const long long wanted = others.servers > 0 ? others.servers : *slots;
  if (wanted > *slots) {
    return fail(ErrorCode::InvalidArgument,
                "{} servers do not fit the {} slots of --server-hosts: name more hosts, or HOST:N for several on one",
                wanted, *slots);
  }
  if (wanted > kMostProcesses - plan.world_size) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once",
                wanted + plan.world_size, kMostProcesses);
  }
  for (const HostSlots& host : others.server_hosts) {
    const int servers = std::min(host.slots, static_cast<int>(wanted) - plan.servers);
    if (servers == 0) break;
    auto known =
        std::find_if(plan.hosts.begin(), plan.hosts.end(), [&](const auto& one) { return one.name == host.name; });
    if (known == plan.hosts.end()) {
      PlannedHost planned;
      planned.name = host.name;
      planned.local = host.local;
      planned.index = static_cast<int>(plan.hosts.size());
      planned.first_rank = plan.world_size;
      planned.machine = plan.hosts.back().machine + 1;
      known = plan.hosts.insert(known, std::move(planned));
    }
    known->first_server = plan.servers;
    known->servers = servers;
    plan.servers += servers;
  }
  return {};
}

}  // namespace

Result<Plan> make_plan(const std::vector<HostSlots>& hosts, int processes, const OtherRoles& others) {
  if (processes < 1) return fail(ErrorCode::InvalidArgument, "{} processes: at least 1 is needed", processes);
  if (others.servers < 0) return fail(ErrorCode::InvalidArgument, "{} servers: at least 0 are wanted", others.servers);
  if (processes > kMostProcesses || others.servers > kMostProcesses - processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once",
                static_cast<long long>(processes) + others.servers, kMostProcesses);
  }
  const auto slots = slots_of(hosts);
  if (!slots) return tl::unexpected(slots.error());
  if (*slots < processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes do not fit the {} slots of {} host{}", processes, *slots,
                hosts.size(), hosts.size() == 1 ? "" : "s");
  }
  Plan plan;
  plan.world_size = processes;
  int next = 0;
  for (const HostSlots& host : hosts) {
    if (next == processes) break;
    PlannedHost planned;
    planned.name = host.name;
    planned.local = host.local;
    planned.index = static_cast<int>(plan.hosts.size());
    planned.first_rank = next;
    planned.ranks = std::min(host.slots, processes - next);
    next += planned.ranks;
    const std::size_t i = plan.hosts.size();
    const bool goes_on = i > 0 && !host.machine.empty() && hosts[i - 1].machine == host.machine;
    planned.machine = goes_on ? plan.machines - 1 : plan.machines++;
    if (goes_on) planned.first_local = plan.hosts.back().first_local + plan.hosts.back().ranks;
    plan.hosts.push_back(std::move(planned));
  }
  // What the parts of a host have in common.
  for (std::size_t begin = 0, end = 0; begin < plan.hosts.size(); begin = end) {
    std::vector<std::string> devices;
    int ranks = 0;
    for (end = begin; end < plan.hosts.size() && plan.hosts[end].machine == plan.hosts[begin].machine; ++end) {
      ranks += plan.hosts[end].ranks;
      for (const std::string& device : hosts[end].devices) {
        if (std::find(devices.begin(), devices.end(), device) == devices.end()) devices.push_back(device);
      }
    }
    for (std::size_t part = begin; part < end; ++part) {
      plan.hosts[part].local_ranks = ranks;
      plan.hosts[part].devices = devices;
    }
  }
  plan.evaluator = plan.hosts.front().evaluator = others.evaluator;
  if (others.server_hosts.empty()) {
    spread_servers(plan, others.colocated ? static_cast<int>(plan.hosts.size()) : others.servers);
  } else if (auto placed = place_servers(plan, others); !placed) {
    return tl::unexpected(placed.error());
  }
  return plan;
}

std::vector<int> processes_of(const Plan& plan, const PlannedHost& host) {
  std::vector<int> processes;
  for (int i = 0; i < host.ranks; ++i) processes.push_back(host.first_rank + i);
  for (int i = 0; i < host.servers; ++i) processes.push_back(plan.world_size + host.first_server + i);
  if (host.evaluator) processes.push_back(plan.world_size + plan.servers);
  return processes;
}

std::vector<std::string> hosts_of_processes(const Plan& plan) {
  std::vector<std::string> hosts(static_cast<std::size_t>(plan.roles().all()));
  for (const PlannedHost& host : plan.hosts) {
    for (const int process : processes_of(plan, host)) hosts[static_cast<std::size_t>(process)] = host.name;
  }
  return hosts;
}

std::string to_string(const Plan& plan) {
  std::string text = fmt::format("{} process{}", plan.world_size, plan.world_size == 1 ? "" : "es");
  if (plan.servers > 0)
    text += fmt::format("{}{} server{}", plan.evaluator ? ", " : " and ", plan.servers, plan.servers == 1 ? "" : "s");
  if (plan.evaluator) text += " and an evaluator";
  const int machines = plan.hosts.back().machine + 1;
  text += fmt::format(" on {} host{} (", machines, machines == 1 ? "" : "s");
  for (const PlannedHost& host : plan.hosts) {
    if (host.first_local != 0) continue;  // it is a part of the one before
    if (host.index != 0) text += ", ";
    text += host.name + ":";
    if (host.local_ranks == 1) text += fmt::format(" rank {}", host.first_rank);
    if (host.local_ranks > 1)
      text += fmt::format(" ranks {}-{}", host.first_rank, host.first_rank + host.local_ranks - 1);
    std::vector<int> others = processes_of(plan, host);
    others.erase(others.begin(), others.begin() + host.ranks);
    if (!others.empty()) text += (host.local_ranks > 0 ? ", " : " ") + plan.roles().names_of(others);
  }
  return text + ")";
}

}  // namespace cohort::launch
