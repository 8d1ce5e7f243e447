#include "launch/plan/plan.h"

#include <algorithm>
#include <cstddef>

namespace cohort::launch {
namespace {

void place_others(Plan& plan, const OtherRoles& others) {
  const int hosts = static_cast<int>(plan.hosts.size());
  plan.servers = others.colocated ? hosts : others.servers;
  int next = 0;
  for (PlannedHost& host : plan.hosts) {
    host.first_server = next;
    host.servers = plan.servers / hosts + (host.index < plan.servers % hosts ? 1 : 0);
    next += host.servers;
  }
  plan.evaluator = plan.hosts.front().evaluator = others.evaluator;
}

}  // namespace

Result<Plan> make_plan(const std::vector<HostSlots>& hosts, int processes, const OtherRoles& others) {
  if (processes < 1) return fail(ErrorCode::InvalidArgument, "{} processes: at least 1 is needed", processes);
  if (others.servers < 0) return fail(ErrorCode::InvalidArgument, "{} servers: at least 0 are wanted", others.servers);
  if (processes > kMostProcesses || others.servers > kMostProcesses - processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once",
                static_cast<long long>(processes) + others.servers, kMostProcesses);
  }
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
  if (slots < processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes do not fit the {} slots of {} host{}", processes, slots,
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
  place_others(plan, others);
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
  text += fmt::format(" on {} host{} (", plan.machines, plan.machines == 1 ? "" : "s");
  for (const PlannedHost& host : plan.hosts) {
    if (host.first_local != 0) continue;  // it is a part of the one before
    if (host.index != 0) text += ", ";
    text += host.local_ranks == 1
                ? fmt::format("{}: rank {}", host.name, host.first_rank)
                : fmt::format("{}: ranks {}-{}", host.name, host.first_rank, host.first_rank + host.local_ranks - 1);
    std::vector<int> others = processes_of(plan, host);
    others.erase(others.begin(), others.begin() + host.ranks);
    if (!others.empty()) text += ", " + plan.roles().names_of(others);
  }
  return text + ")";
}

}  // namespace cohort::launch
