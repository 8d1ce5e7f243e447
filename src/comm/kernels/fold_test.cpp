#include "comm/kernels/fold.h"

#include "comm/testing/each_target.h"
#include "comm/testing/reference_fold.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

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
  fold({dtype, op, from, to, count, factors.scales, factors.divisor, factors.postscale, Stores::Cached, nullptr,
        factors.order});
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
    const Factors factors{weighting.fractions, weighting.fractions.empty() ? 0 : 1, 1};
    const Bytes expected = testing::reference_fold(dtype, ReduceOp::Average, inputs, 999, factors);
    on_each([&] { EXPECT_EQ(folded(dtype, ReduceOp::Average, inputs, 999, factors), expected) << to_string(dtype); });
  }
}

// In the order of the tree: blocks that are full and not, one and two levels of them.
TEST_F(EachTarget, FoldsByTheTree) {
  std::vector<double> scales;
  for (int i = 0; i < 300; ++i) scales.push_back(1.0 / (3 + i % 7));
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      for (const std::size_t members : {1U, 2U, 3U, 7U, 13U, 16U, 17U, 18U, 31U, 40U, 257U, 273U}) {
        const std::int64_t count = members < 100 ? 555 : 37;
        std::vector<Bytes> inputs;
        for (std::size_t member = 0; member < members; ++member)
          inputs.push_back(testing::interesting(dtype, count, member + 19 * members));
        Factors factors;
        factors.order = FoldOrder::Tree;
        const Bytes plain = testing::reference_fold(dtype, op, inputs, count, factors);
        Factors scaled = factors;
        if (is_scalable(dtype)) {
          scaled.scales.assign(scales.begin(), scales.begin() + static_cast<std::ptrdiff_t>(members));
          scaled.postscale = 0.7;
        }
        const Bytes with_factors = testing::reference_fold(dtype, op, inputs, count, scaled);
        on_each([&] {
          const auto where = [&] {
            return std::string(to_string(dtype)).append(" ").append(to_string(op)) + " of " + std::to_string(members);
          };
          EXPECT_EQ(folded(dtype, op, inputs, count, factors), plain) << where();
          EXPECT_EQ(folded(dtype, op, inputs, count, scaled), with_factors) << where();
        });
      }
    }
  }
}

// A block's total may be folded elsewhere, rounded to the element's type. And the tree is another order than ascending.
TEST(FoldTree, IsTheTreeOfItsBlocks) {
  for (const DType dtype : {DType::Float32, DType::BFloat16, DType::Complex64}) {
    constexpr std::int64_t kCount = 200;
    std::vector<Bytes> inputs;
    for (std::uint64_t member = 0; member < 40; ++member) inputs.push_back(testing::interesting(dtype, kCount, member));
    Factors tree;
    tree.order = FoldOrder::Tree;
    std::vector<Bytes> blocks;
    for (std::ptrdiff_t first = 0; first < 40; first += 16) {
      const auto last = std::min<std::ptrdiff_t>(first + 16, 40);
      blocks.push_back(folded(dtype, ReduceOp::Sum, {inputs.begin() + first, inputs.begin() + last}, kCount, tree));
    }
    Factors divided = tree;
    divided.divisor = 40;
    EXPECT_EQ(folded(dtype, ReduceOp::Average, blocks, kCount, divided),
              folded(dtype, ReduceOp::Average, inputs, kCount, tree));
    EXPECT_NE(folded(dtype, ReduceOp::Sum, inputs, kCount, tree), folded(dtype, ReduceOp::Sum, inputs, kCount));
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

template <class T>
void expect_quotients(const std::vector<T>& values, std::int64_t divisor) {
  using Wide = std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>;
  std::vector<T> results(values.size());
  const void* const from[] = {values.data()};
  void* const to[] = {results.data()};
  const DType dtype = DTypeOf<T>::value;
  fold({dtype, ReduceOp::Average, from, to, static_cast<std::int64_t>(values.size()), {}, divisor});
  for (std::size_t i = 0; i < values.size(); ++i) {
    const T expected = static_cast<T>(static_cast<Wide>(values[i]) / static_cast<Wide>(divisor));
    ASSERT_EQ(results[i], expected) << to_string(dtype) << " " << +values[i] << " / " << divisor;
  }
}

/// Every value.
template <class T>
std::vector<T> all_values() {
  std::vector<T> values;
  for (std::int64_t i = std::numeric_limits<T>::min(); i <= std::numeric_limits<T>::max(); ++i) {
    values.push_back(static_cast<T>(i));
  }
  return values;
}

/// Around multiples of the divisor, where a quotient that is off shows, around the extremes and 0, and any.
template <class T>
std::vector<T> values_for(std::int64_t divisor, std::mt19937_64& random) {
  using U = std::make_unsigned_t<T>;
  const U most = static_cast<U>(std::numeric_limits<T>::max());
  std::vector<T> values;
  for (int i = 0; i < 8; ++i) {
    const U any = static_cast<U>(static_cast<U>(random()) >> (random() % (8 * sizeof(T))));
    const U by = static_cast<U>(divisor);
    const U multiple = static_cast<U>(any / by * by);
    for (const U base : {multiple, static_cast<U>(0 - multiple), static_cast<U>(most / by * by), most, any, U{0}}) {
      for (const U offset : {U{0}, U{1}, static_cast<U>(~U{0})}) values.push_back(static_cast<T>(base + offset));
    }
  }
  return values;
}

TEST_F(EachTarget, DividesEveryShortInteger) {
  on_each([] {
    for (std::int64_t divisor = 2; divisor <= 260; ++divisor) {
      expect_quotients(all_values<std::int8_t>(), divisor);
      expect_quotients(all_values<std::uint8_t>(), divisor);
    }
    const std::vector<std::int16_t> with_sign = all_values<std::int16_t>();
    const std::vector<std::uint16_t> without = all_values<std::uint16_t>();
    for (const std::int64_t divisor : {2, 3, 7, 64, 100, 641, 4096, 32767, 32768, 32769, 65535, 65536, 1 << 24}) {
      expect_quotients(with_sign, divisor);
      expect_quotients(without, divisor);
    }
  });
}

TEST_F(EachTarget, DividesLongIntegers) {
  on_each([] {
    std::mt19937_64 random(3);
    for (std::int64_t i = 0; i < 1500; ++i) {
      // As many as there may be ranks, then any, and the largest.
      const auto any = static_cast<std::int64_t>(random() % (1 << 24)) + 1;
      const std::int64_t by = i < 1024 ? i + 2 : i < 1498 ? any : (1 << 24) - (i - 1498);
      expect_quotients(values_for<std::int32_t>(by, random), by);
      expect_quotients(values_for<std::uint32_t>(by, random), by);
      expect_quotients(values_for<std::int64_t>(by, random), by);
      expect_quotients(values_for<std::uint64_t>(by, random), by);
      if (HasFatalFailure()) return;
    }
  });
}

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

TEST_F(EachTarget, TellsOfResultsThatAreNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
    for (const std::size_t count : {1U, 17U, 1024U, 4096U, 4097U, 10000U}) {
      for (const std::size_t at : {std::size_t{0}, count / 3, count - 1}) {
        const std::vector<float> ones(count, 1);
        std::vector<float> other(count, 2);
        std::vector<float> plain(count);
        std::vector<float> first(count);
        std::vector<float> second(count);
        const void* const from[] = {ones.data(), other.data()};
        void* const to[] = {plain.data()};
        void* const both[] = {first.data(), second.data()};
        const auto told = [&](float value, double postscale) {
          other[at] = value;
          FoldJob job{
              .dtype = DType::Float32, .inputs = from, .outputs = to, .count = static_cast<std::int64_t>(count)};
          job.postscale = postscale;
          fold(job);
          bool non_finite = false;
          job.outputs = both;
          job.stores = stores;
          job.non_finite = &non_finite;
          fold(job);
          EXPECT_EQ(std::memcmp(first.data(), plain.data(), count * sizeof(float)), 0);
          EXPECT_EQ(std::memcmp(second.data(), plain.data(), count * sizeof(float)), 0);
          return non_finite;
        };
        on_each([&] {
          EXPECT_FALSE(told(3, 1));
          EXPECT_TRUE(told(kInf, 1));
          EXPECT_TRUE(told(-kInf, 1));
          EXPECT_TRUE(told(std::numeric_limits<float>::quiet_NaN(), 1));
          EXPECT_TRUE(told(3e38F, 2));  // what becomes of finite ones
          EXPECT_FALSE(told(3e38F, 1));
        });
      }
    }
  }
}

TEST(Fold, IsNotAskedToForgetWhatWasFoundBefore) {
  const std::vector<float> ones(10, 1);
  std::vector<float> out(10);
  const void* const from[] = {ones.data()};
  void* const to[] = {out.data()};
  bool non_finite = true;
  fold({.dtype = DType::Float32, .inputs = from, .outputs = to, .count = 10, .non_finite = &non_finite});
  EXPECT_TRUE(non_finite);
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
