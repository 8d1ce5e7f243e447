// TF_CONFIG: TensorFlow's description of a cluster and of this process's task in it, as people and the Kubernetes
// operator for TFJob write it. Read strictly. Both forms of a job (list, and object from index to address) and all task
// types are supported. Pure functions; any thread.
// SageMakerHosts: the hosts of an Amazon SageMaker training job, from resourceconfig.json (also in SM_RESOURCE_CONFIG)
// or the variables of its training toolkit. Hosts keep the list's order, which is the same on all hosts and puts
// algo-10 before algo-2. Any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "rendezvous/detect.h"

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

/// The tasks of one kind.
struct TfJob {
  std::map<int, net::Address> tasks;  ///< by index
  bool listed = true;                 ///< given as a list, so complete; an object may name only some tasks
};

struct TfConfig {
  std::map<std::string, TfJob> cluster;  ///< by task type; empty: a single process
  std::string task_type;                 ///< "chief", "worker", "ps", "evaluator", "master"; empty if none is given
  int task_index = 0;
  std::string rpc_layer;
};

/// Fails with InvalidArgument, naming the wrong key.
Result<TfConfig> parse_tf_config(std::string_view text);

/// A task's rank.
struct TfPlace {
  enum class Role {
    Single,           ///< no cluster, or its only task
    Rank,             ///< chief (or master) and workers
    Evaluator,        ///< not part of the training; has a world of its own
    ParameterServer,  ///< has no rank
  };
  Role role = Role::Single;
  int rank = 0;
  int size = 1;
  int servers = 0;
  std::vector<net::Address> ranks;  ///< by rank (0 leads); for an evaluator, the addresses in its TF_CONFIG
};

/// Returns a task's rank: the chief, if there is one, is rank 0; then the workers by index. Fails with InvalidArgument
/// if the cluster does not tell the number of ranks (an object that names only some tasks).
Result<TfPlace> tf_place(const TfConfig& config);

struct SageMakerGroup {
  std::string name;
  std::string instance_type;
  std::vector<std::string> hosts;
};

struct SageMakerHosts {
  std::string current;             ///< this host
  std::vector<std::string> hosts;  ///< all hosts, including this one
  std::string network_interface;   ///< empty if not given
  std::vector<SageMakerGroup> groups;
};

/// Fails with InvalidArgument, naming the key, for: no JSON, no host, a host twice, a current host that is not listed,
/// a group with hosts that the job does not have.
Result<SageMakerHosts> parse_resource_config(std::string_view text);

/// Reads the hosts from SM_HOSTS (a JSON list) and SM_CURRENT_HOST instead.
Result<SageMakerHosts> parse_sagemaker_hosts(std::string_view hosts, std::string_view current);

/// Returns the hosts of the groups that train. `groups`: SM_DISTRIBUTION_INSTANCE_GROUPS, a JSON list; empty: all.
Result<std::vector<std::string>> training_hosts(const SageMakerHosts& all, std::string_view groups);

/// Path of the file in SageMaker's containers, also in those without the training toolkit, which makes variables of it.
inline constexpr const char* kResourceConfigFile = "/opt/ml/input/config/resourceconfig.json";

/// In a container of a training job (TRAINING_JOB_NAME) whose environment does not name the hosts, adds the variables
/// that the toolkit would have set from this file. If the file is invalid, `detect` fails.
void add_resource_config(Environment& environment, const std::string& path = kResourceConfigFile);

}  // namespace cohort::rendezvous
