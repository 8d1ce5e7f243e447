// Saves of tensors in shards, by ranks that are threads, and loads in worlds of other sizes and cuts, in every place.
#include "train/checkpoint/shards.h"

#include "train/checkpoint/background.h"
#include "train/checkpoint/exchange.h"
#include "train/checkpoint/testing.h"
#include "train/formats/weights.h"

#include <algorithm>
#include <deque>
#include <fstream>

namespace cohort::checkpoint {
namespace {

using formats::ElementType;
using formats::TestFolder;

constexpr std::size_t kRows = 2000;  // so that a part is sent in several pieces

/// Whole tensors: all bytes follow from the step and the name.
struct Whole {
  explicit Whole(std::int64_t step = 1) : step_(step) {
    add("model/w", ElementType::Float32, {kRows, 12, 5});
    add("model/b", ElementType::Float64, {7});
    add("model/empty", ElementType::Float32, {0, 3});
    add("optimizer/state/w/exp_avg", ElementType::Float32, {kRows, 12, 5});
    add("optimizer/state/w/step", ElementType::Int64, {});
  }
  void add(const std::string& name, ElementType type, const std::vector<std::int64_t>& sizes) {
    const auto seed = static_cast<unsigned>(step_ * 100 + static_cast<std::int64_t>(all.size()));
    all[name] = {type, sizes, formats::random_bytes(*formats::byte_count(type, sizes), seed)};
  }
  struct Tensor {
    ElementType type;
    std::vector<std::int64_t> sizes;
    std::vector<std::byte> bytes;
  };
  std::map<std::string, Tensor> all;

  std::vector<std::byte> part(const ShardName& name) const {
    const Tensor& tensor = all.at(name.tensor);
    const std::size_t element = formats::info(tensor.type).bytes;
    std::vector<std::byte> bytes(static_cast<std::size_t>(name.shard.count) * element);
    for (const formats::Run& run : formats::common_runs(formats::whole_shard(tensor.sizes), name.shard)) {
      std::copy_n(tensor.bytes.data() + static_cast<std::size_t>(run.from) * element,
                  static_cast<std::size_t>(run.count) * element,
                  bytes.data() + static_cast<std::size_t>(run.to) * element);
    }
    return bytes;
  }

 private:
  std::int64_t step_;
};

enum class Cut { Rows, Columns, Ranges, ColumnsAndRanges, Owners };
constexpr Cut kCuts[] = {Cut::Rows, Cut::Columns, Cut::Ranges, Cut::ColumnsAndRanges, Cut::Owners};

/// Shard of the tensor that rank `rank` of `ranks` has; nullopt: other ranks have all of it.
std::optional<Shard> cut(const std::string& name, const std::vector<std::int64_t>& sizes, Cut how, int rank,
                         int ranks) {
  Shard shard = formats::whole_shard(sizes);
  const auto share = [](std::int64_t all, int of, int parts) { return all * of / parts; };
  const auto along = [&](std::size_t dimension, int of, int parts) {
    shard.start[dimension] = share(sizes[dimension], of, parts);
    shard.extent[dimension] = share(sizes[dimension], of + 1, parts) - shard.start[dimension];
    shard.count = *formats::element_count(shard.extent);
  };
  const auto range = [&](int of, int parts) {
    const std::int64_t all = shard.count;
    shard.begin = share(all, of, parts);
    shard.count = share(all, of + 1, parts) - shard.begin;
  };
  const int tp = ranks % 2 == 0 ? 2 : 1;
  if (sizes.size() < 2 || how == Cut::Owners) {
    if (static_cast<int>(name.size()) % ranks != rank) return std::nullopt;
  } else if (how == Cut::Rows) {
    along(0, rank, ranks);
  } else if (how == Cut::Columns) {
    along(1, rank, ranks);
  } else if (how == Cut::Ranges) {
    range(rank, ranks);
  } else {
    along(1, rank % tp, tp);
    range(rank / tp, ranks / tp);
  }
  return shard;
}

/// A rank's contribution.
struct Sharded {
  Sharded(const Whole& whole, std::int64_t step, Cut how, int rank, int ranks) {
    bundle.manifest.step = step;
    bundle.manifest.program = "test";
    if (rank == 0) bundle.files = {{kOptimizerFile, {}, {{"type", "Adam"}, {"groups", "[[\"w\",\"b\"]]"}}}};
    bundle.random = {{"cpu", Brought::view(random)}};
    for (const auto& [name, tensor] : whole.all) {
      const auto shard = cut(name, tensor.sizes, how, rank, ranks);
      if (!shard) continue;
      bytes.push_back(whole.part({name, *shard}));
      bundle.shards.push_back({{name, *shard}, tensor.type, bytes.back()});
    }
  }
  std::vector<std::byte> random = formats::random_bytes(5, 1);
  std::deque<std::vector<std::byte>> bytes;
  Bundle bundle;
};

class CheckpointShards : public ::testing::TestWithParam<CheckpointPlace> {
 protected:
  FolderOptions options(int rank) const {
    const bool local = GetParam() == CheckpointPlace::Local;
    return {local ? root_ / ("disk-" + std::to_string(rank % 2)) : root_ / "all", 2, GetParam(), 2};
  }
  std::string newest(int host = 0) const {
    const std::string folder = options(host).path;
    return folder + "/" + names_of(folder).back();
  }
  void save_step(std::int64_t step, Cut how, int ranks) const {
    const Whole whole(step);
    run_on_threads(ranks, [&](Communicator comm) {
      const Sharded brought(whole, step, how, comm.rank(), ranks);
      save(comm, options(comm.rank()), brought.bundle);
    });
  }
  /// Loads each rank's parts and compares them to the bit; returns the step that was found.
  std::int64_t load(Cut how, int ranks) const {
    std::int64_t step = 0;
    run_on_threads(ranks, [&](Communicator comm) {
      const Found found = load_newest(comm, options(comm.rank()), {kModelFile, kOptimizerFile});
      ASSERT_TRUE(found.stored && found.tensors);
      EXPECT_FALSE(found.files.contains(kModelFile) || found.files.contains(kOptimizerFile));
      EXPECT_EQ(found.part.has_value(),
                !found.files.contains(kRandomFile) && comm.rank() < found.stored->manifest.world_size);
      const Whole whole(found.stored->manifest.step);
      std::vector<WantedShard> wanted;
      std::deque<std::vector<std::byte>> bytes;
      for (const auto& [name, tensor] : whole.all) {
        const auto shard = cut(name, tensor.sizes, how, comm.rank(), ranks);
        if (!shard) continue;
        bytes.emplace_back(static_cast<std::size_t>(shard->count) * formats::info(tensor.type).bytes);
        wanted.push_back({{name, *shard}, bytes.back()});
      }
      read_shards(comm, *found.tensors, wanted);
      for (const WantedShard& one : wanted)
        EXPECT_TRUE(formats::copy_of(one.to) == whole.part(one.name)) << one.name.tensor;
      if (comm.rank() == 0) step = found.stored->manifest.step;
    });
    return step;
  }
  TestFolder root_;
};

TEST_P(CheckpointShards, ComeBackInAnyWorldAndAnyCut) {
  std::int64_t step = 0;
  for (const int ranks : {4, 3, 1}) {
    for (const Cut saved : kCuts) {
      save_step(++step, saved, ranks);
      const Cut loaded = kCuts[static_cast<std::size_t>(step * 3) % 5];
      for (const int others : {1, 2, 3, 5}) EXPECT_EQ(load(loaded, others), step);
    }
  }
}

TEST_P(CheckpointShards, AreWholeFilesToAProgramWithoutThem) {
  save_step(3, Cut::ColumnsAndRanges, 4);
  const Whole whole(3);
  for (const int ranks : {1, 2}) {
    run_on_threads(ranks, [&](Communicator comm) {
      const Found found = load_newest(comm, options(comm.rank()), {});
      ASSERT_TRUE(found.stored);
      EXPECT_EQ(found.stored->manifest.version, 3);
      std::map<std::string, std::vector<std::byte>> all;
      for (const auto& [file, prefix] : {std::pair{kModelFile, "model/"}, std::pair{kOptimizerFile, "optimizer/"}}) {
        const auto parsed = value_or_throw(formats::parse_safetensors(found.files.at(file).bytes(), file));
        for (const auto& [name, tensor] : parsed.tensors) all[prefix + name] = formats::copy_of(tensor.bytes);
        if (file == kOptimizerFile) {
          EXPECT_EQ(parsed.metadata.at("type"), "Adam");
        }
      }
      ASSERT_EQ(all.size(), whole.all.size());
      for (const auto& [name, tensor] : whole.all) EXPECT_TRUE(all.at(name) == tensor.bytes) << name;
      ASSERT_TRUE(found.part);
      EXPECT_LT(found.part->size(), 1000u);  // without the shards
      const auto parts = load_parts(comm, options(comm.rank()), *found.stored, {0, 3});
      ASSERT_EQ(parts.size(), 2u);
      const auto part = value_or_throw(formats::parse_safetensors(parts.at(3).bytes(), "part"));
      ASSERT_EQ(part.tensors.size(), 1u);
      EXPECT_EQ(part.tensors[0].name, "random/cpu");
    });
  }
}

TEST_P(CheckpointShards, OfACheckpointWithoutAnyAreCutAsTheyAreWanted) {
  const Whole whole(9);
  run_on_threads(2, [&](Communicator comm) {
    Bundle bundle;
    bundle.manifest.step = 9;
    bundle.files = {{kModelFile, {}, {}}, {kOptimizerFile, {}, {}}};
    for (const auto& [name, tensor] : whole.all) {
      const std::size_t file = name.starts_with("model/") ? 0 : 1;
      bundle.files[file].tensors.push_back(
          {name.substr(name.find('/') + 1), {tensor.type, tensor.sizes, tensor.bytes}});
    }
    const auto stored = save(comm, options(comm.rank()), bundle);
    EXPECT_EQ(stored.manifest.version, 2);
  });
  for (const Cut how : kCuts) EXPECT_EQ(load(how, 3), 9);
}

TEST_P(CheckpointShards, AreSavedInTheBackground) {
  run_on_threads(2, [&](Communicator comm) {
    BackgroundSaver saver(options(comm.rank()));
    std::shared_ptr<PendingSave> pending;
    for (std::int64_t step = 1; step <= 2; ++step) {
      Sharded brought(Whole(step), step, Cut::Columns, comm.rank(), 2);
      saver.settle(comm);
      if (saver.needs_communicator(comm)) saver.adopt(comm.split({}));
      pending = saver.start(comm, brought.bundle);
      for (auto& bytes : brought.bytes) std::fill(bytes.begin(), bytes.end(), std::byte{0});
    }
    pending->wait();
  });
  EXPECT_EQ(load(Cut::Ranges, 3), 2);
}

TEST_P(CheckpointShards, WithGapsOrTwiceAreRefusedOnAllRanks) {
  save_step(1, Cut::Columns, 3);
  const Whole whole(2);
  const auto refused = [&](const std::function<void(Bundle&, int)>& change, const std::string& said) {
    run_on_threads(3, [&](Communicator comm) {
      Sharded brought(whole, 2, Cut::Columns, comm.rank(), 3);
      change(brought.bundle, comm.rank());
      EXPECT_EQ(code_of([&] { save(comm, options(comm.rank()), brought.bundle); }, said), ErrorCode::InvalidArgument);
    });
    EXPECT_EQ(load(Cut::Rows, 2), 1);
  };
  const auto is_w = [](const ShardBytes& one) { return one.name.tensor == "model/w"; };
  const auto w_of = [&](Bundle& bundle) { return std::find_if(bundle.shards.begin(), bundle.shards.end(), is_w); };
  refused(
      [&](Bundle& bundle, int rank) {
        if (rank == 1) std::erase_if(bundle.shards, is_w);
      },
      "of the 120000 elements of tensor 'model/w' [2000, 12, 5] only 80000 are there");
  refused(
      [&](Bundle& bundle, int rank) {
        if (rank == 2) bundle.shards.push_back(ShardBytes(*w_of(bundle)));
      },
      "elements of tensor 'model/w' are there twice: in rank 2 and in rank 2");
  const std::vector<std::byte> bytes(56);
  refused(
      [&](Bundle& bundle, int rank) {
        if (rank == 0) bundle.files.push_back({kModelFile, {{"b", {ElementType::Float64, {7}, bytes}}}, {}});
      },
      "elements of tensor 'model/b' are there twice");
  refused(
      [&](Bundle& bundle, int rank) {
        if (rank == 1) bundle.shards.at(0).bytes = std::span(bytes).first(4);
      },
      "has 4 bytes");
  refused(
      [&](Bundle& bundle, int rank) {
        if (rank == 1) w_of(bundle)->name.shard.sizes[0] = 2001;
      },
      "the shard of tensor 'model/w' of rank 1: it is of a tensor float32 [2001, 12, 5], and rank 0 has");
}

TEST_P(CheckpointShards, ThatAreDamagedAreNamedAndPassedOver) {
  save_step(1, Cut::Ranges, 3);
  save_step(2, Cut::Ranges, 3);
  for (const int host : {0, 1}) {
    std::fstream file(newest(host) + "/" + part_file(1), std::ios::in | std::ios::out | std::ios::binary);
    if (!file) continue;
    file.seekp(100'000);
    file.put('\x55');
    if (GetParam() != CheckpointPlace::Local) break;
  }
  EXPECT_EQ(load(Cut::Rows, 2), 1);
  run_on_threads(2, [&](Communicator comm) {
    const Found found = load_newest(comm, options(comm.rank()), {});
    ASSERT_EQ(found.passed_over.size(), 1u);
    EXPECT_NE(found.passed_over[0].find(part_file(1) + ": damaged in bytes 0 to"), std::string::npos)
        << found.passed_over[0];
    // A change of the file after it was compared is noticed when it is read.
    const std::string file = found.tensors->stored.folder + "/" + part_file(1);
    if (comm.rank() == 0) {
      std::fstream(file, std::ios::in | std::ios::out | std::ios::binary).seekp(-1, std::ios::end).put('\x55');
      if (GetParam() == CheckpointPlace::Local)
        std::fstream(newest(1).replace(newest(1).rfind('/'), std::string::npos,
                                       found.tensors->stored.folder.substr(found.tensors->stored.folder.rfind('/'))) +
                         "/" + part_file(1),
                     std::ios::in | std::ios::out | std::ios::binary)
            .seekp(-1, std::ios::end)
            .put('\x55');
    }
    if (comm) comm.barrier().wait();
    std::vector<std::byte> all(kRows * 60 * 4);
    const ShardName w{"model/w", formats::whole_shard({kRows, 12, 5})};
    const ShardName e{"optimizer/state/w/exp_avg", w.shard};
    EXPECT_EQ(code_of([&] { read_shards(comm, *found.tensors, {{w, all}, {e, all}}); }, "CRC-32"), ErrorCode::Corrupt);
    EXPECT_EQ(code_of(
                  [&] {
                    read_shards(comm, *found.tensors, {{{"model/v", w.shard}, all}});
                  },
                  "was not saved"),
              ErrorCode::InvalidArgument);
  });
}

TEST_P(CheckpointShards, OfReplicasTheLowestRanksAreBrought) {
  run_on_threads(3, [&](Communicator comm) {
    const Shard whole = formats::whole_shard({4});
    const Shard own{{6}, {2 * comm.rank()}, {2}, 0, 2};
    EXPECT_EQ(without_replicas(comm, {{"model/a", whole}, {"model/b", own}, {"model/b", own}}),
              (std::vector<bool>{comm.rank() == 0, true, false}));
  });
}

TEST_P(CheckpointShards, AreExportedAsIfThereWereNone) {
  save_step(1, Cut::ColumnsAndRanges, 4);
  const Whole whole(1);
  std::vector<formats::NamedTensor> tensors;
  for (const auto& [name, tensor] : whole.all) {
    if (name.starts_with("model/")) tensors.push_back({name.substr(6), {tensor.type, tensor.sizes, tensor.bytes}});
  }
  ASSERT_TRUE(formats::write_safetensors(root_ / "expected.safetensors", tensors, {{"format", "pt"}}));
  ASSERT_TRUE(formats::export_weights({.from = root_ / "expected.safetensors", .to = root_ / "expected.pt"}));
  for (const std::string name : {".safetensors", ".pt"}) {
    const auto done = formats::export_weights({.from = newest(), .to = root_ / ("found" + name)});
    ASSERT_TRUE(done) << done.error().what();
    EXPECT_TRUE(contents(root_.path()).at("found" + name) == contents(root_.path()).at("expected" + name));
  }
  EXPECT_TRUE(formats::export_weights(
      {.from = newest(), .to = root_ / "all.pt", .content = formats::ExportContent::Everything}));
}

INSTANTIATE_TEST_SUITE_P(Places, CheckpointShards,
                         ::testing::Values(CheckpointPlace::Rank0, CheckpointPlace::Shared, CheckpointPlace::Local),
                         [](const auto& place) { return to_string(place.param); });

}  // namespace
}  // namespace cohort::checkpoint
