// Rows about limits, as a job's ranks have them on each host.
#include "doctor/check.h"

#include <algorithm>

namespace cohort::doctor {
namespace {

bool below(std::int64_t limit, std::int64_t wanted) { return limit != kUnlimited && limit < wanted; }

std::string number(std::int64_t limit) { return limit == kUnlimited ? "unlimited" : std::to_string(limit); }

void check_shared(const HostState& host, std::vector<Finding>& out) {
  const MachineFacts& machine = host.facts->machine;
  const std::string fix =
      fmt::format("on {}: mount -o remount,size=50% /dev/shm (containers: --shm-size=8g)", host.name);
  if (!machine.shared_error.empty()) {
    out.push_back({"shm", Level::Warning, {host.name}, {}, machine.shared_error, {}, fix});
    return;
  }
  // Containers have 64 MiB if nobody says otherwise.
  const bool small = machine.shared < 256 * kMiB;
  const bool full = machine.shared_free < 64 * kMiB;
  out.push_back({"shm",
                 small || full ? Level::Warning : Level::Ok,
                 {host.name},
                 {},
                 fmt::format("{} free of {}", size_text(machine.shared_free), size_text(machine.shared)),
                 {},
                 small  ? fix
                 : full ? fmt::format("on {}: what is left there of ended programs? ls -la /dev/shm", host.name)
                        : ""});
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
    out.push_back({"open-files",
                   too_few ? Level::Failed
                   : few   ? Level::Warning
                           : Level::Ok,
                   {host.name},
                   {},
                   limits.open_files == limits.open_files_most
                       ? number(limits.open_files)
                       : fmt::format("{}, up to {}", number(limits.open_files), number(limits.open_files_most)),
                   {},
                   too_few || few
                       ? fmt::format("on {}: ulimit -n 65536; for good: nofile in /etc/security/limits.conf", host.name)
                       : ""});
    const bool few_processes = below(limits.processes, 512 + 64 * std::int64_t{host.slots});
    out.push_back({"processes",
                   few_processes ? Level::Warning : Level::Ok,
                   {host.name},
                   {},
                   number(limits.processes),
                   {},
                   few_processes
                       ? fmt::format("on {}: ulimit -u 32768; for good: nproc in /etc/security/limits.conf", host.name)
                       : ""});
    const bool pinned = host.facts->machine.infiniband && below(limits.locked_memory, 1024 * kMiB);
    out.push_back(
        {"locked",
         pinned ? Level::Warning : Level::Ok,
         {host.name},
         {},
         fmt::format("{}{}", size_text(limits.locked_memory),
                     host.facts->machine.infiniband ? "; there is InfiniBand" : "; no InfiniBand that needs it"),
         {},
         pinned ? fmt::format("on {}: memlock unlimited in /etc/security/limits.conf", host.name) : ""});
    out.push_back({"core-dumps",
                   Level::Ok,
                   {host.name},
                   {},
                   limits.core == 0 ? "off" : "up to " + size_text(limits.core),
                   {},
                   {}});
    check_shared(host, out);
  }
}

}  // namespace cohort::doctor
