#include "launch/health/places.h"

#include <gtest/gtest.h>

#include <chrono>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace cohort::launch {
namespace {

using std::chrono::seconds;

PlannedHost host(const std::string& name, int slots, int first_rank = 0, int ranks = 0) {
  PlannedHost host;
  host.name = name;
  host.slots = slots;
  host.first_rank = first_rank;
  host.ranks = ranks;
  return host;
}

class ElasticPlaces : public testing::Test {
 protected:
  std::vector<int> free(const PlannedHost& host) const {
    return places_.free_slots(
        host, [this](int worker) { return ended_.contains(worker); }, now_);
  }
  std::set<std::string> barred_;
  std::set<int> ended_;
  Places places_{std::pair(seconds(2), seconds(5)), barred_};
  Places::Time now_{seconds(1000)};
};

TEST_F(ElasticPlaces, RestTwiceAsLongAfterEachFailure) {
  EXPECT_TRUE(places_.may_use("a", now_));
  for (const int pause : {2, 4, 5, 5}) {
    places_.note_failure("a", now_);
    EXPECT_FALSE(places_.may_use("a", now_));
    EXPECT_TRUE(places_.may_use("b", now_));
    now_ += seconds(pause) - seconds(1);
    places_.note_failure("a", now_);  // while it rests: of the same trouble
    EXPECT_FALSE(places_.may_use("a", now_));
    now_ += seconds(1);
    EXPECT_TRUE(places_.may_use("a", now_));
  }
  now_ += seconds(6);  // that is long ago
  places_.note_failure("a", now_);
  EXPECT_TRUE(places_.may_use("a", now_ + seconds(2)));
}

TEST_F(ElasticPlaces, RestForEverWithoutACooldown) {
  Places places(std::nullopt, barred_);
  places.note_failure("a", now_);
  EXPECT_FALSE(places.may_use("a", now_ + seconds(1000000)));
  places.take(0, "b", 0);
  places.hold(0, now_);
  EXPECT_TRUE(places
                  .free_slots(
                      host("b", 1), [](int) { return true; }, now_ + seconds(1000000))
                  .empty());
  places.add(host("a", 1));
  EXPECT_TRUE(places.may_use("a", now_)) << "its user says so";
}

TEST_F(ElasticPlaces, AreFreeOnceTheirWorkersHaveEnded) {
  places_.take_all(host("a", 3, 4, 2));
  EXPECT_EQ(free(host("a", 3)), (std::vector<int>{2}));
  EXPECT_EQ(free(host("b", 1)), (std::vector<int>{0}));
  ended_ = {4, 5};
  places_.hold(5, now_);  // it left on notice
  EXPECT_EQ(free(host("a", 3)), (std::vector<int>{0, 2}));
  now_ += seconds(2);
  EXPECT_EQ(free(host("a", 3)), (std::vector<int>{0, 1, 2}));
  places_.take(6, "a", 0);
  EXPECT_EQ(free(host("a", 2)), (std::vector<int>{1}));
}

TEST_F(ElasticPlaces, OfHostsThatAreTakenAwayAreUsedOnceTheyAreListedAnew) {
  places_.come(host("a", 1));
  places_.bar("a");
  places_.list({host("a", 2), host("b", 1)});
  EXPECT_FALSE(places_.may_use("a", now_));
  EXPECT_EQ(places_.listed().size(), 2U);
  places_.list({host("b", 1)});
  EXPECT_FALSE(places_.lists("a"));
  places_.list({host("a", 2), host("b", 1)});
  EXPECT_TRUE(places_.may_use("a", now_));
  places_.add(host("c", 1));
  places_.add(host("c", 3));
  places_.list({host("a", 2), host("c", 9)});
  ASSERT_EQ(places_.listed().size(), 2U) << "once each";
  EXPECT_EQ(places_.listed()[0].slots, 3) << "as its user said";
  places_.take_away("c");
  EXPECT_FALSE(places_.may_use("c", now_));
  places_.list({});
  EXPECT_FALSE(places_.lists("c"));
}

}  // namespace
}  // namespace cohort::launch
