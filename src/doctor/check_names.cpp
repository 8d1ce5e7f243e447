// Rows about names: does each host know its own and those of the others, and do they mean the right addresses.
#include "doctor/check.h"
#include "launch/start/hosts.h"
#include "net/address.h"

#include <algorithm>

namespace cohort::doctor {
namespace {

bool is_number(const std::string& name) {
  return name.find(':') != std::string::npos || name.find_first_not_of("0123456789.") == std::string::npos;
}

bool has_address(const HostFacts& facts, const std::string& address) {
  return std::any_of(facts.networks.begin(), facts.networks.end(),
                     [&address](const NetworkFacts& network) { return network.address == address; });
}

std::string joined(const std::vector<std::string>& words) { return fmt::format("{}", fmt::join(words, ", ")); }

std::string good_address(const HostFacts& facts) {
  return facts.networks.empty() ? "ADDRESS" : facts.networks.front().address;
}

void check_own_name(const HostState& host, const NameFacts& name, bool several, std::vector<Finding>& out) {
  Finding finding{"own-name", Level::Ok, {host.name}, {}, {}, {}, {}};
  const std::string fix = fmt::format("on {}, in /etc/hosts: {} {}", host.name, good_address(*host.facts), name.name);
  if (name.addresses.empty()) {
    finding.level = Level::Warning;
    finding.found = fmt::format("{} does not resolve on itself", name.name);
    finding.fix = fix;
  } else if (std::all_of(name.addresses.begin(), name.addresses.end(), net::is_loopback_name)) {
    finding.level = several ? Level::Warning : Level::Ok;
    finding.found = fmt::format("{} means {} there, which is loopback", name.name, joined(name.addresses));
    if (several) finding.fix = fix + fmt::format(" (instead of the line with {})", name.addresses.front());
  } else {
    finding.found = fmt::format("{} means {}", name.name, joined(name.addresses));
  }
  out.push_back(std::move(finding));
}

}  // namespace

void check_names(const Checkup& checkup, std::vector<Finding>& out) {
  for (const NameFacts& name : checkup.names_here) {
    if (is_number(name.name)) continue;
    const bool known = !name.addresses.empty();
    out.push_back({"names",
                   known ? Level::Ok : Level::Warning,
                   {},
                   {},
                   known ? fmt::format("{} means {} here", name.name, joined(name.addresses))
                         : fmt::format("{} does not resolve here", name.name),
                   known ? "" : "it is reached only if ~/.ssh/config or the starter knows its address",
                   known ? "" : fmt::format("a line ADDRESS {} in /etc/hosts, or DNS", name.name)});
  }
  for (const HostState& host : checkup.hosts) {
    if (!host.facts || host.facts->names.empty()) continue;
    check_own_name(host, host.facts->names.front(), checkup.several_hosts, out);
    std::vector<std::string> unknown, wrong;
    int good = 0;
    for (const HostState& other : checkup.hosts) {
      if (&other == &host || is_number(other.name) || checkup.starter_local) continue;
      for (auto name = host.facts->names.begin() + 1; name != host.facts->names.end(); ++name) {
        if (name->name != other.name) continue;
        if (name->addresses.empty()) {
          unknown.push_back(other.name);
        } else if (other.facts && std::none_of(name->addresses.begin(), name->addresses.end(),
                                               [&](const auto& a) { return has_address(*other.facts, a); })) {
          wrong.push_back(fmt::format("{} means {}", other.name, joined(name->addresses)));
        } else {
          ++good;
        }
      }
    }
    if (!wrong.empty()) {
      out.push_back(
          {"names",
           Level::Warning,
           {host.name},
           {},
           joined(wrong) + ", which is no address of it",
           "programs with this name in MASTER_ADDR talk to another host, or to nobody",
           fmt::format("on {}: correct /etc/hosts or DNS; `getent ahosts NAME` shows what counts", host.name)});
    }
    if (!unknown.empty()) {
      out.push_back({"names",
                     Level::Warning,
                     {host.name},
                     {},
                     fmt::format("does not know {}", joined(unknown)),
                     {},
                     fmt::format("on {}: a line ADDRESS NAME in /etc/hosts, or DNS", host.name)});
    }
    if (good > 0 && wrong.empty() && unknown.empty())
      out.push_back({"names", Level::Ok, {host.name}, {}, "knows the others by name", {}, {}});
  }
}

}  // namespace cohort::doctor
