// The sampler's promises as properties over any size, world, batch and position; and the arithmetic beside it (bucket
// plans, averages, learning rates) that needs no model.
#include <cohort/error.h>
#include <cohort/torch/data.h>
#include <cohort/torch/elastic.h>
#include <cohort/torch/metrics.h>
#include <cohort/torch/optim.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>
#include <torch/data/dataloader.h>
#include <torch/data/datasets/base.h>
#include <torch/data/samplers/sequential.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <numeric>
#include <set>
#include <sstream>

namespace cohort {
namespace {

using data::DistributedSampler;
using data::DistributedSamplerOptions;
using data::Remainder;

std::vector<DistributedSampler> samplers_of(std::int64_t size, DistributedSamplerOptions options) {
  std::vector<DistributedSampler> samplers;
  for (options.rank = 0; options.rank < options.world_size; ++options.rank) samplers.emplace_back(size, options);
  return samplers;
}

// Takes one step on all ranks; false at the end of the epoch, which has to be the same on all. Appends what they drew.
bool step_all(std::vector<DistributedSampler>& samplers, std::vector<std::int64_t>& drawn) {
  std::vector<std::size_t> sizes;
  std::int64_t global = 0;
  for (DistributedSampler& sampler : samplers) {
    const auto batch = sampler.next_batch();
    if (!batch) break;
    sizes.push_back(batch->size());
    drawn.insert(drawn.end(), batch->begin(), batch->end());
    global = sampler.global_batch();
    sampler.step();
  }
  RC_ASSERT(sizes.empty() || sizes.size() == samplers.size());
  if (sizes.empty()) return false;
  const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
  RC_ASSERT(*most - *least <= 1U);
  RC_ASSERT(std::accumulate(sizes.begin(), sizes.end(), std::size_t{0}) == static_cast<std::size_t>(global));
  return true;
}

DistributedSamplerOptions any_options() {
  return {.batch_size = *rc::gen::inRange<std::int64_t>(1, 20),
          .shuffle = *rc::gen::arbitrary<bool>(),
          .seed = *rc::gen::arbitrary<std::uint64_t>(),
          .world_size = *rc::gen::inRange(1, 9)};
}

RC_GTEST_PROP(SamplerTest, EverySampleExactlyOnceInTheSameNumberOfSteps, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(0, 300);
  const DistributedSamplerOptions options = any_options();
  auto samplers = samplers_of(size, options);
  for (DistributedSampler& sampler : samplers) sampler.set_epoch(3);
  std::vector<std::int64_t> drawn;
  std::int64_t steps = 0;
  while (step_all(samplers, drawn)) ++steps;
  RC_ASSERT(steps == samplers[0].steps_per_epoch());
  RC_ASSERT(samplers[0].steps_left() == 0);
  // The permutation is the same for every world: the ranks' parts, in order, are the sequence of a single rank.
  std::vector<std::int64_t> expected(static_cast<std::size_t>(size));
  std::iota(expected.begin(), expected.end(), std::int64_t{0});
  if (options.shuffle) expected = data::permutation(size, options.seed, 3);
  RC_ASSERT(drawn == expected);
  std::sort(expected.begin(), expected.end());
  for (std::size_t i = 0; i < expected.size(); ++i) RC_ASSERT(expected[i] == static_cast<std::int64_t>(i));
}

RC_GTEST_PROP(SamplerTest, GoesOnInAnyOtherWorldWithExactlyTheSamplesNotYetUsed, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(1, 300);
  DistributedSamplerOptions options = any_options();
  auto before = samplers_of(size, options);
  std::vector<std::int64_t> drawn;
  const auto steps = *rc::gen::inRange<std::int64_t>(0, before[0].steps_per_epoch() + 1);
  for (std::int64_t i = 0; i < steps; ++i) RC_ASSERT(step_all(before, drawn));
  // Batches that a prefetching loader has drawn, and no optimizer has used, are not lost.
  for (DistributedSampler& sampler : before) (void)sampler.next_batch();
  const data::SamplerState state = before[static_cast<std::size_t>(*rc::gen::inRange(0, options.world_size))].state();
  RC_ASSERT(state.cursor == static_cast<std::int64_t>(drawn.size()));

  options.world_size = *rc::gen::inRange(1, 9);
  options.batch_size = *rc::gen::inRange<std::int64_t>(1, 20);
  options.seed += 1;  // the state's seed counts
  auto after = samplers_of(size, options);
  for (DistributedSampler& sampler : after) sampler.load_state(state);
  while (step_all(after, drawn)) {
  }
  std::sort(drawn.begin(), drawn.end());
  RC_ASSERT(drawn.size() == static_cast<std::size_t>(size));
  for (std::size_t i = 0; i < drawn.size(); ++i) RC_ASSERT(drawn[i] == static_cast<std::int64_t>(i));
}

RC_GTEST_PROP(SamplerTest, SharesOutTheRestOfItsEpochAmongAnyWorlds, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(1, 300);
  const DistributedSamplerOptions options = any_options();
  auto samplers = samplers_of(size, options);
  const std::int64_t global = *rc::gen::arbitrary<bool>() ? options.batch_size * options.world_size : 0;
  std::vector<std::int64_t> drawn;
  for (const int world_size : *rc::gen::container<std::vector<int>>(rc::gen::inRange(1, 9))) {
    const data::SamplerState state = samplers.back().state();
    samplers.resize(static_cast<std::size_t>(std::min<std::ptrdiff_t>(std::ssize(samplers), world_size)), samplers[0]);
    while (std::ssize(samplers) < world_size) {  // a new rank gets the others' state
      samplers.emplace_back(size, options);
      samplers.back().load_state(state);
    }
    for (int rank = 0; rank < world_size; ++rank) {
      (void)samplers[static_cast<std::size_t>(rank)].next_batch();  // drawn early, and dropped
      samplers[static_cast<std::size_t>(rank)].set_world(rank, world_size, global);
    }
    const std::int64_t left = size - samplers[0].cursor();
    const std::int64_t full = global > 0 ? global : options.batch_size * world_size;
    RC_ASSERT(samplers[0].steps_left() == (left + full - 1) / full);
    const auto before = std::ssize(drawn);
    if (step_all(samplers, drawn)) RC_ASSERT(std::ssize(drawn) - before == std::min(full, left));
  }
  while (step_all(samplers, drawn)) {
  }
  std::vector<std::int64_t> expected(static_cast<std::size_t>(size));
  std::iota(expected.begin(), expected.end(), std::int64_t{0});
  if (options.shuffle) expected = data::permutation(size, options.seed, 0);
  RC_ASSERT(drawn == expected);
}

/// A training until it is killed: numbers of ranks and of samples per step, steps up to its checkpoint, and steps after
/// the checkpoint, which are lost.
struct Life {
  int world_size = 1;
  std::int64_t batch_size = 1;
  std::int64_t saved = 0, lost = 0;
};

RC_GTEST_PROP(SamplerTest, AnySequenceOfWorldsBatchesAndKillsUsesEverySampleOncePerEpoch, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(1, 200);
  const auto epochs = *rc::gen::inRange<std::int64_t>(1, 4);
  auto lives = *rc::gen::container<std::vector<Life>>(rc::gen::build<Life>(
      rc::gen::set(&Life::world_size, rc::gen::inRange(1, 9)), rc::gen::set(&Life::batch_size, rc::gen::inRange(1, 20)),
      rc::gen::set(&Life::saved, rc::gen::inRange(0, 30)), rc::gen::set(&Life::lost, rc::gen::inRange(0, 10))));
  lives.push_back({.world_size = *rc::gen::inRange(1, 9), .saved = std::numeric_limits<std::int64_t>::max()});
  std::vector<std::vector<std::int64_t>> used(static_cast<std::size_t>(epochs) + 1);
  data::SamplerState checkpoint{.seed = *rc::gen::arbitrary<std::uint64_t>(), .size = size};
  for (const Life& life : lives) {
    auto samplers = samplers_of(size, {.batch_size = life.batch_size, .world_size = life.world_size});
    for (DistributedSampler& sampler : samplers) sampler.load_state(checkpoint);
    const auto step = [&](std::vector<std::int64_t>& drawn) {
      if (step_all(samplers, drawn)) return true;
      for (DistributedSampler& sampler : samplers) sampler.next_epoch();
      return false;
    };
    for (std::int64_t i = 0; i < life.saved && samplers[0].epoch() < epochs; ++i)
      step(used[static_cast<std::size_t>(samplers[0].epoch())]);
    checkpoint = samplers.back().state();
    std::vector<std::int64_t> lost;
    for (std::int64_t i = 0; i < life.lost && samplers[0].epoch() < epochs; ++i) step(lost);
  }
  RC_ASSERT(checkpoint.epoch == epochs);
  RC_ASSERT(used.back().empty());
  for (std::int64_t epoch = 0; epoch < epochs; ++epoch)
    RC_ASSERT(used[static_cast<std::size_t>(epoch)] == data::permutation(size, checkpoint.seed, epoch));
}

RC_GTEST_PROP(SamplerTest, RemaindersCanBeDroppedOrPadded, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(1, 200);
  DistributedSamplerOptions options = any_options();
  const std::int64_t full = options.batch_size * options.world_size;
  for (const Remainder remainder : {Remainder::Drop, Remainder::Pad}) {
    options.remainder = remainder;
    auto samplers = samplers_of(size, options);
    std::vector<std::int64_t> drawn;
    std::int64_t steps = 0;
    while (step_all(samplers, drawn)) ++steps;
    RC_ASSERT(steps == samplers[0].steps_per_epoch());
    RC_ASSERT(static_cast<std::int64_t>(drawn.size()) == steps * full);
    const std::int64_t whole = size / full * full;
    RC_ASSERT(steps * full == (remainder == Remainder::Drop || whole == size ? whole : whole + full));
  }
}

TEST(SamplerTest, ThePermutationIsDefinedToTheLastBit) {
  // From tools independent of this code: an implementation of the documented algorithm in Python.
  EXPECT_EQ(data::permutation(10, 0, 0), (std::vector<std::int64_t>{5, 2, 9, 6, 1, 8, 7, 3, 0, 4}));
  EXPECT_EQ(data::permutation(10, 42, 7), (std::vector<std::int64_t>{4, 9, 2, 1, 6, 3, 0, 8, 5, 7}));
  EXPECT_NE(data::permutation(100, 1, 0), data::permutation(100, 0, 1));
}

TEST(SamplerTest, AStepOfTheOptimizerMayBeOfSeveralBatches) {
  DistributedSampler sampler(20, {.batch_size = 3, .seed = 5});
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(sampler.next_batch());
  sampler.step(4);
  EXPECT_EQ(sampler.cursor(), 12);
  EXPECT_EQ(sampler.global_batch(), 3);
  EXPECT_THROW(sampler.step(2), Error) << "one is drawn";
  EXPECT_THROW(sampler.step(0), Error);
  sampler.step();
  EXPECT_EQ(sampler.cursor(), 15);
}

TEST(SamplerTest, EpochsFollowEachOtherUnderADataLoader) {
  DistributedSampler mine(10, {.batch_size = 3, .seed = 5});
  DistributedSampler loaders = mine;  // the loader's copy: torch takes samplers by value
  std::vector<std::size_t> first;
  std::vector<std::size_t> second;
  loaders.reset();
  while (true) {
    auto batch = loaders.next(3);
    if (!batch.has_value()) break;
    first.insert(first.end(), batch->begin(), batch->end());
  }
  for (int i = 0; i < 4; ++i) mine.step();
  EXPECT_EQ(mine.cursor(), 10);
  EXPECT_THROW(mine.step(), Error);
  loaders.reset();
  EXPECT_EQ(mine.epoch(), 1);
  while (true) {
    auto batch = loaders.next(3);
    if (!batch.has_value()) break;
    second.insert(second.end(), batch->begin(), batch->end());
  }
  EXPECT_EQ(first.size(), 10U);
  EXPECT_EQ(second.size(), 10U);
  EXPECT_NE(first, second);
  loaders.reset();  // drawn to the end, without any step()
  EXPECT_EQ(mine.epoch(), 2);
}

// A data set whose samples are their own numbers.
struct Numbers : torch::data::datasets::BatchDataset<Numbers, std::vector<std::size_t>> {
  std::vector<std::size_t> get_batch(at::ArrayRef<std::size_t> indices) override { return indices.vec(); }
  DistributedSampler::OptionalSize size() const override { return 10; }
};

TEST(SamplerTest, DrivesTorchsDataLoaderWithPrefetchAndResume) {
  DistributedSampler sampler(10, {.batch_size = 2, .seed = 5, .rank = 1, .world_size = 2});
  const auto loader = torch::data::make_data_loader(Numbers(), sampler, torch::data::DataLoaderOptions(2).workers(1));
  std::vector<std::size_t> seen;
  std::size_t steps = 0;
  for (const std::vector<std::size_t>& batch : *loader) {
    seen.insert(seen.end(), batch.begin(), batch.end());
    sampler.step();
    ++steps;
    EXPECT_EQ(sampler.cursor(), std::min<std::int64_t>(10, static_cast<std::int64_t>(steps) * 4));
    if (steps == 2) break;  // further batches have been drawn already
  }
  const data::SamplerState state = sampler.state();
  EXPECT_EQ(state.cursor, 8);

  DistributedSampler later(10, {.batch_size = 2, .rank = 1, .world_size = 2});
  later.load_state(state);
  const auto rest = torch::data::make_data_loader(Numbers(), later, torch::data::DataLoaderOptions(2));
  for (const std::vector<std::size_t>& batch : *rest) {
    seen.insert(seen.end(), batch.begin(), batch.end());
    later.step();
    ++steps;
  }
  EXPECT_EQ(steps, 3U);
  const auto order = data::permutation(10, 5, 0);
  EXPECT_EQ(seen, (std::vector<std::size_t>{static_cast<std::size_t>(order[2]), static_cast<std::size_t>(order[3]),
                                            static_cast<std::size_t>(order[6]), static_cast<std::size_t>(order[7]),
                                            static_cast<std::size_t>(order[9])}));
}

TEST(SamplerTest, PrefetchedBatchesAreDrawnAgainAfterAReset) {
  DistributedSampler sampler(10, {.batch_size = 2, .seed = 5});
  const auto first = sampler.next_batch();
  const auto second = sampler.next_batch();
  (void)sampler.next_batch();
  sampler.step();
  sampler.reset();
  EXPECT_EQ(sampler.next_batch(), second);
  EXPECT_NE(first, second);
}

TEST(SamplerTest, SavesAndLoadsThroughTorchArchives) {
  DistributedSampler sampler(10, {.batch_size = 2, .seed = 5});
  sampler.set_epoch(4);
  (void)sampler.next_batch();
  sampler.step();
  torch::serialize::OutputArchive out;
  sampler.save(out);
  std::stringstream bytes;
  out.save_to(bytes);
  torch::serialize::InputArchive in;
  in.load_from(bytes);
  DistributedSampler other(10);
  other.load(in);
  EXPECT_EQ(other.state(), sampler.state());
  EXPECT_EQ(other.cursor(), 2);
  DistributedSampler another(11);
  EXPECT_THROW(another.load_state(sampler.state()), Error);
}

TEST(SamplerTest, AnElasticStateStepsOverWhatTheProgramHasNot) {
  DistributedSampler sampler(100, {.batch_size = 10, .shuffle = false});
  elastic::State state;
  state.add("sampler", sampler);
  run_on_threads(1, [&](const Communicator& comm) {
    elastic::World world(comm, 0);
    state.enter(world);
    for (int i = 0; i < 4; ++i) (void)sampler.next_batch();  // ahead
    state.step();
    EXPECT_EQ(sampler.cursor(), 10);
    sampler.step();
    sampler.step();
    state.step();
    EXPECT_EQ(sampler.cursor(), 30);
    sampler.next_epoch();
    for (int i = 0; i < 4; ++i) (void)sampler.next_batch();
    state.step();
    EXPECT_EQ(sampler.cursor(), 10);
    sampler.step();
    EXPECT_TRUE(state.leave(Error(ErrorCode::PeerLost, "lost")));
    EXPECT_EQ(sampler.cursor(), 10);
    state.enter(world);
    (void)sampler.next_batch();
    state.step();
    EXPECT_EQ(sampler.cursor(), 20);
  });
}

TEST(SamplerTest, SharesDivideEachStepAndLeaveTheOrder) {
  DistributedSamplerOptions options{.batch_size = 16, .seed = 5, .world_size = 2};
  std::vector<std::vector<std::int64_t>> steps[2];  // with even shares, and with uneven ones
  for (const int uneven : {0, 1}) {
    options.shares = uneven != 0 ? "3,1" : "even";
    auto samplers = samplers_of(100, options);
    while (true) {
      std::vector<std::int64_t> step;
      std::vector<std::size_t> sizes;
      for (DistributedSampler& sampler : samplers) {
        const auto batch = sampler.next_batch();
        if (!batch) break;
        sizes.push_back(batch->size());
        step.insert(step.end(), batch->begin(), batch->end());
        sampler.step();
      }
      if (sizes.empty()) break;
      if (uneven != 0) {
        EXPECT_EQ(sizes, (step.size() == 32 ? std::vector<std::size_t>{24, 8} : std::vector<std::size_t>{3, 1}));
      }
      steps[uneven].push_back(step);
    }
  }
  EXPECT_EQ(steps[0], steps[1]);
  EXPECT_THROW(samplers_of(100, options).front().set_world(0, 3), Error);
  options.shares = "1,1,1";
  EXPECT_THROW(DistributedSampler(100, options), Error);
}

TEST(SamplerTest, RefusesWhatHasNoMeaning) {
  EXPECT_THROW(DistributedSampler(-1), Error);
  EXPECT_THROW(DistributedSampler(1, {.batch_size = 0}), Error);
  EXPECT_THROW(DistributedSampler(1, {.rank = 2, .world_size = 2}), Error);
  DistributedSampler sampler(5);
  EXPECT_THROW(sampler.load_state({.seed = 0, .epoch = 0, .cursor = 6, .size = 5}), Error);
  EXPECT_THROW(sampler.set_epoch(-1), Error);
}

TEST(WarmupTest, ClimbsFromTheRateOfOneRankToThatOfAll) {
  std::vector<at::Tensor> parameters = {at::zeros({1})};
  torch::optim::SGD optimizer(parameters, torch::optim::SGDOptions(0.1));
  const auto rate = [&] { return optimizer.param_groups()[0].options().get_lr(); };
  optim::WarmupScheduler schedule(
      optimizer, {.world_size = 4, .warmup_steps = 3, .decay = [](std::int64_t step) { return step < 5 ? 1.0 : 0.5; }});
  std::vector<double> rates;
  for (int i = 0; i < 6; ++i) {
    rates.push_back(rate());
    schedule.step();
  }
  const std::vector<double> expected = {0.1, 0.2, 0.3, 0.4, 0.4, 0.2};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_NEAR(rates[i], expected[i], 1e-12) << i;
  schedule.set_step(1);
  EXPECT_NEAR(rate(), 0.2, 1e-12);
  EXPECT_EQ(schedule.steps(), 1);
  EXPECT_DOUBLE_EQ(optim::scale_factor(optim::Scaling::SquareRoot, 9), 3.0);
  EXPECT_DOUBLE_EQ(optim::scale_factor(optim::Scaling::None, 9), 1.0);
  EXPECT_THROW(optim::scale_factor(optim::Scaling::None, 0), Error);
}

TEST(MetricsTest, AveragesOfOtherNamesAreAMismatch) {
  run_on_threads(2, [](Communicator comm) {
    const std::vector<std::string> names = {"loss", "accuracy"};
    const metrics::Averages averages(comm.rank() == 0 ? names : std::vector(names.rbegin(), names.rend()));
    try {
      (void)averages.reduce(comm);
      ADD_FAILURE() << "sums of different names were added";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch) << error.what();
    }
  });
}

TEST(MetricsTest, AveragesEqualThoseOfOneProcess) {
  run_on_threads(3, [](Communicator comm) {
    metrics::Averages averages({"loss", "accuracy"});
    const std::int64_t samples = comm.rank() == 1 ? 0 : comm.rank() + 1;  // 1, 0, 3
    averages.add("loss", samples == 0 ? std::nan("") : comm.rank() + 1.0, samples);
    averages.add("accuracy", 0.5, samples);
    const auto all = averages.reduce(comm);
    EXPECT_DOUBLE_EQ(all.at("loss").value, (1.0 * 1 + 3.0 * 3) / 4);
    EXPECT_DOUBLE_EQ(all.at("loss").count, 4.0);
    EXPECT_DOUBLE_EQ(all.at("accuracy").value, 0.5);
    EXPECT_DOUBLE_EQ(averages.local().at("loss").count, static_cast<double>(samples));
    EXPECT_THROW(averages.add("los", 1, 1), Error);
    EXPECT_DOUBLE_EQ(metrics::average(comm, comm.rank(), 1).value, 1.0);
  });
}

TEST(MetricsTest, ResultsOfAnEvaluationAreAveragedByName) {
  run_on_threads(3, [](Communicator comm) {
    const double rank = comm.rank();
    const std::map<std::string, double> plain = {{"loss", rank}, {"accuracy", 2 * rank}};
    EXPECT_EQ(metrics::average(comm, plain), (std::map<std::string, double>{{"accuracy", 2.0}, {"loss", 1.0}}));

    const double nothing = std::nan("");
    const auto weighted = metrics::average(
        comm, {{"loss", {comm.rank() == 1 ? nothing : rank + 1, comm.rank() == 1 ? 0.0 : rank + 1}}, {"none", {}}});
    EXPECT_DOUBLE_EQ(weighted.at("loss").value, (1.0 * 1 + 3.0 * 3) / 4);
    EXPECT_DOUBLE_EQ(weighted.at("loss").count, 4.0);
    EXPECT_DOUBLE_EQ(weighted.at("none").value, 0.0);
    EXPECT_TRUE(metrics::average(comm, std::map<std::string, double>()).empty());

    const auto refusal = [&](const std::function<void()>& call) {
      try {
        call();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Mismatch);
        return std::string(error.what());
      }
      return std::string("nothing was thrown");
    };
    EXPECT_NE(refusal([&] {
                metrics::average(comm, {{comm.rank() == 1 ? "accuracy" : "loss", 1.0}});
              }).find("rank 0 has ['loss'], rank 1 ['accuracy']"),
              std::string::npos);
    EXPECT_NE(refusal([&] {
                if (comm.rank() == 2)
                  metrics::average(comm, {{"loss", {1.0, 1.0}}});
                else
                  metrics::average(comm, {{"loss", 1.0}});
              }).find("rank 0 has ['loss'], rank 2 ['loss (Mean)']"),
              std::string::npos);
    comm.barrier().wait();  // The communicator is still usable.
  });
}

// A data set that every rank opens: sample i is 10 * i.
struct Tens : torch::data::datasets::Dataset<Tens, std::int64_t> {
  explicit Tens(std::size_t count) : samples(count) {}
  std::int64_t get(std::size_t index) override { return 10 * static_cast<std::int64_t>(index); }
  decltype(std::declval<const torch::data::datasets::Dataset<Tens, std::int64_t>&>().size()) size() const override {
    return samples;
  }
  std::size_t samples;
};

TEST(ScatterDataset, PartsAreTheRootsAndCoverAll) {
  for (const std::int64_t size : {0, 2, 7, 9}) {
    for (const bool equal : {true, false}) {
      for (const bool shuffle : {true, false}) {
        std::vector<std::vector<std::int64_t>> parts(3);
        run_on_threads(3, [&](Communicator comm) {
          // Options of ranks other than the root have no effect.
          data::ScatterDatasetOptions options{.root = 1, .shuffle = shuffle, .seed = 5, .force_equal_length = equal};
          if (comm.rank() != 1) options = {.root = 1, .shuffle = !shuffle, .force_equal_length = !equal};
          parts[static_cast<std::size_t>(comm.rank())] =
              data::scatter_index(comm.rank() == 1 ? size : -1, comm, options);
        });
        std::vector<std::int64_t> order = data::permutation(size, 5, 0);
        if (!shuffle) std::iota(order.begin(), order.end(), 0);
        std::vector<std::int64_t> all;
        for (std::int64_t rank = 0; rank < 3; ++rank) {
          const auto& part = parts[static_cast<std::size_t>(rank)];
          if (equal) {
            EXPECT_EQ(part, std::vector<std::int64_t>(order.begin() + size * rank / 3,
                                                      order.begin() + size * rank / 3 + (size + 2) / 3));
          }
          all.insert(all.end(), part.begin(), part.end());
        }
        if (!equal) {
          EXPECT_EQ(all, order);
        }
        EXPECT_EQ(std::set<std::int64_t>(all.begin(), all.end()).size(), static_cast<std::size_t>(size));
      }
    }
  }
}

TEST(ScatterDataset, OfTensorsThatOnlyTheRootHas) {
  run_on_threads(3, [](Communicator comm) {
    std::vector<at::Tensor> all;
    if (comm.rank() == 2) {
      all = {at::arange(14, at::kDouble).reshape({2, 7}).t(), at::arange(7, at::kLong), at::ones({7, 0}),
             at::arange(7, at::kLong).to(at::kBool)};
    }
    const data::ScatterDatasetOptions options{.root = 2, .shuffle = true, .seed = 3, .force_equal_length = false};
    const auto parts = data::scatter_dataset(all, comm, options);
    const auto rows = at::tensor(data::scatter_index(7, comm, options), at::kLong);
    ASSERT_EQ(parts.size(), 4U);
    EXPECT_EQ(parts[0].size(0), comm.rank() == 0 ? 3 : 2);
    EXPECT_TRUE(at::equal(parts[0], at::arange(14, at::kDouble).reshape({2, 7}).t().index_select(0, rows)));
    EXPECT_TRUE(at::equal(parts[1], rows));
    EXPECT_EQ(parts[2].sizes(), (std::vector<std::int64_t>{rows.size(0), 0}));
    EXPECT_TRUE(at::equal(parts[3], rows.to(at::kBool)));
    EXPECT_TRUE(data::scatter_dataset(std::vector<at::Tensor>(), comm).empty());
  });
}

TEST(ScatterDataset, OfADataSetThatEveryRankOpens) {
  run_on_threads(2, [](Communicator comm) {
    auto part = data::scatter_dataset(Tens(5), comm, {.shuffle = true, .seed = 1});
    ASSERT_EQ(part.size(), 3U);
    std::vector<std::int64_t> seen;
    auto loader = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(part, 2);
    for (const auto& batch : *loader) seen.insert(seen.end(), batch.begin(), batch.end());
    std::vector<std::int64_t> expected = part.indices();
    for (std::int64_t& sample : expected) sample *= 10;
    EXPECT_EQ(seen, expected);
  });
}

TEST(ScatterDataset, WhatCannotBeScatteredIsRefusedOnEveryRank) {
  run_on_threads(2, [](Communicator comm) {
    const auto refused = [](ErrorCode code, const std::string& text, const std::function<void()>& call) {
      try {
        call();
        ADD_FAILURE() << "nothing was thrown";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), code);
        EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
      }
    };
    const bool root = comm.rank() == 0;
    refused(ErrorCode::InvalidArgument, "-1 samples", [&] { data::scatter_index(root ? -1 : 4, comm); });
    refused(ErrorCode::InvalidArgument, "root 2", [&] { data::scatter_index(4, comm, {.root = 2}); });
    refused(ErrorCode::Mismatch, "rank 1 has 4 samples", [&] { data::scatter_dataset(Tens(root ? 5 : 4), comm); });
    refused(ErrorCode::InvalidArgument, "tensor 1 has 2 rows and tensor 0 has 3", [&] {
      data::scatter_dataset(root ? std::vector<at::Tensor>{at::ones(3), at::ones(2)} : std::vector<at::Tensor>(), comm);
    });
    refused(ErrorCode::InvalidArgument, "no rows", [&] { data::scatter_dataset({at::ones({})}, comm); });
    comm.barrier().wait();  // The communicator is still usable.
  });
}

TEST(TensorTest, CollectivesOnTensors) {
  run_on_threads(2, [](Communicator comm) {
    at::Tensor sum = empty_in(comm, {3, 2});
    sum.fill_(comm.rank() + 1.0);
    all_reduce(comm, sum).wait();
    EXPECT_TRUE(at::equal(sum, at::full({3, 2}, 3.0, at::kFloat)));

    const at::Tensor flags = at::full({3}, comm.rank() == 1, at::kBool);
    broadcast(comm, flags, {.root = 1}).wait();
    EXPECT_TRUE(flags.all().item<bool>());

    const at::Tensor gathered = all_gather(comm, at::full({2}, comm.rank(), at::kLong));
    EXPECT_TRUE(at::equal(gathered, at::arange(2, at::kLong).unsqueeze(1).expand({2, 2})));

    const at::Tensor part = at::zeros({2});
    reduce_scatter(comm, at::arange(4, at::kFloat), part).wait();
    EXPECT_TRUE(at::equal(part, at::arange(4, at::kFloat).slice(0, comm.rank() * 2, comm.rank() * 2 + 2) * 2));

    std::vector<at::Tensor> many = {at::full({5}, comm.rank(), at::kDouble),
                                    at::full({2, 3}, comm.rank(), at::kLong).t(),
                                    at::full({}, comm.rank() == 1, at::kBool), at::empty({0})};
    broadcast_parameters(comm, many, {.root = 1, .chunk_bytes = 7});
    EXPECT_TRUE(at::equal(many[0], at::ones({5}, at::kDouble)));
    EXPECT_TRUE(at::equal(many[1], at::ones({3, 2}, at::kLong)));
    EXPECT_TRUE(many[2].item<bool>());
  });
  EXPECT_THROW(to_buffer(at::zeros({2, 3}).t()), Error);
  EXPECT_THROW(to_buffer(at::empty({2}, at::kComplexHalf)), Error);  // No collective knows it.
  EXPECT_THROW(to_buffer(at::Tensor()), Error);
}

TEST(TensorTest, MemoryOutlivesTheWorld) {
  at::Tensor tensor;
  run_on_threads(1, [&](Communicator comm) { tensor = empty_in(comm, {1000}).fill_(2); });
  EXPECT_EQ(tensor.sum().item<float>(), 2000.0F);
}

RC_GTEST_PROP(SamplerTest, AVirtualRankGetsWhatARankOfAsManyWould, ()) {
  const auto size = *rc::gen::inRange<std::int64_t>(0, 200);
  DistributedSamplerOptions options = any_options();
  options.remainder = *rc::gen::element(Remainder::Keep, Remainder::Drop, Remainder::Pad);
  const int virtual_ranks = options.world_size;
  auto expected = samplers_of(size, options);
  options.virtual_ranks = virtual_ranks;
  options.world_size = *rc::gen::inRange(1, virtual_ranks + 1);
  auto samplers = samplers_of(size, options);
  RC_ASSERT(samplers[0].steps_per_epoch() == expected[0].steps_per_epoch());
  const auto moves_at = *rc::gen::inRange<std::int64_t>(0, 5);
  for (std::int64_t step = 0; step < expected[0].steps_per_epoch(); ++step) {
    if (step == moves_at) {  // goes on in another world, from a position within a step
      if (samplers[0].next_batch() && virtual_ranks > 1) samplers[0].step();
      const data::SamplerState at = expected[0].state();
      options.world_size = *rc::gen::inRange(1, virtual_ranks + 1);
      samplers = samplers_of(size, options);
      for (DistributedSampler& sampler : samplers) sampler.load_state(at);
    }
    int part = 0;
    for (DistributedSampler& sampler : samplers) {
      RC_ASSERT(sampler.cursor() == expected[0].cursor());
      const int parts =
          virtual_ranks / options.world_size + (&sampler - samplers.data() < virtual_ranks % options.world_size);
      for (int own = 0; own < parts; ++own, ++part) {
        RC_ASSERT(sampler.cursor() == expected[0].cursor());
        RC_ASSERT(sampler.next_batch() == expected[static_cast<std::size_t>(part)].next_batch());
        RC_ASSERT(sampler.virtual_rank() == part);
        RC_ASSERT(sampler.global_batch() == expected[static_cast<std::size_t>(part)].global_batch());
        sampler.step();
      }
    }
    RC_ASSERT(part == virtual_ranks);
    for (DistributedSampler& sampler : expected) sampler.step();
  }
  for (DistributedSampler& sampler : samplers) {
    RC_ASSERT(!sampler.next_batch());
    RC_ASSERT(sampler.virtual_rank() == -1);
  }
}

}  // namespace
}  // namespace cohort
