// Every operation, type and size over worlds of threads, against a reference, with memory of every kind.
#include "comm/testing/calls.h"
#include "comm/testing/naive.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace cohort {
namespace {

using comm::testing::Bytes;
using comm::testing::interesting;
using comm::testing::reference_by_hosts;

constexpr ReduceOp kOps[] = {ReduceOp::Sum,     ReduceOp::Average, ReduceOp::Min,   ReduceOp::Max,
                             ReduceOp::Product, ReduceOp::BitAnd,  ReduceOp::BitOr, ReduceOp::BitXor};
constexpr std::size_t kGuard = 64;
constexpr std::byte kPattern{0xA5};

enum class Place { Arena, Heap, Mixed, OddArena };
constexpr Place kPlaces[] = {Place::Arena, Place::Heap, Place::Mixed, Place::OddArena};

/// A buffer of some kind of memory, between guard bytes that must not change.
class Room {
 public:
  Room(Communicator& comm, Place place, std::size_t bytes, std::size_t element) : bytes_(bytes) {
    const std::size_t whole = bytes + 2 * kGuard + 64;
    const bool arena =
        place == Place::Arena || place == Place::OddArena || (place == Place::Mixed && comm.rank() % 2 == 0);
    if (arena) {
      memory_ = comm.allocate(whole);
      begin_ = static_cast<std::byte*>(memory_.data());
    } else {
      heap_.resize(whole);
      begin_ = heap_.data();
      begin_ += (64 - reinterpret_cast<std::uintptr_t>(begin_) % 64) % 64;
    }
    std::memset(begin_, static_cast<int>(kPattern), bytes + 2 * kGuard);
    if (place == Place::OddArena) begin_ += element;  // not at a cache line
  }
  std::byte* data() { return begin_ + kGuard; }
  void set(const Bytes& value) {
    if (!value.empty()) std::memcpy(data(), value.data(), value.size());
  }
  Bytes get() { return Bytes(data(), data() + bytes_); }
  bool guarded() const {
    const auto intact = [](std::byte value) { return value == kPattern; };
    return std::all_of(begin_, begin_ + kGuard / 2, intact) &&
           std::all_of(begin_ + kGuard + bytes_, begin_ + kGuard + bytes_ + kGuard / 2, intact);
  }

 private:
  Memory memory_;
  Bytes heap_;
  std::byte* begin_ = nullptr;
  std::size_t bytes_;
};

struct Case {
  DType dtype;
  ReduceOp op;
  std::int64_t count;
  Place place;
  std::vector<Bytes> inputs;  // by rank, `size` parts of count elements
  Bytes expected;             // expected results of all parts
};

std::string describe(const Case& c, const Communicator& comm) {
  return std::string(to_string(c.dtype)) + " " + std::string(to_string(c.op)) + " x " + std::to_string(c.count) +
         " memory " + std::to_string(static_cast<int>(c.place)) + " rank " + std::to_string(comm.rank()) + " of " +
         std::to_string(comm.size());
}

std::vector<Case> make_cases(int size) {
  std::vector<Case> cases;
  std::uint64_t seed = 0;
  const auto add = [&](DType dtype, ReduceOp op, std::int64_t count, Place place) {
    Case made{dtype, op, count, place, {}, {}};
    for (int rank = 0; rank < size; ++rank) made.inputs.push_back(interesting(dtype, count * size, ++seed));
    std::vector<int> ranks(static_cast<std::size_t>(size));
    std::iota(ranks.begin(), ranks.end(), 0);
    made.expected = size == 1 ? made.inputs[0] : reference_by_hosts(dtype, op, ranks, size, made.inputs, count * size);
    cases.push_back(std::move(made));
  };
  int turn = 0;
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    int nth = 0;
    for (const ReduceOp op : kOps) {
      if (!supports(dtype, op) || (size > 5 && nth++ % 5 != d % 2)) continue;
      // Sizes: around a slot's payload, around a page, and primes. The kinds of memory take turns.
      for (const std::int64_t count : {0, 1, 7, 1023, 4099}) add(dtype, op, count, kPlaces[++turn % 4]);
    }
    // Larger than two chunks of staging.
    const auto large =
        static_cast<std::int64_t>((std::size_t{600} << 10) / size_of(dtype) / static_cast<std::size_t>(size) + 13);
    add(dtype, ReduceOp::Sum, large, kPlaces[++turn % 4]);
  }
  for (const Place place : kPlaces) add(DType::Float32, ReduceOp::Average, 90001, place);
  return cases;
}

void all_reduce_case(Communicator& comm, const Case& c) {
  const std::size_t own = static_cast<std::size_t>(comm.rank());
  const std::int64_t count = c.count * comm.size();
  Room in_place(comm, c.place, c.expected.size(), size_of(c.dtype));
  in_place.set(c.inputs[own]);
  comm.all_reduce(Buffer(in_place.data(), count, c.dtype), {.op = c.op}).wait();
  EXPECT_EQ(in_place.get(), c.expected) << describe(c, comm);
  EXPECT_TRUE(in_place.guarded()) << describe(c, comm);

  for (const Place place : {c.place, Place::Heap, Place::Mixed}) {
    Room input(comm, place, c.expected.size(), size_of(c.dtype));
    Room output(comm, c.place, c.expected.size(), size_of(c.dtype));
    input.set(c.inputs[own]);
    comm.all_reduce(ConstBuffer(input.data(), count, c.dtype), Buffer(output.data(), count, c.dtype), {.op = c.op})
        .wait();
    EXPECT_EQ(output.get(), c.expected) << describe(c, comm);
    EXPECT_EQ(input.get(), c.inputs[own]) << describe(c, comm);
    EXPECT_TRUE(output.guarded()) << describe(c, comm);
  }
}

void reduce_scatter_case(Communicator& comm, const Case& c) {
  const std::size_t own = static_cast<std::size_t>(comm.rank());
  const std::size_t part = c.expected.size() / static_cast<std::size_t>(comm.size());
  const Bytes expected(c.expected.begin() + static_cast<std::ptrdiff_t>(own * part),
                       c.expected.begin() + static_cast<std::ptrdiff_t>((own + 1) * part));
  for (const bool in_place : {false, true}) {
    Room input(comm, c.place, c.expected.size(), size_of(c.dtype));
    Room output(comm, c.place, part, size_of(c.dtype));
    input.set(c.inputs[own]);
    std::byte* const to = in_place ? input.data() + own * part : output.data();
    comm.reduce_scatter(ConstBuffer(input.data(), c.count * comm.size(), c.dtype), Buffer(to, c.count, c.dtype),
                        {.op = c.op})
        .wait();
    EXPECT_EQ(Bytes(to, to + part), expected) << describe(c, comm);
    EXPECT_TRUE(input.guarded() && output.guarded()) << describe(c, comm);
  }
}

void all_gather_case(Communicator& comm, const Case& c) {
  const std::size_t own = static_cast<std::size_t>(comm.rank());
  const std::size_t part = c.expected.size() / static_cast<std::size_t>(comm.size());
  Bytes expected;
  for (const Bytes& input : c.inputs)
    expected.insert(expected.end(), input.begin(), input.begin() + static_cast<std::ptrdiff_t>(part));
  for (const bool in_place : {false, true}) {
    Room input(comm, c.place, part, size_of(c.dtype));
    Room output(comm, c.place, expected.size(), size_of(c.dtype));
    std::byte* const from = in_place ? output.data() + own * part : input.data();
    if (part > 0) std::memcpy(from, c.inputs[own].data(), part);
    comm.all_gather(ConstBuffer(from, c.count, c.dtype), Buffer(output.data(), c.count * comm.size(), c.dtype)).wait();
    EXPECT_EQ(output.get(), expected) << describe(c, comm);
    EXPECT_TRUE(input.guarded() && output.guarded()) << describe(c, comm);
  }
}

void broadcast_case(Communicator& comm, const Case& c) {
  const int root = static_cast<int>(c.count % comm.size());
  Room data(comm, c.place, c.expected.size(), size_of(c.dtype));
  data.set(c.inputs[static_cast<std::size_t>(comm.rank())]);
  comm.broadcast(Buffer(data.data(), c.count * comm.size(), c.dtype), {.root = root}).wait();
  EXPECT_EQ(data.get(), c.inputs[static_cast<std::size_t>(root)]) << describe(c, comm);
  EXPECT_TRUE(data.guarded()) << describe(c, comm);
}

class Conformance : public ::testing::TestWithParam<int> {};

TEST_P(Conformance, AllReduce) {
  const std::vector<Case> cases = make_cases(GetParam());
  comm::testing::run_world(GetParam(), [&](Communicator comm) {
    for (const Case& c : cases) all_reduce_case(comm, c);
  });
}

TEST_P(Conformance, ReduceScatter) {
  const std::vector<Case> cases = make_cases(GetParam());
  comm::testing::run_world(GetParam(), [&](Communicator comm) {
    for (const Case& c : cases) reduce_scatter_case(comm, c);
  });
}

TEST_P(Conformance, AllGatherAndBroadcast) {
  const std::vector<Case> cases = make_cases(GetParam());
  comm::testing::run_world(GetParam(), [&](Communicator comm) {
    for (const Case& c : cases) {
      all_gather_case(comm, c);
      broadcast_case(comm, c);
      comm.barrier().wait();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Conformance, ::testing::Values(1, 2, 3, 4, 5, 8));

}  // namespace

}  // namespace cohort

namespace cohort::comm::testing {
namespace {

// Reductions with results from a table rather than from the reference: weights, scales, bools, bits, complex numbers,
// integers that wrap. Payloads are inline, in place, read through the kernel, and staged.

constexpr std::array<const char*, 4> kWays = {"", "inline=0", "inline=0,cross=on", "inline=0,cross=off,chunk=4K"};

/// Runs `body(comm, count)` on 3 ranks under each plan, with sizes for each path.
template <class Body>
void on_every_way(const Body& body) {
  for (const char* const way : kWays) {
    const ForcedPlan forced(way);
    run_world(3,
              [&](Communicator comm) {
                for (const std::size_t count : {std::size_t{2}, std::size_t{1000}, std::size_t{120001}})
                  body(comm, count);
              },
              {.timeout = std::chrono::seconds(30)});
  }
}

/// All elements of a rank are `brought[rank]`; all elements have to be `expected` afterwards, bit by bit.
template <class T>
void expect_all(Communicator& comm, std::size_t count, const std::array<T, 3>& brought, T expected,
                const AllReduceOptions& options) {
  for (const bool registered : {true, false}) {
    Memory memory = comm.allocate(count * sizeof(T));
    std::vector<std::byte> heap(count * sizeof(T));
    T* const data = reinterpret_cast<T*>(registered ? memory.data() : static_cast<void*>(heap.data()));
    for (std::size_t i = 0; i < count; ++i) data[i] = brought[static_cast<std::size_t>(comm.rank())];
    comm.all_reduce(std::span<T>(data, count), options).wait();
    std::size_t wrong = 0;
    for (std::size_t i = 0; i < count; ++i) wrong += std::memcmp(&data[i], &expected, sizeof(T)) == 0 ? 0 : 1;
    EXPECT_EQ(wrong, 0u) << to_string(options.op) << " of " << count << " " << to_string(DTypeOf<T>::value);
  }
}

TEST(Values, OfWeightedAverages) {
  on_every_way([](Communicator& comm, std::size_t count) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const auto own = [&](std::array<double, 3> weights) { return weights[static_cast<std::size_t>(comm.rank())]; };
    const auto average = [&](double weight) { return AllReduceOptions{.op = ReduceOp::Average, .weight = weight}; };
    // A rank of weight 0 is left out, whatever its input.
    expect_all<float>(comm, count, {4, nan, 8}, 7, average(own({1, 0, 3})));
    expect_all<float>(comm, count, {nan, 5, nan}, 5, average(own({0, 2, 0})));
    expect_all<double>(comm, count, {1, 2, 3}, 0, average(0));
    // Weights so large that their sum is infinite.
    expect_all<double>(comm, count, {4, 8, 12}, 8, average(std::numeric_limits<double>::max()));
    expect_all<std::complex<float>>(comm, count, {std::complex<float>(4, 1), {nan, nan}, {8, -3}},
                                    std::complex<float>(7, -2), average(own({1, 0, 3})));
    AllReduceOptions scaled = average(own({1, 0, 3}));
    scaled.prescale = 2;
    scaled.postscale = -0.5;
    expect_all<float>(comm, count, {4, nan, 8}, -7, scaled);
  });
}

TEST(Values, OfEqualWeightsAreThePlainAveragesBits) {
  on_every_way([](Communicator& comm, std::size_t count) {
    std::mt19937 random(static_cast<unsigned>(comm.rank()));
    std::vector<float> plain(count);
    for (float& value : plain) value = static_cast<float>(random()) / 3;
    std::vector<float> weighted = plain;
    comm.all_reduce(std::span(plain), {.op = ReduceOp::Average}).wait();
    comm.all_reduce(std::span(weighted), {.op = ReduceOp::Average, .weight = 0.1}).wait();
    EXPECT_EQ(std::memcmp(plain.data(), weighted.data(), count * sizeof(float)), 0);
  });
}

// Compares with a computation in double, which has other bits but does not depend on the kernels.
TEST(Values, OfUnequalWeightsAreNearTheTrueAverage) {
  on_every_way([](Communicator& comm, std::size_t count) {
    const std::array<double, 3> weights = {0.3, 17, 1.25};
    std::vector<double> truth(count);
    std::vector<float> own(count);
    for (int rank = 0; rank < 3; ++rank) {
      std::mt19937 random(static_cast<unsigned>(rank));
      for (std::size_t i = 0; i < count; ++i) {
        const float value = static_cast<float>(random() % 20001) - 10000;
        truth[i] += static_cast<double>(value) * weights[static_cast<std::size_t>(rank)] / (0.3 + 17 + 1.25);
        if (rank == comm.rank()) own[i] = value;
      }
    }
    comm.all_reduce(std::span(own), {.op = ReduceOp::Average, .weight = weights[static_cast<std::size_t>(comm.rank())]})
        .wait();
    double worst = 0;
    for (std::size_t i = 0; i < count; ++i) worst = std::max(worst, std::fabs(own[i] - truth[i]));
    EXPECT_LT(worst, 0.005);  // a few roundings of numbers up to 10000
  });
}

TEST(Values, OfBoolsAndBits) {
  on_every_way([](Communicator& comm, std::size_t count) {
    for (int pattern = 0; pattern < 8; ++pattern) {
      std::array<bool, 3> brought{};
      int set = 0;
      for (std::size_t rank = 0; rank < 3; ++rank) {
        brought[rank] = (pattern >> rank & 1) != 0;
        set += brought[rank] ? 1 : 0;
      }
      for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Max, ReduceOp::BitOr}) {
        expect_all<bool>(comm, count, brought, set > 0, {.op = op});
      }
      for (const ReduceOp op : {ReduceOp::Product, ReduceOp::Min, ReduceOp::BitAnd}) {
        expect_all<bool>(comm, count, brought, set == 3, {.op = op});
      }
      expect_all<bool>(comm, count, brought, set % 2 == 1, {.op = ReduceOp::BitXor});
    }
    expect_all<std::uint16_t>(comm, count, {0xFF0F, 0x0FFF, 0xF3FF}, 0x030F, {.op = ReduceOp::BitAnd});
    expect_all<std::int8_t>(comm, count, {1, 2, -128}, -125, {.op = ReduceOp::BitOr});
    expect_all<std::uint64_t>(comm, count, {~0ull, 1, 2}, ~0ull - 3, {.op = ReduceOp::BitXor});
  });
}

TEST(Values, OfIntegersWrapAndAverageTowardZero) {
  on_every_way([](Communicator& comm, std::size_t count) {
    expect_all<std::int8_t>(comm, count, {127, 1, 0}, -128, {.op = ReduceOp::Sum});
    expect_all<std::uint8_t>(comm, count, {200, 100, 0}, 44, {.op = ReduceOp::Sum});
    expect_all<std::int32_t>(comm, count, {1 << 30, 4, 3}, 0, {.op = ReduceOp::Product});
    expect_all<std::int64_t>(comm, count, {-5, 0, 1}, -1, {.op = ReduceOp::Average});
    expect_all<std::int16_t>(comm, count, {-32768, 32767, -1}, -32768, {.op = ReduceOp::Min});
    // 200 + 100 wraps to 44 before it is divided.
    expect_all<std::uint8_t>(comm, count, {200, 100, 0}, 14, {.op = ReduceOp::Average});
    expect_all<std::uint64_t>(comm, count, {1, 1ull << 63, 5}, 1ull << 63, {.op = ReduceOp::Max});
  });
}

TEST(Values, OfComplexNumbersAndScales) {
  on_every_way([](Communicator& comm, std::size_t count) {
    using Complex = std::complex<double>;
    // (1+2i)(3-i)(2i) = (5+5i)(2i) = -10+10i
    expect_all<Complex>(comm, count, {Complex(1, 2), {3, -1}, {0, 2}}, {-10, 10}, {.op = ReduceOp::Product});
    expect_all<Complex>(comm, count, {Complex(1, 2), {3, -1}, {2, 8}}, {2, 3}, {.op = ReduceOp::Average});
    expect_all<Complex>(comm, count, {Complex(1, 2), {3, -1}, {2, 8}}, {1.5, 2.25},
                        {.op = ReduceOp::Sum, .prescale = 0.5, .postscale = 0.5});
    expect_all<float>(comm, count, {1, 2, 4}, 64, {.op = ReduceOp::Product, .prescale = 2});
    expect_all<float>(comm, count, {1, 2, 4}, -8, {.op = ReduceOp::Min, .prescale = -2, .postscale = 1});
    // A scale of zero is applied, too, and makes the result zero.
    expect_all<float>(comm, count, {1, 2, 4}, 0, {.op = ReduceOp::Sum, .postscale = 0});
  });
}

}  // namespace

}  // namespace cohort::comm::testing
