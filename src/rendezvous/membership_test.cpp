#include "rendezvous/membership.h"

#include <gtest/gtest.h>

namespace cohort::rendezvous {
namespace {

Membership example() {
  return {7, {{0, "a", 0}, {3, "a", 0}, {1, "b", 1}, {9, "c", 2}}, "rank 2 (host b) was killed by signal 9"};
}

TEST(Membership, IsReadAsItWasWritten) {
  const auto read = decode_membership(encode(example()));
  ASSERT_TRUE(read) << read.error().what();
  EXPECT_EQ(*read, example());
  EXPECT_EQ(membership_key(7), "job/membership/7");
}

TEST(Membership, SaysWhatAWorkerIs) {
  EXPECT_EQ(place_of(example(), 3), (MemberPlace{1, 1, 2, 0, 3}));
  EXPECT_EQ(place_of(example(), 1), (MemberPlace{2, 0, 1, 1, 3}));
  EXPECT_EQ(place_of(example(), 2), std::nullopt);
}

TEST(Membership, IsReadStrictly) {
  const std::string good = encode(example());
  for (std::size_t length = 0; length < good.size(); ++length)
    EXPECT_FALSE(decode_membership(good.substr(0, length))) << length;
  EXPECT_FALSE(decode_membership(good + '\0'));
  const auto refused = [](const auto& change) {
    Membership changed = example();
    change(changed);
    const auto read = decode_membership(encode(changed));
    return !read && read.error().code() == ErrorCode::Corrupt;
  };
  EXPECT_TRUE(refused([](Membership& m) { m.members.clear(); }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[1].worker = 0; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[1].worker = -1; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[1].host = ""; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[1].host = "b"; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[0].host_number = 1; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[3].host_number = 0; }));
  EXPECT_TRUE(refused([](Membership& m) { m.members[3].host_number = 3; }));
}

}  // namespace
}  // namespace cohort::rendezvous
