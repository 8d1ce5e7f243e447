// Weighted averages: results, and that they have the same bits whether they travel with the round or after it.
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/observer.h>

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace cohort {
namespace {

using comm::testing::contains;
using comm::testing::what_of;

TEST(Weights, AverageBySamples) {
  comm::testing::run_world(3, [](Communicator comm) {
    const std::array<double, 3> weights{1, 0, 3};
    for (const std::size_t count : {std::size_t{10}, std::size_t{5000}, std::size_t{200000}}) {
      std::vector<float> values(count, comm.rank() == 1 ? std::nanf("") : static_cast<float>(comm.rank() + 1));
      comm.all_reduce(std::span(values),
                      {.op = ReduceOp::Average, .weight = weights[static_cast<std::size_t>(comm.rank())]})
          .wait();
      for (const float value : values) ASSERT_EQ(value, 0.25F * 1 + 0.75F * 3);  // the NaN of weight 0 has no effect
    }
  });
}

TEST(Weights, ThatAreEqualGiveTheBitsOfThePlainAverage) {
  comm::testing::run_world(3, [](Communicator comm) {
    std::mt19937 random(static_cast<unsigned>(comm.rank()));
    std::vector<float> plain(9999);
    for (float& value : plain) value = static_cast<float>(random()) / 3;
    std::vector<float> weighted = plain;
    comm.all_reduce(std::span(plain), {.op = ReduceOp::Average}).wait();
    comm.all_reduce(std::span(weighted), {.op = ReduceOp::Average, .weight = 7.3}).wait();
    EXPECT_EQ(plain, weighted);
  });
}

TEST(Weights, ThatAreAllZeroGiveZero) {
  for (const int size : {1, 2}) {
    comm::testing::run_world(size, [](Communicator comm) {
      std::vector<double> values(3000, 4);
      comm.all_reduce(std::span(values), {.op = ReduceOp::Average, .weight = 0}).wait();
      EXPECT_EQ(values, std::vector<double>(3000, 0));
    });
  }
}

struct HostsOfRanks {
  const char* world;
  int size;
};

using Bytes = std::vector<std::byte>;

/// Values from 0.5 to 1, of either sign.
Bytes values_of(DType dtype, std::size_t bytes, unsigned seed) {
  std::mt19937_64 random(seed);
  Bytes values(bytes);
  const std::size_t element = size_of(dtype);
  const unsigned exponent_bits = dtype == DType::Float64 ? 11 : dtype == DType::Float16 ? 5 : 8;
  const unsigned mantissa_bits = static_cast<unsigned>(8 * element) - 1 - exponent_bits;
  const std::uint64_t exponent = (std::uint64_t{1} << (exponent_bits - 1)) - 2;
  const std::uint64_t mantissa = (std::uint64_t{1} << mantissa_bits) - 1;
  for (std::size_t at = 0; at + element <= bytes; at += element) {
    const std::uint64_t bits = random();
    const std::uint64_t value = (bits >> 63) << (8 * element - 1) | exponent << mantissa_bits | (bits & mantissa);
    std::memcpy(&values[at], &value, element);  // the low bytes of a little-endian number
  }
  return values;
}

Bytes average(Communicator& comm, Bytes values, DType dtype, std::optional<double> weight, double prescale = 1) {
  comm.all_reduce(Buffer(values.data(), static_cast<std::int64_t>(values.size() / size_of(dtype)), dtype),
                  {.op = ReduceOp::Average, .weight = weight, .prescale = prescale})
      .wait();
  return values;
}

class WeightsOnHosts : public ::testing::TestWithParam<HostsOfRanks> {
 protected:
  static void run(const std::function<void(Communicator)>& body) {
    comm::run_on_threads_of(comm::testing::Worlds(GetParam().world).form(GetParam().size), body);
  }
};

// Equal weights travel with the round, unless those of the weighted sum before were not equal.
TEST_P(WeightsOnHosts, GiveTheSameBitsWithTheRoundAndAfterIt) {
  run([](Communicator comm) {
    const int last = comm.size() - 1;
    for (const DType dtype : {DType::Float32, DType::Float64, DType::Float16, DType::BFloat16}) {
      for (const std::size_t bytes : {1024U, 32768U, 32776U}) {
        for (const double prescale : {1.0, 0.3}) {
          if (prescale != 1 && bytes > 1024) continue;
          SCOPED_TRACE(std::string(to_string(dtype)) + ", " + std::to_string(bytes) + " bytes, " +
                       std::to_string(prescale));
          const Bytes own = values_of(dtype, bytes, static_cast<unsigned>(comm.rank()) + 7);
          const Bytes plain = average(comm, own, dtype, std::nullopt, prescale);
          ASSERT_EQ(average(comm, own, dtype, 0.7, prescale), plain);
          const Bytes brought = comm.rank() == last ? Bytes(bytes, std::byte{0xFF}) : own;  // NaN
          const double weight = comm.rank() == last ? 0 : 1 + comm.rank();
          const Bytes refused = average(comm, brought, dtype, weight, prescale);
          ASSERT_EQ(average(comm, brought, dtype, weight, prescale), refused);
          Bytes first = refused;
          comm.broadcast(std::span(reinterpret_cast<std::uint8_t*>(first.data()), first.size())).wait();
          ASSERT_EQ(refused, first);
          ASSERT_EQ(average(comm, comm.rank() == last ? own : brought, dtype, weight, prescale), refused);
          ASSERT_EQ(average(comm, own, dtype, 0.7, prescale), plain);  // after the round
          ASSERT_EQ(average(comm, own, dtype, 0.7, prescale), plain);
        }
      }
    }
  });
}

TEST_P(WeightsOnHosts, OfOneRankAloneAreRefusedByNameOnAll) {
  run([](Communicator comm) {
    const Bytes own = values_of(DType::Float32, 256, 1);
    const std::optional<double> weight = comm.rank() == 1 ? std::nullopt : std::optional(1.0);
    const std::string text = what_of([&] { average(comm, own, DType::Float32, weight); }, ErrorCode::Mismatch);
    EXPECT_TRUE(contains(text, "rank 1 brought all_reduce(float32[64], average)")) << text;
    EXPECT_TRUE(contains(text, "all_reduce(float32[64], average, weighted)")) << text;
    EXPECT_EQ(average(comm, own, DType::Float32, 1), average(comm, own, DType::Float32, std::nullopt));
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, WeightsOnHosts,
                         ::testing::Values(HostsOfRanks{"local", 3}, HostsOfRanks{"hosts:2", 2},
                                           HostsOfRanks{"hosts:2", 4}, HostsOfRanks{"hosts:2,1", 3},
                                           HostsOfRanks{"hosts:3", 3}, HostsOfRanks{"hosts:17", 17}),
                         [](const auto& one) {
                           std::string name = one.param.world + std::string("_") + std::to_string(one.param.size);
                           for (char& each : name) each = each == ':' || each == ',' ? '_' : each;
                           return name;
                         });

// After the round, three hosts send a third of a sum to each other and get the results.
TEST(Weights, ThatAreEqualTravelWithTheRoundOnceTheyWereEqual) {
  comm::run_on_threads_of(comm::testing::Worlds("hosts:3").form(3), [](Communicator comm) {
    comm::testing::Recorder recorder;
    comm.set_observer(&recorder);
    const Bytes own = values_of(DType::Float32, 4096, 1);
    average(comm, own, DType::Float32, std::nullopt);
    average(comm, own, DType::Float32, 1);
    average(comm, own, DType::Float32, 1 + comm.rank());
    for (int i = 0; i < 2; ++i) average(comm, own, DType::Float32, 1);
    comm.set_observer(nullptr);
    const std::lock_guard lock(recorder.mutex);
    ASSERT_EQ(recorder.events.size(), 5U);
    const auto bytes = [&](std::size_t event) { return recorder.events[event].wire_bytes; };
    EXPECT_EQ(bytes(1), bytes(0));
    EXPECT_GT(bytes(2), bytes(0));
    EXPECT_LT(bytes(3), bytes(0));
    EXPECT_EQ(bytes(4), bytes(0));
  });
}

}  // namespace
}  // namespace cohort
