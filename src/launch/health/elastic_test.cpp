#include "launch/health/elastic.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>
#include <vector>

namespace cohort::launch {
namespace {

using Kind = Elastic::Decision::Kind;

std::vector<Elastic::Worker> workers_on(const std::vector<int>& hosts) {
  std::vector<Elastic::Worker> workers;
  for (std::size_t i = 0; i < hosts.size(); ++i)
    workers.push_back({static_cast<int>(i), hosts[i], fmt::format("h{}", hosts[i])});
  return workers;
}

std::vector<int> numbers(const rendezvous::Membership& membership) {
  std::vector<int> all;
  for (const auto& member : membership.members) all.push_back(member.worker);
  return all;
}

TEST(ElasticMembers, GoOnWithoutWhoFails) {
  Elastic elastic({.least = 2}, workers_on({0, 0, 1, 1}));
  EXPECT_EQ(elastic.current().epoch, 0U);
  EXPECT_EQ(elastic.leave({1}, "worker 1 fell").kind, Kind::Announce);
  EXPECT_EQ(elastic.current().epoch, 1U);
  EXPECT_EQ(elastic.current().cause, "worker 1 fell");
  EXPECT_EQ(numbers(elastic.current()), (std::vector<int>{0, 2, 3}));
  EXPECT_EQ(elastic.sizes(), "3 of 4 workers");
  EXPECT_TRUE(elastic.can_spare(1).has_value());
  EXPECT_FALSE(elastic.can_spare(2).has_value());
  EXPECT_TRUE(elastic.can_lose(1));
  EXPECT_FALSE(elastic.can_lose(2)) << "nobody else may come";
  EXPECT_EQ(elastic.leave({1}, "again").kind, Kind::Nothing) << "it has left already";
  EXPECT_EQ(elastic.leave({0}, "").kind, Kind::Announce);
  EXPECT_EQ(elastic.current().members.front().host_number, 0) << "hosts are numbered anew";
  const auto last = elastic.leave({2}, "");
  EXPECT_EQ(last.kind, Kind::End);
  EXPECT_EQ(last.why, "1 worker is left, and 2 are wanted");
  EXPECT_EQ(elastic.current().epoch, 2U);
  EXPECT_EQ(elastic.leave({3}, "").kind, Kind::Nothing) << "it is over";
}

TEST(ElasticMembers, TheHostThatCameLastIsTheFirstToLeave) {
  Elastic elastic({.least = 1}, workers_on({2, 0, 1, 0}));
  EXPECT_EQ(elastic.youngest_hosts_first(), (std::vector<int>{1, 0, 2}));
  EXPECT_EQ(elastic.leave({0, 1}, "").kind, Kind::Announce);
  EXPECT_EQ(elastic.come({{4, 2, "h2"}}, "").kind, Kind::Announce);
  EXPECT_EQ(elastic.youngest_hosts_first(), (std::vector<int>{2, 0, 1}));
}

TEST(ElasticMembers, WhoHasEndedWithZeroIsInNoLaterEpoch) {
  Elastic elastic({.least = 1, .others_may_come = true}, workers_on({0, 0, 0}));
  elastic.finish(0);
  EXPECT_EQ(elastic.current().epoch, 0U);
  EXPECT_EQ(elastic.room(), 0) << "the job comes to its end";
  EXPECT_EQ(elastic.leave({1}, "").kind, Kind::Announce);
  EXPECT_EQ(numbers(elastic.current()), (std::vector<int>{2}));
  EXPECT_EQ(elastic.leave({2}, "").kind, Kind::End);
}

TEST(ElasticMembers, WhoWaitsForThoseThatHaveFinishedGoesOnWithoutThem) {
  Elastic elastic({.least = 1}, workers_on({0, 0, 0}));
  EXPECT_EQ(elastic.leave_out_finished().kind, Kind::Nothing);
  EXPECT_EQ(elastic.leave({2}, "worker 2 was killed").kind, Kind::Announce);
  elastic.finish(0);  // before it heard of that: worker 1 waits for it
  EXPECT_EQ(elastic.leave_out_finished().kind, Kind::Announce);
  EXPECT_EQ(numbers(elastic.current()), (std::vector<int>{1}));
  EXPECT_EQ(elastic.leave_out_finished().kind, Kind::Nothing);
}

TEST(ElasticMembers, ChangeNoMoreOftenThanTheyMay) {
  Elastic elastic({.least = 1, .most_changes = 1}, workers_on({0, 0, 0}));
  EXPECT_EQ(elastic.leave({2}, "").kind, Kind::Announce);
  EXPECT_EQ(elastic.room(), 0);
  EXPECT_EQ(elastic.leave({1}, "").why, "its members have changed 1 time (--reset-limit)");
}

TEST(ElasticMembers, WaitForOthersBelowTheLeast) {
  Elastic elastic({.least = 2, .most = 3, .others_may_come = true}, workers_on({0, 1}));
  EXPECT_EQ(elastic.room(), 1);
  EXPECT_TRUE(elastic.can_lose(1));
  EXPECT_FALSE(elastic.can_lose(2)) << "nobody would know the training";
  EXPECT_EQ(elastic.leave({0}, "").kind, Kind::Wait);
  EXPECT_TRUE(elastic.waits());
  EXPECT_EQ(elastic.room(), 2);
  EXPECT_EQ(elastic.come({{2, 2, "h2"}}, "h2 came").kind, Kind::Announce);
  EXPECT_FALSE(elastic.waits());
  EXPECT_EQ(numbers(elastic.current()), (std::vector<int>{1, 2}));
  EXPECT_EQ(elastic.give_up("").kind, Kind::Nothing);
  EXPECT_EQ(elastic.leave({2}, "").kind, Kind::Wait);
  EXPECT_EQ(elastic.give_up("nobody came").why, "nobody came");
  EXPECT_TRUE(elastic.over());
}

TEST(ElasticMembers, TheOldestIsRankZeroAlsoWhereItsHostComesLast) {
  Elastic elastic({.least = 1, .others_may_come = true}, workers_on({0, 1}));
  EXPECT_EQ(elastic.leave({0}, "").kind, Kind::Announce);
  EXPECT_EQ(elastic.come({{2, 0, "h0"}, {3, 1, "h1"}}, "").kind, Kind::Announce);
  EXPECT_EQ(numbers(elastic.current()), (std::vector<int>{1, 3, 2}));
  EXPECT_EQ(elastic.sizes(), "3 workers, 2 of them new");
}

// Whatever happens in whatever order: an epoch has only workers that run, each once, no fewer and no more than allowed,
// and its rank 0 was a member before.
TEST(ElasticMembers, HoldInAnyOrderOfEvents) {
  for (unsigned seed = 0; seed < 100'000; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&random](int most) { return static_cast<int>(random() % static_cast<unsigned>(most)); };
    std::vector<int> hosts;
    for (int host = 0; host < 1 + below(4); ++host)
      hosts.insert(hosts.end(), static_cast<std::size_t>(1 + below(3)), host);
    const int first = static_cast<int>(hosts.size());
    Elastic::Limits limits;
    limits.least = 1 + below(first);
    limits.most = below(2) == 0 ? 0 : first + below(4);
    if (below(3) == 0) limits.most_changes = below(6);
    limits.others_may_come = below(2) == 0;
    Elastic elastic(limits, workers_on(hosts));
    std::map<int, int> alive;  // worker: host
    for (int worker = 0; worker < first; ++worker) alive[worker] = hosts[static_cast<std::size_t>(worker)];
    int next_worker = first, next_host = 100;
    std::vector<Elastic::Worker> spares;  // started with the first ones, and members of no world yet
    for (int i = below(3); i > 0; --i) spares.push_back({next_worker++, 0, "h0"});
    for (int event = 0; event < 30; ++event) {
      const rendezvous::Membership before = elastic.current();
      const bool over = elastic.over();
      Elastic::Decision decision;
      const int what = below(8);
      if (what < 4 && !alive.empty()) {
        std::vector<int> lost;
        const int host = std::next(alive.begin(), below(static_cast<int>(alive.size())))->second;
        for (const auto& [worker, of] : alive) {
          if (of == host && (what == 3 || lost.empty())) lost.push_back(worker);
        }
        for (const int worker : lost) alive.erase(worker);
        decision = elastic.leave(lost, "they left", below(2) == 0 ? spares : std::vector<Elastic::Worker>());
        const auto taken = [&](const Elastic::Worker& spare) {
          return decision.kind == Kind::Announce && place_of(elastic.current(), spare.number);
        };
        for (const Elastic::Worker& spare : spares) {
          if (taken(spare)) alive[spare.number] = spare.host;
        }
        std::erase_if(spares, taken);
      } else if (what == 4 && !alive.empty() && below(5) == 0) {
        const int worker = alive.begin()->first;
        alive.erase(worker);
        elastic.finish(worker);
      } else if (what == 5) {
        decision = elastic.give_up("too long");
      } else if (const int room = std::min(elastic.room(), 3); room > 0 && limits.others_may_come) {
        std::vector<Elastic::Worker> fresh;
        const bool again = below(2) == 0 && !alive.empty();
        const int host = again ? alive.begin()->second : next_host++;
        for (int i = 0; i < 1 + below(room); ++i) {
          fresh.push_back({next_worker, host, fmt::format("h{}", host)});
          alive[next_worker++] = host;
        }
        decision = elastic.come(fresh, "they came");
      }
      const rendezvous::Membership& now = elastic.current();
      if (decision.kind != Kind::Announce) {
        ASSERT_EQ(now, before);
      } else {
        ASSERT_FALSE(over) << seed;
        ASSERT_EQ(now.epoch, before.epoch + 1) << seed;
        std::set<int> once;
        for (const auto& member : now.members) {
          ASSERT_TRUE(once.insert(member.worker).second) << seed;
          ASSERT_TRUE(alive.contains(member.worker)) << seed;
        }
        ASSERT_EQ(once.size(), alive.size()) << seed;
        ASSERT_GE(static_cast<int>(once.size()), limits.least) << seed;
        if (limits.most > 0) {
          ASSERT_LE(static_cast<int>(once.size()), limits.most) << seed;
        }
        if (limits.most_changes) {
          ASSERT_LE(now.epoch, static_cast<std::uint64_t>(*limits.most_changes)) << seed;
        }
        const int oldest = now.members.front().worker;
        ASSERT_EQ(oldest, *std::find_if(once.begin(), once.end(),
                                        [&](int worker) { return rendezvous::place_of(before, worker).has_value(); }))
            << seed;
        const auto read = rendezvous::decode_membership(rendezvous::encode(now));
        ASSERT_TRUE(read) << seed << ": " << read.error().what();
        ASSERT_EQ(*read, now) << seed;
      }
      ASSERT_TRUE(decision.kind != Kind::End || (elastic.over() && !decision.why.empty())) << seed;
      ASSERT_TRUE(!elastic.waits() || limits.others_may_come) << seed;
    }
  }
}

}  // namespace
}  // namespace cohort::launch
