// The way of messages through shared memory, for the matcher of sends and receives: letters in the cells of a lane
// (lane_memory.h), small payloads in or beside them; of what was offered the receiver reads the payload out of the
// sender's memory through the kernel, or, where it may not, has it sent in fragments through the cells. Owned by the
// core of a world on one host, or of a larger world that it is part of, whose ranks are meant here. Who may call what:
// messages/path.h.
#pragma once

#include "comm/local/lane_memory.h"
#include "comm/local/world.h"
#include "comm/messages/path.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <vector>

namespace cohort::comm::local {

class Lanes final : public messages::Paths {
 public:
  /// `here`: the ranks of this host, ascending, as whoever sends calls them. The world is formed, with its plan made,
  /// and outlives the lanes.
  Lanes(const World& world, std::vector<int> here);

  bool leads_to(int peer) const noexcept override;
  std::unique_ptr<messages::Path> open(int peer) override;
  bool look() override { return false; }
  std::uint32_t bell() noexcept override { return doorbell_.bell.load(); }
  void arm(bool on) noexcept override { doorbell_.sleepers.fetch_add(on ? 1u : ~0u); }
  void sleep(std::uint32_t bell, std::chrono::nanoseconds longest) override;
  void wake() noexcept override { ring(doorbell_); }

 private:
  friend class LanePath;
  friend class Pull;
  static void ring(Doorbell& door) noexcept;

  const World& world_;
  const std::vector<int> here_;
  const LaneLayout layout_;
  std::byte* const base_;
  Doorbell& doorbell_;
  const bool pulls_allowed_;
  std::atomic<int> pulls_to_do_{0};  // that no thread is at
};

}  // namespace cohort::comm::local
