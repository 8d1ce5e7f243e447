// Checkpoints of models that no rank has whole; ranks are threads. Gradients are elementwise, so that a model in parts
// has to have the same bits as a whole one.
#include <cohort/torch/checkpoint.h>

#include "train/checkpoint/checkpoint.h"
#include "train/formats/shards.h"
#include "train/formats/testing.h"
#include "train/formats/weights.h"

#include <cohort/communicator.h>
#include <cohort/error.h>
#include <cohort/mesh.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/parallel.h>
#include <cohort/torch/sharded.h>

#include <torch/optim/adam.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace cohort {
namespace {

using formats::TestFolder;
using nn::Sharding;

/// One of `size` ranks along an axis.
struct Seat {
  int rank = 0, size = 1;
};

/// Each rank of a tensor-parallel group has a part of the weight along `dimension`, and the whole bias and number.
struct PartImpl : torch::nn::Module, nn::HasShards {
  PartImpl(std::vector<std::int64_t> sizes, std::size_t dimension, Seat seat) : shard(formats::whole_shard(sizes)) {
    const std::int64_t all = sizes[dimension], begin = all * seat.rank / seat.size;
    const std::int64_t end = all * (seat.rank + 1) / seat.size;
    shard.start[dimension] = begin;
    shard.extent[dimension] = end - begin;
    shard.count = *formats::element_count(shard.extent);
    const auto count = *formats::element_count(sizes);
    const at::Tensor whole = at::sin(at::arange(count, at::kDouble) * 1.7).to(at::kFloat).reshape(sizes);
    weight = register_parameter(
        "weight", whole.narrow(static_cast<std::int64_t>(dimension), begin, end - begin).contiguous().clone());
    bias = register_parameter("bias", at::cos(at::arange(sizes[0], at::kDouble)).to(at::kFloat));
    number = register_parameter("number", at::full({}, 0.75));
    register_buffer("scale", at::full({2}, 0.5));
  }
  std::map<std::string, Shard> shards() const override { return {{"weight", shard}}; }
  at::Tensor forward(const at::Tensor& x) {
    return ((weight * weight).sum() + (bias * bias).sum() * 0.5 + number * number) * x;
  }
  Shard shard;
  at::Tensor weight, bias, number;
};
TORCH_MODULE(Part);

/// The stages of a pipeline that one rank has.
struct NetImpl : torch::nn::Module {
  explicit NetImpl(Seat tp = {}, const std::vector<int>& stages = {0, 1, 2, 3}) {
    const std::vector<std::vector<std::int64_t>> sizes = {{9, 4}, {8, 16, 2}, {600, 10}, {6, 3}};
    for (const int stage : stages) {
      parts.push_back(register_module(std::to_string(stage),
                                      Part(sizes[static_cast<std::size_t>(stage)], stage % 2 == 0 ? 0 : 1, tp)));
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor sum = at::zeros({});
    for (Part& part : parts) sum = sum + part(x);
    return sum;
  }
  std::vector<Part> parts;
};
TORCH_MODULE(Net);

template <class Model, class Optimizer>
void train(Model& model, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    model(at::full({}, 1 + step * 0.25)).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}
template <class Optimizer>
void train(Net& net, Optimizer& optimizer, int from, int to) {
  const auto model = [&](const at::Tensor& x) { return net->forward(x); };
  train(model, optimizer, from, to);
}

torch::optim::AdamOptions adam_options() { return torch::optim::AdamOptions(0.01).betas({0.8, 0.99}).amsgrad(true); }

std::string bits(const at::Tensor& tensor) {
  const at::Tensor dense = tensor.detach().contiguous();
  return {static_cast<const char*>(dense.data_ptr()), dense.nbytes()};
}

/// The whole model after so many steps in one process, by name.
std::map<std::string, at::Tensor> expected_after(int steps) {
  Net net;
  torch::optim::Adam optimizer(net->parameters(), adam_options());
  train(net, optimizer, 0, steps);
  std::map<std::string, at::Tensor> all;
  for (const auto& item : net->named_parameters()) all.emplace(item.key(), item.value().detach().clone());
  return all;
}

void expect_part_of(const std::map<std::string, at::Tensor>& whole, Net& net) {
  const ModelShards model = model_shards(*net);
  for (const auto& item : net->named_parameters()) {
    at::Tensor part = whole.at(item.key());
    if (const auto shard = model.tensors.find(item.key()); shard != model.tensors.end()) {
      for (std::size_t i = 0; i < shard->second.sizes.size(); ++i)
        part = part.narrow(static_cast<std::int64_t>(i), shard->second.start[i], shard->second.extent[i]);
    }
    EXPECT_TRUE(bits(part) == bits(item.value())) << item.key();
  }
}

/// The layout of a world, and its optimizer.
struct Layout {
  int dp = 1, tp = 1;
  std::optional<Sharding> sharding = {};  // nullopt: plain Adam
};

/// Trains steps [from, to). `before` and `after` are called before and after that, with this rank's shards.
using Use = std::function<void(const ModelShards&, CheckpointFolder&)>;
void run(const Layout& layout, const CheckpointOptions& options, int from, int to, const Use& before,
         const Use& after) {
  run_on_threads(layout.dp * layout.tp, [&](Communicator comm) {
    Mesh mesh(comm, {{"dp", layout.dp}, {"tp", layout.tp}});
    Net net(Seat{mesh.coordinate("tp"), layout.tp});
    CheckpointFolder checkpoints(comm, options);
    if (layout.sharding) {
      nn::DistributedDataParallel model(
          net, mesh.along("dp"),
          {.sharding = *layout.sharding, .protect_parameters = *layout.sharding == Sharding::Parameters});
      optim::Sharded<torch::optim::Adam> optimizer(model, adam_options());
      before(model_shards(*net, &optimizer), checkpoints);
      train(model, optimizer, from, to);
      after(model_shards(*net, &optimizer), checkpoints);
    } else {
      torch::optim::Adam optimizer(net->parameters(), adam_options());
      before(model_shards(*net, &optimizer), checkpoints);
      train(net, optimizer, from, to);
      after(model_shards(*net, &optimizer), checkpoints);
    }
    expect_part_of(expected_after(to), net);
  });
}

const Use kNothing = [](const ModelShards&, CheckpointFolder&) {};

Use saving(int step) {
  return [step](const ModelShards& model, CheckpointFolder& checkpoints) {
    EXPECT_EQ(checkpoints.save(model, {.step = step}, {{"own", at::full({1}, step)}}).progress.step, step);
  };
}
const Use kLoading = [](const ModelShards& model, CheckpointFolder& checkpoints) {
  const auto info = checkpoints.load_latest(model);
  ASSERT_TRUE(info);
  EXPECT_EQ(info->progress.step, 3);
};

void expect_plain_continues(const CheckpointOptions& options) {
  for (const int ranks : {1, 2}) {
    run_on_threads(ranks, [&](Communicator comm) {
      Net net;
      torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(1));
      ASSERT_TRUE(CheckpointFolder(comm, options).load_latest(*net, &optimizer));
      train(net, optimizer, 3, 5);
      expect_part_of(expected_after(5), net);
    });
  }
}

const std::vector<Layout> kLayouts = {{1, 1},
                                      {1, 2},
                                      {3, 1},
                                      {2, 2},
                                      {4, 1, Sharding::Gradients},  // a power of two, by which averages are exact
                                      {2, 1, Sharding::Parameters},
                                      {2, 2, Sharding::Optimizer},
                                      {1, 3, Sharding::Optimizer}};

TEST(CheckpointOfShards, ContinuesToTheBitInAnyLayout) {
  for (const CheckpointPlace place : {CheckpointPlace::Rank0, CheckpointPlace::Shared, CheckpointPlace::Local}) {
    TestFolder folder;
    const CheckpointOptions options{.folder = folder.path(), .place = place};
    run({2, 2, Sharding::Optimizer}, options, 0, 3, kNothing, saving(3));
    for (std::size_t i = 0; i < kLayouts.size(); i += place == CheckpointPlace::Rank0 ? 1 : 3)
      run(kLayouts[i], options, 3, 5, kLoading, kNothing);
    expect_plain_continues(options);
  }
}

TEST(CheckpointOfShards, OfAnyLayoutAreOneToAProgramWithoutThem) {
  for (const Layout& layout : kLayouts) {
    TestFolder folder;
    run(layout, {.folder = folder.path()}, 0, 3, kNothing, saving(3));
    expect_plain_continues({.folder = folder.path()});
  }
}

TEST(CheckpointOfShards, LoadsWhatWasSavedWithoutThem) {
  TestFolder folder;
  const CheckpointOptions options{.folder = folder.path()};
  run_on_threads(2, [&](Communicator comm) {
    Net net;
    torch::optim::Adam optimizer(net->parameters(), adam_options());
    train(net, optimizer, 0, 3);
    CheckpointFolder(comm, options).save(*net, &optimizer, {.step = 3});
  });
  for (const Layout& layout : kLayouts) run(layout, options, 3, 5, kLoading, kNothing);
}

/// Returns model.safetensors and optimizer.safetensors of the newest checkpoint, as a program without shards gets them.
std::map<std::string, std::string> files_of(const std::string& folder) {
  Communicator alone;
  const checkpoint::Found found = checkpoint::load_newest(alone, {folder, 1}, {});
  std::map<std::string, std::string> files;
  for (const char* const name : {checkpoint::kModelFile, checkpoint::kOptimizerFile})
    files[name] = found.files.at(name).text();
  return files;
}

/// Returns the files that a process with the whole model would have saved.
std::map<std::string, std::string> files_of_one_process(const std::string& folder) {
  Net net;
  torch::optim::Adam optimizer(net->parameters(), adam_options());
  train(net, optimizer, 0, 3);
  CheckpointFolder(Communicator(), {.folder = folder}).save(*net, &optimizer, {.step = 3});
  return files_of(folder);
}

TEST(CheckpointOfShards, MeansTheSameToTheByte) {
  TestFolder folder;
  const auto expected = files_of_one_process(folder / "one");
  run({2, 2, Sharding::Optimizer}, {.folder = folder / "four"}, 0, 3, kNothing, saving(3));
  EXPECT_TRUE(files_of(folder / "four") == expected);
  for (const std::string end : {".safetensors", ".pt"}) {
    for (const std::string from : {"one", "four"})
      ASSERT_TRUE(formats::export_weights({.from = folder / from, .to = folder / (from + end)}));
    EXPECT_TRUE(sys::read_file(folder / ("one" + end))->text() == sys::read_file(folder / ("four" + end))->text());
  }
  // Saves the stages of a pipeline, interleaved over the ranks, with a replica of each stage.
  run_on_threads(4, [&](Communicator comm) {
    Net net(Seat{}, comm.rank() % 2 == 0 ? std::vector<int>{0, 2} : std::vector<int>{1, 3});
    torch::optim::Adam optimizer(net->parameters(), adam_options());
    train(net, optimizer, 0, 3);
    CheckpointFolder checkpoints(comm, {.folder = folder / "stages"});
    checkpoints.save(model_shards(*net, &optimizer), {.step = 3});
    checkpoints.save_async(model_shards(*net, &optimizer), {.step = 4}, {{"r", at::full({}, comm.rank())}}).wait();
    // Loads them with other cuts of the layers.
    Net other(Seat{},
              std::vector<std::vector<int>>{{0}, {1, 2}, {3}, {2, 3}}.at(static_cast<std::size_t>(comm.rank())));
    torch::optim::Adam second(other->parameters(), torch::optim::AdamOptions(1));
    ASSERT_TRUE(checkpoints.load_latest(model_shards(*other, &second)));
    EXPECT_EQ(checkpoints.rank_state().at("r").item<int>(), comm.rank());
    EXPECT_EQ(checkpoints.parts({3}).at(3).at("r").item<int>(), 3);
    train(other, second, 3, 5);
    expect_part_of(expected_after(5), other);
  });
  EXPECT_TRUE(files_of(folder / "stages") == expected);
}

TEST(CheckpointOfShards, KeepsMasterWeights) {
  const auto train_half = [](Communicator& comm, int from, int to, const std::string& load, const std::string& save) {
    Net net;
    net->to(at::kBFloat16);
    nn::DistributedDataParallel model(net, comm, {.sharding = Sharding::Optimizer});
    optim::Sharded<torch::optim::Adam> optimizer(model, torch::optim::AdamOptions(1e-3));
    if (!load.empty()) {
      EXPECT_TRUE(CheckpointFolder(comm, {.folder = load}).load_latest(model_shards(*net, &optimizer)));
    }
    train(model, optimizer, from, to);
    if (!save.empty()) CheckpointFolder(comm, {.folder = save}).save(model_shards(*net, &optimizer), {});
  };
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) { train_half(comm, 0, 6, "", folder / "all"); });
  run_on_threads(2, [&](Communicator comm) { train_half(comm, 0, 3, "", folder / "half"); });
  run_on_threads(3, [&](Communicator comm) { train_half(comm, 3, 6, folder / "half", folder / "rest"); });
  EXPECT_TRUE(files_of(folder / "rest") == files_of(folder / "all"));
  EXPECT_NE(files_of(folder / "all").at(checkpoint::kOptimizerFile).find("state/0.weight/master"), std::string::npos);
  // Without master weights, values match to 16 bits.
  Net net;
  net->to(at::kBFloat16);
  torch::optim::Adam plain(net->parameters(), torch::optim::AdamOptions(1));
  EXPECT_TRUE(CheckpointFolder(Communicator(), {.folder = folder / "all"}).load_latest(*net, nullptr));
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

TEST(CheckpointOfShards, RefusesWhatDoesNotFitOnAllRanks) {
  TestFolder folder;
  run_on_threads(2, [&](Communicator comm) {
    CheckpointFolder checkpoints(comm, {.folder = folder.path()});
    const Seat seat{comm.rank(), 2};
    Net net(seat);
    torch::optim::Adam optimizer(net->parameters(), adam_options());
    train(net, optimizer, 0, 1);
    const auto refused = [&](const std::function<void()>& work, const std::string& said) {
      EXPECT_EQ(code_of(work, said), ErrorCode::InvalidArgument);
    };
    refused([&] { checkpoints.save(*net, &optimizer, {}); }, "this rank has only a part of '0.weight'");
    ModelShards model = model_shards(*net, &optimizer);
    // Refused: two ranks with the same half; one rank with other options; a Shard that does not fit the tensor.
    Net first(Seat{0, 2});
    refused([&] { checkpoints.save(model_shards(*first), {}); },
            "of the 36 elements of tensor 'model/0.weight' [9, 4] only 16 are there");
    ModelShards wrong = model;
    if (comm.rank() == 1) wrong.tensors.at("0.weight").begin = 1;
    refused([&] { checkpoints.save(wrong, {}); }, "let HasShards::shards say");
    torch::optim::Adam faster(net->parameters(), adam_options().lr(comm.rank() + 1));
    refused([&] { checkpoints.save(model_shards(*net, &faster), {}); }, "the optimizer of rank 1 has other options");
    torch::optim::LBFGS closure(net->parameters(), torch::optim::LBFGSOptions(0.1));
    closure.step([&] {
      closure.zero_grad();
      at::Tensor loss = net->forward(at::ones({}));
      loss.backward();
      return loss;
    });
    refused([&] { checkpoints.save(model_shards(*net, &closure), {}); }, "has another shape than that");
    EXPECT_TRUE(checkpoints.list().empty());

    checkpoints.save(model, {.step = 1});
    const std::string before = bits(net->parts[0]->weight);
    train(net, optimizer, 1, 2);
    const std::string after = bits(net->parts[0]->weight);
    Net fewer(seat, std::vector<int>{0, 1, 2});
    refused([&] { checkpoints.load_latest(model_shards(*fewer)); }, "not in the module of any rank: '3.bias'");
    Part one(std::vector<std::int64_t>{7, 4}, 0, seat);
    refused([&] { checkpoints.load_latest(model_shards(*one)); }, "missing in the file: 'bias'");
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1));
    refused([&] { checkpoints.load_latest(model_shards(*net, &sgd)); }, "it is of Adam, and this one is SGD");
    refused([&] { checkpoints.load_latest(*net, nullptr); }, "this rank has only a part");
    EXPECT_TRUE(bits(net->parts[0]->weight) == after);
    EXPECT_TRUE(checkpoints.load_latest(model_shards(*net)));
    EXPECT_TRUE(bits(net->parts[0]->weight) == before);
  });
}

}  // namespace
}  // namespace cohort
