// Tests how the served store treats strangers, dead clients and late ones.
// Tests a file store's log that was cut, damaged or left behind.
#include "net/store.h"
#include "base/testing/sanitized.h"
#include "net/address.h"
#include "net/file_log.h"
#include "net/secure_connection.h"
#include "net/served_store.h"
#include "net/socket.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <fstream>
#include <functional>
#include <iterator>
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
  explicit Served(milliseconds handshake_timeout = seconds(5), std::size_t half_open_limit = 128,
                  std::size_t expected = 0) {
    server = std::make_unique<StoreServer>(StoreServerOptions{.secret = secret,
                                                              .half_open_limit = half_open_limit,
                                                              .expected = expected,
                                                              .handshake_timeout = handshake_timeout});
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

// Reads until the other end closes, and returns what came. Fails the test if it does not close.
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
    // The server sends a TLS alert at most.
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
  // The first connections are closed long before their time limit.
  for (int i = 0; i < 30; ++i) EXPECT_EQ(read_to_end(silent[static_cast<std::size_t>(i)].get()), "");
}

TEST(StoreServer, AsManyAsAreExpectedMayComeAtOnce) {
  Served served(seconds(60), 4, 36);
  std::vector<sys::UniqueFd> slow;
  for (int i = 0; i < 39; ++i) slow.push_back(served.knock());
  EXPECT_EQ(served.connect()->add("n", 1), 1);
  for (const auto& fd : slow) {
    char byte = 0;
    EXPECT_EQ(::recv(fd.get(), &byte, 1, MSG_DONTWAIT), -1) << "it was closed";
  }
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
    // The first is answered, as its client would have been. The others are closed without an answer.
    if (i > 0) {
      EXPECT_EQ(read_to_end(repeated.back().get()), "");
    }
  }
  EXPECT_EQ(served.connect()->add("n", 1), 1);
}

TEST(StoreServer, WhoIsNewDoesNotGoForThoseWhoBeganWell) {
  Served served(seconds(60), 4);
  // True clients that stop after their ClientHello, as many as are admitted.
  std::vector<sys::UniqueFd> begun;
  for (int i = 0; i < 6; ++i) {
    const std::string hello = recorded_hello(served.secret);
    begun.push_back(served.knock());
    ASSERT_EQ(::send(begun.back().get(), hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
    ASSERT_TRUE(value_or_throw(net::wait_ready(begun.back().get(), POLLIN, deadline_in(seconds(20)))));  // answered
  }
  // A newcomer that has sent nothing yet is kept: the first of those above is closed.
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
  EXPECT_EQ(store->get("b", deadline_in(seconds(20))), "third");  // a thread that waits for the key is woken
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
  // When the first server gives way to the second, a waiting client is admitted.
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

namespace {
std::atomic<int> refusals = 0;
}

#if !defined(__SANITIZE_THREAD__)  // ThreadSanitizer has its own epoll_ctl
/// Replaces the system's function in this program.
extern "C" int epoll_ctl(int set, int what, int fd, epoll_event* event) noexcept {
  if (what == EPOLL_CTL_ADD && refusals > 0) {
    --refusals;
    errno = ENOSPC;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_epoll_ctl, set, what, fd, event));
}
#endif

namespace cohort::store {
namespace {

TEST(StoreServer, TakesOthersAfterOneThatItCannotWatch) {
  if (kThreadSanitizer) GTEST_SKIP() << "its own epoll_ctl refuses nothing";
  const auto secret = value_or_throw(net::Secret::generate());
  const StoreServer server({.secret = secret});
  const auto limit = net::deadline_in(std::chrono::seconds(20));
  refusals = 1;
  auto refused = net::connect_once(server.endpoint(), limit);
  ASSERT_TRUE(refused.has_value());
  ASSERT_TRUE(value_or_throw(net::wait_ready(refused->get(), POLLIN, limit)));
  char byte = 0;
  EXPECT_LE(::recv(refused->get(), &byte, 1, 0), 0);
  EXPECT_EQ(refusals, 0);
  EXPECT_EQ(connect_store({.endpoint = server.endpoint(), .secret = secret}, limit)->add("n", 1), 1);
}

const FileHeader kHeader{std::string(16, 'n'), "boot", "host", 4711, 1'700'000'000, 2, "meeting"};
const FileRecord kRecord{RecordKind::Set, 1, "key", "value"};

TEST(FileLog, ReadsBackWhatWasWritten) {
  const auto header = decode_header(encode(kHeader) + "more");
  ASSERT_TRUE(header && *header);
  EXPECT_EQ((*header)->bytes, encode(kHeader).size());
  EXPECT_EQ(encode((*header)->value), encode(kHeader));
  const auto record = decode_record(encode(kRecord) + "more");
  ASSERT_TRUE(record && *record);
  EXPECT_EQ((*record)->bytes, encode(kRecord).size());
  EXPECT_EQ((*record)->value.value, "value");
}

TEST(FileLog, WhatWasCutIsNotThereYet) {
  const std::string header = encode(kHeader);
  for (std::size_t size = 0; size < header.size(); ++size) {
    const auto cut = decode_header(std::string_view(header).substr(0, size));
    ASSERT_TRUE(cut) << size << ": " << cut.error().what();
    EXPECT_FALSE(*cut) << size;
  }
  const std::string record = encode(kRecord);
  for (std::size_t size = 0; size < record.size(); ++size) {
    const auto cut = decode_record(std::string_view(record).substr(0, size));
    ASSERT_TRUE(cut) << size << ": " << cut.error().what();
    EXPECT_FALSE(*cut) << size;
  }
}

// Nor for a record that ends later, since everything after a torn record is cut off.
TEST(FileLog, AFlippedBitIsNeverTakenForARecord) {
  const std::string header = encode(kHeader);
  for (std::size_t bit = 0; bit < header.size() * 8; ++bit) {
    std::string damaged = header;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto read = decode_header(damaged);
    EXPECT_FALSE(read) << "bit " << bit;
  }
  const std::string record = encode(kRecord);
  for (std::size_t bit = 0; bit < record.size() * 8; ++bit) {
    std::string damaged = record;
    damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ 1 << bit % 8);
    const auto read = decode_record(damaged);
    EXPECT_FALSE(read) << "bit " << bit;
    if (!read) {
      EXPECT_EQ(read.error().code(), ErrorCode::Corrupt);
    }
  }
}

ErrorCode opening(const std::string& bytes) {
  std::string folder = ::testing::TempDir() + "cohort-log-XXXXXX";
  if (::mkdtemp(folder.data()) == nullptr) return ErrorCode::Internal;
  const std::string path = folder + "/store";
  std::ofstream(path) << bytes;
  ::chmod(path.c_str(), 0600);
  ErrorCode code = ErrorCode::Internal;
  try {
    (void)open_file_store({.path = path, .size = 2, .meeting = "meeting"}, net::deadline_in(std::chrono::seconds(20)));
    ADD_FAILURE() << "opened";
  } catch (const Error& error) {
    code = error.code();
  }
  std::ifstream file(path);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(file), {}), bytes) << "whoever is refused changes nothing";
  ::unlink(path.c_str());
  ::rmdir(folder.c_str());
  return code;
}

TEST(FileStore, RefusesAFileThatWasLeftBehind) {
  const FileRecord member{RecordKind::Member, 0, {}, "rank 0 (pid 4711)"};
  EXPECT_EQ(opening(encode(kHeader)), ErrorCode::Unavailable);
  EXPECT_EQ(opening(encode(kHeader) + encode(member)), ErrorCode::Unavailable);
  // The record is torn, since its writer is dead. The rest still shows whose file it was.
  EXPECT_EQ(opening(encode(kHeader) + encode(member) + encode(kRecord).substr(0, 9)), ErrorCode::Unavailable);
}

TEST(FileStore, RefusesADamagedFile) {
  const std::string header = encode(kHeader);
  EXPECT_EQ(opening(""), ErrorCode::Corrupt);
  EXPECT_EQ(opening(header.substr(0, header.size() - 1)), ErrorCode::Corrupt);
  EXPECT_EQ(opening("something else altogether"), ErrorCode::Corrupt);
  std::string record = encode(kRecord);
  record.back() = static_cast<char>(record.back() ^ 1);
  EXPECT_EQ(opening(header + record), ErrorCode::Corrupt);
}

}  // namespace

}  // namespace cohort::store
