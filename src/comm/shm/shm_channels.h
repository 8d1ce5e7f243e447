// The way of messages through shared memory, for the matcher of sends and receives: headers in the cells of a ring
// (shm_ring.h), small payloads in or beside them; of what was offered the receiver reads the payload out of the
// sender's memory through the kernel, or, where it may not, has it sent in fragments through the cells. Owned by the
// core of a world on one host, or of a larger world that it is part of, whose ranks are meant here. Who may call what:
// messages/channel.h.
#pragma once

#include "comm/engine/channel.h"
#include "comm/shm/control.h"
#include "comm/shm/world.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace cohort::comm::local {

class ShmChannels final : public messages::Channels {
 public:
  /// `here`: the ranks of this host, ascending, as whoever sends calls them. The world is formed, with its plan made,
  /// and outlives the rings.
  ShmChannels(const World& world, std::vector<int> here);

  bool leads_to(int peer) const noexcept override;
  std::unique_ptr<messages::Channel> open(int peer) override;
  bool look() override { return false; }
  std::uint32_t bell() noexcept override { return wakeup_.bell.load(); }
  void arm(bool on) noexcept override { wakeup_.sleepers.fetch_add(on ? 1u : ~0u); }
  void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) override;
  void wake() noexcept override { ring(wakeup_); }

 private:
  friend class ShmChannel;
  friend class Pull;
  static void ring(WakeupWord& door) noexcept;

  const World& world_;
  const std::vector<int> here_;
  const ShmRingLayout layout_;
  std::byte* const base_;
  WakeupWord& wakeup_;
  const bool pulls_allowed_;
  std::atomic<int> pulls_to_do_{0};  // that no thread is at
};

}  // namespace cohort::comm::local
