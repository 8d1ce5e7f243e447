// Pipelines on ranks that are processes: the gradients and the random numbers of one process, whatever the schedule; a
// rank that dies, or throws, is named on all others at once. The test program itself uses torch only after it has
// forked.
#include <cohort/torch/pipeline.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/dropout.h>

#include "comm_processes.h"
#include "torch/test_models.h"

#include <map>
#include <sstream>

namespace cohort {
namespace {

using nn::Pipeline;
using pipeline::Schedule;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

/// Nine layers with dropout, made by functions: initial values and dropout from the seed.
std::vector<nn::PipelineLayer> layers() {
  std::vector<nn::PipelineLayer> list;
  for (int i = 0; i < 3; ++i) {
    list.emplace_back([i] { return torch::nn::Linear(i == 0 ? 5 : 16, 16); });
    list.emplace_back([] { return torch::nn::Dropout(0.3); });
    list.emplace_back([i] { return torch::nn::Linear(16, i == 2 ? 3 : 16); });
  }
  return list;
}

struct Job {
  int ranks;
  Schedule schedule = Schedule::OneFOneB;
  int chunks = 1;
  std::uint64_t seed = 7;
};

/// The loss of each step, then a line for each parameter, of all ranks, sorted: name and gradient, to the last digit.
std::string train(const Job& job) {
  Processes processes(job.ranks);
  processes.start([&](Communicator comm) {
    torch::manual_seed(static_cast<std::uint64_t>(comm.rank()));  // not what counts
    Pipeline model(
        layers(), comm,
        {.schedule = job.schedule, .micro_batches = 8, .chunks = job.chunks, .loss = loss_of, .seed = job.seed});
    std::optional<torch::optim::SGD> sgd;
    if (!model.parameters().empty()) sgd.emplace(model.parameters(), 0.1);
    std::ostringstream said;
    said.precision(17);
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(step, 24, at::kFloat);
      model.zero_grad();
      const double before = at::rand({1}, at::kDouble).item<double>();
      const double loss = model.step(comm.rank() == 0 ? batch.x : at::Tensor(),
                                     comm.rank() + 1 == comm.size() ? batch.y : at::Tensor());
      if (at::rand({1}, at::kDouble).item<double>() == before) throw std::runtime_error("the generator stands still");
      if (comm.rank() == 0) said << "0 loss " << loss << '\n';
      if (sgd) sgd->step();
    }
    for (const auto& item : model.named_parameters()) {
      said << item.key();
      const at::Tensor gradient = item.value().grad().contiguous();
      for (std::int64_t i = 0; i < gradient.numel(); ++i) said << ' ' << gradient.data_ptr<float>()[i];
      said << '\n';
    }
    return said.str();
  });
  std::string lines;
  for (int rank = 0; rank < job.ranks; ++rank) {
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(ending.exited_well()) << ending.said;
    lines += ending.said;
  }
  std::multimap<std::string, std::string> sorted;
  std::istringstream in(lines);
  for (std::string line; std::getline(in, line);) sorted.emplace(line.substr(0, line.find(' ')), line);
  std::string text;
  for (const auto& [name, line] : sorted) text += line + "\n";
  return text;
}

TEST(PipelineProcesses, GiveTheBitsOfOneProcessWithDropoutToo) {
  const std::string alone = train({1});
  ASSERT_NE(alone.find("8.weight"), std::string::npos) << alone;
  for (const Job& job :
       {Job{2, Schedule::GPipe}, Job{4, Schedule::GPipe}, Job{2}, Job{4}, Job{2, Schedule::Interleaved, 2},
        Job{4, Schedule::Interleaved, 2}, Job{2, Schedule::ZeroBubble}, Job{4, Schedule::ZeroBubble}}) {
    EXPECT_EQ(train(job), alone) << pipeline::to_string(job.schedule) << " on " << job.ranks;
  }
}

void expect_others_to_name(Processes& processes, int ranks, int culprit, const std::string& what) {
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == culprit) continue;
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(WIFEXITED(ending.status)) << ending.said;
    EXPECT_NE(ending.said.find(what), std::string::npos) << "rank " << rank << ": " << ending.said;
    EXPECT_TRUE(ending.said.rfind("PeerLost", 0) == 0 || ending.said.rfind("Aborted", 0) == 0) << ending.said;
  }
}

TEST(PipelineProcesses, AStageThatIsKilledIsNamedOnAllOthersAtOnce) {
  Processes processes(4);
  processes.start([&](Communicator comm) -> std::string {
    Pipeline model(layers(), comm, {.micro_batches = 8, .loss = loss_of});
    const Batch batch = batch_of(0, 16, at::kFloat);
    for (int step = 0;; ++step) {
      if (comm.rank() == 2 && step == 3) processes.raise_flag("busy");
      (void)model.step(batch.x, batch.y);
    }
  });
  ASSERT_TRUE(processes.await_flag("busy"));
  processes.kill(2, SIGKILL);
  const auto killed = Clock::now();
  expect_others_to_name(processes, 4, 2, "rank 2");
  const auto took = Clock::now() - killed;
  EXPECT_LT(took, 20s);  // 0.1 s on an idle machine; no operation's time is over by then
  std::printf("named after %.0f ms\n", std::chrono::duration<double, std::milli>(took).count());
  EXPECT_TRUE(processes.collect(2).killed_by(SIGKILL));
}

TEST(PipelineProcesses, AStageThatThrowsEndsTheStepOnAllOthersWithItsReason) {
  Processes processes(3);
  processes.start([&](Communicator comm) -> std::string {
    torch::nn::Sequential net(torch::nn::Linear(5, 5), torch::nn::Linear(5, 6), torch::nn::Linear(5, 3));
    Pipeline model(net, comm, {.micro_batches = 4, .loss = loss_of});
    const Batch batch = batch_of(0, 8, at::kFloat);
    (void)model.step(batch.x, batch.y);
    return "nothing happened";
  });
  expect_others_to_name(processes, 3, -1, "stage 2, forward of micro-batch 0 -- mat1 and mat2 shapes");
}

}  // namespace
}  // namespace cohort
