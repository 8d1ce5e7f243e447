// Engines on worlds of threads: operations in any order and of all kinds, equal bits, the cache, disagreements.
#include "horovod/named/engine.h"
#include "horovod/named/table.h"
#include "horovod/named/testing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

namespace cohort::named {
namespace {

using namespace testing;

TEST(NamedEngine, AThousandTensorsInAnOrderOfEachRanksOwn) {
  constexpr int kTensors = 1000;
  constexpr int kSteps = 3;
  for (const int size : {1, 2, 4}) {
    with_engines(size, [&](Engine& engine) {
      std::mt19937 random(static_cast<unsigned>(engine.rank() + 1));
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      std::uint64_t exchanges = 0;
      for (int step = 0; step < kSteps; ++step) {
        std::shuffle(order.begin(), order.end(), random);
        std::vector<std::vector<float>> tensors(kTensors);
        std::vector<std::pair<int, Handle>> handles;
        for (const int i : order) {
          tensors[static_cast<std::size_t>(i)].assign(256, static_cast<float>(i + step + engine.rank()));
          handles.emplace_back(
              i, engine.submit(all_reduce("t" + std::to_string(i), tensors[static_cast<std::size_t>(i)])));
        }
        for (auto& [i, handle] : handles) {
          handle.wait();
          const int sum = size * (i + step) + size * (size - 1) / 2;
          ASSERT_EQ(tensors[static_cast<std::size_t>(i)], std::vector<float>(256, static_cast<float>(sum)));
        }
        // No rank requests anything new before the last step ends.
        if (step == kSteps - 1) {
          EXPECT_EQ(engine.statistics().exchanges, exchanges) << "a repeated step was described again";
        }
        engine.submit(barrier("step")).wait();
        if (step == 0) exchanges = engine.statistics().exchanges;
      }
    });
  }
}

TEST(NamedEngine, CarriesOutAllKinds) {
  for (const int size : {1, 2, 3}) {
    with_engines(size, [&](Engine& engine) {
      const int rank = engine.rank();
      for (int step = 0; step < 3; ++step) {  // the second step uses the cache, the third has other counts
        const int more = step == 2 ? 1 : 0;
        std::vector<std::int32_t> mine(static_cast<std::size_t>(2 * (rank + more)), rank);  // rank 0 has no data
        std::vector<double> root_data(5, rank == size - 1 ? 3.5 : 0.0);
        std::vector<float> wide(static_cast<std::size_t>(2 * (size + 1 + more)));
        std::iota(wide.begin(), wide.end(), static_cast<float>(rank));
        std::vector<std::int64_t> splits(static_cast<std::size_t>(size));
        for (int to = 0; to < size; ++to) splits[static_cast<std::size_t>(to)] = rank + to + more;
        const auto rows = std::accumulate(splits.begin(), splits.end(), std::int64_t{0});
        std::vector<std::int16_t> parts;
        for (int to = 0; to < size; ++to) {
          parts.insert(parts.end(), static_cast<std::size_t>(rank + to + more),
                       static_cast<std::int16_t>(10 * rank + to));
        }
        ASSERT_EQ(static_cast<std::int64_t>(parts.size()), rows);

        Handle gathered = engine.submit(by_rows(Kind::AllGather, "gather", mine, 2));
        Handle exchanged = engine.submit(by_rows(Kind::AllToAll, "exchange", parts, 1, splits));
        Handle scattered = engine.submit(by_rows(Kind::ReduceScatter, "scatter", wide, 2));
        Handle spread = engine.submit(broadcast("spread", root_data, size - 1));

        std::vector<std::int32_t> all;
        std::vector<std::int64_t> brought;
        for (int from = 0; from < size; ++from) {
          all.insert(all.end(), static_cast<std::size_t>(2 * (from + more)), from);
          brought.push_back(from + more);
        }
        EXPECT_EQ(values_of<std::int32_t>(gathered.outcome()), all);
        EXPECT_EQ(gathered.outcome().received_splits, brought);
        EXPECT_EQ(gathered.outcome().shape[1], 2);

        std::vector<std::int16_t> received;
        std::vector<std::int64_t> received_splits;
        for (int from = 0; from < size; ++from) {
          received.insert(received.end(), static_cast<std::size_t>(from + rank + more),
                          static_cast<std::int16_t>(10 * from + rank));
          received_splits.push_back(from + rank + more);
        }
        EXPECT_EQ(values_of<std::int16_t>(exchanged.outcome()), received);
        EXPECT_EQ(exchanged.outcome().received_splits, received_splits);

        // Rows 0 .. size + more, of which the first ranks get one more.
        const std::vector<std::int64_t> share = scattered_rows(size + 1 + more, size);
        std::int64_t before = 0;
        for (int i = 0; i < rank; ++i) before += share[static_cast<std::size_t>(i)];
        std::vector<float> sums;
        for (std::int64_t i = 2 * before; i < 2 * (before + share[static_cast<std::size_t>(rank)]); ++i) {
          sums.push_back(static_cast<float>(size * i + size * (size - 1) / 2));
        }
        EXPECT_EQ(values_of<float>(scattered.outcome()), sums);

        spread.wait();
        EXPECT_EQ(root_data, std::vector<double>(5, 3.5));
      }
    });
  }
}

TEST(NamedEngine, PutsResultsWhereTheCallerWantsThem) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> mine(3, static_cast<float>(engine.rank()));
    std::vector<float> result;
    std::vector<std::int64_t> asked;
    Request request = by_rows(Kind::AllGather, "x", mine);
    request.allocate = [&](std::span<const std::int64_t> shape) {
      asked.assign(shape.begin(), shape.end());
      result.resize(static_cast<std::size_t>(shape[0]));
      return static_cast<void*>(result.data());
    };
    engine.submit(std::move(request)).wait();
    EXPECT_EQ(asked, (std::vector<std::int64_t>{6, 1}));
    EXPECT_EQ(result, (std::vector<float>{0, 0, 0, 1, 1, 1}));
  });
}

TEST(NamedEngine, LeavesInputsAloneAndGivesTheBitsOfTheCommunicator) {
  run_on_threads(3, [](Communicator comm) {
    constexpr int kTensors = 40;
    std::mt19937 random(static_cast<unsigned>(comm.rank()));
    std::vector<std::vector<float>> inputs;
    std::vector<std::vector<float>> expected;
    for (int i = 0; i < kTensors; ++i) {
      std::vector<float> values(static_cast<std::size_t>(i % 8 == 7 ? 50000 : 1 + 37 * i));  // some too large to fuse
      std::normal_distribution<float> normal;
      for (float& value : values) value = normal(random);
      inputs.push_back(values);
      comm.all_reduce(std::span(values), {.op = ReduceOp::Average, .postscale = 3}).wait();
      expected.push_back(std::move(values));
    }
    const std::vector<std::vector<float>> before = inputs;
    Engine engine(comm);
    for (int step = 0; step < 4; ++step) {
      std::vector<int> order(kTensors);
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::vector<float>> outputs(kTensors);
      std::vector<Handle> handles;
      for (const int i : order) {
        const auto at = static_cast<std::size_t>(i);
        outputs[at].resize(inputs[at].size());
        Request request = all_reduce("t" + std::to_string(i), outputs[at], ReduceOp::Average);
        request.input = std::span(std::as_const(inputs[at]));
        request.postscale = 3;
        handles.push_back(engine.submit(std::move(request)));
      }
      for (Handle& handle : handles) handle.wait();
      for (std::size_t i = 0; i < kTensors; ++i) {
        ASSERT_EQ(std::memcmp(outputs[i].data(), expected[i].data(), expected[i].size() * sizeof(float)), 0) << i;
      }
    }
    EXPECT_EQ(inputs, before);
    engine.submit(barrier("end")).wait();
  });
}

TEST(NamedEngine, ReportsDisagreementByNameOnAllRanksAndGoesOn) {
  with_engines(3, [](Engine& engine) {
    const bool odd = engine.rank() == 1;
    std::vector<float> data(4, 1.0f);
    std::vector<float> longer(5, 1.0f);
    std::vector<double> wide(4, 1.0);
    std::vector<float> good(2, 1.0f);
    for (int step = 0; step < 2; ++step) {  // a refused operation is not remembered
      Handle fine = engine.submit(all_reduce("fine", good));
      std::vector<std::pair<Handle, std::pair<std::string, std::string>>> bad;
      const auto submit = [&](Request most, Request one, std::string say, std::string and_say) {
        bad.emplace_back(engine.submit(odd ? std::move(one) : std::move(most)),
                         std::pair(std::move(say), std::move(and_say)));
      };
      submit(all_reduce("shape", data), all_reduce("shape", longer), "float32[4]", "float32[5]");
      submit(all_reduce("type", data), all_reduce("type", wide), "float32[4]", "float64[4]");
      submit(all_reduce("op", data), all_reduce("op", data, ReduceOp::Max), "sum", "max");
      submit(broadcast("root", data, 0), broadcast("root", data, 2), "from rank 0", "from rank 2");
      submit(all_reduce("kind", data), barrier("kind"), "all_reduce(", "barrier");
      for (auto& [handle, texts] : bad) {
        const Error error = error_of(handle);
        EXPECT_EQ(error.code(), ErrorCode::Mismatch);
        EXPECT_TRUE(contains(error.what(), texts.first)) << error.what();
        EXPECT_TRUE(contains(error.what(), texts.second)) << error.what();
        EXPECT_TRUE(contains(error.what(), "rank 1 brought")) << error.what();
      }
      fine.wait();
    }
    EXPECT_EQ(good, std::vector<float>(2, 9.0f));
    EXPECT_EQ(data, std::vector<float>(4, 1.0f)) << "something was delivered";
  });
}

TEST(NamedEngine, NoticesThatACachedNameHasChanged) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> data(4, 1.0f);
    for (int i = 0; i < 2; ++i) engine.submit(all_reduce("x", data)).wait();
    std::vector<float> longer(6, 1.0f);
    engine.submit(all_reduce("x", longer)).wait();  // on both ranks
    EXPECT_EQ(longer, std::vector<float>(6, 2.0f));
    const Error error = error_of(engine.submit(engine.rank() == 0 ? all_reduce("x", data) : all_reduce("x", longer)));
    EXPECT_EQ(error.code(), ErrorCode::Mismatch);
    EXPECT_TRUE(contains(error.what(), "float32[4]") && contains(error.what(), "float32[6]")) << error.what();
    engine.submit(all_reduce("x", data)).wait();
    EXPECT_EQ(data, std::vector<float>(4, 8.0f));
  });
}

TEST(NamedEngine, RefusesANameThatIsUnderWay) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> data(1, 1.0f);
    std::vector<float> other(1, 1.0f);
    if (engine.rank() == 0) {
      Handle first = engine.submit(all_reduce("x", data));  // rank 1 has not requested it, and waits for "go"
      EXPECT_THROW(engine.submit(all_reduce("x", other)), Error);
      std::vector<Request> pair;
      pair.push_back(all_reduce("y", other));
      pair.push_back(all_reduce("x", other));
      EXPECT_THROW(engine.submit(std::move(pair)), Error);  // then "y" was not accepted either
      engine.submit(barrier("go")).wait();
      first.wait();
    } else {
      engine.submit(barrier("go")).wait();
      engine.submit(all_reduce("x", data)).wait();
    }
    engine.submit(all_reduce("y", other)).wait();
    EXPECT_EQ(other, std::vector<float>(1, 2.0f));
  });
}

TEST(NamedEngine, TakesRequestsFromManyThreads) {
  with_engines(2, [](Engine& engine) {
    std::vector<std::jthread> threads;
    for (int thread = 0; thread < 4; ++thread) {
      threads.emplace_back([&engine, thread] {
        for (int i = 0; i < 50; ++i) {
          std::vector<std::int64_t> data(10, i + thread);
          engine.submit(all_reduce("of thread " + std::to_string(thread), data)).wait();
          ASSERT_EQ(data, std::vector<std::int64_t>(10, 2 * (i + thread)));
        }
      });
    }
  });
}

TEST(NamedEngine, WorksWithACacheThatIsTooSmallOrNone) {
  for (const std::size_t capacity : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
    EngineOptions options;
    options.cache_capacity = capacity;
    with_engines(
        3,
        [](Engine& engine) {
          std::mt19937 random(static_cast<unsigned>(engine.rank()));
          for (int step = 0; step < 10; ++step) {
            std::vector<int> order(12);
            std::iota(order.begin(), order.end(), 0);
            std::shuffle(order.begin(), order.end(), random);
            std::vector<std::vector<std::int32_t>> data(12, std::vector<std::int32_t>(3, engine.rank()));
            std::vector<Handle> handles;
            for (const int i : order) {
              handles.push_back(engine.submit(all_reduce(std::to_string(i), data[static_cast<std::size_t>(i)])));
              if (random() % 8 == 0) std::this_thread::yield();
            }
            for (Handle& handle : handles) handle.wait();
            for (const auto& one : data) ASSERT_EQ(one, std::vector<std::int32_t>(3, 3));
          }
        },
        options);
  }
}

TEST(NamedEngine, FusesWhatWasSubmittedTogether) {
  with_engines(2, [](Engine& engine) {
    std::vector<std::vector<float>> data(100, std::vector<float>(10, 1.0f));
    const std::uint64_t before = engine.statistics().batches;
    std::vector<Request> requests;
    for (std::size_t i = 0; i < data.size(); ++i) requests.push_back(all_reduce(std::to_string(i), data[i]));
    for (Handle& handle : engine.submit(std::move(requests))) handle.wait();
    for (const auto& one : data) EXPECT_EQ(one, std::vector<float>(10, 2.0f));
    EXPECT_EQ(engine.statistics().batches, before + 1);
  });
}

TEST(NamedEngine, FormsGroupsThatProgressIndependently) {
  with_engines(3, [](Engine& world) {
    const std::array<int, 2> members{2, 0};
    Communicator comm = world.form_group(members);
    EXPECT_EQ(static_cast<bool>(comm), world.rank() != 1);
    EXPECT_EQ(error_of(world.submit([] {
                Request twice;
                twice.name = "twice";
                twice.kind = Kind::Group;
                twice.splits = {0, 0};
                return twice;
              }()))
                  .code(),
              ErrorCode::InvalidArgument);
    std::vector<float> data(3, 1.0f);
    std::vector<float> everyones(1, 1.0f);
    if (comm) {
      Engine group(comm);
      EXPECT_EQ(group.rank(), world.rank() == 2 ? 0 : 1);
      Handle waits = world.submit(all_reduce("x", everyones));  // rank 1 requests it only after the group is done
      for (int i = 0; i < 3; ++i) group.submit(all_reduce("x", data)).wait();
      EXPECT_EQ(data, std::vector<float>(3, 8.0f));
      EXPECT_FALSE(waits.done());
      group.submit(barrier("done")).wait();
      world.submit(barrier("done")).wait();
      waits.wait();
    } else {
      world.submit(barrier("done")).wait();
      world.submit(all_reduce("x", everyones)).wait();
    }
    EXPECT_EQ(everyones, std::vector<float>(1, 3.0f));
  });
}

TEST(NamedEngine, TellsWhenAnOperationIsDone) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> data(1, 1.0f);
    std::atomic<bool> called{false};
    Handle handle = engine.submit(all_reduce("x", data));
    handle.on_done([&] { called = true; });
    handle.wait();
    Work work = handle.work();
    EXPECT_TRUE(work.done());
    work.wait();
    EXPECT_TRUE(handle.wait_for(std::chrono::seconds(0)));
    engine.submit(barrier("callbacks are over")).wait();
    EXPECT_TRUE(called);
  });
}

TEST(NamedEngine, WakesPeersThatSleep) {
  with_engines(2, [](Engine& engine) {
    for (int i = 0; i < 3; ++i) {
      // Only rank 0 makes a request; rank 1's engine has been asleep for some time.
      std::vector<float> data(1, 1.0f);
      if (engine.rank() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(30));
      engine.submit(all_reduce("x", data)).wait();
      EXPECT_EQ(data[0], 2.0f);
    }
  });
}

}  // namespace
}  // namespace cohort::named
