// DistributedDataParallel on ranks that are threads: averages, buckets, accumulation, unused parameters, uneven ends,
// errors. (tests/multiproc has the same with processes.)
#include <cohort/error.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/tensor.h>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "torch/test_models.h"

#include <atomic>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

// Buckets of about two tensors, so that small models have several.
DistributedDataParallelOptions small_buckets() { return {.bucket_bytes = 1200, .first_bucket_bytes = 300}; }

enum class Zero { InPlace, ToNone };

void zero(torch::optim::Optimizer& optimizer, DistributedDataParallel<MlpImpl>& model, Zero how) {
  if (how == Zero::ToNone) return model.zero_grad();
  // What Optimizer::zero_grad() of 1.13 does.
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      parameter.mutable_grad().detach_();
      parameter.mutable_grad().zero_();
    }
  }
}

struct Training {
  std::vector<std::int64_t> samples;  // of each rank, in every step
  int steps = 4;
  Zero how = Zero::ToNone;
  at::ScalarType type = at::kDouble;
};

std::vector<at::Tensor> train_in_one_process(const Training& training) {
  Mlp net = with_values(Mlp(training.type), 0);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
  std::int64_t total = 0;
  for (const std::int64_t n : training.samples) total += n;
  for (int step = 0; step < training.steps; ++step) {
    const Batch batch = batch_of(step, total, training.type);
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    loss_of(net->forward(batch.x), batch.y).backward();
    optimizer.step();
  }
  return copies(net->parameters());
}

std::vector<std::vector<at::Tensor>> train_on_threads(const Training& training) {
  const int world = static_cast<int>(training.samples.size());
  std::vector<std::vector<at::Tensor>> results(training.samples.size());
  run_on_threads(world, [&](Communicator comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Mlp net = with_values(Mlp(training.type), comm.rank() * 100.0);  // rank 0's values are to win
    DistributedDataParallel model(net, comm, small_buckets());
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    std::int64_t begin = 0;
    std::int64_t total = 0;
    for (std::size_t r = 0; r < training.samples.size(); ++r) {
      if (r < rank) begin += training.samples[r];
      total += training.samples[r];
    }
    for (int step = 0; step < training.steps; ++step) {
      const Batch batch = batch_of(step, total, training.type);
      zero(optimizer, model, training.how);
      const at::Tensor x = batch.x.slice(0, begin, begin + training.samples[rank]);
      const at::Tensor loss = loss_of(model(x), batch.y.slice(0, begin, begin + training.samples[rank]));
      EXPECT_EQ(training.samples[rank] == 0, std::isnan(loss.item<double>()));
      loss.backward();
      optimizer.step();
    }
    results[rank] = copies(model.parameters());
    EXPECT_EQ(model.stats().steps, training.steps);
    EXPECT_GT(model.stats().buckets, 1);
  });
  return results;
}

TEST(DdpTest, RanksEqualOneProcessEvenAndUneven) {
  const std::vector<std::vector<std::int64_t>> splits = {{6, 6},    {4, 4, 4}, {3, 3, 3, 3}, {9, 2},
                                                         {1, 5, 2}, {0, 7},    {5, 0, 1, 0}};
  for (const auto& split : splits) {
    for (const Zero how : {Zero::ToNone, Zero::InPlace}) {
      const Training training{.samples = split, .how = how};
      SCOPED_TRACE(::testing::PrintToString(split));
      const auto reference = train_in_one_process(training);
      const auto ranks = train_on_threads(training);
      for (const auto& rank : ranks) expect_close(rank, reference, 1e-11);
      for (const auto& rank : ranks) expect_equal(rank, ranks[0]);
    }
  }
}

TEST(DdpTest, TwoRunsAreEqualToTheBit) {
  const Training training{.samples = {5, 3, 7}, .type = at::kFloat};
  const auto first = train_on_threads(training);
  const auto second = train_on_threads(training);
  for (std::size_t rank = 0; rank < first.size(); ++rank) expect_equal(first[rank], second[rank]);
}

// ------------------------------------------------------------------------------------------ where gradients are
// written

class CollectiveLog : public Observer {
 public:
  void on_collective(const CollectiveEvent& event) override {
    const std::scoped_lock lock(mutex_);
    if (event.operation == "all_reduce") (event.zero_copy ? zero_copy : staged)++;
  }
  void on_bucket_ready(const BucketEvent&) override { ++buckets_ready; }

  int zero_copy = 0;
  int staged = 0;
  int buckets_ready = 0;

 private:
  std::mutex mutex_;
};

// Counts the operators that a thread runs.
class OperatorCount {
 public:
  OperatorCount() {
    counts_ = &mine_;
    handle_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback([](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
          ++(*counts_)[function.name()];
          return nullptr;
        }));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  OperatorCount(const OperatorCount&) = delete;
  OperatorCount& operator=(const OperatorCount&) = delete;
  int operator[](const char* name) { return mine_[name]; }

 private:
  static thread_local std::map<std::string, int>* counts_;
  std::map<std::string, int> mine_;
  at::CallbackHandle handle_ = 0;
};
thread_local std::map<std::string, int>* OperatorCount::counts_ = nullptr;

TEST(DdpTest, EachGradientIsWrittenOnceIntoItsBucketAndReducedThere) {
  for (const Zero how : {Zero::ToNone, Zero::InPlace}) {
    run_on_threads(2, [&](Communicator comm) {
      CollectiveLog log;
      // What is smaller than some KiB travels beside its announcement; real buckets are read where they lie.
      DistributedDataParallelOptions options = {.bucket_bytes = 1 << 18, .first_bucket_bytes = 1 << 14};
      options.observer = &log;
      Mlp net = with_values(Mlp(at::kDouble, 256), 0);
      DistributedDataParallel model(net, comm, options);
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      const auto parameters = model.parameters();
      std::map<std::string, const void*> places;
      for (int step = 0; step < 5; ++step) {
        const Batch batch = batch_of(step + comm.rank(), 4);
        const at::Tensor loss = loss_of(model(batch.x), batch.y);
        zero(optimizer, model, how);
        const nn::ReducerStats before = model.stats();
        log.zero_copy = log.staged = log.buckets_ready = 0;
        comm.set_observer(&log);
        {
          OperatorCount count;
          loss.backward();
          // Assigned once where there was no gradient, added once where there was one; never cloned, never moved.
          const bool fresh = how == Zero::ToNone || step == 0;
          const int all = static_cast<int>(parameters.size());
          EXPECT_EQ(count["aten::copy_"], fresh ? all : 0);
          EXPECT_EQ(count["aten::add_"], fresh ? 0 : all);
          EXPECT_EQ(count["aten::clone"], 0);
          EXPECT_EQ(model.stats().gradients_written - before.gradients_written, fresh ? all : 0);
          EXPECT_EQ(model.stats().gradients_moved, before.gradients_moved);
        }
        comm.set_observer(nullptr);
        EXPECT_EQ(log.zero_copy, model.stats().buckets);
        EXPECT_EQ(log.staged, 0);
        EXPECT_EQ(log.buckets_ready, model.stats().buckets);
        EXPECT_GT(model.stats().buckets, 1);
        optimizer.step();
        for (const auto& item : net->named_parameters()) {
          const nn::BucketSlot slot = model.slot_of(item.key());
          const void* const data = item.value().grad().data_ptr();
          EXPECT_EQ(data, static_cast<const char*>(slot.begin) + slot.offset);
          EXPECT_LE(slot.offset + item.value().grad().nbytes(), slot.bytes);
          if (step == 0) continue;  // the order is rebuilt after the first backward
          if (step == 1) places[item.key()] = data;
          EXPECT_EQ(places[item.key()], data) << item.key();
        }
      }
    });
  }
}

TEST(DdpTest, BucketsAreRebuiltInTheOrderInWhichGradientsCome) {
  struct BackwardsImpl : torch::nn::Module {
    BackwardsImpl() {
      for (int i = 0; i < 4; ++i) {
        parts.push_back(register_parameter("p" + std::to_string(i), at::ones({8}, at::kDouble)));
      }
    }
    at::Tensor forward(const at::Tensor& x) {  // the last registered is used first, so its gradient comes last
      at::Tensor y = x;
      for (std::size_t i = parts.size(); i-- > 0;) y = y * parts[i];
      return y;
    }
    std::vector<at::Tensor> parts;
  };
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<BackwardsImpl>();
    DistributedDataParallel<BackwardsImpl> model(net, comm, {.bucket_bytes = 64, .first_bucket_bytes = 64});
    EXPECT_EQ(model.slot_of("p3").bucket, 0);
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      model(at::full({2, 8}, comm.rank() + 1.0, at::kDouble)).mean().backward();
    }
    for (int i = 0; i < 4; ++i) EXPECT_EQ(model.slot_of("p" + std::to_string(i)).bucket, i);
    for (const at::Tensor& part : net->parts) {
      EXPECT_TRUE(at::allclose(part.grad(), at::full({8}, 1.5 / 8, at::kDouble)));
    }
  });
}

// A gradient that the user puts into .grad is honoured: it is moved into the bucket and added to.
TEST(DdpTest, GradientsThatWereThereBeforeAreAddedTo) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    DistributedDataParallel model(net, comm, small_buckets());
    Mlp reference = with_values(Mlp(), 0);
    for (at::Tensor& parameter : reference->parameters()) parameter.mutable_grad() = at::ones_like(parameter);
    const Batch batch = batch_of(1, 6);
    for (int step = 0; step < 2; ++step) {
      loss_of(reference->forward(batch.x), batch.y).backward();
      loss_of(model(batch.x.slice(0, comm.rank() * 3, comm.rank() * 3 + 3)),
              batch.y.slice(0, comm.rank() * 3, comm.rank() * 3 + 3))
          .backward();
      for (std::size_t i = 0; i < net->parameters().size(); ++i) {
        EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-11));
      }
    }
  });
}

TEST(DdpTest, TheUsersHooksOnParametersRunOnceInBothWays) {
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<MlpImpl>();
    with_values(Mlp(net), 0);
    int calls = 0;
    net->last->bias.register_hook([&calls](const at::Tensor& gradient) {
      ++calls;
      return gradient * 0 + 7;
    });
    DistributedDataParallel model(net, comm);
    for (int step = 0; step < 2; ++step) {
      if (step == 1) net->last->bias.mutable_grad().zero_();
      const Batch batch = batch_of(step, 4);
      loss_of(model(batch.x), batch.y).backward();
      EXPECT_EQ(calls, step + 1);
      EXPECT_TRUE(at::equal(net->last->bias.grad(), at::full({3}, 7.0, at::kDouble)));
    }
  });
}

// ------------------------------------------------------------------------------------------ accumulation

TEST(DdpTest, AccumulationEqualsTheBigBatch) {
  for (const Zero how : {Zero::ToNone, Zero::InPlace}) {
    run_on_threads(2, [&](Communicator comm) {
      Mlp net = with_values(Mlp(), 0);
      Mlp reference = with_values(Mlp(), 0);
      DistributedDataParallel model(net, comm, small_buckets());
      torch::optim::SGD optimizer(model.parameters(), 0.1);
      // Rank 0 takes 3 micro-batches of 2, rank 1 3 of 4.
      const std::int64_t rows = 2 * (comm.rank() + 1);
      for (int step = 0; step < 3; ++step) {
        const Batch batch = batch_of(step, 18);
        for (at::Tensor& parameter : reference->parameters()) parameter.mutable_grad().reset();
        loss_of(reference->forward(batch.x), batch.y).backward();

        zero(optimizer, model, how);
        const std::int64_t base = comm.rank() * 6;
        CollectiveLog log;
        comm.set_observer(&log);
        for (int micro = 0; micro < 3; ++micro) {
          const at::Tensor x = batch.x.slice(0, base + micro * rows, base + (micro + 1) * rows);
          const at::Tensor y = batch.y.slice(0, base + micro * rows, base + (micro + 1) * rows);
          if (micro < 2) {
            const auto guard = model.no_sync();
            (loss_of(model(x), y) / 3).backward();
            EXPECT_EQ(log.zero_copy + log.staged, 0);
          } else {
            (loss_of(model(x), y) / 3).backward();
          }
        }
        comm.set_observer(nullptr);
        for (std::size_t i = 0; i < net->parameters().size(); ++i) {
          EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-11)) << i;
        }
      }
      EXPECT_EQ(model.stats().steps, 3);
    });
  }
}

TEST(DdpTest, AnEmptyMicroBatchDoesNoHarm) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    Mlp reference = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm, small_buckets());
    const Batch batch = batch_of(0, 8);
    loss_of(reference->forward(batch.x), batch.y).backward();
    {
      const auto guard = model.no_sync();
      loss_of(model(batch.x.slice(0, comm.rank() * 4, comm.rank() * 4 + 4)),
              batch.y.slice(0, comm.rank() * 4, comm.rank() * 4 + 4))
          .backward();
    }
    loss_of(model(at::empty({0, 5}, at::kDouble)), at::empty({0, 3}, at::kDouble)).backward();
    for (std::size_t i = 0; i < net->parameters().size(); ++i) {
      EXPECT_TRUE(at::allclose(net->parameters()[i].grad(), reference->parameters()[i].grad(), 1e-11));
    }
  });
}

TEST(DdpTest, SampleCountsCanBeGiven) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm);
    model.set_sample_count(comm.rank() == 0 ? 3 : 1);
    const at::Tensor out = model(at::ones({2, 5}, at::kDouble));
    (out.sum() * 0 + net->last->bias.sum() * (comm.rank() + 1)).backward();
    EXPECT_TRUE(at::allclose(net->last->bias.grad(), at::full({3}, (3 * 1 + 1 * 2) / 4.0, at::kDouble)));
    EXPECT_THROW(model.set_sample_count(-1), Error);
  });
}

// Two forwards into one loss: both count. One whose graph was dropped does not.
TEST(DdpTest, OnlyForwardsThatTakePartCount) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm);
    const auto rows = [](std::int64_t n) { return at::ones({n, 5}, at::kDouble); };
    (void)model(rows(100));  // a batch that is thrown away
    const at::Tensor one = model(rows(comm.rank() == 0 ? 2 : 1));
    const at::Tensor two = model(rows(comm.rank() == 0 ? 4 : 1));
    ((one.sum() + two.sum()) * 0 + net->last->bias.sum() * (comm.rank() + 1)).backward();
    EXPECT_TRUE(at::allclose(net->last->bias.grad(), at::full({3}, (6 * 1 + 2 * 2) / 8.0, at::kDouble)));
  });
}

// ------------------------------------------------------------------------------------------ unused parameters

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (const char* name : {"common", "left", "right", "never"}) {
      at::Tensor parameter = register_parameter(name, at::ones({3}, at::kFloat));
      parts[name] = parameter;
    }
  }
  at::Tensor forward(const at::Tensor& x, bool left) { return x * parts["common"] * parts[left ? "left" : "right"]; }
  std::map<std::string, at::Tensor> parts;
};

TEST(DdpTest, UnusedParameters) {
  run_on_threads(3, [](Communicator comm) {
    auto net = std::make_shared<BranchesImpl>();
    DistributedDataParallel<BranchesImpl> model(net, comm, {.bucket_bytes = 16, .first_bucket_bytes = 16});
    const auto gradient = [&](const char* name) { return net->parts[name].grad(); };
    const at::Tensor x = at::full({2, 3}, 6.0);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model(x, comm.rank() == 1).mean().backward();  // left on rank 1 only
      EXPECT_TRUE(at::allclose(gradient("common"), at::full({3}, 2.0)));
      EXPECT_TRUE(at::allclose(gradient("left"), at::full({3}, 2.0 / 3)));
      EXPECT_TRUE(at::allclose(gradient("right"), at::full({3}, 4.0 / 3)));
      EXPECT_FALSE(gradient("never").defined());
    }
    // Unused everywhere, but with a gradient from before: that stays, to the bit.
    const at::Tensor kept = at::tensor({0.1F, 0.2F, 0.3F});
    net->parts["never"].mutable_grad() = kept.clone();
    model.zero_grad();
    net->parts["never"].mutable_grad() = kept.clone();
    model(x, true).mean().backward();
    EXPECT_TRUE(at::equal(gradient("never"), kept));
    EXPECT_FALSE(gradient("right").defined());
    EXPECT_TRUE(at::allclose(gradient("left"), at::full({3}, 2.0)));
    // The only rank that uses it has no samples: nobody does.
    model.zero_grad();
    model(comm.rank() == 1 ? at::empty({0, 3}) : x, comm.rank() == 1).mean().backward();
    EXPECT_FALSE(gradient("left").defined());
    EXPECT_TRUE(at::allclose(gradient("right"), at::full({3}, 2.0)));
  });
}

TEST(DdpTest, ABackwardThatTouchesNoParameterTakesPart) {
  struct PassingImpl : torch::nn::Module {
    PassingImpl() { weight = register_parameter("weight", at::ones({2})); }
    at::Tensor forward(const at::Tensor& x, bool use) { return use ? x * weight : x * 2; }
    at::Tensor weight;
  };
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<PassingImpl>();
    DistributedDataParallel<PassingImpl> model(net, comm);
    const at::Tensor x = at::full({1, 2}, 4.0).requires_grad_();
    model(x, comm.rank() == 0).sum().backward();
    EXPECT_TRUE(at::equal(net->weight.grad(), at::full({2}, 2.0)));
  });
}

// ------------------------------------------------------------------------------------------ uneven ends

TEST(DdpTest, StepsWithoutSamplesKeepRanksInStepUntilAllHaveEnded) {
  std::vector<std::vector<at::Tensor>> results(3);
  run_on_threads(3, [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm, small_buckets());
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 2 + 2 * comm.rank(); ++step) {
      model.zero_grad();
      const Batch batch = batch_of(step, 3);
      loss_of(model(batch.x.slice(0, comm.rank(), comm.rank() + 1)), batch.y.slice(0, comm.rank(), comm.rank() + 1))
          .backward();
      optimizer.step();
    }
    model.zero_grad();
    while (model.step_without_samples()) {
      optimizer.step();
      model.zero_grad();
    }
    for (const at::Tensor& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    EXPECT_EQ(model.stats().steps, 7);
    results[static_cast<std::size_t>(comm.rank())] = copies(model.parameters());
  });
  Mlp net = with_values(Mlp(), 0);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    const int first = step < 2 ? 0 : step < 4 ? 1 : 2;  // of the ranks still active
    const Batch batch = batch_of(step, 3);
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    loss_of(net->forward(batch.x.slice(0, first)), batch.y.slice(0, first)).backward();
    optimizer.step();
  }
  for (const auto& rank : results) {
    expect_equal(rank, results[0]);
    expect_close(rank, copies(net->parameters()), 1e-11);
  }
}

TEST(DdpTest, JoinServesTheOthersAndTakesTheirModel) {
  std::vector<std::vector<at::Tensor>> results(3);
  run_on_threads(3, [&](Communicator comm) {
    torch::nn::BatchNorm1d norm(5);
    DistributedDataParallel model(norm, comm);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const int steps = comm.rank() == 0   ? 1
                      : comm.rank() == 1 ? 4
                                         : 3;  // rank 0 ends first: buffers come from rank 1 then
    for (int step = 0; step < steps; ++step) {
      model.zero_grad();
      at::pow(model(pattern({6, 5}, step + comm.rank() * 0.3, at::kFloat)), 3).mean().backward();
      optimizer.step();
    }
    EXPECT_EQ(model.join(), 1);
    for (const auto& item : model.state_dict())
      results[static_cast<std::size_t>(comm.rank())].push_back(item.value().clone());
    // Training goes on together: same buckets, same model.
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      at::pow(model(pattern({6, 5}, step + comm.rank() * 0.3, at::kFloat)), 3).mean().backward();
    }
    const at::Tensor gradient = norm->weight.grad().clone();
    broadcast(comm, gradient).wait();
    EXPECT_TRUE(at::equal(gradient, norm->weight.grad()));
    EXPECT_EQ(model.join(), 0);  // nothing is missing now
  });
  for (const auto& rank : results) expect_equal(rank, results[1]);
  EXPECT_EQ(results[0].back().item<std::int64_t>(), 4);  // num_batches_tracked
}

// ------------------------------------------------------------------------------------------ types, buffers, names

TEST(DdpTest, MixedTypes) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        for (int i = 0; i < 3; ++i) {
          parts.push_back(register_parameter("p" + std::to_string(parts.size()), at::ones({4}, type)));
        }
      }
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor sum = x.to(at::kDouble).sum() * 0;
      for (const at::Tensor& part : parts) sum = sum + (x.to(part.scalar_type()) * part).to(at::kDouble).mean();
      return sum;
    }
    std::vector<at::Tensor> parts;
  };
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<MixedImpl>();
    DistributedDataParallel<MixedImpl> model(net, comm, {.bucket_bytes = 20, .first_bucket_bytes = 8});
    EXPECT_GE(model.stats().buckets, 8);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model(at::full({comm.rank() == 0 ? 1 : 3, 4}, comm.rank() == 0 ? 8.0 : 16.0)).backward();
      for (const at::Tensor& part : net->parts) {
        EXPECT_EQ(part.grad().scalar_type(), part.scalar_type());
        EXPECT_TRUE(at::equal(part.grad().to(at::kDouble), at::full({4}, (1 * 2.0 + 3 * 4.0) / 4, at::kDouble)));
      }
    }
  });
}

TEST(DdpTest, BuffersAreRankZerosInSynchronisingForwards) {
  run_on_threads(2, [](Communicator comm) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(5).momentum(0.5));
    norm->running_mean.fill_(comm.rank() * 10.0);
    DistributedDataParallel model(norm, comm);
    EXPECT_TRUE(at::equal(norm->running_mean, at::zeros({5})));  // at construction
    const at::Tensor x = at::full({4, 5}, comm.rank() == 0 ? 2.0 : 100.0) + pattern({4, 5}, 0, at::kFloat) * 0;
    // Two forwards before one backward: the second one's broadcast must not invalidate the first.
    (model(x).sum() + model(x).sum()).backward();
    EXPECT_TRUE(at::allclose(norm->running_mean, at::full({5}, comm.rank() == 0 ? 1.5 : 50.5)));
    {
      const at::NoGradGuard no_grad;  // does not communicate: one rank alone may evaluate
      if (comm.rank() == 1) (void)model(x);
      const auto guard = model.no_sync();
      const at::AutoGradMode grad(true);
      if (comm.rank() == 1) (void)model(x);
    }
    model.sync_buffers();
    EXPECT_TRUE(at::allclose(norm->running_mean, at::full({5}, 1.5)));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 2);
  });
}

TEST(DdpTest, NamesHaveNoPrefix) {
  run_on_threads(1, [](Communicator comm) {
    Mlp net;
    DistributedDataParallel model(net, comm);
    EXPECT_EQ(model.module().get(), net.get());
    EXPECT_TRUE(model.state_dict().contains("first.weight"));
    EXPECT_EQ(model.state_dict().size(), 6U);
    EXPECT_TRUE(model.state_dict()["last.bias"].is_same(net->last->bias));
  });
}

// ------------------------------------------------------------------------------------------ what is refused

template <class Make>
void expect_models_refused(Make make, const std::vector<std::string>& words) {
  std::atomic<int> refused = 0;
  run_on_threads(3, [&](Communicator comm) {
    try {
      DistributedDataParallel model(make(comm.rank()), comm);
      ADD_FAILURE() << "accepted on rank " << comm.rank();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks " << word;
      }
      ++refused;
    }
    comm.barrier().wait();  // the world stays usable
  });
  EXPECT_EQ(refused, 3);
}

TEST(DdpTest, ModelsThatDifferAreRefusedByNameOnEveryRank) {
  expect_models_refused([](int rank) { return Mlp(at::kDouble, rank == 2 ? 8 : 9); },
                        {"rank 0", "'first.weight' of Double [9, 5]", "rank 2", "[8, 5]"});
  expect_models_refused([](int rank) { return Mlp(rank == 1 ? at::kFloat : at::kDouble); },
                        {"Double", "Float", "rank 1"});
  expect_models_refused(
      [](int rank) {
        Mlp net;
        if (rank == 1) net->register_buffer("extra", at::zeros({2}));
        return net;
      },
      {"nothing more", "buffer 'extra'"});
  expect_models_refused(
      [](int rank) {
        Mlp net;
        if (rank == 1) net->second->bias.set_requires_grad(false);
        return net;
      },
      {"'second.bias'", "frozen"});
}

template <class Body>
void expect_error(ErrorCode code, const std::string& word, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "no error about " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(DdpTest, MisuseIsAnErrorAndNotASilence) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    auto model = std::make_unique<DistributedDataParallel<MlpImpl>>(net, comm);
    const Batch batch = batch_of(0, 4);
    expect_error(ErrorCode::InvalidArgument, "already wrapped", [&] { DistributedDataParallel again(net, comm); });
    expect_error(ErrorCode::InvalidArgument, "without a forward through",
                 [&] { loss_of(net->forward(batch.x), batch.y).backward(); });
    const at::Tensor loss = loss_of((*model)(batch.x), batch.y);
    loss.backward({}, /*retain_graph=*/true);
    expect_error(ErrorCode::InvalidArgument, "second backward", [&] { loss.backward(); });
    expect_error(ErrorCode::InvalidArgument, "no_sync", [&] {
      const auto guard = model->no_sync();
      model->step_without_samples();
    });
    // A gradient without a reducer is autograd's business again.
    model.reset();
    net->zero_grad();
    loss_of(net->forward(batch.x), batch.y).backward();
    EXPECT_TRUE(net->last->bias.grad().defined());
    DistributedDataParallel anew(net, comm);
    loss_of(anew(batch.x), batch.y).backward();
  });
  run_on_threads(1, [](Communicator comm) {
    Mlp net;
    for (at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
    expect_error(ErrorCode::InvalidArgument, "no parameter", [&] { DistributedDataParallel model(net, comm); });
    EXPECT_THROW((DistributedDataParallel<MlpImpl>(nullptr, comm)), Error);
  });
}

struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("the user's own");
  }
};

struct FailingNetImpl : torch::nn::Module {
  FailingNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 4));
    last = register_module("last", torch::nn::Linear(4, 3));
  }
  at::Tensor forward(const at::Tensor& x, bool fail) {
    const at::Tensor hidden = first(x);
    return last(fail ? Failing::apply(hidden) : hidden);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};

TEST(DdpTest, AFailedBackwardIsNotForgotten) {
  std::atomic<int> aborted = 0;
  const auto body = [&](Communicator comm) {
    DistributedDataParallel<FailingNetImpl> model(std::make_shared<FailingNetImpl>(), comm);
    const at::Tensor x = at::ones({2, 5});
    if (comm.rank() == 0) {
      const at::Tensor loss = model(x, false).sum();
      expect_error(ErrorCode::Aborted, "as the message says", [&] { loss.backward(); });  // its peer never comes
      ++aborted;
      return;
    }
    const at::Tensor loss = model(x, true).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model(x, false); });
    comm.abort("as the message says");
  };
  run_on_threads(2, body);
  EXPECT_EQ(aborted, 1);
}

TEST(DdpTest, ErrorsOfReductionsComeOutOfBackward) {
  std::atomic<int> mismatches = 0;
  run_on_threads(2, [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm);
    const Batch batch = batch_of(0, 4);
    const at::Tensor loss = loss_of(model(batch.x), batch.y);
    try {
      if (comm.rank() == 0) {
        loss.backward();
      } else {
        comm.barrier().wait();
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::Mismatch) ++mismatches;
    }
    model.zero_grad();
    comm.barrier().wait();
  });
  EXPECT_EQ(mismatches, 2);
}

}  // namespace
}  // namespace cohort
