// Local checkpoints whose disks are lost, damaged or full. "Hosts" are folders, ranks are threads.
#include "checkpoint/copies.h"

#include "checkpoint/exchange.h"
#include "checkpoint/load.h"
#include "checkpoint/save.h"
#include "checkpoint/testing.h"

#include <array>
#include <filesystem>

namespace cohort::checkpoint {
namespace {

namespace fs = std::filesystem;
using formats::TestFolder;

constexpr int kRanks = 5;
constexpr std::array<std::size_t, kRanks> kHostOf = {0, 0, 1, 2, 2};
constexpr std::size_t kOwnBytes = std::size_t{5} << 20;  // more than a piece

class CheckpointCopies : public ::testing::Test {
 protected:
  FolderOptions options(int rank, int copies) const {
    return {disk(kHostOf[static_cast<std::size_t>(rank)]), 2, CheckpointPlace::Local, copies};
  }
  std::string disk(std::size_t host) const { return root_ / ("disk-" + std::to_string(host)); }
  std::string newest(std::size_t host) const { return disk(host) + "/" + names_of(disk(host)).back(); }

  void save_step(std::int64_t step, int copies, std::size_t own_bytes = 100) const {
    run_on_threads(kRanks, [&](Communicator comm) {
      save(comm, options(comm.rank(), copies), Brought(comm, {.step = step, .own_bytes = own_bytes}).bundle);
    });
  }

  /// The step that all ranks have loaded, whole; 0 if there is none. `reasons`: what was passed over.
  std::int64_t loaded_step(std::vector<std::string>* reasons = nullptr) const {
    std::int64_t step = 0;
    run_on_threads(kRanks, [&](Communicator comm) {
      const Found found = load_newest(comm, options(comm.rank(), 1), {});
      if (comm.rank() == 0 && reasons) *reasons = found.passed_over;
      if (!found.stored) return;
      EXPECT_TRUE(is_model(found.files.at(kModelFile), found.stored->manifest.step));
      ASSERT_TRUE(found.part);
      EXPECT_TRUE(is_part(*found.part, comm.rank(), found.stored->manifest.step));
      if (comm.rank() == 0) step = found.stored->manifest.step;
    });
    return step;
  }

  TestFolder root_;
};

const std::string kOne = "rank-00000.safetensors", kTwo = "rank-00001.safetensors", kThree = "rank-00002.safetensors",
                  kFour = "rank-00003.safetensors", kFive = "rank-00004.safetensors", kManifest = "manifest.json";

TEST_F(CheckpointCopies, LieOnTheNextDisks) {
  const std::vector<std::string> parts = {kOne, kTwo, kThree, kFour, kFive};
  using Names = std::vector<std::string>;
  save_step(1, 1);
  EXPECT_EQ(names_of(newest(0)), (Names{kManifest, kModelFile, kOne, kTwo}));
  EXPECT_EQ(names_of(newest(1)), (Names{kManifest, kThree}));
  EXPECT_EQ(names_of(newest(2)), (Names{kManifest, kFour, kFive}));
  save_step(2, 2);
  EXPECT_EQ(names_of(newest(0)), (Names{kManifest, kModelFile, kOne, kTwo, kFour, kFive}));
  EXPECT_EQ(names_of(newest(1)), (Names{kManifest, kModelFile, kOne, kTwo, kThree}));
  EXPECT_EQ(names_of(newest(2)), (Names{kManifest, kThree, kFour, kFive}));
  for (const int copies : {3, 100}) {
    save_step(copies, copies);
    for (std::size_t host = 0; host < 3; ++host)
      EXPECT_EQ(names_of(newest(host)), (Names{kManifest, kModelFile, kOne, kTwo, kThree, kFour, kFive}));
    EXPECT_TRUE(contents(newest(0)) == contents(newest(1)) && contents(newest(1)) == contents(newest(2)));
  }
}

TEST_F(CheckpointCopies, OutliveTheirDisks) {
  for (const int copies : {1, 2, 3}) {
    for (std::size_t lost = 0; lost < 3; ++lost) {
      SCOPED_TRACE(fmt::format("{} copies, disk {} lost", copies, lost));
      save_step(7, copies, kOwnBytes);
      ASSERT_TRUE(sys::remove_tree(disk(lost)));
      EXPECT_EQ(loaded_step(), copies > 1 ? 7 : 0);
      // A new disk has the folder, and nothing in it; then the next disk goes, too.
      ASSERT_TRUE(sys::make_folders(disk(lost)));
      EXPECT_EQ(loaded_step(), copies > 1 ? 7 : 0);
      ASSERT_TRUE(sys::remove_tree(disk((lost + 1) % 3)));
      EXPECT_EQ(loaded_step(), copies > 2 ? 7 : 0);
      for (std::size_t host = 0; host < 3; ++host) ASSERT_TRUE(sys::remove_tree(disk(host)));
    }
  }
}

TEST_F(CheckpointCopies, StandInForDamagedFiles) {
  save_step(1, 2);
  save_step(2, 2);
  const auto damage = [&](std::size_t host, const std::string& file) {
    std::fstream stream(newest(host) + "/" + file, std::ios::in | std::ios::out | std::ios::binary);
    stream.seekp(-1, std::ios::end);
    stream.put('\x55');
    ASSERT_TRUE(stream.good());
  };
  std::vector<std::string> reasons;
  damage(0, kModelFile);
  damage(2, kThree);
  EXPECT_EQ(loaded_step(&reasons), 2);
  EXPECT_TRUE(reasons.empty());
  damage(1, kModelFile);
  EXPECT_EQ(loaded_step(&reasons), 1);
  ASSERT_EQ(reasons.size(), 1u);
  EXPECT_NE(reasons[0].find("model.safetensors: damaged"), std::string::npos) << reasons[0];
  EXPECT_NE(reasons[0].find(disk(0)), std::string::npos) << reasons[0];
  EXPECT_NE(reasons[0].find(disk(1)), std::string::npos) << reasons[0];
}

TEST_F(CheckpointCopies, AreKeptUntilNewerOnesAreOnAllDisks) {
  save_step(1, 2);
  save_step(2, 2);
  ASSERT_TRUE(sys::remove_tree(disk(1)));
  save_step(3, 2);  // 2 are to be kept; of those that all disks have there is one
  EXPECT_EQ(names_of(disk(0)).size(), 3u);
  EXPECT_EQ(names_of(disk(1)).size(), 1u);
  save_step(4, 2);
  for (std::size_t host = 0; host < 3; ++host)
    EXPECT_EQ(names_of(disk(host)), (std::vector<std::string>{"checkpoint-000003-step-3", "checkpoint-000004-step-4"}));
  EXPECT_EQ(loaded_step(), 4);
}

TEST_F(CheckpointCopies, HaveToBeAskedForByAllRanksAlike) {
  run_on_threads(kRanks, [&](Communicator comm) {
    EXPECT_EQ(code_of(
                  [&] {
                    save(comm, options(comm.rank(), comm.rank() == 3 ? 1 : 2),
                         Brought(comm, {.step = 1, .own_bytes = 9}).bundle);
                  },
                  "this rank has copies = 1, and another has 2"),
              ErrorCode::InvalidArgument);
  });
  for (std::size_t host = 0; host < 3; ++host) EXPECT_TRUE(!fs::exists(disk(host)) || fs::is_empty(disk(host)));
}

/// What became of one host's files between their writing and their copying is everybody's error.
TEST_F(CheckpointCopies, RefuseWhatIsNotAsItWasWritten) {
  for (const bool missing : {false, true}) {
    run_on_threads(kRanks, [&](Communicator comm) {
      const FolderOptions own = options(comm.rank(), 2);
      const SharedFolder folder = probe_shared_folder(comm, own, IfMissing::Make);
      const std::string name = part_file(comm.rank());
      const auto bytes = formats::random_bytes(kOwnBytes, static_cast<unsigned>(comm.rank()));
      const auto written =
          formats::write_checkpoint_file(own.path, name, [&](const formats::Sink& sink) { return sink(bytes); });
      ASSERT_TRUE(written);
      Digests digests;
      for (int rank = 0; rank < kRanks; ++rank) {
        const std::string crc32 = share(comm, written->crc32, rank), sha256 = share(comm, written->sha256, rank);
        digests[part_file(rank)] = {kOwnBytes, sha256, crc32};
      }
      if (comm.rank() == 2) {
        const std::string path = own.path + "/" + name;
        if (missing) {
          ASSERT_TRUE(sys::remove_tree(path));
        } else {
          std::fstream stream(path, std::ios::in | std::ios::out | std::ios::binary);
          stream.seekp(4'500'000);
          stream.put(static_cast<char>(static_cast<int>(bytes[4'500'000]) ^ 1));
        }
      }
      comm.barrier().wait();
      const Copies copies(folder, 2);
      EXPECT_EQ(code_of([&] { copies.make(comm, own.path, digests); }, missing ? "cannot open" : "differs from what"),
                missing ? ErrorCode::Unavailable : ErrorCode::Corrupt);
      comm.barrier().wait();  // and it can be used for the next thing
    });
    for (std::size_t host = 0; host < 3; ++host) ASSERT_TRUE(sys::remove_tree(disk(host)));
  }
}

}  // namespace
}  // namespace cohort::checkpoint
