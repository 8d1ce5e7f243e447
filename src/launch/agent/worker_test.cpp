#include "launch/agent/worker.h"
#include "launch/processes.h"
#include "telemetry/status_page.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <utility>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

sys::SpawnOptions shell(const std::string& script) {
  sys::SpawnOptions options;
  options.path = "/bin/sh";
  options.arguments = {"sh", "-c", script};
  options.environment = {"PATH=/usr/bin:/bin"};
  options.group = sys::Group::Own;
  options.parent_death_signal = SIGKILL;
  return options;
}

std::array<sys::UniqueFd, 2> make_pipe() {
  int ends[2] = {-1, -1};
  EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  return {sys::UniqueFd(ends[0]), sys::UniqueFd(ends[1])};
}

/// A child process that belongs to no rank: it echoes lines until a signal ends it.
class Bystander {
 public:
  Bystander() {
    auto options = shell("exec cat");
    options.stdin_fd = to_[0].get();
    options.stdout_fd = from_[1].get();
    auto pending = sys::spawn(options);
    EXPECT_TRUE(pending);
    auto child = std::move(*pending).confirm();
    EXPECT_TRUE(child);
    child_ = *std::move(child);
    to_[0].reset();
    from_[1].reset();
  }
  ~Bystander() {
    ::kill(child_.pid, SIGKILL);
    ::waitpid(child_.pid, nullptr, 0);
  }
  Bystander(const Bystander&) = delete;
  Bystander& operator=(const Bystander&) = delete;

  pid_t pid() const { return child_.pid; }
  /// A signal that was sent earlier arrives before the answer.
  bool answers() {
    if (::write(to_[1].get(), "x", 1) != 1) return false;
    pollfd answer{from_[0].get(), POLLIN, 0};
    char byte = 0;
    return ::poll(&answer, 1, 30'000) == 1 && ::read(from_[0].get(), &byte, 1) == 1;
  }

 private:
  std::array<sys::UniqueFd, 2> to_ = make_pipe();
  std::array<sys::UniqueFd, 2> from_ = make_pipe();
  sys::ChildProcess child_;
};

/// A rank whose page holds whatever the test writes there.
class WorkerTest : public testing::Test {
 protected:
  void start(const std::string& script) {
    worker_.emplace(loop_, WorkerPlan{}, 10, upstream_);
    ASSERT_TRUE(worker_->prepare({}, Worker::Log::New, true));
    auto mapped = sys::map_shared_segment(worker_->status_fd(), status::kStatusBytes);
    ASSERT_TRUE(mapped);
    page_ = *std::move(mapped);
    ASSERT_TRUE(worker_->start(shell(script)));
    ASSERT_TRUE(worker_->confirm());
    layout().abilities.store(status::StatusLayout::kTellsStacks);
    ASSERT_TRUE(says("ready\n"));
  }
  void TearDown() override {
    if (!worker_ || worker_->pid() <= 0) return;
    const auto family = sys::descendants(worker_->pid());
    worker_->signal(SIGKILL);
    for (const pid_t pid : family) ::kill(pid, SIGKILL);  // kills also what has left the worker's group
    ::waitpid(worker_->pid(), nullptr, 0);
  }
  status::StatusLayout& layout() { return *static_cast<status::StatusLayout*>(page_.data()); }
  bool says(const std::string& text) {
    const auto end = std::chrono::steady_clock::now() + 30s;
    while (said_.find(text) == std::string::npos) {
      if (std::chrono::steady_clock::now() >= end) return false;
      loop_.run_for(100ms);
      for (const Message& message : upstream_.take_kept()) {
        if (const auto* output = std::get_if<Output>(&message)) said_ += output->bytes;
        EXPECT_FALSE(std::holds_alternative<Trouble>(message));
      }
    }
    said_.erase(0, said_.find(text) + text.size());
    return true;
  }

  Loop loop_;
  Upstream upstream_;
  std::optional<Worker> worker_;
  sys::Mapping page_;
  std::string said_;
};

// Waits in `read` for input that never comes, since a shell that starts programs blocks signals for moments.
constexpr const char* kAnswers = "trap 'echo asked' QUIT; echo ready; while :; do read line; done";

TEST_F(WorkerTest, WhateverTheRankTookForItsPidNobodyElseIsAsked) {
  start(kAnswers);
  Bystander bystander;
  for (const pid_t pid : {0, -1, -bystander.pid(), bystander.pid(), ::getpid(), ::getppid(), 1, 0x7fffffff}) {
    layout().pid.store(pid);
    EXPECT_TRUE(worker_->ask_stacks()) << pid;
    EXPECT_TRUE(says("asked\n")) << pid;
    EXPECT_TRUE(bystander.answers()) << pid;
  }
}

TEST_F(WorkerTest, AProcessThatTheRankHasStartedIsAskedItself) {
  // The child gets a group and a session of its own.
  start(std::string("setsid sh -c \"") + kAnswers + "\"; exit");
  const auto children = sys::descendants(worker_->pid());
  ASSERT_FALSE(children.empty());
  layout().pid.store(children.front());
  EXPECT_TRUE(worker_->ask_stacks());
  EXPECT_TRUE(says("asked\n"));
}

TEST_F(WorkerTest, ARankThatWouldDieOfItIsNotAsked) {
  start("echo ready; exec cat /dev/zero >/dev/null");
  for (const pid_t pid : {worker_->pid(), 0}) {
    layout().pid.store(pid);
    EXPECT_FALSE(worker_->ask_stacks());
  }
}

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
