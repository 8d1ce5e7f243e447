// Trains a small convolutional network on handwritten digits, on as many processes as it is started with:
//
//   build/release/bin/digits                                  one process
//   build/release/bin/cohort run -np 4 build/release/bin/digits
//
// What makes it distributed is marked with (1) to (6); the rest is an ordinary libtorch program.
#include "data.h"
#include "model.h"
#include "options.h"

#include <cohort/torch.h>
#include <cohort/torch/checkpoint.h>
#include <cohort/track.h>

#include <torch/optim/sgd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <optional>

namespace {

constexpr int64_t kStepsPerRecord = 5;
constexpr int64_t kTestBatch = 256;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Score {
  double loss = 0, accuracy = 0;
};

// (5) Every process tests its part of the images; the averages over all of them are exact.
Score evaluate(NetImpl& net, const Digits& test, cohort::Communicator& comm) {
  const torch::NoGradGuard no_grad;
  net.eval();
  cohort::metrics::Averages averages({"loss", "accuracy"});
  const int64_t begin = test.size() * comm.rank() / comm.size();
  const int64_t end = test.size() * (comm.rank() + 1) / comm.size();
  for (int64_t at = begin; at < end; at += kTestBatch) {
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

/// Returns the program's exit status.
int train(int argc, char** argv) {
  // (6) A signal asks to save and end, whichever process it comes to; from here on, so that none is missed.
  cohort::Preemption preemption;
  // The record watches the communicator, so it has to outlive it.
  std::optional<cohort::track::RunRecord> record;
  // (1) Become one of N: the launcher has said who we are and where to meet. Without a launcher, a world of one.
  cohort::Communicator comm = cohort::join();
  const bool first = comm.rank() == 0;
  const Options options = parse_options(argc, argv, comm.rank(), comm.size());
  if (options.threads > 0) torch::set_num_threads(options.threads);
  torch::manual_seed(options.seed);

  const DigitSets digits = load_digits(options.data.empty() ? shipped_digits() : options.data);
  // (2) Every process holds the model, beginning with rank 0's weights; backward() averages the gradients of all.
  Net net;
  cohort::nn::DistributedDataParallel model(net, comm);
  // (3) Every process gets its part of each batch, every sample once per epoch.
  cohort::data::DistributedSampler sampler(digits.train.size(), comm,
                                           {.batch_size = options.batch_per_process, .seed = options.seed});
  const int64_t steps_per_epoch = sampler.steps_per_epoch();
  int64_t total_steps = steps_per_epoch * options.epochs;

  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9));
  cohort::optim::WarmupOptions rate{.world_size = comm.size(), .scaling = cohort::optim::Scaling::None};
  if (options.batch_grows) {
    rate.scaling = cohort::optim::Scaling::Linear;
    rate.warmup_steps = steps_per_epoch;
  }
  // Half a cosine, so that the last steps are small and the result does not depend on where training happens to stop.
  rate.decay = [&total_steps](int64_t step) {
    const double done = std::min(1.0, static_cast<double>(step) / static_cast<double>(total_steps));
    return 0.5 * (1 + std::cos(M_PI * done));
  };
  cohort::optim::WarmupScheduler schedule(optimizer, rate);

  // (4) Checkpoints hold everything that a run needs to go on as if it had not been interrupted, to the bit.
  cohort::CheckpointFolder checkpoints(comm, {.folder = (options.out / "checkpoints").string()});
  int64_t step = 0;
  std::string newest_checkpoint;
  if (options.resume) {
    if (const auto from = checkpoints.load_latest(*net, &optimizer)) {
      step = from->progress.step;
      if (from->progress.sampler) sampler.load_state(*from->progress.sampler);
      // Another number of processes makes other steps of the same images.
      total_steps = step + sampler.steps_left() + steps_per_epoch * (options.epochs - sampler.epoch() - 1);
      schedule.set_step(step);
      newest_checkpoint = from->folder;
    }
  }
  const bool resumed = step > 0;
  // Epochs done: what of the images has been used.
  const auto epochs_done = [&sampler] {
    return static_cast<double>(sampler.epoch()) +
           static_cast<double>(sampler.cursor()) / static_cast<double>(sampler.size());
  };

  std::optional<cohort::track::Progress> progress;
  if (first) {
    record.emplace(
        options.out / "run.jsonl",
        cohort::track::RunRecordOptions{.program = "digits",
                                        .world_size = comm.size(),
                                        .parameters = {{"epochs", options.epochs},
                                                       {"batch_size", options.batch_per_process * comm.size()},
                                                       {"lr", options.lr},
                                                       {"seed", options.seed},
                                                       {"shift", options.shift},
                                                       {"threads", torch::get_num_threads()},
                                                       {"train_images", digits.train.size()},
                                                       {"test_images", digits.test.size()},
                                                       {"torch", TORCH_VERSION}}});
    if (resumed) record->write("resume", {{"step", step}, {"epoch", epochs_done()}, {"checkpoint", newest_checkpoint}});
    comm.set_observer(&*record);
    progress.emplace(cohort::track::ProgressOptions{.steps_per_epoch = steps_per_epoch,
                                                    .epochs = options.epochs,
                                                    .first_step = step,
                                                    .first_epoch = sampler.epoch(),
                                                    .steps_left_in_first_epoch = sampler.steps_left()});
    progress->line("digits: " + std::to_string(digits.train.size()) + " images, " + std::to_string(comm.size()) +
                   (comm.size() == 1 ? " process" : " processes") + " of " + std::to_string(torch::get_num_threads()) +
                   " threads, " + std::to_string(options.batch_per_process) + " images each per step" +
                   (resumed          ? ", going on after step " + std::to_string(step)
                    : options.resume ? ", from the beginning"
                                     : ""));
  }

  Score score = resumed && sampler.epoch() >= options.epochs ? evaluate(*net, digits.test, comm) : Score();
  double training_seconds = 0;
  int64_t training_samples = 0;
  std::vector<double> speeds;  // of each whole epoch
  const auto save = [&] {
    newest_checkpoint =
        checkpoints.save(*net, &optimizer, {.step = step, .epoch = sampler.epoch(), .sampler = sampler.state()}).folder;
  };
  while (sampler.epoch() < options.epochs) {
    cohort::metrics::Averages averages({"train_loss"});
    const uint64_t shift_key = (options.seed << 32) + static_cast<uint64_t>(sampler.epoch());
    const auto epoch_begin = std::chrono::steady_clock::now();
    const bool whole_epoch = sampler.cursor() == 0;
    int64_t epoch_samples = 0;
    auto step_begin = epoch_begin;
    while (const auto indices = sampler.next_batch()) {
      const Digits batch = digits.train.shifted(*indices, shift_key, options.shift);
      const at::Tensor loss = torch::nll_loss(model(batch.images), batch.labels);
      model.zero_grad();
      loss.backward();
      optimizer.step();
      schedule.step();
      const int64_t samples = sampler.global_batch();
      sampler.step();
      ++step;

      const double loss_here = loss.item<double>();
      averages.add("train_loss", loss_here, batch.size());
      epoch_samples += samples;
      if (first) {
        record->on_step({.step = step,
                         .samples = samples,
                         .seconds = seconds_since(step_begin),
                         .exposed_communication_seconds = model.stats().exposed_communication_seconds});
        progress->update(step, loss_here, samples);
      }
      step_begin = std::chrono::steady_clock::now();
      if (step % kStepsPerRecord == 0 || sampler.steps_left() == 0) {
        const double mean = averages.reduce(comm).at("train_loss").value;
        averages.clear();
        if (first)
          record->write(
              "step",
              {{"step", step}, {"epoch", epochs_done()}, {"train_loss", mean}, {"lr", schedule.rate_at(step - 1)}});
      }
      const bool make_room = preemption.requested(comm);
      if (make_room || (options.save_every > 0 && step % options.save_every == 0)) save();
      if (make_room) {
        if (first) {
          progress->finish();
          record->write("preempted", {{"step", step}, {"epoch", epochs_done()}, {"checkpoint", newest_checkpoint}});
          std::printf("told to make room at step %lld: saved in %s\n", static_cast<long long>(step),
                      newest_checkpoint.c_str());
        }
        return cohort::kRequeueStatus;
      }
    }
    const double epoch_seconds = seconds_since(epoch_begin);
    training_seconds += epoch_seconds;
    training_samples += epoch_samples;
    const double speed_here = static_cast<double>(epoch_samples) / epoch_seconds;
    if (whole_epoch) speeds.push_back(speed_here);
    sampler.next_epoch();

    score = evaluate(*net, digits.test, comm);
    save();
    if (!first) continue;
    record->write("epoch", {{"step", step},
                            {"epoch", sampler.epoch()},
                            {"test_loss", score.loss},
                            {"test_accuracy", score.accuracy},
                            {"seconds", epoch_seconds},
                            {"samples_per_second", speed_here},
                            {"checkpoint", newest_checkpoint}});
    record->write_communication();
    char text[160];
    std::snprintf(text, sizeof text, "epoch %lld: test loss %.4f, accuracy %.2f %%, %.0f samples/s",
                  static_cast<long long>(sampler.epoch()), score.loss, 100 * score.accuracy, speed_here);
    progress->line(text);
    progress->skip_time();
  }

  if (!first) return 0;
  progress->finish();
  const std::filesystem::path curves = options.out / "curves.svg";
  const std::filesystem::path weights = options.out / "weights.safetensors";
  cohort::save_weights(*net, weights.string());
  // The first epoch also warms up; the others tell the speed of a long run.
  const double speed = training_seconds > 0 ? static_cast<double>(training_samples) / training_seconds : 0;
  if (speeds.size() > 1) speeds.erase(speeds.begin());
  std::sort(speeds.begin(), speeds.end());
  const double steady = speeds.empty() ? 0 : speeds[speeds.size() / 2];
  record->write("end", {{"step", step},
                        {"epoch", sampler.epoch()},
                        {"test_loss", score.loss},
                        {"test_accuracy", score.accuracy},
                        {"training_seconds", training_seconds},
                        {"samples_per_second", speed},
                        {"steady_samples_per_second", steady},
                        {"record", record->file()},
                        {"curves", curves},
                        {"checkpoint", newest_checkpoint},
                        {"weights", weights}});
  cohort::track::plot(record->file(), curves);
  std::printf("accuracy    %.2f %% of %lld test images\n", 100 * score.accuracy,
              static_cast<long long>(digits.test.size()));
  std::printf("throughput  %.0f samples/s in training, on %d %s\n", speed, comm.size(),
              comm.size() == 1 ? "process" : "processes");
  std::printf("record      %s\ncurves      %s\n", record->file().c_str(), curves.c_str());
  std::printf("checkpoint  %s\nweights     %s\n", newest_checkpoint.c_str(), weights.c_str());
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
