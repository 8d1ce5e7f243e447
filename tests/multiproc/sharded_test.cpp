// Training whose state is divided, on ranks that are processes, of one host and of two (fake): 50 steps of Adam with
// the bits of DistributedDataParallel without it, in less memory than one process would need, and parameters that
// nobody but the optimizer writes to. The test program itself uses torch only after it has forked.
#include <cohort/torch/nn.h>
#include <cohort/torch/sharded.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>

#include "comm_processes.h"
#include "torch/test_models.h"

#include <malloc.h>
#include <sys/resource.h>

#include <cstring>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::Sharding;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

/// FNV-1a (Fowler, Noll, Vo) of all parameters' bits.
std::string bits_of(const torch::nn::Module& module) {
  std::uint64_t digest = 0xCBF29CE484222325ull;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor flat = parameter.detach().contiguous().cpu();
    const auto* const bytes = static_cast<const unsigned char*>(flat.data_ptr());
    for (std::size_t i = 0; i < flat.nbytes(); ++i) digest = (digest ^ bytes[i]) * 0x100000001B3ull;
  }
  return std::to_string(digest);
}

torch::nn::Sequential model_of() {
  return with_values(torch::nn::Sequential(torch::nn::Linear(5, 541), torch::nn::Tanh(), torch::nn::Linear(541, 501),
                                           torch::nn::Tanh(), torch::nn::Linear(501, 3)),
                     0.1);
}

std::string train(Communicator comm, Sharding sharding) {
  at::set_num_threads(1);
  auto net = model_of();
  DistributedDataParallel model(net, comm, {.sharding = sharding});
  const auto run = [&](torch::optim::Optimizer& optimizer) {
    for (int step = 0; step < 50; ++step) {
      const Batch batch = batch_of(step * 10 + comm.rank(), 4, at::kFloat);
      loss_of(model(batch.x), batch.y).backward();
      optimizer.step();
      model.zero_grad();
    }
  };
  if (sharding == Sharding::None) {
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-2));
    run(optimizer);
  } else {
    optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(1e-2));
    run(optimizer);
  }
  return bits_of(*net);
}

TEST(ShardedProcesses, FiftyStepsOfAdamHaveTheBitsOfTheWhole) {
  for (const int size : {2, 4}) {
    std::vector<std::string> bits;
    for (const Sharding sharding : {Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters}) {
      Processes processes(size);
      processes.start([&](Communicator comm) { return train(comm, sharding); });
      for (int rank = 0; rank < size; ++rank) {
        const Ending ending = processes.collect(rank);
        ASSERT_TRUE(ending.exited_well()) << ending.said;
        bits.push_back(ending.said);
      }
    }
    for (const std::string& each : bits) EXPECT_EQ(each, bits.front()) << size << " ranks";
  }
}

/// Bytes of this process that no other has: the memory that RLIMIT_DATA counts.
std::size_t private_bytes() {
  std::ifstream file("/proc/self/status");
  std::string word;
  std::size_t kib = 0;
  while (file >> word) {
    if (word != "VmData:") continue;
    file >> kib;
    break;
  }
  return kib << 10;
}

constexpr std::int64_t kWidth = 1 << 11;
constexpr int kLayers = 16;  // 67 million parameters: 1.07 GB with gradients and Adam's state

std::string train_large(Communicator comm, Sharding sharding) {
  at::set_num_threads(1);
  ::mallopt(M_MMAP_THRESHOLD, 1 << 20);  // so that what is freed is the system's at once, and not the heap's
  torch::nn::Linear warm(8, 8);
  warm(at::ones({1, 8})).sum().backward();
  comm.barrier().wait();
  const std::size_t need = std::size_t{16} * kLayers * kWidth * kWidth;
  const std::size_t limit = private_bytes() + need / 4 + (std::size_t{40} << 20);
  const rlimit data = {limit, limit};
  if (::setrlimit(RLIMIT_DATA, &data) != 0) return "no limit";
  torch::nn::Sequential net;
  for (int layer = 0; layer < kLayers; ++layer) {
    net->push_back(torch::nn::Linear(torch::nn::LinearOptions(kWidth, kWidth).bias(false)));
  }
  DistributedDataParallel model(net, comm, {.sharding = sharding});
  const at::Tensor x = at::ones({1, kWidth}) * (comm.rank() + 1);
  const auto run = [&](torch::optim::Optimizer& optimizer) {
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      const at::Tensor loss = (model(x) - 1).square().mean();
      loss.backward();
      optimizer.step();
      model.zero_grad();
      losses.push_back(loss.item<double>());
    }
    return losses;
  };
  std::vector<double> losses;
  if (sharding == Sharding::None) {
    torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-4));
    losses = run(optimizer);
  } else {
    optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(1e-4));
    losses = run(optimizer);
  }
  return losses.back() < losses.front() ? "trained" : "no progress";
}

TEST(ShardedProcesses, TrainInAQuarterOfTheMemoryThatOneProcessNeeds) {
  for (const Sharding sharding : {Sharding::Parameters, Sharding::None}) {
    Processes processes(4);
    processes.start([&](Communicator comm) { return train_large(comm, sharding); });
    for (int rank = 0; rank < 4; ++rank) {
      const Ending ending = processes.collect(rank);
      if (sharding == Sharding::None) {
        EXPECT_FALSE(ending.exited_well()) << ending.said;
      } else {
        EXPECT_TRUE(ending.exited_well()) << ending.said;
        EXPECT_EQ(ending.said, "trained");
      }
    }
  }
}

TEST(ShardedProcesses, WhoWritesToAProtectedParameterIsNamed) {
  const std::string said = (std::filesystem::temp_directory_path() / "cohort-protected-XXXXXX").string();
  std::string path = said;
  const int file = ::mkstemp(path.data());
  ASSERT_GE(file, 0);
  Processes processes(2);
  processes.start([&](Communicator comm) -> std::string {
    at::set_num_threads(1);
    auto net = model_of();
    DistributedDataParallel model(net, comm, {.sharding = Sharding::Parameters, .protect_parameters = true});
    optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(1e-2));
    const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
    loss_of(model(batch.x), batch.y).backward();
    optimizer.step();  // the optimizer may
    comm.barrier().wait();
    if (comm.rank() == 0) return "fine";
    ::dup2(file, STDERR_FILENO);
    static_cast<float*>(net->parameters()[2].data_ptr())[77] = 1;
    return "written";
  });
  EXPECT_TRUE(processes.collect(0).exited_well());
  const Ending ending = processes.collect(1);
  EXPECT_TRUE(ending.killed_by(SIGSEGV)) << ending.said;
  std::ifstream in(path);
  const std::string line{std::istreambuf_iterator<char>(in), {}};
  EXPECT_NE(line.find("cohort: rank 1 writes to element 77 of parameter '2.weight', which all ranks of its host share"),
            std::string::npos)
      << line;
  ::close(file);
  std::filesystem::remove(path);
}

}  // namespace
}  // namespace cohort
