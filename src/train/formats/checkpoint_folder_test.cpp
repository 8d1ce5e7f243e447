#include "train/formats/checkpoint_folder.h"

#include "base/json.h"

#include "train/formats/safetensors.h"
#include "train/formats/testing.h"
#include "train/formats/weights.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cmath>
#include <csignal>
#include <filesystem>
#include <limits>
#include <thread>

namespace cohort::formats {
namespace {

namespace fs = std::filesystem;

/// A checkpoint whose bytes all follow from its step, so that a mixture is detected.
Result<StoredCheckpoint> save(const std::string& folder, std::int64_t step, std::size_t size, int keep = 3) {
  Manifest manifest;
  manifest.step = step;
  manifest.sampler = SamplerPosition{~std::uint64_t{0}, 1, step * 8, 1000};
  manifest.values = {{"nan", std::nan("7")},
                     {"real", 1.0},
                     {"text", std::string("grün\n")},
                     {"no", false},
                     {"least", std::numeric_limits<std::int64_t>::min()}};
  manifest.place = "rank0";
  auto writer = CheckpointWriter::open(folder);
  if (!writer) return tl::unexpected(writer.error());
  manifest.generation = writer->newest() + 1;
  if (auto begun = writer->begin(manifest.generation, step); !begun) return tl::unexpected(begun.error());
  const auto content = random_bytes(size, static_cast<unsigned>(step));
  const std::vector<NamedTensor> tensors = {{"w", {ElementType::UInt8, {static_cast<std::int64_t>(size)}, content}}};
  for (const char* const file : {"model.safetensors", "rank-00000.safetensors"}) {
    auto digest = write_checkpoint_file(writer->hidden(), file, [&](const Sink& sink) {
      return write_safetensors(sink, tensors, {{"file", file}});
    });
    if (!digest) return tl::unexpected(digest.error());
    manifest.files[file] = *digest;
  }
  if (auto sealed = writer->seal(manifest, [](const std::string&) { return true; }); !sealed)
    return tl::unexpected(sealed.error());
  keep_newest_checkpoints(folder, keep);
  auto stored = writer->publish();
  if (stored) keep_newest_checkpoints(folder, keep);
  return stored;
}

/// True if all files of the checkpoint are whole, and written in its step.
::testing::AssertionResult is_whole(const StoredCheckpoint& checkpoint) {
  for (const auto& [name, digest] : checkpoint.manifest.files) {
    const auto bytes = read_checkpoint_file(checkpoint, name);
    if (!bytes) return ::testing::AssertionFailure() << bytes.error().what();
    const auto file = parse_safetensors(bytes->bytes(), name);
    if (!file) return ::testing::AssertionFailure() << file.error().what();
    const auto content = copy_of(file->find("w")->bytes);
    if (content != random_bytes(content.size(), static_cast<unsigned>(checkpoint.manifest.step))) {
      return ::testing::AssertionFailure() << name << " is of another step";
    }
  }
  return ::testing::AssertionSuccess();
}

std::vector<std::string> names_in(const std::string& folder) { return value_or_throw(sys::list_folder(folder)); }

TEST(CheckpointFolder, KeepsTheNewestAndTheirOrder) {
  TestFolder folder;
  for (std::int64_t step = 1; step <= 5; ++step) {
    const auto stored = save(folder.path(), step * 10, 100);
    ASSERT_TRUE(stored) << stored.error().what();
    EXPECT_EQ(stored->manifest.generation, step);
  }
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"checkpoint-000003-step-30", "checkpoint-000004-step-40",
                                                               "checkpoint-000005-step-50"}));
  // A run that resumes from an older checkpoint saves steps again; the newest checkpoint is the one saved last.
  ASSERT_TRUE(save(folder.path(), 20, 100));
  const auto list = list_checkpoints(folder.path());
  ASSERT_TRUE(list);
  EXPECT_EQ(list->sound.back().manifest.step, 20);
  EXPECT_EQ(list->sound.back().manifest.sampler->seed, ~std::uint64_t{0});
  EXPECT_TRUE(std::isnan(std::get<double>(list->sound.back().manifest.values.at("nan"))));
  EXPECT_EQ(std::get<double>(list->sound.back().manifest.values.at("real")), 1.0);
  EXPECT_EQ(std::get<std::int64_t>(list->sound.back().manifest.values.at("least")),
            std::numeric_limits<std::int64_t>::min());
  EXPECT_TRUE(is_whole(list->sound.back()));
}

TEST(CheckpointFolder, FindsEveryFlippedBitAndEveryCut) {
  TestFolder folder;
  const auto stored = save(folder.path(), 1, 40);
  ASSERT_TRUE(stored) << stored.error().what();
  for (const std::string name : {"manifest.json", "model.safetensors", "rank-00000.safetensors"}) {
    const std::string path = stored->folder + "/" + name;
    const auto good = copy_of(sys::read_file(path)->bytes());
    const auto refused = [&] {
      const auto checkpoint = read_checkpoint(stored->folder);
      if (!checkpoint) return checkpoint.error().code() == ErrorCode::Corrupt;
      for (const auto& [entry, digest] : checkpoint->manifest.files) {
        const auto read = read_checkpoint_file(*checkpoint, entry);
        if (!read)
          return read.error().code() == ErrorCode::Corrupt &&
                 std::string(read.error().what()).find(entry) != std::string::npos;
      }
      return false;
    };
    // In place, byte by byte: replacing the file thousands of times would take minutes.
    const sys::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    ASSERT_TRUE(fd);
    const auto put = [&](std::size_t at, std::byte value) {
      return ::pwrite(fd.get(), &value, 1, static_cast<off_t>(at)) == 1;
    };
    for (std::size_t bit = 0; bit < good.size() * 8; ++bit) {
      ASSERT_TRUE(put(bit / 8, good[bit / 8] ^ static_cast<std::byte>(1 << bit % 8)));
      ASSERT_TRUE(refused()) << name << ", bit " << bit;
      ASSERT_TRUE(put(bit / 8, good[bit / 8]));
    }
    ASSERT_FALSE(refused()) << name;
    for (std::size_t size = good.size(); size-- > 0;) {
      ASSERT_EQ(::ftruncate(fd.get(), static_cast<off_t>(size)), 0);
      ASSERT_TRUE(refused()) << name << ", " << size << " bytes";
    }
    ASSERT_EQ(::pwrite(fd.get(), good.data(), good.size(), 0), static_cast<ssize_t>(good.size()));
    ASSERT_FALSE(refused()) << name;
  }
}

TEST(CheckpointFolder, IsNeverTornByKills) {
  TestFolder folder;
  constexpr std::size_t kSize = 1 << 20;
  std::mt19937 random(3);
  int killed_inside = 0;
  std::int64_t newest = 0;
  for (int round = 0; round < 40; ++round) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      for (std::int64_t step = newest + 1;; ++step) {
        if (!save(folder.path(), step, kSize, 2)) ::_exit(1);
      }
    }
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 60'000));
    ::kill(child, SIGKILL);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "saving failed in round " << round;
    for (const std::string& name : names_in(folder.path())) killed_inside += name.front() == '.' ? 1 : 0;
    const auto list = list_checkpoints(folder.path());
    ASSERT_TRUE(list) << list.error().what();
    ASSERT_TRUE(list->damaged.empty()) << list->damaged.front().what();
    ASSERT_LE(list->sound.size(), 3u);
    for (const StoredCheckpoint& checkpoint : list->sound) ASSERT_TRUE(is_whole(checkpoint));
    if (!list->sound.empty()) {
      ASSERT_GE(list->sound.back().manifest.step, newest) << "a finished checkpoint was lost";
      newest = list->sound.back().manifest.step;
    } else {
      ASSERT_EQ(newest, 0);
    }
  }
  EXPECT_GT(killed_inside, 5) << "most kills hit nothing: the test shows nothing";
  ASSERT_TRUE(save(folder.path(), newest + 1, kSize, 2));
  for (const std::string& name : names_in(folder.path())) EXPECT_NE(name.front(), '.') << name << " was left behind";
}

TEST(CheckpointFolder, SaysThatTheDiskIsFullAndKeepsWhatWasThere) {
  TestFolder folder;
  ASSERT_TRUE(save(folder.path(), 1, 1000));
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    ::signal(SIGXFSZ, SIG_IGN);
    const struct rlimit limit { 5000, 5000 };
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const auto stored = save(folder.path(), 2, 100'000);
    const bool said = !stored && stored.error().code() == ErrorCode::Io &&
                      std::string(stored.error().what()).find("EFBIG") != std::string::npos &&
                      std::string(stored.error().what()).find("model.safetensors") != std::string::npos;
    ::_exit(said ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"checkpoint-000001-step-1"}));
  const auto list = list_checkpoints(folder.path());
  ASSERT_EQ(list->sound.size(), 1u);
  EXPECT_TRUE(is_whole(list->sound[0]));
}

TEST(CheckpointFolder, SaysWhichBytesAreDamaged) {
  TestFolder folder;
  const auto stored = save(folder.path(), 1, 5 * kBlockBytes + 77);
  ASSERT_TRUE(stored) << stored.error().what();
  const std::string path = stored->folder + "/model.safetensors";
  const sys::UniqueFd fd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  const auto message_with = [&](std::vector<std::size_t> damaged) {
    const auto good = copy_of(sys::read_file(path)->bytes());
    for (const std::size_t at : damaged) {
      const std::byte other = good[at] ^ std::byte{0x10};
      EXPECT_EQ(::pwrite(fd.get(), &other, 1, static_cast<off_t>(at)), 1);
    }
    const auto read = read_checkpoint_file(*stored, "model.safetensors");
    for (const std::size_t at : damaged) EXPECT_EQ(::pwrite(fd.get(), &good[at], 1, static_cast<off_t>(at)), 1);
    return read ? std::string() : std::string(read.error().what());
  };
  EXPECT_EQ(message_with({}), "");
  EXPECT_NE(message_with({0}).find("damaged in bytes 0 to 1048575 --"), std::string::npos) << message_with({0});
  EXPECT_NE(message_with({kBlockBytes, 2 * kBlockBytes, 4 * kBlockBytes})
                .find("damaged in bytes 1048576 to 3145727 and 1 more place --"),
            std::string::npos);
  const std::size_t size = sys::read_file(path)->size();
  EXPECT_NE(message_with({size - 1}).find(fmt::format("damaged in bytes 5242880 to {} --", size - 1)),
            std::string::npos)
      << message_with({size - 1});
}

TEST(CheckpointFolder, ObeysTheUmaskAndTheFolder) {
  TestFolder folder;
  const mode_t before = ::umask(027);
  const auto stored = save(folder.path(), 1, 100);
  ::umask(before);
  ASSERT_TRUE(stored) << stored.error().what();
  const auto mode_of = [](const std::string& path) {
    struct stat status {};
    EXPECT_EQ(::stat(path.c_str(), &status), 0) << path;
    return status.st_mode & 07777;
  };
  EXPECT_EQ(mode_of(stored->folder), 0750u);
  for (const char* const file : {"model.safetensors", "manifest.json"})
    EXPECT_EQ(mode_of(stored->folder + "/" + file), 0640u) << file;
}

TEST(CheckpointFolder, RefusesWhatANewerCohortSaved) {
  TestFolder folder;
  const auto stored = save(folder.path(), 1, 100);
  ASSERT_TRUE(save(folder.path(), 2, 100));
  Manifest newer = save(folder.path(), 3, 100)->manifest;
  newer.version = kManifestVersion + 1;
  ASSERT_TRUE(sys::write_file_atomically(folder / "checkpoint-000003-step-3/manifest.json", *to_json(newer)));
  const auto list = list_checkpoints(folder.path());
  ASSERT_TRUE(list);
  EXPECT_EQ(list->sound.size(), 2u);
  EXPECT_TRUE(list->damaged.empty());
  ASSERT_EQ(list->newer.size(), 1u);
  EXPECT_EQ(list->newer[0].first, 3);
  EXPECT_NE(std::string(list->newer[0].second.what())
                .find("a newer Cohort saved this checkpoint: its format is of version 4"),
            std::string::npos)
      << list->newer[0].second.what();
  const auto exported = export_weights({.from = folder.path(), .to = folder / "a.pt"});
  ASSERT_FALSE(exported);
  EXPECT_NE(std::string(exported.error().what()).find("newer Cohort"), std::string::npos);
}

TEST(CheckpointFolder, ReadsVersion1AndWritesItAgainAsItWas) {
  const std::string folder = COHORT_TEST_DATA "/checkpoints/version-1";
  const auto list = list_checkpoints(folder);
  ASSERT_TRUE(list);
  ASSERT_EQ(list->sound.size(), 1u);
  const StoredCheckpoint& stored = list->sound[0];
  EXPECT_EQ(stored.manifest.version, 1);
  EXPECT_EQ(stored.manifest.files.size(), 3u);
  for (const auto& [name, digest] : stored.manifest.files) EXPECT_TRUE(read_checkpoint_file(stored, name)) << name;
  EXPECT_EQ(*to_json(stored.manifest), sys::read_file(stored.folder + "/manifest.json")->text());
}

// JSON is read and written recursively, so its depth is limited.
TEST(CheckpointFolder, AManifestThatIsTooDeepIsDamaged) {
  for (const std::size_t depth : {std::size_t{kDeepestJson}, std::size_t{300'000}}) {
    const std::string body = std::string(depth, '[') + std::string(depth, ']');
    const auto manifest = parse_manifest("{\"manifest\":{\"a\":" + body + "},\"sha256\":\"\"}\n", "here");
    ASSERT_FALSE(manifest);
    EXPECT_EQ(manifest.error().code(), ErrorCode::Corrupt);
  }
}

TEST(CheckpointFolder, LetsOneProcessSaveAtATime) {
  TestFolder folder;
  auto writer = CheckpointWriter::open(folder.path());
  ASSERT_TRUE(writer);
  std::thread later([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(200));
    Manifest manifest;
    manifest.generation = 1;
    manifest.place = "rank0";
    ASSERT_TRUE(writer->begin(1, 0));
    ASSERT_TRUE(writer->seal(manifest, [](const std::string&) { return true; }));
    ASSERT_TRUE(writer->publish());
    const CheckpointWriter done = std::move(*writer);
  });
  const auto second = save(folder.path(), 5, 10);  // waits for the first one
  later.join();
  ASSERT_TRUE(second) << second.error().what();
  EXPECT_EQ(second->manifest.generation, 2);
}

TEST(CheckpointFolder, AChildThatOutlivesAKilledWriterDoesNotKeepTheLock) {
  TestFolder folder;
  std::array<int, 2> ends{};
  ASSERT_EQ(::pipe(ends.data()), 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    const auto open = CheckpointWriter::open(folder.path());
    const pid_t child = ::fork();
    if (child == 0) {
      ::close(ends[1]);
      char end = 0;
      static_cast<void>(!::read(ends[0], &end, 1));  // until the test has ended
      ::_exit(0);
    }
    ::kill(::getpid(), SIGKILL);
  }
  ::close(ends[0]);
  int status = 0;
  ASSERT_EQ(::waitpid(writer, &status, 0), writer);
  EXPECT_TRUE(WIFSIGNALED(status));
  const auto saved = save(folder.path(), 5, 10);
  ::close(ends[1]);
  ASSERT_TRUE(saved) << saved.error().what();
}

TEST(CheckpointFolder, PassesOverWhatIsNotItsOwn) {
  TestFolder folder;
  ASSERT_TRUE(save(folder.path(), 1, 10));
  ASSERT_TRUE(sys::make_folders(folder / "notes"));
  ASSERT_TRUE(sys::make_folders(folder / "checkpoint-000002-step-9"));  // empty: no manifest
  ASSERT_TRUE(sys::write_file_atomically(folder / "checkpoint-x", "file"));
  fs::copy(folder / "checkpoint-000001-step-1", folder / "checkpoint-000009-step-1", fs::copy_options::recursive);
  const auto list = list_checkpoints(folder.path());
  ASSERT_TRUE(list);
  EXPECT_EQ(list->sound.size(), 1u);
  EXPECT_EQ(list->damaged.size(), 2u);
  const auto next = save(folder.path(), 2, 10, 1);
  ASSERT_TRUE(next);
  EXPECT_EQ(next->manifest.generation, 10);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"checkpoint-000010-step-2", "checkpoint-x", "notes"}));
}

TEST(CheckpointFolder, SparesWhatWasSavedBeforeAStep) {
  TestFolder folder;
  for (const int step : {1, 2, 3, 4}) ASSERT_TRUE(save(folder.path(), step, 10, 4));
  keep_newest_checkpoints(folder.path(), 1, {.below_step = 3, .count = 1});
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"checkpoint-000002-step-2", "checkpoint-000004-step-4"}));
  keep_newest_checkpoints(folder.path(), 1);
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"checkpoint-000004-step-4"}));
}

/// Makes a file that nobody can read, not even root, and that is not missing.
void make_unreadable(const fs::path& file) {
  fs::remove(file);
  fs::create_symlink(file.filename(), file);
}

TEST(CheckpointFolder, WhatCannotBeReadNowIsNotDamagedAndStays) {
  for (const char* const file : {"manifest.json", "model.safetensors"}) {
    SCOPED_TRACE(file);
    TestFolder folder;
    for (const int step : {1, 2}) ASSERT_TRUE(save(folder.path(), step, 10, 4));
    make_unreadable(fs::path(folder / "checkpoint-000002-step-2") / file);
    const auto list = list_checkpoints(folder.path());
    ASSERT_TRUE(list);
    EXPECT_TRUE(list->damaged.empty());
    if (file == std::string_view("manifest.json")) {
      ASSERT_EQ(list->unreadable.size(), 1u);
      EXPECT_EQ(list->unreadable[0].first, 2);
      ASSERT_TRUE(list->unjudged_above(1));
      EXPECT_EQ(list->unjudged_above(1)->code(), ErrorCode::Io);
      EXPECT_FALSE(list->unjudged_above(2));
    } else {
      EXPECT_EQ(check_checkpoint_file(list->sound[1], file).error().code(), ErrorCode::Io);
      EXPECT_EQ(read_checkpoint_file(list->sound[1], file).error().code(), ErrorCode::Io);
    }
    const auto exported = export_weights({.from = folder.path(), .to = folder / "a.pt"});
    ASSERT_FALSE(exported);
    EXPECT_NE(std::string(exported.error().what()).find("cannot be read now, and may be whole"), std::string::npos)
        << exported.error().what();
    for (const int step : {3, 4}) ASSERT_TRUE(save(folder.path(), step, 10, 1));
    EXPECT_EQ(names_in(folder.path()),
              (std::vector<std::string>{"checkpoint-000002-step-2", "checkpoint-000004-step-4"}));
  }
}

TEST(CheckpointFolder, WhatIsDamagedDoesNotCountAmongThoseToKeep) {
  TestFolder folder;
  for (const int step : {1, 2, 3}) ASSERT_TRUE(save(folder.path(), step, 10, 3));
  fs::resize_file(folder / "checkpoint-000002-step-2/model.safetensors", 1);
  remember_damage(folder / "checkpoint-000003-step-3", true);
  ASSERT_TRUE(save(folder.path(), 4, 10, 2));
  EXPECT_EQ(names_in(folder.path()).front(), "checkpoint-000001-step-1");
  ASSERT_TRUE(save(folder.path(), 5, 10, 2));
  EXPECT_EQ(names_in(folder.path()),
            (std::vector<std::string>{"checkpoint-000004-step-4", "checkpoint-000005-step-5"}));
}

TEST(Export, MakesWeightsAndEverythingFromCheckpointsAndFiles) {
  TestFolder folder;
  ASSERT_TRUE(save(folder / "run", 1, 64));
  ASSERT_TRUE(save(folder / "run", 2, 64));
  const auto exported = [&](const std::string& from, const std::string& to,
                            ExportContent content = ExportContent::Weights, const std::string& key = {}) {
    return export_weights({.from = folder / from, .to = folder / to, .key = key, .content = content});
  };
  const auto tensor = [&](const std::string& file, const std::string& key = {}) {
    const auto bytes = sys::read_file(folder / file);
    const auto root = parse_pt(bytes->bytes(), file);
    EXPECT_TRUE(root) << root.error().what();
    const PtDict* dict = std::get<std::shared_ptr<const PtDict>>(*root).get();
    if (!key.empty()) dict = std::get<std::shared_ptr<const PtDict>>(*dict->find(key)).get();
    return std::get<PtTensor>(*dict->find("w")).gather();
  };
  auto done = exported("run", "a.pt");
  ASSERT_TRUE(done) << done.error().what();
  EXPECT_EQ(done->tensors, 1u);
  EXPECT_EQ(tensor("a.pt"), random_bytes(64, 2));
  ASSERT_TRUE(exported("run/checkpoint-000001-step-1", "b.pt"));
  EXPECT_EQ(tensor("b.pt"), random_bytes(64, 1));
  ASSERT_TRUE(exported("run", "c.pt", ExportContent::Everything));
  EXPECT_EQ(tensor("c.pt", "model"), random_bytes(64, 2));
  ASSERT_TRUE(exported("c.pt", "d.safetensors", ExportContent::Weights, "model"));
  ASSERT_TRUE(exported("d.safetensors", "e.pt"));
  EXPECT_EQ(tensor("e.pt"), random_bytes(64, 2));

  const std::string newest = folder / "run/checkpoint-000002-step-2/model.safetensors";
  ASSERT_TRUE(sys::write_file_atomically(newest, "damaged"));
  ASSERT_TRUE(exported("run", "f.pt"));
  EXPECT_EQ(tensor("f.pt"), random_bytes(64, 1)) << "the newest that is whole";
  EXPECT_EQ(exported("run/checkpoint-000002-step-2", "g.pt").error().code(), ErrorCode::Corrupt);
  EXPECT_EQ(exported("run", "g.txt").error().code(), ErrorCode::InvalidArgument);
  EXPECT_EQ(exported("nothing", "g.pt").error().code(), ErrorCode::Unavailable);
  EXPECT_EQ(exported("c.pt", "g.pt").error().code(), ErrorCode::InvalidArgument);
  EXPECT_EQ(exported("run", "g.safetensors", ExportContent::Everything).error().code(), ErrorCode::InvalidArgument);
  EXPECT_FALSE(fs::exists(folder / "g.pt"));
}

TEST(CheckpointFolder, TheLastOneOfThisProcessIsNamedForPeople) {
  remember_own("/somewhere/./here", 7);
  EXPECT_EQ(last_own_checkpoint(), "checkpoint 7 in /somewhere/here");
  remember_own("/somewhere/else", 0);
  EXPECT_EQ(last_own_checkpoint(), "") << "nothing is there yet";
}

}  // namespace
}  // namespace cohort::formats
