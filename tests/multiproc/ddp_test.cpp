// DistributedDataParallel on ranks that are processes: the result of one process, the same bits every time, gradients
// that are reduced where they lie, and a named error where a rank dies. And the same with parameters on servers. The
// test program itself uses torch only after it has forked.
#include <cohort/torch/nn.h>
#include <cohort/torch/ps.h>

#include <gtest/gtest.h>

#include "comm_processes.h"
#include "torch/test_models.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <iterator>
#include <numeric>
#include <optional>
#include <sstream>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr int kSteps = 4;

template <class Module>
std::string text_of(const Module& module) {
  std::string text;
  for (const at::Tensor& parameter : module.parameters()) {
    const at::Tensor flat = parameter.detach().to(at::kDouble).contiguous();
    for (std::int64_t i = 0; i < flat.numel(); ++i) {
      char digits[40];
      std::snprintf(digits, sizeof digits, "%.17g ", flat.data_ptr<double>()[i]);
      text += digits;
    }
  }
  return text;
}

std::vector<double> numbers_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<double>(in), {}};
}

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
