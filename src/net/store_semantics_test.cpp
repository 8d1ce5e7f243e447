// Tests the guarantees that every store gives, with each kind of store.
#include "net/address.h"
#include "net/served_store.h"
#include "net/store.h"

#include <cohort/error.h>

#include <gtest/gtest.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

namespace cohort::store {
namespace {

using net::deadline_in;
using std::chrono::milliseconds;
using std::chrono::seconds;

// Opens several views of one store, as several processes would.
struct Fixture {
  virtual ~Fixture() = default;
  virtual std::shared_ptr<Store> open() = 0;
};

struct InProcess final : Fixture {
  std::shared_ptr<Store> store = make_in_process_store();
  std::shared_ptr<Store> open() override { return store; }
};

struct Prefixed final : Fixture {
  std::shared_ptr<Store> store = make_in_process_store();
  std::shared_ptr<Store> open() override { return make_prefix_store("a/b", store); }
};

struct Tcp final : Fixture {
  net::Secret secret = value_or_throw(net::Secret::generate());
  StoreServer server{{.secret = secret}};
  std::shared_ptr<Store> open() override {
    return connect_tcp_store("127.0.0.1", server.endpoint().tcp.port, secret, deadline_in(seconds(20)));
  }
};

struct Unix final : Fixture {
  net::Endpoint endpoint{{}, fmt::format("cohort-test-{}-{}", ::getpid(), reinterpret_cast<std::uintptr_t>(this))};
  StoreServer server{{.endpoint = endpoint}};
  std::shared_ptr<Store> open() override { return connect_store({.endpoint = endpoint}, deadline_in(seconds(20))); }
};

struct File final : Fixture {
  std::string folder;
  int opened = 0;
  File() {
    std::string pattern = ::testing::TempDir() + "cohort-store-XXXXXX";
    folder = ::mkdtemp(pattern.data());
  }
  ~File() override {
    EXPECT_NE(::access((folder + "/store").c_str(), F_OK), 0) << "the last to leave did not remove the file";
    ::rmdir(folder.c_str());
  }
  std::shared_ptr<Store> open() override {
    return open_file_store({.path = folder + "/store", .rank = opened++, .size = 64}, deadline_in(seconds(20)));
  }
};

struct Kind {
  const char* name;
  std::unique_ptr<Fixture> (*make)();
};
template <class T>
std::unique_ptr<Fixture> make_fixture() {
  return std::make_unique<T>();
}

class StoreSemantics : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Fixture> fixture_ = GetParam().make();
};

ErrorCode code_of(const std::function<void()>& action, std::string* message = nullptr) {
  try {
    action();
  } catch (const Error& error) {
    if (message != nullptr) *message = error.what();
    return error.code();
  }
  ADD_FAILURE() << "no error";
  return ErrorCode::Internal;
}

TEST_P(StoreSemantics, SetGetAndDelete) {
  const auto a = fixture_->open();
  const auto b = fixture_->open();
  EXPECT_EQ(b->try_get("key"), std::nullopt);
  a->set("key", "value");
  EXPECT_EQ(b->try_get("key"), "value");
  EXPECT_EQ(b->get("key", deadline_in(seconds(20))), "value");
  a->set("key", "");
  EXPECT_EQ(b->try_get("key"), "");
  EXPECT_TRUE(b->delete_key("key"));
  EXPECT_FALSE(a->delete_key("key"));
  EXPECT_EQ(a->try_get("key"), std::nullopt);
}

TEST_P(StoreSemantics, KeysAndValuesAreBytes) {
  const auto store = fixture_->open();
  const std::string key("k\0/\n\xff key", 9);
  std::string value;
  for (int i = 0; i < 256; ++i) value += static_cast<char>(i);
  store->set(key, value);
  EXPECT_EQ(fixture_->open()->get(key, deadline_in(seconds(20))), value);
}

TEST_P(StoreSemantics, GetWaitsForAnotherToSet) {
  const auto a = fixture_->open();
  const auto b = fixture_->open();
  std::atomic<bool> was_set{false};
  std::thread setter([&] {
    std::this_thread::sleep_for(milliseconds(30));
    was_set = true;
    b->set("later", "now");
  });
  EXPECT_EQ(a->get("later", deadline_in(seconds(20))), "now");
  EXPECT_TRUE(was_set);
  setter.join();
}

TEST_P(StoreSemantics, GetAllWaitsForAllKeysAndSaysWhichAreMissing) {
  const auto store = fixture_->open();
  const std::vector<std::string> keys = {"one", "two", "three"};
  store->set("two", "");
  const auto partial = store->get_all(keys, {}, deadline_in(milliseconds(50)));
  EXPECT_EQ(partial.missing(), (std::vector<int>{0, 2}));
  EXPECT_EQ(partial.values[1], "");
  std::thread setter([&, other = fixture_->open()] {
    other->set("three", "3");
    other->delete_key("two");
    other->set("one", "1");
    std::this_thread::sleep_for(milliseconds(20));
    other->set("two", "2");
  });
  const auto whole = store->get_all(keys, {}, deadline_in(seconds(20)));
  setter.join();
  EXPECT_TRUE(whole.missing().empty());
  EXPECT_EQ(whole.values, (std::vector<std::optional<std::string>>{"1", "2", "3"}));
  EXPECT_TRUE(store->get_all({}, {}, deadline_in(seconds(20))).values.empty());
}

TEST_P(StoreSemantics, GetAllEndsWithAnotherKeyUnlessItHasAll) {
  const auto store = fixture_->open();
  const std::vector<std::string> keys = {"one", "two"};
  const std::vector<std::string> unless = {"failed", "over"};
  store->set("one", "1");
  std::thread setter([&, other = fixture_->open()] { other->set("over", "why"); });
  const auto ended = store->get_all(keys, unless, deadline_in(seconds(20)));
  setter.join();
  ASSERT_TRUE(ended.ended);
  EXPECT_EQ(ended.ended->index, 1U);
  EXPECT_EQ(ended.ended->value, "why");
  EXPECT_TRUE(ended.missing().empty());
  store->set("two", "2");
  const auto whole = store->get_all(keys, unless, deadline_in(seconds(20)));
  EXPECT_FALSE(whole.ended);
  EXPECT_EQ(whole.values.size(), 2U);
}

TEST_P(StoreSemantics, GetTimesOutAndNamesTheKey) {
  const auto store = fixture_->open();
  std::string message;
  const auto begun = std::chrono::steady_clock::now();
  EXPECT_EQ(code_of([&] { (void)store->get("never", deadline_in(milliseconds(60))); }, &message), ErrorCode::Timeout);
  EXPECT_GE(std::chrono::steady_clock::now() - begun, milliseconds(60));
  EXPECT_NE(message.find("never"), std::string::npos) << message;
  EXPECT_EQ(code_of([&] { (void)store->get("never", deadline_in(milliseconds(-5))); }), ErrorCode::Timeout);
  store->set("never", "usable after a timeout");
  EXPECT_EQ(store->get("never", deadline_in(milliseconds(-5))), "usable after a timeout");
}

TEST_P(StoreSemantics, AddCountsAndRefusesWhatIsNoNumber) {
  const auto store = fixture_->open();
  EXPECT_EQ(store->add("n", 5), 5);
  EXPECT_EQ(store->add("n", -7), -2);
  EXPECT_EQ(store->try_get("n"), "-2");
  EXPECT_EQ(store->add("n", 0), -2);
  store->set("n", "9223372036854775807");
  EXPECT_EQ(code_of([&] { (void)store->add("n", 1); }), ErrorCode::InvalidArgument);
  EXPECT_EQ(store->try_get("n"), "9223372036854775807");
  for (const char* text : {"", "x", "1x", " 1", "9223372036854775808"}) {
    store->set("t", text);
    EXPECT_EQ(code_of([&] { (void)store->add("t", 1); }), ErrorCode::InvalidArgument) << text;
  }
}

TEST_P(StoreSemantics, CompareAndSet) {
  const auto store = fixture_->open();
  EXPECT_EQ(store->compare_and_set("k", "x", "y"), std::nullopt);
  EXPECT_EQ(store->try_get("k"), std::nullopt);
  EXPECT_EQ(store->compare_and_set("k", std::nullopt, "a"), "a");
  EXPECT_EQ(store->compare_and_set("k", std::nullopt, "b"), "a");
  EXPECT_EQ(store->compare_and_set("k", "z", "b"), "a");
  EXPECT_EQ(store->compare_and_set("k", "a", ""), "");
  EXPECT_EQ(store->compare_and_set("k", "", "c"), "c");
  EXPECT_EQ(store->try_get("k"), "c");
}

TEST_P(StoreSemantics, RefusesKeysThatAreTooLong) {
  const auto store = fixture_->open();
  EXPECT_EQ(code_of([&] { store->set(std::string(kLongestKey + 1, 'k'), ""); }), ErrorCode::InvalidArgument);
  store->set(std::string(2000, 'k'), "fits");
  EXPECT_EQ(store->try_get(std::string(2000, 'k')), "fits");
}

TEST_P(StoreSemantics, CarriesLargeValues) {
  const auto store = fixture_->open();
  std::string value(3 << 20, '\0');
  for (std::size_t i = 0; i < value.size(); ++i) value[i] = static_cast<char>(i * 2654435761U >> 23);
  store->set("large", value);
  EXPECT_TRUE(fixture_->open()->get("large", deadline_in(seconds(20))) == value);
}

TEST_P(StoreSemantics, AddsOfSeveralUsersAreNotLost) {
  constexpr int kThreads = 4;
  constexpr int kRounds = 50;
  std::vector<std::shared_ptr<Store>> stores;
  for (int i = 0; i < kThreads; ++i) stores.push_back(fixture_->open());
  std::vector<std::set<std::int64_t>> seen(kThreads);
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&, i] {
      for (int round = 0; round < kRounds; ++round)
        seen[static_cast<std::size_t>(i)].insert(stores[static_cast<std::size_t>(i)]->add("n", 1));
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<std::int64_t> all;
  for (const auto& some : seen) all.insert(some.begin(), some.end());
  EXPECT_EQ(all.size(), static_cast<std::size_t>(kThreads * kRounds));
  EXPECT_EQ(*all.rbegin(), kThreads * kRounds);
}

TEST_P(StoreSemantics, OnlyOneWinsACompareAndSet) {
  constexpr int kThreads = 4;
  std::vector<std::shared_ptr<Store>> stores;
  for (int i = 0; i < kThreads; ++i) stores.push_back(fixture_->open());
  for (int round = 0; round < 10; ++round) {
    std::atomic<int> winners{0};
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) {
      threads.emplace_back([&, i] {
        const std::string mine = std::to_string(i);
        if (stores[static_cast<std::size_t>(i)]->compare_and_set(fmt::format("claim{}", round), std::nullopt, mine) ==
            mine)
          ++winners;
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(winners, 1);
  }
}

// Several threads use one handle, and a wait must not hold up the set that ends it.
TEST_P(StoreSemantics, AWaitInOneThreadDoesNotHoldUpAnother) {
  const auto store = fixture_->open();
  std::vector<std::thread> waiters;
  std::atomic<int> done{0};
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      EXPECT_EQ(store->get(fmt::format("k{}", i), deadline_in(seconds(20))), std::to_string(i));
      ++done;
    });
  }
  std::this_thread::sleep_for(milliseconds(20));
  for (int i = 3; i >= 0; --i) store->set(fmt::format("k{}", i), std::to_string(i));
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(done, 4);
}

INSTANTIATE_TEST_SUITE_P(All, StoreSemantics,
                         ::testing::Values(Kind{"InProcess", make_fixture<InProcess>},
                                           Kind{"Prefix", make_fixture<Prefixed>}, Kind{"Tcp", make_fixture<Tcp>},
                                           Kind{"Unix", make_fixture<Unix>}, Kind{"File", make_fixture<File>}),
                         [](const auto& suite) { return std::string(suite.param.name); });

TEST(PrefixStore, UsersOfDifferentPrefixesDoNotMeet) {
  const auto shared = make_in_process_store();
  const auto a = make_prefix_store("a", shared);
  const auto b = make_prefix_store("b", shared);
  a->set("k", "1");
  EXPECT_EQ(b->try_get("k"), std::nullopt);
  EXPECT_EQ(shared->try_get("a/k"), "1");
  EXPECT_EQ(code_of([] { (void)make_prefix_store("a", nullptr); }), ErrorCode::InvalidArgument);
}

}  // namespace
}  // namespace cohort::store
