#include "train/checkpoint/background.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/checkpoint/testing.h"
#include "train/formats/checkpoint_folder.h"

#include <cohort/checkpoint_follower.h>
#include <cohort/error.h>

#include <gtest/gtest.h>

#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <string>

namespace cohort::checkpoint {
namespace {

using formats::TestFolder;

std::shared_ptr<PendingSave> start(BackgroundSaver& saver, Communicator& comm, const Bundle& bundle) {
  saver.settle(comm);
  if (saver.needs_communicator(comm)) saver.adopt(comm.split({.background = true}));
  return saver.start(comm, bundle);
}

TEST(BackgroundSaver, SavesWhatWasThereWhenItWasCalled) {
  for (const CheckpointPlace place : {CheckpointPlace::Rank0, CheckpointPlace::Shared}) {
    TestFolder folder;
    const FolderOptions options{folder.path(), 2, place};
    run_on_threads(3, [&](Communicator comm) {
      BackgroundSaver saver(options);
      for (std::int64_t step = 1; step <= 5; ++step) {
        // Sizes vary, and the memory is reused.
        Brought brought(comm, {.step = step, .own_bytes = std::size_t{1} << (10 + step % 3), .model_bytes = 300'000});
        const auto pending = start(saver, comm, brought.bundle);
        std::fill(brought.model.begin(), brought.model.end(), std::byte{0});
        std::fill(brought.own.begin(), brought.own.end(), std::byte{0});
        // The program's collectives go on meanwhile.
        for (int i = 0; i < 50; ++i) EXPECT_EQ(highest(comm, i + comm.rank()), i + 2);
        if (step == 5) {
          EXPECT_EQ(pending->wait().manifest.step, 5);
        }
      }
      saver.close();
      const Found found = load_newest(comm, options, {});
      ASSERT_TRUE(found.stored);
      EXPECT_EQ(found.stored->manifest.step, 5);
      EXPECT_EQ(found.stored->manifest.generation, 5);
      EXPECT_TRUE(found.passed_over.empty());
      EXPECT_TRUE(is_model(found.files.at(kModelFile), 5));
      EXPECT_TRUE(is_part(*found.part, comm.rank(), 5));
    });
    EXPECT_EQ(names_of(folder.path()).size(), 2u);
  }
}

TEST(BackgroundSaver, WhatIsCalledLastIsTheNewestWhicheverObjectSaves) {
  TestFolder folder;
  const FolderOptions options{folder.path(), 9, CheckpointPlace::Rank0};
  run_on_threads(2, [&](Communicator comm) {
    BackgroundSaver saver(options), other(options);
    Brought slow(comm, {.step = 1, .own_bytes = std::size_t{1} << 20, .model_bytes = 30'000'000});
    const auto first = start(saver, comm, slow.bundle);
    Brought quick(comm, {.step = 2});
    const auto second = start(other, comm, quick.bundle);
    Brought last(comm, {.step = 3});
    const auto third = save(comm, options, last.bundle);
    EXPECT_EQ(first->wait().manifest.generation, 1);
    EXPECT_EQ(second->wait().manifest.generation, 2);
    EXPECT_EQ(third.manifest.generation, 3);
  });
}

TEST(BackgroundSaver, TellsOfAnErrorOnceOnAllRanksAndGoesOn) {
  TestFolder folder;
  ASSERT_TRUE(sys::write_file_atomically(folder / "run", "in the way"));
  run_on_threads(3, [&](Communicator comm) {
    BackgroundSaver saver({folder / "run"});
    const Brought brought(comm, {.step = 1});
    // Nobody waits for the failed save, so the next one throws its error on all ranks, and saves nothing.
    start(saver, comm, brought.bundle);
    EXPECT_EQ(code_of([&] { start(saver, comm, brought.bundle); }, "ENOTDIR"), ErrorCode::Unavailable);
    saver.settle(comm);
    // A rank that has waited has got the error.
    const auto pending = start(saver, comm, brought.bundle);
    for (int times = 0; times < 2; ++times)
      EXPECT_EQ(code_of([&] { pending->wait(); }, "ENOTDIR"), ErrorCode::Unavailable);
    EXPECT_TRUE(pending->done());
    saver.close();
    // Only rank 1 has waited for the save, so the next one throws the error on all ranks.
    const auto other = start(saver, comm, brought.bundle);
    if (comm.rank() == 1) {
      EXPECT_EQ(code_of([&] { other->wait(); }, "ENOTDIR"), ErrorCode::Unavailable);
    }
    EXPECT_EQ(code_of([&] { saver.settle(comm); }, "ENOTDIR"), ErrorCode::Unavailable);

    if (comm.rank() == 0) {
      ASSERT_TRUE(sys::remove_tree(folder / "run"));
    }
    comm.barrier().wait();
    EXPECT_EQ(start(saver, comm, brought.bundle)->wait().manifest.generation, 1);
  });
}

TEST(BackgroundSaver, IsEndedByAbortAndTakesAnotherCommunicator) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    BackgroundSaver saver({folder.path()});
    const Brought brought(comm, {.step = 1, .model_bytes = 500'000});
    for (int round = 0; round < 3; ++round) {
      const auto pending = start(saver, comm, brought.bundle);
      if (comm.rank() == 1) saver.abort("this rank has had enough");
      saver.wait();
      try {
        pending->wait();  // the save may have ended before
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Aborted) << error.what();
      }
    }
    const auto pending = start(saver, comm, brought.bundle);
    pending->wait();
  });
  for (const std::string& name : names_of(folder.path())) EXPECT_NE(name.front(), '.') << name << " was left behind";
}

TEST(BackgroundSaver, DestructorWaitsAndForkedChildrenDoNot) {
  TestFolder folder;
  Communicator alone;
  const Brought brought(alone, {.step = 1, .model_bytes = 3'000'000});
  {
    BackgroundSaver saver({folder.path()});
    saver.start(alone, brought.bundle);
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      ::alarm(20);
      saver.wait();
      ::_exit(0);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0) << "the child waited for a thread that it does not have";
  }
  EXPECT_EQ(names_of(folder.path()), (std::vector<std::string>{"checkpoint-000001-step-1"}));
}

}  // namespace
}  // namespace cohort::checkpoint

namespace cohort {
namespace {

// A process that follows checkpoints: the checkpoints are made by hand here.

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
