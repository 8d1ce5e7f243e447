#include "comm/hosts/hosts_communicator.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <string>
#include <utility>

namespace cohort::comm::hosts {

using messages::Arrival;
using messages::Channel;
using messages::HeaderKind;
using messages::Lock;
using messages::Message;
using messages::MessageHeader;
using messages::Transfer;

namespace {

constexpr std::size_t kEager = std::size_t{16} << 10;
constexpr std::uint64_t kMetAtOnce = 32;                   // most that one header reports (OfChannel)
constexpr std::uint64_t kOfPost = std::uint64_t{1} << 63;  // bit in the operation number of frames

}  // namespace

/// Headers received from a peer. Guarded by the channels' mutex, except for the counters.
struct TransportChannels::Inbox {
  struct Entry {
    MessageHeader header;
    std::string bytes;  // the header, then the payload
  };
  std::deque<Entry> entries;
  std::atomic<std::size_t> size{0};
  std::atomic<std::uint64_t> met{0};  // eager messages to the peer that have met their receives
};

class TransportChannel final : public Channel {
 public:
  TransportChannel(TransportChannels& channels, TransportChannels::Inbox& inbox, int peer)
      : Channel(kEager), channels_(channels), transport_(channels.transport_), inbox_(inbox), peer_(peer) {}

  bool stirred() const noexcept override { return inbox_.size.load(std::memory_order_relaxed) > 0; }
  bool peek(Arrival& arrival) noexcept override;
  void take() noexcept override;
  bool put(const MessageHeader& header, const std::byte* payload) override;
  void note_met() override;
  std::uint64_t met() const noexcept override { return inbox_.met.load(std::memory_order_acquire); }
  std::unique_ptr<Transfer> send_payload(const Message& message, std::uint64_t offer) override;
  std::unique_ptr<Transfer> receive_payload(const Message& message, const MessageHeader& offer) override;

 private:
  TransportChannels& channels_;
  transport::Transport& transport_;
  TransportChannels::Inbox& inbox_;
  const int peer_;
  std::uint64_t met_untold_ = 0;
};

namespace {

class Leaving final : public Transfer {
 public:
  Leaving(transport::Transport& transport, int peer, const Message& message, std::uint64_t offer) : Transfer(false) {
    frame_.peer = peer;
    frame_.operation = kOfPost | offer;
    frame_.data = message.from;
    frame_.bytes = message.bytes();
    frame_.authenticated = may_be_object(message.dtype);
    transport.send(frame_);
  }
  Result<Step> step(Lock&) override { return frame_.done.load(std::memory_order_acquire) ? Step::Over : Step::Still; }

 private:
  transport::Outgoing frame_;
};

class Arriving final : public Transfer {
 public:
  Arriving(transport::Transport& transport, int peer, const Message& message, std::uint64_t offer) : Transfer(true) {
    frame_.peer = peer;
    frame_.operation = kOfPost | offer;
    frame_.to = message.to;
    frame_.room = message.bytes();
    frame_.authenticated = may_be_object(message.dtype);
    transport.receive(frame_);
  }
  Result<Step> step(Lock&) override {
    if (!frame_.done.load(std::memory_order_acquire)) return Step::Still;
    if (frame_.bytes == frame_.room) return Step::Over;
    return fail(ErrorCode::Corrupt, "its payload has {} bytes where {} were offered", frame_.bytes, frame_.room);
  }

 private:
  transport::Incoming frame_;
};

}  // namespace

// --- TransportChannels ---

TransportChannels::TransportChannels(World& world)
    : Channels(true),
      world_(world),
      transport_(world.transport()),
      inboxes_(static_cast<std::size_t>(world.layout().size)) {
  world_.message_handler = [this](int peer, std::uint32_t, std::string_view bytes) { on_message(peer, bytes); };
}

TransportChannels::~TransportChannels() {
  const std::lock_guard lock(transport_.mutex());
  world_.message_handler = nullptr;
}

TransportChannels::Inbox& TransportChannels::inbox(int peer) {
  const std::lock_guard lock(mutex_);
  auto& found = inboxes_[static_cast<std::size_t>(peer)];
  if (!found) found = std::make_unique<Inbox>();
  return *found;
}

std::unique_ptr<Channel> TransportChannels::open(int peer) {
  transport_.connect(peer);  // only over a connection is the loss of the peer noticed
  return std::make_unique<TransportChannel>(*this, inbox(peer), peer);
}

void TransportChannels::sleep(std::uint32_t, std::chrono::nanoseconds longest) {
  transport_.sleep(std::chrono::ceil<std::chrono::milliseconds>(longest));
}

/// Called under the transport's mutex, so it sends no answer.
void TransportChannels::on_message(int peer, std::string_view bytes) {
  const auto header = messages::read_header(bytes, kEager);
  if (!header) return world_.on_broken(peer, header.error().what());
  Inbox& to = inbox(peer);
  if (header->kind == HeaderKind::OfChannel) {
    to.met.fetch_add(header->offer, std::memory_order_release);
    return;
  }
  const std::lock_guard lock(mutex_);
  to.entries.push_back({*header, std::string(bytes)});
  to.size.fetch_add(1, std::memory_order_release);
}

// --- headers ---

bool TransportChannel::peek(Arrival& arrival) noexcept {
  if (inbox_.size.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(channels_.mutex_);
  const TransportChannels::Inbox::Entry& first = inbox_.entries.front();
  arrival.header = first.header;
  arrival.payload = reinterpret_cast<const std::byte*>(first.bytes.data()) + messages::kHeaderBytes;
  return true;
}

void TransportChannel::take() noexcept {
  const std::lock_guard lock(channels_.mutex_);
  inbox_.entries.pop_front();
  inbox_.size.fetch_sub(1, std::memory_order_relaxed);
}

/// Sends nothing to a lost peer; waiting messages report the loss.
bool TransportChannel::put(const MessageHeader& header, const std::byte* payload) {
  if (transport_.lost(peer_)) return false;
  std::string text = codec::encode(header);
  if (header.kind == HeaderKind::Eager) text.append(reinterpret_cast<const char*>(payload), header.bytes());
  transport_.message(peer_, 0, text);
  return true;
}

void TransportChannel::note_met() {
  if (++met_untold_ < kMetAtOnce) return;
  MessageHeader told;
  told.kind = HeaderKind::OfChannel;
  told.offer = std::exchange(met_untold_, 0);
  put(told, nullptr);
}

std::unique_ptr<Transfer> TransportChannel::send_payload(const Message& message, std::uint64_t offer) {
  return std::make_unique<Leaving>(transport_, peer_, message, offer);
}

std::unique_ptr<Transfer> TransportChannel::receive_payload(const Message& message, const MessageHeader& offer) {
  return std::make_unique<Arriving>(transport_, peer_, message, offer.offer);
}

}  // namespace cohort::comm::hosts
