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
      if (hosts[j].name == hosts[i].name)
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
    plan.hosts.push_back(std::move(planned));
  }
  return plan;
}

std::string to_string(const Plan& plan) {
  std::string text = fmt::format("{} process{} on {} host{} (", plan.world_size, plan.world_size == 1 ? "" : "es",
                                 plan.hosts.size(), plan.hosts.size() == 1 ? "" : "s");
  for (const PlannedHost& host : plan.hosts) {
    if (host.index != 0) text += ", ";
    text += host.ranks == 1
                ? fmt::format("{}: rank {}", host.name, host.first_rank)
                : fmt::format("{}: ranks {}-{}", host.name, host.first_rank, host.first_rank + host.ranks - 1);
  }
  return text + ")";
}

}  // namespace cohort::launch
