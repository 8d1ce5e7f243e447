#include <cohort/communicator.h>
#include <cohort/error.h>

#include "comm/testing/worlds.h"

#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <vector>

namespace cohort {
namespace {

TEST(ThreadWorld, SumsOverRanks) {
  for (const int size : {1, 2, 3, 5}) {
    comm::testing::run_world(size, [&](Communicator comm) {
      EXPECT_EQ(comm.size(), size);
      for (const std::size_t count : {std::size_t{1}, std::size_t{1000}, std::size_t{300000}}) {
        std::vector<float> own(count, static_cast<float>(comm.rank() + 1));
        comm.all_reduce(std::span(own)).wait();
        EXPECT_EQ(own, std::vector<float>(count, static_cast<float>(size * (size + 1) / 2)));
        Memory memory = comm.allocate(count * sizeof(float));
        const std::span<float> values(static_cast<float*>(memory.data()), count);
        std::iota(values.begin(), values.end(), static_cast<float>(comm.rank()));
        comm.all_reduce(values).wait();
        EXPECT_EQ(values[count - 1],
                  static_cast<float>(size) * static_cast<float>(count - 1) + static_cast<float>(size * (size - 1) / 2));
      }
    });
  }
}

TEST(ThreadWorld, RethrowsTheFirstExceptionAndEndsTheOthers) {
  std::atomic<int> told = 0;
  try {
    comm::testing::run_world(3, [&](Communicator comm) {
      if (comm.rank() == 1) throw std::runtime_error("no more coffee");
      try {
        comm.barrier().wait();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Aborted);
        EXPECT_NE(std::string(error.what()).find("no more coffee"), std::string::npos) << error.what();
        ++told;
        throw;
      }
    });
    FAIL() << "no exception";
  } catch (const std::runtime_error& error) {
    EXPECT_STREQ(error.what(), "no more coffee");
  }
  EXPECT_EQ(told, 2);
}

TEST(ThreadWorld, RefusesAWorldOfNone) { EXPECT_THROW(comm::testing::form_world(0), Error); }

}  // namespace
}  // namespace cohort
