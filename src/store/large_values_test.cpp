#include "store/large_values.h"

#include "net/deadline.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <chrono>

namespace cohort::store {
namespace {

using namespace std::chrono_literals;

TEST(LargeValues, ComeBackWholeWhateverTheirLength) {
  const auto store = make_in_process_store();
  for (const std::size_t length : {std::size_t{0}, std::size_t{1}, std::size_t{8} << 20, (std::size_t{20} << 20) + 7}) {
    std::string value(length, '\0');
    for (std::size_t i = 0; i < length; i += 4093) value[i] = static_cast<char>(i * 31);
    const std::string key = "key/" + std::to_string(length);
    EXPECT_EQ(try_get_large(*store, key, net::deadline_in(5s)), std::nullopt);
    set_large(*store, key, value);
    EXPECT_TRUE(get_large(*store, key, net::deadline_in(5s)) == value) << length;
    EXPECT_TRUE(try_get_large(*store, key, net::deadline_in(5s)) == value) << length;
  }
}

TEST(LargeValues, WhatIsNoneIsRefused) {
  const auto store = make_in_process_store();
  store->set("key", "several");
  EXPECT_THROW(get_large(*store, "key", net::deadline_in(5s)), Error);
  store->set("key", "-1");
  EXPECT_THROW(get_large(*store, "key", net::deadline_in(5s)), Error);
  EXPECT_THROW(get_large(*store, "nothing", net::deadline_in(10ms)), Error);
}

}  // namespace
}  // namespace cohort::store
