// Operations that only move data, between more hosts than may all meet: their trees, and threads as ranks of fake
// hosts.
#include "comm/hosts/moves.h"
#include "comm/hosts/trees.h"
#include "comm/testing/worlds.h"

#include <cohort/communicator.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>
#include <vector>

namespace cohort::comm::hosts {
namespace {

int power_of_two(int number) { return number > 0 && (number & (number - 1)) == 0; }

/// Number of positions between this one and the root.
template <class Tree>
int depth(int at, const Tree& tree) {
  int found = 0;
  while (at > 0 && found < 100) {
    at = tree(at).parent;
    ++found;
  }
  return found;
}

/// Every position is the child of its parent alone.
template <class Tree>
void expect_tree(int hosts, const Tree& tree) {
  std::vector<int> parent(static_cast<std::size_t>(hosts), -1);
  for (int at = 0; at < hosts; ++at) {
    for (const int child : tree(at).children) {
      ASSERT_TRUE(child > 0 && child < hosts);
      EXPECT_EQ(parent[static_cast<std::size_t>(child)], -1);
      parent[static_cast<std::size_t>(child)] = at;
    }
  }
  for (int at = 0; at < hosts; ++at) EXPECT_EQ(tree(at).parent, parent[static_cast<std::size_t>(at)]) << at;
}

TEST(Turns, FourSendersAtOnceOrMoreOfLittleData) {
  constexpr std::size_t kKiB = 1024;
  EXPECT_EQ(senders_at_once({}), 0U);
  EXPECT_EQ(senders_at_once(std::vector<std::size_t>(4, 1024 * kKiB)), 4U);
  EXPECT_EQ(senders_at_once(std::vector<std::size_t>(15, 1024 * kKiB)), 4U);
  EXPECT_EQ(senders_at_once(std::vector<std::size_t>(15, 16 * kKiB)), 15U);
  EXPECT_EQ(senders_at_once(std::vector<std::size_t>(30, 16 * kKiB)), 16U);
  EXPECT_EQ(senders_at_once({0, 0, 0, 0, 0, 1024 * kKiB}), 5U);
  EXPECT_EQ(senders_at_once({1024 * kKiB, 0, 0, 0, 0, 1}), 4U);
}

TEST(Trees, NoHostSendsInBothOfTwoTreesAndDistancesArePowersOfTwo) {
  for (int hosts = 2; hosts < 700; hosts += hosts < 70 ? 1 : 29) {
    SCOPED_TRACE(hosts);
    std::vector<int> sends(static_cast<std::size_t>(hosts));
    int others = 0;
    for (int tree = 0; tree < 2; ++tree) {
      const auto of = [&](int at) { return one_of_two_trees(tree, at, hosts); };
      expect_tree(hosts, of);
      for (int at = 0; at < hosts; ++at) {
        const Neighbours found = of(at);
        EXPECT_LE(found.children.size(), at == 0 ? 1U : 2U);
        EXPECT_LE((1 << depth(at, of)) / 2, hosts);
        if (at > 0 && !found.children.empty()) ++sends[static_cast<std::size_t>(at)];
        const int distance = at - found.parent;
        if (at > 0 && !power_of_two(std::abs(distance)) && !power_of_two(hosts - std::abs(distance))) ++others;
      }
    }
    EXPECT_LE(*std::max_element(sends.begin(), sends.end()), 1);
    EXPECT_LE(others, 1);  // from the root to the shifted tree
  }
}

TEST(Trees, ThoseBelowAHostFollowItAndAtMost15HaveTheSameDepthBelow) {
  for (int hosts = 2; hosts < 5000; hosts += hosts < 70 ? 1 : 491) {
    SCOPED_TRACE(hosts);
    expect_tree(hosts, [&](int at) { return radix_tree(at, hosts); });
    for (int at = 0; at < hosts; ++at) {
      int next = at + 1;
      std::vector<int> ends;
      for (const int child : radix_tree(at, hosts).children) {
        EXPECT_EQ(child, next);
        ends.push_back(radix_end(child, hosts) - child);
        next = radix_end(child, hosts);
      }
      EXPECT_EQ(next, radix_end(at, hosts));
      for (const int end : ends) EXPECT_LE(std::count(ends.begin(), ends.end(), end), 16);
    }
  }
}

std::uint8_t value(int seed, int rank, std::size_t i) {
  return static_cast<std::uint8_t>(
      (static_cast<std::size_t>(seed) * 31 + static_cast<std::size_t>(rank) * 7 + i * 13 + i / 251) % 251);
}
std::vector<std::uint8_t> bytes_of(int seed, int rank, std::int64_t count) {
  std::vector<std::uint8_t> made(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < made.size(); ++i) made[i] = value(seed, rank, i);
  return made;
}
std::vector<std::uint8_t> all_of(int seed, const std::vector<std::int64_t>& counts) {
  std::vector<std::uint8_t> all;
  for (std::size_t rank = 0; rank < counts.size(); ++rank) {
    const auto part = bytes_of(seed, static_cast<int>(rank), counts[rank]);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

/// A number of elements for each rank: many have none, some a few, two more than a slice of a slab, or than a piece.
std::vector<std::int64_t> uneven(int size, int seed) {
  std::vector<std::int64_t> counts;
  for (int rank = 0; rank < size; ++rank) {
    const int kind = (rank * 5 + seed) % 11;
    counts.push_back(kind < 4 ? 0 : kind < 8 ? kind * 3 : kind < 10 ? 3001 : 9001);
  }
  counts[static_cast<std::size_t>(seed * 7 % size)] = 150'001;
  counts[static_cast<std::size_t>((seed * 3 + 1) % size)] = 300'007;
  return counts;
}

class Moves : public ::testing::TestWithParam<std::vector<int>> {
 protected:
  // As bytes, which may be objects, and as what may not.
  static ConstBuffer given(const std::vector<std::uint8_t>& from) {
    return {from.data(), static_cast<std::int64_t>(from.size()), DType::UInt8};
  }
  static Buffer taken(std::vector<std::uint8_t>& to) {
    return {to.data(), static_cast<std::int64_t>(to.size()), DType::UInt8};
  }
  int size() const { return static_cast<int>(GetParam().size()); }
  /// First, last, in the middle, and around a block of 16.
  std::vector<int> roots() const {
    std::set<int> some = {0, size() / 2, size() - 1};
    for (const int root : {15, 16, 33}) some.insert(std::min(root, size() - 1));
    return {some.begin(), some.end()};
  }
  void run(const std::function<void(Communicator)>& body) const {
    run_on_threads_of(form_on_threads(usual_backend(true), GetParam(), size(), {}), body);
  }
};

TEST_P(Moves, ABroadcastReachesAllFromAnyRoot) {
  run([&](Communicator comm) {
    for (const std::int64_t count : {0, 1, 7, 8193, 100'003, 2'000'001}) {
      for (const int root : count < 1'000'000 ? roots() : std::vector<int>{0, size() / 2 + 1}) {
        auto data = bytes_of(root, comm.rank(), count);
        comm.broadcast(taken(data), {.root = root}).wait();
        EXPECT_EQ(data, bytes_of(root, root, count)) << "root " << root << ", " << count;
      }
    }
  });
}

TEST_P(Moves, AllGatherBringsEveryPartToAll) {
  run([&](Communicator comm) {
    for (const std::int64_t count : {0, 1, 37, 8193, 20'000}) {
      const std::vector<std::int64_t> counts(static_cast<std::size_t>(size()), count);
      const auto own = bytes_of(1, comm.rank(), count);
      std::vector<std::uint8_t> all(own.size() * counts.size());
      comm.all_gather(given(own), taken(all)).wait();
      EXPECT_EQ(all, all_of(1, counts)) << count;
    }
    for (int seed = 0; seed < 3; ++seed) {
      const auto counts = uneven(size(), seed);
      const auto expected = all_of(seed, counts);
      const auto own = bytes_of(seed, comm.rank(), counts[static_cast<std::size_t>(comm.rank())]);
      std::vector<std::uint8_t> all(expected.size());
      comm.all_gather_v(given(own), taken(all), counts).wait();
      EXPECT_EQ(all, expected) << seed;
    }
  });
}

TEST_P(Moves, GatherAndScatterAreOfAnyRoot) {
  run([&](Communicator comm) {
    int seed = 0;
    for (const int root : roots()) {
      std::vector<std::vector<std::int64_t>> cases;
      for (const std::int64_t count : {0, 1, 9'001}) cases.emplace_back(static_cast<std::size_t>(size()), count);
      cases.push_back(uneven(size(), ++seed));
      for (const auto& counts : cases) {
        const auto expected = all_of(seed, counts);
        const auto own = bytes_of(seed, comm.rank(), counts[static_cast<std::size_t>(comm.rank())]);
        std::vector<std::uint8_t> all(comm.rank() == root ? expected.size() : 0);
        comm.gather_v(given(own), taken(all), counts, {.root = root}).wait();
        if (comm.rank() == root) {
          EXPECT_EQ(all, expected) << root;
        }
        std::vector<std::uint8_t> back(own.size());
        comm.scatter_v(given(all), taken(back), counts, {.root = root}).wait();
        EXPECT_EQ(back, own) << root;
      }
      // As numbers, with equal parts.
      std::vector<std::int32_t> own(500, comm.rank()), back(500);
      std::vector<std::int32_t> all(comm.rank() == root ? own.size() * static_cast<std::size_t>(size()) : 0);
      const auto many = static_cast<std::int64_t>(all.size());
      comm.gather(ConstBuffer(own.data(), 500, DType::Int32), Buffer(all.data(), many, DType::Int32), {.root = root})
          .wait();
      comm.scatter(ConstBuffer(all.data(), many, DType::Int32), Buffer(back.data(), 500, DType::Int32), {.root = root})
          .wait();
      EXPECT_EQ(back, own) << root;
    }
  });
}

std::vector<int> hosts_of(int hosts, int ranks, bool dealt = false) {
  std::vector<int> made;
  made.reserve(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) made.push_back(dealt ? rank % hosts : rank * hosts / ranks);
  return made;
}

std::string name_of_hosts(const ::testing::TestParamInfo<std::vector<int>>& tested) {
  const std::vector<int>& hosts = tested.param;
  const int count = *std::max_element(hosts.begin(), hosts.end()) + 1;
  const bool dealt = static_cast<int>(hosts.size()) > count && hosts[1] == 1;
  return std::to_string(hosts.size()) + "RanksOn" + std::to_string(count) + (dealt ? "Dealt" : "");
}

INSTANTIATE_TEST_SUITE_P(Hosts, Moves,
                         ::testing::Values(hosts_of(9, 12, true), hosts_of(16, 16), hosts_of(17, 17), hosts_of(18, 18),
                                           hosts_of(33, 33), hosts_of(40, 40), hosts_of(18, 36), hosts_of(17, 30),
                                           hosts_of(17, 34, true)),
                         name_of_hosts);

}  // namespace
}  // namespace cohort::comm::hosts
