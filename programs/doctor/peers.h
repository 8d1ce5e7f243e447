// What goes between two hosts that `cohort doctor` looks at: each listens, and knocks at every address of every other.
// Who does not prove the job's secret gets nothing (net/acceptor.h). Every wait has a deadline. A ProbeServer has
// threads of its own, which end with the process; the functions block and may be called from any thread.
#pragma once

#include "doctor/facts.h"
#include "net/secret.h"

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::doctor {

/// Where the others may knock.
class ProbeServer {
 public:
  /// Listens, and answers until the process ends. `host`: its index.
  static Result<ProbeServer> open(int host, const net::Secret& secret);
  int port() const noexcept { return port_; }

 private:
  int port_ = 0;
};

struct PeerAddress {
  int peer = 0;  ///< index of the host
  std::string address;
  int port = 0;
};

/// Knocks at all of them, many at a time, with a deadline for each. Those whose turn has not come after `limit` are
/// kNotTried.
std::vector<ProbeFacts> probe(const std::vector<PeerAddress>& addresses, const net::Secret& secret,
                              std::chrono::milliseconds limit);

struct SpeedRequest {
  int from = 0, to = 0;
  std::string address;
  int port = 0;
};
/// A short transfer there and another one back, as ranks send: without encryption.
SpeedFacts measure(const SpeedRequest& request, const net::Secret& secret);

}  // namespace cohort::doctor
