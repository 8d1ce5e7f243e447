// Random programs: all ranks ask for the same names in orders of their own, with shapes that change, disagreements in
// between, small caches and ranks that run out of data at different steps. Each seed is the same program again.
#include "named/engine.h"
#include "named/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <thread>

namespace cohort::named {
namespace {

using namespace testing;

/// One name in one step, as all ranks know it.
struct Planned {
  std::string name;
  Kind kind = Kind::AllReduce;
  ReduceOp op = ReduceOp::Sum;
  int rows = 1;
  int root = 0;
  int odd_one = -1;  // the rank that brings another type
};

std::vector<Planned> plan_step(std::mt19937& random, int size) {
  std::vector<Planned> plan;
  const int count = 1 + static_cast<int>(random() % 20);
  for (int i = 0; i < count; ++i) {
    Planned one;
    // Mostly the same under the same name, so that slots are used; sometimes something else.
    one.name = "n" + std::to_string(i);
    const unsigned character = random() % 10 == 0 ? static_cast<unsigned>(random()) : static_cast<unsigned>(i) * 7u;
    constexpr Kind kKinds[] = {Kind::AllReduce, Kind::AllGather, Kind::Broadcast, Kind::AllReduce, Kind::Barrier};
    constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Min, ReduceOp::Max};
    one.kind = kKinds[character % 5];
    one.op = kOps[character / 5 % 3];
    one.rows = 1 + static_cast<int>(character / 15 % 40);
    one.root = static_cast<int>(character / 3) % size;
    if (size > 1 && one.kind != Kind::Barrier && random() % 12 == 0) one.odd_one = static_cast<int>(random()) & 1;
    plan.push_back(std::move(one));
  }
  return plan;
}

std::vector<std::int32_t> brought_by(int rank, const Planned& one) {
  const int rows = one.kind == Kind::AllGather ? one.rows + rank : one.rows;
  std::vector<std::int32_t> values(static_cast<std::size_t>(rows));
  std::iota(values.begin(), values.end(), 1000 * rank + one.rows);
  return values;
}

/// What everyone gets, where ranks from `first` on have data.
std::vector<std::int32_t> expected_of(const Planned& one, int first, int size) {
  if (one.kind == Kind::Broadcast) return brought_by(one.root, one);
  std::vector<std::int32_t> result;
  for (int rank = first; rank < size; ++rank) {
    const std::vector<std::int32_t> values = brought_by(rank, one);
    if (one.kind == Kind::AllGather || result.empty()) {
      result.insert(result.end(), values.begin(), values.end());
      continue;
    }
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (one.op == ReduceOp::Sum) result[i] += values[i];
      if (one.op == ReduceOp::Min) result[i] = std::min(result[i], values[i]);
      if (one.op == ReduceOp::Max) result[i] = std::max(result[i], values[i]);
    }
  }
  return result;
}

void run_step(Engine& engine, const std::vector<Planned>& plan, int first, std::mt19937& own_random) {
  const int rank = engine.rank();
  std::vector<std::vector<std::int32_t>> data;
  for (const Planned& one : plan) data.push_back(brought_by(rank, one));
  std::vector<std::vector<float>> odd(plan.size(), std::vector<float>(3));
  std::vector<std::size_t> order(plan.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), own_random);
  std::vector<std::pair<std::size_t, Handle>> handles;
  for (const std::size_t i : order) {
    const Planned& one = plan[i];
    Request request;
    if (one.odd_one == rank) {
      request = all_reduce(one.name, odd[i]);
    } else if (one.kind == Kind::AllReduce) {
      request = all_reduce(one.name, data[i], one.op);
    } else if (one.kind == Kind::Broadcast) {
      request = broadcast(one.name, data[i], one.root);
    } else if (one.kind == Kind::AllGather) {
      request = by_rows(Kind::AllGather, one.name, data[i]);
    } else {
      request = barrier(one.name);
    }
    handles.emplace_back(i, engine.submit(std::move(request)));
    if (own_random() % 16 == 0) std::this_thread::sleep_for(std::chrono::microseconds(own_random() % 200));
  }
  for (auto& [i, handle] : handles) {
    const Planned& one = plan[i];
    const bool root_is_gone = one.kind == Kind::Broadcast && one.root < first;
    const bool alone = engine.size() - first == 1;
    if ((one.odd_one >= first && !alone) || (root_is_gone && one.odd_one < first)) {
      EXPECT_EQ(error_of(handle).code(), ErrorCode::Mismatch) << one.name;
      continue;
    }
    handle.wait();
    if (one.odd_one == rank || one.kind == Kind::Barrier) continue;
    const auto got = one.kind == Kind::AllGather ? values_of<std::int32_t>(handle.outcome()) : data[i];
    EXPECT_EQ(got, expected_of(one, first, engine.size())) << one.name << ", " << name_of(one.kind);
  }
}

TEST(NamedRandom, ProgramsGiveWhatTheyShould) {
  for (unsigned seed = 1; seed <= 24; ++seed) {
    const int size = 1 + static_cast<int>(seed % 4);
    EngineOptions options;
    options.cache_capacity = seed % 3 == 0 ? 4 : 4096;
    options.fusion_threshold = seed % 2 == 0 ? 200 : std::size_t{64} << 20;
    SCOPED_TRACE("seed " + std::to_string(seed));
    with_engines(
        size,
        [&](Engine& engine) {
          SCOPED_TRACE("seed " + std::to_string(seed));
          std::mt19937 shared(seed);
          std::mt19937 own(seed * 100 + static_cast<unsigned>(engine.rank()));
          for (int epoch = 0; epoch < 2; ++epoch) {
            const int steps = 3 + size;
            for (int step = 0; step < steps; ++step) {
              const std::vector<Planned> plan = plan_step(shared, size);
              // Rank r leaves before the last size - 1 - r steps; the last rank does them all.
              const int first = std::max(0, step - (steps - size));
              if (engine.rank() >= first) run_step(engine, plan, first, own);
            }
            EXPECT_EQ(engine.join(), size - 1);
          }
        },
        options);
  }
}

}  // namespace
}  // namespace cohort::named
