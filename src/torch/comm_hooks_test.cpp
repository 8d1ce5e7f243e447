// Hooks that replace the average, on ranks that are threads; test_nn_hooks.py does the same in Python.
#include <cohort/error.h>
#include <cohort/torch/comm_hooks.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>

#include "comm/api/communicator_impl.h"
#include "comm/testing/worlds.h"
#include "torch/test_models.h"

namespace cohort {
namespace {

using nn::CommHook;
using nn::DistributedDataParallel;
using nn::GradBucket;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

using Values = std::vector<at::Tensor>;

struct Training {
  CommHook hook = {};
  std::vector<std::int64_t> samples = {4, 4};
  int steps = 6;
  nn::DistributedDataParallelOptions options = small_buckets();
};

Values train(Communicator& comm, const Training& training) {
  Mlp net = with_values(Mlp(at::kFloat, 37), 0);
  DistributedDataParallel model(net, comm, by_rows(training.options));
  if (training.hook) model.register_comm_hook(training.hook);
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  std::int64_t begin = 0, total = 0;
  for (std::size_t rank = 0; rank < training.samples.size(); ++rank) {
    if (rank < static_cast<std::size_t>(comm.rank())) begin += training.samples[rank];
    total += training.samples[rank];
  }
  const std::int64_t end = begin + training.samples[static_cast<std::size_t>(comm.rank())];
  for (int step = 0; step < training.steps; ++step) {
    const Batch batch = batch_of(step, total, at::kFloat);
    model.zero_grad();
    loss_of(model(batch.x.slice(0, begin, end)), batch.y.slice(0, begin, end)).backward();
    optimizer.step();
  }
  return copies(model.parameters());
}

Values gradients_of(DistributedDataParallel<MlpImpl>& model) {
  Values all;
  for (const at::Tensor& parameter : model.parameters()) all.push_back(parameter.grad().clone());
  return all;
}

void expect_equal_on_all_ranks(Communicator& comm, const Values& values) {
  for (const at::Tensor& value : values) {
    const at::Tensor all = all_gather(comm, value);
    for (int rank = 0; rank < comm.size(); ++rank) EXPECT_TRUE(at::equal(all[rank], value));
  }
}

std::function<at::Tensor()> plain_mean(GradBucket& bucket) {
  at::Tensor sum = bucket.buffer();
  const auto work = std::make_shared<Work>(bucket.communicator().all_reduce(sum));
  return [=, ranks = bucket.communicator().size()]() mutable {
    work->wait();
    return sum.div_(ranks);
  };
}

TEST(CommHooks, MeansAreThoseWithoutAHookAlsoByWeights) {
  for (const std::vector<std::int64_t>& samples : {std::vector<std::int64_t>{4, 4, 4}, {1, 5, 3}, {0, 7, 2}}) {
    run_on_threads(3, [&](Communicator comm) {
      const Values expected = train(comm, {.samples = samples});
      for (const auto& [hook, tolerance] :
           {std::pair(CommHook(plain_mean), 1e-5), std::pair(nn::allreduce_hook(), 1e-5),
            std::pair(nn::fp16_compress_hook(), 1e-2), std::pair(nn::bf16_compress_hook(), 5e-2)}) {
        const Values result = train(comm, {.hook = hook, .samples = samples});
        expect_close(result, expected, tolerance);
        expect_equal_on_all_ranks(comm, result);
      }
    });
  }
}

TEST(CommHooks, BucketsAreWhatTheySay) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(at::kFloat), 0);
    DistributedDataParallel model(net, comm, small_buckets());
    std::vector<std::size_t> indices;
    bool ended = false;
    model.register_comm_hook([&](GradBucket& bucket) {
      indices.push_back(bucket.index());
      ended = bucket.is_last();
      EXPECT_EQ(bucket.buffer().dim(), 1);
      const Values gradients = bucket.gradients();
      for (std::size_t i = 0; i < gradients.size(); ++i) {
        EXPECT_EQ(gradients[i].sizes(), bucket.parameters()[i].sizes());
        EXPECT_TRUE(at::equal(gradients[i], bucket.parameters()[i].grad()));
      }
      const at::Tensor whole = bucket.buffer();
      bucket.set_buffer(whole.to(at::kDouble));
      EXPECT_EQ(bucket.gradients().front().scalar_type(), at::kDouble);
      EXPECT_THROW(bucket.set_buffer(whole.slice(0, 1)), Error);
      return [other = bucket.buffer()] { return other * 2; };
    });
    const Batch batch = batch_of(0, 4, at::kFloat);
    {
      const auto local = model.no_sync();
      loss_of(model(batch.x), batch.y).backward();
    }
    EXPECT_TRUE(indices.empty());
    const Values once = gradients_of(model);
    loss_of(model(batch.x), batch.y).backward();
    EXPECT_TRUE(ended);
    EXPECT_EQ(indices.size(), static_cast<std::size_t>(model.stats().buckets));
    for (std::size_t i = 0; i < once.size(); ++i) {
      EXPECT_TRUE(at::allclose(model.parameters()[i].grad(), once[i] * 4)) << "twice the sum of two";
    }
  });
}

TEST(CommHooks, WhatCannotBeRightIsRefusedAndErrorsAreBackwards) {
  run_on_threads(2, [](Communicator comm) {
    const auto refused = [](const std::function<void()>& body, ErrorCode code, const std::string& why) {
      try {
        body();
        ADD_FAILURE() << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code);
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      }
    };
    Training divided{.hook = plain_mean};
    divided.options.sharding = nn::Sharding::Gradients;
    refused([&] { train(comm, divided); }, ErrorCode::InvalidArgument, "sharding divides gradients");
    Training narrow{.hook = plain_mean};
    narrow.options.wire_format = WireFormat::BFloat16;
    refused([&] { train(comm, narrow); }, ErrorCode::InvalidArgument, "leave out wire_format");
    const auto with = [&](std::function<at::Tensor()> result) {
      return [&comm, result] { train(comm, {.hook = [result](GradBucket&) { return result; }, .steps = 1}); };
    };
    refused(with({}), ErrorCode::InvalidArgument, "an empty function");
    refused(with([] { return at::Tensor(); }), ErrorCode::InvalidArgument, "has returned no tensor");
    refused(with([] { return at::zeros({3}); }), ErrorCode::InvalidArgument, "has returned 3 elements of Float");
    refused(
        [&] {
          train(comm, {.hook = [](GradBucket&) -> std::function<at::Tensor()> {
                  throw Error(ErrorCode::Io, "of the hook", {});
                }});
        },
        ErrorCode::Io, "of the hook");
    Mlp net(at::kFloat);
    DistributedDataParallel model(net, comm);
    model.register_comm_hook(plain_mean);
    refused([&] { model.register_comm_hook(plain_mean); }, ErrorCode::InvalidArgument, "there is one already");
    refused([&] { model.join(); }, ErrorCode::InvalidArgument, "step_without_samples");
    EXPECT_FALSE(model.step_without_samples());
  });
}

TEST(CommHooks, PowerSgdTrainsOverHostsAndGoesOnFromACheckpoint) {
  auto world = comm::form_on_threads(comm::usual_backend(true), {0, 0, 1, 1}, 4, {});
  comm::run_on_threads_of(std::move(world), [](Communicator comm) {
    const nn::PowerSGDOptions options{
        .matrix_approximation_rank = 2, .start_powerSGD_iter = 2, .min_compression_rate = 1};
    const auto state = std::make_shared<nn::PowerSGDState>(options);
    const Training training{.samples = {4, 4, 4, 4}, .steps = 40};
    const Values expected = train(comm, training);
    Training compressed = training;
    compressed.hook = nn::power_sgd_hook(state);
    const Values result = train(comm, compressed);
    expect_close(result, expected, 0.1);
    expect_equal_on_all_ranks(comm, result);
    const auto [before, after] = state->compression_stats();
    EXPECT_EQ(before, 38 * (37 * 37 + 37 * 5 + 3 * 37 + 37 + 37 + 3));
    EXPECT_EQ(after, 38 * ((37 + 37) * 2 + (37 + 5) * 2 + (3 + 37) * 2 + 37 + 37 + 3));

    const auto saved = state->state_dict();
    const auto again = std::make_shared<nn::PowerSGDState>(options);
    again->load_state_dict(saved);
    const auto loaded = again->state_dict();
    ASSERT_EQ(loaded.size(), saved.size());
    for (const auto& [name, tensor] : saved) EXPECT_TRUE(at::equal(tensor, loaded.at(name))) << name;
    EXPECT_EQ(saved.at("powerSGD.iter").item<std::int64_t>(), 40);
    EXPECT_THROW(again->load_state_dict({{"powerSGD.x.q", at::zeros({1})}}), Error);
    const auto unsound =
        std::make_shared<nn::PowerSGDState>(options);  // q without its shape, and with one it does not fit
    EXPECT_THROW(unsound->load_state_dict({{"powerSGD.0.q", at::zeros({2, 5})}}), Error);
    EXPECT_THROW(unsound->load_state_dict(
                     {{"powerSGD.1.q", at::zeros({3, 4})}, {"powerSGD.1.shape", at::full({2}, 5, at::kLong)}}),
                 Error);
    EXPECT_EQ(unsound->state_dict().size(), 1U);
    compressed.steps = 2;
    compressed.hook = nn::power_sgd_hook(again);
    expect_equal_on_all_ranks(comm, train(comm, compressed));
  });
}

TEST(CommHooks, AStateOfPowerSgdIsOfOneModel) {
  auto world = comm::form_on_threads(comm::usual_backend(false), {}, 2, {});
  comm::run_on_threads_of(std::move(world), [](Communicator comm) {
    const auto state =
        std::make_shared<nn::PowerSGDState>(nn::PowerSGDOptions{.start_powerSGD_iter = 0, .min_compression_rate = 1});
    const CommHook hook = nn::power_sgd_hook(state);
    const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
    Mlp net = with_values(Mlp(at::kFloat, 37), 0);
    {
      DistributedDataParallel model(net, comm);
      model.register_comm_hook(hook);
      loss_of(model(batch.x), batch.y).backward();
      DistributedDataParallel other(with_values(Mlp(at::kFloat, 37), 0), comm);
      other.register_comm_hook(hook);
      const std::string said =
          comm::testing::what_of([&] { loss_of(other(batch.x), batch.y).backward(); }, ErrorCode::InvalidArgument);
      EXPECT_NE(said.find("of another model"), std::string::npos) << said;
    }
    DistributedDataParallel again(net, comm);  // takes over the same module
    again.register_comm_hook(hook);
    loss_of(again(batch.x), batch.y).backward();
    const auto used =
        std::make_shared<nn::PowerSGDState>(nn::PowerSGDOptions{.start_powerSGD_iter = 0, .min_compression_rate = 1});
    for (int model = 0; model < 2; ++model) {  // each model is destroyed before the next one, which may get its memory
      DistributedDataParallel one(with_values(Mlp(at::kFloat, 37), 0), comm);
      one.register_comm_hook(nn::power_sgd_hook(used));
      const auto step = [&] { loss_of(one(batch.x), batch.y).backward(); };
      if (model == 0) {
        step();
      } else {
        const std::string said = comm::testing::what_of(step, ErrorCode::InvalidArgument);
        EXPECT_NE(said.find("of another model"), std::string::npos) << said;
      }
    }
  });
}

}  // namespace
}  // namespace cohort
