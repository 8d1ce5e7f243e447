#include "sys/shared_memory.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

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

}  // namespace
}  // namespace cohort::sys
