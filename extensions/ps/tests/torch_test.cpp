// Dense parameters of a libtorch module on servers: workers that are processes train as one does. The test program
// itself uses torch only after it has forked.
#include <cohort/torch/ps.h>

#include <gtest/gtest.h>

#include "comm_processes.h"
#include "torch/test_models.h"

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace cohort {
namespace {

using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr int kSteps = 4;

/// Results of two workers' `work` with two servers.
std::vector<std::string> on_servers(const std::function<std::string(ps::Client&)>& work) {
  constexpr int kServers = 2, kWorkers = 2;
  const std::string name = "@cohort-ddp-test-" + std::to_string(::getpid()) + "-";
  Processes processes(kServers + kWorkers);
  processes.start([&](Communicator comm) -> std::string {
    std::optional<ps::Server> server;
    if (comm.rank() < kServers) server.emplace(ps::ServerOptions{.endpoint = name + std::to_string(comm.rank())});
    comm.barrier().wait();
    std::string said;
    if (!server) {
      ps::ClientOptions options{.worker = comm.rank() - kServers, .workers = kWorkers};
      for (int i = 0; i < kServers; ++i) options.servers.push_back(name + std::to_string(i));
      ps::Client client = ps::Client::connect(options);
      said = work(client);
    }
    comm.barrier().wait();
    return said;
  });
  std::vector<std::string> said;
  for (int rank = 0; rank < kServers + kWorkers; ++rank) {
    const Ending ending = processes.collect(rank);
    EXPECT_TRUE(ending.exited_well()) << ending.said;
    if (rank >= kServers) said.push_back(ending.said);
  }
  return said;
}

void require(bool is, const std::string& what) {
  if (!is) throw std::runtime_error(what);
}

TEST(OptimizerOnServers, TrainsAsOneProcess) {
  constexpr std::int64_t kRows = 6;
  const std::vector<std::string> results = on_servers([](ps::Client& client) {
    const ps::DistributedOptimizerOptions options{.optimizer = ps::optim::Sgd{.lr = 0.2, .momentum = 0.9},
                                                  .prefix = "net."};
    Mlp net = with_values(Mlp(at::kFloat), client.worker() * 100.0);  // worker 0's count
    ps::DistributedOptimizer optimizer(client, net->named_parameters(), options);
    for (int step = 0; step < kSteps; ++step) {
      const Batch batch = batch_of(step, 2 * kRows, at::kFloat);
      const std::int64_t begin = client.worker() * kRows;
      optimizer.zero_grad(step % 2 == 0);
      loss_of(net->forward(batch.x.slice(0, begin, begin + kRows)), batch.y.slice(0, begin, begin + kRows)).backward();
      optimizer.step();
    }
    const std::string trained = text_of(*net);
    Mlp late = with_values(Mlp(at::kFloat), 7);
    const ps::DistributedOptimizer joined(client, late->named_parameters(), options);
    require(text_of(*late) == trained, "a training that is under way is joined");
    optimizer.step({.lr = 0.0});
    require(text_of(*net) == trained, "a step's own rate counts");
    client.barrier();
    return trained;
  });
  Mlp net = with_values(Mlp(at::kFloat), 0);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = batch_of(step, 2 * kRows, at::kFloat);
    optimizer.zero_grad();
    loss_of(net->forward(batch.x), batch.y).backward();
    optimizer.step();
  }
  EXPECT_EQ(results[0], results[1]);
  const std::vector<double> expected = numbers_of(text_of(*net)), got = numbers_of(results[0]);
  ASSERT_EQ(got.size(), expected.size());
  for (std::size_t k = 0; k < got.size(); ++k) ASSERT_NEAR(got[k], expected[k], 1e-5);
}

TEST(OptimizerOnServers, StepsOfEachWorkerCountWithAsyncAndWhatCannotBeServedIsNamed) {
  using Named = torch::OrderedDict<std::string, at::Tensor>;
  const std::vector<std::string> results = on_servers([](ps::Client& client) {
    const auto refused = [&](const at::Tensor& tensor, const std::string& said) {
      try {
        const ps::DistributedOptimizer none(client, tensor.defined() ? Named{{"w", tensor}} : Named{});
      } catch (const Error& error) {
        require(error.code() == ErrorCode::InvalidArgument && std::string(error.what()).find(said) != std::string::npos,
                error.what());
        return;
      }
      require(false, "not refused: " + said);
    };
    refused(at::Tensor(), "DistributedOptimizer: there are no parameters");
    for (const at::Tensor& tensor : {at::zeros({3}, at::kDouble), at::zeros({3, 4}).t(), at::zeros({3}).to_sparse()}) {
      refused(tensor, "DistributedOptimizer: w is not float32, contiguous and on the CPU");
    }
    at::Tensor parameter = at::ones({3}).requires_grad_();
    ps::DistributedOptimizer optimizer(
        client, Named{{"w", parameter}, {"tied", parameter}},
        {.optimizer = ps::optim::Sgd{.lr = 0.25}, .consistency = ps::Consistency::async()});
    client.barrier();
    parameter.sum().backward();
    optimizer.step();
    client.barrier();
    optimizer.pull();
    require(at::equal(parameter, at::full({3}, 0.5)), "both workers' steps count");
    (void)client.variable("tied", {.elements = 1});  // not there: it is w
    optimizer.zero_grad();
    require(!parameter.grad().defined(), "zero_grad");
    parameter.mutable_grad() = at::ones({3}).to_sparse();
    try {
      optimizer.step();
      require(false, "a sparse gradient is not refused");
    } catch (const Error& error) {
      require(std::string(error.what()).find("the gradient of w is sparse") != std::string::npos, error.what());
    }
    return std::string("good");
  });
  EXPECT_EQ(results, (std::vector<std::string>{"good", "good"}));
}

}  // namespace
}  // namespace cohort
