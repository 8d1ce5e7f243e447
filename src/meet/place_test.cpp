#include "meet/place.h"

#include "base/env.h"
#include "net/interfaces.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <string>

namespace cohort::meet {
namespace {

/// Of one rank: what it says comes back.
struct Mirror final : Exchange {
  std::string_view name() const override { return "mirror"; }
  std::size_t longest_value() const override { return 4096; }
  int rank() const override { return 0; }
  int size() const override { return 1; }
  Result<std::string> share(const std::string&, const std::optional<std::string>& mine, net::Deadline) override {
    return mine.value();
  }
};

std::string listens_at() {
  JoinPlan plan;
  plan.place = JoinPlan::Place::Exchange;
  plan.exchange = std::make_shared<Mirror>();
  const auto place = go_to(plan, "world", net::deadline_in(std::chrono::seconds(20)));
  EXPECT_EQ(place->store->add("reached", 1), 1);
  return place->server->endpoint().tcp.host;
}

TEST(JoinPlace, TheStoreListensWhereTheNetworkLeavesOneAddress) {
  std::string outer;
  for (const net::InterfaceAddress& each : value_or_throw(net::interface_addresses())) {
    if (!each.loopback) outer = each.text;
  }
  if (outer.empty()) GTEST_SKIP() << "this host has no address but loopback";
  ::setenv(std::string(env::kNetwork).c_str(), outer.c_str(), 1);
  EXPECT_EQ(listens_at(), outer);
  ::unsetenv(std::string(env::kNetwork).c_str());
  EXPECT_NE(listens_at(), outer);
}

}  // namespace
}  // namespace cohort::meet
