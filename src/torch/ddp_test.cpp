// DistributedDataParallel on ranks that are threads: averages, buckets, accumulation. (tests/multiproc has the same
// with processes.)
#include <cohort/error.h>
#include <cohort/torch/data.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/tensor.h>

#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "comm/api/communicator_impl.h"
#include "torch/test_models.h"

#include <cmath>
#include <deque>
#include <map>
#include <mutex>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

enum class Zero { InPlace, ToNone };

void zero(torch::optim::Optimizer& optimizer, DistributedDataParallel<MlpImpl>& model, Zero how) {
  if (how == Zero::ToNone) return model.zero_grad();
  // As Optimizer::zero_grad() of 1.13 does.
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor& parameter : group.params()) {
      if (!parameter.grad().defined()) continue;
      parameter.mutable_grad().detach_();
      parameter.mutable_grad().zero_();
    }
  }
}

struct Training {
  std::vector<std::int64_t> samples;  // samples of each rank, in every step
  int steps = 4;
  Zero how = Zero::ToNone;
  at::ScalarType type = at::kDouble;
  std::int64_t hidden = 17;
};

std::vector<at::Tensor> train_in_one_process(const Training& training) {
  Mlp net = with_values(Mlp(training.type, training.hidden), 0);
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

std::vector<std::vector<at::Tensor>> train_on_threads(const Training& training,
                                                      const DistributedDataParallelOptions& options = small_buckets()) {
  const int world = static_cast<int>(training.samples.size());
  std::vector<std::vector<at::Tensor>> results(training.samples.size());
  run_on_threads(world, [&](Communicator comm) {
    const auto rank = static_cast<std::size_t>(comm.rank());
    Mlp net = with_values(Mlp(training.type, training.hidden), comm.rank() * 100.0);  // all get rank 0's values
    DistributedDataParallel model(net, comm, by_rows(options));
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

void run_on_hosts(const std::vector<int>& hosts, const std::function<void(Communicator)>& body) {
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(true), hosts, static_cast<int>(hosts.size()), {}),
                          body);
}

/// Trains on a rank that has its own host. At each of `begins`, a new model gets the old one's residuals.
std::vector<at::Tensor> train_as(Communicator comm, const DistributedDataParallelOptions& options, int steps,
                                 const std::vector<int>& begins) {
  Mlp net = with_values(Mlp(at::kFloat, 150), 0);
  std::map<std::string, at::Tensor> residuals;
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.002));
  for (std::size_t part = 0; part < begins.size(); ++part) {
    DistributedDataParallel model(net, comm, options);
    model.load_residuals(residuals);
    for (int step = begins[part]; step < (part + 1 < begins.size() ? begins[part + 1] : steps); ++step) {
      const Batch batch = batch_of(step, 4 * comm.size(), at::kFloat);
      model.zero_grad();
      const auto own = [&](const at::Tensor& all) { return all.slice(0, 4 * comm.rank(), 4 * comm.rank() + 4); };
      loss_of(model(own(batch.x)), own(batch.y)).backward();
      optimizer.step();
    }
    residuals = model.residuals();
  }
  return copies(net->parameters());
}

TEST(DdpTest, GradientsMayTravelInOtherFormatsBetweenHosts) {
  constexpr int kSteps = 6;
  std::vector<at::Tensor> exact;
  run_on_hosts({0, 1}, [&](Communicator comm) {
    auto result = train_as(comm, small_buckets(), kSteps, {0});
    if (comm.rank() == 0) exact = result;
  });
  const std::pair<WireFormat, double> cases[] = {
      {WireFormat::BFloat16, 2e-3}, {WireFormat::Int8, 2e-3}, {WireFormat::Int4, 4e-2}};
  for (const auto& [format, tolerance] : cases) {
    SCOPED_TRACE(to_string(format));
    DistributedDataParallelOptions options = small_buckets();
    options.wire_format = format;
    std::vector<std::vector<at::Tensor>> ranks(4), again(4);
    const std::vector<std::vector<int>> layouts = {{0, 1}, {0, 0, 1, 1}};
    for (const auto& hosts : layouts) {
      run_on_hosts(hosts, [&](Communicator comm) {
        ranks[static_cast<std::size_t>(comm.rank())] = train_as(comm, options, kSteps, {0});
        // A model that is wrapped anew, and gets the old residuals, continues as if it had not been wrapped anew.
        again[static_cast<std::size_t>(comm.rank())] = train_as(comm, options, kSteps, {0, 2, 3});
      });
      for (std::size_t rank = 1; rank < hosts.size(); ++rank) {
        expect_equal(ranks[rank], ranks[0]);
        expect_equal(again[rank], again[0]);
      }
      if (hosts.size() > 2) continue;
      expect_close(ranks[0], exact, tolerance);
      expect_equal(again[0], ranks[0]);
    }
  }
}

TEST(DdpTest, ResidualsAreOfThisRankAndByName) {
  run_on_hosts({0, 1}, [](Communicator comm) {
    DistributedDataParallelOptions options = small_buckets();
    options.wire_format = WireFormat::Int4;
    DistributedDataParallel model(with_values(Mlp(at::kFloat, 17), 0), comm, options);
    const Batch batch = batch_of(comm.rank(), 4, at::kFloat);
    loss_of(model(batch.x), batch.y).backward();
    auto residuals = model.residuals();
    EXPECT_EQ(residuals.size(), model.parameters().size());
    double lost = 0;
    for (const auto& [name, values] : residuals) {
      EXPECT_EQ(name.find("residual."), 0U);
      lost += values.abs().sum().item<double>();
    }
    EXPECT_GT(lost, 0);
    residuals.begin()->second = at::zeros({3});
    EXPECT_THROW(model.load_residuals(residuals), Error);
    options.error_feedback = false;
    EXPECT_TRUE(DistributedDataParallel(with_values(Mlp(at::kFloat, 17), 0), comm, options).residuals().empty());
    options.wire_format = WireFormat::BFloat16;
    options.error_feedback = true;
    EXPECT_THROW(DistributedDataParallel(with_values(Mlp(at::kFloat, 17), 0), comm, options), Error);
  });
}

TEST(DdpTest, TwoRunsAreEqualToTheBit) {
  for (const std::int64_t hidden :
       {17, 1500}) {  // 1500 x 1500 floats: a large gradient, reduced where autograd made it
    const Training training{.samples = {5, 3, 7}, .type = at::kFloat, .hidden = hidden};
    const auto first = train_on_threads(training);
    const auto second = train_on_threads(training);
    for (std::size_t rank = 0; rank < first.size(); ++rank) expect_equal(first[rank], second[rank]);
  }
}

TEST(DdpTest, LargeGradientsOfRanksEqualOneProcess) {
  for (const std::vector<std::int64_t>& split : {std::vector<std::int64_t>{6, 6}, {1, 5, 2}, {0, 7}}) {
    for (const Zero how : {Zero::ToNone, Zero::InPlace}) {
      // Only one step, since with so many units rounding errors grow fast in training.
      const Training training{.samples = split, .steps = 1, .how = how, .hidden = 1100};
      const auto reference = train_in_one_process(training);
      const auto ranks = train_on_threads(training);
      for (const auto& rank : ranks) expect_close(rank, reference, 1e-10);
      for (const auto& rank : ranks) expect_equal(rank, ranks[0]);
    }
  }
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

// Counts the operators that this thread runs.
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
      // Buckets of a few KiB travel in their announcement; larger buckets, as here, are read where they lie.
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
          // Each gradient is assigned once if there was none, else added once. None is cloned or moved.
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
        EXPECT_EQ(log.staged, 1);  // only the flags' message is staged
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

TEST(DdpTest, LargeGradientsAreReducedWhereAutogradMadeThem) {
  run_on_threads(2, [&](Communicator comm) {
    Mlp net = with_values(Mlp(at::kDouble, 1100), 0);
    DistributedDataParallel model(net, comm);
    for (int step = 0; step < 3; ++step) {
      const Batch batch = batch_of(step + comm.rank(), 4);
      const at::Tensor loss = loss_of(model(batch.x), batch.y);
      model.zero_grad();
      OperatorCount count;
      loss.backward();
      EXPECT_EQ(count["aten::copy_"], static_cast<int>(model.parameters().size()) - 1);
      const nn::BucketSlot slot = model.slot_of("second.weight");
      EXPECT_EQ(net->second->weight.grad().data_ptr(), static_cast<const char*>(slot.begin) + slot.offset);
    }
  });
}

struct Looking : torch::autograd::FunctionPostHook {
  Looking(at::Tensor parameter, std::vector<at::Tensor>& seen) : parameter_(std::move(parameter)), seen_(seen) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& outputs,
                                            const torch::autograd::variable_list& /*inputs*/) override {
    seen_.push_back(parameter_.grad().clone());
    return outputs;
  }

 private:
  at::Tensor parameter_;
  std::vector<at::Tensor>& seen_;
};

TEST(DdpTest, AHookAfterTheAccumulationFindsALargeGradientInItsPlace) {
  run_on_threads(2, [&](Communicator comm) {
    Mlp net = with_values(Mlp(at::kDouble, 1100), 0);
    Mlp reference = with_values(Mlp(at::kDouble, 1100), 0);
    std::vector<at::Tensor> seen;
    const auto node = torch::autograd::impl::grad_accumulator(net->second->weight);
    node->add_post_hook(std::make_unique<Looking>(net->second->weight, seen));  // runs before ours: `.grad` is local
    DistributedDataParallel model(net, comm);
    for (int step = 0; step < 2; ++step) {
      const Batch batch = batch_of(step + comm.rank(), 4);
      model.zero_grad();
      loss_of(model(batch.x), batch.y).backward();
      reference->second->weight.mutable_grad().reset();
      loss_of(reference->forward(batch.x), batch.y).backward();
      ASSERT_EQ(seen.size(), static_cast<std::size_t>(step + 1));
      EXPECT_TRUE(at::equal(seen.back(), reference->second->weight.grad()));
      EXPECT_FALSE(at::equal(seen.back(), net->second->weight.grad()));
    }
  });
}

TEST(DdpTest, AccumulationEqualsTheBigBatch) {
  for (const auto& [how, hidden] : {std::pair(Zero::ToNone, 17), {Zero::InPlace, 17}, {Zero::ToNone, 1100}}) {
    run_on_threads(2, [&](Communicator comm) {
      Mlp net = with_values(Mlp(at::kDouble, hidden), 0);
      Mlp reference = with_values(Mlp(at::kDouble, hidden), 0);
      DistributedDataParallel model(net, comm, by_rows(small_buckets()));
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
    DistributedDataParallel model(net, comm, by_rows(small_buckets()));
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
    EXPECT_THROW(model.set_sample_count((std::int64_t{1} << 53) + 1), Error);
  });
}

// One permutation is cut into steps of all ranks, the last one uneven. Any number of ranks trains the same model.
// `ahead`: number of batches that are drawn early, as by the workers of a DataLoader.
std::vector<at::Tensor> train_with_sampler(Communicator comm, std::size_t ahead, std::int64_t micro_batches) {
  Mlp net = with_values(Mlp(), 0);
  data::DistributedSampler sampler(50, comm, {.batch_size = 12 / comm.size() / micro_batches});
  data::DistributedSampler validation(9, comm, {.batch_size = 1});
  DistributedDataParallelOptions options = small_buckets();
  options.sampler = &sampler;
  DistributedDataParallel model(net, comm, options);
  torch::optim::SGD optimizer(model.parameters(), 0.1);
  const Batch all = batch_of(3, 50);
  for (int epoch = 0; epoch < 2; ++epoch, sampler.next_epoch()) {
    std::deque<std::vector<std::int64_t>> drawn;
    for (std::int64_t number = 1;; ++number) {
      while (drawn.size() <= ahead) {
        const auto batch = sampler.next_batch();
        if (!batch) break;
        drawn.push_back(*batch);
      }
      if (drawn.empty()) break;
      (void)validation.next_batch();
      const at::Tensor rows = torch::tensor(drawn.front(), at::kLong);
      drawn.pop_front();
      const bool last = number % micro_batches == 0 || sampler.steps_left() == 1;
      std::optional<nn::NoSyncGuard> local;
      if (!last) local.emplace(model.no_sync());
      const at::Tensor loss = loss_of(model(all.x.index_select(0, rows)), all.y.index_select(0, rows));
      (loss / micro_batches).backward();
      sampler.step();
      if (!last) continue;
      optimizer.step();
      model.zero_grad();
    }
  }
  return copies(model.parameters());
}

TEST(DdpTest, ASamplerSaysHowManySamplesEachRankHas) {
  for (const std::int64_t micro_batches : {1, 2}) {
    std::vector<at::Tensor> alone;
    run_on_threads(1, [&](Communicator comm) { alone = train_with_sampler(comm, 0, micro_batches); });
    for (const int ranks : {2, 3}) {
      if (12 % (ranks * micro_batches) != 0) continue;
      for (const std::size_t ahead : {0U, 3U, 100U}) {
        std::vector<std::vector<at::Tensor>> results(static_cast<std::size_t>(ranks));
        run_on_threads(ranks, [&](Communicator comm) {
          results[static_cast<std::size_t>(comm.rank())] = train_with_sampler(comm, ahead, micro_batches);
        });
        for (const auto& result : results) expect_close(result, alone, 1e-11);
      }
    }
  }
}

TEST(DdpTest, ASamplerWithoutStepsIsRefusedBeforeItMatters) {
  run_on_threads(2, [](Communicator comm) {
    data::DistributedSampler sampler(21, comm, {.batch_size = 5});
    DistributedDataParallelOptions options;
    options.sampler = &sampler;
    DistributedDataParallel model(with_values(Mlp(), 0), comm, options);
    std::string error;
    int steps = 0;
    try {
      while (const auto batch = sampler.next_batch()) {
        model(at::ones({static_cast<std::int64_t>(batch->size()), 5}, at::kDouble)).sum().backward();
        ++steps;
      }
    } catch (const Error& raised) {
      error = raised.what();
    }
    EXPECT_EQ(steps, 2);  // of 10, 10 and 1 samples
    EXPECT_NE(error.find("call step once after each batch"), std::string::npos) << error;
    sampler.set_epoch(0);
    const at::Tensor loss = model(at::ones({1, 5}, at::kDouble)).sum();  // nothing is drawn: no error yet
    EXPECT_THROW(loss.backward(), Error);
  });
  run_on_threads(2, [](Communicator comm) {  // made with different sizes
    data::DistributedSampler sampler(20, comm, {.batch_size = 5 + comm.rank()});
    DistributedDataParallelOptions options;
    options.sampler = &sampler;
    EXPECT_THROW(DistributedDataParallel(Mlp(), comm, options), Error);
  });
}

TEST(DdpTest, ASamplerInAnotherEpochIsToldOnce) {
  // `late`: all ranks accumulate a batch of the epoch before, and rank 1 has no other. A step of two epochs is not
  // compared.
  for (const bool late : {false, true}) {
    ::testing::internal::CaptureStderr();
    run_on_threads(3, [late](Communicator comm) {
      data::DistributedSampler sampler(24, comm, {.batch_size = 2});
      DistributedDataParallelOptions options;
      options.sampler = &sampler;
      DistributedDataParallel model(with_values(Mlp(), 0), comm, options);
      const auto backward = [&] {
        sampler.next_batch();
        model(pattern({2, 5}, comm.rank())).sum().backward();
        sampler.step();
      };
      backward();
      if (late) {
        const nn::NoSyncGuard local = model.no_sync();
        backward();
      }
      if (comm.rank() == 1 || late) sampler.next_epoch();
      for (int step = 0; step < 3; ++step) {
        if (late && step == 0 && comm.rank() == 1) {
          EXPECT_TRUE(model.step_without_samples());
        } else {
          backward();
        }
      }
    });
    const std::string text = ::testing::internal::GetCapturedStderr();
    const std::string wanted = "the sampler is in epoch 0 on rank 0, and in epoch 1 on rank 1";
    const std::size_t at = text.find(wanted);
    EXPECT_EQ(at == std::string::npos, late) << text;
    EXPECT_EQ(text.rfind(wanted), at) << text;
  }
}

TEST(DdpTest, ParametersThatAreUnfrozenOrReplacedAreAveraged) {
  for (const bool replaced : {false, true}) {
    run_on_threads(2, [&](Communicator comm) {
      Mlp net = with_values(Mlp(), 0);
      if (!replaced) net->first->weight.set_requires_grad(false);
      DistributedDataParallel model(net, comm, small_buckets());
      for (int step = 0; step < 3; ++step) {
        if (step == 2 && !replaced) net->first->weight.set_requires_grad(true);
        if (step == 2 && replaced) {
          const torch::nn::Linear old = net->first;
          net->first = net->replace_module("first", torch::nn::Linear(5, 17));
          net->first->to(at::kDouble);
          const at::NoGradGuard no_grad;
          net->first->weight.copy_(old->weight);
          net->first->bias.copy_(old->bias);
        }
        model.zero_grad();
        net->first->weight.mutable_grad().reset();
        const Batch batch = batch_of(step + comm.rank(), 4);
        loss_of(model(batch.x), batch.y).backward();
      }
      Mlp reference = with_values(Mlp(), 0);
      for (int rank = 0; rank < 2; ++rank) {
        const Batch batch = batch_of(2 + rank, 4);
        (loss_of(reference->forward(batch.x), batch.y) / 2).backward();
      }
      EXPECT_TRUE(at::allclose(net->first->weight.grad(), reference->first->weight.grad(), 1e-11));
      EXPECT_EQ(model.stats().steps, 3);
    });
  }
}

}  // namespace
}  // namespace cohort
