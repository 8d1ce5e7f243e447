// Places one agent on a host. A starter is the only part that knows how a host is reached; what it returns looks the
// same for every kind: a process on this host that ends when the agent has ended, and a lifeline that tells the agent,
// by its end, that the supervisor is gone.
#pragma once

#include "base/result.h"
#include "launch/plan.h"
#include "net/address.h"
#include "net/secret.h"
#include "sys/process.h"
#include "sys/unique_fd.h"

namespace cohort::launch {

struct AgentCall {
  PlannedHost host;
  net::Endpoint supervisor;  ///< where the agent connects to
};

struct AgentProcess {
  sys::ChildProcess process;
  sys::UniqueFd lifeline;  ///< write end; nothing is written
};

class Starter {
 public:
  virtual ~Starter() = default;
  virtual Result<AgentProcess> start(const AgentCall& call, const net::Secret& secret) = 0;
};

/// On this host: `cohort agent` in a session of its own, the secret in an inherited sealed memory file.
class LocalStarter : public Starter {
 public:
  Result<AgentProcess> start(const AgentCall& call, const net::Secret& secret) override;
};

}  // namespace cohort::launch
