#include "store/client.h"
#include "store/server.h"

#include <gtest/gtest.h>

namespace cohort::store {
namespace {

TEST(Store, Smoke) {
  const auto secret = value_or_throw(net::Secret::generate());
  StoreServer server({.secret = secret});
  const auto a =
      connect_tcp_store("127.0.0.1", server.endpoint().tcp.port, secret, net::deadline_in(std::chrono::seconds(10)));
  const auto b =
      connect_tcp_store("127.0.0.1", server.endpoint().tcp.port, secret, net::deadline_in(std::chrono::seconds(10)));
  a->set("x", "1");
  EXPECT_EQ(b->add("x", 4), 5);
  EXPECT_EQ(a->get("x", net::deadline_in(std::chrono::seconds(10))), "5");
  EXPECT_THROW(a->get("y", net::deadline_in(std::chrono::milliseconds(10))), Error);
}

}  // namespace
}  // namespace cohort::store
