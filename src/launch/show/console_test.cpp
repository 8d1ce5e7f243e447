#include "launch/show/console.h"

#include "sys/unique_fd.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <pty.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
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
    // Until the terminal is full: it has taken nothing more for a while.
    std::uint64_t before = 1;
    ASSERT_TRUE(soon([&] {
      std::this_thread::sleep_for(50ms);
      return std::exchange(before, console.taken()) == console.taken();
    }));
    EXPECT_FALSE(console.idle());
  }
  EXPECT_LT(std::chrono::steady_clock::now() - since, 20s);
}

}  // namespace
}  // namespace cohort::launch
