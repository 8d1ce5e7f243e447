#include "comm/cuda/ring.h"

#include <cohort/error.h>

#include <mutex>
#include <utility>
#include <vector>

namespace cohort::comm::cuda {

Staging::Clock::time_point end_of_patience() noexcept {
  constexpr auto kLastWait = std::chrono::milliseconds(100);  // a stream may hang for good
  return Staging::Clock::now() + kLastWait;
}

bool settled(Gpu& gpu, const MarkPtr& mark, Staging::Clock::time_point limit) noexcept {
  try {
    if (mark) gpu.wait(*mark, limit);
    return true;
  } catch (const Error&) {
    return false;
  }
}

void keep_for_good(std::shared_ptr<const void> memory) {
  static std::mutex mutex;
  static auto* const kept = new std::vector<std::shared_ptr<const void>>();
  const std::lock_guard lock(mutex);
  kept->push_back(std::move(memory));
}

Ring::Ring(Gpu& gpu, std::shared_ptr<std::byte> room, std::size_t slot_bytes)
    : gpu_(gpu), room_(std::move(room)), slot_bytes_(slot_bytes) {
  for (std::size_t i = 0; i < kSlots; ++i) slots_[i].data = room_.get() + i * slot_bytes;
}

Ring::~Ring() {
  if (settle()) {
    for (const auto& [mapping, peer] : peers_) {
      if (peer.pinned) gpu_.unpin(mapping->data());
    }
    return;
  }
  keep_for_good(std::move(room_));
  for (auto& [mapping, peer] : peers_) keep_for_good(std::move(peer.memory));
}

bool Ring::pin(const std::shared_ptr<const sys::Mapping>& memory) {
  if (const auto found = peers_.find(memory.get()); found != peers_.end()) return found->second.pinned;
  // What a peer has freed is kept by nobody else.
  std::erase_if(peers_, [this](const auto& entry) {
    const bool freed = entry.second.memory.use_count() == 1;
    if (freed && entry.second.pinned) gpu_.unpin(entry.first->data());
    return freed;
  });
  const bool pinned = gpu_.pin(memory->data(), memory->bytes());
  peers_.emplace(memory.get(), Pinned{memory, pinned});
  return pinned;
}

bool Ring::settle() noexcept {
  const auto limit = end_of_patience();
  bool all = true;
  for (Slot& slot : slots_) {
    for (MarkPtr* const mark : {&slot.arrived, &slot.departed}) {
      if (settled(gpu_, *mark, limit)) {
        *mark = nullptr;
      } else {
        all = false;
      }
    }
  }
  return all;
}

}  // namespace cohort::comm::cuda
