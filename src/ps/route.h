// A worker's way to whoever serves one server's rows now: the process that did, or the one that has taken its place,
// for which the other servers are asked. One thread at a time, but for what says otherwise.
#pragma once

#include "net/rpc.h"
#include "ps/protocol.h"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace cohort::ps {

class Route {
 public:
  /// To the rows of `hello.server`.
  Route(const Hello& hello, std::string secret_file);

  struct Met {
    std::shared_ptr<net::RpcClient> rpc;
    Welcome welcome;
  };
  /// Until it has been let in or the deadline has passed: Timeout. Or throws what the server has against it.
  Met meet(Hello hello, net::Deadline deadline);
  /// Whether another process serves the rows by now; asks the other servers for a moment. Any thread.
  bool has_moved();

 private:
  struct Place {
    std::string endpoint;
    std::uint64_t epoch = 0;  ///< 0: nobody would take its place
  };
  /// Nobody, but where it is `elsewhere`, if that is what the process there says.
  Met greet(const net::RpcPlace& at, const Hello& hello, net::Deadline deadline, Place& elsewhere) const;
  /// Goes on through shared memory if the process at `place` is on this host.
  void share_memory(Met& met, net::RpcPlace place, const Hello& hello, net::Deadline deadline) const;
  Place place() const;
  void set(const Place& place);
  /// The newest that the others know.
  Place ask_others(std::chrono::milliseconds each) const;
  void demand_that_it_runs(const std::string& endpoint) const;

  const std::vector<std::string> servers_;
  const std::uint32_t rows_;
  const std::string secret_file_;
  mutable std::mutex mutex_;
  Place place_;
};

}  // namespace cohort::ps
