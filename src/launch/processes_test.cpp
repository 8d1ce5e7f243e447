#include "launch/processes.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <string>
#include <utility>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

sys::ChildProcess start(const std::string& script, int in, int out) {
  sys::SpawnOptions options;
  options.path = "/bin/sh";
  options.arguments = {"sh", "-c", script};
  options.environment = {"PATH=/usr/bin:/bin"};
  options.stdin_fd = in;
  options.stdout_fd = out;
  options.parent_death_signal = SIGKILL;
  auto pending = sys::spawn(options);
  EXPECT_TRUE(pending);
  auto child = std::move(*pending).confirm();
  EXPECT_TRUE(child);
  return *std::move(child);
}

bool lives(pid_t pid) {
  const auto stat = sys::process_stat(pid);
  return stat && stat->state != 'Z' && !stat->exiting;
}

TEST(Sweep, SparesWhatTheSparedStartLater) {
  ASSERT_TRUE(sys::become_subreaper());
  int in[2];
  int out[2];
  ASSERT_EQ(::pipe2(in, O_CLOEXEC), 0);
  ASSERT_EQ(::pipe2(out, O_CLOEXEC), 0);
  const auto spared = start("read line; sleep 1000 & echo $!; wait", in[0], out[1]);
  const std::vector<pid_t> list{spared.pid};
  const auto other = start("sleep 1000 & wait", -1, -1);
  ASSERT_EQ(::write(in[1], "\n", 1), 1);
  char text[16] = {};
  ASSERT_GT(::read(out[0], text, sizeof text - 1), 0);
  const pid_t later = std::atoi(text);

  EXPECT_TRUE(sweep(list, 30s, {}).empty());
  EXPECT_FALSE(lives(other.pid));
  EXPECT_TRUE(lives(spared.pid));
  EXPECT_TRUE(lives(later));
  EXPECT_TRUE(sweep({}, 30s, {}).empty());
  EXPECT_FALSE(lives(later));
  for (const int fd : {in[0], in[1], out[0], out[1]}) ::close(fd);
}

}  // namespace
}  // namespace cohort::launch
