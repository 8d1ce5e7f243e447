
#include <cohort/error.h>
#include <cohort/finite.h>

#include "comm/kernels/arrays.h"
#include "comm/testing/each_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace cohort::comm {
namespace {

class Finite : public testing::EachTarget {};

// Tests the bits of a value by their definition: not finite is an exponent of all ones.
bool is_finite(std::uint64_t bits, int exponent_bits, int fraction_bits) {
  const std::uint64_t ones = (std::uint64_t{1} << exponent_bits) - 1;
  return ((bits >> fraction_bits) & ones) != ones;
}

TEST_F(Finite, EveryValueOf16BitsIsJudged) {
  struct Type {
    DType dtype;
    int exponent_bits, fraction_bits;
  };
  on_each([&] {
    for (const Type type : {Type{DType::Float16, 5, 10}, Type{DType::BFloat16, 8, 7}}) {
      std::vector<std::uint16_t> values(37, 0x3C00);
      for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
        const std::size_t at = bits % values.size();
        const std::uint16_t before = std::exchange(values[at], static_cast<std::uint16_t>(bits));
        const auto found = first_non_finite({values.data(), 37, type.dtype});
        if (is_finite(bits, type.exponent_bits, type.fraction_bits)) {
          ASSERT_EQ(found, std::nullopt) << bits;
        } else {
          ASSERT_EQ(found, static_cast<std::int64_t>(at)) << bits;
        }
        values[at] = before;
      }
    }
  });
}

// All signs and exponents, with fractions at both ends, a denormal and its neighbours among them.
TEST_F(Finite, AllExponentsOfWiderTypesAreJudged) {
  on_each([] {
    for (std::uint32_t top = 0; top <= 0x1FF; ++top) {
      for (const std::uint32_t fraction : {0U, 1U, 0x3FFFFFU, 0x400000U, 0x7FFFFFU}) {
        const std::uint32_t bits = (top << 23) | fraction;
        const float value = std::bit_cast<float>(bits);
        EXPECT_EQ(first_non_finite({&value, 1, DType::Float32}).has_value(), !is_finite(bits, 8, 23)) << bits;
        std::uint16_t narrow = 0;
        narrow_to_bfloat16(&value, &narrow, 1);
        EXPECT_EQ(first_non_finite({&value, 1, DType::Float32}, {.wire_format = WireFormat::BFloat16}).has_value(),
                  !is_finite(narrow, 8, 7))
            << bits;
      }
    }
    for (std::uint64_t top = 0; top <= 0xFFF; ++top) {
      for (const std::uint64_t fraction : {std::uint64_t{0}, std::uint64_t{1}, (std::uint64_t{1} << 52) - 1}) {
        const std::uint64_t bits = (top << 52) | fraction;
        EXPECT_EQ(first_non_finite({&bits, 1, DType::Float64}).has_value(), !is_finite(bits, 11, 52)) << bits;
      }
    }
  });
}

TEST_F(Finite, WhatBFloat16CannotHoldIsFoundFromItsFirstValueOn) {
  for (std::uint32_t bits = kInfiniteAsBFloat16 - 70000; bits != kInfiniteAsBFloat16 + 70000; ++bits) {
    const float value = std::bit_cast<float>(bits);
    std::uint16_t narrow = 0;
    narrow_to_bfloat16(&value, &narrow, 1);
    ASSERT_EQ(first_non_finite({&value, 1, DType::Float32}, {.wire_format = WireFormat::BFloat16}).has_value(),
              !is_finite(narrow, 8, 7))
        << value;
  }
}

template <class T>
void every_place(T good, T bad, DType dtype) {
  // More than two blocks of the widest vectors, and all that is left over.
  constexpr std::size_t kLongest = 1000 + 2 * 64 * HWY_MAX_BYTES / sizeof(T) + 2 * HWY_MAX_BYTES / sizeof(T) + 3;
  testing::FencedSlots slots(1, kLongest * sizeof(T));
  for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{63},
                                  std::size_t{64}, std::size_t{65}, std::size_t{1000}, kLongest}) {
    const std::vector<T> fine(count + 1, good);
    for (const std::size_t shift :
         {std::size_t{0}, std::size_t{1}, std::size_t{3}}) {  // not even aligned to their own size
      std::byte* const data = slots.place(0, reinterpret_cast<const std::byte*>(fine.data()), count * sizeof(T), shift);
      const ConstBuffer buffer(data, static_cast<std::int64_t>(count), dtype);
      ASSERT_EQ(first_non_finite(buffer), std::nullopt) << count;
      std::size_t last = count;
      for (std::size_t at = count; at-- > 0; at -= std::min(at, count / 150)) {
        std::memcpy(data + at * sizeof(T), &bad, sizeof(T));  // one more, before all others
        ASSERT_EQ(first_non_finite(buffer), static_cast<std::int64_t>(at)) << count << " before " << last;
        last = at;
      }
    }
  }
}

TEST_F(Finite, TheFirstIsFoundWhereverItIs) {
  on_each([] {
    every_place<std::uint16_t>(0x7BFF, 0xFC00, DType::Float16);
    every_place<std::uint16_t>(0x7F7F, 0x7F81, DType::BFloat16);
    every_place<float>(-std::numeric_limits<float>::max(), -std::numeric_limits<float>::infinity(), DType::Float32);
    every_place<double>(std::numeric_limits<double>::denorm_min(), std::nan(""), DType::Float64);
    every_place<std::complex<float>>({1, 2}, {1, std::numeric_limits<float>::infinity()}, DType::Complex64);
    every_place<std::complex<double>>({1, 2}, {std::nan(""), 2}, DType::Complex128);
  });
}

TEST_F(Finite, IntegersAreFinite) {
  const std::vector<std::int64_t> ones(20, -1);
  for (const DType dtype : {DType::Int64, DType::UInt32, DType::Int16, DType::UInt8, DType::Bool}) {
    EXPECT_EQ(first_non_finite({ones.data(), 20, dtype}), std::nullopt);
  }
  EXPECT_THROW(first_non_finite({ones.data(), -1, DType::Float32}), Error);
}

}  // namespace
}  // namespace cohort::comm
