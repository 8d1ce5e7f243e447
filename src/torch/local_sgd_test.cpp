// LocalSGD and DiLoCo on ranks that are threads, on one host and on several (fake), compared with a plain loop over the
// ranks.
#include <cohort/error.h>
#include <cohort/torch/checkpoint.h>
#include <cohort/torch/elastic.h>
#include <cohort/torch/local_sgd.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "comm/api/communicator_impl.h"
#include "comm/testing/worlds.h"
#include "torch/local_sgd.h"
#include "torch/test_models.h"
#include "train/formats/testing.h"

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace cohort {
namespace {

using namespace cohort::testing;  // NOLINT: the tests' own vocabulary
using optim::DiLoCo;
using optim::DiLoCoOptions;
using optim::LocalSGD;

void run(const std::vector<int>& hosts, const std::function<void(Communicator)>& body) {
  const bool several = hosts.back() != hosts.front();
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(several), several ? hosts : std::vector<int>{},
                                                static_cast<int>(hosts.size()), {}),
                          body);
}

const std::vector<int> kOneHost = {0, 0, 0}, kTwoHosts = {0, 0, 1, 1};

/// Results by rank, to be compared when all ranks have ended.
class Results {
 public:
  void add(int rank, const std::vector<at::Tensor>& tensors) {
    const std::lock_guard lock(mutex_);
    all_[rank] = copies(tensors);
  }
  void expect_alike() const {
    for (const auto& [rank, tensors] : all_) expect_equal(tensors, all_.begin()->second);
  }
  const std::vector<at::Tensor>& of(int rank) const { return all_.at(rank); }

 private:
  std::mutex mutex_;
  std::map<int, std::vector<at::Tensor>> all_;
};

template <class Net>
void backward(Net& net, int step, int rank, int size, at::ScalarType type = at::kDouble, std::int64_t each = 4) {
  const Batch batch = batch_of(step, each * size, type);
  net->zero_grad();
  loss_of(net->forward(batch.x.slice(0, rank * each, (rank + 1) * each)),
          batch.y.slice(0, rank * each, (rank + 1) * each))
      .backward();
}

TEST(LocalSgd, EachStepSynchronisedIsDataParallel) {
  for (const std::vector<int>& hosts : {std::vector{0}, kOneHost, kTwoHosts}) {
    Results parallel, local, outer;
    run(hosts, [&](Communicator comm) {
      auto net = with_values(Mlp(), 0.1);
      nn::DistributedDataParallel model(net, comm);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      for (int step = 0; step < 5; ++step) {
        model.zero_grad();
        const Batch batch = batch_of(step, 4 * comm.size());
        const auto part = [&](const at::Tensor& of) { return of.slice(0, comm.rank() * 4, comm.rank() * 4 + 4); };
        loss_of(model(part(batch.x)), part(batch.y)).backward();
        optimizer.step();
      }
      parallel.add(comm.rank(), net->parameters());
    });
    const auto train = [](Communicator& comm, auto make, Results& results) {
      auto net = with_values(Mlp(), 0.1 + comm.rank());  // rank 0's values count
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      auto steps = make(*net, optimizer);
      for (int step = 0; step < 5; ++step) {
        backward(net, step, comm.rank(), comm.size());
        optimizer.step();
        steps->step();
      }
      results.add(comm.rank(), net->parameters());
    };
    run(hosts, [&](Communicator comm) {
      train(
          comm,
          [&](auto& net, auto& optimizer) {
            return std::make_unique<LocalSGD>(net, optimizer, comm,
                                              optim::LocalSGDOptions{.sync_every = 100, .warm_up_steps = 5});
          },
          local);
      train(
          comm,
          [&](auto& net, auto& optimizer) {
            return std::make_unique<DiLoCo>(
                net, optimizer, comm,
                DiLoCoOptions{.sync_every = 1, .outer_learning_rate = 1, .outer_momentum = 0, .nesterov = false});
          },
          outer);
    });
    local.expect_alike();
    expect_equal(local.of(0), outer.of(0));
    expect_close(local.of(0), parallel.of(0), 1e-13);
  }
}

/// The algorithm as in the papers: one loop over the ranks, and libtorch's SGD on the outer parameters.
std::vector<at::Tensor> reference(int size, int steps, const DiLoCoOptions& how,
                                  const std::vector<std::vector<std::size_t>>& fragments) {
  const at::NoGradGuard no_grad;
  std::vector<Mlp> nets;
  std::vector<std::unique_ptr<torch::optim::SGD>> inner;
  for (int rank = 0; rank < size; ++rank) {
    nets.push_back(with_values(Mlp(), 0.1));
    inner.push_back(
        std::make_unique<torch::optim::SGD>(nets.back()->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)));
  }
  std::vector<at::Tensor> outer = copies(nets[0]->parameters());
  torch::optim::SGD optimizer(
      outer, torch::optim::SGDOptions(how.outer_learning_rate).momentum(how.outer_momentum).nesterov(how.nesterov));
  const auto apart = how.sync_every / static_cast<std::int64_t>(fragments.size());
  for (int step = 1; step <= steps; ++step) {
    for (int rank = 0; rank < size; ++rank) {
      const at::AutoGradMode grad(true);
      backward(nets[static_cast<std::size_t>(rank)], step - 1, rank, size);
      inner[static_cast<std::size_t>(rank)]->step();
    }
    const auto& fragment = fragments[static_cast<std::size_t>((step - 1) / apart) % fragments.size()];
    if (step % apart == (apart - how.fragment_sync_delay) % apart) {
      for (const std::size_t i : fragment) {
        outer[i].mutable_grad() = at::zeros_like(outer[i]);
        for (const Mlp& net : nets) outer[i].mutable_grad().add_(outer[i] - net->parameters()[i], 1.0 / size);
      }
    }
    if (step % apart != 0) continue;
    optimizer.step();
    optimizer.zero_grad();
    for (const at::Tensor& one : outer) one.mutable_grad() = at::Tensor();
    for (const std::size_t i : fragment) {
      for (const Mlp& net : nets)
        net->parameters()[i].copy_(outer[i] + how.fragment_update_alpha * (net->parameters()[i] - outer[i]));
    }
  }
  return outer;
}

TEST(DiLoCo, IsThatOfThePapers) {
  // Layers of 5 * 17 + 17, 17 * 17 + 17, 17 * 3 + 3 elements.
  const std::vector<std::vector<std::size_t>> whole = {{0, 1, 2, 3, 4, 5}}, two = {{0, 1, 2}, {3, 4, 5}};
  const std::vector<std::pair<DiLoCoOptions, std::vector<std::vector<std::size_t>>>> cases = {
      {{.sync_every = 3}, whole},
      {{.sync_every = 4, .outer_learning_rate = 0.5, .outer_momentum = 0.8, .nesterov = false}, whole},
      {{.sync_every = 3, .fragment_update_alpha = 0.5}, whole},
      {{.sync_every = 6, .fragments = 2}, two},
      {{.sync_every = 4, .fragment_sync_delay = 2, .fragment_update_alpha = 0.5}, whole},
      {{.sync_every = 6, .fragments = 2, .fragment_sync_delay = 1, .fragment_update_alpha = 0.25}, two}};
  for (const auto& [options, fragments] : cases) {
    for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
      Results results, after;
      run(hosts, [&, &how = options, &parts = fragments](Communicator comm) {
        auto net = with_values(Mlp(), 0.1);
        torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        DiLoCo diloco(*net, optimizer, comm, how);
        EXPECT_EQ(diloco.steps_left(), how.sync_every / how.fragments);
        for (int step = 0; step < 12; ++step) {
          backward(net, step, comm.rank(), comm.size());
          optimizer.step();
          diloco.step();
        }
        std::vector<at::Tensor> outer;
        for (const auto& fragment : diloco.core()->fragments) {
          std::int64_t begin = 0;
          for (const at::Tensor& parameter : fragment.parameters) {
            outer.push_back(fragment.global.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
            begin += parameter.numel();
          }
        }
        EXPECT_EQ(diloco.core()->fragments.size(), parts.size());
        results.add(comm.rank(), outer);
        diloco.synchronize();
        after.add(comm.rank(), net->parameters());
      });
      results.expect_alike();
      after.expect_alike();
      expect_close(results.of(0), reference(static_cast<int>(hosts.size()), 12, options, fragments), 1e-12);
    }
  }
}

struct OddImpl : torch::nn::Module {
  OddImpl() {
    first = register_module("first", torch::nn::Linear(5, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    last = register_module("last", torch::nn::Linear(8, 3));
    half = register_parameter("half", at::ones({3}, at::kBFloat16));
    count = register_parameter("count", at::zeros({2}, at::kLong), false);
    frozen = register_parameter("frozen", at::ones({2}), false);
  }
  at::Tensor forward(const at::Tensor& x) { return last(norm(first(x))) * half.to(at::kFloat); }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor half, count, frozen;
};
TORCH_MODULE(Odd);

TEST(DiLoCo, RanksAreAlikeAfterEachSynchronisation) {
  for (const bool rounded : {false, true}) {
    for (const std::vector<int>& hosts : {kOneHost, kTwoHosts}) {
      std::vector<std::unique_ptr<Results>> results;
      for (int i = 0; i < 5; ++i) results.push_back(std::make_unique<Results>());
      Results unsampled;
      run(hosts, [&](Communicator comm) {
        Odd net;
        {
          const at::NoGradGuard no_grad;
          net->frozen.fill_(comm.rank());
        }
        torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
        DiLoCo diloco(*net, optimizer, comm,
                      {.sync_every = 4, .fragments = 2, .wire_format = rounded ? WireFormat::Int4 : WireFormat::None});
        for (int step = 0; step < 15; ++step) {
          backward(net, step, comm.rank(), comm.size(), at::kFloat);
          torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
          optimizer.step();
          diloco.step(comm.rank() == 1 ? 0 : 3);
          if (step % 4 == 3) {
            const auto& outer = diloco.core()->outer();
            std::vector<at::Tensor> all;
            for (const auto& [name, tensor] : outer) all.push_back(tensor);
            results[static_cast<std::size_t>(step / 4)]->add(comm.rank(), all);
          }
        }
        diloco.synchronize();
        const std::vector<at::Tensor> before = copies(net->parameters());
        diloco.synchronize();  // no step has come, so no momentum is applied
        expect_equal(copies(net->parameters()), before);
        std::vector<at::Tensor> all = net->parameters();
        all.push_back(net->norm->running_mean);
        all.push_back(net->norm->running_var);
        results.back()->add(comm.rank(), all);
        Odd another;
        torch::optim::AdamW fresh(another->parameters(), torch::optim::AdamWOptions(1e-2));
        DiLoCo joined(*another, fresh, Communicator(), {.sync_every = 4, .fragments = 2});
        joined.load_state(diloco.state(), false);
        expect_equal(copies(another->parameters()), copies(net->parameters()));
        expect_equal({another->norm->running_var}, {net->norm->running_var});
        // If no rank had samples, outer parameters and momentum stay, and buffers do not become zero.
        const auto outer = diloco.core()->outer();
        std::vector<at::Tensor> was, is;
        for (const auto& [name, tensor] : outer) was.push_back(tensor.clone());
        backward(net, 15, comm.rank(), comm.size(), at::kFloat);
        optimizer.step();
        diloco.step(0);
        diloco.synchronize();
        for (const auto& [name, tensor] : outer) is.push_back(tensor);
        expect_equal(is, was);
        expect_equal(copies(net->parameters()), before);
        unsampled.add(comm.rank(), {net->norm->running_mean, net->norm->running_var});
        EXPECT_GT(net->norm->running_var.min().item<float>(), 0.01);
        EXPECT_EQ(net->frozen[0].item<float>(), 0) << "begins with rank 0's";
        EXPECT_FALSE(at::equal(net->half, at::ones({3}, at::kBFloat16)));
      });
      for (int i : {0, 1, 2, 4}) results[static_cast<std::size_t>(i)]->expect_alike();
      unsampled.expect_alike();
    }
  }
}

TEST(DiLoCo, AveragesBuffersThatAreAddedWhileASynchronisationIsUnderWay) {
  run_on_threads(2, [](Communicator comm) {
    torch::nn::Linear net(2, 2);
    net->register_buffer("early", at::full({3}, 5.0));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    DiLoCo diloco(*net, optimizer, comm, {.sync_every = 3, .fragment_sync_delay = 2});
    net->forward(at::ones({1, 2})).sum().backward();
    optimizer.step();
    diloco.step();
    const at::Tensor late = net->register_buffer("late", at::full({4}, static_cast<double>(comm.rank())));
    diloco.synchronize();
    EXPECT_TRUE(at::equal(late, at::full({4}, 0.5))) << late;
  });
}

TEST(DiLoCo, GoesOnFromACheckpointToTheBit) {
  // In the middle of a round, and while a synchronisation is under way.
  for (const int saved_after : {5, 7}) {
    const formats::TestFolder folder;
    Results whole, resumed;
    const auto train = [&](Communicator comm, bool resume, Results& results) {
      auto net = with_values(Mlp(), resume ? 7 : 0.1);
      torch::optim::AdamW optimizer({{net->first->parameters()}, {net->second->parameters()}},
                                    torch::optim::AdamWOptions(1e-2));
      optimizer.add_param_group(torch::optim::OptimizerParamGroup(net->last->parameters(),
                                                                  std::make_unique<torch::optim::AdamWOptions>(2e-2)));
      DiLoCo diloco(*net, optimizer, comm, {.sync_every = 4, .fragment_sync_delay = 2, .fragment_update_alpha = 0.5});
      CheckpointFolder checkpoints(comm, {.folder = folder.path()});
      std::int64_t step = 0;
      if (resume) {
        step = checkpoints.load_latest(*net, &optimizer)->progress.step;
        diloco.load_state(checkpoints.rank_state());
        EXPECT_EQ(step, saved_after);
      }
      while (step < 14) {
        backward(net, static_cast<int>(step), comm.rank(), comm.size());
        optimizer.step();
        diloco.step();
        if (++step == saved_after && !resume) checkpoints.save(*net, &optimizer, {.step = step}, diloco.state());
      }
      results.add(comm.rank(), net->parameters());
      if (!resume) return;
      // A new rank gets the state that is the same on all ranks.
      const auto of_rank_0 = checkpoints.parts({0}).at(0);
      auto another = with_values(Mlp(), 9);
      torch::optim::AdamW fresh(another->parameters(), torch::optim::AdamWOptions(1e-2));
      DiLoCo joined(*another, fresh, Communicator(), {.sync_every = 4, .fragment_sync_delay = 2});
      joined.load_state(of_rank_0, false);
      expect_equal({joined.core()->fragments[0].global}, {of_rank_0.at("outer/parameters/0")});
      EXPECT_TRUE(at::equal(another->first->weight.flatten(), of_rank_0.at("outer/parameters/0").slice(0, 0, 85)));
      EXPECT_EQ(joined.steps_left(), 4 - saved_after % 4);
    };
    run(kTwoHosts, [&](Communicator comm) { train(comm, false, whole); });
    run(kTwoHosts, [&](Communicator comm) { train(comm, true, resumed); });
    for (int rank = 0; rank < 4; ++rank) expect_equal(resumed.of(rank), whole.of(rank));
  }
}

void expect_refused(ErrorCode code, const std::function<void()>& body, const char* part) {
  const std::string said = comm::testing::what_of(body, code);
  EXPECT_NE(said.find(part), std::string::npos) << said;
}

TEST(LocalSgd, WhatWouldNotBeAveragedIsRefused) {
  Results results;
  run(kOneHost, [&](Communicator comm) {
    auto net = with_values(Mlp(), 0.1);
    net->first->weight.requires_grad_(false);
    auto optimizer = std::make_unique<torch::optim::SGD>(net->parameters(), 0.1);
    auto local = std::make_unique<LocalSGD>(*net, *optimizer, comm, optim::LocalSGDOptions{.sync_every = 2});
    const auto train = [&](int from, int to) {
      for (int step = from; step < to; ++step) {
        backward(net, step, comm.rank(), comm.size());
        optimizer->step();
        local->step();
      }
    };
    train(0, 3);
    local->synchronize();
    net->first->weight.requires_grad_(true);
    for (const std::function<void()>& call :
         {std::function<void()>([&] { local->step(); }), std::function<void()>([&] { local->synchronize(); })})
      expect_refused(ErrorCode::InvalidArgument, call, "parameter 'first.weight' is trained and in no fragment");
    local = std::make_unique<LocalSGD>(*net, *optimizer, comm, optim::LocalSGDOptions{.sync_every = 2});
    train(3, 6);
    local->synchronize();
    results.add(comm.rank(), net->parameters());
    optimizer->add_param_group(torch::optim::OptimizerParamGroup({at::ones({3}).requires_grad_()}));
    expect_refused(
        ErrorCode::InvalidArgument, [&] { local->step(); }, "of 3 elements in group 1 of the optimizer");
    expect_refused(
        ErrorCode::InvalidArgument, [&] { DiLoCo none(*net, *optimizer, comm); }, "of 3 elements in group 1");
  });
  results.expect_alike();
}

TEST(DiLoCo, WeightsThatAreLoadedAfterwards) {
  for (const bool momentum : {false, true}) {
    run(kOneHost, [&](Communicator comm) {
      auto net = with_values(Mlp(), 0.1);
      torch::optim::SGD optimizer(net->parameters(), 0.0);
      DiLoCo diloco(*net, optimizer, comm,
                    {.sync_every = 2, .outer_momentum = momentum ? 0.9 : 0, .nesterov = momentum});
      const auto train = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
          backward(net, step, comm.rank(), comm.size());
          optimizer.step();
          diloco.step();
        }
      };
      train(3);
      diloco.synchronize();
      {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& parameter : net->parameters()) parameter.fill_(comm.rank() + 0.25);
      }
      expect_refused(
          ErrorCode::InvalidArgument, [&] { diloco.synchronize(); }, "parameters_written()");
      diloco.parameters_written();
      EXPECT_EQ(diloco.steps_left(), 2);
      train(6);
      diloco.synchronize();
      for (const at::Tensor& parameter : net->parameters())
        EXPECT_TRUE(at::equal(parameter, at::full_like(parameter, 0.25)));
    });
  }
}

TEST(DiLoCo, NanOfARankStaysThere) {
  run(kTwoHosts, [&](Communicator comm) {
    auto net = with_values(Mlp(), 0.1);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    DiLoCo diloco(*net, optimizer, comm, {.sync_every = 1});
    diloco.step();
    const at::Tensor global = diloco.core()->fragments[0].global.clone();
    if (comm.rank() == 2) {
      const at::NoGradGuard no_grad;
      net->second->weight[0][0] = std::nan("");
    }
    expect_refused(
        ErrorCode::NonFinite, [&] { diloco.step(); }, "parameter 'second.weight' of rank 2 ");
    EXPECT_TRUE(at::equal(diloco.core()->fragments[0].global, global));
  });
}

TEST(DiLoCo, OfADamagedStateNothingIsTaken) {
  run(kOneHost, [](Communicator comm) {
    auto net = with_values(Mlp(), 0.1), other = with_values(Mlp(), 7);
    torch::optim::SGD optimizer(net->parameters(), 0.1), fresh(other->parameters(), 0.1);
    const DiLoCoOptions options{.sync_every = 4, .fragment_sync_delay = 2};
    DiLoCo diloco(*net, optimizer, comm, options), loaded(*other, fresh, comm, options);
    for (int step = 0; step < 3; ++step) {
      backward(net, step, comm.rank(), comm.size());
      optimizer.step();
      diloco.step();
    }
    const std::vector<at::Tensor> before = copies(other->parameters());
    for (const char* const name : {"outer/difference", "outer/rest"}) {
      auto damaged = diloco.state();
      ASSERT_EQ(damaged.erase(name), 1U);
      expect_refused(
          ErrorCode::InvalidArgument, [&] { loaded.load_state(damaged); }, name);
      expect_equal(copies(other->parameters()), before);
      EXPECT_EQ(loaded.core()->steps, 0);
      EXPECT_FALSE(loaded.core()->under_way);
    }
    diloco.synchronize();
  });
}

TEST(DiLoCo, RefusesWhatHasNoMeaning) {
  Mlp net;
  torch::optim::SGD optimizer(net->parameters(), 0.1);
  const auto make = [&](const DiLoCoOptions& options) {
    return [&net, &optimizer, options] { DiLoCo(*net, optimizer, options); };
  };
  expect_refused(ErrorCode::InvalidArgument, make({.sync_every = 0}), "sync_every");
  expect_refused(ErrorCode::InvalidArgument, make({.sync_every = 10, .fragments = 3}), "multiple");
  expect_refused(ErrorCode::InvalidArgument, make({.sync_every = 70, .fragments = 7}),
                 "more fragments than parameters");
  expect_refused(ErrorCode::InvalidArgument, make({.sync_every = 4, .fragments = 2, .fragment_sync_delay = 2}),
                 "delay");
  expect_refused(ErrorCode::InvalidArgument, make({.fragment_update_alpha = 1.5}), "alpha");
  expect_refused(ErrorCode::InvalidArgument, make({.outer_momentum = 1}), "outer_momentum");
  DiLoCo alone(*net, optimizer, {.sync_every = 1});
  expect_refused(
      ErrorCode::InvalidArgument, [&] { alone.step(); }, "no world yet");
  expect_refused(
      ErrorCode::InvalidArgument, [&] { alone.load_state({}); }, "outer/counts");
  for (const auto& [at, value] : {std::pair(0, -1.0), {2, -1.0}, {3, 1.0}, {3, -2.0}, {4, 0.5}, {5, std::nan("")}}) {
    auto damaged = alone.state();
    damaged.at("outer/counts")[at] = value;
    expect_refused(
        ErrorCode::InvalidArgument, [&] { alone.load_state(damaged); }, "it is damaged");
  }
  net->to(at::kComplexFloat);
  expect_refused(ErrorCode::InvalidArgument, make({}), "complex");
  run(kOneHost, [](Communicator comm) {
    Mlp own;
    torch::optim::SGD inner(own->parameters(), 0.1);
    DiLoCo diloco(*own, inner, comm, {.sync_every = 1, .outer_learning_rate = comm.rank() == 1 ? 0.5 : 0.7});
    expect_refused(
        ErrorCode::Mismatch, [&] { diloco.step(); }, "");
  });
}

TEST(DiLoCo, ANumberOfSamplesThatCannotBeIsAnErrorOnAllRanks) {
  for (const std::int64_t delay : {0, 1}) {
    run(kTwoHosts, [delay](Communicator comm) {
      auto net = with_values(Mlp(), 0);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      DiLoCo diloco(*net, optimizer, comm, {.sync_every = 4, .fragment_sync_delay = delay});
      const auto step = [&](int number, double samples) {
        backward(net, number, comm.rank(), comm.size());
        optimizer.step();
        diloco.step(samples);
      };
      for (int number = 0; number < 3; ++number) step(number, comm.rank() == 1 && number == 1 ? std::nan("") : 4);
      expect_refused(
          ErrorCode::Mismatch, [&] { step(3, 4); }, "rank 1 has number of samples = nan in step 2");
      for (int number = 4; number < 7; ++number) step(number, -1);
      expect_refused(
          ErrorCode::InvalidArgument, [&] { step(7, 4); }, "is 0 or more, not -1 in step 5");
      for (int number = 8; number < 12; ++number) step(number, 4);
      diloco.synchronize();
      for (const at::Tensor& parameter : net->parameters()) {
        at::Tensor most = parameter.detach().clone();
        all_reduce(comm, most, {.op = ReduceOp::Max}).wait();
        EXPECT_TRUE(at::equal(most, parameter));
      }
    });
  }
}

// ---------------------------------------------------------------------------------------------------- members

struct Member {
  explicit Member(int salt, const DiLoCoOptions& options = {.sync_every = 4})
      : net(made(salt)), optimizer(net->parameters(), 0.1), diloco(*net, optimizer, options) {
    state.add("diloco", diloco);
  }
  static Mlp made(int salt) {
    auto with_frozen = with_values(Mlp(), salt);
    with_frozen->last->bias.requires_grad_(false);
    return with_frozen;
  }
  void train(int step, int rank, int size) {
    backward(net, step, rank, size);
    optimizer.step();
    diloco.step();
    state.step();
  }
  Mlp net;
  torch::optim::SGD optimizer;
  DiLoCo diloco;
  elastic::State state;
};

Error lost() { return {ErrorCode::PeerLost, "rank 9 is gone"}; }

TEST(DiLoCo, MembersLoseNoStepWhenOthersComeAndGo) {
  std::vector<std::unique_ptr<Member>> members;
  for (int i = 0; i < 4; ++i) members.push_back(std::make_unique<Member>(i));
  const auto member = [&](int i) -> Member& { return *members[static_cast<std::size_t>(i)]; };
  Results before;
  run(kOneHost, [&](Communicator comm) {
    Member& mine = member(comm.rank());
    elastic::World world(comm, 0);
    mine.state.enter(world);
    for (int step = 0; step < 6; ++step) mine.train(step, comm.rank(), 3);
    before.add(comm.rank(), mine.net->parameters());
  });
  EXPECT_EQ(member(0).state.steps(), 6);
  const at::Tensor outer = member(0).diloco.core()->fragments[0].global.clone();
  // Rank 1 is lost in the middle of a round, and member 3 joins.
  for (const int i : {0, 2}) EXPECT_TRUE(member(i).state.leave(lost()));
  Results inner;
  run(kOneHost, [&](Communicator comm) {
    Member& mine = member(comm.rank() == 0 ? 0 : comm.rank() + 1);
    elastic::World world(comm, 1);
    mine.state.enter(world);
    EXPECT_EQ(mine.state.steps(), 6);
    EXPECT_EQ(mine.diloco.steps_left(), 2);
    EXPECT_TRUE(at::equal(mine.diloco.core()->fragments[0].global, outer));
    inner.add(comm.rank(), mine.net->parameters());
    for (int step = 6; step < 8; ++step) mine.train(step, comm.rank(), 3);
  });
  expect_equal(inner.of(0), before.of(0));
  expect_equal(inner.of(1), before.of(2));
  EXPECT_TRUE(at::equal(inner.of(2)[0].flatten(), outer.slice(0, 0, 85))) << "who comes has what all had last";
  for (const int i : {2, 3}) expect_equal(copies(member(i).net->parameters()), copies(member(0).net->parameters()));
  EXPECT_TRUE(at::equal(member(3).net->last->bias, Member::made(0)->last->bias)) << "rank 0's, which nobody trains";
  // Weighted: four steps of each of the first two members, and two of the new one.
  EXPECT_EQ(member(3).diloco.core()->steps, 8);
}

TEST(DiLoCo, ASynchronisationThatOneAloneHasEndedIsAllOthers) {
  for (const double alpha : {0.0, 0.5}) {
    std::vector<std::unique_ptr<Member>> members;
    for (int i = 0; i < 3; ++i) {
      members.push_back(std::make_unique<Member>(
          i, DiLoCoOptions{.sync_every = 4, .fragment_sync_delay = 1, .fragment_update_alpha = alpha}));
    }
    Results right, taken;
    run(kOneHost, [&](Communicator comm) {
      Member& mine = *members[static_cast<std::size_t>(comm.rank())];
      elastic::World world(comm, 0);
      mine.state.enter(world);
      for (int step = 0; step < 3; ++step) mine.train(step, comm.rank(), 3);
      EXPECT_TRUE(mine.diloco.core()->under_way);
      // The step ends on all ranks; then the result reaches only rank 0.
      const auto core = mine.diloco.core();
      backward(mine.net, 3, comm.rank(), 3);
      mine.optimizer.step();
      mine.diloco.step();
      for (Work& work : core->works) work.wait();
      if (comm.rank() == 0) return mine.state.step();
      const std::vector<at::Tensor> own = copies(mine.net->parameters());
      core->since -= 4;
      mine.state.step();
      core->since += 4;
      expect_equal(copies(mine.net->parameters()), own);
    });
    for (const auto& one : members) EXPECT_TRUE(one->state.leave(lost()));
    EXPECT_EQ(members[0]->diloco.core()->turn, 1);
    EXPECT_EQ(members[1]->diloco.core()->turn, 0);
    std::vector<std::vector<at::Tensor>> own;
    for (const auto& one : members) own.push_back(copies(one->net->parameters()));
    run(kOneHost, [&](Communicator comm) {
      Member& mine = *members[static_cast<std::size_t>(comm.rank())];
      elastic::World world(comm, 1);
      mine.state.enter(world);
      EXPECT_EQ(mine.state.steps(), 4);
      EXPECT_EQ(mine.diloco.steps_left(), 4);
      EXPECT_EQ(mine.diloco.core()->fragments[0].samples, 1) << "of the step after it was sent";
      const at::Tensor global = members[0]->diloco.core()->fragments[0].global.slice(0, 0, 85);
      const at::Tensor mixed = global + alpha * (own[static_cast<std::size_t>(comm.rank())][0].flatten() - global);
      if (comm.rank() > 0) expect_close({mine.net->parameters()[0].flatten()}, {mixed}, 1e-14);
      for (int step = 4; step < 8; ++step) mine.train(step, comm.rank(), 3);
      mine.diloco.synchronize();
      right.add(comm.rank(), mine.net->parameters());
    });
    right.expect_alike();
  }
}

}  // namespace
}  // namespace cohort
