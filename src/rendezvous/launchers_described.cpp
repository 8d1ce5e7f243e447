// Launchers that describe a cluster; this process's rank follows from the description.

#include "base/env.h"
#include "base/parse.h"
#include "rendezvous/json_variables.h"
#include "rendezvous/launchers.h"

#include <algorithm>
#include <string>

namespace cohort::rendezvous {
namespace {

std::string text_of(const Environment& environment, std::string_view name) {
  const std::string* const value = find(environment, name);
  return value == nullptr ? std::string() : *value;
}

// A number of nodes: "3", or "1:3" for an elastic job.
struct Nodes {
  int least = 1;
  int most = 1;
};
Nodes read_nodes(const std::string& text) {
  const std::size_t colon = text.find(':');
  const auto least = parse_integer<int>(std::string_view(text).substr(0, colon));
  const auto most = colon == std::string::npos ? least : parse_integer<int>(std::string_view(text).substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least)
    raise(ErrorCode::InvalidArgument, "PET_NNODES='{}' is neither N nor MIN:MAX -- correct or unset it", text);
  return Nodes{*least, *most};
}

// Returns a variable that may be given with and without PET_. If both are given, they have to be equal.
std::string one_of(const Environment& environment, std::string_view plain, std::string_view prefixed) {
  const std::string* const one = find(environment, plain);
  const std::string* const other = find(environment, prefixed);
  if (one != nullptr && other != nullptr && *one != *other) {
    raise(ErrorCode::InvalidArgument, "{}={} but {}={} (Kubeflow): they contradict each other -- correct or unset one",
          plain, *one, prefixed, *other);
  }
  return one != nullptr ? *one : other != nullptr ? *other : std::string();
}

/// Sets the numbers for pods or hosts with one process each; the first one leads.
void one_for_each_pod(Detected& detected) {
  detected.local_rank = 0;
  detected.local_size = 1;
  detected.node_rank = detected.rank;
  detected.nodes = detected.size;
}

void meet_at(Detected& detected, const std::string& host, std::uint16_t port) {
  detected.meeting = Meeting::Address;
  detected.address = {host, port};
}

[[noreturn]] void no_rank(std::string_view who, std::string_view what) {
  raise(ErrorCode::InvalidArgument,
        "{}: this process is {}, not a rank -- start the ranks from it by `cohort run`, torchrun or mpirun; to "
        "run singly on purpose, set COHORT_ALONE=1",
        who, what);
}

}  // namespace

// The operator sets torchrun's options as variables for the first process of a pod, which should be torchrun.
// torchrun's workers have LOCAL_RANK, and their own RANK.
bool is_kubeflow_pod(const Environment& environment) {
  if (find(environment, "PET_NNODES") == nullptr || find(environment, env::kLocalRank) != nullptr) return false;
  const std::string* const node = find(environment, "PET_NODE_RANK");
  if (node == nullptr) return find(environment, "PET_RDZV_ENDPOINT") != nullptr;
  const std::string* const rank = find(environment, env::kRank);
  return rank == nullptr || *rank == *node;
}

Detected read_kubeflow(const Environment& environment) {
  const auto nodes = read_nodes(text_of(environment, "PET_NNODES"));
  const std::string processes = text_of(environment, "PET_NPROC_PER_NODE");
  if (const auto count = parse_integer<int>(processes); count && *count > 1) {
    no_rank(fmt::format("PET_NPROC_PER_NODE={} (Kubeflow)", *count),
            fmt::format("the first one of its pod, where {} were meant, and RANK numbers the pods", *count));
  }
  if (nodes.least != nodes.most || find(environment, "PET_NODE_RANK") == nullptr) {
    if (nodes.most > 1) {
      no_rank(fmt::format("PET_NNODES={} (Kubeflow, elastic)", text_of(environment, "PET_NNODES")),
              "one whose number torchrun would have to find out");
    }
  }
  const auto rank = number(environment, "PET_NODE_RANK", 0);
  const auto size = number(environment, env::kWorldSize, 1);
  Detected detected;
  detected.launcher = "Kubeflow";
  detected.rank = rank.value_or(0);
  detected.size = nodes.most;
  one_for_each_pod(detected);
  detected.source = fmt::format("PET_NODE_RANK={}, PET_NNODES={} (Kubeflow)", detected.rank, detected.size);
  if (size.value_or(detected.size) != detected.size) {
    raise(ErrorCode::InvalidArgument,
          "WORLD_SIZE={} but PET_NNODES={} (Kubeflow) and one process per pod: they contradict each other -- "
          "correct one of them",
          *size, detected.size);
  }
  if (detected.rank >= detected.size) {
    raise(ErrorCode::InvalidArgument,
          "PET_NODE_RANK={} but PET_NNODES={} (Kubeflow): nodes count from 0 -- correct one of them", detected.rank,
          detected.size);
  }
  if (detected.size == 1) return detected;
  const auto host = one_of(environment, env::kMasterAddr, "PET_MASTER_ADDR");
  (void)one_of(environment, env::kMasterPort, "PET_MASTER_PORT");
  if (host.empty()) {
    raise(ErrorCode::InvalidArgument,
          "{}, but neither MASTER_ADDR nor PET_MASTER_ADDR is set: ranks have to know where to meet -- set "
          "MASTER_ADDR to the first pod's name",
          detected.source);
  }
  const bool plain = find(environment, env::kMasterPort) != nullptr;
  meet_at(detected, host, port_of(environment, plain ? env::kMasterPort : "PET_MASTER_PORT"));
  return detected;
}

Detected read_mpijob_launcher(const Environment& environment) {
  const std::string role = text_of(environment, "K_MPI_JOB_ROLE");
  no_rank(fmt::format("K_MPI_JOB_ROLE={} (Kubeflow MPIJob)", role), fmt::format("the {} pod's own", role));
}

Detected read_tf_config(const Environment& environment) {
  const auto config = value_or_throw(parse_tf_config(*find(environment, "TF_CONFIG")));
  const auto place = value_or_throw(tf_place(config));
  const std::string source = fmt::format("task {} {} of TF_CONFIG", config.task_type, config.task_index);
  Detected detected;
  detected.servers = place.servers;
  if (place.role == TfPlace::Role::ParameterServer || place.role == TfPlace::Role::Evaluator) {
    detected.launcher = "TF_CONFIG";
    detected.source = source;
    detected.role = place.role == TfPlace::Role::Evaluator ? Role::Evaluator : Role::Server;
    detected.number = config.task_index;
    detected.workers = static_cast<int>(place.ranks.size());
    return detected;
  }
  detected.launcher = "TF_CONFIG";
  detected.source = config.task_type.empty() ? std::string("TF_CONFIG without a task") : source;
  detected.rank = place.rank;
  detected.size = place.size;
  for (const net::Address& rank : place.ranks) detected.hosts.push_back(rank.host);
  if (place.role != TfPlace::Role::Rank) return detected;
  const auto same_host = std::count(detected.hosts.begin(), detected.hosts.end(), detected.hosts.front());
  if (same_host == detected.size) {
    detected.local_rank = detected.rank;
    detected.local_size = detected.size;
  }
  detected.meeting = Meeting::Address;
  detected.address = place.ranks.front();
  if (detected.address.port == 0) {
    raise(ErrorCode::InvalidArgument, "TF_CONFIG: the port of {} is 0; all ranks have to know the same one",
          detected.address.host);
  }
  return detected;
}

bool is_sagemaker(const Environment& environment) {
  return find(environment, "SM_HOSTS") != nullptr || find(environment, "SM_RESOURCE_CONFIG") != nullptr;
}

// The toolkit starts one process per host, unless it uses mpirun or torchrun, which have their own rows.
Detected read_sagemaker(const Environment& environment) {
  const std::string current = text_of(environment, "SM_CURRENT_HOST");
  const std::string list = text_of(environment, "SM_HOSTS");
  const std::string config = text_of(environment, "SM_RESOURCE_CONFIG");
  const SageMakerHosts all =
      value_or_throw(config.empty() ? parse_sagemaker_hosts(list, current) : parse_resource_config(config));
  if (!config.empty()) {
    if (all.current != current) {
      raise(ErrorCode::InvalidArgument,
            "SM_CURRENT_HOST={} but SM_RESOURCE_CONFIG says {} (SageMaker): they contradict each other -- correct "
            "or unset one",
            current, all.current);
    }
    if (!list.empty()) {
      const auto listed = value_or_throw(parse_sagemaker_hosts(list, current));
      if (listed.hosts != all.hosts) {
        raise(ErrorCode::InvalidArgument,
              "SM_HOSTS={} but SM_RESOURCE_CONFIG names other hosts (SageMaker): they contradict each other -- "
              "correct or unset one",
              list);
      }
    }
  }
  const auto hosts = value_or_throw(training_hosts(all, text_of(environment, "SM_DISTRIBUTION_INSTANCE_GROUPS")));
  Detected detected;
  detected.launcher = "SageMaker";
  const auto here = std::find(hosts.begin(), hosts.end(), current);
  if (here == hosts.end()) {
    detected.source = fmt::format("{} is in none of the groups that train (SageMaker)", current);
    return detected;
  }
  detected.rank = static_cast<int>(here - hosts.begin());
  detected.size = static_cast<int>(hosts.size());
  one_for_each_pod(detected);
  detected.hosts = hosts;
  detected.source =
      fmt::format("SM_CURRENT_HOST={} is number {} of {} hosts (SageMaker)", current, detected.rank, detected.size);
  // The newest toolkit also sets rank and size, which count all hosts, in the same order.
  const struct {
    std::string_view name;
    int ours;
  } counted[] = {{"SM_CURRENT_HOST_RANK", detected.rank}, {"SM_HOST_COUNT", detected.size}};
  for (const auto& each : counted) {
    const auto value = number(environment, each.name, 0);
    if (!value || *value == each.ours || hosts.size() != all.hosts.size()) continue;
    raise(ErrorCode::InvalidArgument,
          "{}={} but {}: they contradict each other -- correct or unset one of SageMaker's variables", each.name,
          *value, detected.source);
  }
  if (detected.size == 1) return detected;
  const bool plain = find(environment, env::kMasterPort) != nullptr;
  meet_at(detected, hosts.front(), port_of(environment, plain ? env::kMasterPort : "SM_MASTER_PORT"));
  return detected;
}

namespace {

// Launchers on Kubernetes that number pods with one process each.
void pod_with_port(const Environment& environment, Detected& detected, std::string_view host, std::string_view port) {
  one_for_each_pod(detected);
  detected.address = {*find(environment, host), port_of(environment, port)};
}

}  // namespace

void complete_leader_worker_set(const Environment& environment, Detected& detected) {
  pod_with_port(environment, detected, "LWS_LEADER_ADDRESS", env::kMasterPort);
}

// Other programs may also use the markers' names.
bool is_jax_job(const Environment& environment) { return find(environment, "PROCESS_ID") != nullptr; }

void complete_jax_job(const Environment& environment, Detected& detected) {
  pod_with_port(environment, detected, "COORDINATOR_ADDRESS", "COORDINATOR_PORT");
}

// The address is "HOST:PORT", or a host with the port in another variable.
void complete_jax_trainer(const Environment& environment, Detected& detected) {
  const std::string& text = *find(environment, "JAX_COORDINATOR_ADDRESS");
  if (text.find(':') == std::string::npos)
    return pod_with_port(environment, detected, "JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_PORT");
  one_for_each_pod(detected);
  auto address = net::parse_address(text);
  if (!address || address->port == 0) {
    raise(ErrorCode::InvalidArgument, "JAX_COORDINATOR_ADDRESS='{}' is not HOST:PORT -- correct it", text);
  }
  detected.address = *std::move(address);
}

// The control plane numbers the pods of an Indexed Job. The job's author sets how many there are, and the first one's
// address. If the author also sets RANK, this row is not needed.
bool is_indexed_job(const Environment& environment) { return find(environment, env::kRank) == nullptr; }

void complete_indexed_job(const Environment&, Detected& detected) { one_for_each_pod(detected); }

// The plugins `env` and `svc` of a Volcano job: VC_TASK_INDEX, and VC_<TASK>_HOSTS with VC_<TASK>_NUM for each task.
bool is_volcano(const Environment& environment) {
  return std::any_of(environment.begin(), environment.end(), [](const auto& variable) {
    return variable.first.starts_with("VC_") && variable.first.ends_with("_HOSTS") && !variable.second.empty();
  });
}

Detected read_volcano(const Environment& environment) {
  const auto rank = number(environment, "VC_TASK_INDEX", 0);
  std::string names;
  const std::string* list = nullptr;
  for (const auto& [name, value] : environment) {
    if (!name.starts_with("VC_") || !name.ends_with("_HOSTS") || value.empty()) continue;
    if (list != nullptr) {
      raise(ErrorCode::InvalidArgument,
            "VC_TASK_INDEX={} counts the pods of one task, and this Volcano job has several ({}, {}): which of "
            "them are ranks? -- set RANK, WORLD_SIZE and MASTER_ADDR for those, or COHORT_ALONE=1 for others",
            *rank, names, name);
    }
    names = name;
    list = &value;
  }
  Detected detected;
  detected.launcher = "Volcano";
  for (std::string_view rest = *list; !rest.empty();) {
    const std::string_view host = rest.substr(0, rest.find(','));
    rest.remove_prefix(std::min(rest.size(), host.size() + 1));
    if (!host.empty()) detected.hosts.emplace_back(host);
  }
  detected.rank = *rank;
  detected.size = static_cast<int>(detected.hosts.size());
  const std::string count_name = names.substr(0, names.size() - 5) + "NUM";
  const auto count = number(environment, count_name, 1);
  if (count && *count != detected.size) {
    raise(ErrorCode::InvalidArgument, "{}={} but {} names {} hosts (Volcano) -- correct one of them", count_name,
          *count, names, detected.size);
  }
  if (detected.rank >= detected.size) {
    raise(ErrorCode::InvalidArgument,
          "VC_TASK_INDEX={} but {} names {} hosts (Volcano): tasks count from 0 -- correct one of them", detected.rank,
          names, detected.size);
  }
  detected.source = fmt::format("VC_TASK_INDEX={}, {} hosts in {} (Volcano)", detected.rank, detected.size, names);
  one_for_each_pod(detected);
  if (detected.size == 1) return detected;
  meet_at(detected, detected.hosts.front(), port_of(environment, env::kMasterPort));
  return detected;
}

namespace {

// Launchers that start other processes beside ranks, and give each a role: `cohort run --servers`, and those of ps-lite
// (MXNet, BytePS), which set DMLC_ROLE.

// Returns the variable's number; 0 if it is not set.
int count(const Environment& environment, std::string_view name, int least = 0) {
  return number(environment, name, least).value_or(0);
}

[[noreturn]] void not_among(std::string_view name, int number, std::string_view of, int all) {
  raise(ErrorCode::InvalidArgument, "{}={} but {}={}: numbers count from 0 -- correct one of them", name, number, of,
        all);
}

}  // namespace

void complete_cohort_run(const Environment& environment, Detected& detected) {
  detected.servers = count(environment, env::kServers);
  detected.elastic = find(environment, env::kWorker) != nullptr;
  // The job may have changed RANK and WORLD_SIZE since its start; a process keeps its first local rank, and its GPU.
  if (detected.elastic) detected.local_rank = detected.local_size = std::nullopt;
}

// The previous row recognises ranks, including those that a server has started.
bool is_beside_ranks(const Environment& environment) {
  const std::string* const role = find(environment, env::kRole);
  return role != nullptr && *role != to_string(Role::Worker);
}

Detected read_beside_ranks(const Environment& environment) {
  const auto role = value_or_throw(env::value(env::kRole, environment));
  const auto number = count(environment, env::kRoleNumber);
  const auto workers = count(environment, env::kWorkers);
  const auto servers = count(environment, env::kServers);
  Detected detected;
  detected.launcher = "cohort run";
  detected.role = std::get<std::string>(role) == to_string(Role::Server) ? Role::Server : Role::Evaluator;
  detected.number = number;
  detected.workers = workers;
  detected.servers = servers;
  detected.source = fmt::format("COHORT_ROLE={}, COHORT_ROLE_NUMBER={} (cohort run)", to_string(detected.role), number);
  if (detected.role == Role::Server && number >= servers) not_among(env::kRoleNumber, number, env::kServers, servers);
  return detected;
}

// Workers and servers are numbered separately. In ps-lite, the scheduler assigns the numbers. Here no scheduler is
// needed, but the numbers have to be set, as BytePS and most scripts do (DMLC_WORKER_ID).
Detected read_dmlc(const Environment& environment) {
  const std::string role = *find(environment, "DMLC_ROLE");
  const auto workers = count(environment, "DMLC_NUM_WORKER", 1);
  const auto servers = count(environment, "DMLC_NUM_SERVER");
  Detected detected;
  detected.launcher = "DMLC (ps-lite)";
  detected.workers = workers;
  detected.servers = servers;
  const bool worker = role == "worker";
  if (role == "scheduler") {
    raise(ErrorCode::InvalidArgument,
          "DMLC_ROLE=scheduler: Cohort's workers and servers find each other without one -- do not start this "
          "process");
  }
  if (!worker && role != "server") {
    raise(ErrorCode::InvalidArgument, "DMLC_ROLE='{}' is none of worker, server, scheduler -- correct or unset it",
          role);
  }
  detected.role = worker ? Role::Worker : Role::Server;
  const int all = worker ? workers : servers;
  std::string_view name = worker ? "DMLC_WORKER_ID" : "DMLC_SERVER_ID";
  if (find(environment, name) == nullptr) name = "DMLC_RANK";
  const auto given = number(environment, name, 0);
  detected.number = given;
  if (!given && all == 1) detected.number = 0;
  if (detected.number && *detected.number >= all)
    not_among(name, *detected.number, worker ? "DMLC_NUM_WORKER" : "DMLC_NUM_SERVER", all);
  detected.source = fmt::format("DMLC_ROLE={}{} (ps-lite)", role, given ? fmt::format(", {}={}", name, *given) : "");
  if (!worker) return detected;
  if (!detected.number) {
    raise(ErrorCode::InvalidArgument,
          "DMLC_ROLE=worker and DMLC_NUM_WORKER={}, but nothing says which of them this is -- set DMLC_WORKER_ID, "
          "from 0",
          workers);
  }
  detected.rank = *detected.number;
  detected.size = workers;
  if (detected.size == 1) return detected;
  const std::string* const host = find(environment, "DMLC_PS_ROOT_URI");
  const auto port = number(environment, "DMLC_PS_ROOT_PORT", 1);
  if (host == nullptr || !port || *port > 65535) {
    raise(ErrorCode::InvalidArgument,
          "{}, but DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT do not say where to meet -- set them to the host of "
          "worker 0, and a free port there",
          detected.source);
  }
  meet_at(detected, *host, static_cast<std::uint16_t>(*port));
  return detected;
}

}  // namespace cohort::rendezvous
