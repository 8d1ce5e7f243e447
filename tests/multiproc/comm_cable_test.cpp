// Two hosts as network namespaces, and the cable between them cut: for a second, and for good. Needs root and `ip`.
#include "comm_processes.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

namespace cohort::testing {
namespace {

/// Two namespaces with a switch between them, gone at the end.
class Network {
 public:
  Network() : name_("cohort" + std::to_string(::getpid())) {
    made_ = ::geteuid() == 0 && run("ip netns add " + name_ + "s") && on("s", "link add name switch type bridge") &&
            on("s", "link set switch up");
    for (const char* const host : {"0", "1"}) {
      made_ = made_ && run("ip netns add " + name_ + host) &&
              on("s", std::string("link add name p") + host + " type veth peer name eth0 netns " + name_ + host) &&
              on("s", std::string("link set p") + host + " master switch up") &&
              on(host, std::string("addr add 10.78.0.1") + host + "/24 dev eth0") && on(host, "link set eth0 up") &&
              on(host, "link set lo up");
    }
  }
  ~Network() {
    for (const char* const part : {"0", "1", "s"}) run("ip netns del " + name_ + part);
  }
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;
  bool made() const { return made_; }
  void cut() { on("s", "link set p0 down"); }
  void mend() { on("s", "link set p0 up"); }
  /// The calling process goes there.
  void enter(int host) const {
    const int fd = ::open(("/run/netns/" + name_ + std::to_string(host)).c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0 || ::setns(fd, CLONE_NEWNET) != 0) throw Error(ErrorCode::Io, "setns");
    ::close(fd);
  }

 private:
  static bool run(const std::string& command) { return std::system((command + " >/dev/null 2>&1").c_str()) == 0; }
  bool on(const std::string& part, const std::string& what) const { return run("ip -n " + name_ + part + " " + what); }
  const std::string name_;
  bool made_ = false;
};

/// Ranks that do `body` on a host each.
void start_on_hosts(Processes& world, const Network& network, bool encrypted, const Body& body) {
  for (int rank = 0; rank < 2; ++rank) {
    world.start_rank(rank, [&, rank] {
      network.enter(rank);
      ::setenv("COHORT_ENCRYPT", encrypted ? "1" : "0", 1);
      comm::FormOptions options = world.form_options(rank);
      options.hosts = {0, 1};
      options.one_machine = false;
      options.placement.local_rank = 0;
      options.placement.local_size = 1;
      options.placement.cross_rank = rank;
      options.placement.cross_size = 2;
      options.placement.host = "host" + std::to_string(rank);
      return body(Processes::form(options));
    });
  }
}

/// Plain and encrypted.
class Cable : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(Connections, Cable, ::testing::Bool(),
                         [](const auto& each) { return each.param ? "Encrypted" : "Plain"; });

/// All goes on after the cable has been out for so long.
void cut_for(std::chrono::seconds duration, bool encrypted) {
  Network network;
  if (!network.made()) GTEST_SKIP() << "namespaces need root and ip";
  Processes world(2);
  start_on_hosts(world, network, encrypted, [&](Communicator comm) -> std::string {
    std::vector<float> values(50000, 1);
    const auto begun = Clock::now();
    for (int i = 0;; ++i) {
      if (i == 20 && comm.rank() == 0) world.raise_flag("busy");
      values[7] = 1;
      comm.all_reduce(std::span(values).first(8)).wait();
      if (values[7] != 2) return "wrong";
      int go_on = Clock::now() - begun < duration + 2s ? 1 : 0;  // both stop after the same call
      comm.broadcast(std::span(&go_on, 1)).wait();
      comm.all_reduce(std::span(values)).wait();
      if (go_on == 0) break;
    }
    return "right";
  });
  ASSERT_TRUE(world.await_flag("busy"));
  network.cut();
  std::this_thread::sleep_for(duration);
  network.mend();
  for (int rank = 0; rank < 2; ++rank) EXPECT_EQ(world.collect(rank).said, "right");
}

TEST_P(Cable, CutForASecondIsSurvived) { cut_for(1s, GetParam()); }

// As where a machine is moved while it runs.
TEST_P(Cable, CutForLongerIsSurvivedWhereThatIsWanted) {
  ::setenv("COHORT_HOST_TIMEOUT", "15", 1);
  cut_for(5s, GetParam());
  ::unsetenv("COHORT_HOST_TIMEOUT");
}

TEST_P(Cable, CutForGoodIsNamedWhetherSomethingIsUnderWayOrNot) {
  for (const bool busy : {true, false}) {
    Network network;
    if (!network.made()) GTEST_SKIP() << "namespaces need root and ip";
    Processes world(2);
    start_on_hosts(world, network, GetParam(), [&](Communicator comm) -> std::string {
      std::vector<float> values(500000, 1);
      for (int i = 0;; ++i) {
        if (i == 5 && comm.rank() == 0) {
          world.raise_flag("ready");
          if (!busy) std::this_thread::sleep_for(60s);
        }
        comm.all_reduce(std::span(values)).wait();
      }
    });
    ASSERT_TRUE(world.await_flag("ready"));
    if (!busy) std::this_thread::sleep_for(300ms);  // now rank 1 waits
    network.cut();
    const auto cut = Clock::now();
    const Ending ending = world.collect(1);
    EXPECT_LT(Clock::now() - cut, 15s);  // 3 s, and more for a busy machine
    EXPECT_EQ(ending.said.rfind("PeerLost: ", 0), 0u) << ending.said;
    for (const char* const part :
         {"all_reduce(float32[500000], sum)", "lost rank 0 (host0, pid ", "has not answered"}) {
      EXPECT_NE(ending.said.find(part), std::string::npos) << ending.said;
    }
  }
}

}  // namespace
}  // namespace cohort::testing
