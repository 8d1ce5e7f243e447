// Launchers that describe a cluster, from which follows who this process is.
#include "base/env.h"
#include "base/parse.h"
#include "cluster/launchers.h"
#include "cluster/sagemaker.h"
#include "cluster/tf_config.h"

#include <algorithm>

namespace cohort::cluster {
namespace {

std::string text_of(const Environment& environment, std::string_view name) {
  const std::string* const value = find(environment, name);
  return value == nullptr ? std::string() : *value;
}

// "3", or "1:3" for a job that grows and shrinks.
struct Nodes {
  int least = 1;
  int most = 1;
};
Result<Nodes> read_nodes(const std::string& text) {
  const std::size_t colon = text.find(':');
  const auto least = parse_integer<int>(std::string_view(text).substr(0, colon));
  const auto most = colon == std::string::npos ? least : parse_integer<int>(std::string_view(text).substr(colon + 1));
  if (!least || !most || *least < 1 || *most < *least)
    return fail(ErrorCode::InvalidArgument, "PET_NNODES='{}' is neither N nor MIN:MAX -- correct or unset it", text);
  return Nodes{*least, *most};
}

// The pods' numbers are given with and without PET_; both have to say the same.
Result<std::string> one_of(const Environment& environment, std::string_view plain, std::string_view prefixed) {
  const std::string* const one = find(environment, plain);
  const std::string* const other = find(environment, prefixed);
  if (one != nullptr && other != nullptr && *one != *other) {
    return fail(ErrorCode::InvalidArgument,
                "{}={} but {}={} (Kubeflow): they contradict each other -- correct or unset one", plain, *one, prefixed,
                *other);
  }
  return one != nullptr ? *one : other != nullptr ? *other : std::string();
}

tl::unexpected<Error> no_rank(std::string_view who, std::string_view what) {
  return fail(ErrorCode::InvalidArgument,
              "{}: this process is {}, not a rank -- start the ranks from it by `cohort run`, torchrun or mpirun; to "
              "run singly on purpose, set COHORT_ALONE=1",
              who, what);
}

}  // namespace

// The operator sets torchrun's options as variables for the first process of a pod, which is to become torchrun.
// torchrun's own workers have LOCAL_RANK, and a RANK of their own.
bool is_kubeflow_pod(const Environment& environment) {
  if (find(environment, "PET_NNODES") == nullptr || find(environment, env::kLocalRank) != nullptr) return false;
  const std::string* const node = find(environment, "PET_NODE_RANK");
  if (node == nullptr) return find(environment, "PET_RDZV_ENDPOINT") != nullptr;
  const std::string* const rank = find(environment, env::kRank);
  return rank == nullptr || *rank == *node;
}

Result<Detected> read_kubeflow(const Environment& environment) {
  const auto nodes = read_nodes(text_of(environment, "PET_NNODES"));
  if (!nodes) return tl::unexpected(nodes.error());
  const std::string processes = text_of(environment, "PET_NPROC_PER_NODE");
  if (const auto count = parse_integer<int>(processes); count && *count > 1) {
    return no_rank(fmt::format("PET_NPROC_PER_NODE={} (Kubeflow)", *count),
                   fmt::format("the first one of its pod, where {} were meant, and RANK numbers the pods", *count));
  }
  if (nodes->least != nodes->most || find(environment, "PET_NODE_RANK") == nullptr) {
    if (nodes->most > 1) {
      return no_rank(fmt::format("PET_NNODES={} (Kubeflow, elastic)", text_of(environment, "PET_NNODES")),
                     "one whose number torchrun would have to find out");
    }
  }
  const auto rank = number(environment, "PET_NODE_RANK", 0);
  const auto size = number(environment, env::kWorldSize, 1);
  for (const auto* value : {&rank, &size}) {
    if (!*value) return tl::unexpected(value->error());
  }
  Detected detected;
  detected.launcher = "Kubeflow";
  detected.rank = rank->value_or(0);
  detected.size = nodes->most;
  detected.local_rank = 0;
  detected.local_size = 1;
  detected.node_rank = detected.rank;
  detected.nodes = detected.size;
  detected.source = fmt::format("PET_NODE_RANK={}, PET_NNODES={} (Kubeflow)", detected.rank, detected.size);
  if (size->value_or(detected.size) != detected.size) {
    return fail(ErrorCode::InvalidArgument,
                "WORLD_SIZE={} but PET_NNODES={} (Kubeflow) and one process per pod: they contradict each other -- "
                "correct one of them",
                **size, detected.size);
  }
  if (detected.rank >= detected.size) {
    return fail(ErrorCode::InvalidArgument,
                "PET_NODE_RANK={} but PET_NNODES={} (Kubeflow): nodes count from 0 -- correct one of them",
                detected.rank, detected.size);
  }
  if (detected.size == 1) return detected;
  const auto host = one_of(environment, env::kMasterAddr, "PET_MASTER_ADDR");
  if (!host) return tl::unexpected(host.error());
  const auto same_port = one_of(environment, env::kMasterPort, "PET_MASTER_PORT");
  if (!same_port) return tl::unexpected(same_port.error());
  if (host->empty()) {
    return fail(ErrorCode::InvalidArgument,
                "{}, but neither MASTER_ADDR nor PET_MASTER_ADDR is set: ranks have to know where to meet -- set "
                "MASTER_ADDR to the first pod's name",
                detected.source);
  }
  const bool plain = find(environment, env::kMasterPort) != nullptr;
  const auto port = port_of(environment, plain ? env::kMasterPort : "PET_MASTER_PORT");
  if (!port) return tl::unexpected(port.error());
  detected.meeting = Meeting::Address;
  detected.address = {*host, *port};
  return detected;
}

Result<Detected> read_mpijob_launcher(const Environment& environment) {
  const std::string role = text_of(environment, "K_MPI_JOB_ROLE");
  return no_rank(fmt::format("K_MPI_JOB_ROLE={} (Kubeflow MPIJob)", role), fmt::format("the {} pod's own", role));
}

Result<Detected> read_tf_config(const Environment& environment) {
  const auto config = parse_tf_config(*find(environment, "TF_CONFIG"));
  if (!config) return tl::unexpected(config.error());
  const auto place = tf_place(*config);
  if (!place) return tl::unexpected(place.error());
  const std::string source = fmt::format("task {} {} of TF_CONFIG", config->task_type, config->task_index);
  Detected detected;
  detected.servers = place->servers;
  if (place->role == TfPlace::Role::ParameterServer || place->role == TfPlace::Role::Evaluator) {
    detected.launcher = "TF_CONFIG";
    detected.source = source;
    detected.role = place->role == TfPlace::Role::Evaluator ? Role::Evaluator : Role::Server;
    detected.number = config->task_index;
    detected.workers = static_cast<int>(place->ranks.size());
    return detected;
  }
  detected.launcher = "TF_CONFIG";
  detected.source = config->task_type.empty() ? std::string("TF_CONFIG without a task") : source;
  detected.rank = place->rank;
  detected.size = place->size;
  for (const net::Address& rank : place->ranks) detected.hosts.push_back(rank.host);
  if (place->role != TfPlace::Role::Rank) return detected;
  const auto same_host = std::count(detected.hosts.begin(), detected.hosts.end(), detected.hosts.front());
  if (same_host == detected.size) {
    detected.local_rank = detected.rank;
    detected.local_size = detected.size;
  }
  detected.meeting = Meeting::Address;
  detected.address = place->ranks.front();
  if (detected.address.port == 0) {
    return fail(ErrorCode::InvalidArgument, "TF_CONFIG: the port of {} is 0; all ranks have to know the same one",
                detected.address.host);
  }
  return detected;
}

bool is_sagemaker(const Environment& environment) {
  return find(environment, "SM_HOSTS") != nullptr || find(environment, "SM_RESOURCE_CONFIG") != nullptr;
}

// The toolkit starts one process per host, unless it uses mpirun or torchrun, which are launchers of their own.
Result<Detected> read_sagemaker(const Environment& environment) {
  const std::string current = text_of(environment, "SM_CURRENT_HOST");
  const std::string list = text_of(environment, "SM_HOSTS");
  const std::string config = text_of(environment, "SM_RESOURCE_CONFIG");
  auto all = config.empty() ? parse_sagemaker_hosts(list, current) : parse_resource_config(config);
  if (!all) return tl::unexpected(all.error());
  if (!config.empty()) {
    if (all->current != current) {
      return fail(
          ErrorCode::InvalidArgument,
          "SM_CURRENT_HOST={} but SM_RESOURCE_CONFIG says {} (SageMaker): they contradict each other -- correct "
          "or unset one",
          current, all->current);
    }
    if (!list.empty()) {
      const auto listed = parse_sagemaker_hosts(list, current);
      if (!listed) return tl::unexpected(listed.error());
      if (listed->hosts != all->hosts) {
        return fail(ErrorCode::InvalidArgument,
                    "SM_HOSTS={} but SM_RESOURCE_CONFIG names other hosts (SageMaker): they contradict each other -- "
                    "correct or unset one",
                    list);
      }
    }
  }
  const auto hosts = training_hosts(*all, text_of(environment, "SM_DISTRIBUTION_INSTANCE_GROUPS"));
  if (!hosts) return tl::unexpected(hosts.error());
  Detected detected;
  detected.launcher = "SageMaker";
  const auto here = std::find(hosts->begin(), hosts->end(), current);
  if (here == hosts->end()) {
    detected.source = fmt::format("{} is in none of the groups that train (SageMaker)", current);
    return detected;
  }
  detected.rank = static_cast<int>(here - hosts->begin());
  detected.size = static_cast<int>(hosts->size());
  detected.local_rank = 0;
  detected.local_size = 1;
  detected.node_rank = detected.rank;
  detected.nodes = detected.size;
  detected.hosts = *hosts;
  detected.source =
      fmt::format("SM_CURRENT_HOST={} is number {} of {} hosts (SageMaker)", current, detected.rank, detected.size);
  // The newest toolkit counts, too: all hosts, in the same order.
  const struct {
    std::string_view name;
    int ours;
  } counted[] = {{"SM_CURRENT_HOST_RANK", detected.rank}, {"SM_HOST_COUNT", detected.size}};
  for (const auto& each : counted) {
    const auto value = number(environment, each.name, 0);
    if (!value) return tl::unexpected(value.error());
    if (!*value || **value == each.ours || hosts->size() != all->hosts.size()) continue;
    return fail(ErrorCode::InvalidArgument,
                "{}={} but {}: they contradict each other -- correct or unset one of SageMaker's variables", each.name,
                **value, detected.source);
  }
  if (detected.size == 1) return detected;
  const bool plain = find(environment, env::kMasterPort) != nullptr;
  const auto port = port_of(environment, plain ? env::kMasterPort : "SM_MASTER_PORT");
  if (!port) return tl::unexpected(port.error());
  detected.meeting = Meeting::Address;
  detected.address = {hosts->front(), *port};
  return detected;
}

}  // namespace cohort::cluster
