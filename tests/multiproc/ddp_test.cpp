// DistributedDataParallel on ranks that are processes: the result of one process, the same bits every time, gradients
// that are reduced where they lie, and a named error where a rank dies. The test program itself uses
// torch only after it has forked.
#include <cohort/torch/nn.h>

#include <gtest/gtest.h>

#include "comm_processes.h"
#include "torch/test_models.h"

#include <atomic>
#include <numeric>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr int kSteps = 4;

std::string train(Communicator comm, const std::vector<std::int64_t>& samples, at::ScalarType type) {
  Mlp net = with_values(Mlp(type), comm.rank() * 100.0);
  DistributedDataParallel model(net, comm, by_rows({.bucket_bytes = 1200, .first_bucket_bytes = 300}));
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  const auto mine = samples.begin() + comm.rank();
  const std::int64_t begin = std::accumulate(samples.begin(), mine, std::int64_t{0});
  const std::int64_t total = std::accumulate(samples.begin(), samples.end(), std::int64_t{0});
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = batch_of(step, total, type);
    optimizer.zero_grad();
    loss_of(model(batch.x.slice(0, begin, begin + *mine)), batch.y.slice(0, begin, begin + *mine)).backward();
    optimizer.step();
  }
  return text_of(*net);
}

std::vector<std::string> train_on_processes(const std::vector<std::int64_t>& samples, at::ScalarType type) {
  const int world = static_cast<int>(samples.size());
  Processes processes(world);
  processes.start([&](Communicator comm) { return train(comm, samples, type); });
  std::vector<std::string> said;
  for (int rank = 0; rank < world; ++rank) {
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(ending.exited_well()) << ending.said;
    said.push_back(ending.said);
  }
  return said;
}

TEST(DdpProcesses, EqualOneProcessEvenAndUneven) {
  const std::vector<std::vector<std::int64_t>> splits = {{6, 6}, {1, 5, 2}, {3, 0, 3, 3}};
  std::vector<std::vector<std::string>> results;
  for (const auto& split : splits) results.push_back(train_on_processes(split, at::kDouble));

  for (std::size_t i = 0; i < splits.size(); ++i) {  // no more forks from here on
    Mlp net = with_values(Mlp(), 0);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    const std::int64_t total = std::accumulate(splits[i].begin(), splits[i].end(), std::int64_t{0});
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batch_of(step, total);
      optimizer.zero_grad();
      loss_of(net->forward(batch.x), batch.y).backward();
      optimizer.step();
    }
    const std::vector<double> expected = numbers_of(text_of(*net));
    for (const std::string& rank : results[i]) {
      EXPECT_EQ(rank, results[i][0]);  // replicas: to the last digit
      const std::vector<double> got = numbers_of(rank);
      ASSERT_EQ(got.size(), expected.size());
      for (std::size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], expected[k], 1e-11) << "split " << i;
    }
  }
}

TEST(DdpProcesses, TwoRunsAreEqualToTheBit) {
  const std::vector<std::int64_t> samples = {5, 3, 7};
  EXPECT_EQ(train_on_processes(samples, at::kFloat), train_on_processes(samples, at::kFloat));
}

class CopyLog : public Observer {
 public:
  void on_collective(const CollectiveEvent& event) override {
    if (event.operation == "all_reduce") (event.zero_copy ? in_place : copied)++;
  }
  std::atomic<int> in_place = 0;
  std::atomic<int> copied = 0;
};

TEST(DdpProcesses, GradientsAreReducedWhereTheyLie) {
  Processes processes(2);
  processes.start([](Communicator comm) -> std::string {
    CopyLog log;
    {
      Mlp net = with_values(Mlp(at::kFloat, 512), 0);
      DistributedDataParallel model(net, comm, {.bucket_bytes = 1 << 18, .first_bucket_bytes = 1 << 14});
      comm.set_observer(&log);
      for (int step = 0; step < 3; ++step) {
        if (step == 2) {
          for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().zero_();
        } else {
          model.zero_grad();
        }
        const Batch batch = batch_of(2 * step + comm.rank(), 4, at::kFloat);
        loss_of(model(batch.x), batch.y).backward();
        for (const auto& item : net->named_parameters()) {
          const nn::BucketSlot slot = model.slot_of(item.key());
          if (item.value().grad().data_ptr() != static_cast<const char*>(slot.begin) + slot.offset) {
            throw std::runtime_error(item.key() + " is not in its bucket");
          }
        }
      }
      comm.set_observer(nullptr);
    }
    return std::to_string(log.copied) + " copied, some in place: " + (log.in_place >= 6 ? "yes" : "no");
  });
  for (int rank = 0; rank < 2; ++rank) {
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(ending.exited_well()) << ending.said;
    EXPECT_EQ(ending.said, "3 copied, some in place: yes");  // the flags of each step
  }
}

TEST(DdpProcesses, ARankThatDiesInTrainingIsNamedByBackward) {
  Processes processes(3);
  processes.start([&](Communicator comm) -> std::string {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm);
    for (int step = 0; step < 1000000; ++step) {
      if (comm.rank() == 1 && step == 3) ::raise(SIGKILL);
      const Batch batch = batch_of(step, 4);
      const at::Tensor loss = loss_of(model(batch.x), batch.y);
      if (step < 3) {
        loss.backward();
        continue;
      }
      try {
        loss.backward();
      } catch (const Error& error) {
        return std::string(to_string(error.code())) + " " + error.what();
      }
    }
    return "nothing happened";
  });
  EXPECT_TRUE(processes.collect(1).killed_by(SIGKILL));
  for (const int rank : {0, 2}) {
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(ending.exited_well()) << ending.said;
    EXPECT_NE(ending.said.find("rank 1"), std::string::npos) << ending.said;
    EXPECT_TRUE(ending.said.rfind("PeerLost", 0) == 0 || ending.said.rfind("Aborted", 0) == 0) << ending.said;
  }
}

}  // namespace
}  // namespace cohort
