// Send and receive over all kinds of channels (channel.h), independent of collectives. Decides who makes them progress.
// A small message is sent with its header, and its send ends immediately; a larger one is offered. Any thread may call.
// All state is under one mutex, which is locked before those of channels. Any waiting thread makes all messages
// progress. If no thread waits, callers of `attend` and the matcher's thread do; that thread sleeps until a peer wakes
// it.
#pragma once

#include "comm/engine/channel.h"
#include "comm/engine/message_ends.h"
#include "comm/engine/message_queues.h"
#include "comm/engine/pending_work.h"

#include <cohort/observer.h>
#include <cohort/work.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cohort::comm::messages {

class Matcher final : public Carrier {
 public:
  /// State that the matcher shares with its owner, and that outlives the matcher.
  struct Owner {
    Members& members;
    std::vector<Channels*> kinds;  ///< channels to all peers; the kinds that are not driven come first
    const ForkGuard& guard;
    const std::atomic<Observer*>& observer;
    std::function<std::shared_ptr<void>()> keep;  ///< returns a pointer that keeps the matcher alive
  };

  explicit Matcher(Owner owner);
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  /// Starts a checked send or receive, whose timeout is set.
  Work submit(const Request& request);
  /// Makes messages progress. Called by code that drives a channel, after it has driven it.
  void attend();
  bool idle() const noexcept { return ends_.pending() == 0; }
  bool wait_until(PendingWork& work, Clock::time_point limit) override;
  void add_callback(PendingWork& work, std::function<void()> callback) override {
    work.add_callback(mutex_, std::move(callback));
  }
  bool in_child() const noexcept override { return owner_.guard.in_child(); }
  /// Ends the thread; nothing may be submitted afterwards. `waits`: first waits for the messages under way; set it to
  /// false if these need the caller to make progress.
  void stop(bool waits = true);

 private:
  void start_thread();
  void run();
  bool attempt();
  void tell_waiting(const Message& message) noexcept;

  const Owner owner_;
  Members& members_;
  Channels& home_;  // channels on which the thread sleeps, and on which receives from any source wait

  std::mutex mutex_;
  MessageEnds ends_;
  MessageQueues queues_;
  std::uint64_t submitted_ = 0;
  bool stopping_ = false;
  bool dozing_ = false;  // the thread sleeps until it is woken
  std::thread thread_;

  std::atomic<int> tellers_{0};  // threads whose waiting is reported in the status page
  std::atomic<int> spins_;       // number of spins before yielding; adapts
};

}  // namespace cohort::comm::messages
