// DistributedDataParallel, Pipeline and collectives of tensors, each rank on its own GPU, give the results of the CPU.
// Uses the fake driver, the fake NCCL and fake "cuda" tensors.
#include <cohort/error.h>
#include <cohort/torch/autograd.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/parallel.h>
#include <cohort/torch/pipeline.h>
#include <cohort/torch/recompute.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/sharded.h>
#include <cohort/torch/tensor.h>

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>

#include "torch/test_models.h"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <thread>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

enum class On { Cpu, Gpus };

at::Device place_of(On on, const Communicator& comm) {
  return on == On::Cpu ? at::Device(at::kCPU) : at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(comm.rank()));
}

int operations_of_nccl() {
  void* const nccl = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
  return nccl == nullptr ? 0 : reinterpret_cast<int (*)()>(::dlsym(nccl, "fake_nccl_operations"))();
}

/// Returns the parameters of each rank after some steps.
std::vector<std::vector<at::Tensor>> train(On on, const std::vector<std::int64_t>& samples) {
  std::vector<std::vector<at::Tensor>> results(samples.size());
  run_on_threads(static_cast<int>(samples.size()), [&](Communicator comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    const at::Device device = place_of(on, comm);
    Mlp net = with_values(Mlp(at::kFloat), comm.rank() * 100.0);  // all ranks have to get rank 0's values
    net->to(device);
    DistributedDataParallel model(net, comm, by_rows(small_buckets()));
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    for (int step = 0; step < 4; ++step) {
      const Batch batch = batch_of(step * 10 + comm.rank(), samples[rank], at::kFloat);
      model.zero_grad();
      loss_of(model(batch.x.to(device)), batch.y.to(device)).backward();
      optimizer.step();
    }
    model.require_same_parameters();
    for (const at::Tensor& parameter : net->parameters()) {
      EXPECT_EQ(parameter.device(), device);
      EXPECT_EQ(parameter.grad().device(), device);
      results[rank].push_back(parameter.detach().cpu());
    }
  });
  return results;
}

TEST(DdpOnGpus, TrainsAsOnTheCpuByNccl) {
  const int before = operations_of_nccl();
  const auto on_gpus = train(On::Gpus, {4, 4});
  EXPECT_GT(operations_of_nccl() - before, 2 * 4);
  expect_close(on_gpus[0], train(On::Cpu, {4, 4})[0], 1e-5);
  expect_equal(on_gpus[0], on_gpus[1]);
}

TEST(DdpOnGpus, WeightsAreSamples) {
  const int before = operations_of_nccl();
  const auto on_gpus = train(On::Gpus, {1, 4, 2});
  EXPECT_GT(operations_of_nccl() - before, 3 * 4);
  expect_close(on_gpus[2], train(On::Cpu, {1, 4, 2})[2], 1e-5);
}

TEST(DdpOnGpus, TrainingStateMayBeDivided) {
  const std::vector<at::Tensor> expected = train(On::Cpu, {4, 4})[0];
  for (const nn::Sharding sharding : {nn::Sharding::Optimizer, nn::Sharding::Gradients}) {
    const int before = operations_of_nccl();
    run_on_threads(2, [&](Communicator comm) {
      const at::Device device = place_of(On::Gpus, comm);
      Mlp net = with_values(Mlp(at::kFloat), 0);
      net->to(device);
      auto options = by_rows(small_buckets());
      options.sharding = sharding;
      DistributedDataParallel model(net, comm, options);
      optim::Sharded<torch::optim::SGD> optimizer(model, torch::optim::SGDOptions(0.2).momentum(0.9));
      for (int step = 0; step < 4; ++step) {
        const Batch batch = batch_of(step * 10 + comm.rank(), 4, at::kFloat);
        loss_of(model(batch.x.to(device)), batch.y.to(device)).backward();
        EXPECT_GT(optimizer.clip_grad_norm(1e6), 0);
        optimizer.step();
        model.zero_grad();
      }
      model.require_same_parameters();
      std::vector<at::Tensor> got;
      for (const at::Tensor& parameter : net->parameters()) {
        EXPECT_EQ(parameter.device(), device);
        got.push_back(parameter.detach().cpu());
      }
      expect_close(got, expected, 1e-5);
    });
    EXPECT_GT(operations_of_nccl() - before, 2 * 4);
  }
  EXPECT_THROW(run_on_threads(2,
                              [](Communicator comm) {
                                Mlp net = with_values(Mlp(at::kFloat), 0);
                                net->to(place_of(On::Gpus, comm));
                                DistributedDataParallel none(net, comm, {.sharding = nn::Sharding::Parameters});
                              }),
               Error);
}

TEST(DdpOnGpus, ARankWithoutSamplesDoesNoHarm) {
  run_on_threads(2, [](Communicator comm) {
    const at::Device device = place_of(On::Gpus, comm);
    Mlp net = with_values(Mlp(at::kFloat), 0);
    net->to(device);
    DistributedDataParallel model(net, comm, small_buckets());
    if (comm.rank() == 0) {
      const Batch batch = batch_of(1, 4, at::kFloat);
      loss_of(model(batch.x.to(device)), batch.y.to(device)).backward();
    } else {
      for (const at::Tensor& parameter : net->parameters())
        parameter.mutable_grad() = at::full_like(parameter.detach(), std::nan(""));
      EXPECT_TRUE(model.step_without_samples());
    }
    for (const at::Tensor& parameter : net->parameters())
      EXPECT_TRUE(at::isfinite(parameter.grad()).all().item<bool>());
  });
}

TEST(DdpOnGpus, BackwardDoesNotWaitForTheGpu) {
  std::vector<at::Tensor> gradients[2];
  for (const On on : {On::Cpu, On::Gpus}) {
    run_on_threads(2, [&](Communicator comm) {
      const at::Device device = place_of(on, comm);
      Mlp net = with_values(Mlp(at::kFloat), 0);
      net->to(device);
      DistributedDataParallel model(net, comm);
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(step * 10 + comm.rank(), 4, at::kFloat);
        const at::Tensor loss = loss_of(model(batch.x.to(device)), batch.y.to(device));
        comm.barrier().wait();
        if (step == 2) ::setenv("FAKE_NCCL_DELAY", "2000", 1);
        const auto begun = std::chrono::steady_clock::now();
        loss.backward();
        if (step == 2) {
          EXPECT_LT(std::chrono::steady_clock::now() - begun, std::chrono::milliseconds(1800));
        }
        // torch's work has to come after the averages, as in a GPU's stream.
        if (step == 2 && comm.rank() == 0) {
          for (const at::Tensor& parameter : net->parameters())
            gradients[static_cast<int>(on)].push_back(parameter.grad().cpu());
        }
        comm.barrier().wait();
        ::unsetenv("FAKE_NCCL_DELAY");
        model.zero_grad();
      }
    });
  }
  expect_close(gradients[1], gradients[0], 1e-5);
}

TEST(DdpOnGpus, WhatIsNotFiniteIsNamed) {
  run_on_threads(2, [](Communicator comm) {
    const at::Device device = place_of(On::Gpus, comm);
    Mlp net = with_values(Mlp(at::kFloat), 0);
    net->to(device);
    nn::DistributedDataParallelOptions options = small_buckets();
    options.non_finite = nn::NonFinite::Raise;
    DistributedDataParallel model(net, comm, options);
    Batch batch = batch_of(1, 4, at::kFloat);
    if (comm.rank() == 1) batch.y[2][1] = std::nanf("");
    try {
      loss_of(model(batch.x.to(device)), batch.y.to(device)).backward();
      ADD_FAILURE() << "no NonFiniteError";
    } catch (const NonFiniteError& error) {
      EXPECT_EQ(error.gradient().rank, 1);
      EXPECT_TRUE(std::isnan(error.gradient().element.value));
    }
    for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  });
}

TEST(TensorsOnGpus, CollectivesTakeThem) {
  run_on_threads(2, [](Communicator comm) {
    const at::Device device = place_of(On::Gpus, comm);
    const at::Tensor tensor = at::full({2, 3}, comm.rank() + 1.0, at::TensorOptions(device).dtype(at::kFloat));
    all_reduce(comm, tensor).wait();
    EXPECT_TRUE(at::equal(tensor.cpu(), at::full({2, 3}, 3.0F)));
    const at::Tensor all = all_gather(comm, tensor * (comm.rank() + 1));
    EXPECT_EQ(all.device(), device);
    EXPECT_TRUE(at::equal(all.cpu()[1], at::full({2, 3}, 6.0F)));
    const at::Tensor part = at::zeros({1, 3}, tensor.options());
    reduce_scatter(comm, tensor, part).wait();
    EXPECT_TRUE(at::equal(part.cpu(), at::full({1, 3}, 6.0F)));
    // Tensors of several devices and types, one of them not contiguous.
    std::vector<at::Tensor> mixed = {at::full({3}, comm.rank(), at::kInt), at::full({2, 2}, comm.rank(), at::kDouble),
                                     at::zeros({4, 2}, tensor.options()).t()};
    mixed[1] = mixed[1].to(device);
    mixed[2].fill_(comm.rank());
    broadcast_parameters(comm, mixed, {.root = 1});
    for (const at::Tensor& one : mixed) EXPECT_TRUE(one.cpu().eq(1).all().item<bool>());
  });
}

TEST(PipelineOnGpus, GivesTheGradientsOfTheCpu) {
  std::vector<at::Tensor> gradients[2];
  for (const On on : {On::Cpu, On::Gpus}) {
    std::vector<std::vector<at::Tensor>> of_ranks(3);
    run_on_threads(3, [&](Communicator comm) {
      const at::Device device = place_of(on, comm);
      torch::nn::Sequential net(torch::nn::Linear(5, 17), torch::nn::Tanh(), torch::nn::Linear(17, 3));
      with_values(net, 0)->to(device);
      nn::Pipeline model(net, comm, {.schedule = pipeline::Schedule::ZeroBubble, .micro_batches = 4, .loss = loss_of});
      for (const int rows : {8, 8, 7}) {
        const Batch batch = batch_of(rows, rows, at::kFloat);
        EXPECT_GT(model.step(batch.x.to(device), batch.y.to(device)), 0);
      }
      for (const at::Tensor& parameter : model.parameters()) {
        EXPECT_EQ(parameter.grad().device(), device);
        of_ranks[static_cast<std::size_t>(comm.rank())].push_back(parameter.grad().cpu());
      }
    });
    for (const auto& of_rank : of_ranks) {
      gradients[on == On::Cpu ? 0 : 1].insert(gradients[on == On::Cpu ? 0 : 1].end(), of_rank.begin(), of_rank.end());
    }
  }
  EXPECT_EQ(gradients[0].size(), 4U);
  expect_close(gradients[1], gradients[0], 1e-6);
}

TEST(TensorsOnGpus, MemoryThatIsStillUsedIsNotTakenForOthers) {
  run_on_threads(2, [](Communicator comm) {
    const at::TensorOptions type = at::TensorOptions(place_of(On::Gpus, comm)).dtype(at::kFloat);
    constexpr int elements = 30'000;  // a size that no other buffer has
    at::Tensor tensor = at::ones({elements}, type);
    all_reduce(comm, tensor).wait();
    comm.barrier().wait();
    ::setenv("FAKE_NCCL_DELAY", "300", 1);
    const void* const memory = tensor.data_ptr();
    std::atomic<bool> ended{false};
    {
      Work work = all_reduce(comm, tensor);
      work.on_done([&] { ended = true; });
      work.synchronize({DeviceType::CUDA, comm.rank()});
      tensor.reset();
    }
    EXPECT_NE(at::empty({elements}, type).data_ptr(), memory);
    EXPECT_FALSE(ended);
    bool again = false;
    std::vector<at::Tensor> others;
    for (int i = 0; i < 10000 && !(again && ended); ++i) {
      others.push_back(at::empty({elements}, type));
      again = again || others.back().data_ptr() == memory;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_TRUE(again);
    EXPECT_TRUE(ended);
    ::unsetenv("FAKE_NCCL_DELAY");
  });
}

TEST(TensorsOnGpus, DifferentiableCollectivesTakeThem) {
  std::vector<at::Tensor> results[2];
  for (const On on : {On::Cpu, On::Gpus}) {
    run_on_threads(2, [&](Communicator comm) {
      const at::Device device = place_of(on, comm);
      const at::Tensor x = pattern({4, 6}, comm.rank(), at::kFloat).to(device).requires_grad_(true);
      const int other = 1 - comm.rank();
      at::Tensor y = autograd::all_gather(comm, autograd::all_reduce(comm, at::sin(x)), 1);
      y = autograd::all_to_all(comm, autograd::reduce_scatter(comm, y, 1)) * autograd::broadcast(comm, x, 1);
      y = autograd::copy_to(comm, y) + autograd::gather_from(comm, autograd::scatter_to(comm, x, 0), 0);
      const at::Tensor token = autograd::send(comm, y, other);
      y = y + autograd::recv(comm, other, {.sizes = {4, 6}, .options = x.options(), .after = token});
      autograd::reduce_from(comm, y).square().sum().backward();
      if (comm.rank() == 0) results[static_cast<int>(on)] = {y.detach().cpu(), x.grad().cpu()};
    });
  }
  expect_close(results[1], results[0], 1e-5);
}

TEST(TensorsOnGpus, ParallelLayersTakeThem) {
  std::vector<at::Tensor> results[2];
  for (const On on : {On::Cpu, On::Gpus}) {
    run_on_threads(2, [&](Communicator comm) {
      const at::Device device = place_of(on, comm);
      nn::VocabParallelEmbedding embedding(
          comm, nn::VocabParallelEmbeddingOptions{.num_embeddings = 8, .embedding_dim = 4, .sequence_dim = 1});
      nn::ColumnParallelLinear up(
          comm, nn::ColumnParallelLinearOptions{.in_features = 4, .out_features = 8, .sequence_dim = 1});
      nn::RowParallelLinear down(comm, nn::RowParallelLinearOptions{.in_features = 8, .out_features = 8});
      nn::SyncBatchNorm norm(comm, torch::nn::BatchNormOptions(4));
      nn::ParallelCrossEntropy loss(comm);
      std::vector<at::Tensor> parameters;
      const auto take = [&](auto layer) {
        layer->to(device);
        for (const at::Tensor& parameter : layer->parameters()) parameters.push_back(parameter);
      };
      take(embedding), take(up), take(down), take(norm);
      {
        const at::NoGradGuard no_grad;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
          const int part = i < 4 ? comm.rank() : 0;  // the following parameters are whole
          parameters[i].copy_(pattern(parameters[i].sizes(), static_cast<double>(i) + part, at::kFloat));
        }
      }
      const at::Tensor ids = (at::arange(8, at::kLong) % 7).reshape({2, 4}).to(device);
      const auto forward = [&](const at::Tensor& tokens) {
        const at::Tensor h = norm(embedding(tokens).transpose(1, 2)).transpose(1, 2);
        return down(at::tanh(up(h))).narrow(-1, 4 * comm.rank(), 4);
      };
      loss(nn::checkpoint(forward, ids), ids).backward();
      if (comm.rank() == 0) {
        for (const at::Tensor& parameter : parameters) {
          EXPECT_EQ(parameter.grad().device(), device);
          results[static_cast<int>(on)].push_back(parameter.grad().cpu());
        }
      }
    });
  }
  expect_close(results[1], results[0], 1e-4);
}

TEST(TensorsOnGpus, ModelsOnOtherDevicesAreRefused) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(at::kFloat), 0);
    if (comm.rank() == 1) net->to(at::Device(at::kCUDA, 1));
    try {
      const DistributedDataParallel model(net, comm);
      ADD_FAILURE() << "not refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      EXPECT_NE(std::string(error.what()).find("on cuda"), std::string::npos) << error.what();
    }
  });
}

}  // namespace
}  // namespace cohort
