#include "ps/optimizer.h"
#include "ps/server_map.h"
#include "ps/sparse_table.h"

#include <gtest/gtest.h>
#include <rapidcheck/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <random>
#include <set>

namespace cohort::ps {
namespace {

using Keys = std::vector<std::uint64_t>;

TableOptions small(std::int64_t dim = 4) {
  TableOptions options;
  options.dim = dim;
  options.initializer = Initializer::uniform(-1, 1);
  options.optimizer = optim::Sgd{.lr = 0.5};
  options.seed = 7;
  return options;
}

std::vector<float> read(const SparseTable& table, const Keys& keys, std::uint32_t now = 1) {
  std::vector<float> rows(keys.size() * table.dim());
  table.read(keys.data(), keys.size(), rows.data(), now);
  return rows;
}

void step_rows(SparseTable& table, const Keys& keys, float gradient, std::uint32_t now = 1) {
  const std::vector<float> rows(keys.size() * table.dim(), gradient);
  table.step({keys.data(), rows.data(), keys.size()}, now);
}

// The vectors that the authors publish with their code.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (PhiloxCounter{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(philox({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
            (PhiloxCounter{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (PhiloxCounter{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Initial, IsAFunctionOfSeedKeyAndPosition) {
  std::vector<float> whole(10), again(10), part(3);
  fill_initial(whole, Initializer::normal(0, 1), 3, 99);
  fill_initial(again, Initializer::normal(0, 1), 3, 99);
  fill_initial(part, Initializer::normal(0, 1), 3, 99);
  EXPECT_EQ(whole, again);
  EXPECT_TRUE(std::equal(part.begin(), part.end(), whole.begin()));
  fill_initial(again, Initializer::normal(0, 1), 4, 99);
  EXPECT_NE(whole, again);
  fill_initial(again, Initializer::normal(0, 1), 3, 99ULL << 32);
  EXPECT_NE(whole, again);
}

TEST(Initial, HasTheDistributionsThatItSays) {
  constexpr std::size_t kCount = 40000;
  std::vector<float> values(kCount);
  const auto moments = [&] {
    double sum = 0, squares = 0;
    for (const float value : values) {
      sum += value;
      squares += static_cast<double>(value) * value;
    }
    return std::pair(sum / kCount, squares / kCount);
  };
  fill_initial(values, Initializer::normal(1, 2), 1, 2);
  const auto [mean, square] = moments();
  EXPECT_NEAR(mean, 1, 0.05);
  EXPECT_NEAR(square - mean * mean, 4, 0.15);
  fill_initial(values, Initializer::uniform(-2, 4), 1, 2);
  EXPECT_NEAR(moments().first, 1, 0.05);
  EXPECT_GE(*std::min_element(values.begin(), values.end()), -2.0F);
  EXPECT_LE(*std::max_element(values.begin(), values.end()), 4.0F);
}

TEST(Placement, SpreadsNeighbouringKeysEvenly) {
  for (const std::uint32_t servers : {1U, 2U, 3U, 5U, 8U}) {
    const Placement placement = Placement::even(servers);
    std::vector<int> counts(servers);
    constexpr int kKeys = 100000;
    for (std::uint64_t key = 0; key < kKeys; ++key) ++counts[placement.server_of(key)];
    for (const int count : counts) EXPECT_NEAR(count, kKeys / static_cast<double>(servers), kKeys * 0.01);
    std::set<std::uint32_t> pieces;
    for (std::uint64_t piece = 0; piece < 40; ++piece) pieces.insert(placement.server_of_row(piece, 399, 10));
    EXPECT_EQ(pieces.size(), servers);
  }
  EXPECT_THROW(Placement::even(0), Error);
  EXPECT_THROW(Placement::even(kShards + 1), Error);
}

// Against a std::map: look-ups, insertions and removals in any order, with keys that meet in the index.
RC_GTEST_PROP(Rows, AreAMap, ()) {
  Rows rows(3);
  std::map<std::uint64_t, float> model;
  const auto changes = *rc::gen::container<std::vector<std::pair<std::uint64_t, bool>>>(
      rc::gen::pair(rc::gen::weightedOneOf<std::uint64_t>(
                        {{9, rc::gen::inRange<std::uint64_t>(0, 60)}, {1, rc::gen::arbitrary<std::uint64_t>()}}),
                    rc::gen::arbitrary<bool>()));
  float stamp = 0;
  for (const auto& [key, removes] : changes) {
    const std::uint32_t found = rows.find(key, mix64(key));
    RC_ASSERT((found != Rows::kNone) == (model.count(key) == 1));
    if (found != Rows::kNone) RC_ASSERT(rows.floats(found)[2] == model[key]);
    if (removes && found != Rows::kNone) {
      rows.erase(found);
      model.erase(key);
    } else if (found == Rows::kNone) {
      rows.own(rows.create(key, mix64(key))).floats[2] = ++stamp;
      model[key] = stamp;
    }
    RC_ASSERT(rows.size() == model.size());
  }
  for (const auto& [key, value] : model) RC_ASSERT(rows.floats(rows.find(key, mix64(key)))[2] == value);
}

TEST(Rows, ManyComeAndGo) {
  Rows rows(1);
  for (std::uint64_t key = 0; key < 100000; ++key)
    rows.own(rows.create(key, mix64(key))).floats[0] = static_cast<float>(key);
  const std::size_t bytes = rows.bytes();
  for (std::uint64_t key = 0; key < 100000; key += 2) rows.erase(rows.find(key, mix64(key)));
  EXPECT_EQ(rows.size(), 50000U);
  for (std::uint64_t key = 0; key < 100000; ++key) {
    const std::uint32_t found = rows.find(key, mix64(key));
    ASSERT_EQ(found == Rows::kNone, key % 2 == 0);
    if (found == Rows::kNone) continue;
    ASSERT_EQ(rows.floats(found)[0], static_cast<float>(key));
  }
  for (std::uint64_t key = 0; key < 100000; key += 2) rows.create(key, mix64(key));
  EXPECT_EQ(rows.bytes(), bytes) << "places of rows that went are used again";
}

TEST(Rows, TakeTheMemoryThatTheyForetold) {
  Rows rows(16);
  for (std::uint64_t key = 0; key < 52000; ++key) {
    const std::size_t foretold = rows.bytes_with(1);
    rows.create(key, mix64(key));
    ASSERT_LE(rows.bytes(), foretold);
  }
  // 16 of header, an entry of 8 in an index that is nearly full here, as the last slab is.
  EXPECT_LE(rows.bytes() / rows.size(), 16U * 4 + 16 + 10 + 12);
}

TEST(SparseTable, ReadingCreatesNothing) {
  SparseTable table("t", small());
  const Keys keys{0, ~std::uint64_t{0}, 5, 0};
  const auto rows = read(table, keys);
  EXPECT_EQ(table.counts().rows, 0U);
  EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + 4, rows.begin() + 12));
  step_rows(table, {0}, 0);
  EXPECT_EQ(read(table, keys), rows) << "the first step starts from what was read";
  EXPECT_EQ(table.counts().rows, 1U);
}

TEST(SparseTable, AKeyThatComesTwiceIsSteppedTwice) {
  SparseTable table("t", small());
  const auto before = read(table, {8});
  step_rows(table, {8, 9, 8}, 1);
  const auto after = read(table, {8});
  for (std::size_t i = 0; i < 4; ++i) EXPECT_EQ(after[i], (before[i] - 0.5F) - 0.5F);
  EXPECT_EQ(table.counts().steps, 3U);
}

TEST(SparseTable, AssignAndErase) {
  TableOptions options = small(2);
  options.optimizer = optim::Sgd{.lr = 1, .momentum = 0.5};
  SparseTable table("t", options);
  const Keys key{3};
  const std::vector<float> value{4, 5};
  step_rows(table, key, 1);
  table.assign({key.data(), value.data(), 1}, 1);
  EXPECT_EQ(read(table, key), value);
  step_rows(table, key, 1);
  EXPECT_EQ(read(table, key), (std::vector<float>{3, 4})) << "no momentum is left from before";
  table.erase(key.data(), 1);
  EXPECT_EQ(table.counts().rows, 0U);
  std::vector<float> initial(2);
  fill_initial(initial, options.initializer, options.seed, 3);
  EXPECT_EQ(read(table, key), initial);
  table.erase(key.data(), 1);
}

TEST(SparseTable, AdmitsAKeyWithItsThirdStepExactly) {
  TableOptions options = small(1);
  options.initializer = Initializer::constant(0);
  options.optimizer = optim::Sgd{.lr = 1};
  options.admission = 3;
  SparseTable table("t", options);
  Keys keys(500);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i * 977;
  for (int round = 1; round <= 5; ++round) {
    step_rows(table, keys, -1);
    EXPECT_EQ(table.counts().rows, round < 3 ? 0U : keys.size());
  }
  for (const float value : read(table, keys)) EXPECT_EQ(value, 3) << "steps three, four and five";
  EXPECT_EQ(table.counts().dropped, 2 * keys.size());
}

TEST(SparseTable, CountersOfKeysWithoutARowAreBoundedWhereRowsAre) {
  TableOptions options = small(1);
  options.admission = 2;
  options.eviction.rows = 10;
  SparseTable table("t", options), other("t", options);
  Keys keys(1000);
  for (std::size_t i = 0; i < keys.size(); ++i) keys[i] = i;
  step_rows(table, keys, 1);
  step_rows(other, keys, 1);
  EXPECT_EQ(table.shape().seen, 40U);
  EXPECT_EQ(table.counts().rows, 0U);
  const std::size_t bytes = table.counts().bytes;
  for (std::uint64_t& key : keys) key += 1000;
  EXPECT_LE(table.bytes_with(keys.size()), 4 * bytes + (std::size_t{1} << 22));
  for (SparseTable* const one : {&table, &other}) {
    step_rows(*one, keys, 1);
    step_rows(*one, {5000, 5000, 6000}, 1);
  }
  EXPECT_EQ(table.counts().bytes, other.counts().bytes);
  EXPECT_EQ(table.counts().rows, 1U) << "one that comes twice behind each other";
  std::vector<std::uint64_t> first, second;
  const auto views = std::make_shared<std::atomic<int>>(0);
  table.freeze(views).for_each_seen([&](std::uint64_t key, std::uint32_t) { first.push_back(key); });
  other.freeze(views).for_each_seen([&](std::uint64_t key, std::uint32_t) { second.push_back(key); });
  EXPECT_EQ(first, second) << "copies of a table forget the same";
  EXPECT_NE(std::find(first.begin(), first.end(), 6000U), first.end());
  table.erase(first.data(), first.size());
  EXPECT_EQ(table.shape().seen, 0U);
  step_rows(table, {6000}, 1);
  EXPECT_EQ(table.shape().seen, 1U) << "it counts from the beginning";
}

TEST(SparseTable, ARowGoesWithItsAge) {
  TableOptions options = small();
  options.eviction.age = std::chrono::seconds(100);
  SparseTable table("t", options);
  const auto first = read(table, {1});
  step_rows(table, {1, 2}, 1, 1000);
  const auto stepped = read(table, {1}, 1100);
  EXPECT_NE(stepped, first);
  EXPECT_EQ(read(table, {1}, 1101), first) << "it is past its age, whether it has been swept or not";
  step_rows(table, {1}, 1, 1101);
  EXPECT_EQ(read(table, {1}, 1101), stepped) << "stepped once from its beginning again";
  for (std::uint64_t key = 10; key < 20; ++key) step_rows(table, {key}, 1, 5000);
  EXPECT_EQ(table.counts().rows, 10U) << "what nobody asks for goes too";
  EXPECT_EQ(table.counts().evicted, 3U);
}

TEST(SparseTable, TheLeastRecentOfFewRowsGoes) {
  for (const auto victim : {Eviction::Victim::LeastRecent, Eviction::Victim::LeastFrequent}) {
    TableOptions options = small();
    options.eviction.rows = 10;
    options.eviction.victim = victim;
    SparseTable table("t", options);
    for (std::uint32_t i = 0; i < 10; ++i) step_rows(table, Keys(20 - i, i), 1, 100 + i);  // the latest are the rarest
    step_rows(table, {77}, 1, 200);
    EXPECT_EQ(table.counts().rows, 10U);
    const SparseTable untouched("t", options);
    const auto left = [&](std::uint64_t key) { return read(table, {key}) != read(untouched, {key}); };
    for (std::uint64_t key = 0; key < 10; ++key)
      EXPECT_EQ(left(key), key != (victim == Eviction::Victim::LeastRecent ? 0U : 9U));
    EXPECT_TRUE(left(77));
  }
}

// The same pushes, the same times: the same rows, whatever goes and comes back.
RC_GTEST_PROP(SparseTable, IsAFunctionOfItsSteps, ()) {
  TableOptions options = small(2);
  options.optimizer = optim::Adam{};
  options.eviction = {std::chrono::seconds(50), 12, Eviction::Victim::LeastRecent};
  options.admission = 2;
  const auto steps = *rc::gen::container<std::vector<std::pair<std::uint64_t, std::uint32_t>>>(
      rc::gen::pair(rc::gen::inRange<std::uint64_t>(0, 30), rc::gen::inRange<std::uint32_t>(0, 20)));
  SparseTable first("t", options), second("t", options);
  std::uint32_t now = 1;
  for (const auto& [key, later] : steps) {
    now += later;
    step_rows(first, {key}, 0.25F, now);
    (void)read(first, {key, key + 1}, now);
    step_rows(second, {key}, 0.25F, now);
    RC_ASSERT(first.counts().rows <= 12U);
  }
  Keys all(30);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = i;
  RC_ASSERT(read(first, all, now) == read(second, all, now));
  RC_ASSERT(first.counts().evicted == second.counts().evicted);
}

// A view does not change when rows are stepped, evicted, assigned and erased meanwhile; nor does a second view of
// another moment.
TEST(SparseTable, AViewIsOfItsMoment) {
  TableOptions options = small(16);
  options.eviction.rows = 30000;
  options.admission = 2;
  SparseTable table("t", options);
  std::mt19937 random(5);
  const auto change = [&] {
    Keys keys(200);
    for (std::uint64_t& key : keys) key = random() % 40000;
    step_rows(table, keys, 1);
    const std::vector<float> rows(16, 3);
    table.assign({keys.data(), rows.data(), 1}, 1);
    table.erase(keys.data() + 1, 1);
  };
  const auto content = [](const FrozenTable& view) {
    std::vector<float> all;
    view.for_each([&](const RowHeader& header, const float* floats) {
      all.push_back(static_cast<float>(header.key));
      all.insert(all.end(), floats, floats + view.floats());
    });
    view.for_each_seen([&](std::uint64_t key, std::uint32_t count) {
      all.insert(all.end(), {static_cast<float>(key), static_cast<float>(count)});
    });
    return all;
  };
  for (int i = 0; i < 500; ++i) change();
  const auto views = std::make_shared<std::atomic<int>>(0);
  for (int turn = 0; turn < 3; ++turn) {
    const FrozenTable first = table.freeze(views);
    ++*views;
    const auto then = content(first);
    for (int i = 0; i < 20; ++i) change();
    const FrozenTable second = table.freeze(views);
    ++*views;
    const auto later = content(second);
    EXPECT_NE(then, later);
    for (int i = 0; i < 20; ++i) change();
    EXPECT_EQ(content(first), then);
    EXPECT_EQ(content(second), later);
    EXPECT_GT(table.copied(), table.counts().bytes / 2);
    EXPECT_LE(table.effort(1'000'000).copied, table.counts().bytes);
    *views -= 2;
    EXPECT_EQ(table.copied(), 0U);
    EXPECT_EQ(table.effort(1'000'000).copied, 0U);
  }
}

TEST(SparseTable, TakesTheMemoryThatItForetold) {
  TableOptions options = small(16);
  options.admission = 2;
  SparseTable table("t", options);
  for (std::uint64_t key = 0; key < 20000; ++key) {
    const Keys keys{key / 2 * 7919, key};
    const std::size_t foretold = table.bytes_with(table.fresh(2, keys.data()));
    ASSERT_LE(foretold, table.bytes_with(2));
    step_rows(table, keys, 1);
    ASSERT_LE(table.counts().bytes, foretold);
  }
}

TEST(SparseTable, OptionsWithoutMeaningAreRefused) {
  const auto refused = [](auto change) {
    TableOptions options = small();
    change(options);
    return !check(options);
  };
  EXPECT_FALSE(refused([](TableOptions&) {}));
  EXPECT_TRUE(refused([](TableOptions& o) { o.dim = 0; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.dim = 65537; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.admission = 0; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.eviction.rows = -1; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.consistency = Consistency::bounded(-1); }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.consistency = {Mode::Async, 3}; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.initializer = Initializer::constant(NAN); }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.optimizer = optim::Sgd{.lr = -1}; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.optimizer = optim::Sgd{.nesterov = true}; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.optimizer = optim::Adam{.beta1 = 1}; }));
  EXPECT_TRUE(refused([](TableOptions& o) { o.optimizer = optim::Ftrl{.lr = 0}; }));
}

// Rows of 64 KiB, and a table whose rows are one float.
TEST(SparseTable, RowsOfAnyLength) {
  for (const std::int64_t dim : {1, 7, 16384, 65536}) {
    TableOptions options = small(dim);
    options.optimizer = optim::AdamW{};
    SparseTable table("t", options);
    step_rows(table, {1, 2, 3, ~std::uint64_t{0}}, 0.5F);
    for (const float value : read(table, {1, 2, 3, ~std::uint64_t{0}})) ASSERT_TRUE(std::isfinite(value));
    EXPECT_EQ(table.counts().rows, 4U);
  }
}

// Each rule against its formula in double precision, a thousand steps, zeros and tiny gradients among them. (Against
// torch itself: python/tests/test_ps.py.)

/// One element in doubles, by the text-book.
struct Reference {
  double weight = 0, first = 0, second = 0;

  void step(const optim::Sgd& r, double g, int t) {
    g += r.weight_decay * weight;
    if (r.momentum != 0) first = t == 1 ? g : r.momentum * first + (1 - r.dampening) * g;
    weight -= r.lr * (r.momentum == 0 ? g : r.nesterov ? g + r.momentum * first : first);
  }
  void step(const optim::Adagrad& r, double g, int t) {
    g += r.weight_decay * weight;
    first += g * g;
    weight -= r.lr / (1 + (t - 1) * r.lr_decay) * g / (std::sqrt(first) + r.eps);
  }
  template <class Adam>
  void adam(const Adam& r, double g, int t) {
    first = r.beta1 * first + (1 - r.beta1) * g;
    second = r.beta2 * second + (1 - r.beta2) * g * g;
    weight -= r.lr * (first / (1 - std::pow(r.beta1, t))) / (std::sqrt(second / (1 - std::pow(r.beta2, t))) + r.eps);
  }
  void step(const optim::Adam& r, double g, int t) { adam(r, g + r.weight_decay * weight, t); }
  void step(const optim::AdamW& r, double g, int t) {
    weight *= 1 - r.lr * r.weight_decay;
    adam(r, g, t);
  }
  void step(const optim::Ftrl& r, double g, int) {
    const double sigma = (std::sqrt(second + g * g) - std::sqrt(second)) / r.lr;
    first += g - sigma * weight;
    second += g * g;
    weight = std::fabs(first) <= r.l1
                 ? 0
                 : -(first - std::copysign(r.l1, first)) / ((r.beta + std::sqrt(second)) / r.lr + r.l2);
  }
};

template <class Rule>
void compare(const Rule& rule, double tolerance) {
  constexpr std::size_t kDim = 13;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.1F, 1);
  const Optimizer optimizer = rule;
  ASSERT_TRUE(check(optimizer));
  std::vector<float> weights(kDim), slots(slots_of(optimizer, kDim)), gradient(kDim);
  begin_slots(optimizer, slots.data(), kDim);
  std::vector<Reference> reference(kDim);
  for (std::size_t i = 0; i < kDim; ++i) {
    weights[i] = normal(random);
    reference[i].weight = weights[i];
    if constexpr (std::is_same_v<Rule, optim::Adagrad>) reference[i].first = rule.initial_accumulator_value;
  }
  for (int t = 1; t <= 1000; ++t) {
    for (std::size_t i = 0; i < kDim; ++i) {
      gradient[i] = t % 50 == 0 ? 0 : normal(random);
      if (i == 0) gradient[i] = 0;  // never a gradient
      if (i == 1) gradient[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(t);
    }
    step(optimizer, {weights.data(), slots.data(), kDim, static_cast<std::uint32_t>(t)}, gradient.data());
    for (std::size_t i = 0; i < kDim; ++i) {
      reference[i].step(rule, gradient[i], t);
      ASSERT_NEAR(weights[i], reference[i].weight, tolerance * (1 + std::fabs(reference[i].weight)))
          << "element " << i << " at step " << t;
    }
  }
}

TEST(Optimizer, Sgd) {
  compare(optim::Sgd{.lr = 0.01}, 1e-5);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .weight_decay = 1e-3}, 1e-4);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .dampening = 0.5}, 1e-4);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .nesterov = true}, 1e-4);
}
TEST(Optimizer, Adagrad) {
  compare(optim::Adagrad{.lr = 0.05}, 1e-5);
  compare(optim::Adagrad{.lr = 0.05, .lr_decay = 0.01, .weight_decay = 1e-3, .initial_accumulator_value = 0.1}, 1e-5);
}
TEST(Optimizer, Adam) {
  compare(optim::Adam{.lr = 0.01}, 1e-4);
  compare(optim::Adam{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 1e-3}, 1e-4);
}
TEST(Optimizer, AdamW) { compare(optim::AdamW{.lr = 0.01, .weight_decay = 0.1}, 1e-4); }
TEST(Optimizer, Ftrl) {
  compare(optim::Ftrl{.lr = 0.1}, 1e-4);
  compare(optim::Ftrl{.lr = 0.1, .beta = 0.5, .l1 = 1, .l2 = 0.1}, 1e-4);
}

TEST(Optimizer, RowAdagradHasOneAccumulatorForTheRow) {
  for (const std::size_t dim : {1U, 3U, 8U, 64U, 67U}) {
    const optim::RowAdagrad rule{.lr = 0.1, .initial_accumulator_value = 0.5};
    std::vector<float> weights(dim, 1), slots(slots_of(rule, dim)), gradient(dim);
    ASSERT_EQ(slots.size(), 1U);
    begin_slots(rule, slots.data(), dim);
    double sum = 0.5;
    std::vector<double> reference(dim, 1);
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    for (std::uint32_t t = 1; t <= 1000; ++t) {
      double squares = 0;
      for (float& one : gradient) {
        one = normal(random);
        squares += static_cast<double>(one) * one;
      }
      step(rule, {weights.data(), slots.data(), dim, t}, gradient.data());
      sum += squares / static_cast<double>(dim);
      for (std::size_t i = 0; i < dim; ++i) {
        reference[i] -= rule.lr * gradient[i] / (std::sqrt(sum) + rule.eps);
        ASSERT_NEAR(weights[i], reference[i], 1e-4);
      }
    }
  }
}

TEST(Optimizer, AnotherRateForOneStep) {
  float weight = 1;
  const float gradient = 1;
  step(optim::Sgd{.lr = 0.5}, {&weight, nullptr, 1, 1}, &gradient, 0.25);
  EXPECT_EQ(weight, 0.75F);
}

}  // namespace
}  // namespace cohort::ps
