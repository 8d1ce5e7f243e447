#include "comm/kernels/arrays.h"

#include "comm/testing/each_target.h"
#include "comm/testing/reference_fold.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

namespace cohort::comm {
namespace {

class BFloat16 : public testing::EachTarget {};

// Halves the space of values until the nearest is left: independent of the kernel's method.
std::uint16_t nearest(float value) {
  if (std::isnan(value)) return 0x7FC0;
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(value);
  const auto below = static_cast<std::uint16_t>(bits >> 16);
  if ((bits & 0xFFFFU) == 0) return below;
  const auto above = static_cast<std::uint16_t>(below + 1);
  const auto wide = [](std::uint16_t half) {
    // An exponent of all ones stands for the next power of two here.
    const double sign = (half & 0x8000U) != 0 ? -1.0 : 1.0;
    const int exponent = (half >> 7) & 0xFF;
    const double fraction = (half & 0x7FU) / 128.0;
    return sign * std::ldexp(exponent == 0 ? fraction : 1 + fraction, (exponent == 0 ? 1 : exponent) - 127);
  };
  const double to_below = std::abs(static_cast<double>(value) - wide(below));
  const double to_above = std::abs(static_cast<double>(value) - wide(above));
  if (to_below == to_above) return (below & 1U) == 0 ? below : above;
  return to_below < to_above ? below : above;
}

std::vector<float> values(std::size_t count) {
  std::vector<float> result;
  const std::uint32_t special[] = {0,          0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF,
                                   0x7F800001, 0x00000001, 0x00008000, 0x00018000, 0x807FFFFF, 0x3F808000,
                                   0x3F818000, 0x7F7FFFFF, 0xFF7F8000, 0x7F7F7FFF};
  for (const std::uint32_t bits : special) result.push_back(std::bit_cast<float>(bits));
  std::uint32_t state = 1;
  while (result.size() < count) {
    state = state * 1664525U + 1013904223U;
    result.push_back(std::bit_cast<float>(state));
  }
  result.resize(count);
  return result;
}

TEST_F(BFloat16, RoundsToTheNearestAndBack) {
  const std::vector<float> wide = values(20000);
  on_each([&] {
    std::vector<std::uint16_t> narrow(wide.size());
    std::vector<float> back(wide.size());
    narrow_to_bfloat16(wide.data(), narrow.data(), wide.size());
    widen_from_bfloat16(narrow.data(), back.data(), wide.size());
    for (std::size_t i = 0; i < wide.size(); ++i) {
      ASSERT_EQ(narrow[i], nearest(wide[i])) << wide[i];
      ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]), std::uint32_t{narrow[i]} << 16);
    }
  });
}

TEST_F(BFloat16, TouchesNothingElse) {
  const std::vector<float> wide = values(90);
  on_each([&] {
    testing::FencedSlots slots(3, 90 * sizeof(float));
    for (std::size_t count = 0; count <= 90; ++count) {
      std::vector<std::uint16_t> narrow(count + 1);
      narrow_to_bfloat16(wide.data(), narrow.data(), count);
      std::vector<float> back(count + 1);
      widen_from_bfloat16(narrow.data(), back.data(), count);
      const auto* const from = slots.place(0, reinterpret_cast<const std::byte*>(wide.data()), count * 4, count % 5);
      auto* const to = slots.place(1, count * 2, count % 3);
      narrow_to_bfloat16(reinterpret_cast<const float*>(from), reinterpret_cast<std::uint16_t*>(to), count);
      ASSERT_TRUE(slots.holds(1, reinterpret_cast<const std::byte*>(narrow.data()))) << count;
      auto* const again = slots.place(2, count * 4, count % 7);
      widen_from_bfloat16(reinterpret_cast<const std::uint16_t*>(to), reinterpret_cast<float*>(again), count);
      ASSERT_TRUE(slots.holds(2, reinterpret_cast<const std::byte*>(back.data()))) << count;
    }
  });
}

}  // namespace
}  // namespace cohort::comm
