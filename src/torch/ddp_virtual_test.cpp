// Virtual ranks: trainings whose weights, buffers and losses have the same bits for every number of ranks; and what is
// refused. (The sums are tested without a framework in train/gradients; random numbers with processes, in Python.)
#include <cohort/error.h>
#include <cohort/torch/data.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/parallel.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include "comm/api/communicator_impl.h"
#include "torch/test_models.h"
#include "train/gradients/virtual_ranks.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <mutex>
#include <optional>
#include <sstream>

namespace cohort {
namespace {

using data::DistributedSampler;
using data::DistributedSamplerOptions;
using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr std::int64_t kSamples = 77;  // the last step of an epoch has 5, fewer than there are virtual ranks
constexpr int kVirtualRanks = 8;

/// Has running statistics, a parameter that some batches use, and one that none does.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    first = register_module("first", torch::nn::Linear(5, 12));
    norm = register_module("norm", torch::nn::BatchNorm1d(4));
    last = register_module("last", torch::nn::Linear(12, 3));
    sometimes = register_parameter("sometimes", at::ones({3}));
    never = register_parameter("never", at::ones({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    if (failure) failure();
    at::Tensor y = last(at::relu(norm(first(x).view({-1, 4, 3}))).flatten(1));
    return x[0][0].item<float>() > 0 ? y * sometimes : y;
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor sometimes, never;
  std::function<void()> failure;
};
TORCH_MODULE(Net);

template <class Holder>
std::string state_of(const Holder& net) {
  std::string bytes;
  const auto add = [&bytes](const std::string& name, const at::Tensor& tensor) {
    const at::Tensor flat = tensor.detach().contiguous();
    bytes += name;
    bytes.append(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
  };
  for (const auto& item : net->named_parameters()) add(item.key(), item.value());
  for (const auto& item : net->named_buffers()) add(item.key(), item.value());
  return bytes;
}

/// A training as it is saved: model and optimizer, then the sampler.
struct Saved {
  std::string model, optimizer, sampler;
};

template <class T>
std::string saved(const T& one) {
  torch::serialize::OutputArchive archive;
  one.save(archive);
  std::ostringstream out;
  archive.save_to(out);
  return out.str();
}
template <class T>
void restore(T& one, const std::string& bytes) {
  std::istringstream in(bytes);
  torch::serialize::InputArchive archive;
  archive.load_from(in);
  one.load(archive);
}

struct Run {
  int from = 0, to = 9;  // steps; an epoch has four
  bool faulty = false;   // one step is not finite, and forwards fail and are tried again
};

class Training {
 public:
  Training(Communicator comm, Run run)
      : run_(run),
        sampler_(kSamples, comm, {.batch_size = 3, .seed = 5, .virtual_ranks = kVirtualRanks}),
        net_(with_values(Net(), comm.rank() + 1.0)),  // all get rank 0's
        model_(net_, comm, options()),
        optimizer_(model_.parameters(), torch::optim::AdamWOptions(0.01).weight_decay(0.1)) {
    EXPECT_EQ(at::get_num_threads(), 1);
  }

  void load(const Saved& saved) {
    restore(*net_, saved.model);
    restore(optimizer_, saved.optimizer);
    restore(sampler_, saved.sampler);
  }
  /// Trains, and returns the losses.
  std::string train() {
    for (step_ = run_.from; step_ < run_.to;) {
      auto batch = sampler_.next_batch();
      if (!batch) {
        sampler_.next_epoch();
        batch = sampler_.next_batch();
      }
      try {
        train_batch(*batch);
      } catch (const NonFiniteError&) {
        EXPECT_EQ(step_, 2);
        model_.zero_grad();
        ++step_;
      }
      sampler_.step();
    }
    return losses_;
  }
  Saved save() { return {saved(*net_), saved(optimizer_), saved(sampler_)}; }
  std::string state() const { return state_of(net_); }

 private:
  DistributedDataParallelOptions options() const {
    DistributedDataParallelOptions all = small_buckets();
    all.sampler = &sampler_;
    all.virtual_ranks = kVirtualRanks;
    if (run_.faulty) all.non_finite = nn::NonFinite::Raise;
    return all;
  }
  void train_batch(const std::vector<std::int64_t>& batch) {
    const int virtual_rank = sampler_.virtual_rank();
    double loss = std::nan("");
    if (batch.empty()) {
      EXPECT_TRUE(model_.step_without_samples());
    } else {
      at::Tensor x = at::stack(rows_of(batch, 0.3, 5)), y = at::stack(rows_of(batch, 0.7, 3));
      if (run_.faulty && step_ == 2 && virtual_rank == 3) x[0][1] = INFINITY;
      const std::int64_t half = virtual_rank % 2 == 0 ? x.size(0) / 2 : 0;  // some have two micro-batches
      loss = 0;
      for (const auto& [begin, end] : {std::pair(std::int64_t{0}, half), std::pair(half, x.size(0))}) {
        if (begin == end) continue;
        std::optional<nn::NoSyncGuard> local;
        if (end < x.size(0)) local.emplace(model_.no_sync());
        const at::Tensor part = loss_of(forward(x.slice(0, begin, end)), y.slice(0, begin, end)) *
                                (static_cast<double>(end - begin) / static_cast<double>(x.size(0)));
        part.backward();
        loss += part.item<double>();
      }
    }
    if (const std::optional<double> mean = model_.mean_loss(loss))
      losses_.append(reinterpret_cast<const char*>(&*mean), sizeof *mean);
    if (!model_.step_complete()) return model_.zero_grad();
    torch::nn::utils::clip_grad_norm_(model_.parameters(), 0.5);
    optimizer_.param_groups()[0].options().set_lr(0.01 / (1 + step_));
    optimizer_.step();
    optimizer_.zero_grad();
    if (step_ % 2 == 0) model_.zero_grad();
    ++step_;
  }
  at::Tensor forward(const at::Tensor& x) {
    if (run_.faulty && step_ == 4 && sampler_.virtual_rank() % 3 == 1) {
      net_->failure = [this] {
        const at::NoGradGuard no_grad;
        for (const at::Tensor& buffer : net_->buffers()) buffer.add_(1);
        throw std::runtime_error("a layer fails");
      };
      EXPECT_THROW((void)model_(x), std::runtime_error);
      net_->failure = nullptr;
    }
    return model_(x);
  }
  static std::vector<at::Tensor> rows_of(const std::vector<std::int64_t>& batch, double salt, std::int64_t width) {
    std::vector<at::Tensor> rows;
    for (const std::int64_t sample : batch)
      rows.push_back(pattern({width}, static_cast<double>(sample) + salt, at::kFloat));
    return rows;
  }

  Run run_;
  DistributedSampler sampler_;
  Net net_;
  DistributedDataParallel<NetImpl> model_;
  torch::optim::AdamW optimizer_;
  std::string losses_;
  int step_ = 0;
};

/// Runs on ranks that are threads, with the number of a host for each.
void run_on(const std::vector<int>& hosts, const std::function<void(Communicator)>& body) {
  const bool several = *std::max_element(hosts.begin(), hosts.end()) > 0;
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(several), several ? hosts : std::vector<int>(),
                                                static_cast<int>(hosts.size()), {}),
                          body);
}
std::vector<int> on_one_host(int ranks) { return std::vector<int>(static_cast<std::size_t>(ranks), 0); }
const std::vector<std::vector<int>> kWorlds = {on_one_host(1), on_one_host(2), on_one_host(3), on_one_host(4),
                                               on_one_host(5), on_one_host(8), {0, 1, 1},      {0, 1, 0, 1}};

void expect_same_everywhere(Run run) {
  std::string weights, losses;
  for (const std::vector<int>& hosts : kWorlds) {
    SCOPED_TRACE(::testing::PrintToString(hosts));
    run_on(hosts, [&](Communicator comm) {
      Training training(comm, run);
      const std::string own_losses = training.train();
      static std::mutex mutex;
      const std::string before = training.state();  // rank 0 has the buffers of the training without a broadcast
      (void)training.save();
      const std::lock_guard lock(mutex);
      if (comm.rank() == 0) {
        EXPECT_TRUE(before == training.state());
      }
      if (weights.empty()) weights = training.state();
      if (losses.empty()) losses = own_losses;
      EXPECT_TRUE(weights == training.state());
      EXPECT_TRUE(losses == own_losses);
    });
  }
  EXPECT_EQ(losses.size(), sizeof(double) * static_cast<std::size_t>(run.to - run.from - (run.faulty ? 1 : 0)));
}

TEST(VirtualRanks, WeightsBuffersAndLossesHaveTheSameBitsOnAnyNumberOfRanks) { expect_same_everywhere({}); }

TEST(VirtualRanks, AlsoWithStepsAndForwardsThatFail) { expect_same_everywhere({.faulty = true}); }

TEST(VirtualRanks, ResumeOnAnotherNumberOfRanks) {
  std::string whole;
  run_on(on_one_host(1), [&](Communicator comm) {
    Training training(comm, {});
    (void)training.train();
    (void)training.save();
    whole = training.state();
  });
  Saved at_five;
  run_on(on_one_host(3), [&](Communicator comm) {
    Training training(comm, {.to = 5});
    (void)training.train();
    Saved own = training.save();
    if (comm.rank() == 2) at_five = std::move(own);
  });
  for (const int ranks : {1, 2, 5}) {
    run_on(on_one_host(ranks), [&](Communicator comm) {
      Training training(comm, {.from = 5});
      training.load(at_five);
      (void)training.train();
      (void)training.save();
      EXPECT_TRUE(training.state() == whole) << ranks;
    });
  }
}

TEST(VirtualRanks, AverageIsThatOfTheWholeBatch) {
  const Batch batch = batch_of(0, 11);
  Mlp reference = with_values(Mlp(), 0);
  loss_of(reference->forward(batch.x), batch.y).backward();
  run_on(on_one_host(3), [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallelOptions options = by_rows(small_buckets());
    options.virtual_ranks = 5;
    options.compute_threads = 0;
    DistributedDataParallel model(net, comm, options);
    const gradients::VirtualRange block = gradients::block_of(5, comm.size(), comm.rank());
    for (int part = block.begin; part < block.end; ++part) {
      const std::int64_t begin = part == 4 ? 8 : part * 2, end = part == 4 ? 11 : begin + 2;
      loss_of(model(batch.x.slice(0, begin, end)), batch.y.slice(0, begin, end)).backward();
      EXPECT_EQ(net->last->bias.grad().defined(), part + 1 == block.end);
    }
    std::vector<at::Tensor> expected, found;
    for (const at::Tensor& parameter : reference->parameters()) expected.push_back(parameter.grad());
    for (const at::Tensor& parameter : net->parameters()) found.push_back(parameter.grad());
    expect_close(found, expected, 1e-12);
  });
}

TEST(VirtualRanks, EachBeginsWithItsOwnRandomNumbers) {
  run_on(on_one_host(1), [&](Communicator comm) {
    struct DrawingImpl : torch::nn::Module {
      DrawingImpl() { weight = register_parameter("weight", at::ones({1})); }
      at::Tensor forward(const at::Tensor& x) {
        drawn.push_back(at::rand({1}).item<float>());
        return x * weight;
      }
      at::Tensor weight;
      std::vector<float> drawn;
    };
    auto net = std::make_shared<DrawingImpl>();
    DistributedSampler sampler(12, comm, {.batch_size = 2, .seed = 9, .virtual_ranks = 3});
    DistributedDataParallelOptions options{.sampler = &sampler};
    options.virtual_ranks = 3;
    DistributedDataParallel<DrawingImpl> model(net, comm, options);
    while (const auto batch = sampler.next_batch()) {
      {
        const nn::NoSyncGuard local = model.no_sync();
        model(at::ones({1})).sum().backward();
      }
      model(at::ones({1})).sum().backward();
      sampler.step();
    }
    std::vector<float> expected;
    for (const std::int64_t cursor : {0, 6}) {
      for (const int part : {0, 1, 2}) {
        at::Generator generator = at::detail::createCPUGenerator(gradients::virtual_seed(9, 0, cursor, part));
        for (int draw = 0; draw < 2; ++draw) expected.push_back(at::rand({1}, generator).item<float>());
      }
    }
    EXPECT_EQ(net->drawn, expected);
  });
}

void refused(const std::string& why, const std::function<void()>& body) {
  try {
    body();
    ADD_FAILURE() << why;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument) << error.what();
    EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
  }
}

TEST(VirtualRanks, WhatHasNoSuchOrderIsRefusedByName) {
  run_on(on_one_host(2), [&](Communicator comm) {
    const auto with = [&](const std::function<void(DistributedDataParallelOptions&)>& change, const std::string& why) {
      DistributedDataParallelOptions options;
      options.virtual_ranks = 4;
      change(options);
      refused(why, [&] { DistributedDataParallel(with_values(Net(), 0), comm, options); });
    };
    using Options = DistributedDataParallelOptions;
    with([](Options& o) { o.sharding = nn::Sharding::Optimizer; }, "virtual_ranks with sharding");
    with([](Options& o) { o.wire_format = WireFormat::Int8; }, "virtual_ranks with wire_format");
    with([](Options& o) { o.error_feedback = true; }, "error_feedback");
    with([](Options& o) { o.virtual_ranks = -1; }, "virtual_ranks=-1");
    with([](Options& o) { o.virtual_ranks = 1; }, "virtual_ranks=1 on 2 ranks");
    with([](Options& o) { o.broadcast_buffers = false; }, "leave broadcast_buffers on");
    const DistributedSampler plain(8, comm, {.batch_size = 1});
    with([&](Options& o) { o.sampler = &plain; }, "virtual_ranks=4, and 0 of its sampler");
    DistributedDataParallelOptions options;
    options.virtual_ranks = 4;
    struct SummingImpl : torch::nn::Module {
      explicit SummingImpl(const Communicator& ranks) {
        register_module("norm", nn::SyncBatchNorm(ranks, torch::nn::BatchNormOptions(3)));
      }
      at::Tensor forward(const at::Tensor& x) { return x; }
    };
    refused("SyncBatchNormImpl, which sums over ranks",
            [&] { DistributedDataParallel<SummingImpl>(std::make_shared<SummingImpl>(comm), comm, options); });
    DistributedDataParallel model(with_values(Net(), 0), comm, options);
    refused("virtual_ranks", [&] { (void)model.join(); });
    refused("virtual_ranks", [&] { model.register_comm_hook([](nn::GradBucket&) { return nullptr; }); });
    refused("virtual_ranks=1 in a world of 2", [&] { DistributedSampler(8, comm, {.virtual_ranks = 1}); });
    refused("shares", [&] { DistributedSampler(8, comm, {.shares = "2,1", .virtual_ranks = 4}); });
    DistributedSampler sampler(8, comm, {.batch_size = 1, .virtual_ranks = 4});
    refused("a world of 5", [&] { sampler.set_world(0, 5); });
    refused("a global batch of 3", [&] { sampler.set_world(0, 1, 3); });
    DistributedSampler other(8, comm, {.batch_size = 1, .virtual_ranks = 2});
    refused("virtual_ranks=4 cannot be used with 2", [&] { restore(other, saved(sampler)); });
  });
  // Ranks that disagree get a Mismatch on all.
  for (const bool threads : {false, true}) {
    run_on(on_one_host(2), [&](Communicator comm) {
      DistributedDataParallelOptions options;
      options.virtual_ranks = threads ? 4 : 4 + comm.rank();
      if (threads) options.compute_threads = 1 + comm.rank();
      try {
        DistributedDataParallel(with_values(Net(), 0), comm, options);
        ADD_FAILURE();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Mismatch);
        EXPECT_NE(std::string(error.what()).find(threads ? "compute_threads" : "virtual_ranks"), std::string::npos)
            << error.what();
      }
    });
  }
}

TEST(VirtualRanks, AForgottenOneIsAnError) {
  run_on(on_one_host(1), [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedSampler sampler(40, comm, {.batch_size = 2, .virtual_ranks = 4});
    DistributedDataParallelOptions options{.sampler = &sampler};
    options.virtual_ranks = 4;
    DistributedDataParallel model(net, comm, options);
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.2));
    const Batch batch = batch_of(0, 2);
    const auto train = [&] { loss_of(model(batch.x), batch.y).backward(); };
    (void)sampler.next_batch();
    train();
    refused("oldest batch is of virtual rank 0, and virtual rank 1 is due", train);
    (void)sampler.next_batch();
    (void)sampler.next_batch();
    sampler.step(2);
    refused("oldest batch is of virtual rank 2, and virtual rank 1 is due", train);
    EXPECT_EQ(sampler.cursor(), 0);
    sampler.set_epoch(0);
    for (int part = 0; part < 2; ++part) {
      (void)sampler.next_batch();
      if (part == 0) sampler.step();
    }
    train();
    sampler.step();
    {
      const at::NoGradGuard no_grad;
      net->second->bias.add_(1);
    }
    (void)sampler.next_batch();
    refused("parameter 'second.bias' was changed, or frozen, within a step, before virtual rank 2", train);
  });
}

TEST(VirtualRanks, ParametersStayTheSameWithinAStep) {
  run_on(on_one_host(1), [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    net->first->bias.requires_grad_(false);
    DistributedDataParallelOptions options;
    options.virtual_ranks = 2;
    DistributedDataParallel model(net, comm, options);
    const Batch batch = batch_of(0, 2);
    const auto train = [&] { loss_of(model(batch.x), batch.y).backward(); };
    train();
    EXPECT_FALSE(model.step_complete());
    net->first->bias.requires_grad_(true);
    refused("between a forward and its reduction", train);
    net->first->bias.requires_grad_(false);
    train();
    EXPECT_TRUE(model.step_complete());
    net->first->bias.requires_grad_(true);
    model.zero_grad();
    train();
    train();
    EXPECT_TRUE(net->first->bias.grad().defined());
  });
}

}  // namespace
}  // namespace cohort
