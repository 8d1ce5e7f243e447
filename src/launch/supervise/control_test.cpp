#include "launch/supervise/control.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>

namespace cohort::launch {
namespace {

TEST(ControlOrders, AreThreeWordsAndAHost) {
  const auto add = parse_order("add h4:8");
  ASSERT_TRUE(add);
  EXPECT_EQ(add->kind, ControlOrder::Kind::Add);
  EXPECT_EQ(add->host, "h4:8");
  EXPECT_EQ(parse_order("drain a-b.c_d")->kind, ControlOrder::Kind::Drain);
  EXPECT_EQ(parse_order("remove 10.0.0.1")->kind, ControlOrder::Kind::Remove);
  for (const char* line : {"", "add", "add ", "add a b", "add  a", "add a\tslots=2", "add a#", "add a,b", "Add a",
                           "kill a", "add -x", "add a;b", "add a\rdrain b", "drain \xff", "removea"}) {
    EXPECT_FALSE(parse_order(line)) << line;
  }
}

TEST(ControlOrders, AreAnsweredAndNothingElseIs) {
  RunFolder folder =
      value_or_throw(make_run_folder({testing::TempDir() + "/cohort-control-" + std::string(150, 'x'), "", ""}));
  Loop loop;
  int orders = 0;
  ControlSocket socket(loop, folder);
  std::thread([&] {
    EXPECT_EQ(*ask_job(folder.path, "drain h"), "done\twith h");
    EXPECT_STREQ(ask_job(folder.path, "add g").error().what(), "there is no g");
    EXPECT_FALSE(ask_job(folder.path, std::string(5000, 'a')));
    EXPECT_FALSE(ask_job(folder.path, "drain h\ndrain h"));
    loop.stop();
  }).detach();
  while (!loop.stopped()) {
    loop.step();
    while (const auto order = socket.next()) {
      ++orders;
      if (order->host == "h")
        socket.answer(std::string("done\twith h"));
      else
        socket.answer(fail(ErrorCode::Unavailable, "there is no {}", order->host));
    }
  }
  EXPECT_EQ(orders, 2);
}

}  // namespace
}  // namespace cohort::launch
