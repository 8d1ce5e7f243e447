// TF_CONFIG: TensorFlow's description of a cluster and of this process's task in it, as the Kubernetes operator for
// TFJob and people write it. Read strictly; both forms of a job (list, and object from index to address) and all task
// types are known. Pure functions; any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::cluster {

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

/// Which rank a task is.
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
  std::vector<net::Address> ranks;  ///< where each is; the first leads. Of an evaluator: of those that it is told of
};

/// The chief is rank 0, if there is one; then the workers by index. InvalidArgument where a rank's cluster does not say
/// how many there are (an object that names only some).
Result<TfPlace> tf_place(const TfConfig& config);

}  // namespace cohort::cluster
