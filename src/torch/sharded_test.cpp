// Training whose state is divided over the ranks, which are threads, on one host and on several (fake), has the same
// bits as DistributedDataParallel without division.
#include <cohort/error.h>
#include <cohort/mesh.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/parallel.h>
#include <cohort/torch/sharded.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/schedulers/step_lr.h>
#include <torch/optim/sgd.h>

#include "comm/api/communicator_impl.h"
#include "comm/testing/worlds.h"
#include "torch/test_models.h"

#include <cmath>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using nn::Sharding;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr Sharding kAll[] = {Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters};

void run(const std::vector<int>& hosts, const std::function<void(Communicator)>& body) {
  const bool several = hosts.back() != hosts.front();
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(several), several ? hosts : std::vector<int>{},
                                                static_cast<int>(hosts.size()), {}),
                          body);
}

// For each layout, the host of each rank.
using Layouts = std::vector<std::vector<int>>;
const Layouts kTwo = {{0, 0, 0}, {0, 0, 1, 1}};
const Layouts kLayouts = {{0}, {0, 0, 0, 0}, {0, 1}, {0, 1, 0, 1}, {0, 0, 0, 1, 1}};

/// Large enough that some gradients are reduced from where autograd made them, and some parameters are divided.
torch::nn::Sequential model_of(at::ScalarType type = at::kFloat) {
  torch::nn::Sequential net(torch::nn::Linear(5, 541), torch::nn::Tanh(), torch::nn::Linear(541, 501),
                            torch::nn::Tanh(), torch::nn::Linear(501, 3));
  net->to(type);
  return with_values(net, 0.1);
}

struct Told {
  int steps = 3;
  at::ScalarType type = at::kFloat;
  int accumulated = 1;
  double max_norm = 0;
  bool schedule = false;
  std::int64_t samples = 4;  // samples per rank and backward
};

void expect_refused(const std::function<void()>& body, const char* part) {
  const std::string said = comm::testing::what_of(body, ErrorCode::InvalidArgument);
  EXPECT_NE(said.find(part), std::string::npos) << said;
}

/// Trains on this rank's part of each batch, with any optimizer.
template <class Model, class Optimizer>
void train(Model& model, Optimizer& optimizer, const Communicator& comm, const Told& told) {
  torch::optim::StepLR schedule(optimizer, 2, 0.5);
  for (int step = 0; step < told.steps; ++step) {
    const Batch batch = batch_of(step, told.samples * told.accumulated * comm.size(), told.type);
    for (int part = 0; part < told.accumulated; ++part) {
      std::optional<nn::NoSyncGuard> guard;
      if (part + 1 < told.accumulated) guard.emplace(model.no_sync());
      const std::int64_t begin = (comm.rank() * told.accumulated + part) * told.samples;
      const auto loss =
          loss_of(model(batch.x.slice(0, begin, begin + told.samples)), batch.y.slice(0, begin, begin + told.samples));
      loss.backward();
    }
    optimizer.step();
    model.zero_grad();
    if (told.schedule) schedule.step();
  }
}

template <class Base, class Options>
void expect_bits_of_ddp(const Options& defaults, const Told& told, const Layouts& layouts = kTwo,
                        DistributedDataParallelOptions options = {}) {
  for (const std::vector<int>& hosts : layouts) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    std::vector<at::Tensor> expected;
    run(hosts, [&](Communicator comm) {
      auto net = model_of(told.type);
      DistributedDataParallel model(net, comm, options);
      Base optimizer(model.parameters(), defaults);
      train(model, optimizer, comm, told);
      if (comm.rank() == 0) expected = copies(net->parameters());
    });
    for (const Sharding sharding : kAll) {
      SCOPED_TRACE(static_cast<int>(sharding));
      std::mutex mutex;
      run(hosts, [&](Communicator comm) {
        auto net = model_of(told.type);
        DistributedDataParallelOptions own = options;
        own.sharding = sharding;
        DistributedDataParallel model(net, comm, own);
        optim::Sharded<Base> optimizer(model, defaults);
        train(model, optimizer, comm, told);
        const std::lock_guard lock(mutex);
        expect_equal(copies(net->parameters()), expected);
      });
    }
  }
}

TEST(Sharded, AdamHasTheBitsOfDistributedDataParallel) {
  expect_bits_of_ddp<torch::optim::Adam>(torch::optim::AdamOptions(1e-2).weight_decay(0.01).amsgrad(true), {.steps = 8},
                                         kLayouts);
}

TEST(Sharded, OtherOptimizersHaveThem) {
  expect_bits_of_ddp<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2), {.schedule = true});
  expect_bits_of_ddp<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9).nesterov(true), {});
  expect_bits_of_ddp<torch::optim::RMSprop>(torch::optim::RMSpropOptions(1e-3).momentum(0.9).centered(true), {});
  expect_bits_of_ddp<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2), {});
}

TEST(Sharded, SmallBucketsAccumulationAndDoubles) {
  expect_bits_of_ddp<torch::optim::Adam>(torch::optim::AdamOptions(1e-2), {.accumulated = 3}, kTwo, small_buckets());
  expect_bits_of_ddp<torch::optim::Adam>(torch::optim::AdamOptions(1e-2), {.type = at::kDouble});
}

// Error feedback also covers a gradient that is in no bucket.
TEST(Sharded, WireFormatsAndTheirErrorFeedback) {
  for (const WireFormat format : {WireFormat::Int4, WireFormat::Int8}) {
    DistributedDataParallelOptions options;
    options.wire_format = format;
    options.error_feedback = true;
    expect_bits_of_ddp<torch::optim::SGD>(torch::optim::SGDOptions(1e-2), {.steps = 5}, {{0, 1}}, options);
  }
}

TEST(Sharded, WeightsBySamplesAndRanksWithoutAny) {
  for (const Sharding sharding : kAll) {
    for (const std::vector<int>& hosts : kTwo) {
      const auto train_uneven = [&](Communicator& comm, auto& model, auto& optimizer) {
        for (int step = 0; step < 4; ++step) {
          const std::int64_t samples = (comm.rank() + step) % 3;  // also 0
          const Batch batch = batch_of(step * 10 + comm.rank(), samples, at::kFloat);
          loss_of(model(batch.x), batch.y).backward();
          optimizer.step();
          model.zero_grad();
        }
      };
      std::vector<at::Tensor> expected;
      run(hosts, [&](Communicator comm) {
        auto net = model_of();
        DistributedDataParallel model(net, comm, by_rows());
        torch::optim::Adam optimizer(model.parameters(), torch::optim::AdamOptions(1e-2));
        train_uneven(comm, model, optimizer);
        if (comm.rank() == 0) expected = copies(net->parameters());
      });
      std::mutex mutex;
      run(hosts, [&](Communicator comm) {
        auto net = model_of();
        auto options = by_rows();
        options.sharding = sharding;
        DistributedDataParallel model(net, comm, options);
        optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(1e-2));
        train_uneven(comm, model, optimizer);
        const std::lock_guard lock(mutex);
        expect_equal(copies(net->parameters()), expected);
      });
    }
  }
}

TEST(Sharded, ParametersOfAHostAreOne) {
  run({0, 0, 0, 0}, [](Communicator comm) {
    auto net = model_of();
    DistributedDataParallel model(net, comm, {.sharding = Sharding::Parameters});
    optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
    std::int64_t elements = 0;
    for (const optim::Piece& piece : optimizer.pieces()) elements += piece.tensor.numel();
    std::vector<std::int64_t> all(4);
    comm.all_gather(ConstBuffer(&elements, 1, DType::Int64), Buffer(all.data(), 4, DType::Int64)).wait();
    std::int64_t whole = 0;
    for (const at::Tensor& parameter : net->parameters()) whole += parameter.numel();
    EXPECT_EQ(std::accumulate(all.begin(), all.end(), std::int64_t{0}), whole);
    for (const std::int64_t one : all) EXPECT_NEAR(static_cast<double>(one), static_cast<double>(whole) / 4, 500);
    // All ranks notice rank 2's write, and refuse it.
    const at::NoGradGuard no_grad;
    comm.barrier().wait();
    if (comm.rank() == 2) net->parameters()[2].fill_(3);
    comm.barrier().wait();
    EXPECT_EQ(net->parameters()[2][0][0].item<float>(), 3);
  });
}

TEST(Sharded, AWriteToSharedParametersIsNamed) {
  try {
    run({0, 0}, [](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = Sharding::Parameters});
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : net->parameters()) parameter.fill_(0.5);  // the same on all ranks
      }
      model.parameters_written();
      (void)model(batch_of(0, 4, at::kFloat).x);
      if (comm.rank() == 1) {
        const at::NoGradGuard no_grad;
        net->parameters()[2].mul_(0.5);
      }
      (void)model(batch_of(0, 4, at::kFloat).x);
    });
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    EXPECT_NE(std::string(error.what()).find("rank 1 has written to parameter '2.weight'"), std::string::npos)
        << error.what();
  }
}

TEST(Sharded, ClipsByTheGlobalNorm) {
  for (const Sharding sharding : kAll) {
    for (const std::vector<int>& hosts : kLayouts) {
      std::vector<at::Tensor> expected;
      double norm = 0;
      const auto backward = [](Communicator& comm, auto& model) {
        const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
        (loss_of(model(batch.x), batch.y) * 100).backward();
      };
      run(hosts, [&](Communicator comm) {
        auto net = model_of();
        DistributedDataParallel model(net, comm);
        torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1));
        backward(comm, model);
        const double own = torch::nn::utils::clip_grad_norm_(model.parameters(), 0.5);
        optimizer.step();
        if (comm.rank() == 0) {
          norm = own;
          expected = copies(net->parameters());
        }
      });
      std::mutex mutex;
      run(hosts, [&](Communicator comm) {
        auto net = model_of();
        DistributedDataParallel model(net, comm, {.sharding = sharding});
        optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
        backward(comm, model);
        const double own = optimizer.clip_grad_norm(0.5);
        optimizer.step();
        const std::lock_guard lock(mutex);
        EXPECT_NEAR(own, norm, norm * 1e-5);
        expect_close(copies(net->parameters()), expected, 1e-5);
      });
    }
  }
}

TEST(Sharded, ABackwardMoreIsAddedAndUnusedParametersStay) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1));
      const std::vector<at::Tensor> before = copies(net->parameters());
      const Batch batch = batch_of(1, 4, at::kFloat);
      const auto backward = [&] { loss_of(model(batch.x), batch.y).backward(); };
      backward();
      optimizer.step();
      const std::vector<at::Tensor> once = copies(net->parameters());
      comm.barrier().wait();  // all ranks have loaded them
      {
        const at::NoGradGuard no_grad;
        if (comm.rank() == 0 || sharding != Sharding::Parameters) {
          for (std::size_t i = 0; i < before.size(); ++i) net->parameters()[i].copy_(before[i]);
        }
      }
      model.parameters_written();
      optimizer.zero_grad();
      backward();
      backward();
      optimizer.step();
      const std::vector<at::Tensor> twice = copies(net->parameters());
      for (std::size_t i = 0; i < before.size(); ++i) {
        EXPECT_TRUE(at::allclose(twice[i] - before[i], (once[i] - before[i]) * 2, 1e-4, 1e-6)) << i;
      }
      // Only the first layer's bias is used: no other parameter changes, whatever the momentum.
      optimizer.zero_grad();
      const at::Tensor loss = net->parameters()[1].sum() + model(batch.x).sum() * 0;
      (void)loss;
      net->parameters()[1].sum().backward();
      optimizer.step();
      const std::vector<at::Tensor> after = copies(net->parameters());
      for (std::size_t i = 0; i < before.size(); ++i) EXPECT_EQ(at::equal(after[i], twice[i]), i != 1) << i;
    });
  }
}

TEST(Sharded, HalvesAreSteppedInFloat32) {
  for (const Sharding sharding : kAll) {
    std::vector<at::Tensor> expected;
    std::mutex mutex;
    for (const std::vector<int>& hosts : Layouts{{0}, {0, 0, 0, 0}, {0, 0, 1, 1}}) {
      run(hosts, [&](Communicator comm) {
        auto net = model_of(at::kBFloat16);
        const at::Tensor first = net->parameters()[0].detach().clone();
        DistributedDataParallel model(net, comm, {.sharding = sharding});
        optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1e-4));
        // All ranks have the same batch, so that the average is one rank's gradient.
        for (int step = 0; step < 30; ++step) {
          const Batch batch = batch_of(1, 4, at::kBFloat16);
          ((model(batch.x) - batch.y).square().mean() * 8).backward();  // 1.13 has no mse_loss of bfloat16
          optimizer.step();
          model.zero_grad();
        }
        const std::lock_guard lock(mutex);
        // Steps far below the digits of bfloat16 add up, and are the same with any number of ranks.
        EXPECT_FALSE(at::equal(net->parameters()[0], first));
        if (expected.empty()) expected = copies(net->parameters());
        expect_equal(copies(net->parameters()), expected);
      });
    }
  }
}

TEST(Sharded, RefusesWhatItCannotDo) {
  run({0, 0}, [](Communicator comm) {
    auto net = model_of();
    {
      DistributedDataParallel plain(net, comm);
      expect_refused([&] { optim::Sharded<torch::optim::SGD> none(plain, torch::optim::SGDOptions(1)); }, "`sharding`");
    }
    DistributedDataParallel model(net, comm, {.sharding = Sharding::Gradients});
    expect_refused([&] { (void)model.join(); }, "step_without_samples");
    expect_refused(
        [&] {
          std::vector<torch::optim::OptimizerParamGroup> groups;
          groups.emplace_back(std::vector<at::Tensor>{at::ones({3})});
          optim::Sharded<torch::optim::SGD> none(model, groups, torch::optim::SGDOptions(1));
        },
        "does not train");
    optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1));
    expect_refused([&] { optimizer.clip_grad_norm(0); }, "above 0");
    auto turned = model_of();
    turned->parameters()[0].set_data(at::ones({5, 541}).t());
    expect_refused([&] { DistributedDataParallel none(turned, comm, {.sharding = Sharding::Optimizer}); },
                   "not contiguous");
  });
}

TEST(Sharded, AModelMayHaveSeveralOptimizers) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto whole = model_of(), net = model_of();
      DistributedDataParallel plain(whole, comm);
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      const auto part = [](torch::nn::Sequential& of, std::size_t from, std::size_t to) {
        const std::vector<at::Tensor> all = of->parameters();
        return std::vector<torch::optim::OptimizerParamGroup>{std::vector<at::Tensor>(
            all.begin() + static_cast<std::ptrdiff_t>(from), all.begin() + static_cast<std::ptrdiff_t>(to))};
      };
      torch::optim::SGD one(part(whole, 0, 3), torch::optim::SGDOptions(0.1));
      torch::optim::Adam two(part(whole, 3, 6), torch::optim::AdamOptions(0.01));
      optim::Sharded<torch::optim::SGD> first(model, part(net, 0, 3), torch::optim::SGDOptions(0.1));
      optim::Sharded<torch::optim::Adam> second(model, part(net, 3, 6), torch::optim::AdamOptions(0.01));
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(step + comm.rank() * 10, 4, at::kFloat);
        loss_of(plain(batch.x), batch.y).backward();
        one.step();
        two.step();
        plain.zero_grad();
        loss_of(model(batch.x), batch.y).backward();
        first.step();
        second.step();
        first.zero_grad();
        second.zero_grad();
      }
      expect_equal(copies(net->parameters()), copies(whole->parameters()));
    });
  }
}

TEST(Sharded, ParametersThatGetOtherMemoryAreRefusedOrTakenBack) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of(), other = with_values(model_of(), 3.0);
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        net->parameters()[i].set_data(other->parameters()[i].detach().clone());  // like torch::load
      }
      const Batch batch = batch_of(1, 4, at::kFloat);
      expect_refused([&] { (void)model(batch.x); }, "parameter '0.weight' was given other memory");
      expect_refused([&] { optimizer.step(); }, "parameter '0.weight' was given other memory");
      model.parameters_written();
      expect_equal(copies(net->parameters()), copies(other->parameters()));
      loss_of(model(batch.x), batch.y).backward();
      optimizer.step();
      for (std::size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_FALSE(at::equal(net->parameters()[i], other->parameters()[i])) << i;
      net->parameters()[0].set_data(at::ones({2, 2}));
      comm.barrier().wait();
      expect_refused([&] { model.parameters_written(); }, "another shape");
    });
  }
}

TEST(Sharded, WhatIsWrittenToAHalfIsSteppedFrom) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of(at::kBFloat16);
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1e-6));
      comm.barrier().wait();
      {
        const at::NoGradGuard no_grad;
        for (at::Tensor& parameter : net->parameters()) parameter.fill_(0.25);  // the same on all ranks
      }
      if (sharding == Sharding::Parameters) model.parameters_written();
      const Batch batch = batch_of(1, 4, at::kBFloat16);
      (model(batch.x) - batch.y).square().mean().backward();
      optimizer.step();
      for (const at::Tensor& parameter : net->parameters())
        EXPECT_TRUE(at::allclose(parameter.to(at::kFloat), at::full(parameter.sizes(), 0.25F), 1e-2, 1e-3));
    });
  }
}

TEST(Sharded, WithoutAnOptimizerOrInAnElasticJobItIsRefused) {
  for (const Sharding sharding : {Sharding::Gradients, Sharding::Parameters}) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      const Batch batch = batch_of(1, 4, at::kFloat);
      loss_of(model(batch.x), batch.y).backward();
      expect_refused([&] { (void)model(batch.x); }, "no optim::Sharded has been made over this model");
    });
  }
  ::setenv("COHORT_WORKER", "0", 1);
  expect_refused(
      [] {
        run({0, 0}, [](Communicator comm) {
          DistributedDataParallel none(model_of(), comm, {.sharding = Sharding::Optimizer});
        });
      },
      "in an elastic job");
  ::unsetenv("COHORT_WORKER");
}

/// A whole LayerNorm between parts of layers.
struct PartsImpl : torch::nn::Module {
  explicit PartsImpl(const Communicator& tp) {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({5})));
    up = register_module(
        "up", nn::ColumnParallelLinear(tp, nn::ColumnParallelLinearOptions{.in_features = 5, .out_features = 8}));
    down = register_module(
        "down", nn::RowParallelLinear(tp, nn::RowParallelLinearOptions{.in_features = 8, .out_features = 3}));
    const at::NoGradGuard no_grad;
    up->weight.copy_(pattern({8, 5}, 1, at::kFloat).narrow(0, tp.rank() * 8 / tp.size(), 8 / tp.size()));
    down->weight.copy_(pattern({3, 8}, 2, at::kFloat).narrow(1, tp.rank() * 8 / tp.size(), 8 / tp.size()));
    up->bias.zero_();
    down->bias.zero_();
  }
  at::Tensor forward(const at::Tensor& x) { return down(at::gelu(up(norm(x)))); }
  torch::nn::LayerNorm norm{nullptr};
  nn::ColumnParallelLinear up{nullptr};
  nn::RowParallelLinear down{nullptr};
};

TEST(Sharded, ClipsByTheNormOfAModelInParts) {
  const auto steps = [](Communicator& comm, Mesh& mesh, Sharding sharding, double& norm) {
    const auto net = std::make_shared<PartsImpl>(mesh.along("tp"));
    DistributedDataParallel model(net, mesh.along("dp"), {.sharding = sharding});
    const torch::optim::SGDOptions rate(0.5);
    std::optional<torch::optim::SGD> plain;
    std::optional<optim::Sharded<torch::optim::SGD>> sharded;
    if (sharding == Sharding::None) {
      plain.emplace(model.parameters(), rate);
    } else {
      sharded.emplace(model, rate);
    }
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(step, 8, at::kFloat);
      const std::int64_t rows = 8 / mesh.size("dp"), begin = mesh.coordinate("dp") * rows;
      loss_of(model(batch.x.narrow(0, begin, rows)), batch.y.narrow(0, begin, rows)).backward();
      const optim::ClipOptions options{.over = comm, .parts = mesh.along("tp")};
      norm =
          plain ? optim::clip_grad_norm(*net, 0.05, options, mesh.along("dp")) : sharded->clip_grad_norm(0.05, options);
      plain ? plain->step() : sharded->step();
      model.zero_grad();
    }
    return copies({net->norm->weight, net->norm->bias, net->down->bias});
  };
  double expected = 0;
  std::vector<at::Tensor> whole;
  run({0}, [&](Communicator comm) {
    Mesh mesh(comm, {{"dp", 1}, {"tp", 1}});
    whole = steps(comm, mesh, Sharding::None, expected);
  });
  for (const Sharding sharding : {Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters}) {
    run({0, 0, 0, 0}, [&](Communicator comm) {
      Mesh mesh(comm, {{"dp", 2}, {"tp", 2}});
      double norm = 0;
      const std::vector<at::Tensor> got = steps(comm, mesh, sharding, norm);
      EXPECT_NEAR(norm, expected, 1e-4 * expected);
      expect_close(got, whole, 1e-4);
      for (const at::Tensor& tensor : got) {  // tensors that are whole on all ranks are the same there
        at::Tensor first = tensor.clone();
        broadcast(comm, first).wait();
        EXPECT_TRUE(at::equal(tensor, first));
      }
    });
  }
}

TEST(Sharded, ANormThatIsNotFiniteClipsAsTorchDoes) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(1));
      const Batch batch = batch_of(1, 4, at::kFloat);
      (loss_of(model(batch.x), batch.y) * std::nan("")).backward();
      EXPECT_TRUE(std::isnan(optimizer.clip_grad_norm(1)));
      optimizer.step();
      EXPECT_TRUE(at::isnan(net->parameters()[0]).all().item<bool>());
    });
  }
}

TEST(Sharded, ARankWithoutSamplesBringsNothingOfAnySize) {
  for (const std::vector<int>& hosts : kTwo) {
    std::vector<at::Tensor> expected;
    std::mutex mutex;
    for (const Sharding sharding : {Sharding::None, Sharding::Optimizer, Sharding::Gradients, Sharding::Parameters}) {
      run(hosts, [&](Communicator comm) {
        // Large gradients, of which a later one is larger.
        torch::nn::Sequential net(torch::nn::Linear(5, 700), torch::nn::Tanh(), torch::nn::Linear(700, 600),
                                  torch::nn::Tanh(), torch::nn::Linear(600, 500), torch::nn::Tanh(),
                                  torch::nn::Linear(500, 3));
        with_values(net, 0.1);
        DistributedDataParallel model(net, comm, {.sharding = sharding});
        const torch::optim::SGDOptions rate(1e-3);
        std::unique_ptr<torch::optim::Optimizer> optimizer;
        if (sharding == Sharding::None) {
          optimizer = std::make_unique<torch::optim::SGD>(model.parameters(), rate);
        } else {
          optimizer = std::make_unique<optim::Sharded<torch::optim::SGD>>(model, rate);
        }
        for (int step = 0; step < 3; ++step) {
          if (comm.rank() == step) {
            EXPECT_TRUE(model.step_without_samples());
          } else {
            model.set_sample_count(4);
            const Batch batch = batch_of(step * 10 + comm.rank(), 4, at::kFloat);
            loss_of(model(batch.x), batch.y).backward();
          }
          optimizer->step();
          model.zero_grad();
        }
        const std::lock_guard lock(mutex);
        if (expected.empty()) expected = copies(net->parameters());
        expect_equal(copies(net->parameters()), expected);
      });
    }
  }
}

struct OddImpl : torch::nn::Module {
  OddImpl() {
    first = register_module("first", torch::nn::Linear(5, 7));
    again = register_module("again", first);  // its parameters are registered twice
    empty = register_parameter("empty", at::zeros({0, 3}));
    one = register_parameter("one", at::ones({}));
  }
  at::Tensor forward(const at::Tensor& x) { return again(x).narrow(1, 0, 3) * one + empty.sum(); }
  torch::nn::Linear first{nullptr}, again{nullptr};
  at::Tensor empty, one;
};

TEST(Sharded, ParametersThatAreRegisteredTwiceOrHaveNoElements) {
  for (const Sharding sharding : kAll) {
    for (const std::size_t bucket : {std::size_t{1}, std::size_t{1} << 20}) {
      run({0, 0, 0}, [&](Communicator comm) {
        std::vector<std::vector<at::Tensor>> results;
        for (const Sharding mode : {Sharding::None, sharding}) {
          const auto net = with_values(std::make_shared<OddImpl>(), 0.1);
          DistributedDataParallel model(net, comm,
                                        {.bucket_bytes = bucket, .first_bucket_bytes = bucket, .sharding = mode});
          const auto step = [&](torch::optim::Optimizer& optimizer) {
            for (int i = 0; i < 3; ++i) {
              const Batch batch = batch_of(i + comm.rank() * 10, 4, at::kFloat);
              loss_of(model(batch.x), batch.y).backward();
              optimizer.step();
              model.zero_grad();
            }
          };
          const torch::optim::SGDOptions rate(0.1);
          if (mode == Sharding::None) {
            torch::optim::SGD optimizer({net->first->weight, net->first->bias, net->empty, net->one}, rate);
            step(optimizer);
          } else {
            optim::Sharded<torch::optim::SGD> optimizer(model, rate);
            step(optimizer);
          }
          results.push_back(copies(net->parameters()));
        }
        expect_equal(results[0], results[1]);
      });
    }
  }
}

TEST(Sharded, GroupsKeepTheirOptions) {
  run({0, 0}, [](Communicator comm) {
    auto net = model_of();
    DistributedDataParallel model(net, comm, {.sharding = Sharding::Gradients});
    std::vector<torch::optim::OptimizerParamGroup> groups;
    const std::vector<at::Tensor> all = net->parameters();
    groups.emplace_back(std::vector<at::Tensor>{all[0], all[1]},
                        std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.5)));
    groups.emplace_back(std::vector<at::Tensor>{all[2]},
                        std::make_unique<torch::optim::SGDOptions>(torch::optim::SGDOptions(0.0)));
    optim::Sharded<torch::optim::SGD> optimizer(model, groups, torch::optim::SGDOptions(0.1));
    ASSERT_EQ(optimizer.param_groups().size(), 2U);
    EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.5);
    const std::vector<at::Tensor> before = copies(all);
    const Batch batch = batch_of(1, 4, at::kFloat);
    loss_of(model(batch.x), batch.y).backward();
    optimizer.step();
    EXPECT_FALSE(at::equal(all[0], before[0]));
    EXPECT_TRUE(at::equal(all[2], before[2]));  // a rate of 0
    EXPECT_TRUE(at::equal(all[3], before[3]));  // in no group
  });
}

TEST(Sharded, TakesGroupsLater) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto whole = model_of(), net = model_of();
      for (auto* const of : {&whole, &net}) (*of)->parameters()[3].requires_grad_(false);
      DistributedDataParallel plain(whole, comm);
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      const auto some = [](torch::nn::Sequential& of, std::size_t from, std::size_t to) {
        const std::vector<at::Tensor> all = of->parameters();
        return std::vector<at::Tensor>(all.begin() + static_cast<std::ptrdiff_t>(from),
                                       all.begin() + static_cast<std::ptrdiff_t>(to));
      };
      const auto later = [&](torch::nn::Sequential& of) {
        return torch::optim::OptimizerParamGroup(
            some(of, 0, 4), std::make_unique<torch::optim::AdamOptions>(torch::optim::AdamOptions(1e-3)));
      };
      torch::optim::Adam one(some(whole, 4, 6), torch::optim::AdamOptions(0.01));
      optim::Sharded<torch::optim::Adam> other(model, some(net, 4, 6), torch::optim::AdamOptions(0.01));
      for (int step = 0; step < 4; ++step) {
        if (step == 2) {
          one.add_param_group(later(whole));
          other.add_param_group(later(net));
        }
        const Batch batch = batch_of(step + comm.rank() * 10, 4, at::kFloat);
        loss_of(plain(batch.x), batch.y).backward();
        one.step();
        plain.zero_grad();
        loss_of(model(batch.x), batch.y).backward();
        other.step();
        model.zero_grad();
      }
      expect_equal(copies(net->parameters()), copies(whole->parameters()));
      for (std::size_t i = 1; i < other.pieces().size(); ++i)
        EXPECT_LE(other.pieces()[i - 1].parameter[0], other.pieces()[i].parameter[0]);  // the layer
      const std::size_t pieces = other.pieces().size();
      expect_refused([&] { other.add_param_group(later(net)); }, "that is in a group already");
      EXPECT_EQ(other.pieces().size(), pieces);
    });
  }
  run({0, 0}, [&](Communicator comm) {
    auto net = model_of();
    DistributedDataParallel model(net, comm, {.sharding = Sharding::Gradients});
    optim::Sharded<torch::optim::SGD> optimizer(model, std::vector<at::Tensor>{net->parameters()[0]},
                                                torch::optim::SGDOptions(0.1));
    static_cast<torch::optim::Optimizer&>(optimizer).add_param_group(
        torch::optim::OptimizerParamGroup({net->parameters()[1]}));
    expect_refused([&] { optimizer.step(); }, "other tensors than this rank's pieces");
  });
}

TEST(Sharded, OptionsThatDifferAreNamedOnAllRanks) {
  const auto expect_mismatch = [](const std::function<void()>& body, const char* part) {
    const std::string said = comm::testing::what_of(body, ErrorCode::Mismatch);
    EXPECT_NE(said.find(part), std::string::npos) << said;
  };
  for (const std::vector<int>& hosts : kTwo) {
    for (const Sharding sharding : kAll) {
      run(hosts, [&](Communicator comm) {
        const bool odd = comm.rank() == 1;
        auto net = model_of();
        DistributedDataParallel model(net, comm, {.sharding = sharding});
        optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(0.01));
        auto& options = static_cast<torch::optim::AdamOptions&>(optimizer.param_groups()[0].options());
        const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
        const auto backward = [&] { loss_of(model(batch.x), batch.y).backward(); };
        backward();
        optimizer.step();
        backward();
        optimizer.clip_grad_norm(1);
        optimizer.step();
        const std::vector<at::Tensor> before = copies(net->parameters());
        comm.barrier().wait();
        options.weight_decay(odd ? 0.5 : 0.25);
        backward();
        const char* const decay =
            "rank 0 has weight_decay = 0.25 of parameter group 0, rank 1 has weight_decay = 0.5 of parameter group 0";
        expect_mismatch([&] { optimizer.step(); }, decay);
        expect_mismatch([&] { optimizer.clip_grad_norm(1); }, decay);
        options.weight_decay(0.25);
        expect_mismatch([&] { optimizer.clip_grad_norm(odd ? 2 : 1); },
                        "rank 0 has max_norm = 1 of clip_grad_norm, rank 1 has max_norm = 2 of clip_grad_norm");
        expect_mismatch([&] { optim::clip_grad_norm(*net, odd ? 2 : 1, {.over = comm}); }, "max_norm = 2");
        expect_equal(copies(net->parameters()), before);
        comm.barrier().wait();
        optimizer.step();
        EXPECT_FALSE(at::equal(net->parameters()[0], before[0]));
      });
    }
  }
}

TEST(Sharded, AGradientThatOneRankDropsIsNamedOnAllRanks) {
  for (const std::vector<int>& hosts : kTwo) {
    run(hosts, [](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = Sharding::Optimizer});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
      const Batch batch = batch_of(1, 4, at::kFloat);
      const std::vector<at::Tensor> before = copies(net->parameters());
      for (const bool clips : {false, true}) {
        loss_of(model(batch.x), batch.y).backward();
        if (comm.rank() == 1) net->parameters()[0].mutable_grad().reset();
        const std::string said = comm::testing::what_of(
            [&] {
              if (clips) optimizer.clip_grad_norm(1);
              optimizer.step();
            },
            ErrorCode::Mismatch);
        EXPECT_NE(said.find("'0.weight' without a gradient"), std::string::npos) << said;
        optimizer.zero_grad();
      }
      expect_equal(copies(net->parameters()), before);
      loss_of(model(batch.x), batch.y).backward();
      net->parameters()[0].mutable_grad().reset();  // on all ranks
      optimizer.step();
      EXPECT_TRUE(at::equal(net->parameters()[0], before[0]));
    });
  }
}

TEST(Sharded, GradientsThatNoSyncHasLeftAreRefused) {
  for (const Sharding sharding : kAll) {
    run({0, 0}, [&](Communicator comm) {
      auto net = model_of();
      DistributedDataParallel model(net, comm, {.sharding = sharding});
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.1));
      const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
      const auto accumulate = [&] {
        const nn::NoSyncGuard guard = model.no_sync();
        loss_of(model(batch.x), batch.y).backward();
      };
      const std::vector<at::Tensor> before = copies(net->parameters());
      const bool divided = sharding != Sharding::Optimizer;
      const ErrorCode code = divided ? ErrorCode::InvalidArgument : ErrorCode::Mismatch;
      const char* const part = divided ? "accumulated in no_sync" : "no backward outside of no_sync has averaged";
      for (const std::function<void()>& act : {std::function<void()>([&] { optimizer.step(); }),
                                               std::function<void()>([&] { optimizer.clip_grad_norm(1); })}) {
        accumulate();
        const std::string said = comm::testing::what_of(act, code);
        EXPECT_NE(said.find(part), std::string::npos) << said;
        optimizer.zero_grad();
      }
      optimizer.step();  // there are no gradients
      expect_equal(copies(net->parameters()), before);
      accumulate();
      if (divided) {
        loss_of(model(batch.x), batch.y).backward();
      } else {  // the program averages the gradients itself
        for (const at::Tensor& parameter : net->parameters()) {
          at::Tensor gradient = parameter.grad();
          comm.all_reduce(gradient, {.op = ReduceOp::Average}).wait();
        }
      }
      optimizer.step();
      EXPECT_FALSE(at::equal(net->parameters()[0], before[0]));
    });
  }
}

TEST(Sharded, ClippingCountsATiedParameterOnce) {
  run({0, 0}, [](Communicator comm) {
    torch::nn::Linear shared(4, 4);
    torch::nn::Sequential net(shared, torch::nn::Tanh(), shared);
    for (const at::Tensor& parameter : {shared->weight, shared->bias})
      parameter.mutable_grad() = at::ones_like(parameter);
    EXPECT_NEAR(optim::clip_grad_norm(*net, 1, {.over = comm}, comm), std::sqrt(20.0), 1e-9);
    EXPECT_NEAR(shared->weight.grad().norm().item<double>(), 4 / std::sqrt(20.0), 1e-5);
  });
}

}  // namespace
}  // namespace cohort
