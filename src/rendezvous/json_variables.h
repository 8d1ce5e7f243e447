// TF_CONFIG: TensorFlow's description of a cluster and of this process's task in it, as the Kubernetes operator for
// TFJob and people write it. Read strictly; both forms of a job (list, and object from index to address) and all task
// types are known. Pure functions; any thread.
// The hosts of an Amazon SageMaker training job: the text of resourceconfig.json (also found in SM_RESOURCE_CONFIG) and
// the variables of its training toolkit. Hosts keep the order of the list, which is the same on all hosts and puts
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
  bool listed = true;                 ///< a list, which is complete; an object may name only some
};

struct TfConfig {
  std::map<std::string, TfJob> cluster;  ///< by task type; empty: a single process
  std::string task_type;                 ///< "chief", "worker", "ps", "evaluator", "master"; empty if none is given
  int task_index = 0;
  std::string rpc_layer;
};

/// Fails with InvalidArgument, naming the key.
Result<TfConfig> parse_tf_config(std::string_view text);

/// A task's rank.
struct TfPlace {
  enum class Role {
    Single,           ///< no cluster, or the only task of it
    Rank,             ///< chief (or master) and workers
    Evaluator,        ///< apart from the training: a world of its own
    ParameterServer,  ///< no rank at all
  };
  Role role = Role::Single;
  int rank = 0;
  int size = 1;
  int servers = 0;
  std::vector<net::Address> ranks;  ///< where each is; the first leads. For an evaluator: those in its TF_CONFIG
};

/// The chief is rank 0, if there is one; then the workers by index. InvalidArgument where a rank's cluster does not say
/// how many there are (an object that names only some).
Result<TfPlace> tf_place(const TfConfig& config);

struct SageMakerGroup {
  std::string name;
  std::string instance_type;
  std::vector<std::string> hosts;
};

struct SageMakerHosts {
  std::string current;             ///< this host
  std::vector<std::string> hosts;  ///< all, this one included
  std::string network_interface;   ///< empty if it is not said
  std::vector<SageMakerGroup> groups;
};

/// Fails with InvalidArgument, naming the key: no JSON, no host, a host twice, the current one not among them, a group
/// with hosts that the job does not have.
Result<SageMakerHosts> parse_resource_config(std::string_view text);

/// The same from SM_HOSTS (a JSON list) and SM_CURRENT_HOST.
Result<SageMakerHosts> parse_sagemaker_hosts(std::string_view hosts, std::string_view current);

/// The hosts that train where only some groups do (`groups`: SM_DISTRIBUTION_INSTANCE_GROUPS, a JSON list; empty: all).
Result<std::vector<std::string>> training_hosts(const SageMakerHosts& all, std::string_view groups);

/// Path of the file in SageMaker's containers, also those without the training toolkit, which makes variables of it.
inline constexpr const char* kResourceConfigFile = "/opt/ml/input/config/resourceconfig.json";

/// In a container of a training job (TRAINING_JOB_NAME) whose environment does not name the hosts: adds what the
/// toolkit would have made of this file. A file that makes no sense is an error of `detect`.
void add_resource_config(Environment& environment, const std::string& path = kResourceConfigFile);

}  // namespace cohort::rendezvous
