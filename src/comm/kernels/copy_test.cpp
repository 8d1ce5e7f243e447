#include "comm/kernels/arrays.h"

#include "comm/testing/each_target.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace cohort::comm {
namespace {

using testing::Bytes;
using testing::FencedSlots;

constexpr Stores kBoth[] = {Stores::Cached, Stores::NonTemporal};

/// Bytes of which no two neighbours, lines or pages are the same.
Bytes pattern(std::size_t bytes) {
  Bytes values(bytes);
  for (std::size_t i = 0; i < bytes; ++i) values[i] = static_cast<std::byte>((i * 2654435761U) >> 13);
  return values;
}

class Copy : public testing::EachTarget {
 protected:
  /// `from` and `to` end so many bytes before pages that cannot be touched.
  static bool copies(FencedSlots& slots, const Bytes& values, std::size_t bytes, std::size_t to, std::size_t from,
                     Stores stores) {
    std::byte* const target = slots.place(0, bytes, to);
    const std::byte* const source = slots.place(1, values.data(), bytes, from);
    copy(target, source, bytes, stores);
    return slots.holds(0, values.data()) && slots.holds(1, values.data());
  }
};

TEST_F(Copy, EverySmallSizeAtEveryAlignment) {
  constexpr std::size_t kMost = 300;
  FencedSlots slots(2, kMost);
  const Bytes values = pattern(kMost);
  on_each([&] {
    for (const Stores stores : kBoth) {
      for (std::size_t bytes = 0; bytes <= kMost; ++bytes) {
        for (std::size_t to = 0; to < 64; ++to) {
          const std::size_t from = (to * 37 + bytes * 11) % 64;  // each of the 64 with each of the others, in the end
          ASSERT_TRUE(copies(slots, values, bytes, to, from, stores))
              << bytes << " bytes, " << to << " and " << from << " before the end, "
              << (stores == Stores::Cached ? "cached" : "non-temporal");
        }
      }
    }
  });
}

TEST_F(Copy, LargePrimesAtEveryAlignment) {
  FencedSlots slots(2, 1048583);
  const Bytes values = pattern(1048583);
  on_each([&] {
    for (const Stores stores : kBoth) {
      for (const std::size_t bytes : {std::size_t{4093}, std::size_t{4099}, std::size_t{65537}}) {
        for (std::size_t shift = 0; shift < 64; ++shift) {
          ASSERT_TRUE(copies(slots, values, bytes, shift, (shift * 29 + bytes) % 64, stores)) << bytes << " " << shift;
        }
      }
      for (const std::size_t shift : {std::size_t{0}, std::size_t{21}, std::size_t{63}}) {
        ASSERT_TRUE(copies(slots, values, 1048583, shift, 63 - shift, stores)) << shift;
      }
    }
  });
}

TEST_F(Copy, PiecesWithOneFenceAreOneCopy) {
  constexpr std::size_t kBytes = 10007;
  FencedSlots slots(2, kBytes);
  const Bytes values = pattern(kBytes);
  on_each([&] {
    for (const Stores stores : kBoth) {
      for (const std::size_t piece : {std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{1000}}) {
        std::byte* const target = slots.place(0, kBytes, 5);
        const std::byte* const source = slots.place(1, values.data(), kBytes, 0);
        for (std::size_t at = 0; at < kBytes; at += piece) {
          copy_unfenced(target + at, source + at, std::min(piece, kBytes - at), stores);
        }
        fence(stores);
        ASSERT_TRUE(slots.holds(0, values.data())) << piece;
      }
    }
  });
}

TEST_F(Copy, OfNothingTouchesNothing) {
  on_each([] {
    for (const Stores stores : kBoth) copy(nullptr, nullptr, 0, stores);
  });
}

}  // namespace
}  // namespace cohort::comm
