#include "launch/numbered_messages.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

namespace cohort::launch {
namespace {

TEST(Routers, FewAgentsHaveNone) {
  for (std::size_t agents = 0; agents <= kMostDirect; ++agents) {
    for (const int router : routers_of(agents)) EXPECT_EQ(router, -1);
  }
}

TEST(Routers, AreAboutTheRootOfTheAgents) {
  for (std::size_t agents = kMostDirect + 1; agents <= 4096; ++agents) {
    const std::vector<int> routers = routers_of(agents);
    ASSERT_EQ(routers.size(), agents);
    ASSERT_EQ(routers.front(), -1);
    std::map<int, std::size_t> children;
    std::size_t direct = 0;
    for (const int router : routers) {
      if (router < 0)
        ++direct;
      else
        ++children[router];
    }
    ASSERT_LE(direct, 64U) << agents;
    ASSERT_LE(direct * direct, agents + 2 * direct) << agents;
    for (const auto& [router, count] : children) {
      ASSERT_EQ(routers[static_cast<std::size_t>(router)], -1) << agents;
      ASSERT_LE(count, kMostChildren) << agents;
    }
  }
}

/// One direction of a connection, which may lose what is under way.
using Wire = std::deque<Relayed>;

/// Passes on up to `most` messages; those that are new are appended to `out`.
void deliver(Wire& wire, NumberedMessages& to, std::vector<int>& out, std::size_t most) {
  for (; most > 0 && !wire.empty(); --most) {
    const auto taken = to.take(wire.front());
    wire.pop_front();
    ASSERT_TRUE(taken) << taken.error().what();
    if (*taken) out.push_back(static_cast<int>(std::get<InputTaken>(**taken).bytes));
  }
}

TEST(NumberedMessages, ComeOnceAndInOrderThoughConnectionsAreLost) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    NumberedMessages supervisor(5), agent(5);
    Wire down, up, stale;  // `stale`: what a router that was only frozen passes on later
    std::vector<int> at_agent, at_supervisor;
    int sent = 0;
    for (int step = 0; step < 300; ++step) {
      const auto action = random() % 16;
      if (action < 6) {
        ++sent;
        down.push_back(supervisor.add(encode(InputTaken{static_cast<std::uint64_t>(sent)})));
        up.push_back(agent.add(encode(InputTaken{static_cast<std::uint64_t>(sent)})));
      } else if (action < 10) {
        deliver(down, agent, at_agent, random() % 4);
      } else if (action < 14) {
        deliver(up, supervisor, at_supervisor, random() % 4);
        deliver(stale, supervisor, at_supervisor, random() % 2);
        if (supervisor.owes_acknowledgement()) down.push_back(supervisor.acknowledgement());
      } else if (action == 14) {  // the router is lost with what it has
        stale = random() % 2 == 0 ? up : Wire();
        up.clear();
        down.clear();
        for (Relayed& relayed : agent.again()) up.push_back(std::move(relayed));
        deliver(up, supervisor, at_supervisor, 1);
        for (Relayed& relayed : supervisor.again()) down.push_back(std::move(relayed));
      }
    }
    deliver(down, agent, at_agent, down.size());
    deliver(up, supervisor, at_supervisor, up.size());
    std::vector<int> all(static_cast<std::size_t>(sent));
    for (int i = 0; i < sent; ++i) all[static_cast<std::size_t>(i)] = i + 1;
    ASSERT_EQ(at_agent, all);
    ASSERT_EQ(at_supervisor, all);
    // Acknowledged messages are kept no longer.
    ASSERT_TRUE(agent.take(supervisor.acknowledgement()));
    ASSERT_EQ(agent.kept_bytes(), 0U);
  }
}

TEST(NumberedMessages, AGapIsRefused) {
  NumberedMessages sender(1), receiver(1);
  (void)sender.add(encode(Trouble{"first"}));
  const auto taken = receiver.take(sender.add(encode(Trouble{"second"})));
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().code(), ErrorCode::Corrupt);
  EXPECT_FALSE(receiver.take({{1, 1, 0}, "nonsense"}));
}

TEST(NumberedMessages, AreAcknowledgedNowAndThen) {
  NumberedMessages sender(1), receiver(1);
  int acknowledged = 0;
  for (int i = 0; i < 1000; ++i) {
    ASSERT_TRUE(receiver.take(sender.add(encode(Trouble{"x"}))));
    if (!receiver.owes_acknowledgement()) continue;
    ++acknowledged;
    ASSERT_TRUE(sender.take(receiver.acknowledgement()));
    EXPECT_EQ(sender.kept_bytes(), 0U);
  }
  EXPECT_GE(acknowledged, 10);
  EXPECT_LE(acknowledged, 100);
}

}  // namespace
}  // namespace cohort::launch
