#include <cohort/torch/checkpoint.h>

#include "train/formats/testing.h"

#include <cohort/communicator.h>
#include <cohort/error.h>

#include <functional>
#include <mutex>

// clang-format off
#include <torch/nn.h>
#include <torch/optim.h>
// clang-format on

namespace cohort {
namespace {

using formats::TestFolder;

struct NetImpl : torch::nn::Module {
  NetImpl()
      : conv(register_module("conv", torch::nn::Conv2d(1, 4, 3))),
        bn(register_module("bn", torch::nn::BatchNorm2d(4))),
        fc(register_module("fc", torch::nn::Linear(4 * 36, 10))) {}
  at::Tensor forward(const at::Tensor& x) { return fc(torch::relu(bn(conv(x))).flatten(1)); }
  torch::nn::Conv2d conv;
  torch::nn::BatchNorm2d bn;
  torch::nn::Linear fc;
};
TORCH_MODULE(Net);

/// Bytes of all parameters and buffers.
std::string bits(const torch::nn::Module& module) {
  std::string out;
  const auto add = [&](const at::Tensor& tensor) {
    const at::Tensor dense = tensor.detach().contiguous();
    out.append(static_cast<const char*>(dense.data_ptr()), dense.nbytes());
  };
  for (const auto& tensor : module.parameters()) add(tensor);
  for (const auto& tensor : module.buffers()) add(tensor);
  return out;
}

/// Takes steps whose data comes from the random state, so that a wrong random state shows.
void train(Net& net, torch::optim::Optimizer& optimizer, int steps) {
  net->train();
  for (int i = 0; i < steps; ++i) {
    const at::Tensor x = torch::rand({8, 1, 8, 8}), y = torch::randint(10, {8});
    optimizer.step([&] {
      optimizer.zero_grad();
      at::Tensor loss = torch::nn::functional::cross_entropy(net(x), y.to(torch::kLong));
      loss.backward();
      return loss;
    });
  }
}

using MakeOptimizer = std::function<std::unique_ptr<torch::optim::Optimizer>(Net&)>;

template <class O, class Options>
std::unique_ptr<torch::optim::Optimizer> make(Net& net, Options options) {
  return std::make_unique<O>(net->parameters(), options);
}

struct OptimizerCase {
  const char* name;
  MakeOptimizer make;
  MakeOptimizer make_other;  // with other hyperparameters, which loading has to overwrite
};

const std::vector<OptimizerCase>& optimizer_cases() {
  namespace o = torch::optim;
  static const std::vector<OptimizerCase> kCases = {
      {"SGD",
       [](Net& n) { return make<o::SGD>(n, o::SGDOptions(0.05).momentum(0.9).nesterov(true).weight_decay(1e-3)); },
       [](Net& n) { return make<o::SGD>(n, o::SGDOptions(1)); }},
      {"PlainSGD", [](Net& n) { return make<o::SGD>(n, o::SGDOptions(0.05)); },
       [](Net& n) { return make<o::SGD>(n, o::SGDOptions(1)); }},
      {"Adam",
       [](Net& n) {
         return make<o::Adam>(n, o::AdamOptions(0.01).betas({0.8, 0.99}).amsgrad(true));
       },
       [](Net& n) { return make<o::Adam>(n, o::AdamOptions(1)); }},
      {"AdamW", [](Net& n) { return make<o::AdamW>(n, o::AdamWOptions(0.01)); },
       [](Net& n) { return make<o::AdamW>(n, o::AdamWOptions(1)); }},
      {"Adagrad", [](Net& n) { return make<o::Adagrad>(n, o::AdagradOptions(0.01).lr_decay(0.1)); },
       [](Net& n) { return make<o::Adagrad>(n, o::AdagradOptions(1)); }},
      {"RMSprop", [](Net& n) { return make<o::RMSprop>(n, o::RMSpropOptions(0.01).momentum(0.5).centered(true)); },
       [](Net& n) { return make<o::RMSprop>(n, o::RMSpropOptions(1)); }},
      {"LBFGS",
       [](Net& n) {
         return make<o::LBFGS>(n, o::LBFGSOptions(0.1).max_iter(3).history_size(4).line_search_fn("strong_wolfe"));
       },
       [](Net& n) { return make<o::LBFGS>(n, o::LBFGSOptions(1)); }},
  };
  return kCases;
}

TEST(Checkpoint, ContinuesToTheBitWithEveryOptimizer) {
  for (const OptimizerCase& optimizer_case : optimizer_cases()) {
    SCOPED_TRACE(optimizer_case.name);
    TestFolder folder;
    torch::manual_seed(1);
    Net net;
    auto optimizer = optimizer_case.make(net);
    train(net, *optimizer, 3);
    CheckpointFolder checkpoints(Communicator(), {.folder = folder.path()});
    const TrainingProgress progress{
        3,
        1,
        data::SamplerState{~std::uint64_t{0}, 1, 24, 100},
        {{"best", 0.1}, {"name", std::string("grün")}, {"n", std::int64_t{-5}}, {"on", true}}};
    const CheckpointInfo saved = checkpoints.save(*net, optimizer.get(), progress);
    EXPECT_EQ(saved.generation, 1);
    train(net, *optimizer, 3);

    torch::manual_seed(99);
    Net other;
    auto other_optimizer = optimizer_case.make_other(other);
    train(other, *other_optimizer, 1);
    const auto loaded = checkpoints.load_latest(*other, other_optimizer.get());
    ASSERT_TRUE(loaded);
    EXPECT_EQ(loaded->folder, saved.folder);
    EXPECT_EQ(loaded->progress.step, 3);
    EXPECT_EQ(loaded->progress.epoch, 1);
    EXPECT_EQ(loaded->progress.sampler, progress.sampler);
    EXPECT_EQ(loaded->progress.values, progress.values);
    train(other, *other_optimizer, 3);
    EXPECT_EQ(bits(*other), bits(*net));
  }
}

TEST(Checkpoint, FindsNothingInAFreshFolder) {
  Net net;
  CheckpointFolder checkpoints(Communicator(), {.folder = "/tmp/cohort-no-such-folder"});
  EXPECT_FALSE(checkpoints.load_latest(*net, nullptr));
  EXPECT_TRUE(checkpoints.list().empty());
}

ErrorCode code_of(const std::function<void()>& work, const std::string& part) {
  try {
    work();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what() << "\ndoes not say: " << part;
    return error.code();
  }
  ADD_FAILURE() << "nothing was thrown";
  return ErrorCode::Internal;
}

TEST(Checkpoint, RefusesWhatDoesNotFitAndChangesNothing) {
  TestFolder folder;
  Net net;
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::Adam adam(net->parameters(), torch::optim::AdamOptions(0.1));
  CheckpointFolder checkpoints(Communicator(), {.folder = folder.path()});
  train(net, sgd, 1);
  checkpoints.save(*net, &sgd, {});

  const std::string before = bits(*net);
  train(net, adam, 1);
  const std::string trained = bits(*net);
  ASSERT_NE(trained, before);
  torch::nn::Linear linear(2, 3);  // draws from the random state, so it comes before the state is noted
  const at::Tensor random = at::detail::getDefaultCPUGenerator().get_state();
  EXPECT_EQ(code_of([&] { checkpoints.load_latest(*net, &adam); }, "it is of SGD, and this one is Adam"),
            ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of([&] { checkpoints.load_latest(*linear, nullptr); }, "missing in the file: 'bias', 'weight'"),
            ErrorCode::InvalidArgument);
  torch::optim::SGD foreign(linear->parameters(), torch::optim::SGDOptions(0.1));
  EXPECT_EQ(code_of([&] { checkpoints.save(*net, &foreign, {}); }, "is not the module's"), ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of([&] { checkpoints.load_latest(*net, &foreign); }, "is not the module's"),
            ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of(
                [&] {
                  checkpoints.save(*net, &sgd, {.values = {{"x", std::string("\xff")}}});
                },
                "UTF-8"),
            ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of([&] { checkpoints.save(*net, &sgd, {.step = -1}); }, "negative"), ErrorCode::InvalidArgument);
  EXPECT_EQ(bits(*net), trained);
  EXPECT_TRUE(random.equal(at::detail::getDefaultCPUGenerator().get_state()));
  EXPECT_EQ(checkpoints.list().size(), 1u);
  EXPECT_EQ(code_of([] { CheckpointFolder(Communicator(), {.folder = "x", .keep = 0}); }, "at least 1"),
            ErrorCode::InvalidArgument);
  EXPECT_EQ(code_of([] { CheckpointFolder(Communicator(), {.folder = "x", .copies = 0}); }, "at least 1 copy"),
            ErrorCode::InvalidArgument);

  ASSERT_TRUE(checkpoints.load_latest(*net, nullptr));  // the optimizer's state does not change
  EXPECT_EQ(bits(*net), before);
}

TEST(Checkpoint, RefusesABufferThatCouldNotBeLoadedAgain) {
  struct ExpandedImpl : torch::nn::Module {
    explicit ExpandedImpl(bool expanded) {
      first = register_module("first", torch::nn::Linear(2, 2));
      const at::Tensor positions = at::full({1}, 3.0F).expand({5});
      register_buffer("positions", expanded ? positions : positions.clone());
      last = register_module("last", torch::nn::Linear(2, 2));
    }
    torch::nn::Linear first{nullptr}, last{nullptr};
  };
  TestFolder folder;
  CheckpointFolder checkpoints(Communicator(), {.folder = folder.path() + "/run"});
  ExpandedImpl expanded(true), dense(false);
  const auto refused = [&](const std::function<void()>& call) {
    const std::string before = bits(expanded);
    try {
      call();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
      EXPECT_NE(std::string(error.what()).find("'positions'"), std::string::npos) << error.what();
    }
    EXPECT_EQ(bits(expanded), before);
  };
  refused([&] { checkpoints.save(expanded, nullptr, {.step = 1}); });
  refused([&] { checkpoints.save(model_shards(expanded), {.step = 1}); });
  EXPECT_TRUE(checkpoints.list().empty());
  checkpoints.save(dense, nullptr, {.step = 1});
  refused([&] { checkpoints.load_latest(expanded, nullptr); });
  refused([&] { checkpoints.load_latest(model_shards(expanded)); });
  save_weights(dense, folder.path() + "/weights");
  refused([&] { load_weights(expanded, folder.path() + "/weights"); });
}

TEST(Checkpoint, TakesTheOneBeforeADamagedOne) {
  TestFolder folder;
  Net net;
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
  CheckpointFolder checkpoints(Communicator(), {.folder = folder.path(), .keep = 2});
  std::string expected;
  CheckpointInfo last;
  for (int step = 1; step <= 4; ++step) {
    train(net, optimizer, 1);
    if (step == 3) expected = bits(*net);
    last = checkpoints.save(*net, &optimizer, {.step = step});
  }
  EXPECT_EQ(checkpoints.list().size(), 2u);
  const std::string file = last.folder + "/optimizer.safetensors";
  auto bytes = formats::copy_of(sys::read_file(file)->bytes());
  bytes[bytes.size() / 2] ^= std::byte{1};
  ASSERT_TRUE(sys::write_file_atomically(file, bytes));
  const auto loaded = checkpoints.load_latest(*net, &optimizer);
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->progress.step, 3);
  EXPECT_EQ(bits(*net), expected);

  ASSERT_TRUE(sys::remove_tree(loaded->folder + "/model.safetensors"));
  EXPECT_EQ(code_of([&] { checkpoints.load_latest(*net, &optimizer); }, "all of them are damaged"), ErrorCode::Corrupt);
  EXPECT_EQ(bits(*net), expected);
}

TEST(Checkpoint, LoadsTheBestThatItHasKept) {
  TestFolder folder;
  Net net;
  torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
  CheckpointFolder checkpoints(Communicator(), {.folder = folder.path(), .keep = 1, .best_by = "valid_loss"});
  EXPECT_FALSE(checkpoints.load_best(*net));
  std::string expected;
  for (int step = 1; step <= 4; ++step) {
    train(net, optimizer, 1);
    if (step == 2) expected = bits(*net);
    checkpoints.save(*net, &optimizer, {.step = step, .values = {{"valid_loss", step == 2 ? 0.25 : 1.0 / step}}});
  }
  // Losses: 1, 0.25, 0.33, 0.25.
  EXPECT_EQ(checkpoints.list().size(), 2u);
  EXPECT_EQ(checkpoints.load_best(*net, &optimizer)->progress.step, 2);
  EXPECT_EQ(bits(*net), expected);
  EXPECT_EQ(checkpoints.load_latest(*net, &optimizer)->progress.step, 4);
  EXPECT_EQ(checkpoints.load_best(model_shards(*net, &optimizer))->progress.step, 2);
  EXPECT_EQ(bits(*net), expected);
  EXPECT_EQ(code_of([] { CheckpointFolder(Communicator(), {.folder = "x", .keep_best = 2}); }, "best_by"),
            ErrorCode::InvalidArgument);
}

TEST(Checkpoint, BringsAllRanksToTheSameState) {
  for (const int size : {2, 3}) {
    TestFolder folder;
    std::mutex mutex;
    std::vector<std::string> states(static_cast<std::size_t>(size));
    std::string saved;
    run_on_threads(size, [&](Communicator comm) {
      Net net;
      torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
      train(net, optimizer, 1 + comm.rank());  // ranks differ, and rank 0's state is saved
      CheckpointFolder checkpoints(comm, {.folder = folder.path()});
      const CheckpointInfo info = checkpoints.save(*net, &optimizer, {.step = 7});
      EXPECT_EQ(info.generation, 1);
      EXPECT_EQ(info.world_size, size);
      if (comm.rank() == 0) saved = bits(*net);
      train(net, optimizer, 1);
      const auto loaded = checkpoints.load_latest(*net, &optimizer);
      ASSERT_TRUE(loaded);
      EXPECT_EQ(loaded->progress.step, 7);
      EXPECT_EQ(loaded->folder, info.folder);
      const std::lock_guard<std::mutex> lock(mutex);
      states[static_cast<std::size_t>(comm.rank())] = bits(*net);
    });
    for (const std::string& state : states) EXPECT_EQ(state, saved);
  }
}

TEST(Checkpoint, ErrorsReachAllRanks) {
  TestFolder folder;
  ASSERT_TRUE(sys::write_file_atomically(folder / "file", "in the way"));
  run_on_threads(3, [&](Communicator comm) {
    Net net;
    CheckpointFolder nowhere(comm, {.folder = folder / "file"});
    EXPECT_EQ(code_of([&] { nowhere.save(*net, nullptr, {}); }, "ENOTDIR"), ErrorCode::Unavailable);
    CheckpointFolder checkpoints(comm, {.folder = folder / "good"});
    checkpoints.save(*net, nullptr, {});
    // Only one rank has another model, and no rank loads.
    const std::string before = bits(*net);
    torch::nn::Linear linear(2, 3);
    torch::nn::Module& module = comm.rank() == 1 ? static_cast<torch::nn::Module&>(*linear) : *net;
    EXPECT_EQ(code_of([&] { checkpoints.load_latest(module, nullptr); }, "does not fit the module"),
              ErrorCode::InvalidArgument);
    EXPECT_EQ(bits(*net), before);
    EXPECT_TRUE(checkpoints.load_latest(*net, nullptr));  // the world is still usable
  });
}

TEST(Checkpoint, KeepsRandomStatesOfAllRanksByName) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    Net net;
    CheckpointFolder(comm, {.folder = folder.path()}).save(*net, nullptr, {});
  });
  Net net;
  torch::manual_seed(123);
  CheckpointFolder alone(Communicator(), {.folder = folder.path()});
  const auto info = alone.load_latest(*net, nullptr);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->world_size, 2);
  // In a bigger world, new ranks keep their random states.
  run_on_threads(3, [&](Communicator comm) {
    Net other;
    EXPECT_TRUE(CheckpointFolder(comm, {.folder = folder.path()}).load_latest(*other, nullptr));
  });
}

TEST(Checkpoint, GivesEachRankItsOwnStateAndOthersOnRequest) {
  for (const CheckpointPlace place : {CheckpointPlace::Rank0, CheckpointPlace::Shared, CheckpointPlace::Local}) {
    TestFolder folder;
    const CheckpointOptions options{.folder = folder.path(), .place = place};
    run_on_threads(3, [&](Communicator comm) {
      Net net;
      CheckpointFolder checkpoints(comm, options);
      EXPECT_EQ(code_of([&] { checkpoints.rank_state(); }, "no checkpoint has been loaded"),
                ErrorCode::InvalidArgument);
      checkpoints.save(
          *net, nullptr, {.step = 1},
          {{"held", torch::full({2, comm.rank() + 1}, comm.rank())}, {"count", torch::tensor(comm.rank())}});
    });
    run_on_threads(2, [&](Communicator comm) {
      Net net;
      CheckpointFolder checkpoints(comm, options);
      ASSERT_TRUE(checkpoints.load_latest(*net, nullptr));
      const RankState& own = checkpoints.rank_state();
      ASSERT_EQ(own.size(), 2u);
      EXPECT_TRUE(own.at("held").equal(torch::full({2, comm.rank() + 1}, comm.rank())));
      const auto all = checkpoints.parts();
      ASSERT_EQ(all.size(), 3u);
      EXPECT_EQ(all.at(2).at("count").item<std::int64_t>(), 2);
      EXPECT_EQ(checkpoints.parts(comm.rank() == 0 ? std::set<int>{2} : std::set<int>{}).size(),
                comm.rank() == 0 ? 1u : 0u);
    });
  }
}

TEST(Checkpoint, SavesInTheBackgroundWhatWasThereThen) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    Net net;
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(0.1));
    CheckpointFolder checkpoints(comm, {.folder = folder.path()});
    std::string expected;
    CheckpointSave last(nullptr);
    for (int step = 1; step <= 3; ++step) {
      train(net, optimizer, 1);
      expected = bits(*net);
      last = checkpoints.save_async(*net, &optimizer, {.step = step}, {{"own", torch::tensor(comm.rank())}});
      train(net, optimizer, 1);
    }
    EXPECT_EQ(last.wait().progress.step, 3);
    EXPECT_TRUE(last.done());
    checkpoints.close();
    ASSERT_TRUE(checkpoints.load_latest(*net, &optimizer));
    if (comm.rank() == 0) {
      EXPECT_EQ(bits(*net), expected);
    }
    EXPECT_EQ(checkpoints.rank_state().at("own").item<std::int64_t>(), comm.rank());
  });
}

TEST(Checkpoint, StillLoadsVersion1) {
  torch::nn::Linear net(3, 2);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(1).momentum(0.9));
  CheckpointFolder checkpoints(Communicator(), {.folder = COHORT_TEST_DATA "/checkpoints/version-1"});
  const auto info = checkpoints.load_latest(*net, &optimizer);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->progress.step, 7);
  EXPECT_EQ(info->progress.sampler, (data::SamplerState{3, 1, 24, 50}));
  EXPECT_TRUE(net->bias.allclose(torch::tensor({0.4, -1.1})));
  EXPECT_TRUE(checkpoints.rank_state().empty());
  EXPECT_TRUE(checkpoints.parts().empty());
}

TEST(Weights, ListsEveryDifferenceInOneError) {
  TestFolder folder;
  torch::nn::Linear small(2, 3), wide(4, 3);
  const std::string path = folder / "small.safetensors";
  save_weights(*small, path);
  EXPECT_EQ(code_of([&] { load_weights(*wide, path); }, "'weight' has shape [3, 2] there and [3, 4] here"),
            ErrorCode::InvalidArgument);
  Net net;
  EXPECT_EQ(code_of([&] { load_weights(*net, path); }, "not in the module: 'bias', 'weight'"),
            ErrorCode::InvalidArgument);
  const LoadedWeights report = load_weights(*net, path, {.match = Match::Subset});
  EXPECT_EQ(report.unexpected, (std::vector<std::string>{"bias", "weight"}));
  EXPECT_EQ(report.missing.size(), 9u);
  EXPECT_EQ(code_of([&] { load_weights(*net, folder / "none"); }, "No such file"), ErrorCode::Unavailable);
  ASSERT_TRUE(sys::write_file_atomically(folder / "junk", "this is no tensor file"));
  EXPECT_EQ(code_of([&] { load_weights(*net, folder / "junk"); }, "neither safetensors nor a .pt"), ErrorCode::Corrupt);
}

TEST(Weights, PassOverWhatWrappersOfPythonAddToNames) {
  TestFolder folder;
  const std::string path = folder.path() + "/compiled";
  torch::nn::Linear inner(2, 2), same(2, 2);
  struct Outer : torch::nn::Module {};
  // Names as from torch.compile(DistributedDataParallel(net)) with a compiled layer in it.
  const auto compiled = std::make_shared<Outer>(), wrapped = std::make_shared<Outer>();
  compiled->register_module("_orig_mod", wrapped);
  wrapped->register_module("module", std::make_shared<Outer>())->register_module("_orig_mod", inner.ptr());
  save_weights(*compiled, path);
  load_weights(*same, path);
  EXPECT_EQ(bits(*same), bits(*inner));
}

TEST(Weights, ConvertsOnlyWithoutLossUnlessAsked) {
  TestFolder folder;
  torch::nn::Linear half(2, 3), full(2, 3);
  half->to(torch::kBFloat16);
  save_weights(*half, folder / "half.pt", WeightsFormat::Pt);
  load_weights(*full, folder / "half.pt");
  EXPECT_TRUE(full->weight.equal(half->weight.to(torch::kFloat)));
  save_weights(*full, folder / "full.pt", WeightsFormat::Pt);
  EXPECT_EQ(code_of([&] { load_weights(*half, folder / "full.pt"); }, "Convert::Any"), ErrorCode::InvalidArgument);
  load_weights(*half, folder / "full.pt", {.convert = Convert::Any});
  EXPECT_TRUE(full->weight.equal(half->weight.to(torch::kFloat)));
}

constexpr const char* kPython = R"(
import sys, torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Linear(144, 10)
    def forward(self, x): return self.fc(torch.relu(self.bn(self.conv(x))).flatten(1))
net, d = Net(), sys.argv[1]
if sys.argv[2] == 'write':
    for _ in range(3): net(torch.rand(8, 1, 8, 8))
    torch.save(net.state_dict(), d + '/plain.pt')
    torch.save({'model': net.state_dict(), 'epoch': 1}, d + '/nested.pt')
    torch.save({'module.' + k: v for k, v in net.state_dict().items()}, d + '/wrapped.pt')
else:
    a = torch.load(d + '/plain.pt', weights_only=True)
    b = torch.load(d + '/back.pt', weights_only=True)
    assert sorted(a) == sorted(b), (list(a), list(b))
    for k in a: assert a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]), k
    print(net.load_state_dict(b))
)";

TEST(Weights, TravelBetweenPythonAndCppToTheBit) {
  if (formats::pythons_with_torch().empty()) GTEST_SKIP() << "no Python with torch here";
  for (const std::string& python : formats::pythons_with_torch()) {
    SCOPED_TRACE(python);
    TestFolder folder;
    ASSERT_TRUE(formats::run_python(python, kPython, folder.path() + " write"));
    Net net, nested, wrapped;
    load_weights(*net, folder / "plain.pt");
    load_weights(*nested, folder / "nested.pt", {.key = "model"});
    load_weights(*wrapped, folder / "wrapped.pt");
    EXPECT_EQ(bits(*nested), bits(*net));
    EXPECT_EQ(bits(*wrapped), bits(*net));
    EXPECT_EQ(net->bn->num_batches_tracked.item<std::int64_t>(), 3);
    save_weights(*net, folder / "back.pt", WeightsFormat::Pt);
    EXPECT_TRUE(formats::run_python(python, kPython, folder.path() + " read"));
  }
}

}  // namespace
}  // namespace cohort
