#include "base/process.h"
#include "base/hardware.h"
#include "base/signals.h"
#include "base/testing/sanitized.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <thread>
#include <vector>

namespace cohort::sys {
namespace {

ExitStatus run(const SpawnOptions& options) {
  auto pending = spawn(options);
  EXPECT_TRUE(pending);
  auto child = std::move(*pending).confirm();
  EXPECT_TRUE(child);
  int word = 0;
  EXPECT_EQ(::waitpid(child->pid, &word, 0), child->pid);
  return exit_status_from_wait(word);
}

SpawnOptions shell(const std::string& script) {
  SpawnOptions options;
  options.path = "/bin/sh";
  options.arguments = {"sh", "-c", script};
  options.environment = {"PATH=/usr/bin:/bin", "X=7"};
  return options;
}

TEST(Process, RunsWithItsEnvironmentAndFolder) {
  EXPECT_EQ(run(shell("exit $X")).code, 7);
  auto options = shell("test \"$(pwd)\" = /");
  options.folder = "/";
  EXPECT_TRUE(run(options).success());
}

TEST(Process, AReachedLimitIsNamed) {
  const std::string text = to_string(SpawnFailure{EAGAIN, "fork"});
  EXPECT_TRUE(text.starts_with("fork: Resource temporarily unavailable")) << text;
  EXPECT_NE(text.find("ulimit -u"), std::string::npos) << text;
  EXPECT_EQ(to_string(SpawnFailure{ENOENT, "execve"}).find("ulimit"), std::string::npos);
}

TEST(Process, IgnoresWhatItIsToIgnore) {
  auto options = shell("grep -q 'SigIgn:.*0005$' /proc/self/status");
  options.ignored = {SIGHUP, SIGQUIT};
  EXPECT_TRUE(run(options).success());
}

TEST(Process, LeadsTheGroupOrTheSessionThatItIsGiven) {
  // Fields 5 and 6 of /proc/PID/stat: group and session.
  const std::string script = "read -r pid name state parent group session rest </proc/self/stat; ";
  const std::string mine = std::to_string(::getsid(0));
  auto own = shell(script + "test $group = $$ && test $session = " + mine);
  own.group = Group::Own;
  EXPECT_TRUE(run(own).success());
  auto session = shell(script + "test $group = $$ && test $session = $$");
  session.group = Group::Session;
  EXPECT_TRUE(run(session).success());
  EXPECT_TRUE(run(shell(script + "test $group != $$ && test $session = " + mine)).success());
}

TEST(Process, AnEndCanBeLookedAtBeforeItIsReaped) {
  auto pending = spawn(shell("read line; kill -9 $$"));
  ASSERT_TRUE(pending);
  auto child = std::move(*pending).confirm();
  ASSERT_TRUE(child);
  siginfo_t info{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child->pid), &info, WEXITED | WNOWAIT), 0);
  for (int look = 0; look < 2; ++look) {
    const auto status = peek_exit_status(child->pid);
    ASSERT_TRUE(status);
    EXPECT_EQ(status->signal, SIGKILL);
  }
  EXPECT_EQ(::waitpid(child->pid, nullptr, 0), child->pid);
  EXPECT_FALSE(peek_exit_status(child->pid));
}

TEST(Process, RunsOnTheProcessorsThatItIsGiven) {
  const int last = cores_of_process().back().back();
  auto bound = shell("grep -q \"^Cpus_allowed_list:[[:space:]]*" + std::to_string(last) + "$\" /proc/self/status");
  bound.processors = {last};
  EXPECT_TRUE(run(bound).success());
  bound.processors = {1 << 20};
  const auto none = spawn(bound);
  ASSERT_FALSE(none);
  EXPECT_EQ(none.error().step, "sched_setaffinity");
}

TEST(Process, EndsAreNamed) {
  const auto status = run(shell("kill -9 $$"));
  EXPECT_EQ(status.signal, SIGKILL);
  EXPECT_EQ(status.shell_status(), 137);
  EXPECT_EQ(to_string(status), "killed by SIGKILL");
  EXPECT_EQ(to_string(run(shell("exit 3"))), "exit code 3");
  EXPECT_EQ(signal_name(SIGRTMIN + 3), "SIGRTMIN+3");
  EXPECT_EQ(signal_name(99), "signal 99");
}

TEST(Process, SignalsAreAsANewProcessExpectsThem) {
  auto blocked = SignalFd::create({SIGTERM});
  ASSERT_TRUE(blocked);
  auto* const before = std::signal(SIGPIPE, SIG_IGN);
  const auto status =
      run(shell("grep -q '^SigBlk:.0*$' /proc/self/status && grep -q '^SigIgn:.0*$' /proc/self/status"));
  std::signal(SIGPIPE, before);
  EXPECT_TRUE(status.success());
}

void expect_only_named_descriptors() {
  int ends[2];
  ASSERT_EQ(::pipe(ends), 0);  // without CLOEXEC, as in a careless library
  int output[2];
  ASSERT_EQ(::pipe2(output, O_CLOEXEC), 0);
  // Higher descriptors than the inherited one, so many that more than one call is needed to list them.
  std::vector<UniqueFd> more;
  for (int i = 0; i < 300; ++i) more.emplace_back(::fcntl(ends[0], F_DUPFD, 60));
  // Uses no pipeline and no substitution, for which the shell would open its own descriptors.
  auto options = shell("ls /proc/$$/fd; exit 0");
  options.inherited = {{ends[1], 50}};
  options.stdout_fd = output[1];
  EXPECT_TRUE(run(options).success());
  char text[100] = {};
  EXPECT_GT(::read(output[0], text, sizeof text - 1), 0);
  EXPECT_STREQ(text, "0\n1\n2\n50\n");
  for (const int fd : {ends[0], ends[1], output[0], output[1]}) ::close(fd);
}

TEST(Process, OnlyNamedDescriptorsAreInherited) { expect_only_named_descriptors(); }

// Simulates old kernels and containers' filters of system calls.
TEST(Process, OnlyNamedDescriptorsAreInheritedWhereTheKernelHasNoCloseRange) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    sock_filter refuse[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_close_range, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog program{4, refuse};
    if (::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
      ::_exit(77);
    if (::syscall(SYS_close_range, 100U, 100U, 0U) == 0) ::_exit(1);
    expect_only_named_descriptors();
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int word = 0;
  ASSERT_EQ(::waitpid(child, &word, 0), child);
  if (exit_status_from_wait(word).code == 77) GTEST_SKIP() << "no filter of system calls can be set here";
  EXPECT_TRUE(exit_status_from_wait(word).success());
}

TEST(Process, WhatCannotRunSaysWhere) {
  auto options = shell("");
  options.path = "/no/such/program";
  auto pending = spawn(options);
  ASSERT_TRUE(pending);
  const auto child = std::move(*pending).confirm();
  ASSERT_FALSE(child);
  EXPECT_EQ(child.error().error_number, ENOENT);
  EXPECT_EQ(child.error().step, "execve");
  options = shell("");
  options.folder = "/no/such/folder";
  pending = spawn(options);
  ASSERT_TRUE(pending);
  EXPECT_EQ(std::move(*pending).confirm().error().step, "chdir");
  EXPECT_EQ(::waitpid(-1, nullptr, WNOHANG), -1) << "a child is left";
}

TEST(Process, StatIsReadWhateverTheName) {
  const auto stat = parse_process_stat("42 (a) b) c) S 7 1 1 0 -1 4194308 1 2 3 4 5 6 7 8 20 0 1 0 12345 0 0");
  ASSERT_TRUE(stat);
  EXPECT_EQ(stat->state, 'S');
  EXPECT_EQ(stat->parent, 7);
  EXPECT_TRUE(stat->exiting);
  EXPECT_EQ(stat->start_ticks, 12345U);
  EXPECT_EQ(stat->cpu_ticks, 5u + 6u);
  EXPECT_FALSE(parse_process_stat(""));
  EXPECT_FALSE(parse_process_stat("42 (x) S 7"));
  const auto own = process_stat(::getpid());
  ASSERT_TRUE(own);
  EXPECT_EQ(own->parent, ::getppid());
  EXPECT_FALSE(own->exiting);
}

TEST(Process, DescendantsAreFound) {
  auto options = shell("sleep 100 & wait");
  auto child = std::move(*spawn(options)).confirm();
  ASSERT_TRUE(child);
  std::vector<pid_t> found;
  for (int round = 0; round < 1000 && found.size() < 2; ++round) {
    found = descendants(::getpid());
    ::usleep(5000);
  }
  EXPECT_EQ(found.size(), 2U);
  for (const pid_t pid : found) ::kill(pid, SIGKILL);
  ::waitpid(child->pid, nullptr, 0);
}

TEST(Process, ASignalReachesOnlyTheOneThatIsMeant) {
  auto pending = spawn(shell("read line"));
  ASSERT_TRUE(pending);
  auto child = std::move(*pending).confirm();
  ASSERT_TRUE(child);
  const auto nobody = [](pid_t) { return false; };
  const auto anybody = [](pid_t) { return true; };
  EXPECT_FALSE(signal_if(child->pid, SIGKILL, nobody));
  for (const pid_t none : {0, -1, -child->pid}) EXPECT_FALSE(signal_if(none, 0, anybody)) << none;
  EXPECT_TRUE(signal_if(child->pid, 0, [](pid_t pid) { return descends_from(pid, ::getpid()); }));
  EXPECT_FALSE(descends_from(::getppid(), ::getpid()));
  EXPECT_FALSE(descends_from(::getpid(), ::getpid()));
  // The process ends in between, and its pid may belong to another one by then.
  EXPECT_FALSE(signal_if(child->pid, 0, [](pid_t pid) {
    ::kill(pid, SIGKILL);
    return ::waitpid(pid, nullptr, 0) == pid;
  }));
}

TEST(Cpus, ThereIsAtLeastOne) {
  EXPECT_GE(usable_cores(), 1);
  EXPECT_FALSE(host_name().empty());
  EXPECT_EQ(host_name().find('.'), std::string::npos);
}

TEST(ProcessTest, TellsWhatASignalWouldDo) {
  constexpr std::string_view kStatus =
      "Name:\tx\nSigPnd:\t0000000000000000\nSigBlk:\t0000000000000200\nSigIgn:\t0000000000001000\n"
      "SigCgt:\t0000000000004002\nCapInh:\t0\n";
  EXPECT_EQ(parse_signal_fate(kStatus, SIGUSR1), SignalFate::Taken);  // blocked
  EXPECT_EQ(parse_signal_fate(kStatus, SIGPIPE), SignalFate::Ignored);
  EXPECT_EQ(parse_signal_fate(kStatus, SIGTERM), SignalFate::Taken);
  EXPECT_EQ(parse_signal_fate(kStatus, SIGUSR2), SignalFate::Default);
  EXPECT_EQ(
      parse_signal_fate("\nSigBlk:\tfffffffe7ffbfeff\nSigIgn:\t0000000000000000\nSigCgt:\t0000000000000200\n", SIGUSR1),
      SignalFate::Default)
      << "starts a process at this moment";
  EXPECT_FALSE(parse_signal_fate("Name:\tx\n", SIGUSR1));
  EXPECT_FALSE(parse_signal_fate(kStatus, 65));
  EXPECT_EQ(signal_fate(::getpid(), SIGUSR2), SignalFate::Default);
  const auto before = ::signal(SIGUSR2, SIG_IGN);
  EXPECT_EQ(signal_fate(::getpid(), SIGUSR2), SignalFate::Ignored);
  ::signal(SIGUSR2, before);
}

using namespace std::chrono_literals;

bool becomes_gone(const PeerProcess& process) {
  const auto limit = std::chrono::steady_clock::now() + 20s;
  while (!process.gone()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(1ms);
  }
  return true;
}

TEST(PeerProcess, KnowsTheLivingFromTheDead) {
  EXPECT_FALSE(PeerProcess().gone());
  EXPECT_FALSE(PeerProcess(own_process()).gone());
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const PeerProcess process({child, 0});
  EXPECT_FALSE(process.gone());
  ::kill(child, SIGKILL);
  EXPECT_TRUE(becomes_gone(process));  // also before it has been waited for
  ::waitpid(child, nullptr, 0);
  EXPECT_TRUE(process.gone());
  EXPECT_TRUE(PeerProcess({child, 0}).gone());
}

TEST(PeerProcess, IsNotAnotherOneWithTheSamePid) {
  ProcessId other = own_process();
  ASSERT_NE(other.start_time, 0u);
  ++other.start_time;
  EXPECT_TRUE(PeerProcess(other).gone());
}

TEST(PeerProcess, LivesOnWhenItsFirstThreadEnds) {
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    std::thread([&] {
      std::this_thread::sleep_for(50ms);
      static_cast<void>(::write(ready[1], "x", 1));
      ::pause();
    }).detach();
    ::syscall(SYS_exit, 0);  // ends only this thread; pthread_exit would unwind the test
  }
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  const PeerProcess process({child, 0});
  EXPECT_FALSE(process.gone());
  ::kill(child, SIGKILL);
  EXPECT_TRUE(becomes_gone(process));
  ::waitpid(child, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(PeerProcess, IsNotDeadForWantOfADescriptor) {
  if (kUndefinedBehaviorSanitizer) GTEST_SKIP() << "UBSan looks at objects through a pipe";
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  const PeerProcess process({child, 0});
  rlimit files{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &files), 0);
  const rlimit none{0, files.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  const bool first = process.gone();
  const bool without_stat = PeerProcess({child, 0}).gone();
  ::kill(child, SIGKILL);
  const bool last = becomes_gone(process);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(first);
  EXPECT_FALSE(without_stat);
  EXPECT_TRUE(last);
}

TEST(Cores, AreAtLeastOne) { EXPECT_GE(count(allowed_cores()), 1); }

}  // namespace
}  // namespace cohort::sys
