// Virtual ranks: the tree as pure functions, and gradients that have the same bits for every number of ranks and hosts.
#include "train/gradients/virtual_ranks.h"

#include "comm/api/communicator_impl.h"
#include "comm/kernels/fold.h"
#include "train/gradients/test_autograd.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <mutex>
#include <new>
#include <numeric>
#include <random>
#include <set>

namespace cohort::gradients {
namespace {

int ceil_log2(int number) { return static_cast<int>(std::bit_width(static_cast<unsigned>(number - 1))); }

/// Folds by the tree, written down once more: `leaf` and `add` give the values.
template <class T>
T naive_tree(int begin, int end, const std::function<T(int)>& leaf, const std::function<T(T, T)>& add) {
  if (end - begin == 1) return leaf(begin);
  int half = 1;
  while (2 * half < end - begin) half *= 2;
  const T left = naive_tree(begin, begin + half, leaf, add);
  return add(left, naive_tree(begin + half, end, leaf, add));
}

TEST(VirtualTree, BlocksAndTheirSubtreesCoverAllVirtualRanks) {
  for (int virtual_ranks = 1; virtual_ranks <= 70; ++virtual_ranks) {
    for (int ranks = 1; ranks <= virtual_ranks; ++ranks) {
      int at = 0;
      std::vector<VirtualRange> counter;  // as ranks fold what comes
      for (int rank = 0; rank < ranks; ++rank) {
        const VirtualRange block = block_of(virtual_ranks, ranks, rank);
        ASSERT_EQ(block.begin, at);
        ASSERT_TRUE(block.count() == virtual_ranks / ranks ||
                    (block.count() == virtual_ranks / ranks + 1 && rank < virtual_ranks % ranks));
        std::vector<VirtualRange> stack;
        for (; at < block.end; ++at) {
          stack.push_back({at, at + 1});
          while (stack.size() > 1 && are_added(virtual_ranks, stack[stack.size() - 2], stack.back())) {
            stack[stack.size() - 2].end = stack.back().end;
            stack.pop_back();
          }
        }
        const auto found = subtrees_of(virtual_ranks, block);
        ASSERT_EQ(found, stack) << virtual_ranks << " over " << ranks;
        ASSERT_LE(static_cast<int>(found.size()), std::max(1, 2 * ceil_log2(virtual_ranks) - 2));
        counter.insert(counter.end(), found.begin(), found.end());
      }
      ASSERT_EQ(at, virtual_ranks);
      for (std::size_t i = 1; i < counter.size(); ++i) ASSERT_EQ(counter[i - 1].end, counter[i].begin);
    }
  }
  EXPECT_EQ(block_of(8, 3, 0).count(), 3);
  EXPECT_EQ(block_of(8, 3, 2), (VirtualRange{6, 8}));
  EXPECT_EQ(subtrees_of(7, {4, 7}), (std::vector<VirtualRange>{{4, 7}}));
  EXPECT_EQ(subtrees_of(8, {3, 6}), (std::vector<VirtualRange>{{3, 4}, {4, 6}}));
}

/// A sum of leaves without the order of its two parts.
std::string join(std::string a, std::string b) {
  const auto first = [](const std::string& text) { return std::stoi(text.substr(text.find_first_not_of('('))); };
  if (first(b) < first(a)) std::swap(a, b);
  return "(" + a + " " + b + ")";
}
std::string text_of_tree(int begin, int end) {
  return naive_tree<std::string>(
      begin, end, [](int leaf) { return std::to_string(leaf); }, join);
}

TEST(VirtualTree, APlainSumIsTakenWhereItsOrderIsTheTrees) {
  std::mt19937 random(3);
  int same = 0, different = 0;
  const auto check = [&](int virtual_ranks, const std::vector<int>& hosts) {
    const int ranks = static_cast<int>(hosts.size());
    std::vector<std::string> sums(static_cast<std::size_t>(*std::ranges::max_element(hosts)) + 1);
    bool whole = true;  // each block is one expression of the tree
    for (int rank = 0; rank < ranks; ++rank) {
      const VirtualRange block = block_of(virtual_ranks, ranks, rank);
      whole = whole && subtrees_of(virtual_ranks, block).size() == 1;
      const std::string own = text_of_tree(block.begin, block.end);
      std::string& sum = sums[static_cast<std::size_t>(hosts[static_cast<std::size_t>(rank)])];
      sum = sum.empty() ? own : join(sum, own);
    }
    std::string all = sums[0];
    if (sums.size() > comm::kFoldBlock) {
      all = naive_tree<std::string>(
          0, static_cast<int>(sums.size()), [&](int host) { return sums[static_cast<std::size_t>(host)]; }, join);
    } else {
      for (std::size_t host = 1; host < sums.size(); ++host) all = join(all, sums[host]);
    }
    const bool expected = whole && all == text_of_tree(0, virtual_ranks);
    ++(expected ? same : different);
    ASSERT_EQ(sum_has_order_of_tree(virtual_ranks, hosts), expected)
        << virtual_ranks << " " << ::testing::PrintToString(hosts);
  };
  for (int virtual_ranks = 1; virtual_ranks <= 70; ++virtual_ranks) {
    for (int ranks = 1; ranks <= virtual_ranks; ++ranks) {
      check(virtual_ranks, std::vector<int>(static_cast<std::size_t>(ranks), 0));
      for (int trial = 0; trial < 4; ++trial) {  // hosts numbered without gaps: alike, or at random
        const int each = 1 + static_cast<int>(random() % 4);
        const int count = (ranks + each - 1) / each;
        std::vector<int> hosts;
        hosts.reserve(static_cast<std::size_t>(ranks));
        for (int rank = 0; rank < ranks; ++rank)
          hosts.push_back(trial == 0 ? rank / each : trial == 1 ? rank % count : static_cast<int>(random()) % count);
        std::set<int> there;
        for (int& host : hosts) there.insert(host = std::abs(host));
        for (int& host : hosts) host = static_cast<int>(std::distance(there.begin(), there.find(host)));
        check(virtual_ranks, hosts);
      }
    }
  }
  EXPECT_GT(same, 50);
  EXPECT_GT(different, 50);
  EXPECT_TRUE(sum_has_order_of_tree(8, std::vector<int>{0, 0}));
  EXPECT_TRUE(sum_has_order_of_tree(8, std::vector<int>{1, 0}));
  EXPECT_TRUE(sum_has_order_of_tree(4, std::vector<int>{0, 0, 1, 1}));
  EXPECT_FALSE(sum_has_order_of_tree(4, std::vector<int>{0, 1, 0, 1}));
  EXPECT_FALSE(sum_has_order_of_tree(4, std::vector<int>{0, 0, 0, 0}));
  EXPECT_FALSE(sum_has_order_of_tree(8, std::vector<int>{0, 0, 0}));
  EXPECT_TRUE(sum_has_order_of_tree(64, [] {
    std::vector<int> each(64);
    std::iota(each.begin(), each.end(), 0);
    return each;
  }()));
}

TEST(VirtualTree, PartialSumsAreFoldedInItsOrder) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> values(-3, 3);
  constexpr std::int64_t kCount = 2500;
  const auto check = [&]<class T>(T, DType dtype, int virtual_ranks) {
    std::vector<std::vector<T>> leaves(static_cast<std::size_t>(virtual_ranks), std::vector<T>(kCount));
    for (auto& leaf : leaves)
      for (T& value : leaf) value = static_cast<T>(values(random));
    const auto tree = [&](VirtualRange range, std::size_t i) {
      return naive_tree<T>(
          range.begin, range.end, [&](int v) { return leaves[static_cast<std::size_t>(v)][i]; },
          [](T a, T b) { return a + b; });
    };
    for (int ranks = 1; ranks <= virtual_ranks; ++ranks) {
      std::vector<std::vector<T>> memory;
      std::vector<PartialSum> sums;
      for (int rank = 0; rank < ranks; ++rank) {
        for (const VirtualRange range : subtrees_of(virtual_ranks, block_of(virtual_ranks, ranks, rank))) {
          std::vector<T>& sum = memory.emplace_back(kCount);
          for (std::size_t i = 0; i < sum.size(); ++i) sum[i] = tree(range, i);
          sums.push_back({range, sum.data()});
        }
      }
      std::vector<T> result(kCount);
      fold_partial_sums(virtual_ranks, sums, result.data(), kCount, dtype, 1.0 / 3);
      for (std::size_t i = 0; i < result.size(); ++i)
        ASSERT_EQ(result[i], tree({0, virtual_ranks}, i) * static_cast<T>(1.0 / 3)) << virtual_ranks << " " << ranks;
      if (dtype != DType::Float32) continue;
      std::vector<std::uint16_t> half(kCount), brain(kCount);
      fold_partial_sums(virtual_ranks, sums, half.data(), kCount, DType::Float16, 1.0 / 3);
      fold_partial_sums(virtual_ranks, sums, brain.data(), kCount, DType::BFloat16, 1.0 / 3);
      for (std::size_t i = 0; i < result.size(); ++i) {
        ASSERT_EQ(half[i], narrow_to_float16(static_cast<float>(result[i])));
        const auto bits = std::bit_cast<std::uint32_t>(static_cast<float>(result[i]));
        ASSERT_EQ(brain[i], (bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
      }
    }
  };
  for (const int virtual_ranks : {1, 2, 3, 5, 7, 8, 13}) {
    check(0.0F, DType::Float32, virtual_ranks);
    check(0.0, DType::Float64, virtual_ranks);
  }
}

TEST(VirtualTree, Float16IsConvertedAsSumsRoundIt) {
  for (std::uint32_t bits = 0; bits <= 0xFFFF; ++bits) {
    const float wide = widen_float16(static_cast<std::uint16_t>(bits));
    ASSERT_EQ(narrow_to_float16(wide), std::isnan(wide) ? 0x7E00 : bits);
    if (std::isnan(wide)) continue;
    const auto value = static_cast<std::uint16_t>(bits);
    for (const float factor : {1.0F / 3, 1.0F / 4096, 37.0F}) {
      const void* const input = &value;
      std::uint16_t folded = 0;
      void* const output = &folded;
      comm::FoldJob job;
      job.dtype = DType::Float16;
      job.inputs = {&input, 1};
      job.outputs = {&output, 1};
      job.count = 1;
      job.postscale = factor;
      comm::fold(job);
      ASSERT_EQ(narrow_to_float16(wide * factor), folded) << bits << " * " << factor;
    }
  }
}

TEST(VirtualTree, MeansAreWeightedAndLeaveOutPartsWithoutSamples) {
  const double nan = std::numeric_limits<double>::quiet_NaN();
  EXPECT_DOUBLE_EQ(weighted_mean(std::vector{1.0, nan, 4.0}, std::vector{2.0, 0.0, 1.0}), 2);
  EXPECT_TRUE(std::isnan(weighted_mean(std::vector{1.0, 2.0}, std::vector{0.0, 0.0})));
  EXPECT_TRUE(std::isnan(weighted_mean(std::vector{1.0, nan}, std::vector{1.0, 1.0})));
}

TEST(VirtualTree, SeedsDiffer) {
  std::set<std::uint64_t> seeds;
  for (const std::uint64_t seed : {0U, 1U})
    for (const std::int64_t epoch : {0, 1})
      for (const std::int64_t cursor : {0, 1, 64})
        for (const int rank : {0, 1, 2}) seeds.insert(virtual_seed(seed, epoch, cursor, rank) & 0xFFFFFFFF);
  EXPECT_EQ(seeds.size(), 36U);
}

// ---------------------------------------------------------------------------------------------------- in a reducer

/// A training without weights: in each step the gradients of V virtual ranks, of all kinds.
struct Training {
  int virtual_ranks;
  int steps = 6;
  nn::DistributedDataParallelOptions options(nn::NonFinite how = nn::NonFinite::Ignore) const {
    nn::DistributedDataParallelOptions all{.bucket_bytes = 6000, .first_bucket_bytes = 100, .non_finite = how};
    all.virtual_ranks = virtual_ranks;
    return all;
  }
  /// Samples of a virtual rank: some have none, in one step all.
  std::int64_t samples(int step, int rank) const { return step == 5 ? 0 : (step * 3 + rank * 5) % 4; }
  bool uses(int step, int rank, std::size_t parameter) const {
    return parameter != 3 && (parameter != 2 || (step + rank) % 3 == 0);
  }
  float value(int step, int rank, std::size_t parameter, std::size_t i) const {
    if (i == 1) return -0.0F;  // has other bits where it is added to a zero
    return std::sin(static_cast<float>(step * 100 + rank * 17) + static_cast<float>(parameter * 5 + i * i) * 0.37F);
  }
};

std::vector<Parameter> parameters_of_all_kinds() {
  std::vector<Parameter> all{vector_of("a", 5),     vector_of("b", 1300),    vector_of("sometimes", 33),
                             vector_of("never", 2), vector_of("double", 20), vector_of("brain", 301),
                             vector_of("half", 77)};
  all[4].dtype = DType::Float64;
  all[5].dtype = DType::BFloat16;
  all[6].dtype = DType::Float16;
  return all;
}

void write(const Buffer& place, const std::function<float(std::size_t)>& value) {
  for (std::size_t i = 0; i < static_cast<std::size_t>(place.count); ++i) {
    const float one = value(i);
    if (place.dtype == DType::Float64) static_cast<double*>(place.data)[i] = static_cast<double>(one) / 3;
    if (place.dtype == DType::Float32) static_cast<float*>(place.data)[i] = one;
    if (place.dtype == DType::Float16) static_cast<std::uint16_t*>(place.data)[i] = narrow_to_float16(one);
    if (place.dtype == DType::BFloat16)
      static_cast<std::uint16_t*>(place.data)[i] = static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(one) >> 16);
  }
}

/// Trains a virtual rank, in two micro-batches if it has many samples.
void train_part(Fake& model, const Training& training, int step, int rank) {
  const std::int64_t samples = training.samples(step, rank);
  const int parts = samples == 3 ? 2 : 1;
  for (int part = 0; part < parts; ++part) {
    const bool local = part + 1 < parts;
    if (local) model.core.accumulation().enter_no_sync();
    model.begin(local ? 1 : samples - (parts - 1));
    for (const std::size_t parameter : {6U, 5U, 4U, 3U, 2U, 1U, 0U}) {
      if (!training.uses(step, rank, parameter)) continue;
      if (!model.core.receive(parameter)) continue;
      const Buffer place = model.core.place_of(parameter);
      if (!model.defined[parameter]) {
        write(place, [&](std::size_t i) { return training.value(step, rank, parameter, i); });
      } else {  // adds the second micro-batch, by doubling
        std::vector<std::byte> own(place.bytes());
        std::memcpy(own.data(), place.data, own.size());
        const void* const inputs[] = {own.data(), own.data()};
        void* const outputs[] = {place.data};
        comm::FoldJob job;
        job.dtype = place.dtype;
        job.inputs = inputs;
        job.outputs = outputs;
        job.count = place.count;
        comm::fold(job);
      }
      model.defined[parameter] = true;
      model.core.arrive(parameter);
    }
    model.end();
    if (local) model.core.accumulation().leave_no_sync();
  }
}

std::string bytes_of(Fake& model) {
  std::string all;
  for (std::size_t parameter = 0; parameter < model.core.parameter_count(); ++parameter) {
    all += model.defined[parameter] ? '1' : '0';
    const Buffer place = model.core.place_of(parameter);
    if (model.defined[parameter]) all.append(static_cast<const char*>(place.data), place.bytes());
  }
  return all;
}

/// The bytes of all averages, and of all losses.
std::string run_training(const Communicator& comm, const Training& training) {
  Fake model(comm, parameters_of_all_kinds(), training.options());
  const VirtualRange block = block_of(training.virtual_ranks, comm.size(), comm.rank());
  std::string all;
  for (int step = 0; step < training.steps; ++step) {
    if (step != 3) model.drop_all();  // step 3 adds to what was there
    for (int rank = block.begin; rank < block.end; ++rank) {
      EXPECT_FALSE(model.core.step_complete() && rank != block.begin);
      train_part(model, training, step, rank);
      EXPECT_EQ(model.core.step_complete(), rank + 1 == block.end);
      const std::int64_t samples = training.samples(step, rank);
      const double loss = samples == 0 ? std::nan("") : 1.0 / (3 + rank);
      const std::optional<double> mean = model.core.mean_loss(loss);
      EXPECT_EQ(mean.has_value(), rank + 1 == block.end);
      if (mean) all.append(reinterpret_cast<const char*>(&*mean), sizeof *mean);
    }
    all += bytes_of(model);
  }
  return all;
}

/// Runs on ranks that are threads, with a number of a host for each.
void run_on(const std::vector<int>& hosts, const std::function<void(Communicator)>& body) {
  const bool several = *std::ranges::max_element(hosts) > 0;
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(several), several ? hosts : std::vector<int>(),
                                                static_cast<int>(hosts.size()), {}),
                          body);
}

const std::vector<std::vector<int>> kWorlds = {{0},       {0, 0},       {0, 1},       {0, 0, 0},
                                               {0, 1, 1}, {0, 0, 1, 1}, {0, 1, 0, 1}, {0, 0, 0, 0, 0}};

TEST(VirtualRanksOfAReducer, GiveTheSameBitsOnAnyNumberOfRanksAndHosts) {
  for (const int virtual_ranks : {8, 7}) {
    std::string expected;
    for (const std::vector<int>& hosts : kWorlds) {
      if (virtual_ranks == 7 && hosts.size() % 2 == 0) continue;
      std::mutex mutex;
      run_on(hosts, [&](const Communicator& comm) {
        const std::string own = run_training(comm, {.virtual_ranks = virtual_ranks});
        const std::lock_guard lock(mutex);
        if (expected.empty()) expected = own;
        EXPECT_TRUE(own == expected) << virtual_ranks << " on " << ::testing::PrintToString(hosts);
      });
    }
    EXPECT_GT(expected.size(), 1000U);
  }
}

TEST(VirtualRanksOfAReducer, AverageBySamplesInTheOrderOfTheTree) {
  const Training training{.virtual_ranks = 7};
  run_on({0, 0, 0}, [&](const Communicator& comm) {
    Fake model(comm, {vector_of("a", 5), vector_of("b", 1300)}, training.options());
    const VirtualRange block = block_of(7, comm.size(), comm.rank());
    for (int rank = block.begin; rank < block.end; ++rank) {
      model.begin(1 + rank % 3);
      for (const std::size_t parameter : {1U, 0U}) {
        ASSERT_TRUE(model.core.receive(parameter));
        write(model.core.place_of(parameter), [&](std::size_t i) { return training.value(1, rank, parameter, i); });
        model.defined[parameter] = true;
        model.core.arrive(parameter);
      }
      model.end();
      EXPECT_EQ(model.defined[0], rank + 1 == block.end) << "gradients of earlier virtual ranks are gone";
    }
    for (std::size_t i = 0; i < 1300; ++i) {
      const float sum = naive_tree<float>(
          0, 7, [&](int rank) { return training.value(1, rank, 1, i) * static_cast<float>(1 + rank % 3); },
          [](float a, float b) { return a + b; });
      ASSERT_EQ(model.gradient(1)[i], sum * static_cast<float>(1.0 / 13));
    }
  });
}

TEST(VirtualRanksOfAReducer, NothingOfARefusedStepIsLeft) {
  // Step 1 is not finite on virtual rank 1, step 3 mixes declared and undeclared numbers of samples.
  std::string expected;
  for (const std::vector<int>& hosts : kWorlds) {
    std::mutex mutex;
    run_on(hosts, [&](const Communicator& comm) {
      const Training training{.virtual_ranks = 5};
      Fake model(comm, {vector_of("a", 5), vector_of("b", 1300)}, training.options(nn::NonFinite::Raise));
      const VirtualRange block = block_of(5, comm.size(), comm.rank());
      std::string all;
      for (int step = 0; step < 5; ++step) {
        model.drop_all();
        std::optional<ErrorCode> code;
        for (int rank = block.begin; rank < block.end; ++rank) {
          try {
            model.begin(step == 3 && rank == 0 ? std::nullopt : std::optional<std::int64_t>(2 + rank));
            model.bring(1, step == 1 && rank == 1 ? INFINITY : static_cast<float>(step + rank) / 7);
            model.bring(0, 0.1F * static_cast<float>(rank));
            model.end();
          } catch (const NonFiniteError& error) {
            EXPECT_EQ(error.gradient().parameter, "b");
            code = ErrorCode::NonFinite;
          } catch (const Error& error) {
            code = error.code();
          }
        }
        EXPECT_EQ(code, step == 1   ? std::optional(ErrorCode::NonFinite)
                        : step == 3 ? std::optional(ErrorCode::Mismatch)
                                    : std::nullopt);
        EXPECT_EQ(model.core.step_complete(), !code.has_value());
        EXPECT_EQ(model.defined, std::vector<bool>(2, !code.has_value()));
        if (!code) all += bytes_of(model);
      }
      const std::lock_guard lock(mutex);
      if (expected.empty()) expected = all;
      EXPECT_TRUE(all == expected) << ::testing::PrintToString(hosts);
    });
  }
}

TEST(VirtualRanksOfAReducer, APartWhoseBackwardFailedBeginsAnew) {
  const Training training{.virtual_ranks = 4};
  std::vector<std::string> results;
  for (const bool fails : {false, true}) {
    run_on({0}, [&](const Communicator& comm) {
      Fake model(comm, {vector_of("a", 5), vector_of("b", 9)}, training.options());
      for (int rank = 0; rank < 4; ++rank) {
        if (fails && rank == 2) {
          model.core.accumulation().enter_no_sync();
          model.begin(7);  // a micro-batch before it
          model.bring(0, 50);
          model.end();
          model.core.accumulation().leave_no_sync();
          model.begin(5);
          model.bring(1, 100);
          model.fail();
        }
        model.begin(1 + rank);
        model.bring(0, static_cast<float>(rank) / 3);
        if (rank != 2) model.bring(1, static_cast<float>(rank) / 9);
        (void)model.core.mean_loss(rank);
        model.end();
      }
      results.push_back(bytes_of(model));
    });
  }
  EXPECT_TRUE(results[0] == results[1]);
}

TEST(VirtualRanksOfAReducer, AStepThatFailsWhileSumsAreFoldedBeginsAnew) {
  const Training training{.virtual_ranks = 5};
  std::string expected;
  std::mutex mutex;
  for (const bool fails : {false, true}) {
    run_on({0, 0}, [&](const Communicator& comm) {  // blocks of 3 and 2, which are exchanged by slices
      Fake model(comm, parameters_of_all_kinds(), training.options());
      const VirtualRange block = block_of(5, 2, comm.rank());
      if (fails) {
        model.on_clear = [calls = 0]() mutable {  // when some buckets have been folded
          if (++calls == 2) throw std::bad_alloc();
        };
        EXPECT_THROW(train_part(model, training, 2, block.begin), std::bad_alloc);
        model.on_clear = nullptr;
        EXPECT_FALSE(model.core.in_step());
      }
      for (int rank = block.begin; rank < block.end; ++rank) {
        train_part(model, training, 1, rank);
        (void)model.core.mean_loss(rank);
      }
      const std::lock_guard lock(mutex);
      if (expected.empty()) expected = bytes_of(model);
      EXPECT_TRUE(bytes_of(model) == expected);
    });
  }
}

TEST(VirtualRanksOfAReducer, RefuseByName) {
  const auto refused = [](const std::string& why, const std::function<void()>& body) {
    try {
      body();
      ADD_FAILURE() << why;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
    }
  };
  run_on({0, 0}, [&](Communicator comm) {
    nn::DistributedDataParallelOptions one;
    one.virtual_ranks = 1;
    refused("virtual_ranks=1 on 2 ranks", [&] { Fake(comm, {vector_of("a", 5)}, one); });
    Fake model(comm, {vector_of("a", 5)}, Training{.virtual_ranks = 4}.options());
    refused("virtual_ranks has an order", [&] { model.core.use_hook([](const HookedBucket&) { return nullptr; }); });
    refused("call it after the forward", [&] { (void)model.core.mean_loss(1); });
    refused("a backward without a new forward", [&] { model.core.begin_backward(); });
    model.begin(1);
    EXPECT_EQ(model.core.mean_loss(1), std::nullopt);
    refused("has its loss already", [&] { (void)model.core.mean_loss(1); });
    model.bring(0, 1);
    model.end();
    refused("a backward without a new forward", [&] { model.core.begin_backward(); });
    model.begin(1);
    model.bring(0, 2);
    model.end();
    EXPECT_EQ(model.core.mean_loss(3), 2);
    EXPECT_FLOAT_EQ(model.gradient(0)[0], 1.5F);
    Parameter elsewhere = vector_of("b", 5);
    elsewhere.device = {DeviceType::CUDA, 0};
    refused("virtual_ranks on a GPU",
            [&] { Reducer(step::ranks_of(comm), {elsewhere}, Training{.virtual_ranks = 4}.options(), model); });
  });
  run_on({0}, [&](const Communicator& comm) {
    Fake model(comm, {vector_of("a", 5)});
    refused("mean_loss: for virtual_ranks", [&] { (void)model.core.mean_loss(1); });
    model.begin(1);
    model.bring(0, 1);
    model.end();
    EXPECT_TRUE(model.core.step_complete());
  });
}

TEST(VirtualRanksOfAReducer, AStepWithoutSamplesTakesThePlaceOfAVirtualRank) {
  std::string expected;
  for (const std::vector<int>& hosts : kWorlds) {
    std::mutex mutex;
    run_on(hosts, [&](const Communicator& comm) {
      const Training training{.virtual_ranks = 5};
      Fake model(comm, {vector_of("a", 5), vector_of("b", 1300)}, training.options());
      const VirtualRange block = block_of(5, comm.size(), comm.rank());
      std::string all;
      for (int step = 0; step < 3; ++step) {
        model.drop_all();
        for (int rank = block.begin; rank < block.end; ++rank) {
          const bool last = rank + 1 == block.end;
          if (rank >= 3 || step == 2) {
            if (rank == block.begin) model.core.prepare_synchronising_pass();
            EXPECT_EQ(model.core.reduce_without_backward(), !last || step != 2);
          } else {
            model.begin(rank == 1 ? 0 : 2);
            for (const std::size_t parameter : {1U, 0U}) model.bring(parameter, rank == 1 ? NAN : 1.0F / 3);
            model.end();
          }
          EXPECT_EQ(model.core.step_complete(), last);
        }
        all += bytes_of(model);
      }
      const std::lock_guard lock(mutex);
      if (expected.empty()) expected = all;
      EXPECT_TRUE(all == expected) << ::testing::PrintToString(hosts);
    });
  }
}

}  // namespace
}  // namespace cohort::gradients
