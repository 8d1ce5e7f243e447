// HostIdentity: the host that a process runs on. Ranks with the same `id` can share memory and descriptors. Any thread.
// own_executable, loaded_torch: the executable of this process, by its build id, and the libtorch that it has loaded.
// They have to be the same on all ranks of a world, or the ranks would train different things. Any thread.
// divide_into_hosts, fake_hosts: read COHORT_PRETEND_HOSTS, which makes one machine act as several hosts, for tests.
// Any thread. Placement: ranks of this process in its world. Plain data.
#pragma once

#include "base/result.h"

#include <string>
#include <string_view>
#include <vector>

namespace cohort::rendezvous {

struct HostIdentity {
  std::string id;    ///< boot id, host name, and the namespaces that separate containers; compare for equality only
  std::string name;  ///< for messages: COHORT_HOST, else the host name
};

HostIdentity host_identity();

/// Describes the executable: "train (build id 1f0c...)", or "train (4711 bytes)" if it has no build id.
std::string own_executable();

/// Returns the version of the libtorch that this process has loaded: "2.5.1+cpu", or "1.13" if only the library's name
/// says so; empty if none is loaded (yet).
std::string loaded_torch();

/// Returns the host number of each of `size` ranks, as the text divides them; empty for an empty text. Fails with
/// InvalidArgument, naming the variable.
Result<std::vector<int>> divide_into_hosts(std::string_view text, int size);
/// Returns the host numbers that the environment asks for. Throws InvalidArgument for a wrong value.
std::vector<int> fake_hosts(int size);

struct Placement {
  int rank = 0;
  int size = 1;
  int local_rank = 0;
  int local_size = 1;
  int cross_rank = 0;  ///< number of this host
  int cross_size = 1;
  std::string host;    ///< name for messages
  std::string source;  ///< the variables that gave these numbers, e.g. "RANK, WORLD_SIZE set by cohort run"
};

}  // namespace cohort::rendezvous
