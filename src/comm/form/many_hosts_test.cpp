// Sums and rounds of more hosts than exchange data with each other directly: the order of folds, to the bit, on every
// way; who disagrees, does not come or is lost, named on all ranks; and how many connections there are.
#include "comm/hosts/levels.h"
#include "comm/kernels/codecs.h"
#include "comm/testing/naive.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <latch>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm::testing {
namespace {

using namespace std::chrono_literals;

/// Hosts, and ranks on each.
struct Shape {
  int hosts;
  int locals;
  int size() const { return hosts * locals; }
};

std::vector<Communicator> form(const Shape& shape) {
  std::vector<int> hosts;
  for (int rank = 0; rank < shape.size(); ++rank) hosts.push_back(rank / shape.locals);
  return form_on_threads(usual_backend(true), std::move(hosts), shape.size(), {.timeout = 60s});
}

/// The sum of an all_reduce.
struct Sum {
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::int64_t count = 0;
  std::vector<double> weights = {};  // by rank, if there are any
  WireFormat format = WireFormat::None;
};

Bytes input_of(const Sum& sum, int rank) {
  return interesting(sum.dtype, sum.count, static_cast<std::uint64_t>(rank * 31 + static_cast<int>(sum.op)));
}

/// The reference: over the ranks of each host, then over the hosts. `joined`: ranks that bring nothing.
Bytes expected_of(const Sum& sum, const Shape& shape, const std::vector<int>& joined = {}) {
  std::vector<int> ranks;
  std::vector<double> taken;
  for (int rank = 0; rank < shape.size(); ++rank) {
    if (std::find(joined.begin(), joined.end(), rank) != joined.end()) continue;
    if (!sum.weights.empty() && sum.weights[static_cast<std::size_t>(rank)] == 0) continue;
    ranks.push_back(rank);
    if (!sum.weights.empty()) taken.push_back(sum.weights[static_cast<std::size_t>(rank)]);
  }
  const Weighting weighting = weigh(taken);
  std::vector<std::pair<int, Bytes>> partials;
  for (std::size_t i = 0; i < ranks.size();) {
    const int host = ranks[i] / shape.locals;
    std::vector<Bytes> here;
    Factors factors;
    for (; i < ranks.size() && ranks[i] / shape.locals == host; ++i) {
      here.push_back(input_of(sum, ranks[i]));
      if (!weighting.fractions.empty()) factors.scales.push_back(weighting.fractions[i]);
    }
    Bytes partial =
        here.size() == 1 && factors.scales.empty()
            ? here.front()
            : reference_fold(sum.dtype, sum.op == ReduceOp::Average ? ReduceOp::Sum : sum.op, here, sum.count, factors);
    if (sum.format != WireFormat::None)
      round_trip(sum.format, reinterpret_cast<float*>(partial.data()), static_cast<std::size_t>(sum.count));
    partials.emplace_back(host, std::move(partial));
  }
  Factors last;
  last.divisor = weighting.fractions.empty() ? static_cast<std::int64_t>(ranks.size()) : 1;
  last.order = order_over(shape.hosts);
  Bytes result = reference_of_hosts(sum.dtype, sum.op, std::move(partials), shape.hosts, sum.count, last);
  if (sum.format != WireFormat::None)
    round_trip(sum.format, reinterpret_cast<float*>(result.data()), static_cast<std::size_t>(sum.count));
  return result;
}

class ManyHosts : public ::testing::TestWithParam<Shape> {
 protected:
  ManyHosts() : shape_(GetParam()), world_(form(shape_)) {}

  /// Runs `body` on all ranks.
  void on_all(const std::function<void(Communicator)>& body) { run_on_threads_of(world_, body); }

  Bytes all_reduced(Communicator& comm, const Sum& sum) const {
    const Bytes input = input_of(sum, comm.rank());
    Bytes output(input.size());
    AllReduceOptions options{.op = sum.op, .wire_format = sum.format};
    if (!sum.weights.empty()) options.weight = sum.weights[static_cast<std::size_t>(comm.rank())];
    comm.all_reduce(ConstBuffer(input.data(), sum.count, sum.dtype), Buffer(output.data(), sum.count, sum.dtype),
                    options)
        .wait();
    return output;
  }

  /// Compares an all_reduce of each of these sums on all ranks.
  void compare(const std::vector<Sum>& sums) {
    std::vector<Bytes> expected;
    for (const Sum& sum : sums) expected.push_back(expected_of(sum, shape_));
    on_all([&](Communicator comm) {
      for (std::size_t i = 0; i < sums.size(); ++i) {
        if (all_reduced(comm, sums[i]) == expected[i]) continue;
        ADD_FAILURE() << to_string(sums[i].dtype) << "[" << sums[i].count << "], " << to_string(sums[i].op)
                      << ", on rank " << comm.rank() << " of " << shape_.hosts << " x " << shape_.locals;
      }
    });
  }

  Shape shape_;
  std::vector<Communicator> world_;
};

TEST_P(ManyHosts, SumsHaveTheBitsOfTheTreeWhateverTheirSize) {
  std::vector<Sum> sums;
  for (const std::int64_t count : {1, 100, 400, 5000}) {
    for (const DType dtype : {DType::Float32, DType::BFloat16}) {
      sums.push_back({dtype, ReduceOp::Sum, count});
      sums.push_back({dtype, ReduceOp::Average, count});
    }
  }
  sums.push_back({DType::Float32, ReduceOp::Average, 300001});  // several blocks, each of several pieces
  sums.push_back({DType::BFloat16, ReduceOp::Sum, 40000});
  for (const std::int64_t count : {50, 3001}) {
    sums.push_back({DType::Float64, ReduceOp::Product, count});
    sums.push_back({DType::Float16, ReduceOp::Sum, count});
    sums.push_back({DType::Complex64, ReduceOp::Product, count});
    sums.push_back({DType::Int32, ReduceOp::Average, count});
    sums.push_back({DType::Bool, ReduceOp::BitXor, count});
    sums.push_back({DType::Float32, ReduceOp::Min, count});
  }
  compare(sums);
}

TEST_P(ManyHosts, RanksWithoutWeightAreLeftOut) {
  std::vector<Sum> sums;
  for (const DType dtype : {DType::Float32, DType::BFloat16}) {
    for (const std::int64_t count : {40, 6000}) {
      Sum sum{dtype, ReduceOp::Average, count};
      for (int rank = 0; rank < shape_.size(); ++rank) sum.weights.push_back(1 + rank % 3);  // all, differing
      sums.push_back(sum);
      for (int rank = 0; rank < shape_.size(); rank += 5) sum.weights[static_cast<std::size_t>(rank)] = 0;
      sums.push_back(sum);
      for (int rank = 0; rank < 16; ++rank) sum.weights[static_cast<std::size_t>(rank)] = 0;  // a whole block
      sums.push_back(sum);
      sum.weights.assign(sum.weights.size(), 0);
      sums.push_back(sum);
    }
  }
  compare(sums);
}

TEST_P(ManyHosts, WireFormatsRoundHostsSumsAndTheResult) {
  std::vector<Sum> sums;
  for (const WireFormat format : {WireFormat::BFloat16, WireFormat::Int8, WireFormat::Int4}) {
    for (const std::int64_t count : {60, 30001}) sums.push_back({DType::Float32, ReduceOp::Average, count, {}, format});
  }
  compare(sums);
}

TEST_P(ManyHosts, OtherReductionsGiveTheirPart) {
  const Sum sum{DType::Float32, ReduceOp::Sum, static_cast<std::int64_t>(shape_.size()) * 700};
  const Sum few{DType::BFloat16, ReduceOp::Average, shape_.size()};
  const std::array<Bytes, 2> expected = {expected_of(sum, shape_), expected_of(few, shape_)};
  on_all([&](Communicator comm) {
    for (const Sum* const each : {&sum, &few}) {
      const Bytes& all = expected[each == &sum ? 0 : 1];
      const Bytes input = input_of(*each, comm.rank());
      const ConstBuffer from(input.data(), each->count, each->dtype);
      const std::size_t element = size_of(each->dtype);
      const std::int64_t kept = each->count / shape_.size();
      Bytes part(static_cast<std::size_t>(kept) * element);
      comm.reduce_scatter(from, Buffer(part.data(), kept, each->dtype), {.op = each->op}).wait();
      EXPECT_EQ(std::memcmp(part.data(), all.data() + static_cast<std::size_t>(comm.rank()) * part.size(), part.size()),
                0)
          << comm.rank();
      Bytes whole(all.size());
      comm.reduce(from, Buffer(whole.data(), each->count, each->dtype), {.root = 3, .op = each->op}).wait();
      EXPECT_TRUE(comm.rank() != 3 || whole == all);
    }
  });
}

TEST_P(ManyHosts, RanksThatHaveJoinedBringNothing) {
  const std::vector<int> joined = {0, 5, 6, shape_.size() - 1};
  const std::array<Sum, 2> sums = {Sum{DType::Float32, ReduceOp::Average, 30},
                                   Sum{DType::BFloat16, ReduceOp::Sum, 5000}};
  const std::array<Bytes, 2> expected = {expected_of(sums[0], shape_, joined), expected_of(sums[1], shape_, joined)};
  on_all([&](Communicator comm) {
    if (std::find(joined.begin(), joined.end(), comm.rank()) == joined.end()) {
      // They may still come to it: until they have, all ranks would bring something.
      for (std::size_t i = 0; i < sums.size(); ++i)
        EXPECT_TRUE(all_reduced(comm, sums[i]) == expected[i]) << comm.rank();
    }
    comm.join();
  });
}

TEST_P(ManyHosts, AMismatchIsNamedOnAllAndTheWorldGoesOn) {
  const int odd = shape_.size() - 1;
  std::mutex mutex;
  std::vector<std::string> told;
  on_all([&](Communicator comm) {
    for (const std::size_t count : {10U, 4000U}) {
      std::vector<float> values(comm.rank() == odd ? count + 1 : count, 1);
      const std::string why = what_of([&] { comm.all_reduce(std::span(values)).wait(); }, ErrorCode::Mismatch);
      const std::lock_guard lock(mutex);
      told.push_back(why);
      if (!contains(why, fmt::format("rank {} brought all_reduce(float32[{}]", odd, count + 1)))
        ADD_FAILURE() << comm.rank() << ": " << why;
    }
    std::vector<float> values(4000, 1);
    comm.all_reduce(std::span(values)).wait();
    EXPECT_EQ(values.back(), static_cast<float>(shape_.size()));
  });
  EXPECT_EQ(told.size(), 2 * static_cast<std::size_t>(shape_.size()));
}

/// TCP connections between ranks of this process.
std::size_t connections() {
  std::size_t ends = 0;
  for (int fd = 0; fd < 65536; ++fd) {
    sockaddr_storage address{};
    socklen_t length = sizeof address;
    if (::getpeername(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0 &&
        (address.ss_family == AF_INET || address.ss_family == AF_INET6))
      ++ends;
  }
  return ends / 2;
}

TEST_P(ManyHosts, AHostHasConnectionsToItsPeersAlone) {
  const hosts::Levels levels(shape_.hosts, 0);
  std::size_t allowed = 0;
  for (int host = 0; host < shape_.hosts; ++host) allowed += levels.peers(host).size();
  std::size_t found = 0;
  on_all([&](Communicator comm) {
    for (const std::int64_t count : {1, 300, 9000, 200000}) all_reduced(comm, {DType::Float32, ReduceOp::Sum, count});
    all_reduced(comm, {DType::BFloat16, ReduceOp::Average, 9000, std::vector<double>(world_.size(), 2.0)});
    comm.barrier().wait();
    if (comm.rank() == 0) found = connections();
    comm.barrier().wait();
  });
  // The leaders' and, for large sums, those of the other stripes.
  EXPECT_LE(found, allowed / 2 * static_cast<std::size_t>(shape_.locals));
  EXPECT_GT(found, allowed / 4);
}

const Shape kShapes[] = {{16, 1}, {17, 1}, {18, 2}, {31, 1}, {33, 1}, {40, 1}};
INSTANTIATE_TEST_SUITE_P(Hosts, ManyHosts, ::testing::ValuesIn(kShapes),
                         [](const auto& shape) { return fmt::format("{}x{}", shape.param.hosts, shape.param.locals); });

/// Returns the errors of all ranks when `missing` does not come to an operation, or leaves.
std::vector<std::string> told_without(const Shape& shape, int missing, ErrorCode code,
                                      const std::function<void(Communicator&, std::latch&)>& absent) {
  std::vector<Communicator> world = form(shape);
  std::latch ready(shape.size());       // whoever is still in the operation before is told of the end there
  std::latch others(shape.size() - 1);  // are told
  std::vector<std::string> told(world.size());
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < shape.size(); ++rank) {
    threads.emplace_back([&, rank, comm = std::move(world[static_cast<std::size_t>(rank)])]() mutable {
      std::vector<float> values(3000);
      comm.all_reduce(std::span(values)).wait();
      ready.arrive_and_wait();
      if (rank == missing) return absent(comm, others);
      told[static_cast<std::size_t>(rank)] =
          what_of([&] { comm.all_reduce(std::span(values), {.timeout = 1s}).wait(); }, code);
      others.count_down();
    });
  }
  threads.clear();
  return told;
}

TEST(ManyHostsFaults, WhoDoesNotComeIsNamedOnAll) {
  for (const int missing : {3, 35}) {
    const Shape shape{36, 1};
    const std::vector<std::string> told =
        told_without(shape, missing, ErrorCode::Timeout, [](Communicator& comm, std::latch& others) {
          others.wait();
          what_of([&] { comm.barrier().wait(); }, ErrorCode::Aborted);
        });
    for (int rank = 0; rank < shape.size(); ++rank) {
      if (rank == missing) continue;
      const std::string& text = told[static_cast<std::size_t>(rank)];
      EXPECT_TRUE(contains(text, fmt::format("rank {} did not come to operation 2", missing))) << rank << ": " << text;
    }
  }
}

TEST(ManyHostsFaults, WhoLeavesIsNamedOnAll) {
  const Shape shape{36, 1};
  const std::vector<std::string> told =
      told_without(shape, 20, ErrorCode::PeerLost, [](Communicator& comm, std::latch&) { comm = Communicator(); });
  for (int rank = 0; rank < shape.size(); ++rank) {
    if (rank == 20) continue;
    EXPECT_TRUE(contains(told[static_cast<std::size_t>(rank)], "rank 20")) << told[static_cast<std::size_t>(rank)];
  }
}

}  // namespace
}  // namespace cohort::comm::testing
