// Engines on worlds of threads: ranks that have no more data, names that wait too long, and how engines end. Random
// programs: all ranks request the same names, each in its own order, with shapes that change, disagreements, small
// caches and ranks that run out of data at different steps. Each seed gives the same program every time.

#include "horovod/named/engine.h"
#include "horovod/named/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

namespace cohort::named {
namespace {

using namespace testing;
using std::chrono::milliseconds;

TEST(NamedJoin, ServesTheOthersWithNeutralElements) {
  constexpr int kSize = 3;
  with_engines(kSize, [](Engine& engine) {
    for (int epoch = 0; epoch < 3; ++epoch) {  // later epochs find everything in the cache
      const int rank = engine.rank();
      for (int step = 0; step <= rank; ++step) {  // rank r has r + 1 batches
        const float one = static_cast<float>(rank + 2);
        std::vector<float> sum(3, one), minimum(3, -one), maximum(3, one), product(3, one), average(3, one);
        std::vector<float> lowest(3, one), highest(3, -one);
        std::vector<std::int32_t> rows(1, rank);
        std::vector<float> spread(2, rank == kSize - 1 ? 5.0f : 0.0f);
        std::vector<Handle> handles;
        handles.push_back(engine.submit(all_reduce("sum", sum)));
        handles.push_back(engine.submit(all_reduce("min", minimum, ReduceOp::Min)));
        handles.push_back(engine.submit(all_reduce("max", maximum, ReduceOp::Max)));
        handles.push_back(engine.submit(all_reduce("lowest", lowest, ReduceOp::Min)));
        handles.push_back(engine.submit(all_reduce("highest", highest, ReduceOp::Max)));
        handles.push_back(engine.submit(all_reduce("product", product, ReduceOp::Product)));
        handles.push_back(engine.submit(all_reduce("average", average, ReduceOp::Average)));
        handles.push_back(engine.submit(broadcast("spread", spread, kSize - 1)));
        Handle gathered = engine.submit(by_rows(Kind::AllGather, "rows", rows));
        for (Handle& handle : handles) handle.wait();
        float sum_of_active = 0, product_of_active = 1;
        std::vector<std::int32_t> active;
        for (int other = step; other < kSize; ++other) {
          sum_of_active += static_cast<float>(other + 2);
          product_of_active *= static_cast<float>(other + 2);
          active.push_back(other);
        }
        EXPECT_EQ(sum[0], sum_of_active);
        EXPECT_EQ(minimum[1], -4.0f);
        EXPECT_EQ(maximum[2], 4.0f);
        EXPECT_EQ(lowest[2], static_cast<float>(step + 2));
        EXPECT_EQ(highest[2], -static_cast<float>(step + 2));
        EXPECT_EQ(product[0], product_of_active);
        EXPECT_EQ(average[0], sum_of_active / kSize);
        EXPECT_EQ(spread, std::vector<float>(2, 5.0f));
        EXPECT_EQ(values_of<std::int32_t>(gathered.outcome()), active);
      }
      EXPECT_EQ(engine.join(), kSize - 1) << "the last one has the most batches";
    }
  });
}

TEST(NamedJoin, AveragesOverActiveRanksIfToldTo) {
  EngineOptions options;
  options.joined_average = JoinedAverage::ActiveRanks;
  with_engines(
      3,
      [](Engine& engine) {
        if (engine.rank() != 0) {
          std::vector<float> data(2, static_cast<float>(engine.rank()));
          std::vector<std::int64_t> whole(2, -5 * engine.rank());
          Handle first = engine.submit(all_reduce("a", data, ReduceOp::Average));
          Handle second = engine.submit(all_reduce("b", whole, ReduceOp::Average));
          first.wait();
          second.wait();
          EXPECT_EQ(data, std::vector<float>(2, 1.5f));
          EXPECT_EQ(whole, std::vector<std::int64_t>(2, -7)) << "-15 / 2, toward zero";
        }
        engine.join();
      },
      options);
}

TEST(NamedJoin, CarriesOutWhatWasAskedForBefore) {
  with_engines(2, [](Engine& engine) {
    for (int i = 0; i < 3; ++i) {
      // Each rank has an operation that the other never requests; the second time the operation has a slot.
      std::vector<float> common(1, 1.0f), own(1, 7.0f);
      engine.submit(all_reduce("0", common)).wait();
      engine.submit(all_reduce("1", common)).wait();
      Handle mine = engine.submit(all_reduce(std::to_string(engine.rank()), own));
      Handle joined = engine.join_async();
      mine.wait();
      EXPECT_EQ(own[0], 7.0f);
      const int last = joined.outcome().last_joined;
      std::vector<std::int32_t> same(1, last);
      engine.submit(all_reduce("last", same)).wait();
      EXPECT_EQ(same[0], 2 * last) << "both ranks know the same last one";
    }
  });
}

TEST(NamedJoin, RefusesWhatNeedsEveryRank) {
  std::atomic<bool> refused{false};
  with_engines(2, [&](Engine& engine) {
    if (engine.rank() == 0) {
      std::vector<float> data(4, 1.0f);
      Request gather = by_rows(Kind::AllGather, "d", data);
      Request from_here = broadcast("e", data, 0);
      engine.submit(gather).wait();  // these work without rank 1
      engine.submit(from_here).wait();
      gather.needs_all_ranks = from_here.needs_all_ranks = true;
      for (Request request : {by_rows(Kind::ReduceScatter, "a", data), by_rows(Kind::AllToAll, "b", data),
                              broadcast("c", data, 1), gather, from_here}) {
        const Error error = error_of(engine.submit(std::move(request)));
        EXPECT_EQ(error.code(), ErrorCode::Mismatch);
        EXPECT_TRUE(contains(error.what(), "rank 1 has joined")) << error.what();
      }
      while (!refused) std::this_thread::sleep_for(milliseconds(1));
      engine.join();
      return;
    }
    Handle joined = engine.join_async();
    EXPECT_THROW(engine.submit(barrier("after join")), Error);
    EXPECT_THROW(engine.join(), Error);
    refused = true;
    joined.wait();
  });
}

TEST(NamedStall, IsReportedWithTheRanksThatLackIt) {
  std::mutex mutex;
  std::vector<Stall> seen;
  EngineOptions options;
  options.stall_after = milliseconds(40);
  options.on_stall = [&](std::span<const Stall> stalls) {
    const std::lock_guard lock(mutex);
    seen.insert(seen.end(), stalls.begin(), stalls.end());
  };
  const auto reported = [&](const std::string& name) {
    const std::lock_guard lock(mutex);
    return std::any_of(seen.begin(), seen.end(), [&](const Stall& one) {
      return one.name == name && one.missing == std::vector<int>{2} && one.present == (std::vector<int>{0, 1}) &&
             one.waited >= milliseconds(40);
    });
  };
  with_engines(
      3,
      [&](Engine& engine) {
        std::vector<float> known(1, 1.0f), fresh(1, 1.0f);
        engine.submit(all_reduce("known", known)).wait();
        if (engine.rank() == 2) {
          // The other ranks make no progress before both names have been reported.
          for (int i = 0; i < 3000 && !(reported("known") && reported("fresh")); ++i) {
            std::this_thread::sleep_for(milliseconds(10));
          }
        }
        Handle one = engine.submit(all_reduce("known", known));
        Handle other = engine.submit(all_reduce("fresh", fresh));
        one.wait();
        other.wait();
      },
      options);
  EXPECT_TRUE(reported("known")) << "a name with a slot";
  EXPECT_TRUE(reported("fresh"));
}

TEST(NamedStall, EndsInTimeoutOfThatNameAlone) {
  EngineOptions options;
  options.timeout = milliseconds(400);
  options.stall_after = milliseconds(5000);
  with_engines(
      2,
      [](Engine& engine) {
        std::vector<float> data(1, 1.0f);
        for (int i = 0; i < 2; ++i) {  // first without a slot, then with one
          if (engine.rank() == 0) {
            const Error error = error_of(engine.submit(all_reduce("x", data)));
            EXPECT_EQ(error.code(), ErrorCode::Timeout);
            EXPECT_TRUE(contains(error.what(), "rank 1 did not ask for it")) << error.what();
            data[0] = 1.0f;
          }
          // Retried after each Timeout, because rank 0 comes only when its operation has failed.
          Handle go = engine.submit(barrier("go" + std::to_string(i)));
          while (true) {
            try {
              go.wait();
              break;
            } catch (const Error& error) {  // rank 0 was still waiting
              ASSERT_EQ(error.code(), ErrorCode::Timeout);
              go = engine.submit(barrier("go" + std::to_string(i)));
            }
          }
          data[0] = 1.0f;
          engine.submit(all_reduce("x", data)).wait();
          EXPECT_EQ(data[0], 2.0f);
        }
      },
      options);
}

TEST(NamedShutdown, FailsWhatIsOutstandingEverywhereAndSaysWho) {
  run_on_threads(3, [](Communicator comm) {
    {
      Engine engine(comm);
      std::vector<float> data(1, 1.0f);
      engine.submit(barrier("all are here")).wait();
      if (comm.rank() == 1) {
        engine.shutdown();
        engine.shutdown();
      } else {
        try {
          engine.submit(all_reduce("x", data)).wait();  // rank 1's shutdown may arrive before this is submitted
          ADD_FAILURE() << "carried out";
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::Aborted);
          EXPECT_TRUE(contains(error.what(), "shut down by rank 1")) << error.what();
        }
      }
      EXPECT_THROW(
          {
            Handle late = engine.submit(all_reduce("x", data));
            late.wait();
          },
          Error);
      EXPECT_THROW(engine.join(), Error);
    }
    comm.barrier().wait();  // the communicator can still be used
    Engine again(comm);
    std::vector<float> data(1, 1.0f);
    again.submit(all_reduce("x", data)).wait();
    EXPECT_EQ(data[0], 3.0f);
  });
}

TEST(NamedShutdown, NeedsNoOperationAndNoOrder) {
  for (int i = 0; i < 5; ++i) {
    run_on_threads(4, [i](Communicator comm) {
      Engine engine(comm);
      if (comm.rank() == i % 4) std::this_thread::sleep_for(milliseconds(5));
    });
  }
}

TEST(NamedShutdown, DoesNotWaitForRanksThatNeverCome) {
  // Rank 1 makes no engine, so rank 0 gives up, which ends the communicator.
  std::atomic<bool> over{false};
  EXPECT_THROW(run_on_threads(2,
                              [&](Communicator comm) {
                                if (comm.rank() == 1) {
                                  while (!over) std::this_thread::sleep_for(milliseconds(1));
                                  comm.barrier().wait();
                                  return;
                                }
                                EngineOptions options;
                                options.shutdown_timeout = milliseconds(100);
                                std::vector<float> data(1);
                                std::optional<Handle> handle;
                                {
                                  Engine engine(comm, options);
                                  handle = engine.submit(all_reduce("x", data));
                                }
                                EXPECT_TRUE(handle->done());
                                over = true;
                                handle->wait();
                              }),
               Error);
}

TEST(NamedShutdown, FollowsWhenTheWorldEnds) {
  std::atomic<int> waiting{0};
  std::atomic<int> told{0};
  const auto body = [&](Communicator comm) {
    Engine engine(comm);
    std::vector<float> data(1);
    engine.submit(barrier("all are here")).wait();
    if (comm.rank() == 2) {
      while (waiting < 2) std::this_thread::sleep_for(milliseconds(1));
      comm.abort("out of coffee");
      return;
    }
    Handle handle = engine.submit(all_reduce("x", data));
    ++waiting;
    const Error error = error_of(handle);
    EXPECT_EQ(error.code(), ErrorCode::Aborted);
    EXPECT_TRUE(contains(error.what(), "out of coffee")) << error.what();
    ++told;
    throw error;
  };
  EXPECT_THROW(run_on_threads(3, body), Error);
  EXPECT_EQ(told, 2);
}

TEST(NamedShutdown, RanksMustHaveTheSameOptions) {
  run_on_threads(2, [](Communicator comm) {
    EngineOptions options;
    options.cache_capacity = comm.rank() == 0 ? 10 : 20;
    Engine engine(comm, options);
    std::vector<float> data(1);
    try {
      engine.submit(all_reduce("x", data)).wait();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      EXPECT_TRUE(contains(error.what(), "cache_capacity 10")) << error.what();
    }
  });
}

TEST(NamedShutdown, AnEngineNeedsAWorld) { EXPECT_THROW(Engine{Communicator()}, Error); }

/// One name in one step, as all ranks know it.
struct Planned {
  std::string name;
  Kind kind = Kind::AllReduce;
  ReduceOp op = ReduceOp::Sum;
  int rows = 1;
  int root = 0;
  int odd_one = -1;  // the rank with another type
};

std::vector<Planned> plan_step(std::mt19937& random, int size) {
  std::vector<Planned> plan;
  const int count = 1 + static_cast<int>(random() % 20);
  for (int i = 0; i < count; ++i) {
    Planned one;
    // A name mostly has the same operation, so that slots are used, and sometimes a different one.
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

/// The result on every rank when ranks from `first` on have data.
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
