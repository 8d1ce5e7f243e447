#include "comm/hosts/any_receive.h"

#include <algorithm>
#include <utility>

namespace cohort::comm::hosts {

using namespace std::chrono_literals;

void AnyReceive::begin() {
  here.on_done([self = shared_from_this()] { self->look(kWithinHost); });
  there.on_done([self = shared_from_this()] { self->look(kBetweenHosts); });
}

/// One of the two has ended: with a message or an error if the claim is its, else because it is the other's.
void AnyReceive::look(int at) {
  if (claim_->owner() != at) return;
  const Work& work = at == kWithinHost ? here : there;
  std::vector<std::function<void()>> callbacks;
  {
    const std::lock_guard lock(mutex_);
    outcome_ = work.error();
    source_ = work.source();
    if (source_ && at == kWithinHost) source_ = on_this_host_[static_cast<std::size_t>(*source_)];
    done_.store(true, std::memory_order_release);
    callbacks.swap(callbacks_);
    changed_.notify_all();
  }
  for (const auto& callback : callbacks) callback();
}

void AnyReceive::wait() { wait_for(24h * 365); }

bool AnyReceive::wait_for(std::chrono::nanoseconds limit) {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::min<std::chrono::nanoseconds>(limit, 24h * 365), [&] { return done(); });
}

void AnyReceive::on_done(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!done()) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

}  // namespace cohort::comm::hosts
