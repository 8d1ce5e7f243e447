// A process that follows checkpoints: made by hand here, as a save leaves them.
#include "formats/checkpoint_folder.h"

#include <cohort/checkpoint_follower.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace cohort {
namespace {

using namespace std::chrono_literals;

class CheckpointFollowerTest : public testing::Test {
 protected:
  void SetUp() override {
    char folder[] = "/tmp/cohort-follow-XXXXXX";
    ASSERT_NE(::mkdtemp(folder), nullptr);
    above_ = folder;
    folder_ = above_ + "/saved";
  }
  void TearDown() override { std::filesystem::remove_all(above_); }
  void save(std::int64_t step) {
    auto writer = value_or_throw(formats::CheckpointWriter::open(folder_));
    formats::Manifest manifest;
    manifest.generation = writer.newest() + 1;
    manifest.place = "rank0";
    manifest.step = step;
    value_or_throw(writer.begin(manifest.generation, step));
    value_or_throw(writer.seal(manifest, [](const std::string&) { return true; }));
    value_or_throw(writer.publish());
  }
  CheckpointFollower follower(std::int64_t after = 0) {
    return CheckpointFollower({.folder = folder_, .after_generation = after, .look_every = 10ms, .timeout = 20s});
  }
  std::string above_, folder_;
};

TEST_F(CheckpointFollowerTest, SeesTheNewestAndNeverMissesTheLast) {
  auto checkpoints = follower();
  EXPECT_FALSE(checkpoints.next_within(30ms).came) << "the folder is not there yet";
  save(10);
  const auto first = checkpoints.next();
  ASSERT_TRUE(first);
  EXPECT_EQ(first->step, 10);
  EXPECT_EQ(first->generation, 1);
  EXPECT_FALSE(checkpoints.next_within(30ms).came) << "once";
  save(20);
  save(30);
  EXPECT_EQ(checkpoints.next()->step, 30) << "the newest";
  save(40);
  ASSERT_EQ(::raise(SIGTERM), 0);
  EXPECT_TRUE(checkpoints.training_is_over());
  const auto last = checkpoints.next();
  ASSERT_TRUE(last);
  EXPECT_EQ(last->step, 40);
  EXPECT_FALSE(checkpoints.next());
  EXPECT_FALSE(checkpoints.next());
}

TEST_F(CheckpointFollowerTest, GoesOnBehindWhatWasSeenBefore) {
  save(1);
  save(2);
  auto checkpoints = follower(2);
  EXPECT_FALSE(checkpoints.next_within(30ms).came);
  save(3);
  EXPECT_EQ(checkpoints.next()->generation, 3);
}

TEST_F(CheckpointFollowerTest, ATrainingThatDoesNotSaveIsNamed) {
  CheckpointFollower checkpoints({.folder = folder_, .look_every = 10ms, .timeout = 50ms});
  try {
    (void)checkpoints.next();
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Timeout);
    EXPECT_NE(std::string(error.what()).find(folder_), std::string::npos) << error.what();
  }
  EXPECT_THROW(CheckpointFollower({.folder = ""}), Error);
  EXPECT_THROW(CheckpointFollower({.folder = "x", .look_every = 0ms}), Error);
}

}  // namespace
}  // namespace cohort
