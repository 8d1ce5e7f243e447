// Buffers beyond 2 GiB, where a count or an offset of 32 bits would show. Needs 10 GiB of memory and a minute:
// tools/soak/test-large runs it.
#include "comm_processes.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

constexpr std::size_t kTwoGiB = std::size_t{1} << 31;

/// Value of rank `rank` at `i`; different on both sides of any power of two. Sums of two are exact.
template <class T>
T value_at(std::size_t i, int rank) {
  return static_cast<T>((i * 31 + (i >> 20) * 7 + (i >> 31) * 3 + static_cast<std::size_t>(rank) * 5) & 255);
}

/// Memory of a rank: registered or not.
template <class T>
class Large {
 public:
  Large(Communicator& comm, bool registered, std::size_t count) {
    if (registered) {
      memory_ = comm.allocate(count * sizeof(T));
    } else {
      heap_.resize(count);
    }
    values_ = {registered ? static_cast<T*>(memory_.data()) : heap_.data(), count};
  }
  std::span<T> values() const { return values_; }
  void fill(int rank) const {
    for (std::size_t i = 0; i < values_.size(); ++i) values_[i] = value_at<T>(i, rank);
  }
  /// "" or where it is not what `expected(i)` says.
  template <class Expected>
  std::string check(std::size_t begin, std::size_t count, const Expected& expected) const {
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) wrong += values_[begin + i] == expected(i) ? 0 : 1;
    if (wrong == 0) return "";
    for (std::size_t i = 0; i < count; ++i) {
      if (values_[begin + i] != expected(i)) return std::to_string(wrong) + " wrong, from " + std::to_string(begin + i);
    }
    return "";
  }

 private:
  Memory memory_;
  std::vector<T> heap_;
  std::span<T> values_;
};

/// Two ranks; each body returns "" if all was right.
void expect_right(const Body& body) {
  Processes world(2);
  world.start(body);
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world.collect(rank, std::chrono::minutes(4)).said, "");
}

class BeyondTwoGiB : public ::testing::TestWithParam<bool> {};

TEST_P(BeyondTwoGiB, AllReduceOfBytes) {
  expect_right([](Communicator comm) {
    const Large<std::uint8_t> data(comm, GetParam(), kTwoGiB + 3);
    data.fill(comm.rank());
    comm.all_reduce(data.values()).wait();
    return data.check(0, kTwoGiB + 3, [](std::size_t i) {
      return static_cast<std::uint8_t>(value_at<std::uint8_t>(i, 0) + value_at<std::uint8_t>(i, 1));
    });
  });
}

TEST_P(BeyondTwoGiB, AllReduceOfFloats) {
  constexpr std::size_t kCount = kTwoGiB / 4 + 3;
  expect_right([](Communicator comm) {
    const Large<float> data(comm, GetParam(), kCount);
    data.fill(comm.rank());
    comm.all_reduce(data.values()).wait();
    return data.check(0, kCount, [](std::size_t i) { return value_at<float>(i, 0) + value_at<float>(i, 1); });
  });
}

TEST_P(BeyondTwoGiB, Broadcast) {
  expect_right([](Communicator comm) {
    const Large<std::uint8_t> data(comm, GetParam(), kTwoGiB + 3);
    data.fill(comm.rank());
    comm.broadcast(data.values(), {.root = 1}).wait();
    return data.check(0, kTwoGiB + 3, [](std::size_t i) { return value_at<std::uint8_t>(i, 1); });
  });
}

TEST_P(BeyondTwoGiB, AllToAllV) {
  constexpr std::int64_t kMany = static_cast<std::int64_t>(kTwoGiB) + 3;
  expect_right([](Communicator comm) {
    // Rank 0 keeps 5 and sends 2 GiB + 3; rank 1 sends 7 and keeps 2.
    const bool zero = comm.rank() == 0;
    const auto to = zero ? std::array<std::int64_t, 2>{5, kMany} : std::array<std::int64_t, 2>{7, 2};
    const auto from = zero ? std::array<std::int64_t, 2>{5, 7} : std::array<std::int64_t, 2>{kMany, 2};
    const auto total = [](const std::array<std::int64_t, 2>& counts) {
      return static_cast<std::size_t>(counts[0] + counts[1]);
    };
    const Large<std::uint8_t> input(comm, GetParam(), total(to));
    const Large<std::uint8_t> output(comm, GetParam(), total(from));
    input.fill(comm.rank());
    comm.all_to_all_v(input.values(), to, output.values(), from).wait();
    // Rank 0's input is split at 5: the beginning goes to rank 0, the rest to rank 1; rank 1's likewise at 7.
    const std::string of_zero = output.check(0, static_cast<std::size_t>(from[0]), [&](std::size_t i) {
      return value_at<std::uint8_t>(zero ? i : i + 5, 0);
    });
    const std::string of_one = output.check(static_cast<std::size_t>(from[0]), static_cast<std::size_t>(from[1]),
                                            [&](std::size_t i) { return value_at<std::uint8_t>(zero ? i : i + 7, 1); });
    return of_zero + of_one;
  });
}

std::string name_of_memory(const ::testing::TestParamInfo<bool>& info) { return info.param ? "Registered" : "Heap"; }
INSTANTIATE_TEST_SUITE_P(Memory, BeyondTwoGiB, ::testing::Bool(), name_of_memory);

}  // namespace
}  // namespace cohort::testing
