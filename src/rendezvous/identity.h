// The host that a process is on, from facts: ranks with the same `id` can share memory and descriptors. Any thread.
// The program that this process runs, as facts that ranks of one job share: the executable by its build id, and the
// libtorch that is loaded. Two ranks that differ here would train different things and agree on nothing. Any thread.
// COHORT_PRETEND_HOSTS: one machine plays several hosts, to try out what they do. Any thread.
// Identity of this process within its world. Plain data.
#pragma once

#include "base/result.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

struct HostIdentity {
  std::string id;    ///< boot id, host name, and the namespaces that keep containers apart; compare for equality only
  std::string name;  ///< for messages: COHORT_HOST, else the host name
};

HostIdentity host_identity();

/// The executable: "train (build id 1f0c...)"; "train (4711 bytes)" where the linker wrote none.
std::string own_executable();

/// "2.5.1+cpu" of the libtorch that this process has loaded, "1.13" where only the library's name says it; empty if it
/// has loaded none (yet).
std::string loaded_torch();

/// The host of each of `size` ranks, as the text divides them; empty if the text is. InvalidArgument names the
/// variable.
Result<std::vector<int>> divide_into_hosts(std::string_view text, int size);
/// Hosts by the environment; throws what is wrong with it.
std::vector<int> fake_hosts(int size);

struct Placement {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;  ///< number of this host among the hosts
  int cross_size = 1;
  std::string host;    ///< name for messages
  std::string source;  ///< the variables that said so, e.g. "RANK, WORLD_SIZE set by cohort run"
};

}  // namespace cohort::rendezvous
