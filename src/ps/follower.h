// Gets a copy of the rows that another process serves and keeps it: an image first, then each command, carried out in
// the same order. Once the map says that this process is the backup, it takes the primary's place when that is gone: at
// once after the lease if nobody listens there any more, after kSilence if it only says nothing. Has two threads, from
// construction to destruction: one gets the commands, and is never silent for long; the other carries them out.
#pragma once

#include "ps/membership.h"
#include "ps/replication.h"
#include "ps/server_map.h"
#include "ps/state.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::net {
class RpcClient;
}

namespace cohort::ps {

class Follower {
 public:
  enum class End : std::uint8_t {
    Promoted,  ///< this process serves the rows now, by the map
    Away,      ///< it has not been the backup, or is not any more
    Damaged,   ///< its copy is not what the primary has
  };
  struct Options {
    std::uint32_t rows = 0;  ///< whose
    std::string secret_file;
    std::function<std::size_t()> room;  ///< bytes that this process may still take; any thread
    std::function<void()> changed;      ///< `workers_gone` has; any thread
  };

  /// `on_end` is called on its thread, as the last thing there, unless it is destroyed before.
  Follower(Options options, Membership& membership, std::function<void(End)> on_end);
  ~Follower();
  Follower(const Follower&) = delete;
  Follower& operator=(const Follower&) = delete;

  /// Memory that the copy takes, and commands that have not been carried out yet.
  std::size_t bytes() const noexcept { return bytes_ + waiting_bytes_; }
  /// Whether all workers of the rows have left, as far as the copy knows.
  bool workers_gone() const noexcept { return workers_gone_; }
  /// After End::Promoted.
  State take() { return std::move(state_); }
  std::uint64_t epoch() const noexcept { return epoch_; }

 private:
  using Clock = std::chrono::steady_clock;
  /// Commands that lie in an answer.
  struct Batch;

  void run();
  End follow();
  /// Until the connection is lost.
  void fetch(net::RpcClient& primary);
  std::unique_ptr<net::RpcClient> connect(net::Deadline deadline, bool anew);
  bool somebody_listens() const;
  void replay();
  void carry_out(const Batch& batch);
  bool has_all() const;
  /// nullopt: the store does not answer.
  std::optional<End> promote();
  bool is_backup() const;

  const Options options_;
  Membership& membership_;
  const std::function<void(End)> on_end_;
  const std::uint64_t copy_ = static_cast<std::uint64_t>(Clock::now().time_since_epoch().count());
  Holder primary_;
  std::string endpoint_;
  State state_;  // the second thread's, until it has all
  std::uint64_t received_ = 0;
  std::uint64_t epoch_ = 0;
  Clock::time_point heard_{};
  bool disowned_ = false;  // who listens there says that it does not serve the rows to this process
  std::atomic<std::size_t> bytes_{0};
  std::atomic<bool> workers_gone_{false};
  std::atomic<bool> stopping_{false};
  std::atomic<bool> damaged_{false};
  std::atomic<std::size_t> waiting_bytes_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<Batch>> waiting_;  // the first is being carried out
  std::thread replaying_;
  std::thread thread_;
};

}  // namespace cohort::ps
