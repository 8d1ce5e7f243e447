// Local checkpoints whose disks are lost, damaged or full. "Hosts" are folders, ranks are threads.
// Saves and loads of worlds whose ranks are threads, in every place. "Hosts" are folders: who sees the same folder is
// found out by looking.

#include "train/checkpoint/copies.h"
#include "train/checkpoint/checkpoint.h"
#include "train/checkpoint/exchange.h"
#include "train/checkpoint/testing.h"

#include <fcntl.h>

#include <array>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <thread>
#include <vector>

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

  /// The step that all ranks have loaded, whole; 0 if there is none. `reasons`: why newer ones were skipped.
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
  save_step(3, 2);  // two are to be kept, but only one is on all disks
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

/// If one host's files change or vanish between writing and copying, all ranks get an error.
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
      comm.barrier().wait();  // the communicator is still usable
    });
    for (std::size_t host = 0; host < 3; ++host) ASSERT_TRUE(sys::remove_tree(disk(host)));
  }
}

constexpr CheckpointPlace kPlaces[] = {CheckpointPlace::Rank0, CheckpointPlace::Shared, CheckpointPlace::Local};

TEST(CheckpointPlaces, HoldTheSameBytes) {
  std::map<std::string, std::string> first;
  for (const CheckpointPlace place : kPlaces) {
    SCOPED_TRACE(to_string(place));
    TestFolder folder;
    run_on_threads(3, [&](Communicator comm) {
      const Brought brought(comm, {.step = 5, .own_bytes = std::size_t{5} << 20});
      const auto stored = save(comm, {folder.path(), 3, place}, brought.bundle);
      EXPECT_EQ(stored.manifest.generation, 1);
      EXPECT_EQ(stored.manifest.place, to_string(place));
      EXPECT_EQ(stored.folder, folder / "checkpoint-000001-step-5");
    });
    std::map<std::string, std::string> files = contents(folder / "checkpoint-000001-step-5");
    EXPECT_TRUE(files.erase("manifest.json"));  // says when
    EXPECT_EQ(files.size(), 4u);
    if (first.empty()) first = files;
    EXPECT_TRUE(files == first);
    EXPECT_EQ(contents(folder.path()).size(), 0u) << "something was left behind";
  }
}

TEST(CheckpointPlaces, LoadInWorldsOfAnySize) {
  for (const CheckpointPlace place : kPlaces) {
    for (const int size : {1, 2, 5}) {
      SCOPED_TRACE(fmt::format("{}, {} ranks", to_string(place), size));
      TestFolder folder;
      run_on_threads(3, [&](Communicator comm) {
        save(comm, {folder.path(), 3, place}, Brought(comm, {.step = 2, .own_bytes = 100}).bundle);
      });
      run_on_threads(size, [&](Communicator comm) {
        const FolderOptions options{folder.path(), 3, place};
        const Found found = load_newest(comm, options, {});
        ASSERT_TRUE(found.stored);
        EXPECT_TRUE(is_model(found.files.at(kModelFile), 2));
        EXPECT_EQ(found.part.has_value(), comm.rank() < 3);
        if (found.part) {
          EXPECT_TRUE(is_part(*found.part, comm.rank(), 2));
        }
        // All of them, one of another rank, and none.
        std::set<int> wanted;
        if (comm.rank() == 0) wanted = {0, 1, 2, 3};
        if (comm.rank() == 1) wanted = {2};
        const auto parts = load_parts(comm, options, *found.stored, wanted);
        EXPECT_EQ(parts.size(), comm.rank() == 0 ? 3u : wanted.size());
        for (const auto& [rank, part] : parts) EXPECT_TRUE(is_part(part, rank, 2));
      });
    }
  }
}

TEST(CheckpointPlaces, WithoutStateAreOneFileLessPerRank) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    save(comm, {folder.path()}, Brought(comm, {.step = 1}).bundle);
    const Found found = load_newest(comm, {folder.path()}, {});
    ASSERT_TRUE(found.stored);
    EXPECT_FALSE(found.part);
    EXPECT_TRUE(load_parts(comm, {folder.path()}, *found.stored, {0, 1}).empty());
    EXPECT_TRUE(found.files.contains(kRandomFile));
  });
  EXPECT_EQ(contents(folder / "checkpoint-000001-step-1").size(), 3u);
}

TEST(CheckpointPlaces, SharedNamesThoseWhoSeeAnotherFolder) {
  TestFolder folder, other;
  run_on_threads(3, [&](Communicator comm) {
    const FolderOptions options{comm.rank() == 2 ? other.path() : folder.path(), 3, CheckpointPlace::Shared};
    EXPECT_EQ(code_of([&] { save(comm, options, Brought(comm, {.step = 1}).bundle); },
                      "is not seen by " + comm.host() + " (rank 2)"),
              ErrorCode::InvalidArgument);
  });
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(CheckpointPlaces, LocalKeepsEachHostsPartsOnItsDisk) {
  TestFolder one, two;
  const auto path_of = [&](int rank) { return rank < 2 ? one.path() : two.path(); };
  const auto save_step = [&](std::int64_t step, int keep = 3) {
    run_on_threads(4, [&](Communicator comm) {
      save(comm, {path_of(comm.rank()), keep, CheckpointPlace::Local, 1},
           Brought(comm, {.step = step, .own_bytes = 9}).bundle);
    });
  };
  const auto loaded_step = [&](bool swapped) {
    std::int64_t step = 0;
    run_on_threads(4, [&](Communicator comm) {
      const int seat = swapped ? 3 - comm.rank() : comm.rank();
      const Found found = load_newest(comm, {path_of(seat), 3, CheckpointPlace::Local}, {});
      ASSERT_TRUE(found.stored);
      EXPECT_TRUE(is_model(found.files.at(kModelFile), found.stored->manifest.step));
      ASSERT_TRUE(found.part);
      EXPECT_TRUE(is_part(*found.part, comm.rank(), found.stored->manifest.step));
      if (comm.rank() == 0) step = found.stored->manifest.step;
    });
    return step;
  };
  save_step(1);
  save_step(2);
  const std::string name = "/checkpoint-000002-step-2";
  EXPECT_EQ(names_of(one / name), (std::vector<std::string>{"manifest.json", "model.safetensors",
                                                            "rank-00000.safetensors", "rank-00001.safetensors"}));
  EXPECT_EQ(names_of(two / name),
            (std::vector<std::string>{"manifest.json", "rank-00002.safetensors", "rank-00003.safetensors"}));
  EXPECT_EQ(loaded_step(false), 2);
  EXPECT_EQ(loaded_step(true), 2) << "the ranks have moved to the other host";

  // One host's disk has lost the newest checkpoint, or the whole folder. The error names what is missing.
  ASSERT_TRUE(sys::remove_tree(two / name));
  run_on_threads(4, [&](Communicator comm) {
    const Found found = load_newest(comm, {path_of(comm.rank()), 3, CheckpointPlace::Local}, {});
    ASSERT_TRUE(found.stored);
    EXPECT_EQ(found.stored->manifest.step, 1);
    ASSERT_EQ(found.passed_over.size(), 2u);
    EXPECT_NE(found.passed_over[0].find("missing -- it is rank 2's part -- host " + comm.host()), std::string::npos)
        << found.passed_over[0];
  });
  // A checkpoint that only one host has does not count among those to keep.
  save_step(3, 2);
  EXPECT_EQ(names_of(two.path()), (std::vector<std::string>{"checkpoint-000001-step-1", "checkpoint-000003-step-3"}));
  EXPECT_EQ(loaded_step(false), 3);

  // With both disks' files in one folder, the checkpoint loads in any place.
  for (const auto& entry : fs::directory_iterator(two / "checkpoint-000003-step-3"))
    fs::copy(entry.path(), one / "checkpoint-000003-step-3", fs::copy_options::overwrite_existing);
  run_on_threads(3, [&](Communicator comm) {
    const Found found = load_newest(comm, {one.path()}, {});
    ASSERT_TRUE(found.stored);
    EXPECT_EQ(found.stored->manifest.step, 3);
    EXPECT_TRUE(is_part(*found.part, comm.rank(), 3));
  });
}

TEST(CheckpointPlaces, KeepTheBestBesideTheNewest) {
  for (const CheckpointPlace place : kPlaces) {
    SCOPED_TRACE(to_string(place));
    TestFolder folder, second;
    const auto run = [&](const std::function<void(Communicator&, const FolderOptions&)>& body, BestMode mode,
                         const std::string& value = "loss") {
      run_on_threads(2, [&](Communicator comm) {
        const bool elsewhere = place == CheckpointPlace::Local && comm.rank() == 1;
        body(comm, {elsewhere ? second.path() : folder.path(), 1, place, 2, {value, mode, 2}});
      });
    };
    std::int64_t step = 0;
    const auto save_with = [&](const std::map<std::string, formats::ManifestValue>& values,
                               BestMode mode = BestMode::Min) {
      ++step;
      // (Each run stands for a restarted job.)
      run(
          [&](Communicator& comm, const FolderOptions& options) {
            Brought brought(comm, {.step = step});
            brought.bundle.manifest.values = values;
            save(comm, options, brought.bundle);
          },
          mode);
    };
    const auto best_of = [&](BestMode mode) {
      std::int64_t found_step = 0;
      run(
          [&](Communicator& comm, const FolderOptions& options) {
            const Found found = load_newest(comm, options, {}, {}, Order::BestFirst);
            ASSERT_TRUE(found.stored);
            if (comm.rank() == 0) found_step = found.stored->manifest.step;
          },
          mode);
      return found_step;
    };
    const auto steps = [](const TestFolder& of) {
      std::string text;
      for (const std::string& name : names_of(of.path())) text += name.substr(name.rfind('-') + 1) + " ";
      return text;
    };
    const double nan = std::numeric_limits<double>::quiet_NaN(), infinite = std::numeric_limits<double>::infinity();
    save_with({{"loss", nan}});
    save_with({{"loss", 3.0}});
    save_with({{"loss", std::int64_t{1}}});
    save_with({});
    save_with({{"loss", 2.0}});
    save_with({{"loss", -infinite}, {"accuracy", 9.0}});
    save_with({{"loss", 2.0}});
    EXPECT_EQ(steps(folder), "3 5 7 ") << "the best two, of equal ones the older, and the newest";
    EXPECT_EQ(steps(second), place == CheckpointPlace::Local ? "3 5 7 " : "");
    EXPECT_EQ(best_of(BestMode::Min), 3);
    // Damage: the next best.
    for (const TestFolder* const of : {&folder, &second})
      fs::remove(*of / "checkpoint-000003-step-3/model.safetensors");
    EXPECT_EQ(best_of(BestMode::Min), 5);
    save_with({{"loss", 0.5}}, BestMode::Max);
    EXPECT_EQ(steps(folder), "5 7 8 ");
    EXPECT_EQ(best_of(BestMode::Max), 5);

    run(
        [&](Communicator& comm, const FolderOptions& options) {
          EXPECT_EQ(code_of([&] { load_newest(comm, options, {}, {}, Order::BestFirst); }, "none has a finite number"),
                    ErrorCode::InvalidArgument);
          FolderOptions other = options;
          if (comm.rank() == 1) other.best.keep = 3;
          Brought brought(comm, {.step = 9});
          EXPECT_EQ(code_of([&] { save(comm, other, brought.bundle); }, "give all the same"),
                    ErrorCode::InvalidArgument);
          brought.bundle.manifest.values = {{"los", std::string("0.5")}};
          EXPECT_EQ(
              code_of([&] { save(comm, options, brought.bundle); }, "'los', by which the best is kept, is no number"),
              ErrorCode::InvalidArgument);
        },
        BestMode::Min, "los");
  }
  for (const formats::BestBy& wrong : {formats::BestBy{"", BestMode::Min, 1}, formats::BestBy{"x", BestMode::Min, -1}})
    EXPECT_EQ(code_of(
                  [&] {
                    check({"x", 3, CheckpointPlace::Rank0, 2, wrong});
                  },
                  "keep_best"),
              ErrorCode::InvalidArgument);
}

TEST(CheckpointPlaces, WhatIsDamagedIsNotAmongTheBest) {
  for (const CheckpointPlace place : kPlaces) {
    for (const bool found_by_load : {false, true}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(place), found_by_load));
      TestFolder folder, second;
      const auto run = [&](const std::function<void(Communicator&, const FolderOptions&)>& body) {
        run_on_threads(2, [&](Communicator comm) {
          const bool elsewhere = place == CheckpointPlace::Local && comm.rank() == 1;
          body(comm, {elsewhere ? second.path() : folder.path(), 1, place, 2, {"loss"}});
        });
      };
      const auto save_with = [&](std::int64_t step, double loss) {
        run([&](Communicator& comm, const FolderOptions& options) {
          Brought brought(comm, {.step = step});
          brought.bundle.manifest.values = {{"loss", loss}};
          save(comm, options, brought.bundle);
        });
      };
      const auto best = [&] {
        std::int64_t step = 0;
        run([&](Communicator& comm, const FolderOptions& options) {
          const Found found = load_newest(comm, options, {}, {}, Order::BestFirst);
          if (comm.rank() == 0 && found.stored) step = found.stored->manifest.step;
        });
        return step;
      };
      save_with(1, 1.0);
      for (const TestFolder* const of : {&folder, &second}) {
        const fs::path file = *of / "checkpoint-000001-step-1/model.safetensors";
        if (!fs::exists(file)) continue;
        if (found_by_load)
          std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).write("\xff\xff", 2);  // no length
        else
          fs::resize_file(file, fs::file_size(file) - 1);
      }
      if (found_by_load) {
        EXPECT_EQ(best(), 0);
      }
      save_with(2, 1.5);
      save_with(3, 7.0);
      EXPECT_EQ(names_of(folder.path()),
                (std::vector<std::string>{"checkpoint-000002-step-2", "checkpoint-000003-step-3"}));
      EXPECT_EQ(best(), 2);
    }
  }
}

TEST(CheckpointPlaces, WhatCannotBeReadNowEndsTheLoadOnAllRanksAndStays) {
  for (const CheckpointPlace place : kPlaces) {
    for (const char* const name : {"model.safetensors", "manifest.json"}) {
      SCOPED_TRACE(fmt::format("{} {}", to_string(place), name));
      TestFolder folder, second;
      const auto options_of = [&](int rank, int keep) {
        const bool elsewhere = place == CheckpointPlace::Local && rank == 1;
        return FolderOptions{elsewhere ? second.path() : folder.path(), keep, place, 1, {"loss"}};
      };
      const auto save_with = [&](std::int64_t step, int keep) {
        run_on_threads(2, [&](Communicator comm) {
          Brought brought(comm, {.step = step});
          brought.bundle.manifest.values = {{"loss", static_cast<double>(step == 2 ? 0 : 1)}};
          save(comm, options_of(comm.rank(), keep), brought.bundle);
        });
      };
      for (const int step : {1, 2}) save_with(step, 4);
      // A link to itself: not even root can read it, and it is not missing.
      const fs::path file = fs::path(folder / "checkpoint-000002-step-2") / name;
      const fs::path aside = folder / "aside";
      fs::rename(file, aside);
      fs::create_symlink(file.filename(), file);
      const auto load = [&] {
        run_on_threads(2, [&](Communicator comm) {
          try {
            const Found found = load_newest(comm, options_of(comm.rank(), 1), {});
            ADD_FAILURE() << "step " << (found.stored ? found.stored->manifest.step : 0);
          } catch (const Error& error) {
            EXPECT_EQ(error.code(), ErrorCode::Io) << error.what();
            EXPECT_NE(std::string(error.what()).find("may be whole"), std::string::npos) << error.what();
          }
        });
      };
      load();
      // The best one stays, on all disks, until it can be read again.
      for (const int step : {3, 4}) save_with(step, 1);
      fs::rename(aside, file);
      run_on_threads(2, [&](Communicator comm) {
        const Found found = load_newest(comm, options_of(comm.rank(), 1), {}, {}, Order::BestFirst);
        ASSERT_TRUE(found.stored);
        EXPECT_EQ(found.stored->manifest.step, 2);
      });
    }
  }
}

// Each load lists them, and the training removes the one that it is about to read.
TEST(CheckpointPlaces, ALoaderBesideATrainingThatKeepsOneGetsTheNewer) {
  TestFolder folder;
  const FolderOptions options{folder.path(), 1, CheckpointPlace::Rank0, 1, {}};
  std::atomic<bool> over = false;
  std::thread training([&] {
    run_on_threads(1, [&](Communicator comm) {
      for (std::int64_t step = 1; !over; ++step) save(comm, options, Brought(comm, {.step = step}).bundle);
    });
  });
  run_on_threads(1, [&](Communicator comm) {
    while (names_of(folder.path()).empty()) std::this_thread::yield();
    std::int64_t last = 0;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!load_newest(comm, options, {}).stored && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    for (int load = 0; load < 300; ++load) {
      const Found found = load_newest(comm, options, {});
      ASSERT_TRUE(found.stored);
      EXPECT_TRUE(found.passed_over.empty()) << found.passed_over.front();
      EXPECT_GE(found.stored->manifest.step, last);
      last = found.stored->manifest.step;
    }
    EXPECT_GT(last, 0);
  });
  over = true;
  training.join();
}

TEST(CheckpointPlaces, ANameOfTheBestThatIsNeverSavedIsWarnedOfOnce) {
  TestFolder folder;
  ::testing::internal::CaptureStderr();
  run_on_threads(2, [&](Communicator comm) {
    for (const int step : {1, 2, 3}) {
      Brought brought(comm, {.step = step});
      if (step > 1) brought.bundle.manifest.values = {{"valid_loss", 1.0}, {"accuracy", 0.5}};
      save(comm, {folder.path(), 1, CheckpointPlace::Rank0, 2, {"val_loss"}}, brought.bundle);
    }
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  const auto at = text.find("without the value 'val_loss'");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_NE(text.find("it has 'accuracy', 'valid_loss'"), std::string::npos) << text;
  EXPECT_EQ(text.find("without the value", at + 1), std::string::npos) << text;
}

TEST(CheckpointPlaces, BestByOnOneRankAloneIsAnErrorOnAll) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    FolderOptions options{folder.path()};
    Brought brought(comm, {.step = 1});
    brought.bundle.manifest.values = {{"loss", 1.0}};
    save(comm, options, brought.bundle);
    if (comm.rank() == 0) options.best.value = "loss";
    EXPECT_EQ(code_of([&] { load_newest(comm, options, {}, {}, Order::BestFirst); }, "best_by has not said"),
              ErrorCode::InvalidArgument);
  });
}

TEST(CheckpointPlaces, ErrorsOfOneRankReachAllAndLeaveNothing) {
  for (const CheckpointPlace place : kPlaces) {
    SCOPED_TRACE(to_string(place));
    TestFolder folder;
    run_on_threads(3, [&](Communicator comm) {
      Brought brought(comm, {.step = 1, .own_bytes = 10});
      if (comm.rank() == 1) brought.bundle.state.push_back(brought.bundle.state.front());  // the same name twice
      EXPECT_EQ(code_of(
                    [&] {
                      save(comm, {folder.path(), 3, place}, brought.bundle);
                    },
                    "own"),
                ErrorCode::InvalidArgument);
      const FolderOptions mixed{folder.path(), 3, comm.rank() == 1 ? kPlaces[0] : kPlaces[1]};
      EXPECT_EQ(code_of([&] { save(comm, mixed, brought.bundle); }, ""), ErrorCode::InvalidArgument);
    });
    EXPECT_TRUE(fs::is_empty(folder.path()));
  }
  TestFolder folder;
  ASSERT_TRUE(sys::write_file_atomically(folder / "file", "in the way"));
  run_on_threads(3, [&](Communicator comm) {
    const FolderOptions options{comm.rank() == 2 ? folder / "file" : folder / "good", 3, CheckpointPlace::Local};
    EXPECT_EQ(code_of([&] { save(comm, options, Brought(comm, {.step = 1}).bundle); }, "ENOTDIR"),
              ErrorCode::Unavailable);
  });
  EXPECT_TRUE(fs::is_empty(folder / "good"));
}

TEST(CheckpointPlaces, FindAFlippedBitInEveryByteOfEveryPart) {
  TestFolder folder;
  const FolderOptions options{folder.path(), 3, CheckpointPlace::Shared};
  run_on_threads(2, [&](Communicator comm) {
    for (const std::int64_t step : {1, 2}) save(comm, options, Brought(comm, {.step = step, .own_bytes = 3}).bundle);
  });
  const std::string newest = folder / "checkpoint-000002-step-2";
  run_on_threads(2, [&](Communicator comm) {
    for (const std::string& name : names_of(newest)) {
      const std::string path = newest + "/" + name;
      const sys::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
      const auto good = formats::copy_of(sys::read_file(path)->bytes());
      comm.barrier().wait();
      const auto put = [&](std::size_t at, std::byte value) {
        if (comm.rank() == 0) {
          ASSERT_EQ(::pwrite(fd.get(), &value, 1, static_cast<off_t>(at)), 1);
        }
        comm.barrier().wait();
      };
      // A bit of each byte: all of them are flipped in formats/.
      const std::size_t stride = name == formats::kManifestFile ? 97 : 9;
      for (std::size_t bit = 0; bit < good.size() * 8; bit += stride) {
        put(bit / 8, good[bit / 8] ^ static_cast<std::byte>(1 << bit % 8));
        const Found found = load_newest(comm, options, {});
        ASSERT_TRUE(found.stored) << name << ", bit " << bit;
        ASSERT_EQ(found.stored->manifest.step, 1) << name << ", bit " << bit;
        ASSERT_EQ(found.passed_over.size(), 1u);
        ASSERT_NE(found.passed_over[0].find(name), std::string::npos);
        comm.barrier().wait();
        put(bit / 8, good[bit / 8]);
      }
      ASSERT_EQ(load_newest(comm, options, {}).stored->manifest.step, 2);
      comm.barrier().wait();
    }
  });
}

}  // namespace
}  // namespace cohort::checkpoint
