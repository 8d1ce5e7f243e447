// Rows about variables that would make a job silently smaller than meant, or make its ranks meet at a wrong address.

#include "base/env.h"
#include "base/parse.h"
#include "launch/plan/plan.h"
#include "net/address.h"
#include "observe/doctor/check.h"
#include "rendezvous/detect.h"
#include "rendezvous/launchers.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <sstream>

namespace cohort::doctor {
namespace {

using rendezvous::find;

/// Checks whether a `cohort run` started here is one of several, and whether these form one job.
void check_launchers(const rendezvous::Environment& environment, std::vector<Finding>& out) {
  const auto role = launch::choose_node({}, environment);
  if (!role) {
    add(out, "launchers", Level::Warning, {}, role.error().what(),
        "what it names: one launcher on each node, or none under another launcher");
  } else if (*role) {
    const launch::NodeRole& node = **role;
    add(out, "launchers", Level::Ok, {},
        fmt::format("`cohort run` here is node {} of {}, which make one job ({}){}", node.rank, node.count, node.source,
                    node.master ? "; each needs the same COHORT_SECRET_FILE" : ""));
  }
}

void check_launcher(const Checkup& checkup, std::vector<Finding>& out) {
  const auto& environment = checkup.environment;
  const auto detected = rendezvous::detect(environment);
  if (!detected) {
    // Reports contradictions, and a world of one under a launcher with several processes.
    add(out, "launcher", Level::Failed, {}, detected.error().what(),
        "unset what is left of another job (`env -u NAME`); COHORT_ALONE=1 if it is meant");
    return;
  }
  if (detected->alone) {
    add(out, "alone", Level::Failed, {}, "COHORT_ALONE=1 is set", "unset COHORT_ALONE");
  }
  switch (detected->warning) {
    case rendezvous::LaunchWarning::None: break;
    case rendezvous::LaunchWarning::Script:
      add(out, "batch", Level::Warning, {}, detected->note,
          "start programs in it with `srun ./train`, or with `cohort run ./train`");
      break;
    case rendezvous::LaunchWarning::Hosts:
      add(out, "apart", Level::Warning, {}, detected->note, "one launcher that knows of all hosts");
      break;
    case rendezvous::LaunchWarning::Gpus:
      add(out, "one-process", Level::Warning, {}, detected->note,
          fmt::format("`cohort run -np {}`", rendezvous::gpus_claimed(environment).gpus));
      break;
  }
  std::string text;
  if (detected->launcher.empty())
    text = "none: a program started here by itself is a world of one";
  else
    text = fmt::format("{}: a program started here is rank {} of {}", detected->source, detected->rank, detected->size);
  int ranks = 0;
  for (const HostState& host : checkup.hosts) ranks += host.slots;
  text += fmt::format("; `cohort run` would start {} rank{} on {} host{}", ranks, ranks == 1 ? "" : "s",
                      checkup.hosts.size(), checkup.hosts.size() == 1 ? "" : "s");
  add(out, "launcher", Level::Ok, {}, text);

  // Reports variables that a launcher sets only for its own processes, if no such launcher is among our ancestors.
  constexpr std::array<std::string_view, 7> kOfProcesses = {"torchrun", "Open MPI", "MVAPICH2",   "MPI (PMI)",
                                                            "PMIx",     "Horovod",  "LSF (jsrun)"};
  std::vector<std::string> left;
  for (const rendezvous::SizeClaim& claim : rendezvous::size_claims(environment)) {
    if (std::find(kOfProcesses.begin(), kOfProcesses.end(), claim.launcher) != kOfProcesses.end())
      left.push_back(fmt::format("{} ({})", claim.claim, claim.launcher));
  }
  const bool leftovers = !left.empty() && !checkup.launcher_alive;
  if (!leftovers) check_launchers(environment, out);
  if (leftovers) {
    std::string names;
    for (const auto& [name, value] : environment) {
      if (name.starts_with("OMPI_") || name.starts_with("PMI") || name.starts_with("TORCHELASTIC_") ||
          name.starts_with("HOROVOD_") || name.starts_with("MV2_COMM") || name.starts_with("JSM_") || name == "RANK" ||
          name == "WORLD_SIZE" || name == "LOCAL_RANK" || name == "LOCAL_WORLD_SIZE")
        names += " -u " + name;
    }
    add(out, "leftovers", Level::Warning, {},
        fmt::format("{}, but no such launcher has started this shell", fmt::join(left, ", ")),
        "a new shell, or env" + names + " COMMAND");
  }
}

void check_master(const Checkup& checkup, std::vector<Finding>& out) {
  const std::string* master = find(checkup.environment, env::kMasterAddr);
  if (master == nullptr) return;
  if (!net::is_loopback_name(*master)) {
    add(out, "master", Level::Ok, {}, fmt::format("MASTER_ADDR={}", *master));
    return;
  }
  const auto detected = rendezvous::detect(checkup.environment);
  const bool several = checkup.several_hosts || (detected && detected->nodes.value_or(1) > 1);
  add(out, "master", several ? Level::Failed : Level::Ok, {}, fmt::format("MASTER_ADDR={}", *master),
      "unset MASTER_ADDR (`cohort run` sets its own), or give the first host's address");
}

bool names_an_interface(const std::string& list, const HostFacts& facts) {
  std::string text = list;
  if (text.starts_with('^')) return true;  // NCCL: all interfaces but these
  const bool exact = text.starts_with('=');
  if (exact) text.erase(0, 1);
  std::stringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    if (name == "lo") return true;
    for (const NetworkFacts& network : facts.networks) {
      if (network.interface == name || (!exact && network.interface.starts_with(name))) return true;
    }
  }
  return false;
}

void check_of_host(const HostState& host, std::vector<Finding>& out) {
  const HostFacts& facts = *host.facts;
  const auto value = [&facts](std::string_view name) -> const std::string* {
    const auto found = facts.environment.find(std::string(name));
    return found == facts.environment.end() ? nullptr : &found->second;
  };
  for (const char* name : {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "TP_SOCKET_IFNAME"}) {
    const std::string* list = value(name);
    if (list == nullptr) continue;
    std::string there;
    for (const NetworkFacts& network : facts.networks) {
      if (there.find(network.interface) == std::string::npos) there += (there.empty() ? "" : ", ") + network.interface;
    }
    if (names_an_interface(*list, facts))
      add(out, "interface", Level::Ok, host.name, fmt::format("{}={}", name, *list));
    else
      add(out, "interface", Level::Warning, host.name,
          fmt::format("{}={}, and there is no such interface; there are: {}", name, *list, there),
          fmt::format("unset {}, or name one that all hosts have", name));
  }
  if (!facts.network_error.empty()) {
    add(out, "network-choice", Level::Failed, host.name, facts.network_error,
        "--network with a network that every host is in (10.0.0.0/8), or the name of an interface");
  } else if (const std::string* network = value(env::kNetwork)) {
    add(out, "network-choice", Level::Ok, host.name, fmt::format("COHORT_NETWORK={}", *network));
  }
  if (const std::string* seen = value("CUDA_VISIBLE_DEVICES");
      !facts.machine.gpus.empty() && seen != nullptr && rendezvous::devices_named(*seen) == 0) {
    add(out, "gpu-choice", Level::Warning, host.name,
        fmt::format("CUDA_VISIBLE_DEVICES='{}' hides {} GPUs", *seen, facts.machine.gpus.size()),
        "unset CUDA_VISIBLE_DEVICES");
  }
  if (const std::string* threads = value(env::kOmpNumThreads)) {
    const auto number = parse_integer<int>(*threads);
    const std::int64_t all = std::int64_t{number.value_or(0)} * host.slots;
    if (number && *number > 0 && all > facts.machine.cores) {
      add(out, "threads", Level::Warning, host.name,
          fmt::format("OMP_NUM_THREADS={} for each of {} ranks, and {} cores", *threads, host.slots,
                      facts.machine.cores),
          fmt::format("unset OMP_NUM_THREADS, or OMP_NUM_THREADS={}",
                      std::max(1, facts.machine.cores / std::max(1, host.slots))));
    } else {
      add(out, "threads", Level::Ok, host.name, fmt::format("OMP_NUM_THREADS={}", *threads));
    }
  }
}

}  // namespace

void check_environment(const Checkup& checkup, std::vector<Finding>& out) {
  check_launcher(checkup, out);
  check_master(checkup, out);
  if (const std::string* fake = find(checkup.environment, env::kPretendHosts)) {
    add(out, "pretend", Level::Warning, {}, fmt::format("COHORT_PRETEND_HOSTS={}", *fake),
        "unset COHORT_PRETEND_HOSTS");
  }
  for (const char* name : {"http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"}) {
    if (find(checkup.environment, name) == nullptr) continue;
    add(out, "proxy", Level::Ok, {}, fmt::format("{} is set; it does no harm", name));
    break;
  }
  for (const HostState& host : checkup.hosts) {
    if (host.facts) check_of_host(host, out);
  }
}

namespace {

// Rows about installed software: whether hosts have it, and whether it is the same on all.

using Values = std::map<std::string, std::vector<std::string>>;

Values values_of(const Checkup& checkup, const std::function<std::string(const SoftwareFacts&)>& value) {
  Values values;
  for (const HostState& host : checkup.hosts) {
    if (host.facts) values[value(host.facts->software)].push_back(host.name);
  }
  return values;
}

std::string few(const std::vector<std::string>& hosts) {
  if (hosts.size() <= 3) return fmt::format("{}", fmt::join(hosts, ", "));
  return fmt::format("{}, {} and {} more", hosts[0], hosts[1], hosts.size() - 2);
}

/// "3.11.2 (a, b); 3.9.7 (c)".
std::string side_by_side(const Values& values, const char* none) {
  std::string text;
  for (const auto& [value, hosts] : values)
    text += fmt::format("{}{} ({})", text.empty() ? "" : "; ", value.empty() ? none : value, few(hosts));
  return text;
}

std::vector<std::string> all_of(const Values& values) {
  std::vector<std::string> hosts;
  for (const auto& [value, some] : values) hosts.insert(hosts.end(), some.begin(), some.end());
  return hosts;
}

struct SoftwareKind {
  const char* row;
  std::string (*value)(const SoftwareFacts&);
  const char* none;
  Level differs;
  Level missing;  ///< if all hosts lack it
  const char* fix;
};

}  // namespace

void check_software(const Checkup& checkup, std::vector<Finding>& out) {
  // Hosts with another version do not get here, since their agents are refused (row "version").
  const SoftwareKind kinds[] = {
      {"version", [](const SoftwareFacts& s) { return fmt::format("{} ({})", s.version, s.build); }, "?", Level::Failed,
       Level::Ok, "install one version everywhere"},
      {"build", [](const SoftwareFacts& s) { return s.commit; }, "unknown", Level::Warning, Level::Ok,
       "install the same build everywhere, or name it with --remote-cohort"},
      {"python", [](const SoftwareFacts& s) { return s.python; }, "none", Level::Warning, Level::Ok,
       "activate the same environment on all hosts (VIRTUAL_ENV goes along), or install the same Python"},
      {"torch", [](const SoftwareFacts& s) { return s.torch; }, "none", Level::Failed, Level::Ok,
       "pip install the same torch in the Python of each host"},
      {"mpi", [](const SoftwareFacts& s) { return s.mpi; }, "none", Level::Warning, Level::Ok,
       "install the same MPI everywhere, if programs use it"},
  };
  for (const SoftwareKind& kind : kinds) {
    const Values values = values_of(checkup, kind.value);
    if (values.empty()) continue;
    const bool same = values.size() == 1;
    Finding finding{kind.row, same ? Level::Ok : kind.differs, all_of(values), {}, side_by_side(values, kind.none), {},
                    {}};
    if (same) finding.found = values.begin()->first.empty() ? kind.none : values.begin()->first;
    if (!same) finding.fix = kind.fix;
    // On a host without the software, only programs that need it fail.
    if (!same && values.contains("")) finding.level = Level::Warning;
    out.push_back(std::move(finding));
  }
  for (const HostState& host : checkup.hosts) {
    if (!host.facts) continue;
    const SoftwareFacts& software = host.facts->software;
    if (!software.python_error.empty())
      add(out, "python", Level::Warning, host.name, software.python_error,
          fmt::format("on {}: python3 --version", host.name));
  }
}

}  // namespace cohort::doctor
