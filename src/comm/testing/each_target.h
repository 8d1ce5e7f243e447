// For tests: places for buffers, each with a page behind it that cannot be touched, so that reading or writing one byte
// too many ends the test, and with a pattern around the placed bytes. One thread at a time.
#pragma once

#include "comm/testing/reference_fold.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <vector>

namespace cohort::comm::testing {

class FencedSlots {
 public:
  static constexpr std::size_t kMostShift = 63;

  /// Each slot takes up to `most` bytes.
  FencedSlots(std::size_t slots, std::size_t most)
      : room_((most + kGuard + kMostShift + kPage - 1) / kPage * kPage), bytes_(slots * (room_ + kPage)) {
    void* const memory = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::runtime_error("mmap");
    memory_ = static_cast<std::byte*>(memory);
    for (std::size_t slot = 0; slot < slots; ++slot) {
      if (::mprotect(end(slot), kPage, PROT_NONE) != 0) throw std::runtime_error("mprotect");
    }
    placed_.resize(slots);
  }
  ~FencedSlots() { ::munmap(memory_, bytes_); }
  FencedSlots(const FencedSlots&) = delete;
  FencedSlots& operator=(const FencedSlots&) = delete;

  /// Places `bytes` bytes that end `shift` bytes before the fence; the pattern is in them and around them.
  std::byte* place(std::size_t slot, std::size_t bytes, std::size_t shift) {
    std::byte* const data = end(slot) - shift - bytes;
    std::memset(data - kGuard, kPattern, kGuard + bytes + shift);
    placed_[slot] = {data, bytes, shift};
    return data;
  }
  /// Does the same, and copies the bytes of `value` there.
  std::byte* place(std::size_t slot, const std::byte* value, std::size_t bytes, std::size_t shift) {
    std::byte* const data = place(slot, bytes, shift);
    if (bytes > 0) std::memcpy(data, value, bytes);
    return data;
  }
  /// True if the slot holds these bytes, and the pattern around them is unchanged.
  bool holds(std::size_t slot, const std::byte* value) const {
    const Placed& placed = placed_[slot];
    const auto good = [](std::byte one) { return one == std::byte{kPattern}; };
    return (placed.bytes == 0 || std::memcmp(placed.data, value, placed.bytes) == 0) &&
           std::all_of(placed.data - kGuard, placed.data, good) &&
           std::all_of(placed.data + placed.bytes, placed.data + placed.bytes + placed.shift, good);
  }

 private:
  static constexpr std::size_t kGuard = 64;
  static inline const auto kPage = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  static constexpr int kPattern = 0xA5;
  struct Placed {
    std::byte* data = nullptr;
    std::size_t bytes = 0;
    std::size_t shift = 0;
  };

  std::byte* end(std::size_t slot) const { return memory_ + slot * (room_ + kPage) + room_; }

  const std::size_t room_;
  const std::size_t bytes_;
  std::byte* memory_ = nullptr;
  std::vector<Placed> placed_;
};

// For tests: runs a body once for each instruction set that this machine has, including the plain one without vectors.
// The choice is for the whole process, so only one test at a time may run.
class EachTarget : public ::testing::Test {
 protected:
  template <class Body>
  void on_each(const Body& body) {
    const std::int64_t all = hwy::SupportedTargets();
    int targets = 0;
    for (std::int64_t rest = all; rest != 0; rest &= rest - 1) {
      use(rest & -rest);
      SCOPED_TRACE(hwy::TargetName(rest & -rest));
      body();
      ++targets;
    }
    use(0);
    EXPECT_GE(targets, 1);
  }
  void TearDown() override { use(0); }

 private:
  static void use(std::int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
  }
};

}  // namespace cohort::comm::testing
