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

/// As they were typed. What is not is taken from torchrun's variables (PET_NNODES, ...), where there are any.
struct NodeOptions {
  std::string count;        ///< --nnodes
  std::string rank;         ///< --node-rank
  std::string master;       ///< --master HOST[:PORT]
  std::string master_addr;  ///< --master-addr HOST
  std::string master_port;  ///< --master-port PORT
  std::string endpoint;     ///< --rdzv-endpoint HOST[:PORT]
  std::string backend;      ///< --rdzv-backend
  std::string id;           ///< --rdzv-id
  bool standalone = false;  ///< --standalone
  bool has_secret = false;  ///< a secret file is named
  bool has_hosts = false;   ///< -H, --hostfile or --nodes
};

/// No launcher was told which one it is: the one at the endpoint is 0, the others are numbered as they come.
inline constexpr int kRankAsTheyCome = -1;

struct NodeRole {
  int rank = 0;   ///< of this launcher, its host's index in the job; or kRankAsTheyCome
  int count = 1;  ///< of launchers
  /// Where the one of rank 0 listens. Nullopt: they find each other through `step`.
  std::optional<net::Address> master;
  std::optional<cluster::Detected> step;  ///< of Slurm's, each of whose tasks is one of the launchers
  std::string id;                         ///< the same for all of them; empty: not said
  std::string source;                     ///< for messages
};

/// Nullopt: this launcher is the only one. A count of 1: it is to be so, on this host. InvalidArgument: options that
/// have no meaning, or several launchers that cannot be one job; the message has the command to use instead.
Result<std::optional<NodeRole>> choose_node(const NodeOptions& options, const cluster::Environment& environment);

/// torchrun's, where only a host is given: of --master, and of --rdzv-endpoint.
inline constexpr std::uint16_t kDefaultMasterPort = 29500;
inline constexpr std::uint16_t kDefaultEndpointPort = 29400;

}  // namespace cohort::launch
