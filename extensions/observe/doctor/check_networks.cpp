// Rows about the network between two hosts: whether each reaches the other, the address that a job uses, its speed, and
// networks that lead nowhere. Also the clocks, which are compared over the network.

#include "launch/start/hosts.h"
#include "net/address.h"
#include "observe/doctor/check.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <set>

namespace cohort::doctor {
namespace {

constexpr double kClocksApart = 1.0;
/// Fraction of the fastest path's rate below which a path is slow.
constexpr double kSlow = 0.5;
/// Bytes per second below which a network is not fit for training. (100 Mbit/s are 12.5e6.)
constexpr double kVerySlow = 30e6;
/// Latency (ms) that no path within a data centre has.
constexpr double kFarAway = 5;

const NetworkFacts* network_of(const HostFacts& facts, const std::string& address) {
  for (const NetworkFacts& network : facts.networks) {
    if (network.address == address) return &network;
  }
  return nullptr;
}

/// Probes by their pair of hosts, since each pair has as many as there are networks.
class ProbesByPair {
 public:
  explicit ProbesByPair(const Checkup& checkup) {
    for (const auto& probe : checkup.probes) by_pair_[{probe.from, probe.facts.peer}].push_back(&probe.facts);
  }
  const std::vector<const ProbeFacts*>& between(int from, int to) const {
    static const std::vector<const ProbeFacts*> none;
    const auto found = by_pair_.find({from, to});
    return found != by_pair_.end() ? found->second : none;
  }

 private:
  std::map<std::pair<int, int>, std::vector<const ProbeFacts*>> by_pair_;
};

/// The address that a job takes among the addresses of `to` that were reached.
const ProbeFacts* best_of(const std::vector<const ProbeFacts*>& probes, const HostState& to) {
  const ProbeFacts* best = nullptr;
  int place = 0;
  for (const ProbeFacts* probe : probes) {
    if (probe->result != kReached) continue;
    const NetworkFacts* network = network_of(*to.facts, probe->address);
    if (network == nullptr || network->offered < 0) continue;
    if (best == nullptr || network->offered < place) {
      best = probe;
      place = network->offered;
    }
  }
  return best;
}

std::string what_became(std::string_view result) {
  if (result == kSomebodyElse) return "another one answers";
  if (result == kLargeLost) return "large packets are lost";
  return std::string(result);
}

/// Explains why no address of `to` is reached from `from`, using the address that is most likely to work.
void check_closed(const HostState& from, const HostState& to, const std::vector<const ProbeFacts*>& probes,
                  bool other_way, std::vector<Finding>& out) {
  Finding finding{
      other_way ? "direction" : "reach", other_way ? Level::Warning : Level::Failed, {from.name}, to.name, {}, {}, {}};
  std::string text;
  const ProbeFacts* first = nullptr;
  for (const ProbeFacts* probe : probes) {
    const NetworkFacts* network = network_of(*to.facts, probe->address);
    if (network == nullptr || network->offered < 0) continue;
    if (first == nullptr) first = probe;
    text += fmt::format("{}{} ({}): {}", text.empty() ? "" : "; ", probe->address, network->interface,
                        what_became(probe->result));
  }
  finding.found = text.empty() ? "it offers no address" : text;
  if (first == nullptr) {
    finding.fix = fmt::format("on {}: is a network up? `ip addr`; does COHORT_NETWORK leave one?", to.name);
  } else if (first->result == kNoAnswer) {
    finding.fix = fmt::format(
        "a firewall drops packets, or the cable is out: on {}, let TCP from {} in at all ports, "
        "e.g. `nft add rule inet filter input ip saddr {} accept`",
        to.name, from.name, from.facts->networks.empty() ? "ADDRESS" : from.facts->networks.front().address);
  } else if (first->result == kRefused) {
    finding.fix = fmt::format(
        "a firewall rejects connections, or the address is another host's: on {}, let TCP from {} "
        "in at all ports",
        to.name, from.name);
  } else if (first->result == kNoRoute) {
    finding.fix = fmt::format("a firewall or a router says no, or there is no route: on {}, `ip route get {}`",
                              from.name, first->address);
  } else {
    finding.fix = fmt::format("on {}, `ip route get {}`: does it lead to {}?", from.name, first->address, to.name);
  }
  out.push_back(std::move(finding));
}

/// Reports interfaces with no address that any host reached, and addresses at which large packets are lost.
void check_dead_ends(const Checkup& checkup, std::vector<Finding>& out) {
  struct State {
    int tried = 0, reached = 0, large = 0;
    std::map<std::string, int> results;
    int offered = -1;
    int mtu = 0;
    std::set<std::string> ways;
  };
  std::map<std::pair<std::string, std::size_t>, State> states;  // interface, host
  std::set<std::size_t> works;                                  // hosts that some host reaches at some address
  for (const auto& probe : checkup.probes) {
    if (probe.facts.result == kNotTried) continue;
    const auto to = static_cast<std::size_t>(probe.facts.peer);
    const NetworkFacts* network = network_of(*checkup.hosts[to].facts, probe.facts.address);
    if (network == nullptr) continue;
    State& state = states[{network->interface, to}];
    ++state.tried;
    state.offered = state.offered < 0 ? network->offered : std::min(state.offered, std::max(network->offered, 0));
    state.mtu = network->mtu;
    if (probe.facts.result == kReached) {
      ++state.reached;
      works.insert(to);
    } else if (probe.facts.result == kLargeLost) {
      ++state.large;
      state.ways.insert(checkup.hosts[static_cast<std::size_t>(probe.from)].name);
    } else {
      ++state.results[what_became(probe.facts.result)];
    }
  }
  for (const auto& [key, state] : states) {
    const auto& [interface, host] = key;
    const HostState& there = checkup.hosts[host];
    if (state.large > 0) {
      out.push_back({"large",
                     Level::Failed,
                     {state.ways.begin(), state.ways.end()},
                     there.name,
                     fmt::format("{} (MTU {}): small messages pass, 64 KiB do not", interface, state.mtu),
                     {},
                     fmt::format("the same MTU on all hosts and switches: on each, `ip link set {} mtu 1500`; or open "
                                 "ICMP 'fragmentation needed' in the firewall",
                                 interface)});
    }
    if (state.reached > 0 || state.large > 0 || !works.contains(host)) continue;
    std::string how;
    for (const auto& [result, count] : state.results) how += (how.empty() ? "" : ", ") + result;
    // A dead address is harmless if it is tried last. Before others, it costs time and misleads a program that takes
    // the first.
    const bool first = state.offered == 0;
    add(out, "network", first ? Level::Warning : Level::Ok, there.name,
        fmt::format("{} leads to no other host ({}){}", interface, how,
                    state.offered < 0 ? "; a job does not try it"
                    : first           ? ""
                                      : "; a job tries others first"),
        "--network with the network that works, below (COHORT_NETWORK, GLOO_SOCKET_IFNAME)");
  }
}

void check_speeds(const Checkup& checkup, std::vector<Finding>& out) {
  double fastest = 0;
  for (const SpeedFacts& speed : checkup.speeds) fastest = std::max({fastest, speed.there, speed.back});
  for (const SpeedFacts& speed : checkup.speeds) {
    const HostState& from = checkup.hosts[static_cast<std::size_t>(speed.from)];
    const HostState& to = checkup.hosts[static_cast<std::size_t>(speed.to)];
    Finding finding{"speed", Level::Ok, {from.name}, to.name, {}, {}, {}};
    if (!speed.error.empty()) {
      finding.level = Level::Warning;
      finding.found = fmt::format("{}: {}", speed.address, speed.error);
      finding.fix = fmt::format("by hand: on {} `iperf3 -s`, on {} `iperf3 -c {}`", to.name, from.name, speed.address);
      out.push_back(std::move(finding));
      continue;
    }
    const NetworkFacts* network = network_of(*to.facts, speed.address);
    finding.found = fmt::format("{} ({}): {:.0f} MB/s there, {:.0f} MB/s back, {:.2f} ms", speed.address,
                                network == nullptr ? "?" : network->interface, speed.there / 1e6, speed.back / 1e6,
                                speed.milliseconds);
    const double slower = std::min(speed.there, speed.back);
    if (slower < kVerySlow || slower < kSlow * fastest || speed.milliseconds > kFarAway) {
      finding.level = Level::Warning;
      finding.found += slower < kVerySlow         ? "; that is slow for training"
                       : slower < kSlow * fastest ? fmt::format("; the fastest way has {:.0f} MB/s", fastest / 1e6)
                                                  : "; that is far away";
      finding.fix = fmt::format(
          "is a faster network there? --network; `ethtool {}` shows the link's speed; does "
          "something else use it?",
          network == nullptr ? "eth0" : network->interface);
    }
    out.push_back(std::move(finding));
  }
}

void check_clocks(const Checkup& checkup, std::vector<Finding>& out) {
  for (const HostState& host : checkup.hosts) {
    if (!host.clock_offset || host.here) continue;
    const double offset = *host.clock_offset;
    const bool apart = std::abs(offset) > kClocksApart + host.clock_error;
    add(out, "clock", apart ? Level::Warning : Level::Ok, host.name,
        apart ? fmt::format("{:.1f} s {} {}'s", std::abs(offset), offset > 0 ? "ahead of" : "behind", checkup.here)
              : fmt::format("less than {:.0f} s apart", kClocksApart),
        fmt::format("on {}: timedatectl set-ntp true", host.name));
  }
}

}  // namespace

const ProbeFacts* chosen_way(const Checkup& checkup, int from, int to) {
  std::vector<const ProbeFacts*> probes;
  for (const auto& probe : checkup.probes) {
    if (probe.from == from && probe.facts.peer == to) probes.push_back(&probe.facts);
  }
  return best_of(probes, checkup.hosts[static_cast<std::size_t>(to)]);
}

void check_networks(const Checkup& checkup, std::vector<Finding>& out) {
  const int count = static_cast<int>(checkup.hosts.size());
  const ProbesByPair probes(checkup);
  for (int from = 0; from < count; ++from) {
    const HostState& a = checkup.hosts[static_cast<std::size_t>(from)];
    if (!a.facts) continue;
    const bool mute = std::find(checkup.silent.begin(), checkup.silent.end(), from) != checkup.silent.end();
    int untried = 0;
    std::vector<std::string> reached;
    for (int to = 0; to < count; ++to) {
      const HostState& b = checkup.hosts[static_cast<std::size_t>(to)];
      if (to == from || !b.facts || mute) continue;
      const auto& between = probes.between(from, to);
      if (best_of(between, b) != nullptr) {
        reached.push_back(b.name);
        continue;
      }
      const auto any = [&between](std::string_view result) {
        return std::any_of(between.begin(), between.end(),
                           [result](const auto* each) { return each->result == result; });
      };
      if (any(kNotTried)) {
        ++untried;
        continue;
      }
      // Reports the loss of large packets in place of a closed path.
      if (any(kLargeLost)) continue;
      check_closed(a, b, between, best_of(probes.between(to, from), a) != nullptr, out);
    }
    if ((mute || untried > 0) && a.trouble.empty()) {
      add(out, "reach", Level::Warning, a.name,
          mute ? "it had no time to say which hosts it reaches"
               : fmt::format("it had no time to try all addresses of {} of the others", untried),
          "once more; addresses that do not answer, and hosts that hang, cost the time of the others",
          "ways that do not work would not be known");
    }
    if (!reached.empty())
      add(out, "reach", Level::Ok, a.name,
          reached.size() > 8 ? fmt::format("reaches {} other hosts", reached.size())
                             : fmt::format("reaches {}", fmt::join(reached, ", ")));
  }
  check_dead_ends(checkup, out);
  check_speeds(checkup, out);
  check_clocks(checkup, out);
}

namespace {

// Rows about names: whether each host resolves its own name and those of the others, to the right addresses.

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
    add(out, "names", known ? Level::Ok : Level::Warning, {},
        known ? fmt::format("{} means {} here", name.name, joined(name.addresses))
              : fmt::format("{} does not resolve here", name.name),
        fmt::format("a line ADDRESS {} in /etc/hosts, or DNS", name.name),
        "it is reached only if ~/.ssh/config or the starter knows its address");
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
      add(out, "names", Level::Warning, host.name, joined(wrong) + ", which is no address of it",
          fmt::format("on {}: correct /etc/hosts or DNS; `getent ahosts NAME` shows what counts", host.name),
          "programs with this name in MASTER_ADDR talk to another host, or to nobody");
    }
    if (!unknown.empty()) {
      add(out, "names", Level::Warning, host.name, fmt::format("does not know {}", joined(unknown)),
          fmt::format("on {}: a line ADDRESS NAME in /etc/hosts, or DNS", host.name));
    }
    if (good > 0 && wrong.empty() && unknown.empty())
      add(out, "names", Level::Ok, host.name, "knows the others by name");
  }
}

}  // namespace cohort::doctor
