// Work::finite(): whether a result is free of NaN and infinities, whichever rank made which part of it, on every path
// and in every type. Runs over fake hosts too (CMakeLists.txt), where `finite` has to read the result.
#include "comm/testing/calls.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/digest.h>

#include <gtest/gtest.h>

#include <complex>
#include <cstring>
#include <limits>
#include <set>
#include <string_view>
#include <vector>

namespace cohort::comm::testing {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

constexpr const char* kWays[] = {"", "inline=0", "inline=0,cross=on", "inline=0,cross=off,chunk=4K",
                                 "inline=0,stores=nt"};
constexpr std::size_t kCounts[] = {1, 5, 1000, 40000, 300001};

/// A buffer of ones, except for the value that rank `culprit` contributes at `at`.
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

// --- residuals, which only worlds on several hosts change ---

// Covers sums that are small enough to go with the descriptions, and larger ones.
TEST(Residuals, ARefusedSumLeavesThemAsTheyWere) {
  for (const int size : {2, 4}) {
    run_world(size, [](Communicator comm) {
      for (const std::size_t count : {300U, 5000U, 100000U}) {
        std::vector<float> values(count), result(count), residual(count);
        for (std::size_t i = 0; i < count; ++i)
          values[i] = static_cast<float>((i * 7919 + static_cast<std::size_t>(comm.rank()) * 31) % 1000) / 1000;
        AllReduceOptions options{.wire_format = WireFormat::Int4, .residual = residual.data()};
        const auto sum = [&] {
          const auto elements = static_cast<std::int64_t>(count);
          comm.all_reduce(ConstBuffer(values.data(), elements, DType::Float32),
                          Buffer(result.data(), elements, DType::Float32), options)
              .wait();
        };
        sum();
        const std::vector<float> before = residual;
        const std::vector<float> first = result;
        options.tag = static_cast<std::uint32_t>(comm.rank());
        what_of(sum, ErrorCode::Mismatch);
        EXPECT_EQ(residual, before);
        options.tag = 0;
        sum();
        const bool rounds = !Worlds::chosen().hosts(comm.size()).empty();
        EXPECT_EQ(result != first, rounds);
      }
    });
  }
}

TEST(Residuals, AreOfOneSumAndNotOfAGroup) {
  run_world(2, [](Communicator comm) {
    std::vector<float> values(4), own(2), residual(4);
    const ConstBuffer inputs[] = {std::span(values), std::span(values)};
    const Buffer outputs[] = {std::span(own), std::span(own)};
    const ReduceScatterOptions options{.wire_format = WireFormat::Int8, .residual = residual.data()};
    const std::string text =
        what_of([&] { comm.reduce_scatter(inputs, outputs, options).wait(); }, ErrorCode::InvalidArgument);
    EXPECT_NE(text.find("not of a group"), std::string::npos) << text;
    comm.barrier().wait();
  });
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

namespace cohort {
namespace {

Digest digest_of_bytes(const void* data, std::size_t bytes, const DigestKey& key) {
  return digest_of({data, static_cast<std::int64_t>(bytes), DType::UInt8}, key);
}

// RFC 8439, section 2.5.2.
TEST(DigestTest, IsPoly1305) {
  const DigestKey key = {0x85, 0xd6, 0xbe, 0x78, 0x57, 0x55, 0x6d, 0x33, 0x7f, 0x44, 0x52,
                         0xfe, 0x42, 0xd5, 0x06, 0xa8, 0x01, 0x03, 0x80, 0x8a, 0xfb, 0x0d,
                         0xb2, 0xfd, 0x4a, 0xbf, 0xf6, 0xaf, 0x41, 0x49, 0xf5, 0x1b};
  const std::uint8_t tag[] = {0xa8, 0x06, 0x1d, 0xc1, 0x30, 0x51, 0x36, 0xc6,
                              0xc2, 0x2b, 0x8b, 0xaf, 0x0c, 0x01, 0x27, 0xa9};
  constexpr std::string_view kText = "Cryptographic Forum Research Group";
  const Digest digest = digest_of_bytes(kText.data(), kText.size(), key);
  EXPECT_EQ(std::memcmp(digest.data(), tag, sizeof tag), 0);
}

TEST(DigestTest, EveryFlippedBitChangesIt) {
  const DigestKey key = make_digest_key();
  std::vector<std::uint8_t> bytes(259);
  for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::uint8_t>(i * 37);
  for (std::size_t size : {std::size_t{1}, std::size_t{16}, std::size_t{17}, bytes.size()}) {
    std::set<Digest> seen = {digest_of_bytes(bytes.data(), size, key)};
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
      EXPECT_TRUE(seen.insert(digest_of_bytes(bytes.data(), size, key)).second) << "bit " << bit << " of " << size;
      bytes[bit / 8] = static_cast<std::uint8_t>(bytes[bit / 8] ^ (1U << (bit % 8)));
    }
  }
  EXPECT_NE(digest_of_bytes(bytes.data(), 16, key), digest_of_bytes(bytes.data(), 16, make_digest_key()));
  EXPECT_NO_THROW(digest_of_bytes(nullptr, 0, key));
}

}  // namespace

}  // namespace cohort
