#include "comm/hosts/levels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <vector>

namespace cohort::comm::hosts {
namespace {

constexpr int kSizes[] = {1, 2, 15, 16, 17, 18, 19, 20, 31, 33, 40, 63, 241, 256, 257, 272, 300, 1000, 1250};

TEST(Levels, EveryHostHoldsItsOwnSlot) {
  for (const int hosts : kSizes) {
    const Levels levels(hosts, 0);
    for (int level = 0; level <= levels.count(); ++level) {
      for (int host = 0; host < hosts; ++host) ASSERT_EQ(levels.holder(level, host), host) << level << " of " << hosts;
    }
    EXPECT_EQ(levels.members(levels.count()), 1);
  }
}

// Data goes up as sums do, and down as results do: each part of the last level is made of all hosts, and each host gets
// all parts.
TEST(Levels, EveryPartComesFromAllHostsAndReturnsToAll) {
  for (const int hosts : {2, 16, 17, 18, 31, 33, 40, 241, 257, 300}) {
    const Levels levels(hosts, 0);
    std::vector<std::set<int>> from(static_cast<std::size_t>(hosts));  // by slot
    for (int host = 0; host < hosts; ++host) from[static_cast<std::size_t>(host)] = {host};
    for (int level = 0; level < levels.count(); ++level) {
      std::vector<std::set<int>> next(static_cast<std::size_t>(levels.members(level + 1) * levels.stride(level + 1)));
      for (int slot = 0; slot < static_cast<int>(next.size()); ++slot) {
        const auto [first, last] = levels.sources(level, slot);
        for (int source = first; source < last; ++source) {
          const int of = levels.source_slot(level, slot, source);
          EXPECT_EQ(levels.next(level, of, levels.digit(level, slot)), slot);
          next[static_cast<std::size_t>(slot)].merge(std::set<int>(from[static_cast<std::size_t>(of)]));
        }
      }
      from = std::move(next);
    }
    for (const std::set<int>& all : from) EXPECT_EQ(all.size(), static_cast<std::size_t>(hosts));
    std::vector<std::set<int>> has(static_cast<std::size_t>(hosts));  // by host, parts of the last level
    for (int slot = 0; slot < static_cast<int>(from.size()); ++slot)
      has[static_cast<std::size_t>(levels.holder(levels.count(), slot))].insert(slot);
    for (int level = levels.count() - 1; level >= 0; --level) {
      const std::vector<std::set<int>> had = has;
      for (int slot = 0; slot < levels.members(level) * levels.stride(level); ++slot) {
        if (!levels.first_of_part(level, slot)) continue;
        for (int digit = 0; digit < levels.radix(level); ++digit) {
          const int next = levels.next(level, slot, digit);
          const int part = next % levels.stride(level + 1);
          for (const int each : had[static_cast<std::size_t>(levels.holder(level + 1, next))]) {
            if (each % levels.stride(level + 1) == part)
              has[static_cast<std::size_t>(levels.holder(level, slot))].insert(each);
          }
        }
      }
    }
    for (const std::set<int>& all : has) EXPECT_EQ(all.size(), from.size()) << hosts;
  }
}

TEST(Levels, AHostHasTensOfPeers) {
  const std::map<int, std::size_t> most = {{16, 15},  {17, 16},  {20, 16},  {33, 17},   {40, 17},
                                           {241, 30}, {256, 30}, {257, 31}, {1000, 41}, {1024, 33}};
  for (const auto& [hosts, limit] : most) {
    const Levels levels(hosts, 0);
    std::size_t found = 0;
    for (int host = 0; host < hosts; ++host) {
      const std::vector<int> peers = levels.peers(host);
      found = std::max(found, peers.size());
      for (const int peer : peers) {  // both know it
        if (hosts > 300) break;
        const std::vector<int> theirs = levels.peers(peer);
        EXPECT_TRUE(std::binary_search(theirs.begin(), theirs.end(), host)) << host << " " << peer << " of " << hosts;
      }
    }
    EXPECT_EQ(found, limit) << hosts;
  }
  EXPECT_LT(Levels(4097, 0).peers(4081).size(), 64U);
}

}  // namespace
}  // namespace cohort::comm::hosts
