// Settlement: when a worker is lost, its last clock may have ended on some servers only. Asks the other servers how
// many of the worker's clocks have ended there. Their answers are final, since each then accepts nothing more from that
// process. Has a thread, from construction to destruction. The other functions: the thread that has made it.
#pragma once

#include "net/rpc.h"
#include "ps/protocol.h"

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace cohort::ps {

class Settlement {
 public:
  /// Returns the address that serves a server's rows now; any thread.
  using PlaceOf = std::function<Result<net::RpcPlace>(std::uint32_t server)>;
  /// `ended`: number of the worker's clocks that have ended on this server. `others`: the servers to ask.
  Settlement(const Settle& question, std::int64_t ended, std::vector<std::uint32_t> others, PlaceOf place_of);
  ~Settlement();
  Settlement(const Settlement&) = delete;
  Settlement& operator=(const Settlement&) = delete;

  const Settle& question() const noexcept { return question_; }
  /// The largest number of ended clocks on any server; nullopt until all servers have answered.
  std::optional<std::int64_t> result() const;
  /// Names the servers that cannot be reached, and says why.
  std::string trouble() const;

 private:
  void run();

  const Settle question_;
  const std::vector<std::uint32_t> others_;
  const PlaceOf place_of_;
  std::atomic<bool> stopping_{false};
  mutable std::mutex mutex_;
  std::int64_t most_;
  bool settled_ = false;
  std::string trouble_;
  std::thread thread_;
};

}  // namespace cohort::ps
