#include "launch/start/hosts.h"

#include "base/env.h"
#include "base/files.h"
#include "base/hardware.h"
#include "base/parse.h"
#include "base/result.h"
#include "launch/start/discovery.h"
#include "net/address.h"
#include "net/interfaces.h"
#include "rendezvous/detect.h"
#include "rendezvous/host_list.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

std::string_view first_label(std::string_view name) { return name.substr(0, name.find('.')); }

/// Normalizes a name, since case does not matter and a full name may end in a dot.
std::string plain_name(std::string name) {
  for (char& letter : name) letter = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  if (name.size() > 1 && name.ends_with('.')) name.pop_back();
  return name;
}

/// Returns the addresses that /etc/hosts has for a name.
std::vector<std::string> listed_addresses(const std::string& plain) {
  std::vector<std::string> addresses;
  std::ifstream file("/etc/hosts");
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::string address;
    words >> address;
    for (std::string name; words >> name;) {
      if (plain_name(name) == plain) addresses.push_back(address);
    }
  }
  return addresses;
}

/// Refuses names that would be an option or two words in a command line of ssh, srun or mpirun.
void check_name(const std::string& name) {
  constexpr std::string_view kAllowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-:@%";
  if (name.empty() || name.front() == '-' || name.find_first_not_of(kAllowed) != std::string::npos) {
    raise(ErrorCode::InvalidArgument, "'{}' is no name of a host", name);
  }
}

std::vector<PlannedHost> from(Result<std::vector<rendezvous::HostSlots>> parsed, std::string_view where) {
  try {
    std::vector<PlannedHost> hosts;
    for (const rendezvous::HostSlots& host : value_or_throw(std::move(parsed))) {
      check_name(host.host);
      hosts.push_back({host.host, host.slots.value_or(1), false});
    }
    if (hosts.empty()) raise(ErrorCode::InvalidArgument, "there is no host in it");
    return hosts;
  } catch (const Error& error) {
    raise(ErrorCode::InvalidArgument, "{}: {}", where, error.what());
  }
}

std::vector<PlannedHost> from_file(const std::string& path) {
  const auto text = sys::read_text(path);
  if (!text) raise(ErrorCode::InvalidArgument, "--hostfile: {}", text.error().what());
  return from(rendezvous::parse_host_file(*text), "--hostfile " + path);
}

struct Allocation {
  std::vector<PlannedHost> hosts;
  std::map<std::string, int> components;  ///< the first component of each host, if there are several
  std::vector<std::vector<PlannedHost>> of_components;
};

/// Returns the nodes named by the variables whose names have this ending.
std::vector<PlannedHost> nodes_of(const Environment& environment, const std::string& ending) {
  const std::string list = "SLURM_JOB_NODELIST" + ending, tasks = "SLURM_TASKS_PER_NODE" + ending;
  const std::string nodes = environment.find(list).value_or("");
  const auto names = rendezvous::parse_slurm_hosts(nodes);
  if (!names) raise(ErrorCode::InvalidArgument, "{}={}: {}", list, nodes, names.error().what());
  std::vector<int> slots(names->size(), 1);
  if (const auto counts = environment.find(tasks)) {
    auto parsed = rendezvous::parse_slurm_counts(*counts);
    if (!parsed) raise(ErrorCode::InvalidArgument, "{}={}: {}", tasks, *counts, parsed.error().what());
    // Within a step, the variable may describe only the step's nodes.
    if (parsed->size() == slots.size()) slots = *std::move(parsed);
  }
  std::vector<PlannedHost> hosts;
  for (std::size_t i = 0; i < names->size(); ++i) hosts.push_back({(*names)[i], slots[i], false});
  return hosts;
}

/// Adds nodes to the hosts; a node in two components gets the slots of both.
void merge(std::vector<PlannedHost>& hosts, const std::vector<PlannedHost>& more) {
  for (const PlannedHost& node : more) {
    const auto known = std::ranges::find_if(hosts, [&](const auto& one) { return one.name == node.name; });
    if (known == hosts.end())
      hosts.push_back(node);
    else
      known->slots += node.slots;
  }
}

/// Returns the nodes of the allocation, with the number of tasks on each. Empty: this process is in none, or is one of
/// several tasks of a step, each of which is on its own.
Allocation from_slurm(const Environment& environment) {
  Allocation all;
  if (!environment.find("SLURM_JOB_ID")) return all;
  const auto tasks = parse_integer<int>(environment.find("SLURM_STEP_NUM_TASKS").value_or("1"));
  if (environment.find("SLURM_STEP_ID") && tasks.value_or(1) > 1) return all;
  // Plain names describe the script's own component of a heterogeneous job; names with an ending, each component.
  const auto components = parse_integer<int>(environment.find("SLURM_HET_SIZE").value_or("1"));
  if (components.value_or(1) <= 1) {
    if (!environment.find("SLURM_JOB_NODELIST")) return all;
    all.hosts = nodes_of(environment, "");
    return all;
  }
  for (int component = 0; component < *components; ++component) {
    // Processes that srun starts have only the variables with the second ending.
    std::string ending = fmt::format("_HET_GROUP_{}", component);
    if (!environment.find("SLURM_JOB_NODELIST" + ending)) ending = fmt::format("_PACK_GROUP_{}", component);
    if (!environment.find("SLURM_JOB_NODELIST" + ending)) {
      raise(ErrorCode::InvalidArgument,
            "SLURM_HET_SIZE={}, but there is no SLURM_JOB_NODELIST_HET_GROUP_{}: start this from the job's "
            "script or shell, with all of its environment",
            *components, component);
    }
    std::vector<PlannedHost> nodes = nodes_of(environment, ending);
    merge(all.hosts, nodes);
    for (const PlannedHost& node : nodes) all.components.emplace(node.name, component);
    all.of_components.push_back(std::move(nodes));
  }
  return all;
}

/// This host may have several names. Each list keeps the first of them, with the sum of their slots.
void mark_local(Plan& choice, Starter starter) {
  std::string first;
  for (std::vector<PlannedHost>* const hosts : {&choice.hosts, &choice.server_hosts}) {
    PlannedHost* here = nullptr;
    std::vector<PlannedHost> once;
    once.reserve(hosts->size());
    for (PlannedHost& host : *hosts) {
      host.local = starter == Starter::Local || is_this_host(host.name);
      if (host.local && starter != Starter::Local) {
        if (first.empty()) first = host.name;
        if (here != nullptr) {
          here->slots += host.slots;
          choice.note = fmt::format("{} and {} are both this host, which has {} slots", first, host.name, here->slots);
          continue;
        }
        host.name = first;
      }
      once.push_back(host);
      if (host.local) here = &once.back();
    }
    *hosts = std::move(once);
  }
}

std::vector<PlannedHost> hosts_of_servers(const std::string& wished, const Allocation& slurm) {
  constexpr std::string_view kComponent = "component ";
  if (!wished.starts_with(kComponent)) return from(rendezvous::parse_host_slots(wished), "--server-hosts " + wished);
  const auto component = parse_integer<std::size_t>(std::string_view(wished).substr(kComponent.size()));
  if (slurm.of_components.empty() || !component || *component >= slurm.of_components.size()) {
    raise(ErrorCode::InvalidArgument, "--server-hosts '{}': {} -- name hosts, as a:2,b", wished,
          slurm.of_components.empty() ? "this is no heterogeneous job of Slurm's"
                                      : fmt::format("the job has components 0 to {}", slurm.of_components.size() - 1));
  }
  return slurm.of_components[*component];
}

/// Removes the servers' hosts from `hosts`, since such a host runs only servers.
void leave_to_servers(std::vector<PlannedHost>& hosts, const std::vector<PlannedHost>& servers) {
  std::erase_if(hosts, [&servers](const PlannedHost& host) {
    return std::ranges::any_of(servers, [&](const PlannedHost& one) { return one.name == host.name; });
  });
}

bool all_among(const std::vector<PlannedHost>& hosts, const std::vector<PlannedHost>& others) {
  return std::ranges::all_of(hosts, [&others](const PlannedHost& host) {
    return std::ranges::any_of(others, [&host](const PlannedHost& other) { return other.name == host.name; });
  });
}

}  // namespace

bool same_host(const std::string& a, const std::string& b) {
  if (a == b) return true;
  // Full names are compared as a whole; addresses have no first part.
  const auto numeric = [](const std::string& name) {
    return name.find_first_not_of("0123456789.") == std::string::npos || name.find(':') != std::string::npos;
  };
  const bool one_is_short = (a.find('.') == std::string::npos) != (b.find('.') == std::string::npos);
  return !numeric(a) && !numeric(b) && one_is_short && first_label(a) == first_label(b);
}

void check_first_ranks(const JobSpec& spec, int ranks) {
  const ElasticSpec& elastic = spec.elastic;
  if (!elastic || (ranks >= elastic.least && (elastic.most == 0 || ranks <= elastic.most))) return;
  raise(ErrorCode::InvalidArgument, "--min-np {}{}: the job would begin with {} rank{}{}", elastic.least,
        elastic.most > 0 ? fmt::format(" --max-np {}", elastic.most) : std::string(), ranks, ranks == 1 ? "" : "s",
        spec.origin_of("--min-np"));
}

bool is_this_host(const std::string& name) {
  const std::string plain = plain_name(name);
  if (same_host(plain, plain_name(sys::host_name()))) return true;
  const auto here = net::interface_addresses();
  const auto is_own = [&here](const std::string& address) {
    return net::is_loopback_name(address) ||
           (here && std::any_of(here->begin(), here->end(), [&](const auto& own) { return own.text == address; }));
  };
  if (is_own(plain)) return true;
  const std::vector<std::string> listed = listed_addresses(plain);
  return !listed.empty() && std::ranges::all_of(listed, is_own);
}

Result<std::vector<PlannedHost>> listed_hosts(const JobSpec& spec, StartMethod method, const std::string& list) {
  std::istringstream lines(list);
  bool none = true;
  std::string text;
  for (std::string line; std::getline(lines, line); text += line + "\n") {
    const std::string host = line.substr(0, line.find('#'));
    const auto last = host.find_last_not_of(" \t\r");
    const std::string_view words = std::string_view(host).substr(0, last == std::string::npos ? 0 : last + 1);
    if (words.ends_with(":0") || words.ends_with(" slots=0")) {
      line.clear();  // takes no slots, so it is left out
    } else if (!words.empty()) {
      none = false;
    }
  }
  return result_of([&] {
    Plan found;
    if (none) return found.hosts;
    for (const rendezvous::HostSlots& host : value_or_throw(rendezvous::parse_host_file(text))) {
      check_name(host.host);
      found.hosts.push_back({host.host, host.slots.value_or(std::max(1, spec.elastic.slots_per_host)), false});
    }
    mark_local(found, spec.starter);
    if (method == StartMethod::Slurm) {
      for (PlannedHost& host : found.hosts) host.local = false;
    }
    return found.hosts;
  });
}

Plan choose_hosts(const JobSpec& spec, const Environment& environment) {
  if (!spec.hosts.empty() && !spec.host_file.empty())
    raise(ErrorCode::InvalidArgument, "-H and --hostfile: one of them says which hosts there are");
  const Allocation slurm = from_slurm(environment);
  Plan choice;
  if (!spec.server_hosts.empty()) choice.server_hosts = hosts_of_servers(spec.server_hosts, slurm);
  if (!spec.elastic.script.empty()) {
    choice.hosts = discover_hosts(spec, choice.method, std::max(spec.elastic.least, spec.processes.value_or(0)),
                                  spec.start_timeout.value_or(std::chrono::seconds(30)));
    choice.may_grow = true;
  } else if (!spec.hosts.empty() || !spec.host_file.empty()) {
    choice.hosts = spec.host_file.empty() ? from(rendezvous::parse_host_slots(spec.hosts), "-H " + spec.hosts)
                                          : from_file(spec.host_file);
  } else {
    choice.hosts = slurm.hosts;
    leave_to_servers(choice.hosts, choice.server_hosts);
    if (choice.hosts.empty() && !slurm.hosts.empty()) {
      raise(ErrorCode::InvalidArgument,
            "--server-hosts {}: these are all nodes of the allocation, and none is left for ranks -- name those "
            "of the ranks, too, by -H",
            spec.server_hosts);
    }
    // A single node is used without a limit, like any host; `default_processes` uses Slurm's number, if one was given.
    const bool here = slurm.hosts.size() == 1 && is_this_host(slurm.hosts.front().name);
    if (here && spec.per_node == 0) choice.hosts.clear();
  }
  if (choice.hosts.empty()) {
    if (spec.nodes > 1)
      raise(ErrorCode::InvalidArgument, "--nodes {}: which? name them with -H a,b or --hostfile FILE", spec.nodes);
    if (spec.per_node > 0) choice.hosts = {{sys::host_name(), spec.per_node, true}};
    if (choice.server_hosts.empty()) return choice;
    for (PlannedHost& host : choice.server_hosts) {
      if (is_this_host(host.name)) host.name = sys::host_name();  // the ranks' list has it by this name
    }
  }
  mark_local(choice, spec.starter);
  const bool alone =
      std::ranges::all_of(choice.hosts, [](const PlannedHost& host) { return host.name == "localhost"; });
  if (!spec.hosts.empty() && alone && choice.server_hosts.empty() && slurm.hosts.size() > 1)
    choice.note = fmt::format(
        "-H {} is one of the allocation's {} nodes, and this job leaves the others idle -- "
        "without -H it uses all",
        spec.hosts, slurm.hosts.size());
  const auto count = static_cast<std::size_t>(spec.nodes);
  if (count > choice.hosts.size() && count > 1) {
    raise(ErrorCode::InvalidArgument, "--nodes {}: there are only {} hosts", count, choice.hosts.size());
  }
  if (count > 0 && count < choice.hosts.size()) choice.hosts.resize(count);
  if (spec.per_node > 0) {
    for (PlannedHost& host : choice.hosts) host.slots = spec.per_node;
  }
  switch (spec.starter) {
    case Starter::Auto:
      choice.method =
          !slurm.hosts.empty() && all_among(choice.hosts, slurm.hosts) && all_among(choice.server_hosts, slurm.hosts)
              ? StartMethod::Slurm
              : StartMethod::Ssh;
      break;
    case Starter::Slurm:
      if (slurm.hosts.empty())
        raise(ErrorCode::InvalidArgument, "--starter slurm: this is no Slurm allocation; use sbatch or salloc");
      choice.method = StartMethod::Slurm;
      break;
    case Starter::Mpi: choice.method = StartMethod::Mpi; break;
    case Starter::Hand: choice.method = StartMethod::Hand; break;
    case Starter::Ssh:
    case Starter::Local: break;
  }
  if (choice.method == StartMethod::Slurm) {
    // Even this node is reached by srun: a step gets what the allocation has (GPUs, cores, limits).
    for (auto* const hosts : {&choice.hosts, &choice.server_hosts}) {
      for (PlannedHost& host : *hosts) {
        host.local = false;
        if (const auto found = slurm.components.find(host.name); found != slurm.components.end())
          host.component = found->second;
      }
    }
  }
  return choice;
}

int default_processes(const Environment& environment) {
  // srun sets SLURM_NTASKS in each of its steps, even if no number was asked for. Slurm's own steps have numbers from
  // kStepsOfSlurmItself on; a shell of salloc may be in one. sbatch's script is in no step.
  constexpr std::uint32_t kStepsOfSlurmItself = 0xfffffff0;
  const auto step = parse_integer<std::uint32_t>(environment.find("SLURM_STEP_ID").value_or("4294967295"));
  const bool asked = environment.find("SLURM_NTASKS") || environment.find("SLURM_NTASKS_PER_NODE");
  if (asked && step.value_or(0) >= kStepsOfSlurmItself) {
    const std::vector<PlannedHost> nodes = from_slurm(environment).hosts;
    if (nodes.size() == 1 && is_this_host(nodes.front().name)) return nodes.front().slots;
  }
  return sys::usable_cores();
}

int parse_processes(const std::string& text) {
  if (text == "auto") return 0;
  const auto number = parse_integer<long long>(text);
  if (!number) raise(ErrorCode::InvalidArgument, "a number or 'auto' (one process per core) is wanted");
  if (*number < 1) raise(ErrorCode::InvalidArgument, "at least one process is needed");
  if (*number > kMostProcesses)
    raise(ErrorCode::InvalidArgument, "more than {} processes are not started at once", kMostProcesses);
  return static_cast<int>(*number);
}

namespace {

/// Parses -np, or torchrun's option: a number, `cpu`, `gpu`, or `auto`, which means GPUs if there are any.
int processes_wanted(const JobSpec& spec) {
  if (spec.processes && !spec.nproc_per_node.empty()) {
    raise(ErrorCode::InvalidArgument, "-np {} and --nproc-per-node {}: give one",
          *spec.processes == 0 ? "auto" : std::to_string(*spec.processes), spec.nproc_per_node);
  }
  const bool hosts = !spec.hosts.empty() || !spec.host_file.empty();
  const bool a_rank = env::get(env::kLocalRank).has_value();  // then torchrun's variables were for the launcher
  std::string wanted = spec.nproc_per_node;
  if (wanted.empty() && !spec.processes && !hosts && !a_rank) wanted = env::text("PET_NPROC_PER_NODE");
  if (wanted.empty()) return spec.processes.value_or(0);
  const std::string shown = spec.nproc_per_node.empty() ? "PET_NPROC_PER_NODE=" + wanted : "--nproc-per-node " + wanted;
  if (hosts) raise(ErrorCode::InvalidArgument, "{}: with -H or --hostfile it is --per-node {}", shown, wanted);
  if (wanted == "cpu") return 0;
  if (wanted != "gpu" && wanted != "auto") {
    try {
      return parse_processes(wanted);
    } catch (const Error& error) {
      raise(ErrorCode::InvalidArgument, "{}: {}", shown, error.what());
    }
  }
  const rendezvous::GpuClaim said = rendezvous::gpus_claimed(rendezvous::current_environment());
  if (const int gpus = said.claim.empty() ? sys::gpus_here() : said.gpus; gpus > 0) return gpus;
  if (wanted == "auto") return 0;
  raise(ErrorCode::InvalidArgument,
        "{}: there is no GPU here (CUDA_VISIBLE_DEVICES, /dev/nvidia0, /sys/class/kfd) -- give a number, or cpu",
        shown);
}

/// Checks options that need or exclude each other.
void check_servers(const JobSpec& spec) {
  const bool hosts = !spec.server_hosts.empty();
  if (hosts && spec.colocated)
    raise(ErrorCode::InvalidArgument, "--servers colocated and --server-hosts: one of them says where servers run{}{}",
          spec.origin_of("--servers"), spec.origin_of("--server-hosts"));
  const bool servers = spec.colocated || spec.servers > 0 || hosts;
  if (spec.server_program && !servers)
    raise(ErrorCode::InvalidArgument,
          "--server-program: how many servers? --servers N or colocated, or --server-hosts, says it{}",
          spec.origin_of("--server-program"));
  if ((spec.server_restarts > 0 || spec.lost_servers > 0) && !servers) {
    const char* const option = spec.server_restarts > 0 ? "--server-restarts" : "--lost-servers";
    raise(ErrorCode::InvalidArgument,
          "{}: there are no servers -- --servers N or colocated, or --server-hosts, says how many{}", option,
          spec.origin_of(option));
  }
  if (spec.agents > 0 && (servers || spec.evaluator))
    raise(ErrorCode::InvalidArgument,
          "--agents: --servers and --evaluator are not for jobs whose agents the owner starts");
}

void check_by_hand(const JobSpec& spec) {
  if (spec.starter != Starter::Hand) {
    if (spec.secret_file.empty() && spec.listen == 0) return;
    raise(ErrorCode::InvalidArgument, "--secret-file and --listen are for --starter hand and --nnodes{}{}",
          spec.origin_of("--secret-file"), spec.origin_of("--listen"));
  }
  if (spec.secret_file.empty()) {
    raise(ErrorCode::InvalidArgument, "--starter hand: --secret-file FILE is wanted; `cohort secret FILE` makes one{}",
          spec.origin_of("--starter"));
  }
  if (spec.max_restarts > 0) {
    raise(ErrorCode::InvalidArgument, "--starter hand: --max-restarts has nobody who starts the agents again{}{}",
          spec.origin_of("--starter"), spec.origin_of("--max-restarts"));
  }
}

/// Refuses options that an elastic job cannot have yet. `asks`: the option that makes the job elastic.
void check_elastic(const JobSpec& spec, const std::string& asks) {
  const ElasticSpec& elastic = spec.elastic;
  if (asks.empty()) {
    const char* const option = elastic.most > 0          ? "--max-np"
                               : elastic.most_changes    ? "--reset-limit"
                               : !elastic.script.empty() ? "--host-discovery-script"
                               : elastic.slots_per_host  ? "--slots-per-host"
                               : elastic.cooldown        ? "--blacklist-cooldown-range"
                               : elastic.timeout         ? "--elastic-timeout"
                               : elastic.spares > 0      ? "--spares"
                                                         : nullptr;
    if (option == nullptr) return;
    raise(ErrorCode::InvalidArgument, "{}: --min-np is wanted, too: the fewest ranks with which the job goes on{}",
          option, spec.origin_of(option));
  }
  const auto refuse = [&](std::string_view option, std::string_view why) {
    raise(ErrorCode::InvalidArgument, "{} and {}: {}{}{}", asks, option, why, spec.origin_of("--min-np"),
          spec.origin_of(option));
  };
  if (spec.colocated || spec.servers > 0 || !spec.server_hosts.empty())
    refuse("--servers", "servers cannot be part of an elastic job yet");
  if (spec.evaluator) refuse("--evaluator", "an evaluator cannot be part of an elastic job yet");
  if (spec.tf_config) refuse("--tf-config", "TF_CONFIG describes a cluster that never changes");
  if (spec.agents > 0) refuse("--agents", "agents that the owner starts cannot be part of an elastic job yet");
  if (spec.owner_pid) refuse("--owner", "who collects what each rank returns needs all of them; use `cohort run`");
  if (elastic.most > 0 && elastic.most < elastic.least)
    raise(ErrorCode::InvalidArgument, "--min-np {} and --max-np {}: the least is more than the most", elastic.least,
          elastic.most);
  if (elastic.script.empty()) {
    if (elastic.slots_per_host == 0) return;
    raise(ErrorCode::InvalidArgument, "--slots-per-host is for hosts of --host-discovery-script");
  }
  if (elastic.spares > 0 && elastic.most == 0)
    raise(ErrorCode::InvalidArgument,
          "--spares: --max-np is wanted, too: how many ranks of the hosts that --host-discovery-script names train");
  if (spec.names_hosts() || spec.per_node > 0)
    raise(ErrorCode::InvalidArgument,
          "--host-discovery-script says which hosts there are: leave out -H, --hostfile, --nodes and --per-node "
          "(--slots-per-host says how many ranks each takes)");
  if (spec.starter == Starter::Hand)
    refuse("--starter hand", "hosts that --host-discovery-script names are reached by ssh, srun or mpirun");
}

/// Returns the number of ranks, spares included, with which an elastic job begins; `processes`: the number without the
/// elastic options.
int first_ranks(const JobSpec& spec, Plan& plan, int processes) {
  const ElasticSpec& elastic = spec.elastic;
  if (!elastic || plan.node) return processes;  // (each node reports its own number)
  const int slots = sum_of_slots(plan.hosts);
  plan.spares = elastic.spares;
  // As in Horovod, -np with a script only says how many ranks have to be available before anything starts.
  if (!elastic.script.empty()) {
    processes = slots;
    if (elastic.most > 0) plan.spares = std::clamp(slots - elastic.most, 0, elastic.spares);
  }
  const bool free = spec.processes.value_or(0) == 0 && spec.nproc_per_node.empty();
  if (!elastic.script.empty() || free) {
    if (elastic.most > 0) processes = std::min(processes, elastic.most);
    if (plan.hosts.front().slots == kMostProcesses) processes = std::max(processes, elastic.least);
    if (elastic.script.empty()) processes = std::min(processes, std::max(1, slots - elastic.spares));
  }
  check_first_ranks(spec, processes);
  return processes + plan.spares;
}

/// Returns the hosts of a job with several launchers, with `ranks` on each.
std::vector<PlannedHost> hosts_of_nodes(const JobSpec& spec, const NodeRole& node, int ranks) {
  if (spec.owner_pid) {
    raise(ErrorCode::InvalidArgument,
          "{}: the process that starts this job for itself is one of several, each of which would start one -- start "
          "it once, or as ranks without a launcher; COHORT_ALONE=1 if each job is meant to be its own",
          node.source);
  }
  if (spec.starter != Starter::Auto || spec.listen != 0 || spec.per_node != 0) {
    raise(ErrorCode::InvalidArgument,
          "{}: this command is started on each host itself: --starter, --listen and --per-node have no meaning there",
          node.source);
  }
  if (static_cast<long long>(ranks) * node.count > kMostProcesses) {
    raise(ErrorCode::InvalidArgument, "-np {} on {} nodes: more than {} processes are not started at once", ranks,
          node.count, kMostProcesses);
  }
  if (!spec.server_hosts.empty())
    raise(ErrorCode::InvalidArgument,
          "--server-hosts: a launcher on each node starts servers on these nodes -- leave it out, or start the job "
          "from one of them by -H{}",
          spec.origin_of("--server-hosts"));
  std::vector<PlannedHost> hosts;
  for (int index = 0; index < node.count; ++index) {
    const bool here = index == std::max(0, node.rank);
    hosts.push_back({here ? sys::host_name() : fmt::format("node {}", index), ranks, here});
  }
  return hosts;
}

}  // namespace

Plan plan_of(const JobSpec& spec) {
  int processes = processes_wanted(spec);
  check_servers(spec);
  check_elastic(spec, spec.elastic ? "--min-np" : "");
  Plan plan;
  plan.least = spec.elastic.least;
  if (spec.agents > 0) {
    if (spec.names_hosts() || spec.processes)
      raise(ErrorCode::InvalidArgument, "--agents: neither hosts nor a number of processes are wanted");
    plan.method = StartMethod::Owner;
    for (int agent = 0; agent < spec.agents; ++agent) plan.hosts.push_back({fmt::format("agent {}", agent), 1, false});
    processes = 0;  // set by the agents
  } else {
    auto node = value_or_throw(choose_node(spec, rendezvous::current_environment()));
    if (node && node->count > 1) {
      node->secret_file = !spec.secret_file.empty() ? spec.secret_file : env::text(env::kSecretFile);
      const int per_node = processes != 0 ? processes : sys::usable_cores();
      plan.hosts = hosts_of_nodes(spec, *node, per_node);
      if (!spec.elastic.script.empty())
        raise(ErrorCode::InvalidArgument, "{}: --host-discovery-script is for a job that is started from one host",
              node->source);
      if (node->least > 0 && !spec.elastic) {
        check_elastic(spec, node->source);
        plan.least = node->least * per_node;
      }
      plan.method = StartMethod::Launcher;
      plan.node = std::move(node);
      processes = 0;  // set by the number of nodes
    } else {
      // A launcher that is to be the only one stays so in an allocation of several nodes.
      const bool asks_for_hosts =
          spec.names_hosts() || !spec.server_hosts.empty() || spec.per_node != 0 || spec.starter != Starter::Auto;
      if (!node || asks_for_hosts) {
        plan = choose_hosts(spec, Environment::current());
        plan.least = spec.elastic.least;
        check_by_hand(spec);
      }
    }
  }
  // MPI connects only processes that its own launcher has started, but here `cohort run` starts the ranks.
  if (plan.hosts.size() > 1 && spec.agents == 0 && env::text(env::kTransport) == "mpi") {
    raise(ErrorCode::InvalidArgument,
          "COHORT_TRANSPORT=mpi: `cohort run` starts the ranks itself, and MPI knows only those of its own launcher -- "
          "start them by it, without `cohort run`: COHORT_TRANSPORT=mpi mpirun -np 4 ./train, or srun");
  }
  if (plan.hosts.empty()) {
    plan.hosts = {{sys::host_name(), kMostProcesses}};
    if (processes == 0) processes = default_processes(Environment::current());
  } else if (processes == 0) {
    processes = sum_of_slots(plan.hosts);
  }
  processes = first_ranks(spec, plan, processes);
  return value_or_throw(make_plan(std::move(plan), processes, spec));
}

}  // namespace cohort::launch
