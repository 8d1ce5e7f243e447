#include "comm/kernels/codecs.h"

#include "comm/testing/each_target.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cohort::comm {
namespace {

constexpr WireFormat kFormats[] = {WireFormat::BFloat16, WireFormat::Int8, WireFormat::Int4};
constexpr WireFormat kWithBlocks[] = {WireFormat::Int8, WireFormat::Int4};
constexpr float kInfinity = std::numeric_limits<float>::infinity();

class Codecs : public testing::EachTarget {};

struct Coded {
  std::vector<std::byte> bytes;
  std::vector<float> values;
  std::vector<float> residual;
};

Coded coded(WireFormat format, const std::vector<float>& values, std::vector<float> residual = {}) {
  Coded result;
  result.residual = std::move(residual);
  result.bytes.resize(encoded_bytes(format, values.size()));
  result.values.resize(values.size());
  encode(format, values.data(), result.bytes.data(), values.size(),
         result.residual.empty() ? nullptr : result.residual.data());
  decode(format, result.bytes.data(), result.values.data(), values.size());
  return result;
}

/// Blocks of all magnitudes, with zeros and denormals among them.
std::vector<float> values_of(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  float magnitude = 1;
  for (std::size_t i = 0; i < count; ++i) {
    if (i % 128 == 0) magnitude = std::ldexp(1.0F, static_cast<int>(random() % 200) - 120);
    values[i] = random() % 16 == 0 ? 0 : normal(random) * magnitude;
  }
  return values;
}

/// Largest error of an element: half a step.
double bound(WireFormat format, double largest) {
  constexpr double kRounding = 1 + 1e-6;
  if (largest < std::ldexp(1, -100)) return largest;
  return (format == WireFormat::Int8 ? largest / 254 : largest / 14 * (1 + 1.0 / 128)) * kRounding;
}

TEST_F(Codecs, AnElementIsOffByHalfAStepAndAllTargetsAgree) {
  for (const WireFormat format : kWithBlocks) {
    SCOPED_TRACE(to_string(format));
    const std::size_t block = block_of(format);
    for (const std::size_t count :
         {std::size_t{1}, std::size_t{7}, block - 1, block, block + 1, 5 * block, 40 * block + 77}) {
      const std::vector<float> values = values_of(count, static_cast<unsigned>(count));
      const Coded first = coded(format, values);
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t begin = i / block * block;
        double largest = 0;
        for (std::size_t j = begin; j < std::min(begin + block, count); ++j)
          largest = std::max<double>(largest, std::abs(values[j]));
        ASSERT_LE(std::abs(static_cast<double>(values[i]) - first.values[i]), bound(format, largest))
            << i << " of " << count << ": " << values[i];
      }
      on_each([&] {
        const Coded here = coded(format, values);
        EXPECT_EQ(here.bytes, first.bytes);
        EXPECT_EQ(here.values, first.values);
        std::vector<float> in_place = values;
        round_trip(format, in_place.data(), count);
        EXPECT_EQ(in_place, first.values);
      });
    }
  }
}

TEST_F(Codecs, BlocksAreTheSameWhereverASumIsCut) {
  for (const WireFormat format : kWithBlocks) {
    const std::size_t block = block_of(format);
    const std::vector<float> values = values_of(9 * block + 31, 5);
    const Coded whole = coded(format, values);
    for (std::size_t cut = 0; cut <= 9 * block; cut += block) {
      const Coded before = coded(format, {values.begin(), values.begin() + static_cast<std::ptrdiff_t>(cut)});
      const Coded behind = coded(format, {values.begin() + static_cast<std::ptrdiff_t>(cut), values.end()});
      std::vector<std::byte> joined = before.bytes;
      joined.insert(joined.end(), behind.bytes.begin(), behind.bytes.end());
      ASSERT_EQ(joined, whole.bytes) << to_string(format) << " at " << cut;
    }
  }
}

TEST_F(Codecs, WhatIsNotFiniteStaysAsItIsAndItsNeighboursNearly) {
  for (const WireFormat format : kWithBlocks) {
    SCOPED_TRACE(to_string(format));
    const std::size_t block = block_of(format);
    std::vector<float> values = values_of(4 * block + 9, 9);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = std::clamp(values[i], -1e30F, 1e30F);
    values[3] = std::nanf("");
    values[4] = kInfinity;
    values[2 * block + 1] = -kInfinity;
    std::fill(values.end() - 9, values.end(), kInfinity);
    on_each([&] {
      const Coded here = coded(format, values, std::vector<float>(values.size()));
      double largest = 0;
      for (std::size_t j = 0; j < block; ++j)
        if (std::isfinite(values[j])) largest = std::max<double>(largest, std::abs(values[j]));
      for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) {
          EXPECT_TRUE(std::isnan(values[i]) ? std::isnan(here.values[i]) : here.values[i] == values[i]) << i;
          EXPECT_EQ(here.residual[i], 0) << "or it would be there for ever";
        } else {
          EXPECT_TRUE(std::isfinite(here.values[i])) << i;
          if (i < block) {
            EXPECT_LE(std::abs(values[i] - here.values[i]), 1.2 * bound(format, largest)) << i;
          }
        }
      }
    });
  }
}

TEST_F(Codecs, WhatIsFiniteStaysFinite) {
  for (const WireFormat format : kWithBlocks) {
    std::vector<float> values(300, std::numeric_limits<float>::max());
    values[7] = -values[7];
    on_each([&] {
      for (const float value : coded(format, values).values) ASSERT_TRUE(std::isfinite(value)) << to_string(format);
    });
  }
}

// Error feedback: what was sent over many steps, and what is left, is the input.
TEST_F(Codecs, AResidualHasWhatWasLost) {
  for (const WireFormat format : kWithBlocks) {
    SCOPED_TRACE(to_string(format));
    const std::vector<float> values = values_of(700, 3);
    std::vector<std::vector<float>> ends;
    on_each([&] {
      std::vector<double> sent(values.size());
      std::vector<float> residual(values.size());
      for (int step = 1; step <= 20; ++step) {
        Coded here = coded(format, values, std::move(residual));
        residual = std::move(here.residual);
        for (std::size_t i = 0; i < values.size(); ++i) {
          sent[i] += here.values[i];
          ASSERT_NEAR(sent[i] + residual[i], step * static_cast<double>(values[i]),
                      1e-5 * step * (std::abs(values[i]) + std::abs(residual[i])) + 1e-30);
        }
      }
      ends.push_back(residual);
    });
    for (const auto& each : ends) EXPECT_EQ(each, ends.front());
  }
}

TEST_F(Codecs, DoNotDependOnTheThreadsFloatingPointMode) {
#if defined(__x86_64__)
  const auto mode = _mm_getcsr();
  for (const WireFormat format : kFormats) {
    std::vector<float> values = values_of(1000, 8);
    values[5] = 1e-42F;
    const Coded usual = coded(format, values, std::vector<float>(values.size()));
    on_each([&] {
      _mm_setcsr(mode | 0x8040 | 0x6000);  // denormals are zero, rounding toward zero
      const Coded here = coded(format, values, std::vector<float>(values.size()));
      _mm_setcsr(mode);
      EXPECT_EQ(here.bytes, usual.bytes);
      EXPECT_EQ(here.values, usual.values);
      EXPECT_EQ(here.residual, usual.residual);
    });
  }
#endif
}

TEST_F(Codecs, TouchNothingElseAndTakeAnyAlignment) {
  for (const WireFormat format : kFormats) {
    for (std::size_t count = 0; count <= 600; count += 7) {
      const std::vector<float> values = values_of(count, 1);
      const Coded expected = coded(format, values);
      on_each([&] {
        testing::FencedSlots slots(3, 600 * sizeof(float));
        const auto* const from =
            slots.place(0, reinterpret_cast<const std::byte*>(values.data()), count * 4, count % 5);
        auto* const bytes = slots.place(1, expected.bytes.size(), count % 3);
        auto* const back = slots.place(2, count * 4, count % 7);
        encode(format, reinterpret_cast<const float*>(from), bytes, count);
        decode(format, bytes, reinterpret_cast<float*>(back), count);
        EXPECT_TRUE(slots.holds(1, expected.bytes.data())) << count;
        EXPECT_TRUE(slots.holds(2, reinterpret_cast<const std::byte*>(expected.values.data()))) << count;
      });
    }
  }
}

TEST_F(Codecs, AnyBytesDecode) {
  std::mt19937 random(2);
  for (const WireFormat format : kWithBlocks) {
    for (int round = 0; round < 300; ++round) {
      const std::size_t count = random() % 600;
      std::vector<std::byte> bytes(encoded_bytes(format, count));
      for (std::byte& one : bytes) one = static_cast<std::byte>(random());
      std::vector<std::vector<float>> decoded;
      on_each([&] {
        std::vector<float>& values = decoded.emplace_back(count);
        decode(format, bytes.data(), values.data(), count);
        for (float& value : values)
          if (std::isnan(value)) value = 1;  // one NaN or the other
      });
      for (const auto& each : decoded) ASSERT_EQ(each, decoded.front()) << to_string(format);
    }
  }
}

TEST_F(Codecs, TakeAsManyBytesAsTheySay) {
  EXPECT_EQ(encoded_bytes(WireFormat::None, 10), 40U);
  EXPECT_EQ(encoded_bytes(WireFormat::BFloat16, 10), 20U);
  EXPECT_EQ(encoded_bytes(WireFormat::Int8, 1 << 20), (1U << 20) * 260 / 256);
  EXPECT_EQ(encoded_bytes(WireFormat::Int8, 257), 260U + 5);
  EXPECT_EQ(encoded_bytes(WireFormat::Int4, 1 << 20), (1U << 20) / 128 * 66);
  EXPECT_EQ(encoded_bytes(WireFormat::Int4, 131), 66U + 2 + 2);
  for (int format = 0; format < kWireFormatCount; ++format)
    EXPECT_EQ(encoded_bytes(static_cast<WireFormat>(format), 0), 0U);
}

}  // namespace
}  // namespace cohort::comm
