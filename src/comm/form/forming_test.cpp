// Forming a world in a store: what each rank asks of it, and what it learns of a rank that dies meanwhile. Ranks are
// threads on pretended hosts, each with a connection of its own.
#include "comm/api/communicator_impl.h"
#include "net/served_store.h"
#include "net/store.h"
#include "rendezvous/meeting.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

namespace cohort::comm {
namespace {

using namespace std::chrono_literals;

/// Counts requests and their bytes. (What asks again after a while whether the world has failed is not counted.)
class Counted final : public store::MeetingStore {
 public:
  explicit Counted(std::shared_ptr<store::MeetingStore> store) : store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value) override {
    count(key.size() + value.size());
    store_->set(key, value);
  }
  Gathered get_all(std::span<const std::string> keys, std::span<const std::string> unless, Deadline deadline) override {
    Gathered found = store_->get_all(keys, unless, deadline);
    if (deadline == Deadline::min()) return found;
    std::size_t size = 0;
    for (const auto& list : {keys, unless}) {
      for (const std::string& key : list) size += key.size();
    }
    for (const auto& value : found.values) size += value.value_or("").size();
    count(size);
    return found;
  }
  std::int64_t add(std::string_view key, std::int64_t amount) override {
    count(key.size());
    return store_->add(key, amount);
  }
  std::optional<std::string> compare_and_set(std::string_view key, std::optional<std::string_view> expected,
                                             std::string_view desired) override {
    count(key.size() + desired.size());
    return store_->compare_and_set(key, expected, desired);
  }
  bool delete_key(std::string_view key) override {
    count(key.size());
    return store_->delete_key(key);
  }
  std::string name() const override { return store_->name(); }
  void leave_will(std::string_view key, std::string_view value) override {
    count(key.size() + value.size());
    store_->leave_will(key, value);
  }
  void withdraw_will(std::string_view key) override {
    count(key.size());
    store_->withdraw_will(key);
  }

  int requests = 0;
  std::size_t bytes = 0;

 private:
  void count(std::size_t size) {
    ++requests;
    bytes += size;
  }
  const std::shared_ptr<store::MeetingStore> store_;
};

struct Forming {
  explicit Forming(std::vector<int> host_of_rank) : hosts(std::move(host_of_rank)) {
    for (std::size_t i = 0; i < hosts.size(); ++i) {
      stores.push_back(std::make_shared<Counted>(
          store::connect_store({.endpoint = server.endpoint()}, net::deadline_in(std::chrono::seconds(60)))));
    }
  }
  int size() const { return static_cast<int>(hosts.size()); }

  rendezvous::MemberInfo info_of(int rank) const {
    rendezvous::MemberInfo info;
    info.rank = rank;
    info.size = size();
    info.pid = ::getpid();
    info.host = info.host_id = fmt::format("host{}", hosts[static_cast<std::size_t>(rank)]);
    info.build = rendezvous::this_build();
    info.nonce = std::to_string(rank);
    info.backends = {"local", "hosts"};
    return info;
  }
  rendezvous::MeetingOptions options() const {
    return {.prefix = "world",
            .place = "here",
            .backends = {{"local", false}, {"hosts", true}},
            .deadline = net::deadline_in(60s),
            .store_ends = true};
  }

  /// As `init` does it. `met` is called after the meeting.
  Communicator form(int rank, const std::function<void()>& met = {}) {
    const std::shared_ptr<Counted>& store = stores[static_cast<std::size_t>(rank)];
    const rendezvous::MemberInfo info = info_of(rank);
    const rendezvous::AgreedWorld agreed = rendezvous::hold_meeting(*store, info, options());
    const rendezvous::AgreedPlace place = agreed.place_of(rank);
    if (met) met();
    FormOptions form;
    form.store = store::make_prefix_store("world", store);
    form.placement = {rank,      size(), place.local_rank, place.local_size, place.cross_rank, place.cross_size,
                      info.host, "test"};
    form.init_timeout = 60s;
    form.one_machine = true;
    if (place.cross_size > 1) form.hosts = agreed.hosts;
    Communicator formed(usual_backend(place.cross_size > 1).create(form));
    rendezvous::leave_meeting(*store, info, options());
    return formed;
  }

  const std::vector<int> hosts;
  store::StoreServer server{
      {.endpoint = {{}, fmt::format("cohort-forming-{}-{}", ::getpid(), reinterpret_cast<std::uintptr_t>(this))}}};
  std::vector<std::shared_ptr<Counted>> stores;
};

/// Requests of each kind of rank: rank 0, other leaders of hosts, and the rest.
std::vector<std::set<int>> requests_of(int size, int locals) {
  std::vector<int> hosts;
  for (int rank = 0; rank < size; ++rank) hosts.push_back(rank / locals);
  Forming forming(hosts);
  std::vector<Communicator> world(static_cast<std::size_t>(size));
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < size; ++rank)
      threads.emplace_back([&, rank] { world[static_cast<std::size_t>(rank)] = forming.form(rank); });
  }
  std::vector<std::set<int>> kinds(3);
  std::size_t most = 0;
  std::size_t all = 0;
  for (int rank = 0; rank < size; ++rank) {
    const Counted& store = *forming.stores[static_cast<std::size_t>(rank)];
    kinds[rank == 0 ? 0 : rank % locals == 0 ? 1 : 2].insert(store.requests);
    most = std::max(most, store.bytes);
    all += store.bytes;
  }
  fmt::print("{} ranks, {} on each host: {} bytes in all, {} of one rank\n", size, locals, all, most);
  return kinds;
}

TEST(Forming, ARankAsksAsMuchInWorldsOfAllSizes) {
  const auto on_hosts = requests_of(8, 4);
  EXPECT_EQ(on_hosts, requests_of(32, 4));
  EXPECT_EQ(on_hosts, requests_of(64, 4));
  const auto here = requests_of(8, 8);
  EXPECT_EQ(here, requests_of(32, 32));
  for (const auto& kind : on_hosts) EXPECT_LE(*kind.rbegin(), 10);
}

TEST(Forming, WhoDiesAfterTheMeetingIsNamedAtOnce) {
  Forming forming({0, 0, 1, 1});
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < 4; ++rank) {
    threads.emplace_back([&, rank] {
      const auto die = [&] {  // its connection is closed, and the store takes its will
        ErrorContext context;
        context.peer = 3;
        forming.stores[3]->set("world/failed",
                               rendezvous::encode_failure(Error(ErrorCode::PeerLost, "rank 3 died", context)));
        throw Error(ErrorCode::Internal, "dead");
      };
      try {
        (void)forming.form(rank, rank == 3 ? std::function<void()>(die) : nullptr);
        ADD_FAILURE() << "rank " << rank << " has formed a world";
      } catch (const Error& error) {
        if (rank == 3) return;
        EXPECT_EQ(error.code(), ErrorCode::PeerLost) << error.what();
        EXPECT_EQ(error.context().peer, 3);
        EXPECT_NE(std::string(error.what()).find("rank 3 died"), std::string::npos) << error.what();
      }
    });
  }
  threads.clear();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);
}

}  // namespace
}  // namespace cohort::comm
