// What the served store does about strangers, the dead and the late.
#include "net/secure_connection.h"
#include "net/socket.h"
#include "store/client.h"
#include "store/server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>

namespace cohort::store {
namespace {

using net::deadline_in;
using std::chrono::milliseconds;
using std::chrono::seconds;

struct Served {
  net::Secret secret = value_or_throw(net::Secret::generate());
  std::unique_ptr<StoreServer> server;
  explicit Served(milliseconds handshake_timeout = seconds(5), std::size_t half_open_limit = 128) {
    server = std::make_unique<StoreServer>(StoreServerOptions{
        .secret = secret, .half_open_limit = half_open_limit, .handshake_timeout = handshake_timeout});
  }
  std::shared_ptr<MeetingStore> connect(milliseconds limit = seconds(20)) {
    return connect_tcp_store("127.0.0.1", server->endpoint().tcp.port, secret, deadline_in(limit));
  }
  sys::UniqueFd knock() {
    auto socket = net::connect_once(server->endpoint(), deadline_in(seconds(20)));
    if (!socket) throw socket.error().error;
    return *std::move(socket);
  }
};

Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error";
  return Error(ErrorCode::Internal, "no error");
}

bool contains(const Error& error, std::string_view text) {
  return std::string_view(error.what()).find(text) != std::string_view::npos;
}

// Reads until the other end closes; what came. Fails the test if it does not close.
std::string read_to_end(int fd, seconds limit = seconds(20)) {
  std::string all;
  char chunk[4096];
  const auto deadline = deadline_in(limit);
  while (true) {
    if (!value_or_throw(net::wait_ready(fd, POLLIN, deadline))) {
      ADD_FAILURE() << "the server did not close";
      return all;
    }
    const ssize_t n = ::recv(fd, chunk, sizeof chunk, 0);
    if (n <= 0) return all;
    all.append(chunk, static_cast<std::size_t>(n));
  }
}

TEST(StoreServer, AWrongSecretIsToldSoAtOnce) {
  Served served;
  const auto other = value_or_throw(net::Secret::generate());
  const auto begun = std::chrono::steady_clock::now();
  const Error error = error_of([&] {
    (void)connect_tcp_store("127.0.0.1", served.server->endpoint().tcp.port, other, deadline_in(seconds(30)));
  });
  EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
  EXPECT_TRUE(contains(error, "authentication failed")) << error.what();
  EXPECT_TRUE(contains(error, "the secret differs")) << error.what();
  EXPECT_LT(std::chrono::steady_clock::now() - begun, seconds(15));
  served.connect()->set("still", "works");
}

TEST(StoreServer, ProbesGetNothingAndDoNoHarm) {
  Served served;
  std::mt19937 random(7);
  for (int round = 0; round < 40; ++round) {
    const sys::UniqueFd probe = served.knock();
    std::string bytes = round == 0 ? "GET /metrics HTTP/1.0\r\n\r\n" : std::string(1 + random() % 9000, '\0');
    if (round > 0) {
      for (char& c : bytes) c = static_cast<char>(random());
    }
    if (round % 3 == 1)
      bytes.replace(0, std::min<std::size_t>(5, bytes.size()),
                    std::string("\x16\x03\x01\x10\x00", 5).substr(0, bytes.size()));
    (void)!::send(probe.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    ::shutdown(probe.get(), SHUT_WR);
    // A TLS alert at most.
    EXPECT_LE(read_to_end(probe.get()).size(), 7U);
  }
  const auto store = served.connect();
  store->set("k", "v");
  EXPECT_EQ(store->try_get("k"), "v");
}

TEST(StoreServer, ThoseWhoSayNothingAreClosedAndDoNotKeepOthersOut) {
  Served served(milliseconds(300), 4);
  std::vector<sys::UniqueFd> silent;
  for (int i = 0; i < 8; ++i) silent.push_back(served.knock());
  const auto store = served.connect();
  EXPECT_EQ(store->add("n", 1), 1);
  for (const auto& fd : silent) EXPECT_EQ(read_to_end(fd.get()), "");
}

TEST(StoreServer, ACrowdThatSaysNothingGivesWayAtOnce) {
  Served served(seconds(60), 4);
  std::vector<sys::UniqueFd> silent;
  for (int i = 0; i < 40; ++i) silent.push_back(served.knock());
  const auto store = served.connect();
  EXPECT_EQ(store->add("n", 1), 1);
  // Those that came first are gone, long before their time was over.
  for (int i = 0; i < 30; ++i) EXPECT_EQ(read_to_end(silent[static_cast<std::size_t>(i)].get()), "");
}

// The ClientHello of a true client, recorded on the wire.
std::string recorded_hello(const net::Secret& secret) {
  auto listener = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
  const auto place = value_or_throw(net::local_endpoint(listener.get()));
  auto socket = net::connect_once(place, deadline_in(seconds(20)));
  if (!socket) throw socket.error().error;
  auto client = value_or_throw(
      net::SecureConnection::with_secret(*std::move(socket), net::Role::Client, secret, {.purpose = "store"}));
  value_or_throw(client.advance());
  (void)value_or_throw(net::wait_ready(listener.get(), POLLIN, deadline_in(seconds(20))));
  auto there = value_or_throw(net::accept_one(listener.get()));
  (void)value_or_throw(net::wait_ready(there->get(), POLLIN, deadline_in(seconds(20))));
  char bytes[4096];
  const ssize_t got = ::recv(there->get(), bytes, sizeof bytes, 0);
  return std::string(bytes, got > 0 ? static_cast<std::size_t>(got) : 0);
}

TEST(StoreServer, ARepeatedHelloKeepsNobodyOut) {
  Served served(seconds(60), 4);
  const std::string hello = recorded_hello(served.secret);
  ASSERT_GT(hello.size(), 100U);
  std::vector<sys::UniqueFd> repeated;
  for (int i = 0; i < 8; ++i) {
    repeated.push_back(served.knock());
    ASSERT_EQ(::send(repeated.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(hello.size()));
    // The first is answered, as its client would have been; the others are closed without a word.
    if (i > 0) {
      EXPECT_EQ(read_to_end(repeated.back().get()), "");
    }
  }
  EXPECT_EQ(served.connect()->add("n", 1), 1);
}

TEST(StoreServer, WhoIsNewDoesNotGoForThoseWhoBeganWell) {
  Served served(seconds(60), 4);
  // True clients that stop after their ClientHello, as many as there is room for.
  std::vector<sys::UniqueFd> begun;
  for (int i = 0; i < 6; ++i) {
    const std::string hello = recorded_hello(served.secret);
    begun.push_back(served.knock());
    ASSERT_EQ(::send(begun.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
    ASSERT_TRUE(value_or_throw(net::wait_ready(begun.back().get(), POLLIN, deadline_in(seconds(20)))));  // answered
  }
  // One that has not been heard at all is not closed for them: of those the first goes.
  const sys::UniqueFd newcomer = served.knock();
  EXPECT_NE(read_to_end(begun[2].get()), "");
  pollfd closed{newcomer.get(), POLLIN, 0};
  EXPECT_EQ(::poll(&closed, 1, 0), 0);
}

TEST(StoreServer, AFloodOfGarbageKeepsNobodyOut) {
  Served served;
  std::atomic<bool> over = false;
  std::thread flood([&] {
    while (!over) {
      auto socket = net::connect_once(served.server->endpoint(), deadline_in(milliseconds(100)));
      if (socket) (void)!::send(socket->get(), "GET / HTTP/1.0\r\n\r\n", 18, MSG_NOSIGNAL);
    }
  });
  for (int i = 1; i <= 10; ++i) {
    try {
      EXPECT_EQ(served.connect(seconds(30))->add("n", 1), i);
    } catch (const Error& error) {
      ADD_FAILURE() << error.what();
    }
  }
  over = true;
  flood.join();
}

TEST(StoreServer, ClosingTheListenerKeepsThoseWhoAreIn) {
  Served served;
  const auto store = served.connect();
  served.server->close_listener();
  EXPECT_EQ(store->add("n", 1), 1);
  const Error error = error_of([&] { (void)served.connect(milliseconds(200)); });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "ECONNREFUSED")) << error.what();
}

TEST(StoreServer, ItsOwnerSetsWhatIsNotThere) {
  Served served;
  const auto store = served.connect();
  store->set("a", "first");
  served.server->set_if_absent("a", "second");
  std::thread owner([&] {
    std::this_thread::sleep_for(milliseconds(50));
    served.server->set_if_absent("b", "third");
  });
  EXPECT_EQ(store->get("b", deadline_in(seconds(20))), "third");  // who waits for it is woken
  owner.join();
  EXPECT_EQ(store->get("a", deadline_in(seconds(20))), "first");
}

TEST(StoreServer, ItsEndIsPeerLostForItsClients) {
  Served served;
  const auto store = served.connect();
  std::thread ender([&] {
    std::this_thread::sleep_for(milliseconds(50));
    served.server.reset();
  });
  EXPECT_EQ(error_of([&] { (void)store->get("never", deadline_in(seconds(30))); }).code(), ErrorCode::PeerLost);
  ender.join();
  EXPECT_EQ(error_of([&] { store->set("k", "v"); }).code(), ErrorCode::PeerLost);
}

TEST(StoreServer, ItsEndWakesAllThreadsOfAClient) {
  Served served;
  const auto store = served.connect();
  std::vector<std::thread> waiters;
  std::atomic<int> lost{0};
  for (int i = 0; i < 4; ++i) {
    waiters.emplace_back([&, i] {
      try {
        (void)store->get(std::to_string(i), deadline_in(seconds(30)));
      } catch (const Error& error) {
        if (error.code() == ErrorCode::PeerLost) ++lost;
      }
    });
  }
  std::this_thread::sleep_for(milliseconds(50));
  served.server.reset();
  for (std::thread& waiter : waiters) waiter.join();
  EXPECT_EQ(lost, 4);
}

TEST(StoreServer, APortThatIsTakenNamesItsHolder) {
  Served served;
  const Error error =
      error_of([&] { StoreServer second({.endpoint = served.server->endpoint(), .secret = served.secret}); });
  EXPECT_EQ(error.code(), ErrorCode::Unavailable);
  EXPECT_TRUE(contains(error, "EADDRINUSE")) << error.what();
  EXPECT_TRUE(contains(error, fmt::format("pid {} (", ::getpid()))) << error.what();
}

TEST(StoreServer, TcpWithoutASecretIsRefused) {
  EXPECT_EQ(error_of([] { StoreServer server({}); }).code(), ErrorCode::InvalidArgument);
}

TEST(StoreServer, AnotherMeetingIsNotOurs) {
  const auto secret = value_or_throw(net::Secret::generate());
  auto first = std::make_unique<StoreServer>(StoreServerOptions{.secret = secret, .meeting = "world#1"});
  const net::Endpoint place = first->endpoint();
  const Error error = error_of([&] {
    (void)connect_store({.endpoint = place, .secret = secret, .meeting = "world#2"}, deadline_in(seconds(2)));
  });
  EXPECT_EQ(error.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(error, "world#1")) << error.what();
  // When the first gives way to the second, whoever waited gets in.
  std::thread change([&] {
    std::this_thread::sleep_for(milliseconds(100));
    first.reset();
    first =
        std::make_unique<StoreServer>(StoreServerOptions{.endpoint = place, .secret = secret, .meeting = "world#2"});
  });
  connect_store({.endpoint = place, .secret = secret, .meeting = "world#2"}, deadline_in(seconds(30)))->set("k", "v");
  change.join();
}

TEST(StoreClient, WaitsForAServerThatComesLater) {
  const auto secret = value_or_throw(net::Secret::generate());
  net::Endpoint place;
  { place = StoreServer({.secret = secret}).endpoint(); }
  std::unique_ptr<StoreServer> server;
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(150));
    server = std::make_unique<StoreServer>(StoreServerOptions{.endpoint = place, .secret = secret});
  });
  connect_store({.endpoint = place, .secret = secret}, deadline_in(seconds(30)))->set("k", "v");
  later.join();
}

TEST(StoreClient, SaysWhyNobodyCouldBeMet) {
  const auto secret = value_or_throw(net::Secret::generate());
  net::Endpoint place;
  { place = StoreServer({.secret = secret}).endpoint(); }
  const Error refused =
      error_of([&] { (void)connect_store({.endpoint = place, .secret = secret}, deadline_in(milliseconds(100))); });
  EXPECT_EQ(refused.code(), ErrorCode::Timeout);
  EXPECT_TRUE(contains(refused, "ECONNREFUSED")) << refused.what();
  const Error unknown =
      error_of([&] { (void)connect_tcp_store("no-such-host.invalid", 1, secret, deadline_in(seconds(30))); });
  EXPECT_EQ(unknown.code(), ErrorCode::Unavailable);
  EXPECT_TRUE(contains(unknown, "no-such-host.invalid")) << unknown.what();
}

TEST(StoreClient, RefusesToWorkInAForkedChild) {
  Served served;
  const auto store = served.connect();
  const pid_t child = ::fork();
  if (child == 0) {
    int status = 1;
    try {
      store->set("k", "from the child");
    } catch (const Error& error) {
      if (error.code() == ErrorCode::InvalidArgument) status = 0;
    }
    ::_exit(status);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  store->set("k", "from the parent");
  EXPECT_EQ(store->try_get("k"), "from the parent");
}

TEST(MeetingStore, GetAnyTakesTheFirstOfTheListThatExists) {
  Served served;
  const auto store = served.connect();
  const std::vector<std::string> keys = {"a", "b", "c"};
  EXPECT_EQ(error_of([&] { (void)store->get_any(keys, deadline_in(milliseconds(20))); }).code(), ErrorCode::Timeout);
  std::thread setter([&, other = served.connect()] {
    std::this_thread::sleep_for(milliseconds(20));
    other->set("c", "3");
  });
  const auto found = store->get_any(keys, deadline_in(seconds(20)));
  setter.join();
  EXPECT_EQ(found.index, 2U);
  EXPECT_EQ(found.value, "3");
  store->set("b", "2");
  EXPECT_EQ(store->get_any(keys, deadline_in(seconds(20))).index, 1U);
}

TEST(MeetingStore, AWillTakesEffectWhenItsProcessIsKilled) {
  Served served;
  const auto store = served.connect();
  const pid_t child = ::fork();
  if (child == 0) {
    const auto mine = served.connect();
    mine->leave_will("lost", "child");
    mine->leave_will("taken", "child");
    mine->leave_will("withdrawn", "child");
    mine->withdraw_will("withdrawn");
    mine->set("ready", "");
    ::pause();
    ::_exit(0);
  }
  (void)store->get("ready", deadline_in(seconds(20)));
  store->set("taken", "before");
  EXPECT_EQ(store->try_get("lost"), std::nullopt);
  ::kill(child, SIGKILL);
  EXPECT_EQ(store->get("lost", deadline_in(seconds(20))), "child");
  EXPECT_EQ(store->try_get("taken"), "before");
  EXPECT_EQ(store->try_get("withdrawn"), std::nullopt);
  ::waitpid(child, nullptr, 0);
}

TEST(MeetingStore, AWillOfOneWhoLeavesInGoodOrderHasNoEffect) {
  Served served;
  const auto store = served.connect();
  {
    const auto other = served.connect();
    other->leave_will("lost", "other");
    other->set("here", "");
  }
  const auto after = served.connect();
  EXPECT_EQ(error_of([&] { (void)store->get("lost", deadline_in(milliseconds(100))); }).code(), ErrorCode::Timeout);
}

}  // namespace
}  // namespace cohort::store
