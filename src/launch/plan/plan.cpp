#include "launch/plan/plan.h"

#include "base/env.h"
#include "base/parse.h"
#include "base/result.h"
#include "rendezvous/launchers.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>
#include <utility>

namespace cohort::launch {
namespace {

/// Returns the host without processes.
PlannedHost empty_host(const PlannedHost& host, const Plan& plan) {
  PlannedHost planned{host.name, host.slots, host.local, host.part_of, host.devices, host.component};
  planned.index = static_cast<int>(plan.hosts.size());
  return planned;
}

/// Returns the sum of the hosts' slots.
Result<long long> slots_of(const std::vector<PlannedHost>& hosts) {
  long long slots = 0;
  for (std::size_t i = 0; i < hosts.size(); ++i) {
    if (hosts[i].slots < 1)
      return fail(ErrorCode::InvalidArgument, "host {} has {} slots", hosts[i].name, hosts[i].slots);
    slots += hosts[i].slots;
    for (std::size_t j = 0; j < i; ++j) {
      if (hosts[j].name == hosts[i].name && hosts[i].part_of.empty())
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

Result<void> place_servers(Plan& plan, int servers_wanted) {
  const auto slots = slots_of(plan.server_hosts);
  if (!slots) return tl::unexpected(slots.error());
  const long long wanted = servers_wanted > 0 ? servers_wanted : *slots;
  if (wanted > *slots) {
    return fail(ErrorCode::InvalidArgument,
                "{} servers do not fit the {} slots of --server-hosts: name more hosts, or HOST:N for several on one",
                wanted, *slots);
  }
  if (wanted > kMostProcesses - plan.world_size) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once",
                wanted + plan.world_size, kMostProcesses);
  }
  for (const PlannedHost& host : plan.server_hosts) {
    const int servers = std::min(host.slots, static_cast<int>(wanted) - plan.servers);
    if (servers == 0) break;
    auto known = std::ranges::find_if(plan.hosts, [&](const auto& one) { return one.name == host.name; });
    if (known == plan.hosts.end()) {
      PlannedHost planned = empty_host(host, plan);
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

int sum_of_slots(const std::vector<PlannedHost>& hosts) {
  return std::accumulate(hosts.begin(), hosts.end(), 0,
                         [](int sum, const PlannedHost& host) { return sum + host.slots; });
}

Result<Plan> make_plan(Plan plan, int processes, const JobSpec& spec) {
  if (processes < 1) return fail(ErrorCode::InvalidArgument, "{} processes: at least 1 is needed", processes);
  if (spec.servers < 0) return fail(ErrorCode::InvalidArgument, "{} servers: at least 0 are wanted", spec.servers);
  if (processes > kMostProcesses || spec.servers > kMostProcesses - processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes: more than {} are not started at once",
                static_cast<long long>(processes) + spec.servers, kMostProcesses);
  }
  const std::vector<PlannedHost> hosts = std::exchange(plan.hosts, {});
  const auto slots = slots_of(hosts);
  if (!slots) return tl::unexpected(slots.error());
  if (*slots < processes) {
    return fail(ErrorCode::InvalidArgument, "{} processes do not fit the {} slots of {} host{}", processes, *slots,
                hosts.size(), hosts.size() == 1 ? "" : "s");
  }
  plan.world_size = processes;
  plan.machines = plan.servers = 0;
  int next = 0;
  for (const PlannedHost& host : hosts) {
    if (next == processes) break;
    PlannedHost planned = empty_host(host, plan);
    planned.first_rank = next;
    planned.ranks = std::min(host.slots, processes - next);
    next += planned.ranks;
    const bool goes_on = !plan.hosts.empty() && !host.part_of.empty() && plan.hosts.back().part_of == host.part_of;
    planned.machine = goes_on ? plan.machines - 1 : plan.machines++;
    if (goes_on) planned.first_local = plan.hosts.back().first_local + plan.hosts.back().ranks;
    plan.hosts.push_back(std::move(planned));
  }
  // Sets the properties that all parts of a host share.
  for (std::size_t begin = 0, end = 0; begin < plan.hosts.size(); begin = end) {
    std::vector<std::string> devices;
    int ranks = 0;
    for (end = begin; end < plan.hosts.size() && plan.hosts[end].machine == plan.hosts[begin].machine; ++end) {
      ranks += plan.hosts[end].ranks;
      for (const std::string& device : plan.hosts[end].devices) {
        if (std::ranges::find(devices, device) == devices.end()) devices.push_back(device);
      }
    }
    for (std::size_t part = begin; part < end; ++part) {
      plan.hosts[part].local_ranks = ranks;
      plan.hosts[part].devices = devices;
    }
  }
  plan.evaluator = plan.hosts.front().evaluator = spec.evaluator.has_value();
  if (plan.server_hosts.empty()) {
    spread_servers(plan, spec.colocated ? static_cast<int>(plan.hosts.size()) : spec.servers);
  } else if (auto placed = place_servers(plan, spec.servers); !placed) {
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

std::vector<int> processes_on(const Plan& plan, int index) {
  std::vector<int> processes;
  for (const PlannedHost& host : plan.hosts) {
    if (host.index != index) continue;
    const std::vector<int> some = processes_of(plan, host);
    processes.insert(processes.end(), some.begin(), some.end());
  }
  return processes;
}

bool goes_elsewhere(const Plan& plan) {
  return plan.may_grow || std::ranges::any_of(plan.hosts, [](const PlannedHost& host) { return !host.local; });
}

std::chrono::milliseconds start_timeout_of(const JobSpec& spec, const Plan& plan) {
  // People start the launchers of a job by hand, one after the other.
  const bool by_hand = plan.node && !plan.node->step;
  return spec.start_timeout.value_or(std::chrono::seconds(by_hand ? 300 : 30));
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
    if (host.first_local != 0) continue;  // a part of the previous host
    if (&host != &plan.hosts.front()) text += ", ";
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

namespace {

using rendezvous::Detected;
using rendezvous::find;

/// A given value, and its origin.
struct Word {
  std::string text;
  std::string name;  ///< an option or a variable
  bool empty() const { return text.empty(); }
  std::string shown() const { return name + (name.front() == '-' ? " " : "=") + text; }
};

/// All values given to one launcher: as typed, else from torchrun's variables.
struct Words {
  Word count, rank, master_addr, master_port, endpoint, backend, id;
};

Words words_of(const JobSpec& spec, const rendezvous::Environment& environment) {
  const bool a_rank = find(environment, env::kLocalRank) != nullptr;  // then torchrun's options were for the launcher
  const auto word = [&](const std::string& typed, std::string option, const char* variable) {
    const bool looks = typed.empty() && variable != nullptr && !a_rank;
    const std::string* const value = looks ? find(environment, variable) : nullptr;
    return value != nullptr ? Word{*value, variable} : Word{typed, std::move(option)};
  };
  // A typed endpoint replaces every address that variables name.
  const bool whole = !spec.rdzv_endpoint.empty();
  Words words;
  words.count = word(spec.nnodes, "--nnodes", "PET_NNODES");
  words.rank = word(spec.node_rank, "--node-rank", "PET_NODE_RANK");
  words.master_addr = word(spec.master_addr, "--master-addr", whole ? nullptr : "PET_MASTER_ADDR");
  words.master_port = word(spec.master_port, "--master-port", whole ? nullptr : "PET_MASTER_PORT");
  words.endpoint =
      word(spec.rdzv_endpoint, "--rdzv-endpoint", whole || !spec.master_addr.empty() ? nullptr : "PET_RDZV_ENDPOINT");
  words.backend = word(spec.rdzv_backend, "--rdzv-backend", "PET_RDZV_BACKEND");
  words.id = word(spec.rdzv_id, "--rdzv-id", "PET_RDZV_ID");
  return words;
}

int number_of(const Word& word, int least, int most) {
  const auto value = parse_integer<int>(word.text);
  if (value && *value >= least && *value <= most) return *value;
  raise(ErrorCode::InvalidArgument, "{}: a number from {} to {} is wanted", word.shown(), least, most);
}

/// Parses "2", or torchrun's "1:4": the minimum and the maximum.
std::pair<int, int> nodes_of(const Word& word) {
  const auto colon = word.text.find(':');
  const auto most =
      number_of({word.text.substr(colon == std::string::npos ? 0 : colon + 1), word.name}, 1, kMostProcesses);
  return {colon == std::string::npos ? most : number_of({word.text.substr(0, colon), word.name}, 1, most), most};
}

void check_backend(const Word& backend) {
  if (backend.empty() || backend.text == "c10d" || backend.text == "static") return;
  raise(ErrorCode::InvalidArgument,
        "{}: the launchers of a job meet at that of node rank 0, and need no server besides -- leave it out, or c10d, "
        "with --rdzv-endpoint HOST:PORT where that one is started",
        backend.shown());
}

/// Parses HOST or HOST:PORT.
net::Address place_of(const Word& word, const std::string& text, std::uint16_t port) {
  auto address = net::parse_address(text);
  if (!address) address = net::parse_address(fmt::format("{}:{}", text, port));
  if (address && address->port != 0) return *std::move(address);
  raise(ErrorCode::InvalidArgument, "{}: HOST or HOST:PORT is wanted, where node rank 0 is started and listens",
        word.shown());
}

std::optional<net::Address> master_of(const Words& words) {
  const auto& [count, rank, master_addr, master_port, endpoint, backend, id] = words;
  // torchrun checks in this order, too.
  if (!endpoint.empty())
    return place_of(endpoint, endpoint.text, backend.text == "static" ? kDefaultMasterPort : kDefaultEndpointPort);
  if (master_addr.empty()) {
    if (master_port.empty()) return std::nullopt;
    raise(ErrorCode::InvalidArgument, "{}: --master-addr HOST is wanted, too", master_port.shown());
  }
  const auto colons = std::count(master_addr.text.begin(), master_addr.text.end(), ':');
  const bool bare_v6 = colons > 1 && master_addr.text.front() != '[';
  const std::string text = bare_v6 ? "[" + master_addr.text + "]" : master_addr.text;
  if (!master_port.empty() && net::parse_address(text))
    raise(ErrorCode::InvalidArgument, "{}: the host alone is wanted, since {} is the port", master_addr.shown(),
          master_port.shown());
  return place_of(
      master_addr, text,
      master_port.empty() ? kDefaultMasterPort : static_cast<std::uint16_t>(number_of(master_port, 1, 65535)));
}

const rendezvous::Launcher* row_of(std::string_view name) {
  for (const rendezvous::Launcher& row : rendezvous::launchers()) {
    if (row.name == name) return &row;
  }
  return nullptr;
}

/// Returns the Slurm task that this launcher is, if it is one of several.
std::optional<Detected> slurm_task(const rendezvous::Environment& environment) {
  const rendezvous::Launcher* const slurm = row_of("Slurm");
  if (slurm == nullptr || !rendezvous::recognised(environment, *slurm)) return std::nullopt;
  Detected said = value_or_throw(rendezvous::read(environment, *slurm));
  return said.size == 1 ? std::nullopt : std::optional(std::move(said));
}

bool one_on_each_node(const Detected& step) { return step.nodes == step.size && step.local_size.value_or(1) == 1; }

NodeRole role_by_hand(const Words& words, bool has_secret, const rendezvous::Environment& environment) {
  check_backend(words.backend);
  NodeRole role;
  const auto [least, most] = nodes_of(words.count);
  role.count = most;
  role.least = least < most ? least : 0;
  role.id = words.id.text;
  if (!words.rank.empty()) role.rank = number_of(words.rank, 0, role.count - 1);
  if (role.count == 1) return role;
  role.master = master_of(words);
  // Slurm may give the same number of nodes, and this node's rank.
  std::optional<Detected> step;
  try {
    step = slurm_task(environment);
  } catch (const Error&) {  // its variables make no sense
  }
  const bool same_step = step && one_on_each_node(*step) && step->size == role.count;
  if (words.rank.empty()) {
    if (same_step) {
      role.rank = step->rank;
    } else if (!words.endpoint.empty()) {
      role.rank = kRankAsTheyCome;
    } else {
      raise(ErrorCode::InvalidArgument,
            "{}: --node-rank is wanted, too: 0 on the host of --master-addr, and {} on the other{}; or --rdzv-endpoint "
            "HOST:PORT instead of both, the same on all: then the one on HOST is 0, and the others as they come",
            words.count.shown(), role.count == 2 ? "1" : fmt::format("1 to {}", role.count - 1),
            role.count == 2 ? "" : "s");
    }
  }
  role.source = role.rank == kRankAsTheyCome ? fmt::format("{}, {}", words.count.shown(), words.endpoint.shown())
                                             : fmt::format("{}, {}", words.count.shown(),
                                                           Word{std::to_string(role.rank), words.rank.name}.shown());
  // Then the Slurm step can carry the secret, and no file is needed.
  if (!has_secret && same_step && step->rank == role.rank) {
    role.master.reset();
    role.step = std::move(step);
    return role;
  }
  if (!role.master) {
    raise(ErrorCode::InvalidArgument,
          "{}: --master-addr HOST is wanted, too: where node rank 0 is started, the same on all nodes", role.source);
  }
  return role;
}

/// Says what to type instead, if another launcher has started several of us.
std::string way_out(const Detected& said) {
  const std::string_view name = said.launcher;
  if (name == "cohort run") return "leave the inner one out: what `cohort run` starts is a world already";
  if (name == "torchrun") {
    return fmt::format("leave one of the two out: `torchrun ... PROGRAM`, or `cohort run -np {} PROGRAM`", said.size);
  }
  if (name == "env://") {
    return fmt::format(
        "`env -u RANK -u WORLD_SIZE cohort run ...` if they are left over; for a launcher on each of {} hosts: `cohort "
        "run --nnodes {} --node-rank {} --master-addr HOST ...`",
        said.size, said.size, said.rank);
  }
  if (name == "Slurm") {
    return fmt::format(
        "one launcher on each node: `srun --ntasks-per-node=1 cohort run -np N PROGRAM`; or let srun start the ranks: "
        "`srun -n {} PROGRAM`; or run `cohort run PROGRAM` once, in the batch script",
        said.size);
  }
  // These launchers describe where processes are, and start none themselves.
  if (said.meeting == rendezvous::Meeting::Address)
    return "in each of them: `cohort run -np N --secret-file FILE PROGRAM`, without -H, with one secret for all";
  const std::string_view starter = name == "LSF (jsrun)" ? "jsrun"
                                   : name == "PMIx"      ? "prterun"
                                   : name == "Horovod"   ? "horovodrun"
                                                         : "mpirun";
  return fmt::format(
      "let {} start the ranks: `{} {} {} PROGRAM`; or run `cohort run -np N -H a:2,b:2 PROGRAM` once, not under {}",
      starter, starter, starter == "jsrun" ? "-n" : "-np", said.size, starter);
}

[[noreturn]] void refuse_several(const Detected& said) {
  raise(ErrorCode::InvalidArgument,
        "`cohort run` was started {} times, and each would be a job of its own -- {} -- {}; COHORT_ALONE=1 if each is "
        "meant to be",
        said.size, said.source, way_out(said));
}

/// Returns this launcher's role if its pod or container has the first one's address. Each pod has a launcher.
std::optional<NodeRole> role_in_pod(const Detected& said) {
  if (said.meeting != rendezvous::Meeting::Address) return std::nullopt;
  // TF_CONFIG lists tasks and not nodes, so several of them may be on one host.
  NodeRole role;
  role.rank = said.rank;
  role.count = said.size;
  role.master = said.address;
  role.source = said.source;
  role.described = true;
  return role;
}

/// Returns true if torchrun's variables say how many nodes there are, and torchrun has not started this process.
bool has_torchrun_variables(const rendezvous::Environment& environment) {
  const bool some = find(environment, "PET_NNODES") != nullptr || find(environment, "PET_STANDALONE") != nullptr;
  return some && find(environment, env::kLocalRank) == nullptr;
}

NodeRole role_by_variables(bool has_secret, const rendezvous::Environment& environment) {
  Words words = words_of({}, environment);
  // Some versions of Kubeflow give the address only by these variables.
  for (const auto& [word, name] :
       {std::pair(&words.master_addr, env::kMasterAddr), std::pair(&words.master_port, env::kMasterPort)}) {
    const std::string* const value = find(environment, name);
    if (words.endpoint.empty() && word->empty() && value != nullptr) *word = {*value, std::string(name)};
  }
  return role_by_hand(words, has_secret, environment);
}

std::optional<NodeRole> role_of(const JobSpec& spec, const rendezvous::Environment& environment) {
  const bool has_secret = !spec.secret_file.empty() || find(environment, env::kSecretFile) != nullptr;
  const auto taken = [&spec](NodeRole role) {
    if (role.count > 1 && spec.names_hosts()) {
      raise(ErrorCode::InvalidArgument,
            "{}: the hosts are those on which it is started; leave out -H, --hostfile and --nodes, or start it once, "
            "with them and without --nnodes",
            role.source);
    }
    return role;
  };
  const Words words = words_of(spec, environment);
  const bool standing = has_torchrun_variables(environment) && value_or_throw(env::flag("PET_STANDALONE", environment));
  if (spec.standalone || standing) {
    // torchrun ignores the other rendezvous options in this case, too.
    const bool several = !words.count.empty() && words.count.text != "1" && words.count.text != "1:1";
    if (several || spec.names_hosts()) {
      raise(ErrorCode::InvalidArgument, "{} and {}: the job is on this host alone, or on several; give one",
            spec.standalone ? "--standalone" : "PET_STANDALONE",
            several ? words.count.shown() : "hosts by -H, --hostfile or --nodes");
    }
    return NodeRole();
  }
  if (!spec.nnodes.empty()) return taken(role_by_hand(words, has_secret, environment));
  check_backend({spec.rdzv_backend, "--rdzv-backend"});
  // torchrun's default is one node, whose launcher may name its own host as the endpoint.
  const bool endpoint_here = !spec.rdzv_endpoint.empty() &&
                             net::is_loopback_name(words.endpoint.text.substr(0, words.endpoint.text.rfind(':')));
  for (const Word& word :
       {Word{spec.node_rank, "--node-rank"}, Word{spec.master_addr, "--master-addr"},
        Word{spec.master_port, "--master-port"}, Word{endpoint_here ? "" : spec.rdzv_endpoint, "--rdzv-endpoint"}}) {
    if (word.empty()) continue;
    if (!words.count.empty()) return taken(role_by_hand(words, has_secret, environment));
    raise(ErrorCode::InvalidArgument, "{}: --nnodes is wanted, too: on how many hosts it is started", word.shown());
  }
  if (value_or_throw(env::flag(env::kAlone, environment))) return std::nullopt;
  const auto step = slurm_task(environment);
  for (const rendezvous::Launcher& row : rendezvous::launchers()) {
    if (!rendezvous::recognised(environment, row)) continue;
    if (row.name == "Kubeflow") return taken(role_by_variables(has_secret, environment));
    const auto said = rendezvous::read(environment, row);
    if (!said) {
      if (row.name == "Slurm") throw said.error();
      // Only PMIx's library knows the number of processes, and loading it here would start threads. All but the first
      // can tell that there are several, and prterun ends a job when one process fails.
      if (const auto rank = rendezvous::possible_number(environment, "PMIX_RANK", 0);
          row.name == "PMIx" && rank.value_or(0) > 0) {
        raise(ErrorCode::InvalidArgument,
              "`cohort run` was started several times, and each would be a job of its own -- PMIX_RANK={} (PMIx) -- "
              "let prterun start the ranks: `prterun -np N PROGRAM`; or run `cohort run -np N -H a:2,b:2 PROGRAM` "
              "once, not under prterun; COHORT_ALONE=1 if each is meant to be",
              *rank);
      }
      continue;  // its variables do not say that there are several
    }
    if (said->size == 1) continue;
    // Scripts set RANK and WORLD_SIZE to Slurm's values.
    const bool slurm =
        row.name == "Slurm" || (row.name == "env://" && step && step->rank == said->rank && step->size == said->size);
    if (slurm && one_on_each_node(*step) && !spec.names_hosts()) {
      NodeRole role;
      role.rank = step->rank;
      role.count = step->size;
      role.source = step->source;
      role.step = *step;
      return role;
    }
    if (slurm) refuse_several(*step);
    if (!spec.names_hosts()) {
      if (auto role = role_in_pod(*said)) return role;
    }
    refuse_several(*said);
  }
  if (!words.count.empty()) return taken(role_by_variables(has_secret, environment));
  return std::nullopt;
}

}  // namespace

Result<std::optional<NodeRole>> choose_node(const JobSpec& spec, const rendezvous::Environment& environment) {
  return result_of([&] { return role_of(spec, environment); });
}

Result<std::string> shares_by_rank(const Plan& plan, const std::string& shares) {
  if (shares == "measured" || shares == "even") return shares;
  std::vector<std::int64_t> numbers;
  for (std::size_t at = 0; at <= shares.size();) {
    const std::size_t end = std::min(shares.find(',', at), shares.size());
    const auto number = parse_integer<std::uint16_t>(std::string_view(shares).substr(at, end - at));
    if (!number)
      return fail(ErrorCode::InvalidArgument, "--shares {}: measured, or whole numbers as 2,1 are wanted", shares);
    numbers.push_back(*number);
    at = end + 1;
  }
  if (plan.least > 0) {
    return fail(ErrorCode::InvalidArgument,
                "--shares {} with --min-np: which ranks there will be is not known -- --shares measured", shares);
  }
  if (std::ranges::all_of(numbers, [](std::int64_t number) { return number == 0; }))
    return fail(ErrorCode::InvalidArgument, "--shares {}: some host or rank has to have samples", shares);
  std::vector<const PlannedHost*> hosts;
  std::int64_t common = 1;
  for (const PlannedHost& host : plan.hosts) {
    if (host.ranks == 0) continue;
    hosts.push_back(&host);
    common = std::lcm(common, std::int64_t{host.ranks});
  }
  std::vector<std::int64_t> by_rank;
  if (numbers.size() == static_cast<std::size_t>(plan.world_size)) {
    by_rank = numbers;
  } else if (numbers.size() == hosts.size()) {
    for (std::size_t i = 0; i < hosts.size(); ++i)
      by_rank.insert(by_rank.end(), static_cast<std::size_t>(hosts[i]->ranks), numbers[i] * (common / hosts[i]->ranks));
  } else {
    return fail(ErrorCode::InvalidArgument,
                "--shares {}: {} numbers for {} hosts with {} ranks -- one for each host, or rank", shares,
                numbers.size(), hosts.size(), plan.world_size);
  }
  return fmt::format("{}", fmt::join(by_rank, ","));
}

}  // namespace cohort::launch
