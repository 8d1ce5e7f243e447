#include "launch/plan/plan.h"

#include <algorithm>
#include <cstddef>

namespace cohort::launch {

Result<Plan> make_plan(const std::vector<HostSlots>& hosts, int processes) {
  if (processes < 1) return fail(ErrorCode::InvalidArgument, "{} processes: at least 1 is needed", processes);
  if (processes > kMostProcesses) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once", processes,
                kMostProcesses);
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
  return plan;
}

std::string to_string(const Plan& plan) {
  std::string text = fmt::format("{} process{} on {} host{} (", plan.world_size, plan.world_size == 1 ? "" : "es",
                                 plan.machines, plan.machines == 1 ? "" : "s");
  for (const PlannedHost& host : plan.hosts) {
    if (host.first_local != 0) continue;  // it is a part of the one before
    if (host.index != 0) text += ", ";
    text += host.local_ranks == 1
                ? fmt::format("{}: rank {}", host.name, host.first_rank)
                : fmt::format("{}: ranks {}-{}", host.name, host.first_rank, host.first_rank + host.local_ranks - 1);
  }
  return text + ")";
}

}  // namespace cohort::launch
