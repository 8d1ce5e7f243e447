#include "launch/numbered_messages.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace cohort::launch {
namespace {

/// An acknowledgement is sent after this many messages, or bytes, that no other message has acknowledged.
constexpr std::uint64_t kMostUnsaid = 16;
constexpr std::size_t kMostUnsaidBytes = std::size_t{256} << 10;

}  // namespace

std::vector<int> routers_of(std::size_t agents) {
  std::vector<int> routers(agents, -1);
  if (agents <= kMostDirect) return routers;
  const auto root = static_cast<std::size_t>(std::ceil(std::sqrt(static_cast<double>(agents))));
  const std::size_t group = std::min(root, kMostChildren + 1);  // the router and its children
  for (std::size_t at = 0; at < agents; ++at) {
    if (at % group != 0) routers[at] = static_cast<int>(at - at % group);
  }
  return routers;
}

MessageNumber NumberedMessages::number(std::uint64_t number) {
  said_ = received_;
  bytes_since_ = 0;
  return {host_, number, received_};
}

Relayed NumberedMessages::add(std::string bytes) {
  kept_bytes_ += bytes.size();
  kept_.push_back(bytes);
  return {number(++sent_), std::move(bytes)};
}

Result<std::optional<Message>> NumberedMessages::take(const Relayed& relayed) {
  while (!kept_.empty() && sent_ - kept_.size() < relayed.number.received) {
    kept_bytes_ -= kept_.front().size();
    kept_.pop_front();
  }
  if (relayed.number.number <= received_) return std::nullopt;
  if (relayed.number.number != received_ + 1) {
    return fail(ErrorCode::Corrupt, "message {} of host {} came after message {}", relayed.number.number, host_,
                received_);
  }
  auto message = decode(relayed.bytes);
  if (!message) return tl::unexpected(message.error());
  ++received_;
  bytes_since_ += relayed.bytes.size();
  return std::optional(*std::move(message));
}

bool NumberedMessages::owes_acknowledgement() const noexcept {
  return received_ - said_ >= kMostUnsaid || bytes_since_ >= kMostUnsaidBytes;
}

Relayed NumberedMessages::acknowledgement() { return {number(0), {}}; }

std::vector<Relayed> NumberedMessages::again() {
  std::vector<Relayed> all = {acknowledgement()};
  for (std::size_t i = 0; i < kept_.size(); ++i) all.push_back({number(sent_ - kept_.size() + 1 + i), kept_[i]});
  return all;
}

}  // namespace cohort::launch
