// A GPT of characters on any number of processes: --dp copies of it, each of them --pp stages, the matrices of a stage
// over --tp ranks, and --sharding divides the training state of the copies.
#include "model.h"

#include <cohort/torch.h>

#include <CLI/CLI.hpp>

#include <atomic>
#include <cstdio>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace {

using cohort::nn::Sharding;
using cohort::pipeline::Schedule;

struct Options {
  int dp = 1, tp = 1, pp = 1, micro_batches = 4, batch = 32, save_every = 0;
  Sharding sharding = Sharding::None;
  Schedule schedule = Schedule::OneFOneB;
  Shape shape;
  double rate = 1e-3, outer_rate = 0.7, outer_momentum = 0.9;
  int64_t steps = 100, diloco = 0;
  uint64_t seed = 1;
  bool resume = false, doubles = false, bytes = false;
  std::string text = GPT_TEXT, folder;
};

const std::map<std::string, Sharding> kShardings = {{"none", Sharding::None},
                                                    {"optimizer", Sharding::Optimizer},
                                                    {"gradients", Sharding::Gradients},
                                                    {"parameters", Sharding::Parameters}};
const std::map<std::string, Schedule> kSchedules = {
    {"gpipe", Schedule::GPipe}, {"1f1b", Schedule::OneFOneB}, {"zero-bubble", Schedule::ZeroBubble}};

template <class Value>
std::vector<std::string> keys_of(const std::map<std::string, Value>& all) {
  std::vector<std::string> keys;
  for (const auto& [key, value] : all) keys.push_back(key);
  return keys;
}

Options parse(int argc, char** argv) {
  Options options;
  CLI::App app("Trains a small GPT on the characters of a text.");
  app.add_option("--dp", options.dp, "copies of the model, each with its part of every batch");
  app.add_option("--tp", options.tp, "ranks that divide the matrices of a layer");
  app.add_option("--pp", options.pp, "ranks that divide the layers");
  std::string sharding = "none", schedule = "1f1b";
  app.add_option("--sharding", sharding, "what the copies divide of the training state: none, optimizer, ...")
      ->check(CLI::IsMember(keys_of(kShardings)));
  app.add_option(
      "--diloco", options.diloco,
      "each copy steps by itself, and every so many steps all copies meet (an outer optimizer); 0: in each step");
  app.add_option("--outer-rate", options.outer_rate, "of that optimizer; 1 without momentum: the average");
  app.add_option("--outer-momentum", options.outer_momentum);
  app.add_option("--schedule", schedule, "of the pipeline")->check(CLI::IsMember(keys_of(kSchedules)));
  app.add_option("--micro-batches", options.micro_batches, "of a copy's part of the batch");
  app.add_option("--batch", options.batch, "sequences of a step, of all copies together");
  app.add_option("--layers", options.shape.layers);
  app.add_option("--width", options.shape.width);
  app.add_option("--heads", options.shape.heads);
  app.add_option("--context", options.shape.context);
  app.add_flag("--recompute", options.shape.recompute, "compute activations again instead of keeping them");
  app.add_flag("--bytes", options.bytes, "say how much each copy has brought to reductions");
  app.add_flag("--double", options.doubles, "compute in float64");
  app.add_option("--rate", options.rate);
  app.add_option("--steps", options.steps);
  app.add_option("--seed", options.seed);
  app.add_option("--text", options.text);
  app.add_option("--folder", options.folder, "of checkpoints; without it none are made");
  app.add_option("--save-every", options.save_every, "steps from one checkpoint to the next; 0: at the end only");
  app.add_flag("--resume", options.resume, "go on from the newest checkpoint");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    std::exit(app.exit(error));
  }
  if (options.diloco > 0 && (sharding != "none" || options.tp * options.pp > 1)) {
    std::fprintf(stderr, "gpt: --diloco is for whole copies, without --sharding, --tp and --pp\n");
    std::exit(2);
  }
  options.sharding = kShardings.at(sharding);
  options.schedule = kSchedules.at(schedule);
  return options;
}

/// Reads the text, as numbers below 96.
torch::Tensor characters_of(const std::string& path) {
  std::ifstream file(path);
  torch::Tensor all = torch::empty({1 << 24}, torch::kLong);
  int64_t count = 0;
  for (char c; count < all.numel() && file.get(c);) {
    all.data_ptr<int64_t>()[count++] = c >= 32 && c < 127 ? c - 32 : 95;
  }
  return all.narrow(0, 0, count).clone();
}

/// Counts the bytes of a rank's operations on a communicator, and those that it sends.
struct Bytes : cohort::Observer {
  void on_collective(const cohort::CollectiveEvent& event) override {
    brought += event.bytes;
    sent += event.wire_bytes;
  }
  std::atomic<std::size_t> brought = 0, sent = 0;
};

void train(const Options& options) {
  Bytes bytes;
  cohort::Communicator comm = cohort::init();
  torch::set_num_threads(1);
  // The axis that communicates most is last, so that its ranks share a host.
  cohort::Mesh mesh(comm, {{"dp", options.dp}, {"pp", options.pp}, {"tp", options.tp}});
  if (options.doubles) torch::set_default_dtype(caffe2::TypeMeta::Make<double>());
  cohort::nn::ParallelCrossEntropy loss_of(mesh.along("tp"));
  cohort::nn::Pipeline pipeline(
      layers_of(mesh.along("tp"), options.shape), mesh.along("pp"),
      {.schedule = options.schedule,
       .micro_batches = options.micro_batches,
       .loss = [&](const torch::Tensor& logits, const torch::Tensor& next) { return loss_of(logits, next); },
       .seed = options.seed});
  cohort::Communicator copies = mesh.along("dp");
  if (options.bytes) copies.set_observer(&bytes);
  cohort::nn::DistributedDataParallel<torch::nn::Module> model(
      pipeline.module(), options.diloco > 0 ? comm.split({.color = comm.rank()}) : copies,
      {.sharding = options.sharding});
  const torch::optim::AdamWOptions rate(options.rate);
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (options.sharding == Sharding::None) {
    optimizer = std::make_unique<torch::optim::AdamW>(pipeline.parameters(), rate);
  } else {
    optimizer = std::make_unique<cohort::optim::Sharded<torch::optim::AdamW>>(model, rate);
  }

  const cohort::ModelShards shards = cohort::model_shards(*pipeline.module(), optimizer.get());
  cohort::CheckpointFolder checkpoints(comm, {.folder = options.folder.empty() ? "." : options.folder});
  int64_t step = 0;
  if (options.resume) {
    if (const auto found = checkpoints.load_latest(shards)) step = found->progress.step;
    pipeline.set_steps(step);
    if (comm.rank() == 0) std::printf("going on from step %ld\n", static_cast<long>(step));
  }

  std::optional<cohort::optim::DiLoCo> diloco;
  if (options.diloco > 0) {
    diloco.emplace(*pipeline.module(), *optimizer, copies,
                   cohort::optim::DiLoCoOptions{.sync_every = options.diloco,
                                                .outer_learning_rate = options.outer_rate,
                                                .outer_momentum = options.outer_momentum});
    // A checkpoint of a data-parallel run has nothing of it.
    if (step > 0 && !checkpoints.rank_state().empty()) diloco->load_state(checkpoints.rank_state());
  }

  const torch::Tensor text = characters_of(options.text);
  const int64_t context = options.shape.context, part = options.batch / options.dp;
  while (step < options.steps) {
    // All ranks draw the batch, and each copy takes its part.
    auto generator =
        torch::make_generator<torch::CPUGeneratorImpl>(options.seed + 1000003 * static_cast<uint64_t>(step));
    const torch::Tensor begins = torch::randint(text.numel() - context, {options.batch}, generator, torch::kLong)
                                     .narrow(0, mesh.coordinate("dp") * part, part);
    const torch::Tensor places = begins.unsqueeze(1) + torch::arange(context);
    model.zero_grad();
    double loss = 0;
    {
      const auto local = model.no_sync();
      loss = pipeline.step(text.index({places}), text.index({places + 1}));
    }
    model.step_without_samples();
    optimizer->step();
    if (diloco) diloco->step();
    copies.all_reduce(std::span(&loss, 1), {.op = cohort::ReduceOp::Average}).wait();
    ++step;
    if (comm.rank() == 0 && (step % 10 == 0 || step == 1)) {
      std::printf("step %ld: loss %.6f\n", static_cast<long>(step), loss);
      std::fflush(stdout);
    }
    const bool last = step == options.steps;
    if (!options.folder.empty() && (last || (options.save_every > 0 && step % options.save_every == 0))) {
      checkpoints.save(shards, {.step = step}, diloco ? diloco->state() : cohort::RankState());
    }
  }
  if (diloco) diloco->synchronize();
  if (options.bytes && comm.rank() == 0)
    std::printf("%.2f MB to reductions, %.2f MB sent to other hosts\n", static_cast<double>(bytes.brought) / 1e6,
                static_cast<double>(bytes.sent) / 1e6);
}

}  // namespace

int main(int argc, char** argv) {
  try {
    train(parse(argc, argv));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "gpt: %s\n", error.what());
    return 1;
  }
}
