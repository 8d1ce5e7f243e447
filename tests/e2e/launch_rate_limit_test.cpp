// Agents that come by hand, and what somebody does to them who has recorded the ClientHello of one, or who closes the
// rate limiter on them.
#include "launch_harness.h"
#include "net/secure_connection.h"
#include "net/socket.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <regex>
#include <string>
#include <thread>
#include <vector>

namespace cohort::test {
namespace {

using net::deadline_in;

/// Listener of a test that acts as a launcher.
struct Place {
  sys::UniqueFd listener = value_or_throw(net::listen_on({{"127.0.0.1", 0}, {}}));
  std::string name = net::to_string(value_or_throw(net::local_endpoint(listener.get())));

  sys::UniqueFd take() const {
    if (!value_or_throw(net::wait_ready(listener.get(), POLLIN, deadline_in(kPatience))))
      throw std::runtime_error("nobody has come");
    return *value_or_throw(net::accept_one(listener.get()));
  }
};

std::vector<std::string> join(const std::string& place, const std::string& secret, const std::string& name,
                              const std::string& timeout) {
  return {"agent", "--join", place, "--secret-file", secret, "--name", name, "--timeout", timeout};
}

TEST(LaunchRateLimit, ARepeatedHelloKeepsNoAgentOut) {
  Job job({{"run", "--starter", "hand", "--secret-file", "secret", "-H", "one,other", "sh", "-c", "echo here"},
           {},
           {},
           false,
           false,
           "'" COHORT_COMMAND "' secret secret >/dev/null"});
  const std::string secret = job.folder() + "/secret";
  std::smatch found;
  std::string said;
  ASSERT_TRUE(eventually([&] {
    said = job.err();
    return std::regex_search(said, found, std::regex("--join [^ ]*:([0-9]+) "));
  })) << said;
  const std::string port = found[1];
  // The ClientHello of a true agent, recorded on the wire.
  std::string hello(4096, '\0');
  {
    Place elsewhere;
    Job heard({join(elsewhere.name, secret, "other", "1")});
    const sys::UniqueFd agent = elsewhere.take();
    ASSERT_TRUE(value_or_throw(net::wait_ready(agent.get(), POLLIN, deadline_in(kPatience))));
    hello.resize(static_cast<std::size_t>(std::max<ssize_t>(::recv(agent.get(), hello.data(), hello.size(), 0), 0)));
  }
  ASSERT_GT(hello.size(), 100U);
  // More than the launcher has places for; who is closed comes again.
  std::vector<sys::UniqueFd> crowd(250);
  const auto fill = [&] {
    for (sys::UniqueFd& each : crowd) {
      char byte = 0;
      if (each) {
        const ssize_t got = ::recv(each.get(), &byte, 1, MSG_DONTWAIT);
        if (got > 0 || (got < 0 && errno == EAGAIN)) continue;
      }
      auto socket =
          net::connect_once({value_or_throw(net::parse_address("127.0.0.1:" + port)), {}}, deadline_in(kPatience));
      if (!socket) continue;  // the launcher does not listen any more
      static_cast<void>(!::send(socket->get(), hello.data(), hello.size(), MSG_NOSIGNAL));
      each = *std::move(socket);
    }
  };
  fill();
  Job one({join("127.0.0.1:" + port, secret, "one", "30")});
  Job other({join("127.0.0.1:" + port, secret, "other", "30")});
  while (one.running() && other.running() && lines_of(job.out()).size() < 2) {  // they have their own deadline
    fill();
    std::this_thread::sleep_for(1ms);
  }
  EXPECT_EQ(job.wait(), 0) << job.err();
  EXPECT_EQ(lines_of(job.out()).size(), 2U) << job.out();
  EXPECT_EQ(one.wait(), 0) << one.err();
  EXPECT_EQ(other.wait(), 0) << other.err();
}

TEST(LaunchRateLimit, AnAgentThatIsTurnedAwayTriesAgain) {
  Place place;
  Job agent({{"agent", "--join", place.name, "--secret-file", "secret", "--timeout", "30"},
             {},
             {},
             false,
             false,
             "'" COHORT_COMMAND "' secret secret >/dev/null"});
  const auto secret = [&] { return value_or_throw(net::Secret::from_file(agent.folder() + "/secret")); };
  const auto until = deadline_in(kPatience);
  place.take();  // before a word of the handshake
  for (int times = 0; times < 2; ++times) {
    auto launcher = value_or_throw(
        net::SecureConnection::with_secret(place.take(), net::Role::Server, secret(), {.purpose = "control"}));
    ASSERT_TRUE(launcher.handshake(until));
    EXPECT_TRUE(launcher.receive(until));                  // who it is
    if (times == 0) ::shutdown(launcher.fd(), SHUT_RDWR);  // without a good-bye
  }
  // The launcher has said good-bye: that is its end.
  EXPECT_EQ(agent.wait(), 1) << agent.err();
}

}  // namespace
}  // namespace cohort::test
