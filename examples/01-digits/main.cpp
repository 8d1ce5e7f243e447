// Trains a network on handwritten digits, on as many processes as it is started with. The lines that make it
// distributed are marked with (1) to (6); the rest is an ordinary libtorch program.
#include "data.h"
#include "learning_rate.h"
#include "model.h"
#include "options.h"
#include "report.h"

#include <cohort/torch.h>
#include <cohort/torch/checkpoint.h>

#include <torch/cuda.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <stdexcept>

namespace {

constexpr int64_t kTestBatch = 256;

// (5) Every process tests its part of the images; the averages over all of them are exact.
Score evaluate(NetImpl& net, const Digits& test, cohort::Communicator& comm) {
  const torch::NoGradGuard no_grad;
  net.eval();
  cohort::metrics::Averages averages({"loss", "accuracy"});
  const int64_t end = test.size() * (comm.rank() + 1) / comm.size();
  for (int64_t at = test.size() * comm.rank() / comm.size(); at < end; at += kTestBatch) {
    const int64_t count = std::min(kTestBatch, end - at);
    const at::Tensor labels = test.labels.narrow(0, at, count);
    const at::Tensor output = net.forward(test.images.narrow(0, at, count));
    averages.add("loss", torch::nll_loss(output, labels).item<double>(), count);
    averages.add("accuracy", output.argmax(1).eq(labels).to(at::kDouble).mean().item<double>(), count);
  }
  net.train();
  const auto means = averages.reduce(comm);
  return {means.at("loss").value, means.at("accuracy").value};
}

at::Device device_of(const Options& options, const cohort::Communicator& comm) {
  if (options.device == "cpu") return at::kCPU;
  const auto gpus = static_cast<int>(torch::cuda::device_count());
  if (gpus == 0) throw std::runtime_error("--device cuda: libtorch sees no GPU");
  return {at::kCUDA, static_cast<at::DeviceIndex>(comm.local_rank() % gpus)};
}

/// Returns the program's exit status.
int train(int argc, char** argv) {
  cohort::Preemption preemption;  // (6) A signal to any process asks all to save and end. First, to miss none.
  Report report;
  // (1) Become one of N: the launcher has said who we are and where to meet. Without a launcher, a world of one.
  cohort::Communicator comm = cohort::init();
  const Options options = parse_options(argc, argv, comm.rank(), comm.size());
  if (options.threads > 0) torch::set_num_threads(options.threads);
  torch::manual_seed(options.seed);
  const DigitSets digits = load_digits(options.data.empty() ? shipped_digits() : options.data);
  const at::Device device = device_of(options, comm);
  const Digits test = digits.test.to(device);

  // (2) Every process gets its part of each batch, every sample once per epoch.
  cohort::data::DistributedSampler sampler(digits.train.size(), comm,
                                           {.batch_size = options.batch_per_process, .seed = options.seed});
  // (3) Every process holds the model, beginning with rank 0's weights; backward() averages the gradients of all, by
  // the samples that the sampler gives each. With --local-steps every process steps by itself instead, and now and
  // then all take the average of their parameters.
  Net net;
  net->to(device);
  std::optional<cohort::nn::DistributedDataParallel<NetImpl>> model;
  if (options.local_steps == 0) {
    model.emplace(net, comm,
                  cohort::nn::DistributedDataParallelOptions{.wire_format = options.wire_format, .sampler = &sampler});
  }
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9));
  std::optional<cohort::optim::DiLoCo> local;
  if (options.local_steps > 0) {
    local.emplace(*net, optimizer, comm,
                  cohort::optim::DiLoCoOptions{.sync_every = options.local_steps,
                                               .outer_learning_rate = 1,
                                               .outer_momentum = 0,
                                               .fragment_sync_delay = options.delay,
                                               .fragment_update_alpha = options.delay > 0 ? 0.5 : 0,
                                               .wire_format = options.wire_format});
  }
  LearningRate rate(optimizer, options, comm.size(), sampler.steps_per_epoch());

  // (4) Checkpoints hold everything that a run needs to go on as if it had not been interrupted, to the bit.
  cohort::CheckpointFolder checkpoints(comm, {.folder = (options.out / "checkpoints").string()});
  const auto found = options.resume ? checkpoints.load_latest(*net, &optimizer) : std::nullopt;
  if (found && found->progress.sampler) sampler.load_state(*found->progress.sampler);
  if (found && local) local->load_state(checkpoints.rank_state());
  int64_t step = found ? found->progress.step : 0;
  if (found) rate.resume(step, sampler.steps_left(), options.epochs - sampler.epoch() - 1);
  const auto save = [&] {
    report.saved(checkpoints
                     .save(*net, &optimizer, {step, sampler.epoch(), sampler.state(), {}},
                           local ? local->state() : cohort::RankState())
                     .folder);
  };

  if (comm.rank() == 0) report.begin(options, comm, digits, sampler, found);
  Score score = sampler.epoch() >= options.epochs ? evaluate(*net, test, comm) : Score();
  while (sampler.epoch() < options.epochs) {
    report.begin_epoch();
    cohort::metrics::Averages losses({"train_loss"});
    while (const auto indices = sampler.next_batch()) {
      const Digits batch = digits.train.shifted(*indices, options.seed, sampler.epoch(), options.shift).to(device);
      const at::Tensor loss =
          torch::nll_loss(model ? (*model)(batch.images) : net->forward(batch.images), batch.labels);
      net->zero_grad();
      loss.backward();
      optimizer.step();
      if (local) local->step(static_cast<double>(batch.size()));
      rate.step();
      const int64_t samples = sampler.global_batch();
      sampler.step();
      ++step;

      losses.add("train_loss", loss.item<double>(), batch.size());
      report.step(step, loss.item<double>(), samples, model ? model->stats().exposed_communication_seconds : 0);
      if (step % 5 == 0 || sampler.steps_left() == 0) {
        report.loss(losses.reduce(comm).at("train_loss").value, rate.rate_at(step - 1));
        losses.clear();
      }
      const bool preempted = preemption.requested(comm);
      if (preempted || (options.save_every > 0 && step % options.save_every == 0)) save();
      if (preempted) {
        report.preempted();
        return cohort::kRequeueStatus;
      }
    }
    sampler.next_epoch();
    if (local && sampler.epoch() == options.epochs) local->synchronize();
    score = evaluate(*net, test, comm);
    save();
    report.end_epoch(score);
  }
  if (comm.rank() == 0) {
    cohort::save_weights(*net, (options.out / "weights.safetensors").string());
    report.end(score);
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return train(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "digits: %s\n", error.what());
    return 1;
  }
}
