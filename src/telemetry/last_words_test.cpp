// Tests last words on the page of a process that dies, and stacks on request. Every test dies in a child.
#include "telemetry/last_words.h"

#include "base/env.h"
#include "base/testing/sanitized.h"
#include "telemetry/status_page.h"

#include <cohort/error.h>

#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace cohort::status {
namespace {

using namespace std::chrono_literals;

constexpr bool kSanitized = kAddressSanitizer || kThreadSanitizer;

std::int64_t now_ns() { return std::chrono::steady_clock::now().time_since_epoch() / 1ns; }

class Rank {
 public:
  template <class Body>
  explicit Rank(Body body, bool with_agent = true) {
    auto segment = create_status_page();
    EXPECT_TRUE(segment);
    segment_ = *std::move(segment);
    pid_ = ::fork();
    if (pid_ != 0) return;
    const rlimit no_core{0, 0};
    ::setrlimit(RLIMIT_CORE, &no_core);
    const int quiet = ::open("/dev/null", O_WRONLY);
    ::dup2(quiet, 2);
    ::setenv(std::string(env::kStatusFd).c_str(), std::to_string(with_agent ? segment_.fd.get() : -1).c_str(), 1);
    keep_last_words();
    tell_stacks_when_asked();
    body();
    ::_exit(0);
  }
  ~Rank() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      ::waitpid(pid_, nullptr, 0);
    }
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;

  int wait() {
    int status = -1;
    ::waitpid(std::exchange(pid_, -1), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  pid_t pid() const { return pid_; }
  std::int64_t began_ns() const { return began_ns_; }
  const StatusLayout& layout() const { return *static_cast<const StatusLayout*>(segment_.mapping.data()); }
  std::string words() const {
    return layout().words_ready.load() == 0 ? "" : std::string(layout().words, layout().words_length);
  }
  int fd() const { return segment_.fd.get(); }
  std::string stacks() const {
    return static_cast<const char*>(segment_.mapping.data()) + kStatusStacksBegin;  // zeros end it
  }

 private:
  sys::SharedSegment segment_;
  std::int64_t began_ns_ = now_ns();
  pid_t pid_ = -1;
};

bool eventually(const std::function<bool()>& condition) {
  for (const auto end = std::chrono::steady_clock::now() + 20s; std::chrono::steady_clock::now() < end;) {
    if (condition()) return true;
    std::this_thread::sleep_for(5ms);
  }
  return condition();
}

// GoogleTest would catch the exception, so a noexcept function ends the search for a handler here.
template <class Body>
void let_escape_from(Body body) noexcept {
  body();
}
template <class Thrown>
void let_escape(const Thrown& thrown) {
  let_escape_from([&] { throw thrown; });
}

TEST(LastWords, OfAnErrorHaveItsContext) {
  Rank rank([] {
    ErrorContext context;
    context.rank = 3;
    context.host = "b";
    context.peer = 1;
    context.operation = "all_reduce(float32[8], sum)";
    context.sequence = 12;
    let_escape(Error(ErrorCode::PeerLost, "rank 1 is gone", context));
  });
  EXPECT_EQ(rank.wait(), 128 + SIGABRT);
  const std::string words = rank.words();
  EXPECT_EQ(words.find("uncaught exception cohort::Error: rank 1 is gone\n"
                       "  code PeerLost, rank 3, host b, peer 1, operation all_reduce(float32[8], sum), number 12\n"
                       "the stack at std::terminate:\n  #0 "),
            0u)
      << words;
  const CauseStatus& cause = rank.layout().cause;
  EXPECT_EQ(cause.state, CauseStatus::OfProcess);
  EXPECT_EQ(cause.code, static_cast<int>(ErrorCode::PeerLost));
  EXPECT_EQ(cause.rank, 3);
  EXPECT_EQ(cause.peer, 1);
  EXPECT_EQ(cause.sequence, 12u);
  EXPECT_STREQ(cause.host, "b");
  EXPECT_STREQ(cause.operation, "all_reduce(float32[8], sum)");
  EXPECT_GT(rank.layout().words_ns, rank.began_ns());
  EXPECT_LT(rank.layout().words_ns, now_ns());
}

TEST(LastWords, TellCausesAndTypesThatAreNoExceptions) {
  Rank nested([] {
    std::exception_ptr outer;
    try {
      try {
        throw std::out_of_range("no such sample");
      } catch (...) {
        std::throw_with_nested(std::runtime_error("epoch 3 failed"));
      }
    } catch (...) {
      outer = std::current_exception();
    }
    [&]() noexcept { std::rethrow_exception(outer); }();
  });
  EXPECT_EQ(nested.wait(), 128 + SIGABRT);
  EXPECT_NE(nested.words().find(": epoch 3 failed\n  caused by std::out_of_range: no such sample\n"), std::string::npos)
      << nested.words();

  Rank number([] { let_escape(42); });
  EXPECT_EQ(number.wait(), 128 + SIGABRT);
  EXPECT_EQ(number.words().find("uncaught exception int\n"), 0u) << number.words();

  Rank nothing([] { std::thread forgotten([] { ::pause(); }); });
  EXPECT_EQ(nothing.wait(), 128 + SIGABRT);
  EXPECT_EQ(nothing.words().find("std::terminate without an exception"), 0u) << nothing.words();
}

[[gnu::noinline]] void throw_in_a_thread() { throw std::logic_error("in a thread"); }

TEST(LastWords, OfAThreadShowWhereItThrew) {
  Rank rank([] { std::thread(throw_in_a_thread).join(); });
  EXPECT_EQ(rank.wait(), 128 + SIGABRT);
  EXPECT_EQ(rank.words().find("uncaught exception std::logic_error: in a thread\n"), 0u) << rank.words();
  if (!kSanitized) {
    EXPECT_NE(rank.words().find("__cxa_throw"), std::string::npos) << rank.words();
    // This function is not exported, so only the program's own table of symbols has it.
    EXPECT_NE(rank.words().find("cohort::status::(anonymous namespace)::throw_in_a_thread()+0x"), std::string::npos)
        << rank.words();
  }
}

TEST(LastWords, HaveNoFramesOfLibtorchsErrors) {
  Rank rank([] {
    let_escape(
        std::runtime_error("shapes\nException raised from f at x.cpp:1:\nframe #0: g + 0x1\nframe #1: h + 0x2\n"));
  });
  EXPECT_EQ(rank.wait(), 128 + SIGABRT);
  EXPECT_EQ(rank.words().find("uncaught exception std::runtime_error: shapes\nException raised from f at x.cpp:1:\n"),
            0U);
  EXPECT_EQ(rank.words().find("frame #"), std::string::npos) << rank.words();
}

TEST(LastWords, AreCutAtTheirRoom) {
  Rank rank([] { let_escape(std::runtime_error(std::string(100'000, 'x'))); });
  EXPECT_EQ(rank.wait(), 128 + SIGABRT);
  EXPECT_EQ(rank.words().size(), StatusLayout::kWordsBytes);
}

// The previous handler, which a program had set before `init`, runs afterwards.
TEST(LastWords, HandOverToTheHandlerBefore) {
  auto segment = create_status_page();
  ASSERT_TRUE(segment);
  const pid_t child = ::fork();
  if (child == 0) {
    std::set_terminate([] { ::_exit(77); });
    ::setenv(std::string(env::kStatusFd).c_str(), std::to_string(segment->fd.get()).c_str(), 1);
    keep_last_words();
    keep_last_words();
    let_escape(std::runtime_error("once"));
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 77) << status;
  const auto& layout = *static_cast<const StatusLayout*>(segment->mapping.data());
  EXPECT_EQ(std::string(layout.words, layout.words_length).find("uncaught exception std::runtime_error: once\n"), 0u);
}

class FatalSignal : public testing::TestWithParam<int> {};
TEST_P(FatalSignal, IsToldAndStaysWhatItWas) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's handlers are kept";
  Rank rank([number = GetParam()] { ::raise(number); });
  EXPECT_EQ(rank.wait(), 128 + GetParam());
  EXPECT_EQ(rank.words().find("fatal signal SIG"), 0u) << rank.words();
  EXPECT_NE(rank.words().find("the native stack:\n  #0 "), std::string::npos) << rank.words();
}
INSTANTIATE_TEST_SUITE_P(All, FatalSignal, testing::Values(SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT));

TEST(LastWords, OfAFaultNameTheAddress) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's handlers are kept";
  Rank rank([] {
    void* const none = ::mmap(nullptr, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    StatusPage::own().open(reinterpret_cast<std::uint64_t>(none) | 1, 0, 2);  // tells the test the address
    *static_cast<volatile char*>(none) = 1;
  });
  EXPECT_EQ(rank.wait(), 128 + SIGSEGV);
  const std::string address = fmt::format("0x{:x}", rank.layout().groups[0].id.load() - 1);
  EXPECT_EQ(rank.words().find("fatal signal SIGSEGV at address " + address + "\n"), 0u) << rank.words();
}

[[gnu::noinline]] int divide_by_nothing() { return ::raise(SIGFPE) + 1; }  // the addition prevents a tail call

TEST(LastWords, OfACrashNameFunctions) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's handlers are kept";
  Rank rank([] { std::exit(divide_by_nothing()); });
  EXPECT_EQ(rank.wait(), 128 + SIGFPE);
  EXPECT_NE(rank.words().find("divide_by_nothing"), std::string::npos) << rank.words();
}

TEST(LastWords, OfAStackOverflowAreToldFromAnotherStack) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's handlers are kept";
  struct Deep {
    static int dive(int depth) {
      volatile char room[4096];
      room[0] = static_cast<char>(depth);
      return depth < 0 ? 0 : dive(depth + 1) + room[0];
    }
  };
  Rank rank([] { std::exit(Deep::dive(0)); });
  EXPECT_EQ(rank.wait(), 128 + SIGSEGV);
  EXPECT_EQ(rank.words().find("fatal signal SIGSEGV at address"), 0u) << rank.words();
}

TEST(LastWords, BeginWithWhatAnInterpreterHasWritten) {
  if (kSanitized) GTEST_SKIP() << "the sanitizer's handlers are kept";
  Rank rank([] {
    const int file = ::memfd_create("interpreter", MFD_CLOEXEC);
    add_to_last_words(file);
    if (::write(file, "in train.py\n", 12) == 12) ::raise(SIGFPE);
  });
  EXPECT_EQ(rank.wait(), 128 + SIGFPE);
  EXPECT_EQ(rank.words().find("fatal signal SIGFPE\nin train.py\nthe native stack:\n"), 0u) << rank.words();
}

TEST(LastWords, HandlersOfTheProgramAreLeftAlone) {
  const pid_t child = ::fork();
  if (child == 0) {
    auto segment = create_status_page();
    ::setenv(std::string(env::kStatusFd).c_str(), std::to_string(segment->fd.get()).c_str(), 1);
    ::signal(SIGSEGV, [](int) { ::_exit(5); });
    ::signal(SIGFPE, SIG_IGN);
    ::signal(SIGQUIT, [](int) { ::_exit(6); });
    keep_last_words();
    tell_stacks_when_asked();
    const auto& layout = *static_cast<const StatusLayout*>(segment->mapping.data());
    if (layout.abilities.load() != 0) ::_exit(1);
    ::raise(SIGFPE);
    ::raise(SIGSEGV);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 5) << status;
}

TEST(LastWords, NothingIsInstalledWithoutAnAgent) {
  Rank rank(
      [] {
        struct sigaction now = {};
        ::sigaction(SIGQUIT, nullptr, &now);
        ::_exit(now.sa_handler == SIG_DFL ? 9 : 1);
      },
      false);
  EXPECT_EQ(rank.wait(), 9);
}

TEST(LastWords, AForkSaysNothing) {
  Rank rank([] {
    const pid_t fork = ::fork();
    if (fork == 0) let_escape(std::runtime_error("of a fork"));
    ::waitpid(fork, nullptr, 0);
    ::_exit(0);
  });
  EXPECT_EQ(rank.wait(), 0);
  EXPECT_EQ(rank.words(), "");
}

TEST(Stacks, AreWrittenWhenAskedAndTheRankLivesOn) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer holds a signal back until read() returns";
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  Rank rank([&] {
    std::thread([] {
      ::pthread_setname_np(::pthread_self(), "loader-7");
      for (;;) ::pause();
    }).detach();
    char byte = 0;
    while (::read(pipe[0], &byte, 1) != 1) {
    }
    ::_exit(byte);
  });
  ASSERT_TRUE(eventually([&] { return rank.layout().abilities.load() == StatusLayout::kTellsStacks; }));
  std::string stacks;
  for (int round = 0; round < 2; ++round) {  // stacks can be written repeatedly; a thread may get its name later
    ASSERT_TRUE(eventually([&] {
      ::lseek(rank.fd(), static_cast<off_t>(kStatusStacksBegin), SEEK_SET);
      ::kill(rank.pid(), SIGQUIT);
      std::this_thread::sleep_for(20ms);
      return (stacks = rank.stacks()).find("\"loader-7\" waits") != std::string::npos;
    })) << stacks;
    EXPECT_EQ(stacks.find("thread "), 0u) << stacks;
    EXPECT_NE(stacks.find(":\n  #0 "), std::string::npos) << stacks;
  }
  const char byte = 33;
  EXPECT_EQ(::write(pipe[1], &byte, 1), 1);
  EXPECT_EQ(rank.wait(), 33);
  ::close(pipe[0]);
  ::close(pipe[1]);
}

TEST(Stacks, AForkOfTheRankDiesOfSigquitAsEver) {
  Rank rank([] {
    const pid_t fork = ::fork();
    if (fork == 0) {
      ::raise(SIGQUIT);
      ::_exit(0);
    }
    int status = 0;
    ::waitpid(fork, &status, 0);
    ::_exit(WIFSIGNALED(status) ? WTERMSIG(status) : 100);
  });
  EXPECT_EQ(rank.wait(), SIGQUIT);
  EXPECT_EQ(rank.stacks(), "");
}

}  // namespace
}  // namespace cohort::status
