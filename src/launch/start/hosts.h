// Which hosts a job may use: those of the command line or of a file, else those of the Slurm allocation that this
// process is in, else this one. Looks at the environment given, at this host's names and addresses, and reads the file.
#pragma once

#include "base/result.h"
#include "launch/plan/plan.h"
#include "launch/processes.h"
#include "launch/start/starter.h"

#include <map>
#include <string>
#include <vector>

namespace cohort::launch {

struct HostOptions {
  std::string list;  ///< "a:4,b:4"
  std::string file;  ///< path of a host file
  int nodes = 0;     ///< the first so many of them; 0: all
  int per_node = 0;  ///< slots of each; 0: as the list says, else 1
  /// Hosts of servers, as `list`; or "component N", all nodes of a component of a heterogeneous Slurm job. Those of the
  /// allocation have no ranks, unless `list` or `file` names them, too.
  std::string servers = {};
  enum class Starter {
    Auto,  ///< srun within a Slurm allocation, else ssh
    Ssh,
    Slurm,
    Mpi,
    Hand,   ///< somebody runs `cohort agent --join` on each
    Local,  ///< every host is this one: to see what a job of many hosts does
  };
  Starter starter = Starter::Auto;
};

struct HostChoice {
  std::vector<HostSlots> hosts;         ///< empty: this host, and as many as are wanted
  std::vector<HostSlots> server_hosts;  ///< empty: those of the ranks
  StartMethod method = StartMethod::Ssh;
  std::map<std::string, int> components;  ///< of a heterogeneous Slurm job, by host; empty: the job has one
  std::string note;                       ///< of names that are one host; empty: there are none
};

/// Fails with InvalidArgument, or Io for the file.
Result<HostChoice> choose_hosts(const HostOptions& options, const Environment& environment);

/// By name alone; a short name and a full one with the same first part are the same host.
bool same_host(const std::string& a, const std::string& b);

/// It is a name or an address of this host, also by /etc/hosts. Nobody else is asked.
bool is_this_host(const std::string& name);

}  // namespace cohort::launch
