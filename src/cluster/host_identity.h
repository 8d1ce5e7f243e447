// Which host a process is on, from facts: ranks with the same `id` can share memory and descriptors. Any thread.
#pragma once

#include <string>

namespace cohort::cluster {

struct HostIdentity {
  std::string id;    ///< boot id, host name, and the namespaces that keep containers apart; compare for equality only
  std::string name;  ///< for messages: COHORT_HOST, else the host name
};

HostIdentity host_identity();

}  // namespace cohort::cluster
