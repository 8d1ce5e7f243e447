// A worker is lost, and its last clock may have ended on some servers and not on others: asks the others how many of
// its clocks have ended there. Each answers for good, since it takes nothing from that process any more. Has a thread,
// from construction to destruction.
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
  /// Where a server's rows are served now; any thread.
  using PlaceOf = std::function<Result<net::RpcPlace>(std::uint32_t server)>;
  /// `ended`: here. `others`: the servers that are asked.
  Settlement(const Settle& question, std::int64_t ended, std::vector<std::uint32_t> others, PlaceOf place_of);
  ~Settlement();
  Settlement(const Settlement&) = delete;
  Settlement& operator=(const Settlement&) = delete;

  const Settle& question() const noexcept { return question_; }
  /// The most of all servers, once all have answered.
  std::optional<std::int64_t> result() const;
  /// Whom it cannot reach, and why.
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
