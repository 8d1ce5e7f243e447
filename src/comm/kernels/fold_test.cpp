#include "comm/kernels/fold.h"

#include "comm/kernels/each_target.h"
#include "comm/kernels/reference_fold.h"

#include <gtest/gtest.h>

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cohort::comm {
namespace {

using testing::Bytes;
using testing::EachTarget;
using testing::Factors;

Bytes folded(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::int64_t count,
             const Factors& factors = {}) {
  Bytes result(static_cast<std::size_t>(count) * size_of(dtype));
  Bytes second(result.size());
  std::vector<const void*> from;
  for (const Bytes& input : inputs) from.push_back(input.data());
  void* const to[] = {result.data(), second.data()};
  fold({dtype, op, from, to, count, factors.scales, factors.divisor, factors.postscale});
  EXPECT_EQ(result, second);
  return result;
}

TEST_F(EachTarget, GivesTheBitsOfTheReference) {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      for (const int ranks : {1, 2, 3, 7}) {
        for (const std::int64_t count : {std::int64_t{1}, std::int64_t{31}, std::int64_t{1000}}) {
          std::vector<Bytes> inputs;
          for (int rank = 0; rank < ranks; ++rank) {
            inputs.push_back(testing::interesting(dtype, count, static_cast<std::uint64_t>(rank + 17 * ranks)));
          }
          const Bytes expected = testing::reference_fold(dtype, op, inputs, count);
          on_each([&] {
            EXPECT_EQ(folded(dtype, op, inputs, count), expected)
                << to_string(dtype) << " " << to_string(op) << " of " << ranks << " x " << count;
          });
        }
      }
    }
  }
}

TEST_F(EachTarget, GivesTheBitsOfTheReferenceWithWeights) {
  const Weighting weighting = weigh(std::vector<double>{5, 0, 32, 1});
  ASSERT_EQ(weighting.members, (std::vector<int>{0, 2, 3}));
  for (const DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16}) {
    std::vector<Bytes> inputs;
    for (const int member : weighting.members) {
      inputs.push_back(testing::interesting(dtype, 999, static_cast<std::uint64_t>(member)));
    }
    const Factors factors{weighting.fractions, weighting.divisor(), 1};
    const Bytes expected = testing::reference_fold(dtype, ReduceOp::Average, inputs, 999, factors);
    on_each([&] { EXPECT_EQ(folded(dtype, ReduceOp::Average, inputs, 999, factors), expected) << to_string(dtype); });
  }
}

TEST_F(EachTarget, ConvertsEvery16BitFloatThereAndBack) {
  constexpr std::int64_t kCount = 65536;
  Bytes all(kCount * 2);
  for (std::uint32_t i = 0; i < kCount; ++i) {
    const auto bits = static_cast<std::uint16_t>(i);
    std::memcpy(all.data() + 2 * i, &bits, 2);
  }
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    const Bytes expected = testing::reference_fold(dtype, ReduceOp::Sum, {all}, kCount);
    on_each([&] { EXPECT_EQ(folded(dtype, ReduceOp::Sum, {all}, kCount), expected) << to_string(dtype); });
  }
}

#if defined(__x86_64__)
TEST_F(EachTarget, KeepsDenormalsWhateverTheThreadSays) {
  const auto mode = _mm_getcsr();
  _mm_setcsr(mode | 0x8040);  // FTZ and DAZ, as numerical libraries set them
  const float tiny = 1e-41F;
  for (const DType dtype : {DType::Float32, DType::BFloat16}) {
    Bytes input(64 * size_of(dtype));
    for (std::size_t i = 0; i < 64; ++i) {
      std::uint32_t bits = 0;
      std::memcpy(&bits, &tiny, 4);
      if (dtype == DType::BFloat16) bits >>= 16;
      std::memcpy(input.data() + i * size_of(dtype), &bits, size_of(dtype));
    }
    on_each([&] { EXPECT_EQ(folded(dtype, ReduceOp::Max, {input, input}, 64), input) << to_string(dtype); });
  }
  EXPECT_EQ(_mm_getcsr() & 0x8040, 0x8040u);  // the thread's own mode is back
  _mm_setcsr(mode);
}
#endif

TEST(Fold, WorksInPlaceAndAtAnyElement) {
  for (std::size_t shift = 0; shift < 5; ++shift) {
    std::vector<float> a(1003);
    std::vector<float> b(1003);
    for (std::size_t i = 0; i < a.size(); ++i) {
      a[i] = static_cast<float>(i);
      b[i] = 2;
    }
    const void* const from[] = {a.data() + shift, b.data() + shift};
    void* const to[] = {a.data() + shift, b.data() + shift};
    fold({DType::Float32, ReduceOp::Product, from, to, 900});
    for (std::size_t i = 0; i < a.size(); ++i) {
      const bool inside = i >= shift && i < shift + 900;
      EXPECT_EQ(a[i], static_cast<float>(i) * (inside ? 2 : 1));
      EXPECT_EQ(b[i], inside ? a[i] : 2.0F);
    }
  }
}

TEST(Fold, OfNobodyIsZero) {
  std::vector<float> out(10, 7);
  void* const to[] = {out.data()};
  fold({DType::Float32, ReduceOp::Average, {}, to, 10});
  EXPECT_EQ(out, std::vector<float>(10, 0));
}

TEST(Weigh, LeavesOutZeroAndKnowsEqualWeights) {
  EXPECT_TRUE(weigh(std::vector<double>{0, 0}).members.empty());
  const Weighting equal = weigh(std::vector<double>{0, 32, 32});
  EXPECT_EQ(equal.members, (std::vector<int>{1, 2}));
  EXPECT_TRUE(equal.fractions.empty());
  const Weighting huge = weigh(std::vector<double>{1e308, 1e308, 5e307});
  EXPECT_DOUBLE_EQ(huge.fractions[0], 0.4);
  EXPECT_DOUBLE_EQ(huge.fractions[2], 0.2);
}

}  // namespace
}  // namespace cohort::comm
