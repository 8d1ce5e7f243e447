#include "launch/agent/upstream.h"

#include <algorithm>
#include <variant>

namespace cohort::launch {
namespace {

/// Bounds the messages that wait in memory: above this, has_room() returns false.
constexpr std::size_t kMostUnsent = std::size_t{4} << 20;

}  // namespace

void Upstream::send(Message message) {
  if (const auto* output = std::get_if<Output>(&message)) {
    if (lost_) return;
    unacknowledged_ += output->bytes.size();
  }
  if (channel_)
    channel_->send(message);
  else
    kept_.push_back(std::move(message));
}

bool Upstream::has_room() const { return !channel_ || channel_->unsent_bytes() < kMostUnsent; }

void Upstream::taken(std::uint64_t bytes) { unacknowledged_ -= std::min<std::size_t>(unacknowledged_, bytes); }

void Upstream::lose() {
  lost_ = true;
  unacknowledged_ = 0;
}

}  // namespace cohort::launch
