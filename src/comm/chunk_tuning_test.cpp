// Ranks on several hosts make their pieces longer as they learn how fast the wire is. Sums stay the same to the bit,
// whatever the pieces, the order of sizes, and who has learnt what.
#include "comm/communicator_impl.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <random>
#include <span>
#include <thread>
#include <vector>

namespace cohort::comm {
namespace {

using namespace std::chrono_literals;

std::vector<float> brought_by(int rank, std::size_t count) {
  std::mt19937 random(static_cast<unsigned>(rank) * 6007 + static_cast<unsigned>(count));
  std::vector<float> values(count);
  for (float& value : values) value = (static_cast<float>(random()) / 4294967296.0F - 0.5F) * 1e6F;
  return values;
}

class ChunkTuner : public ::testing::TestWithParam<const char*> {};

TEST_P(ChunkTuner, DoesNotChangeResults) {
  constexpr int kRanks = 8;
  // From a world that knows nothing of its wire, over sizes that teach it, to sizes of all kinds, twice.
  const std::vector<std::size_t> counts = {70001,   1 << 20, 1 << 20, 3 << 19, 300007,
                                           1 << 20, 70001,   33000,   1 << 20, 300007};
  std::vector<Communicator> world = comm::testing::Worlds(std::string("hosts:") + GetParam()).form(kRanks);
  std::vector<std::vector<std::vector<float>>> results(kRanks);
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) {
      ranks.emplace_back([&, rank] {
        try {
          Communicator& comm = world[static_cast<std::size_t>(rank)];
          for (std::size_t i = 0; i < counts.size(); ++i) {
            std::vector<float> values = brought_by(rank, counts[i]);
            const std::vector<float> own = values;
            // One comes late, so that ranks do not learn the same.
            if (rank == 5 && i == 4) std::this_thread::sleep_for(20ms);
            comm.all_reduce(std::span(values)).wait();
            std::vector<float> kept(counts[i] / kRanks);
            comm.reduce_scatter(std::span(own).first(kept.size() * kRanks), std::span(kept)).wait();
            EXPECT_EQ(std::memcmp(kept.data(), values.data() + kept.size() * static_cast<std::size_t>(rank),
                                  kept.size() * sizeof(float)),
                      0)
                << "reduce_scatter " << i;
            results[static_cast<std::size_t>(rank)].push_back(std::move(values));
          }
        } catch (const std::exception& error) {
          ADD_FAILURE() << error.what();
        }
      });
    }
  }
  for (const auto& of_rank : results) ASSERT_EQ(of_rank.size(), counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) {
    std::vector<double> sums(counts[i], 0);
    for (int rank = 0; rank < kRanks; ++rank) {
      const std::vector<float> values = brought_by(rank, counts[i]);
      for (std::size_t k = 0; k < sums.size(); ++k) sums[k] += static_cast<double>(values[k]);
    }
    for (std::size_t k = 0; k < sums.size(); ++k) ASSERT_NEAR(results[0][i][k], sums[k], 2) << i << " " << k;
    for (std::size_t rank = 1; rank < kRanks; ++rank) EXPECT_EQ(results[rank][i], results[0][i]) << i << " " << rank;
  }
  std::map<std::size_t, std::vector<float>> first;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    EXPECT_EQ(first.try_emplace(counts[i], results[0][i]).first->second, results[0][i]) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Hosts, ChunkTuner, ::testing::Values("2", "4", "8", "3,5", "1,1,6"));

}  // namespace
}  // namespace cohort::comm
