// The transport over real sockets: frames find their place, unauthenticated peers are refused, endings are reported.
#include "comm/transport/tcp/tcp_transport.h"

#include "base/result.h"
#include "base/testing/sanitized.h"
#include "comm/transport/testing/frames.h"
#include "net/socket.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::transport::tcp {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;
using testing::fill;
using testing::Heard;
using testing::pattern;

/// How the ranks' connections are made.
struct Way {
  Protection protection = Protection::Authenticated;
  int lanes = 1;
};

std::string name_of(Way way) {
  constexpr const char* kNames[] = {"Least", "Authenticated", "Encrypted"};
  return fmt::format("{}Over{}", kNames[static_cast<int>(way.protection)], way.lanes);
}

/// Some ranks of one process, driven by the test.
struct Ranks {
  using Change = std::function<void(std::vector<PeerInfo>&)>;
  explicit Ranks(int size, Way way, const std::vector<std::string>& secrets = {}, const Change& change = {})
      : heard(static_cast<std::size_t>(size)) {
    std::vector<Listeners> listeners;
    for (int rank = 0; rank < size; ++rank) {
      listeners.emplace_back(Listeners::Options{"testhost", true, way.protection, way.lanes});
      infos.push_back(listeners.back().info());
    }
    if (change) change(infos);
    for (int rank = 0; rank < size; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      TcpTransport::Options options;
      options.rank = rank;
      options.infos = infos;
      options.secret = world_secret({}, secrets.empty() ? "token" : secrets[r], way.protection);
      all.push_back(std::make_unique<TcpTransport>(std::move(options), std::move(listeners[r]), heard[r]));
    }
  }
  TcpTransport& operator[](int rank) { return *all[static_cast<std::size_t>(rank)]; }
  bool drive_until(const std::function<bool()>& ready, std::chrono::milliseconds limit = 20s) {
    const auto until = Clock::now() + limit;
    while (!ready()) {
      if (Clock::now() > until) return false;
      for (const auto& each : all) each->progress();
    }
    return true;
  }
  std::vector<Heard> heard;
  std::vector<PeerInfo> infos;
  std::vector<std::unique_ptr<TcpTransport>> all;
};

class TcpTransportTest : public ::testing::TestWithParam<Way> {};
INSTANTIATE_TEST_SUITE_P(Ways, TcpTransportTest,
                         ::testing::Values(Way{Protection::Authenticated, 1}, Way{Protection::Encrypted, 1},
                                           Way{Protection::Least, 1}, Way{Protection::Authenticated, 3},
                                           Way{Protection::Encrypted, 16}),
                         [](const auto& one) { return name_of(one.param); });

TEST_P(TcpTransportTest, FramesOfEverySizeFindTheirPlaceBothWaysInAnyOrderOfPosting) {
  Ranks ranks(3, GetParam());
  constexpr std::size_t kSizes[] = {0, 1, 23, 24, 25, 4096, 65535, 65536, 65537, 300000, 3000000};
  constexpr std::size_t kCount = std::size(kSizes);
  for (const bool posted_first : {true, false}) {
    std::vector<std::vector<std::byte>> data, room;
    std::vector<Outgoing> out(6 * kCount);
    std::vector<Incoming> in(6 * kCount);
    for (std::size_t pair = 0; pair < 6; ++pair) {
      for (std::size_t i = 0; i < kCount; ++i) {
        data.push_back(pattern(kSizes[i], static_cast<unsigned>(pair * 100 + i)));
        room.emplace_back(kSizes[i] + 3);
      }
    }
    const auto each_pair = [&](const auto& body) {
      std::size_t pair = 0;
      for (int from = 0; from < 3; ++from) {
        for (int to = 0; to < 3; ++to) {
          if (from != to) body(pair++, from, to);
        }
      }
    };
    const auto post = [&] {
      each_pair([&](std::size_t pair, int from, int to) {
        for (std::size_t i = 0; i < kCount; ++i) {
          const std::size_t at = pair * kCount + i;
          fill(in[at], from, static_cast<std::uint32_t>(i), room[at]);
          ranks[to].receive(in[at]);
        }
      });
    };
    if (posted_first) post();
    each_pair([&](std::size_t pair, int from, int to) {
      for (std::size_t i = 0; i < kCount; ++i) {
        const std::size_t at = pair * kCount + i;
        fill(out[at], to, static_cast<std::uint32_t>(i), data[at]);
        ranks[from].send(out[at]);
      }
    });
    if (!posted_first) {
      ranks.drive_until([] { return false; }, 30ms);  // small frames have come and are kept, the others wait
      EXPECT_FALSE(in.back().done);
      post();
    }
    const auto all_done = [&] {
      for (std::size_t i = 0; i < in.size(); ++i) {
        if (!in[i].done || !out[i].done) return false;
      }
      return true;
    };
    ASSERT_TRUE(ranks.drive_until(all_done));
    for (std::size_t i = 0; i < in.size(); ++i) {
      ASSERT_EQ(in[i].bytes, data[i].size());
      room[i].resize(data[i].size());
      ASSERT_EQ(room[i], data[i]) << i;
    }
  }
  EXPECT_TRUE(ranks[0].flushed());
}

TEST_P(TcpTransportTest, MessagesComeInOrderAndAPeerThatLeavesHasSaidAll) {
  Ranks ranks(2, GetParam());
  for (int i = 0; i < 500; ++i) ranks[1].message(0, 7, std::to_string(i));
  ranks.drive_until([&] { return ranks[1].flushed(); });
  ranks[1].leave();
  ASSERT_TRUE(ranks.drive_until([&] { return ranks[0].lost(1).has_value(); }));
  ASSERT_EQ(ranks.heard[0].messages.size(), 500u);
  EXPECT_EQ(ranks.heard[0].messages.front(), "1:7:0");
  EXPECT_EQ(ranks.heard[0].messages.back(), "1:7:499");
  EXPECT_NE(ranks[0].lost(1)->find("left the world"), std::string::npos);
}

TEST_P(TcpTransportTest, EndingReachesPeersAlsoInTheMidstOfAFrameAndTouchesNoMemory) {
  Ranks ranks(2, GetParam());
  const auto data = pattern(40000000, 1);
  std::vector<std::byte> room(data.size());
  Outgoing out;
  Incoming in;
  fill(out, 1, 0, data);
  fill(in, 0, 0, room);
  ranks[0].send(out);
  ranks[1].receive(in);
  ASSERT_TRUE(ranks.drive_until([&] { return in.bytes > 0; }));
  EXPECT_FALSE(out.done);
  EXPECT_EQ(ranks[0].owing(), std::vector{1});
  EXPECT_EQ(ranks[1].owing(), std::vector{0});
  ranks[0].end("enough");
  EXPECT_TRUE(out.done);  // it may go now
  ranks[1].end("");
  const auto before = room;
  ASSERT_TRUE(ranks.drive_until([&] { return !ranks.heard[1].ended.empty(); }));
  EXPECT_EQ(ranks.heard[1].ended.front(), "0:enough");
  EXPECT_EQ(room, before);
  EXPECT_FALSE(in.done);
}

// Bytes that were sent are not sent again, and the rest comes from a copy.
TEST_P(TcpTransportTest, APeerThatHasNotEndedGetsTheWholeFrameBeforeTheEnd) {
  Ranks ranks(2, GetParam());
  auto data = pattern(40000000, 1);
  const auto expected = data;
  std::vector<std::byte> room(data.size());
  Outgoing out;
  Incoming in;
  fill(out, 1, 0, data);
  fill(in, 0, 0, room);
  ranks[0].send(out);
  ranks[1].receive(in);
  ASSERT_TRUE(ranks.drive_until([&] { return in.bytes > 0; }));
  for (int i = 0; i < 3; ++i) ranks[0].progress();
  EXPECT_FALSE(out.done);
  ranks[0].end("enough");
  EXPECT_TRUE(out.done);
  std::fill(data.begin(), data.end(), std::byte{0});  // the memory is the owner's again
  ASSERT_TRUE(ranks.drive_until([&] { return in.done.load() && !ranks.heard[1].ended.empty(); }));
  EXPECT_EQ(room, expected);
  EXPECT_EQ(ranks.heard[1].ended.front(), "0:enough");
}

/// Memory of this process that is resident, in bytes.
std::size_t resident() {
  std::ifstream file("/proc/self/statm");
  std::size_t pages = 0;
  file >> pages >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(Link, TakesLittleMemoryBeforeItHasReadMuch) {
  std::vector<std::unique_ptr<Link>> links;
  links.reserve(1000);
  const std::size_t before = resident();
  for (int peer = 0; peer < 1000; ++peer) links.push_back(std::make_unique<Link>(peer, 0, 3s, "a"));
  EXPECT_LT(resident(), before + (std::size_t{kAddressSanitizer ? 32 : 16} << 20));  // (it has memory beside each)
}

TEST_P(TcpTransportTest, APeerWithAnotherSecretIsNoPeer) {
  Ranks ranks(2, GetParam(), {"one", "other"});
  ranks[0].message(1, 0, "let me in");
  ranks.drive_until([&] { return !ranks.heard[1].messages.empty(); }, 500ms);
  EXPECT_TRUE(ranks.heard[1].messages.empty());
  EXPECT_FALSE(ranks[0].flushed());
}

/// Rank 0's answer to an unauthenticated peer that begins with `said`: all of it, or only the first bytes.
enum class Until { Closed, Answered };
std::string answer_to(Ranks& ranks, const std::string& said, Until until = Until::Closed) {
  auto socket = net::connect_once({ranks.infos[0].addresses[0], {}}, net::deadline_in(5s));
  EXPECT_TRUE(socket.has_value());
  EXPECT_EQ(::send(socket->get(), said.data(), said.size(), MSG_NOSIGNAL), static_cast<ssize_t>(said.size()));
  std::string heard;
  bool over = false;
  for (const auto limit = Clock::now() + 4s; !over && Clock::now() < limit;) {  // unauthenticated peers have 5 s
    ranks[0].progress();
    char bytes[256];
    const ssize_t got = ::recv(socket->get(), bytes, sizeof bytes, MSG_DONTWAIT);
    over = got == 0 || (got < 0 && errno == ECONNRESET) || (got > 0 && until == Until::Answered);
    if (got > 0) heard.append(bytes, static_cast<std::size_t>(got));
  }
  EXPECT_TRUE(over);
  return heard;
}

net::SecureConnection connected_to(const net::Address& address, const net::Secret& secret) {
  auto socket = net::connect_once({address, {}}, net::deadline_in(5s));
  if (!socket) throw socket.error().error;
  return value_or_throw(
      net::SecureConnection::with_secret(*std::move(socket), net::Role::Client, secret, between_ranks()));
}

/// The ClientHello of a true peer, recorded on the wire.
std::string recorded_hello(const net::Secret& secret) {
  const auto listener = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
  auto peer = connected_to(net::local_endpoint(listener.get())->tcp, secret);
  value_or_throw(peer.advance());
  EXPECT_TRUE(value_or_throw(net::wait_ready(listener.get(), POLLIN, net::deadline_in(5s))));
  const auto there = value_or_throw(net::accept_one(listener.get()));
  EXPECT_TRUE(value_or_throw(net::wait_ready(there->get(), POLLIN, net::deadline_in(5s))));
  char bytes[4096];
  const ssize_t got = ::recv(there->get(), bytes, sizeof bytes, 0);
  return std::string(bytes, got > 0 ? static_cast<std::size_t>(got) : 0);
}

/// Rank 0's decision on a peer that has the secret and sends `hello`.
std::optional<Decision> decision_on(Ranks& ranks, const Hello& hello, Protection protection) {
  auto peer = connected_to(ranks.infos[0].addresses[0], world_secret({}, "token", protection));
  value_or_throw(peer.queue(encode(hello)));
  for (const auto limit = Clock::now() + 8s; Clock::now() < limit;) {
    ranks[0].progress();
    const auto moved = peer.advance();
    if (const auto message = peer.next_message()) return value_or_throw(decode_decision(*message));
    if (!moved || peer.at_end()) return std::nullopt;
  }
  ADD_FAILURE() << "neither answered nor closed";
  return std::nullopt;
}

TEST_P(TcpTransportTest, StrangersAreTurnedAway) {
  Ranks ranks(2, GetParam());
  const Protection protection = GetParam().protection;
  EXPECT_EQ(answer_to(ranks, std::string(104, 'x')), "");
  // Hellos of another world, or of another protection, get an alert, and nothing that depends on the key.
  EXPECT_LE(answer_to(ranks, recorded_hello(world_secret({}, "other", protection))).size(), 7U);
  const Protection other = protection == Protection::Least ? Protection::Authenticated : Protection::Least;
  EXPECT_LE(answer_to(ranks, recorded_hello(world_secret({}, "token", other))).size(), 7U);
  for (const Hello& wrong : {Hello{0, 0, 0}, Hello{1, 1, 0}, Hello{99, 0, 0}, Hello{1, 0, 16}})
    EXPECT_FALSE(decision_on(ranks, wrong, protection)) << wrong.from << wrong.to << wrong.lane;
  EXPECT_TRUE(ranks.heard[0].messages.empty() && ranks.heard[0].ended.empty());
  // The real peer is still admitted.
  ranks[1].message(0, 0, "hello");
  EXPECT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }));
}

TEST_P(TcpTransportTest, AHelloThatIsRepeatedKeepsNobodysPlace) {
  Ranks ranks(2, GetParam());
  const std::string recorded = recorded_hello(world_secret({}, "token", GetParam().protection));
  EXPECT_NE(answer_to(ranks, recorded, Until::Answered), "");  // the attacker cannot finish the handshake
  EXPECT_EQ(answer_to(ranks, recorded), "");
  ranks[1].message(0, 0, "hello");
  EXPECT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }));
}

TEST_P(TcpTransportTest, WhoIsThereAlreadyIsNotTakenTwice) {
  Ranks ranks(2, GetParam());
  ranks[1].message(0, 0, "here I am");
  ASSERT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }));
  EXPECT_EQ(decision_on(ranks, {1, 0, 0}, GetParam().protection), Decision::UseMine);
  ranks[1].message(0, 0, "and still");
  EXPECT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() == 2; }));
}

// A peer may give up and connect in another way. The first connection must not count as the pair's then.
TEST_P(TcpTransportTest, WhoGoesBeforeItHasConfirmedMayComeAgain) {
  Ranks ranks(2, GetParam());
  EXPECT_EQ(decision_on(ranks, {1, 0, 0}, GetParam().protection), Decision::Welcome);
  ranks.drive_until([] { return false; }, 50ms);
  EXPECT_FALSE(ranks[0].lost(1));
  ranks[1].message(0, 0, "hello");
  EXPECT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }));
}

TEST_P(TcpTransportTest, ACrowdAtTheLimiterKeepsNoPeerOut) {
  Ranks ranks(2, GetParam());
  std::vector<sys::UniqueFd> crowd;
  for (int i = 0; i < 400; ++i) {
    auto socket = net::connect_once({ranks.infos[0].addresses[0], {}}, net::deadline_in(10s));
    ASSERT_TRUE(socket.has_value());
    if (i % 2 == 0) {
      ASSERT_EQ(::send(socket->get(), "slowly", 6, MSG_NOSIGNAL), 6);
    }
    crowd.push_back(*std::move(socket));
    ranks[0].progress();
  }
  ranks[1].message(0, 0, "hello");
  EXPECT_TRUE(
      ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }, 4s));  // unauthenticated peers have 5 s
  int closed = 0;
  for (const sys::UniqueFd& each : crowd) {
    char byte = 0;
    const ssize_t got = ::recv(each.get(), &byte, 1, MSG_DONTWAIT);
    closed += got == 0 || (got < 0 && errno == ECONNRESET) ? 1 : 0;
  }
  EXPECT_GE(closed, 400 - 128 - 64);  // including the descriptors of those that were taken at once
}

TEST_P(TcpTransportTest, ACrowdThatRepeatsAPeersFirstWordsKeepsNoPeerOut) {
  Ranks ranks(2, GetParam());
  const std::string hello = recorded_hello(world_secret({}, "token", GetParam().protection));
  std::vector<sys::UniqueFd> crowd;
  for (int i = 0; i < 400; ++i) {
    auto socket = net::connect_once({ranks.infos[0].addresses[0], {}}, net::deadline_in(10s));
    ASSERT_TRUE(socket.has_value());
    ASSERT_EQ(::send(socket->get(), hello.data(), hello.size(), MSG_NOSIGNAL), static_cast<ssize_t>(hello.size()));
    crowd.push_back(*std::move(socket));
    ranks[0].progress();
  }
  crowd.erase(crowd.begin());  // the real peer's has gone by now
  ranks[1].message(0, 0, "hello");
  EXPECT_TRUE(
      ranks.drive_until([&] { return ranks.heard[0].messages.size() == 1; }, 4s));  // unauthenticated peers have 5 s
  int closed = 0;
  for (const sys::UniqueFd& each : crowd) {
    char byte = 0;
    ssize_t got = 0;
    while ((got = ::recv(each.get(), &byte, 1, MSG_DONTWAIT)) > 0) continue;
    closed += got == 0 || (got < 0 && errno == ECONNRESET) ? 1 : 0;
  }
  EXPECT_EQ(closed, 399);
}

// A firewall drops what one of them sends. No connection can be opened in that direction, but the other is enough.
TEST_P(TcpTransportTest, PeersThatReachEachOtherInOneDirectionOnlyMeet) {
  const sys::UniqueFd hole(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = ::htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof at;
  ASSERT_EQ(::bind(hole.get(), reinterpret_cast<const sockaddr*>(&at), size), 0);
  ASSERT_EQ(::listen(hole.get(), 0), 0);
  ASSERT_EQ(::getsockname(hole.get(), reinterpret_cast<sockaddr*>(&at), &size), 0);
  std::vector<sys::UniqueFd> filling;  // nobody accepts, so the kernel drops connections once the queue is full
  for (int i = 0; i < 4; ++i) {
    filling.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    static_cast<void>(::connect(filling.back().get(), reinterpret_cast<const sockaddr*>(&at), size));
  }
  Ranks ranks(2, GetParam(), {}, [&](std::vector<PeerInfo>& infos) {
    infos[1].addresses = {{"127.0.0.1", ::ntohs(at.sin_port)}};
  });
  ranks[0].message(1, 0, "there");
  ranks[0].progress();
  ranks[1].message(0, 0, "and back");
  EXPECT_TRUE(ranks.drive_until(
      [&] { return ranks.heard[0].messages.size() == 1 && ranks.heard[1].messages.size() == 1; }, 4s));
}

/// An attacker on the wire between two ranks: reads everything, and may change a byte.
class Wiretap {
 public:
  /// Gives all ranks this address for rank 1.
  void redirect(std::vector<PeerInfo>& infos) {
    there_ = infos[1].addresses[0];
    listener_ = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
    infos[1].addresses = {{"127.0.0.1", net::local_endpoint(listener_.get())->tcp.port}};
  }
  void pass_on() {
    if (!ends_[0]) {
      auto accepted = net::accept_one(listener_.get());
      if (!accepted || !*accepted) return;
      ends_[0] = **std::move(accepted);
      auto connected = net::connect_once({there_, {}}, net::deadline_in(5s));
      ASSERT_TRUE(connected.has_value());
      ends_[1] = *std::move(connected);
    }
    for (int from = 0; from < 2; ++from) {
      char bytes[4096];
      const ssize_t got = ::recv(ends_[from].get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got <= 0) continue;
      const auto count = static_cast<std::size_t>(got);
      if (from == 0 && heard.size() <= spoils && spoils < heard.size() + count) {
        bytes[spoils - heard.size()] = static_cast<char>(bytes[spoils - heard.size()] ^ 1);
      }
      if (from == 0) heard.append(bytes, count);
      static_cast<void>(!::send(ends_[1 - from].get(), bytes, count, MSG_NOSIGNAL));
    }
  }
  std::string heard;                       // bytes that rank 0 has sent
  std::size_t spoils = std::string::npos;  // the byte that is changed

 private:
  net::Address there_;
  sys::UniqueFd listener_;
  sys::UniqueFd ends_[2];
};

TEST_P(TcpTransportTest, AnEavesdropperHearsWhatIsNotEncrypted) {
  Wiretap tap;
  Ranks ranks(2, GetParam(), {}, [&](std::vector<PeerInfo>& infos) { tap.redirect(infos); });
  const std::string text = "the weights of three weeks";
  ranks[0].message(1, 0, text);
  ASSERT_TRUE(ranks.drive_until([&] {
    tap.pass_on();
    return !ranks.heard[1].messages.empty();
  }));
  EXPECT_EQ(ranks.heard[1].messages.front(), "0:0:" + text);
  EXPECT_EQ(tap.heard.find(text) != std::string::npos, GetParam().protection != Protection::Encrypted);
}

// An impostor that listens where a peer should does not know the world's secret.
TEST_P(TcpTransportTest, AnImpostorThatAnswersForAPeerIsNotBelieved) {
  const sys::UniqueFd listener = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
  Ranks ranks(2, GetParam(), {}, [&](std::vector<PeerInfo>& infos) {
    infos[1].addresses = {{"127.0.0.1", net::local_endpoint(listener.get())->tcp.port}};
  });
  const std::string text = "the weights of three weeks";
  ranks[0].message(1, 0, text);
  std::string heard;
  int answered = 0;
  std::vector<sys::UniqueFd> ends;
  const auto limit = Clock::now() + 10s;
  while (answered < 2 && Clock::now() < limit) {  // it tries again, and still cannot authenticate
    ranks[0].progress();
    auto accepted = net::accept_one(listener.get());
    if (accepted && *accepted) ends.push_back(**std::move(accepted));
    for (const sys::UniqueFd& end : ends) {
      char bytes[4096];
      const ssize_t got = ::recv(end.get(), bytes, sizeof bytes, MSG_DONTWAIT);
      if (got <= 0) continue;
      heard.append(bytes, static_cast<std::size_t>(got));
      const FrameHeader frame{kMark | static_cast<std::uint32_t>(FrameKind::Message), 0, 0, 5};
      std::string said = encode(Decision::Welcome);
      said.append(reinterpret_cast<const char*>(&frame), sizeof frame).append("hello");
      static_cast<void>(!::send(end.get(), said.data(), said.size(), MSG_NOSIGNAL));
      ++answered;
    }
  }
  EXPECT_EQ(answered, 2);
  ranks.drive_until([&] { return !ranks.heard[0].messages.empty(); }, 300ms);
  EXPECT_TRUE(ranks.heard[0].messages.empty());
  EXPECT_LT(heard.size(), static_cast<std::size_t>(answered + 1) * 512) << "more than greetings was said";
  EXPECT_EQ(heard.find(text), std::string::npos);
  EXPECT_FALSE(ranks[0].flushed());
}

// The end of the handshake and data behind it may lie in the socket when a rank sends. It must not fetch both and then
// wait for more, since the peer may have no more to say before it has an answer.
TEST(Encrypted, SendingDoesNotHideWhatCameWithTheEndOfTheHandshake) {
  Ranks ranks(2, {Protection::Encrypted, 1});
  ranks[0].message(1, 0, "from the one who connects");
  const auto limit = Clock::now() + 20s;
  while (!ranks[0].flushed()) {
    ASSERT_LT(Clock::now(), limit);
    ranks[1].progress();
    for (const auto pause = Clock::now() + 20ms; !ranks[0].flushed() && Clock::now() < pause;) ranks[0].progress();
  }
  ASSERT_TRUE(ranks.heard[1].messages.empty());  // everything has been sent, and nothing has been taken
  ranks[1].message(0, 0, "from the other");
  EXPECT_TRUE(ranks.drive_until([&] { return ranks.heard[0].messages.size() + ranks.heard[1].messages.size() == 2; }));
}

TEST(Encrypted, AChangedByteEndsTheConnectionAndIsNeverDelivered) {
  const std::string text(3000, 'w');
  for (const std::size_t behind : {0U, 5U, 40U, 2000U}) {
    Wiretap tap;
    Ranks ranks(2, {Protection::Encrypted, 1}, {}, [&](std::vector<PeerInfo>& infos) { tap.redirect(infos); });
    ranks[0].message(1, 0, "first");
    ASSERT_TRUE(ranks.drive_until([&] {
      tap.pass_on();
      return ranks.heard[1].messages.size() == 1;
    }));
    tap.spoils = tap.heard.size() + behind;
    ranks[0].message(1, 0, text);
    ASSERT_TRUE(ranks.drive_until([&] {
      tap.pass_on();
      return ranks[1].lost(0).has_value() || ranks.heard[1].messages.size() > 1;
    })) << behind;
    EXPECT_EQ(ranks.heard[1].messages.size(), 1U) << behind;
  }
}

/// Outcome of a frame, posted or kept aside, if the byte behind its first `behind` bytes is changed.
struct Spoilt {
  bool delivered = false;
  bool changed = false;
  std::string broken;
};
Spoilt spoil_a_frame(Protection protection, bool authenticated, std::size_t bytes, std::size_t behind, bool posted) {
  Wiretap tap;
  Ranks ranks(2, {protection, 1}, {}, [&](std::vector<PeerInfo>& infos) { tap.redirect(infos); });
  ranks[0].message(1, 0, "first");
  EXPECT_TRUE(ranks.drive_until([&] {
    tap.pass_on();
    return ranks.heard[1].messages.size() == 1;
  }));
  tap.spoils = tap.heard.size() + behind;
  const std::vector<std::byte> data = pattern(bytes, 7);
  std::vector<std::byte> room(bytes + 8);
  Outgoing out;
  Incoming in;
  fill(out, 1, 3, data);
  fill(in, 0, 3, room);
  out.authenticated = in.authenticated = authenticated;
  if (posted) ranks[1].receive(in);
  ranks[0].send(out);
  const auto over = [&] {
    tap.pass_on();
    return in.done || ranks[1].lost(0).has_value();
  };
  if (!posted) {
    ranks.drive_until([&] { return over() || out.done; });
    ranks.drive_until(over, 100ms);
    ranks[1].receive(in);
  }
  EXPECT_TRUE(ranks.drive_until(over));
  Spoilt spoilt;
  spoilt.delivered = in.done;
  spoilt.changed = !std::equal(data.begin(), data.end(), room.begin());
  if (!ranks.heard[1].broken.empty()) spoilt.broken = ranks.heard[1].broken.front();
  return spoilt;
}

// The frame is too long to be kept aside, so its bytes wait in the socket, and the end waits behind them.
TEST(TcpTransport, AnEndBehindBytesThatHaveToWaitIsNoWorkUntilTheyArePosted) {
  Ranks ranks(2, {Protection::Authenticated, 1});
  const std::vector<std::byte> data = pattern(kMostKept + 1000, 7);
  std::vector<std::byte> room(data.size());
  Outgoing out;
  Incoming in;
  fill(out, 1, 3, data);
  fill(in, 0, 3, room);
  ranks[0].send(out);
  ASSERT_TRUE(ranks.drive_until([&] { return out.done.load(); }));
  ranks.drive_until([] { return false; }, 50ms);
  ranks[1].message(0, 0, "closed before it is read, which resets the connection");
  ranks.all[0].reset();
  ranks[1].sleep(50ms);  // anything that came with the end
  const auto since = Clock::now();
  ranks[1].sleep(300ms);
  EXPECT_GT(Clock::now() - since, 250ms) << "it was woken all the time";
  ranks[1].receive(in);
  const auto limit = Clock::now() + 10s;
  while (!in.done && !ranks[1].lost(0) && Clock::now() < limit) ranks[1].sleep(10ms);
  EXPECT_TRUE(in.done || ranks[1].lost(0));
}

// A rank in an operation reads that operation's frames directly to their destination. The program may reach a later
// operation only once it has read the data behind the running operation's frames.
TEST(TcpTransport, FramesOfTheRunningOperationWaitInTheSocketAndLaterOnesArePutAside) {
  Ranks ranks(2, {Protection::Authenticated, 1});
  const std::vector<std::byte> data = pattern(kMostKeptNow + 1, 7);
  std::array<std::vector<std::byte>, 3> room;
  std::array<Outgoing, 3> out;
  std::array<Incoming, 3> in;
  for (std::size_t i = 0; i < 3; ++i) {
    room[i].resize(data.size());
    fill(out[i], 1, static_cast<std::uint32_t>(i), data);
    fill(in[i], 0, static_cast<std::uint32_t>(i), room[i]);
  }
  out[2].operation = in[2].operation = in[0].operation + 1;
  ranks[1].connect(0);
  ranks[1].forget(in[0].operation - 1);
  ranks[1].receive(in[0]);
  ranks[0].send(out[0]);
  ranks[0].send(out[1]);
  ranks[0].message(1, 0, "behind the running one's");
  ASSERT_TRUE(ranks.drive_until([&] { return in[0].done && out[1].done; }));
  EXPECT_FALSE(ranks.drive_until([&] { return !ranks.heard[1].messages.empty(); }, 50ms));
  ranks[1].receive(in[1]);
  ASSERT_TRUE(ranks.drive_until([&] { return in[1].done && ranks.heard[1].messages.size() == 1; }));
  ranks[0].send(out[2]);
  ranks[0].message(1, 0, "behind the next one's");
  ASSERT_TRUE(ranks.drive_until([&] { return ranks.heard[1].messages.size() == 2; }));
  ranks[1].receive(in[2]);
  EXPECT_TRUE(in[2].done);
  for (const auto& each : room) EXPECT_EQ(each, data);
}

constexpr std::size_t kInBytes = sizeof(FrameHeader);

TEST(Authenticated, AChangedByteOfAnyFrameIsRefusedAndNeverDelivered) {
  for (const std::size_t bytes : {std::size_t{1000}, std::size_t{600000}}) {
    // Changes a byte in the tag (4), the operation (8), the length's high bytes (23), the data, and the authentication
    // tag.
    for (const std::size_t behind : {std::size_t{4}, std::size_t{8}, std::size_t{23}, kInBytes, kInBytes + bytes / 2,
                                     kInBytes + bytes - 1, kInBytes + bytes, kInBytes + bytes + 15}) {
      for (const bool posted : {true, false}) {
        // A frame with a wrong length or operation number waits to be posted, so nothing of it is delivered.
        if (behind < kInBytes && (bytes > kMostKept || behind == 23)) continue;
        const Spoilt spoilt = spoil_a_frame(Protection::Authenticated, false, bytes, behind, posted);
        EXPECT_FALSE(spoilt.delivered) << bytes << " bytes, at " << behind;
        EXPECT_NE(spoilt.broken.find("0:what it sent was changed on the way"), std::string::npos)
            << bytes << " bytes, at " << behind << ": " << spoilt.broken;
      }
    }
  }
}

// The option Least gives up the integrity of plain frames, but not of frames that have to be authenticated.
TEST(Least, AChangedByteIsDeliveredUnlessTheFrameHasToBeAuthenticated) {
  const std::size_t behind = kInBytes + 500;
  const Spoilt plain = spoil_a_frame(Protection::Least, false, 1000, behind, true);
  EXPECT_TRUE(plain.delivered && plain.changed && plain.broken.empty());
  for (const bool posted : {true, false}) {
    const Spoilt object = spoil_a_frame(Protection::Least, true, 1000, behind, posted);
    EXPECT_FALSE(object.delivered);
    EXPECT_NE(object.broken.find("was changed on the way"), std::string::npos) << object.broken;
  }
}

// A frame has to be authenticated but comes without a tag, as if somebody had cut it off.
TEST(Least, AFrameThatLacksItsTagIsRefused) {
  for (const bool posted : {true, false}) {
    Ranks ranks(2, {Protection::Least, 1});
    const std::vector<std::byte> data = pattern(1000, 7);
    std::vector<std::byte> room(1000);
    Outgoing out;
    Incoming in;
    fill(out, 1, 3, data);
    fill(in, 0, 3, room);
    in.authenticated = true;
    if (posted) ranks[1].receive(in);
    ranks[0].send(out);
    ASSERT_TRUE(ranks.drive_until([&] { return out.done.load(); }));
    ranks.drive_until([&] { return ranks[1].lost(0).has_value(); }, 100ms);
    if (!posted) ranks[1].receive(in);
    ASSERT_TRUE(ranks.drive_until([&] { return ranks[1].lost(0).has_value(); }));
    EXPECT_NE(ranks[1].lost(0)->find("without the tag"), std::string::npos) << *ranks[1].lost(0);
    EXPECT_FALSE(in.done);
  }
}

TEST(Handshake, EachWorldAndEachDirectionHasKeysOfItsOwn) {
  const net::Secret one = world_secret({}, "token");
  const std::vector<std::uint8_t> secret(32, 7);
  EXPECT_TRUE(one == world_secret({}, "token"));
  EXPECT_FALSE(one == world_secret({}, "other"));
  EXPECT_FALSE(one == world_secret(secret, "token"));
  EXPECT_FALSE(one == world_secret({}, "token", Protection::Encrypted));
  const Bytes32 session = random_bytes();
  EXPECT_NE(direction_key(session, true), direction_key(session, false));
}

TEST(PeerInfos, ReadBackAndAreCheckedInFull) {
  PeerInfo info{"host a", "machine", 4711, Protection::Encrypted, 3, {{"10.0.0.1", 80}, {"fd00::1", 65535}}};
  const std::string bytes = encode(info);
  const PeerInfo read = value_or_throw(decode_peer_info(bytes));
  EXPECT_EQ(read.host, info.host);
  EXPECT_EQ(read.machine, info.machine);
  EXPECT_EQ(read.pid, 4711);
  EXPECT_EQ(read.protection, Protection::Encrypted);
  EXPECT_EQ(read.lanes, 3);
  EXPECT_EQ(read.addresses, info.addresses);
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    EXPECT_FALSE(decode_peer_info(bytes.substr(0, length)));
  }
  EXPECT_FALSE(decode_peer_info(bytes + "x"));
}

}  // namespace
}  // namespace cohort::transport::tcp
