// A server's place in the map of its job's store: enters it, looks at it again and again, and changes it by
// compare-and-set. Has a thread, from construction to destruction, which tells of each map that is new. Its methods may
// be called from any thread.
#pragma once

#include "base/result.h"
#include "net/address.h"
#include "net/store.h"
#include "ps/server_map.h"

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

namespace cohort::ps {

class Membership {
 public:
  struct Options {
    std::uint32_t number = 0;
    std::uint32_t servers = 1;
    std::uint32_t replicas = 0;
    std::string endpoint;
  };
  using OnMap = std::function<void(const ServerMap&)>;
  using Edit = std::function<Outcome(ServerMap&)>;

  /// Connects to the job's store and enters the map. Throws Unavailable where there is none, Mismatch.
  explicit Membership(Options options);
  ~Membership();
  Membership(const Membership&) = delete;
  Membership& operator=(const Membership&) = delete;

  /// From now on there is a thread, and `on_map` is called there. Once.
  void start(OnMap on_map);
  const Holder& self() const noexcept { return self_; }
  /// The newest that is known.
  ServerMap map() const;
  /// Until the store has said that the change has been made, by this call or before, or that it is refused. Timeout,
  /// with the reason: it is not known.
  Result<Outcome> change(const Edit& edit, net::Deadline deadline);
  /// Does it on the thread, one after the other.
  void later(std::function<void()> task);

 private:
  void run();
  void look();
  void found(const ServerMap& map);

  const Options options_;
  OnMap on_map_;
  const std::string key_;
  Holder self_;
  Member member_;

  std::mutex store_mutex_;  // which store it is
  std::shared_ptr<store::Store> store_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool stopping_ = false;
  std::deque<std::function<void()>> tasks_;
  ServerMap map_;
  std::thread thread_;
};

}  // namespace cohort::ps
