// Every operation, type and size over worlds of threads, against a reference, with memory of every kind.
#include "comm/testing/by_hosts.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
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

/// A buffer of some kind of memory with guard bytes around it, which must survive.
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
  Bytes expected;             // of all parts
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
      // Sizes around the slots' payload and the pages, primes, and each kind of memory in turn.
      for (const std::int64_t count : {0, 1, 7, 1023, 4099}) add(dtype, op, count, kPlaces[++turn % 4]);
    }
    // More than two chunks of staging.
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
