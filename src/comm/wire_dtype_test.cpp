// float32 that travels as bfloat16 between hosts: each host's sum is rounded, and beyond two hosts the result as well,
// whatever its size and way. On one host nothing is rounded. Runs over fake hosts too (CMakeLists.txt).
#include "comm/kernels/bfloat16.h"
#include "comm/testing/errors.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

namespace cohort::comm::testing {
namespace {

std::vector<float> brought_by(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) * 7919 + static_cast<unsigned>(count));
  std::vector<float> values(count);
  for (float& value : values) value = (static_cast<float>(random()) / 4294967296.0F - 0.5F) * 20;
  return values;
}

std::vector<float> expected(int size, std::size_t count, bool average, double prescale) {
  std::vector<int> hosts = Worlds::chosen().hosts(size);
  hosts.resize(static_cast<std::size_t>(size));
  const int last = *std::max_element(hosts.begin(), hosts.end());
  std::vector<float> total(count);
  for (int host = 0; host <= last; ++host) {
    std::vector<float> sum;
    for (int rank = 0; rank < size; ++rank) {
      if (hosts[static_cast<std::size_t>(rank)] != host) continue;
      std::vector<float> values = brought_by(rank, count);
      for (float& value : values) value *= static_cast<float>(prescale);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += values[i];
      if (sum.empty()) sum = values;
    }
    if (last > 0) round_to_bfloat16(sum.data(), count);
    for (std::size_t i = 0; i < count; ++i) total[i] = host == 0 ? sum[i] : total[i] + sum[i];
  }
  for (float& value : total) value = average ? value / static_cast<float>(size) : value;
  if (last > 1) round_to_bfloat16(total.data(), count);
  return total;
}

TEST(WireDType, RoundsWhatTravelsAndNothingElse) {
  for (const int size : {2, 3, 4, 6}) {
    run_world(size, [&](Communicator comm) {
      for (const std::size_t count : {1U, 17U, 1000U, 3000U, 9000U, 40000U, 300001U}) {
        for (const bool average : {false, true}) {
          const double prescale = average ? 0.5 : 1;
          AllReduceOptions options{.prescale = prescale, .wire_dtype = DType::BFloat16};
          if (average) options.op = ReduceOp::Average;
          const std::vector<float> own = brought_by(comm.rank(), count);
          const std::vector<float> wanted = expected(size, count, average, prescale);
          std::vector<float> in_place = own;
          comm.all_reduce(std::span(in_place), options).wait();
          std::vector<float> apart(count);
          comm.all_reduce(std::span(own), std::span(apart), options).wait();
          ASSERT_EQ(std::memcmp(in_place.data(), wanted.data(), count * sizeof(float)), 0)
              << count << " elements, " << size << " ranks" << (average ? ", average" : "");
          ASSERT_EQ(std::memcmp(apart.data(), wanted.data(), count * sizeof(float)), 0) << count;
        }
      }
    });
  }
}

// Small ones of a group travel together, and weighted ones with a rank left out take another way.
TEST(WireDType, IsTheSameWhateverTheWay) {
  run_world(4, [](Communicator comm) {
    const AllReduceOptions options{.wire_dtype = DType::BFloat16};
    std::vector<std::vector<float>> alone, grouped;
    std::vector<Buffer> buffers;
    for (const std::size_t count : {5U, 700U, 20000U}) alone.push_back(brought_by(comm.rank(), count));
    grouped = alone;
    for (auto& one : grouped) buffers.emplace_back(std::span(one));
    for (auto& one : alone) comm.all_reduce(std::span(one), options).wait();
    comm.all_reduce(std::span<const Buffer>(buffers), options).wait();
    EXPECT_EQ(alone, grouped);

    std::vector<float> left_out = brought_by(comm.rank(), 30000);
    std::vector<float> zero = comm.rank() == 3 ? std::vector<float>(30000) : left_out;
    comm.all_reduce(std::span(left_out),
                    {.op = ReduceOp::Average, .weight = comm.rank() == 3 ? 0 : 1, .wire_dtype = DType::BFloat16})
        .wait();
    comm.all_reduce(std::span(zero), {.postscale = 1, .wire_dtype = DType::BFloat16}).wait();
    const std::vector<int> hosts = Worlds::chosen().hosts(4);
    if (hosts.empty() ||
        *std::max_element(hosts.begin(), hosts.end()) < 2) {  // else the sum is rounded before it is divided
      for (float& value : zero) value /= 3;
      EXPECT_EQ(left_out, zero);
    }
  });
}

TEST(WireDType, HasToBeTheSameOnAllRanks) {
  run_world(3, [](Communicator comm) {
    std::vector<float> values(50000);
    AllReduceOptions options;
    if (comm.rank() == 1) options.wire_dtype = DType::BFloat16;
    const std::string text = what_of([&] { comm.all_reduce(std::span(values), options).wait(); }, ErrorCode::Mismatch);
    EXPECT_TRUE(contains(text, "all_reduce(float32[50000], sum, bfloat16 between hosts)")) << text;
    comm.all_reduce(std::span(values), {.wire_dtype = DType::BFloat16}).wait();
  });
}

TEST(WireDType, IsRefusedWhereItHasNoMeaning) {
  run_world(2, [](Communicator comm) {
    std::vector<float> floats(4);
    std::vector<double> doubles(4);
    const auto refused = [&](auto& values, const AllReduceOptions& options) {
      return what_of([&] { comm.all_reduce(std::span(values), options).wait(); }, ErrorCode::InvalidArgument);
    };
    EXPECT_TRUE(contains(refused(doubles, {.wire_dtype = DType::BFloat16}), "float32 can as bfloat16"));
    EXPECT_TRUE(contains(refused(floats, {.wire_dtype = DType::Int8}), "float32 can as bfloat16"));
    refused(floats, {.op = ReduceOp::Max, .wire_dtype = DType::BFloat16});
    comm.all_reduce(std::span(floats), {.wire_dtype = DType::Float32}).wait();
  });
}

}  // namespace
}  // namespace cohort::comm::testing
