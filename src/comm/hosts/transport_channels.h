// The way of messages between hosts, for the matcher of sends and receives: headers are the Transport's messages, small
// payloads with them; what was offered and asked for goes as a frame. What the transport hands over is put aside under
// a mutex of this class, which is the last of the order: the matcher's, the transport's, this. Who may call what:
// messages/channel.h.
#pragma once

#include "comm/engine/channel.h"
#include "comm/hosts/world.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace cohort::comm::hosts {

class TransportChannel;

class TransportChannels final : public messages::Channels {
 public:
  /// The world outlives them.
  explicit TransportChannels(World& world);
  ~TransportChannels() override;

  bool leads_to(int peer) const noexcept override { return world_.layout().host_of(peer) != world_.layout().host; }
  std::unique_ptr<messages::Channel> open(int peer) override;
  bool look() override { return transport_.progress(); }
  std::uint32_t bell() noexcept override { return 0; }
  void arm(bool) noexcept override {}  // whatever comes ends a sleep
  void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) override;
  void wake() noexcept override { transport_.wake(); }

 private:
  friend class TransportChannel;
  struct Inbox;
  Inbox& inbox(int peer);
  void on_message(int peer, std::string_view bytes);

  World& world_;
  transport::Transport& transport_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Inbox>> inboxes_;  // by rank; made when something comes, or is to
};

}  // namespace cohort::comm::hosts
