// Lines of several ranks that become one, text that comes in pieces, and lists of ranks.
#include "launch/output/display.h"
#include "base/unique_fd.h"
#include "launch/loop.h"
#include "launch/output/text.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <pty.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>
#include <utility>

namespace cohort::launch {
namespace {

using namespace std::chrono_literals;

bool soon(const auto& condition) {
  const auto end = std::chrono::steady_clock::now() + 20s;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > end) return false;
    std::this_thread::sleep_for(2ms);
  }
  return true;
}

TEST(Console, DropsWhatNobodyReadsAndGoesOn) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const sys::UniqueFd reader(ends[0]);
  const sys::UniqueFd writer(ends[1]);
  int others[2];
  ASSERT_EQ(::pipe2(others, O_CLOEXEC), 0);
  const sys::UniqueFd other_reader(others[0]);
  const sys::UniqueFd other_writer(others[1]);
  Console console;
  console.write(writer.get(), std::string(1 << 20, 'x'), 1);
  console.write(writer.get(), std::string(10, 'y'), 2);
  ASSERT_TRUE(soon([&] { return console.taken() >= 4096; }));
  EXPECT_FALSE(console.idle());
  console.drop();
  console.write(other_writer.get(), "z", 4);
  ASSERT_TRUE(soon([&] { return console.idle(); }));
  EXPECT_EQ(console.written(), 7U);
  EXPECT_LT(console.taken(), std::uint64_t{1} << 20);
  char byte = 0;
  EXPECT_EQ(::read(other_reader.get(), &byte, 1), 1);
  EXPECT_EQ(byte, 'z');
}

TEST(Console, EndsWhileATerminalHoldsAWrite) {
  int master = -1;
  int slave = -1;
  ASSERT_EQ(::openpty(&master, &slave, nullptr, nullptr, nullptr), 0);
  const sys::UniqueFd other_side(master);
  const sys::UniqueFd terminal(slave);
  const auto since = std::chrono::steady_clock::now();
  {
    Console console;
    console.write(terminal.get(), std::string(1 << 20, 'x'));
    // Waits until the terminal is full, so that it has taken nothing more for a while.
    std::uint64_t before = 1;
    ASSERT_TRUE(soon([&] {
      std::this_thread::sleep_for(50ms);
      return std::exchange(before, console.taken()) == console.taken();
    }));
    EXPECT_FALSE(console.idle());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - since, 20s);
}

/// Writes 1 MiB to a pipe and drains it with a limit of a second, while `read` handles the pipe's other end. Returns
/// how many bytes `read` got.
std::size_t drained(const std::function<std::size_t(int)>& read) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) return 0;
  const sys::UniqueFd reader(ends[0]);
  sys::UniqueFd writer(ends[1]);
  std::size_t got = 0;
  std::thread reading([&] { got = read(reader.get()); });
  Loop loop;
  {
    Display display(loop);
    display.write(writer.get(), std::string(1 << 20, 'x'));
    display.drain(1s, "the reader does not read");
    EXPECT_TRUE(soon([&] {
      loop.run_for(10ms);
      return display.drained();
    }));
  }
  writer.reset();
  reading.join();
  return got;
}

TEST(Drain, AReaderThatTakesNothingForTheLimitLosesTheRest) {
  EXPECT_EQ(drained([](int) -> std::size_t { return 0; }), 0U);
}

TEST(Drain, ASlowReaderGetsEverything) {
  const auto since = std::chrono::steady_clock::now();
  const std::size_t got = drained([](int fd) {
    std::string buffer(65536, '\0');
    std::size_t total = 0;
    for (ssize_t more = 0; (more = ::read(fd, buffer.data(), buffer.size())) > 0;) {
      total += static_cast<std::size_t>(more);
      std::this_thread::sleep_for(100ms);
    }
    return total;
  });
  EXPECT_EQ(got, std::size_t{1} << 20);
  EXPECT_GT(std::chrono::steady_clock::now() - since, 1s);
}

const OutputView::Clock::time_point kStart{std::chrono::hours(1)};

std::string joined(const std::vector<Text>& texts) {
  std::string out;
  for (const Text& text : texts) out += text.bytes;
  return out;
}

ViewOptions collapsing(std::size_t ranks) {
  ViewOptions options;
  options.hosts = std::vector<std::string>(ranks, "h");
  options.collapse = {true, true};
  return options;
}

TEST(Collapse, ALineOfAllRanksIsShownOnceAndAtOnce) {
  OutputView view(collapsing(3));
  EXPECT_EQ(joined(view.feed(2, Stream::Stdout, "a\n", kStart)), "");
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "a\n", kStart + 10ms)), "");
  EXPECT_EQ(joined(view.feed(1, Stream::Stdout, "a\n", kStart + 20ms)), "[0-2] | a\n");
  EXPECT_FALSE(view.next_release());
}

TEST(Collapse, WhatOthersDoNotPrintWaitsForTheWindowOnly) {
  OutputView view(collapsing(4));
  view.feed(0, Stream::Stdout, "a\n", kStart);
  view.feed(3, Stream::Stdout, "a\n", kStart + 10ms);
  ASSERT_TRUE(view.next_release());
  EXPECT_EQ(*view.next_release(), kStart + kCollapseWindow);
  EXPECT_EQ(joined(view.release(kStart + kCollapseWindow - 1ms)), "");
  EXPECT_EQ(joined(view.release(kStart + kCollapseWindow)), "[0,3] | a\n");
  EXPECT_EQ(joined(view.feed(1, Stream::Stdout, "a\n", kStart + 300ms)), "") << "too late for the first one";
  EXPECT_EQ(joined(view.finish()), "h:1 | a\n");
}

TEST(Collapse, EachRanksLinesKeepTheirOrder) {
  OutputView view(collapsing(2));
  view.feed(0, Stream::Stdout, "a\nb\na\n", kStart);
  EXPECT_EQ(joined(view.feed(1, Stream::Stdout, "b\na\n", kStart)), "");
  // Rank 1 has printed "b" before "a", so its "a" is joined with rank 0's second one.
  EXPECT_EQ(joined(view.release(kStart + kCollapseWindow)), "h:0 | a\n[0-1] | b\n[0-1] | a\n");
  OutputView errors(collapsing(2));
  errors.feed(0, Stream::Stdout, "a\n", kStart);
  errors.feed(1, Stream::Stderr, "a\n", kStart);
  EXPECT_EQ(errors.release(kStart + kCollapseWindow).size(), 2U) << "stdout and stderr are not the same";
}

TEST(Collapse, AProgressBarComesAfterTheLinesBeforeIt) {
  ViewOptions options = collapsing(2);
  options.terminal = {true, true};
  OutputView view(options);
  view.feed(0, Stream::Stdout, "line\n", kStart);
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "10%\r20", kStart)), "h:0 | line\n\r\033[Kh:0 | 10%");
}

TEST(Collapse, WhatWaitsIsBounded) {
  OutputView view(collapsing(2));
  std::size_t shown = 0;
  for (int i = 0; i < 10000; ++i) {
    shown += joined(view.feed(0, Stream::Stdout, "line " + std::to_string(i) + "\n", kStart)).size();
  }
  EXPECT_GT(shown, 100000U) << "a flood does not wait for the window";
}

TEST(Plain, LinesOfSeveralRanksAreNotMixed) {
  ViewOptions options;
  options.hosts = {"h", "h"};
  options.style = PrefixStyle::None;
  OutputView view(options);
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "one\ntw", kStart)), "one\n");
  EXPECT_EQ(joined(view.feed(1, Stream::Stdout, "other\n", kStart)), "other\n");
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "o\r", kStart)), "two\r");
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "rest", kStart)), "");
  EXPECT_EQ(joined(view.finish()), "rest");
}

TEST(PlainText, HasNothingThatATerminalObeys) {
  EXPECT_EQ(plain("a\x1b[31mb\x07\xc2\x9b"
                  "c\xc2\xa0"
                  "\xc3\x9f\x7f",
                  100),
            "abc\xc2\xa0\xc3\x9f");
}

TEST(WholeText, EndsBeforeWhatIsIncomplete) {
  EXPECT_EQ(whole_text("abc"), 3U);
  EXPECT_EQ(whole_text("ab\xe2\x82"), 2U);
  EXPECT_EQ(whole_text("ab\xe2\x82\xac"), 5U);
  EXPECT_EQ(whole_text("ab\033"), 2U);
  EXPECT_EQ(whole_text("ab\033[3"), 2U);
  EXPECT_EQ(whole_text("ab\033[31m"), 7U);
  EXPECT_EQ(whole_text("\033[31mred\033[0"), 8U);
  EXPECT_EQ(whole_text("x\033]8;;http://a"), 1U);
  EXPECT_EQ(whole_text("x\033]8;;http://a\033\\y"), 17U);
  EXPECT_EQ(whole_text("x\033]0;t\ay"), 8U);
  EXPECT_EQ(whole_text("\033(B"), 3U);
  EXPECT_EQ(whole_text(""), 0U);
}

TEST(View, AColourIsNotCutAndNotLeftOn) {
  ViewOptions options;
  options.hosts = {"h"};
  options.terminal = {true, true};
  options.columns = [] { return 12; };
  OutputView view(options);
  // Seven columns are left for the text.
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "\033[31m0123456789\033[0m\r", kStart)), "");
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "\033[3", kStart)), "\r\033[Kh:0 | \033[31m01234\033[0m");
  EXPECT_EQ(joined(view.show_partial()), "") << "nothing of it is whole";
  EXPECT_EQ(joined(view.feed(0, Stream::Stdout, "2mgreen\n", kStart)), "\r\033[Kh:0 | \033[32mgreen\033[0m\n");
}

}  // namespace
}  // namespace cohort::launch
