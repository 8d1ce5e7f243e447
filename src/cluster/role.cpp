#include <cohort/role.h>

#include "cluster/detect.h"

namespace cohort {

const char* to_string(Role role) noexcept {
  switch (role) {
    case Role::Worker: return "worker";
    case Role::Server: return "server";
    case Role::Evaluator: return "evaluator";
  }
  return "?";
}

namespace {
cluster::Detected here() { return value_or_throw(cluster::detect(cluster::current_environment())); }
}  // namespace

Role role() { return here().role; }

int role_number() {
  const cluster::Detected detected = here();
  if (!detected.number)
    raise(ErrorCode::Unavailable, "role_number: {} does not say which of them this process is", detected.source);
  return *detected.number;
}

int num_workers() { return here().workers; }

int num_servers() { return here().servers; }

}  // namespace cohort
