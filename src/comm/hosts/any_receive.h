// A receive from any source where some ranks are on this host and some on others: it is posted in both places, and the
// one that takes its claim carries it out. Both progress by threads of their own; whoever waits sleeps until one is
// done. Any thread may call.
#pragma once

#include "comm/hosts/layout.h"
#include "comm/request.h"
#include "comm/work_state.h"

#include <cohort/work.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace cohort::comm::hosts {

class AnyReceive final : public WorkState, public std::enable_shared_from_this<AnyReceive> {
 public:
  AnyReceive(std::shared_ptr<const Claim> claim, const Layout& layout, std::function<bool()> in_child)
      : claim_(std::move(claim)), on_this_host_(layout.here()), in_child_(std::move(in_child)) {}

  /// Both have been set.
  void begin();

  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  bool done() const noexcept override { return done_.load(std::memory_order_acquire); }
  const std::optional<Error>& outcome() const noexcept override { return outcome_; }
  void on_done(std::function<void()> callback) override;
  std::optional<int> source() const noexcept override { return source_; }
  bool at_home() const noexcept override { return !in_child_(); }

  Work here;
  Work there;

 private:
  void look(int at);

  const std::shared_ptr<const Claim> claim_;
  const std::vector<int> on_this_host_;
  const std::function<bool()> in_child_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::optional<Error> outcome_;  // written before done_, as the source
  std::optional<int> source_;
  std::atomic<bool> done_{false};
  std::vector<std::function<void()>> callbacks_;
};

}  // namespace cohort::comm::hosts
