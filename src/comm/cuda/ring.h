// Host memory of a communicator in which operations go through in pieces, the next into the next of its slots. Belongs
// to the operation that is carried out, of which there is one at a time; operations that wait for their turn keep it.
#pragma once

#include "comm/cuda/driver.h"
#include "sys/memory.h"

#include <array>
#include <cstddef>
#include <map>
#include <memory>

namespace cohort::comm::cuda {

class Ring {
 public:
  static constexpr std::size_t kSlots = 4;  // one that comes, one that is worked on, and two that go

  struct Slot {
    std::byte* data = nullptr;
    MarkPtr arrived;   // the input, where it is on its way
    MarkPtr departed;  // likewise, the output
  };

  /// `room` has kSlots times `slot_bytes`.
  Ring(Gpu& gpu, std::shared_ptr<std::byte> room, std::size_t slot_bytes);
  /// What a copy may still write is never used again.
  ~Ring();
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  std::size_t slot_bytes() const noexcept { return slot_bytes_; }
  Slot& next() noexcept { return slots_[turn_++ % kSlots]; }
  /// Memory of a peer from now on, so that the GPU reads it as fast as the ring's. False if the driver does not take
  /// it.
  bool pin(const std::shared_ptr<const sys::Mapping>& memory);
  /// Waits a moment for what is under way. False: it still is.
  bool settle() noexcept;

 private:
  Gpu& gpu_;
  std::shared_ptr<std::byte> room_;
  const std::size_t slot_bytes_;
  std::array<Slot, kSlots> slots_;
  struct Pinned {
    std::shared_ptr<const sys::Mapping> memory;
    bool pinned;
  };
  std::map<const sys::Mapping*, Pinned> peers_;
  std::size_t turn_ = 0;
};

/// Waits a moment until a mark has passed, which a stream that hangs keeps from it. True if it has.
bool settled(Gpu& gpu, const MarkPtr& mark, Staging::Clock::time_point limit) noexcept;
/// Until when that is.
Staging::Clock::time_point end_of_patience() noexcept;
/// Memory that a copy may still use is kept until the process ends.
void keep_for_good(std::shared_ptr<const void> memory);

}  // namespace cohort::comm::cuda
