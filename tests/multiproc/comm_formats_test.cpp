// Training steps over hosts whose processors have different instruction sets, in each wire format: the replicas are
// equal to the bit. (Highway's choice is the process's, so ranks are processes.)
#include "comm_processes.h"

#include "comm/kernels/codecs.h"

#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace cohort::testing {
namespace {

/// One of the instruction sets that this machine has, another one for each rank.
void force_target(int rank) {
  std::vector<std::int64_t> targets;
  for (std::int64_t rest = hwy::SupportedTargets(); rest != 0; rest &= rest - 1) targets.push_back(rest & -rest);
  hwy::SetSupportedTargetsForTest(targets[static_cast<std::size_t>(rank) % targets.size()]);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

/// Gradient descent on a sum of squares, each rank with a target of its own, to near the minimum. The weights.
std::string train(Communicator& comm, WireFormat format, bool feedback, int steps) {
  constexpr std::size_t kCount = 20'000;  // large and small blocks
  std::vector<float> weights(kCount), residual(kCount), gradient(kCount);
  const auto target = [](std::size_t i, int rank) {
    return std::sin(static_cast<float>(i)) + static_cast<float>(rank);
  };
  const AllReduceOptions options{
      .op = ReduceOp::Average, .wire_format = format, .residual = feedback ? residual.data() : nullptr};
  for (int step = 0; step < steps; ++step) {
    for (std::size_t i = 0; i < kCount; ++i) gradient[i] = weights[i] - target(i, comm.rank());
    comm.all_reduce(std::span(gradient), options).wait();
    for (std::size_t i = 0; i < kCount; ++i) weights[i] -= 0.1F * gradient[i];
  }
  double off = 0;
  const float middle = static_cast<float>(comm.size() - 1) / 2;
  for (std::size_t i = 0; i < kCount; ++i)
    off = std::max<double>(off, std::abs(weights[i] - std::sin(static_cast<float>(i)) - middle));
  if (off > 0.02) throw Error(ErrorCode::Internal, "off by " + std::to_string(off));
  return {reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(float)};
}

class Formats : public ::testing::TestWithParam<std::vector<int>> {};

TEST_P(Formats, ReplicasStayEqualOnDifferentProcessors) {
  const std::vector<int>& hosts = GetParam();
  const int size = static_cast<int>(hosts.size());
  Processes processes(size);
  for (int rank = 0; rank < size; ++rank) {
    processes.start_rank(rank, [&, rank] {
      comm::FormOptions options = processes.form_options(rank);
      options.hosts = hosts;
      const comm::hosts::Layout layout(hosts, rank);
      options.placement.local_rank = layout.local;
      options.placement.local_size = layout.locals;
      options.placement.cross_rank = layout.host;
      options.placement.cross_size = layout.hosts;
      Communicator comm = Processes::form(options);
      force_target(rank);
      std::string weights;
      for (int format = 1; format < kWireFormatCount; ++format)
        weights += train(comm, static_cast<WireFormat>(format), format > 1, size == 2 ? 1000 : 150);
      return weights;
    });
  }
  const Ending first = processes.collect(0);
  EXPECT_TRUE(first.exited_well()) << first.said;
  for (int rank = 1; rank < size; ++rank) {
    const Ending other = processes.collect(rank);
    EXPECT_TRUE(other.exited_well()) << other.said;
    EXPECT_TRUE(other.said == first.said) << "rank " << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(OnHosts, Formats,
                         ::testing::Values(std::vector<int>{0, 1}, std::vector<int>{0, 0, 1, 1},
                                           std::vector<int>{0, 1, 2}));

}  // namespace
}  // namespace cohort::testing
