// Where `cohort run` is started on each host of one job (by hand as torchrun is, by srun, in pods): which of these
// launchers this one is, and where they meet. The one of node rank 0 supervises, the others are its agents. Where a
// launcher's environment says that there are several of us and no way leads to one job, that is an error: each would
// train on its own. Pure.
#pragma once

#include "base/result.h"
#include "cluster/detect.h"
#include "net/address.h"

#include <optional>
#include <string>

namespace cohort::launch {

/// As they were typed.
struct NodeWishes {
  std::string count;        ///< --nnodes
  std::string rank;         ///< --node-rank
  std::string master;       ///< --master HOST[:PORT]
  std::string master_addr;  ///< --master-addr HOST
  std::string master_port;  ///< --master-port PORT
  bool has_secret = false;  ///< a secret file is named
  bool has_hosts = false;   ///< -H, --hostfile or --nodes
};

struct NodeRole {
  int rank = 0;   ///< of this launcher; its host's index in the job
  int count = 1;  ///< of launchers
  /// Where the one of rank 0 listens. Nullopt: they find each other through `step`.
  std::optional<net::Address> master;
  std::optional<cluster::Detected> step;  ///< of Slurm's, each of whose tasks is one of the launchers
  std::string source;                     ///< for messages
};

/// Nullopt: this launcher is the only one. InvalidArgument: wishes that have no meaning, or several launchers that
/// cannot be one job; the message has the command to use instead.
Result<std::optional<NodeRole>> choose_node(const NodeWishes& wishes, const cluster::Environment& environment);

/// torchrun's, where only a host is given.
inline constexpr std::uint16_t kDefaultMasterPort = 29500;

}  // namespace cohort::launch
