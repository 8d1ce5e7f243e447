// States on ranks that are threads: ranks that lack the furthest step get it, to the bit; ranks that differ are named.
#include "base/permutation.h"
#include "base/unique_fd.h"
#include "train/elastic/agreement.h"

#include <cohort/elastic.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <sstream>

namespace cohort::elastic {
namespace {

class Numbers final : public Part {
 public:
  explicit Numbers(std::vector<double>& values, std::size_t pieces = 1) : values_(values), pieces_(pieces) {}
  Contents contents() override {
    Contents contents{.layout = std::string(10'000, 'x')};  // longer than most texts of messages
    const std::size_t each = (values_.size() + pieces_ - 1) / pieces_;
    for (std::size_t begin = 0, i = 0; begin < values_.size(); begin += each, ++i) {
      contents.items.push_back(
          {"numbers." + std::to_string(i),
           ConstBuffer(std::span(std::as_const(values_)).subspan(begin, std::min(each, values_.size() - begin)))});
    }
    return contents;
  }
  void assign(const Contents& contents) override {
    EXPECT_EQ(contents.layout.size(), 10'000U);
    values_.clear();
    for (const Contents::Item& item : contents.items) {
      const std::size_t before = values_.size();
      values_.resize(before + item.memory.bytes() / sizeof(double));
      std::memcpy(values_.data() + before, item.memory.data, item.memory.bytes());
    }
    ++versions;
  }
  std::uint64_t version() override { return versions; }
  std::uint64_t versions = 0;

 private:
  std::vector<double>& values_;
  std::size_t pieces_;
};

/// A training of one rank.
struct Training {
  explicit Training(int rank, std::size_t size = 1000, std::size_t pieces = 7) : values(size, rank) {
    part = std::make_shared<Numbers>(values, pieces);
    state.add("model", part).add("count", count);
  }
  void train() {
    for (double& value : values) value = value * 1.5 + 1;
    ++part->versions;
    ++count;
  }
  void step() {
    train();
    state.step();
  }

  std::vector<double> values;
  std::int64_t count = 0;
  std::shared_ptr<Numbers> part;
  State state;
};

Error lost() { return {ErrorCode::PeerLost, "rank 9 is gone"}; }

void enter(Training& training, const Communicator& comm, std::uint64_t epoch) {
  World world(comm, epoch);
  training.state.enter(world);
}

TEST(ElasticState, BeginsWithTheFirstRanksState) {
  run_on_threads(3, [](Communicator comm) {
    Training training(comm.rank() + 5);
    enter(training, comm, 0);
    EXPECT_EQ(training.values.front(), 5);
    EXPECT_EQ(training.values.back(), 5);
    // Only rank 0 has read that it had begun before; parameters are the same.
    Training another(3);
    another.count = comm.rank() == 0 ? 7 : 0;
    enter(another, comm, 0);
    EXPECT_EQ(another.count, 7);
  });
}

TEST(ElasticState, WhoLacksAStepOrIsNewGetsTheFurthest) {
  // Several pieces, items of odd sizes, more of them than slices.
  for (const std::size_t size : {std::size_t{0}, std::size_t{1}, std::size_t{1001}, std::size_t{2'000'003}}) {
    std::vector<std::unique_ptr<Training>> trainings;
    for (int i = 0; i < 4; ++i) trainings.push_back(std::make_unique<Training>(i, size));
    run_on_threads(3, [&](Communicator comm) {
      Training& mine = *trainings[static_cast<std::size_t>(comm.rank())];
      enter(mine, comm, 0);
      mine.step();
      // The reduction of the second step has ended on rank 1 only; rank 2 is lost before it has called `step`.
      if (comm.rank() > 0) mine.train();
      if (comm.rank() == 1) mine.state.step();
    });
    const std::vector<double> right = trainings[1]->values;
    for (const auto& one : trainings) (void)one->state.leave(lost());
    EXPECT_EQ(trainings[0]->count, 1) << "goes back to the last step's end";
    run_on_threads(4, [&](Communicator comm) {
      Training& mine = *trainings[static_cast<std::size_t>(comm.rank())];
      enter(mine, comm, 1);
      EXPECT_EQ(mine.values, right) << "rank " << comm.rank();
      EXPECT_EQ(mine.count, 2);
      EXPECT_EQ(mine.state.steps(), 2);
    });
  }
}

TEST(ElasticState, WithoutAWholeStateNobodyGoesOn) {
  std::vector<std::unique_ptr<Training>> trainings;
  for (int i = 0; i < 2; ++i) trainings.push_back(std::make_unique<Training>(i));
  run_on_threads(2, [&](Communicator comm) {
    Training& mine = *trainings[static_cast<std::size_t>(comm.rank())];
    enter(mine, comm, 0);
    mine.step();
    mine.train();
    EXPECT_TRUE(mine.state.leave(lost()));
  });
  run_on_threads(2, [&](Communicator comm) {
    try {
      enter(*trainings[static_cast<std::size_t>(comm.rank())], comm, 1);
      ADD_FAILURE() << "went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Unavailable) << error.what();
    }
  });
}

TEST(ElasticState, WhoTouchedItsParametersWithoutChangingThemIsWhole) {
  Training training(1);
  run_on_threads(1, [&](Communicator comm) {
    enter(training, comm, 0);
    ++training.part->versions;  // as a broadcast of the same values does
    EXPECT_TRUE(training.state.leave(lost()));
    enter(training, comm, 1);
  });
}

TEST(ElasticState, OneFlippedBitIsFoundAndTakenFromTheOthers) {
  run_on_threads(3, [](Communicator comm) {
    Training training(3);
    enter(training, comm, 0);
    training.step();
    const double right = training.values[500];
    if (comm.rank() == 0) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, &training.values[500], sizeof bits);
      bits ^= 1;
      std::memcpy(&training.values[500], &bits, sizeof bits);
    }
    EXPECT_TRUE(training.state.leave(lost()));
    enter(training, comm, 1);
    EXPECT_EQ(training.values[500], right);
  });
}

TEST(ElasticState, TwoThatDifferAreRefused) {
  run_on_threads(2, [](Communicator comm) {
    Training training(3);
    enter(training, comm, 0);
    training.step();
    training.values[999] += comm.rank();
    EXPECT_TRUE(training.state.leave(lost()));
    try {
      enter(training, comm, 1);
      ADD_FAILURE() << "went on";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      EXPECT_NE(std::string(error.what()).find("first in 'numbers.6' of 'model'"), std::string::npos) << error.what();
    }
  });
}

TEST(ElasticState, WhatIsNoLossEndsTheTraining) {
  Training training(1);
  run_on_threads(1, [&](Communicator comm) {
    enter(training, comm, 0);
    EXPECT_FALSE(training.state.leave(Error(ErrorCode::Mismatch, "sizes")));
    EXPECT_FALSE(training.state.leave(Error(ErrorCode::Timeout, "late")));
    World alone(comm, std::nullopt);
    training.state.enter(alone);
    EXPECT_FALSE(training.state.leave(lost())) << "no job that would go on";
  });
}

TEST(ElasticState, NamesAreNotTakenTwice) {
  Training training(1);
  int number = 0;
  EXPECT_THROW(training.state.add("model", number), Error);
}

// ---- the ledger ----

struct Folder {
  Folder() : path(std::filesystem::temp_directory_path() / ("cohort-ledger-" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string text(const std::string& name) const {
    std::ifstream file(path / name);
    std::ostringstream all;
    all << file.rdbuf();
    return all.str();
  }
  std::filesystem::path path;
};

TEST(ElasticState, TheLedgerSaysWhichSamplesStepsHaveUsed) {
  const Folder folder;
  struct Counter {
    SamplePosition at;
  };
  std::vector<std::unique_ptr<Training>> trainings;
  std::vector<SamplePosition> positions(2);
  for (int i = 0; i < 2; ++i) {
    trainings.push_back(std::make_unique<Training>(i, 10));
    State& state = trainings.back()->state;
    SamplePosition& position = positions[static_cast<std::size_t>(i)];
    state.add_samples("data", [&position] { return position; });
    state.add("epoch", position.epoch).add("cursor", position.cursor);
    state.on_step([&position] { position.cursor += 8; });
  }
  run_on_threads(2, [&](Communicator comm) {
    Training& mine = *trainings[static_cast<std::size_t>(comm.rank())];
    World world(comm, 0);
    mine.state.enter(world, comm.rank() == 0 ? folder.path / "first" : std::filesystem::path());
    for (int step = 0; step < 65; ++step) mine.step();
    comm.barrier().wait();  // a rank that leaves keeps nobody waiting, also for notices it has sent before
    positions[static_cast<std::size_t>(comm.rank())] = {1, 0};
    if (comm.rank() == 0) mine.step();  // this rank is then lost, after it has written the ledger
    (void)mine.state.leave(lost());
  });
  run_on_threads(1, [&](Communicator comm) {
    World world(comm, 3);
    trainings[1]->state.enter(world, folder.path / "second");
    positions[1] = {1, 0};
    trainings[1]->step();
  });
  EXPECT_EQ(folder.text("first"),
            "{\"world\":0,\"size\":2,\"step\":0,\"samplers\":{\"data\":[0,0]}}\n"
            "{\"world\":0,\"sampler\":\"data\",\"epoch\":0,\"samples\":[0,512],\"steps\":[1,64]}\n"
            "{\"world\":0,\"sampler\":\"data\",\"epoch\":0,\"samples\":[512,520],\"steps\":[65,65]}\n");
  EXPECT_EQ(folder.text("second"),
            "{\"world\":0,\"sampler\":\"data\",\"epoch\":0,\"samples\":[0,512],\"steps\":[1,64]}\n"
            "{\"world\":0,\"sampler\":\"data\",\"epoch\":0,\"samples\":[512,520],\"steps\":[65,65]}\n"
            "{\"world\":3,\"size\":1,\"step\":65,\"samplers\":{\"data\":[0,520]}}\n");
}

TEST(ElasticState, TheLedgerHasAllStepsBeforeAnotherRankHasTheirState) {
  const Folder folder;
  Training training(0, 10);
  SamplePosition position;
  training.state.add_samples("data", [&position] { return position; });
  training.state.on_step([&position] { position.cursor += 8; });
  std::string then;
  training.state.on_change([&](const World&) { then = folder.text("only"); });
  run_on_threads(1, [&](Communicator comm) {
    World world(comm, 0), next(comm, 1);
    training.state.enter(world, folder.path / "only");
    training.step();
    training.state.enter(next, folder.path / "only");
  });
  EXPECT_NE(then.find("\"samples\":[0,8],\"steps\":[1,1]"), std::string::npos) << then;
}

}  // namespace
}  // namespace cohort::elastic
