// Whether a result is free of NaN and infinities, as Work::finite() tells it: whichever rank made which part of it, on
// every path and in every type. Runs over fake hosts too (CMakeLists.txt), where the result is read for it.
#include "comm/testing/calls.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <complex>
#include <limits>
#include <vector>

namespace cohort::comm::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

constexpr const char* kWays[] = {"", "inline=0", "inline=0,cross=on", "inline=0,cross=off,chunk=4K",
                                 "inline=0,stores=nt"};
constexpr std::size_t kCounts[] = {1, 5, 1000, 40000, 300001};

/// Of ones, but for the value that `culprit` brings at `at`.
struct Case {
  std::size_t count = 0;
  int culprit = -1;
  std::size_t at = 0;
  float value = 1;
};

std::optional<bool> finite_after(Communicator& comm, const Case& c, bool registered, bool in_place,
                                 AllReduceOptions options = {.op = ReduceOp::Average, .check_finite = true}) {
  const Memory memory = comm.allocate(c.count * sizeof(float));
  std::vector<float> heap(c.count);
  float* const output = registered ? static_cast<float*>(memory.data()) : heap.data();
  std::vector<float> apart(c.count);
  float* const input = in_place ? output : apart.data();
  std::fill_n(input, c.count, 1.0F);
  if (c.culprit == comm.rank()) input[c.at] = c.value;
  const auto count = static_cast<std::int64_t>(c.count);
  Work work =
      comm.all_reduce(ConstBuffer(input, count, DType::Float32), Buffer(output, count, DType::Float32), options);
  work.wait();
  return work.finite();
}

TEST(CheckFinite, EveryRankIsToldWhereverItLiesAndWhoeverBroughtIt) {
  for (const int size : {1, 2, 3}) {
    for (const char* const way : kWays) {
      const ForcedPlan forced(way);
      run_world(size, [&](Communicator comm) {
        for (const std::size_t count : kCounts) {
          for (const bool registered : {true, false}) {
            for (const bool in_place : {true, false}) {
              const auto finite = [&](int culprit, std::size_t at, float value) {
                return finite_after(comm, {count, culprit, at, value}, registered, in_place);
              };
              const auto where = [&] { return fmt::format("{} of {} on {} ranks", way, count, size); };
              for (int culprit = 0; culprit < size; ++culprit) {
                // Each rank makes a part of the result.
                for (const std::size_t at : {std::size_t{0}, count / 2, count - 1}) {
                  EXPECT_EQ(finite(culprit, at, culprit == 0 ? kNaN : -kInf), false) << where();
                  EXPECT_EQ(finite(culprit, at, 3e38F), true) << where();
                }
              }
              EXPECT_EQ(finite(-1, 0, 1), true) << where();
            }
          }
        }
      });
    }
  }
}

TEST(CheckFinite, IsOfTheResultAndNotOfWhatIsLeftOut) {
  run_world(3, [](Communicator comm) {
    for (const std::size_t count : kCounts) {
      for (const bool in_place : {true, false}) {
        const Case bad{count, 1, count / 2, kNaN};
        const double weight = comm.rank() == 1 ? 0 : 1;
        EXPECT_EQ(
            finite_after(comm, bad, true, in_place, {.op = ReduceOp::Average, .weight = weight, .check_finite = true}),
            true);
        // No input is infinite, but their sum is.
        EXPECT_EQ(finite_after(comm, {count, comm.rank(), count - 1, 3e38F}, true, in_place, {.check_finite = true}),
                  false);
        EXPECT_EQ(finite_after(comm, bad, true, in_place), false);
      }
    }
  });
}

TEST(CheckFinite, WhoAsksIsToldWhetherOthersAskOrNot) {
  for (const char* const way : kWays) {
    const ForcedPlan forced(way);
    run_world(3, [](Communicator comm) {
      for (const std::size_t count : kCounts) {
        for (int asks = 0; asks < 3; ++asks) {
          for (const std::size_t at : {std::size_t{0}, count / 2, count - 1}) {
            const bool asked = comm.rank() == asks;
            const AllReduceOptions options{.check_finite = asked};
            const auto told = finite_after(comm, {count, 1, at, kInf}, true, false, options);
            EXPECT_EQ(told, asked ? std::optional(false) : std::nullopt);
            EXPECT_EQ(finite_after(comm, {count}, true, false, options), asked ? std::optional(true) : std::nullopt);
          }
        }
      }
    });
  }
}

TEST(CheckFinite, RanksThatHaveJoinedMakeTheirPartToo) {
  for (const char* const way : kWays) {
    const ForcedPlan forced(way);
    run_world(3, [](Communicator comm) {
      if (comm.rank() == 1) {
        comm.join();
        return;
      }
      for (const std::size_t count : kCounts) {
        for (std::size_t part = 0; part < 8; ++part) {
          EXPECT_EQ(finite_after(comm, {count, 2, part * (count - 1) / 7, kNaN}, true, false), false);
          EXPECT_EQ(finite_after(comm, {count}, true, false), true);
        }
      }
      comm.join();
    });
  }
}

template <class T>
void expect_of_type(Communicator& comm, T bad, bool finite) {
  for (const std::size_t count : {std::size_t{3}, std::size_t{40000}}) {
    std::vector<T> values(count, T(1));
    if (comm.rank() == 1) values[count - 2] = bad;
    Work work = comm.all_reduce(std::span(values), {.op = ReduceOp::Max, .check_finite = true});
    work.wait();
    EXPECT_EQ(work.finite(), finite) << to_string(DTypeOf<T>::value);
  }
}

TEST(CheckFinite, InEveryTypeAndInBothPartsOfComplexNumbers) {
  run_world(2, [](Communicator comm) {
    expect_of_type<double>(comm, kInf, false);
    expect_of_type<double>(comm, 1e300, true);
    expect_of_type<std::int32_t>(comm, std::numeric_limits<std::int32_t>::max(), true);
    for (const DType type : {DType::Float16, DType::BFloat16}) {
      std::vector<std::uint16_t> values(3000, 0);
      if (comm.rank() == 0) values[1234] = type == DType::Float16 ? 0x7C00 : 0xFF80;  // infinite
      Work work = comm.all_reduce(Buffer(values.data(), 3000, type), {.check_finite = true});
      work.wait();
      EXPECT_EQ(work.finite(), false) << to_string(type);
    }
    for (const std::complex<float> bad : {std::complex<float>(kNaN, 0), std::complex<float>(0, kInf)}) {
      std::vector<std::complex<float>> values(3000);
      if (comm.rank() == 1) values[2999] = bad;
      Work work = comm.all_reduce(std::span(values), {.check_finite = true});
      work.wait();
      EXPECT_EQ(work.finite(), false);
    }
  });
}

TEST(CheckFinite, OfAGroupAnyOfThem) {
  run_world(2, [](Communicator comm) {
    for (const std::size_t large : {std::size_t{10}, std::size_t{200000}}) {
      for (const int bad : {-1, 0, 1, 2}) {
        std::vector<std::vector<float>> values{std::vector<float>(7), std::vector<float>(large), std::vector<float>(8)};
        if (bad >= 0 && comm.rank() == 1) values[static_cast<std::size_t>(bad)].back() = kNaN;
        std::vector<Buffer> buffers;
        for (auto& each : values) {
          buffers.emplace_back(each.data(), static_cast<std::int64_t>(each.size()), DType::Float32);
        }
        Work work = comm.all_reduce(std::span<const Buffer>(buffers), {.check_finite = true});
        work.wait();
        EXPECT_EQ(work.finite(), bad < 0);
      }
    }
  });
}

TEST(CheckFinite, IsUnknownToWhoHasNotAskedOrNotSucceeded) {
  run_world(2, [](Communicator comm) {
    EXPECT_EQ(Work().finite(), std::nullopt);
    std::vector<float> values(static_cast<std::size_t>(comm.rank() == 0 ? 4 : 5));
    Work work = comm.all_reduce(std::span(values), {.check_finite = true});
    EXPECT_THROW(work.wait(), Error);
    EXPECT_EQ(work.finite(), std::nullopt);
    work = comm.barrier();
    work.wait();
    EXPECT_EQ(work.finite(), std::nullopt);
  });
}

}  // namespace
}  // namespace cohort::comm::testing
