// Every reduction of every type against the plain reference: counts, numbers of inputs, alignments, factors, stores,
// and which outputs are inputs. Any bit in which a target differs from the reference is a failure; so all give the
// same.
#include "comm/kernels/fold.h"
#include "comm/testing/each_target.h"
#include "comm/testing/reference_fold.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::comm {
namespace {

using testing::Bytes;
using testing::Factors;
using testing::FencedSlots;

template <class Body>
void for_each_reduction(const Body& body) {
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      if (supports(static_cast<DType>(d), static_cast<ReduceOp>(o)))
        body(static_cast<DType>(d), static_cast<ReduceOp>(o));
    }
  }
}

/// Inputs of one reduction, and what comes of them: of fewer elements it is the beginning of the same.
struct Sample {
  DType dtype;
  ReduceOp op;
  Factors factors;
  std::vector<Bytes> inputs;
  Bytes expected;

  Sample(DType type, ReduceOp reduction, std::size_t ranks, std::int64_t most, const Factors& given)
      : dtype(type), op(reduction), factors(given) {
    for (std::size_t k = 0; k < ranks; ++k) inputs.push_back(testing::interesting(dtype, most, 31 * k + ranks));
    expected = testing::reference_fold(dtype, op, inputs, most, factors);
  }
};

constexpr std::size_t kFactors = 4;
/// None; a factor for each input and one for the result; one for the result, and a divisor of its own; weights.
Factors factors_for(DType dtype, ReduceOp op, std::size_t ranks, std::size_t which) {
  Factors factors;
  if (op == ReduceOp::Average) factors.divisor = std::array<std::int64_t, kFactors>{0, 1 << 24, 7, 1}[which];
  if (!is_scalable(dtype)) return factors;
  if (which == 1) {
    for (std::size_t k = 0; k < ranks; ++k) factors.scales.push_back(0.3 + 0.11 * static_cast<double>(k));
    factors.postscale = 1.7;
  }
  if (which == 2) factors.postscale = -0.3;
  if (which == 3 && op == ReduceOp::Average) {
    std::vector<double> weights;
    for (std::size_t k = 0; k < ranks; ++k) weights.push_back(static_cast<double>(32 - k % 5));
    const Weighting weighting = weigh(weights);
    factors.scales = weighting.fractions;  // none where there is but one
    factors.divisor = weighting.fractions.empty() ? 0 : 1;
  } else if (which == 3) {
    factors.scales.assign(ranks, 1.0 / 3);
  }
  return factors;
}

/// Location of the results: elsewhere, over an input, both, or over all inputs.
enum class Outputs { Apart, InPlace, Both, All };

class FoldShapes : public testing::EachTarget {
 protected:
  /// True if the first `count` elements come out right, and nothing else is touched. `turn` decides where they lie.
  static bool folds(FencedSlots& slots, const Sample& sample, std::int64_t count, std::size_t turn, Outputs where,
                    Stores stores) {
    const std::size_t ranks = sample.inputs.size();
    const std::size_t bytes = static_cast<std::size_t>(count) * size_of(sample.dtype);
    const std::size_t in_place = turn % ranks;
    const auto is_output = [&](std::size_t k) {
      return where == Outputs::All || (where != Outputs::Apart && k == in_place);
    };
    std::array<const void*, 130> inputs{};
    std::array<void*, 131> outputs{};
    std::size_t used = 0;
    for (std::size_t k = 0; k < ranks; ++k) {
      // At the fence, at an element, and anywhere.
      const std::size_t anywhere = (turn * 19 + k * 7) % (FencedSlots::kMostShift + 1);
      const std::size_t shift = turn % 3 == 0   ? 0
                                : turn % 3 == 1 ? anywhere / size_of(sample.dtype) * size_of(sample.dtype)
                                                : anywhere;
      std::byte* const data = slots.place(k, sample.inputs[k].data(), bytes, shift);
      inputs[k] = data;
      if (is_output(k)) outputs[used++] = data;
    }
    const bool apart = where == Outputs::Apart || where == Outputs::Both;
    if (apart) outputs[used++] = slots.place(ranks, bytes, turn * 23 % (FencedSlots::kMostShift + 1));
    fold({sample.dtype,
          sample.op,
          {inputs.data(), ranks},
          {outputs.data(), used},
          count,
          sample.factors.scales,
          sample.factors.divisor,
          sample.factors.postscale,
          stores});
    bool good = !apart || slots.holds(ranks, sample.expected.data());
    for (std::size_t k = 0; k < ranks; ++k) {
      good = good && slots.holds(k, is_output(k) ? sample.expected.data() : sample.inputs[k].data());
    }
    return good;
  }

  static std::string described(const Sample& sample, std::int64_t count, std::size_t turn, Stores stores) {
    return std::string(to_string(sample.dtype)) + " " + std::string(to_string(sample.op)) + " of " +
           std::to_string(sample.inputs.size()) + " x " + std::to_string(count) + ", divisor " +
           std::to_string(sample.factors.divisor) + ", " + std::to_string(sample.factors.scales.size()) +
           " scales, turn " + std::to_string(turn) + (stores == Stores::Cached ? ", cached" : ", non-temporal");
  }
  static void expect(FencedSlots& slots, const Sample& sample, std::int64_t count, std::size_t turn, Outputs where,
                     Stores stores) {
    ASSERT_TRUE(folds(slots, sample, count, turn, where, stores)) << described(sample, count, turn, stores);
  }
};

TEST_F(FoldShapes, EveryCountUpTo300OfOneToNineInputs) {
  constexpr std::int64_t kMost = 300;
  constexpr std::int64_t kStride = 11;  // of the counts that one combination sees; all together see all
  FencedSlots slots(10, kMost * 16);
  std::size_t turn = 0;
  for_each_reduction([&](DType dtype, ReduceOp op) {
    for (std::size_t ranks = 1; ranks <= 9; ++ranks) {
      for (std::size_t which = 0; which < kFactors; ++which) {
        const Factors factors = factors_for(dtype, op, ranks, which);
        if (which > 0 && factors.scales.empty() && factors.divisor == 0 && factors.postscale == 1) continue;
        const Sample sample(dtype, op, ranks, kMost, factors);
        const std::size_t first = turn++;
        on_each([&] {
          std::size_t own = first;
          for (std::int64_t count = static_cast<std::int64_t>(first) % kStride; count <= kMost; count += kStride) {
            for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
              ++own;
              expect(slots, sample, count, own, static_cast<Outputs>(own / 2 % 4), stores);
              if (HasFatalFailure()) return;
            }
          }
        });
        if (HasFatalFailure()) return;
      }
    }
  });
}

TEST_F(FoldShapes, PageEdges) {
  constexpr std::size_t kPage = 4096;
  constexpr std::size_t kMostBytes = 3 * kPage + 80;
  FencedSlots slots(4, kMostBytes);
  for_each_reduction([&](DType dtype, ReduceOp op) {
    const auto element = static_cast<std::int64_t>(size_of(dtype));
    const std::int64_t page = static_cast<std::int64_t>(kPage) / element;
    const Sample plain(dtype, op, 2, 3 * page + 5, {});
    const Sample with_factors(dtype, op, 3, 3 * page + 5, factors_for(dtype, op, 3, 2));
    on_each([&] {
      std::size_t turn = 0;
      for (const std::int64_t count : {page - 1, page, page + 1, 2 * page - 1, 2 * page + 1, 3 * page + 5}) {
        for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
          ++turn;
          expect(slots, plain, count, turn, static_cast<Outputs>(turn / 2 % 4), stores);
          if (HasFatalFailure()) return;
          expect(slots, with_factors, count, turn + 1, static_cast<Outputs>((turn + 2) / 2 % 4), stores);
          if (HasFatalFailure()) return;
        }
      }
    });
  });
}

TEST_F(FoldShapes, ManyInputs) {
  constexpr std::size_t kMostInputs = 130;
  FencedSlots slots(kMostInputs + 1, 4096 + 512);
  for_each_reduction([&](DType dtype, ReduceOp op) {
    const std::int64_t page = 4096 / static_cast<std::int64_t>(size_of(dtype));
    for (const std::size_t ranks : {std::size_t{64}, std::size_t{65}, kMostInputs}) {
      const std::int64_t most = ranks == 65 ? page + 17 : 67;
      const Sample sample(dtype, op, ranks, most, factors_for(dtype, op, ranks, ranks % kFactors));
      on_each([&] {
        std::size_t turn = ranks;
        for (const Stores stores : {Stores::Cached, Stores::NonTemporal}) {
          for (const Outputs where : {Outputs::Both, Outputs::All}) {
            expect(slots, sample, most, ++turn, where, stores);
            if (HasFatalFailure()) return;
          }
        }
      });
      if (HasFatalFailure()) return;
    }
  });
}

// --- what is refused ---

void expect_refused(const FoldJob& wanted, std::string_view why) {
  FoldJob job = wanted;
  const std::vector<std::uint64_t> input(8, 3);
  std::vector<std::uint64_t> output(8, 77);
  const std::array<const void*, 2> from{input.data(), input.data()};
  const std::array<void*, 1> to{output.data()};
  job.inputs = from;
  job.outputs = to;
  for (const std::int64_t count : {0, 3}) {
    job.count = count;
    try {
      fold(job);
      ADD_FAILURE() << "not refused: " << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string_view(error.what()).find(why), std::string_view::npos) << error.what();
    }
  }
  EXPECT_EQ(output, std::vector<std::uint64_t>(8, 77));
}

TEST(FoldRefuses, ReductionsThatTheTypeDoesNotHave) {
  int refused = 0;
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      FoldJob job;
      job.dtype = static_cast<DType>(d);
      job.op = static_cast<ReduceOp>(o);
      if (supports(job.dtype, job.op)) continue;
      expect_refused(job, std::string(to_string(job.dtype)) + " has no " + std::string(to_string(job.op)));
      ++refused;
    }
  }
  EXPECT_EQ(refused, 4 * 3 + 2 * 5 + 1);  // bit operations of floats; those and extremes of complex; average of bool
  FoldJob job;
  job.dtype = static_cast<DType>(kDTypeCount);
  expect_refused(job, "has no sum");
  job.dtype = DType::Float32;
  job.op = static_cast<ReduceOp>(kReduceOpCount);
  expect_refused(job, "float32 has no");
}

TEST(FoldRefuses, FactorsThatDoNotFit) {
  const std::array<double, 3> scales{1, 1, 1};
  for (const DType dtype : {DType::Int8, DType::UInt64, DType::Bool}) {
    FoldJob job;
    job.dtype = dtype;
    job.scales = std::span(scales).first(2);
    expect_refused(job, "factors do not go with");
    job.scales = {};
    job.postscale = 0.5;
    expect_refused(job, "factors do not go with");
  }
  for (const DType dtype : {DType::Float32, DType::BFloat16, DType::Complex128}) {
    for (const std::size_t count : {std::size_t{1}, std::size_t{3}}) {
      FoldJob job;
      job.dtype = dtype;
      job.scales = std::span(scales).first(count);
      expect_refused(job, std::to_string(count) + " scales for 2 inputs");
    }
  }
}

TEST(FoldRefuses, DivisorsThatAreNotExact) {
  for (const DType dtype : {DType::Float16, DType::Float64, DType::Int64, DType::UInt8}) {
    for (const std::int64_t divisor : {std::int64_t{-1}, (std::int64_t{1} << 24) + 1, INT64_MIN, INT64_MAX}) {
      FoldJob job;
      job.dtype = dtype;
      job.op = ReduceOp::Average;
      job.divisor = divisor;
      expect_refused(job, "a divisor of " + std::to_string(divisor));
    }
  }
}

}  // namespace
}  // namespace cohort::comm
