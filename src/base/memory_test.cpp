#include "base/memory.h"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

namespace cohort::sys {
namespace {

TEST(SharedMemory, IsZeroedSealedAndSeenThroughEveryMapping) {
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{5000}, std::size_t{3} << 20}) {
    auto made = create_shared_segment("test", bytes);
    ASSERT_TRUE(made) << made.error().what();
    ASSERT_GE(made->mapping.bytes(), bytes);
    char* const data = static_cast<char*>(made->mapping.data());
    EXPECT_TRUE(std::all_of(data, data + made->mapping.bytes(), [](char byte) { return byte == 0; }));
    auto other = map_shared_segment(made->fd.get(), bytes);
    ASSERT_TRUE(other) << other.error().what();
    populate(*other);
    data[bytes - 1] = 7;
    EXPECT_EQ(static_cast<char*>(other->data())[bytes - 1], 7);
    EXPECT_NE(::ftruncate(made->fd.get(), 0), 0);
  }
}

TEST(SharedMemory, OfAPeerIsRefusedIfItCouldShrinkOrIsTooSmall) {
  const UniqueFd open_to_change(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(::ftruncate(open_to_change.get(), 8192), 0);
  auto unsealed = map_shared_segment(open_to_change.get(), 8192);
  ASSERT_FALSE(unsealed);
  EXPECT_EQ(unsealed.error().code(), ErrorCode::Corrupt);
  auto made = create_shared_segment("test", 8192);
  ASSERT_TRUE(made);
  EXPECT_FALSE(map_shared_segment(made->fd.get(), 8193));
}

TEST(SharedMemory, MoreThanThereIsIsRefusedBeforeAnyIsTaken) {
  const std::size_t available = available_memory();
  EXPECT_GT(available, std::size_t{1} << 20);
  auto made = create_shared_segment("test", std::size_t{1} << 45);
  ASSERT_FALSE(made);
  EXPECT_EQ(made.error().code(), ErrorCode::Unavailable);
  EXPECT_NE(std::strstr(made.error().what(), "available"), nullptr) << made.error().what();
  EXPECT_FALSE(create_shared_segment("test", 0));
}

/// True if /proc/self/smaps shows this flag for the memory.
bool has_flag(const void* memory, const std::string& flag) {
  std::ifstream maps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(maps, line)) {
    std::uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream range(line);
    if (line.find('-') < 17 && range >> std::hex >> begin >> dash >> end && dash == '-') {
      const auto at = reinterpret_cast<std::uintptr_t>(memory);
      inside = at >= begin && at < end;
    }
    if (inside && line.starts_with("VmFlags:")) return line.find(" " + flag) != std::string::npos;
  }
  return false;
}

/// True if a core dump would leave the memory out.
bool is_left_out(const void* memory) { return has_flag(memory, "dd"); }

TEST(HiddenMemory, AForkedChildLocksItAgain) {
  void* const hidden = take_hidden_memory();
  if (!has_flag(hidden, "lo")) GTEST_SKIP() << "RLIMIT_MEMLOCK does not allow it";
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const bool inherited = has_flag(hidden, "lo");
    lock_hidden_memory();
    ::_exit(!inherited && has_flag(hidden, "lo") ? 0 : 1);
  }
  int word = 0;
  ASSERT_EQ(::waitpid(child, &word, 0), child);
  EXPECT_EQ(word, 0);
  give_hidden_memory(hidden);
}

TEST(HiddenMemory, NoCoreDumpShowsIt) {
  void* const hidden = take_hidden_memory();
  const auto plain = std::make_unique<char[]>(kHiddenBytes);
  EXPECT_TRUE(is_left_out(hidden));
  EXPECT_FALSE(is_left_out(plain.get()));
  give_hidden_memory(hidden);
}

TEST(HiddenMemory, IsEmptyWhenItIsTakenAgain) {
  auto* const first = static_cast<char*>(take_hidden_memory());
  std::memset(first, 'x', kHiddenBytes);
  give_hidden_memory(first);
  auto* const second = static_cast<char*>(take_hidden_memory());
  EXPECT_EQ(std::count(second, second + kHiddenBytes, '\0'), static_cast<std::ptrdiff_t>(kHiddenBytes));
  give_hidden_memory(second);
}

TEST(HiddenMemory, ThreadsNeverShareAPiece) {
  constexpr int kThreads = 4, kPieces = 300;
  std::vector<std::vector<void*>> taken(kThreads);
  std::vector<std::thread> threads;
  for (auto& mine : taken) {
    threads.emplace_back([&mine] {
      for (int i = 0; i < kPieces; ++i) {
        mine.push_back(take_hidden_memory());
        if (i % 3 == 0) {
          give_hidden_memory(mine.back());
          mine.pop_back();
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  std::set<void*> all;
  for (const auto& mine : taken) all.insert(mine.begin(), mine.end());
  EXPECT_EQ(all.size(), static_cast<std::size_t>(kThreads) * (kPieces - kPieces / 3));
  for (void* const each : all) give_hidden_memory(each);
}

}  // namespace
}  // namespace cohort::sys
