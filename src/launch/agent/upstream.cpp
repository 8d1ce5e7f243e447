#include "launch/agent/upstream.h"

#include <algorithm>
#include <variant>

namespace cohort::launch {
namespace {

/// Bounds the messages that wait in memory: above this, has_room() returns false.
constexpr std::size_t kMostUnsent = std::size_t{4} << 20;

}  // namespace

void Upstream::connect(std::unique_ptr<Channel> channel) {
  before_ = std::exchange(channel_, std::move(channel));
  if (!numbers_) return;
  for (Relayed& relayed : numbers_->again()) channel_->send(std::move(relayed));
}

void Upstream::send(Message message) {
  if (const auto* output = std::get_if<Output>(&message)) {
    if (lost_) return;
    unacknowledged_ += output->bytes.size();
  }
  if (numbers_) {
    Relayed relayed = numbers_->add(encode(message));
    if (channel_) channel_->send(std::move(relayed));
  } else if (channel_) {
    channel_->send(message);
  } else {
    kept_.push_back(std::move(message));
  }
}

Result<std::optional<Message>> Upstream::take(Message message) {
  const auto* const relayed = std::get_if<Relayed>(&message);
  if (!numbers_ || relayed == nullptr) return std::optional(std::move(message));
  before_.reset();  // the supervisor knows the new connection, so the end of the old one is no loss
  auto taken = numbers_->take(*relayed);
  if (numbers_->owes_acknowledgement()) channel_->send(numbers_->acknowledgement());
  return taken;
}

bool Upstream::has_room() const {
  return numbers_ ? numbers_->kept_bytes() < kMostUnsent : !channel_ || channel_->unsent_bytes() < kMostUnsent;
}

void Upstream::taken(std::uint64_t bytes) { unacknowledged_ -= std::min<std::size_t>(unacknowledged_, bytes); }

void Upstream::lose() {
  lost_ = true;
  unacknowledged_ = 0;
}

}  // namespace cohort::launch
