#include "report.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <cstdio>

namespace {

double seconds_between(std::chrono::steady_clock::time_point begin, std::chrono::steady_clock::time_point end) {
  return std::chrono::duration<double>(end - begin).count();
}

std::string processes(int number) { return std::to_string(number) + (number == 1 ? " process" : " processes"); }

}  // namespace

// The share of the images used so far, in epochs.
double Report::epochs_done() const {
  return static_cast<double>(sampler_->epoch()) +
         static_cast<double>(sampler_->cursor()) / static_cast<double>(sampler_->size());
}

void Report::begin(const Options& options, cohort::Communicator& comm, const DigitSets& digits,
                   const cohort::data::DistributedSampler& sampler,
                   const std::optional<cohort::CheckpointInfo>& found) {
  processes_ = comm.size();
  sampler_ = &sampler;
  test_images_ = digits.test.size();
  out_ = options.out;
  if (found) {
    checkpoint_ = found->folder;
    step_ = found->progress.step;
  }
  record_.emplace(options.out / "run.jsonl", cohort::track::RunRecordOptions{
                                                 .program = "digits",
                                                 .world_size = comm.size(),
                                                 .parameters = {{"epochs", options.epochs},
                                                                {"batch_size", options.batch_per_process * comm.size()},
                                                                {"lr", options.lr},
                                                                {"seed", options.seed},
                                                                {"shift", options.shift},
                                                                {"threads", at::get_num_threads()},
                                                                {"train_images", digits.train.size()},
                                                                {"test_images", digits.test.size()},
                                                                {"torch", TORCH_VERSION}}});
  const bool resumed = step_ > 0;
  if (resumed) record_->write("resume", {{"step", step_}, {"epoch", epochs_done()}, {"checkpoint", checkpoint_}});
  comm.set_observer(&*record_);
  progress_.emplace(cohort::track::ProgressOptions{.steps_per_epoch = sampler.steps_per_epoch(),
                                                   .epochs = options.epochs,
                                                   .first_step = step_,
                                                   .first_epoch = sampler.epoch(),
                                                   .steps_left_in_first_epoch = sampler.steps_left()});
  progress_->line("digits: " + std::to_string(digits.train.size()) + " images, " + processes(comm.size()) + " of " +
                  std::to_string(at::get_num_threads()) + (at::get_num_threads() == 1 ? " thread, " : " threads, ") +
                  std::to_string(options.batch_per_process) + " images each per step" +
                  (resumed          ? ", going on after step " + std::to_string(step_)
                   : options.resume ? ", from the beginning"
                                    : ""));
}

void Report::begin_epoch() {
  if (!record_) return;
  whole_epoch_ = sampler_->cursor() == 0;
  epoch_samples_ = 0;
  epoch_begin_ = step_begin_ = steps_end_ = Clock::now();
}

void Report::step(int64_t step, double loss, int64_t samples, double waited) {
  if (!record_) return;
  step_ = step;
  steps_end_ = Clock::now();
  epoch_samples_ += samples;
  record_->on_step({.step = step,
                    .samples = samples,
                    .seconds = seconds_between(step_begin_, steps_end_),
                    .exposed_communication_seconds = waited});
  progress_->update(step, loss, samples);
  step_begin_ = Clock::now();
}

void Report::loss(double mean, double rate) {
  if (!record_) return;
  record_->write("step", {{"step", step_}, {"epoch", epochs_done()}, {"train_loss", mean}, {"lr", rate}});
  steps_end_ = Clock::now();
}

void Report::preempted() {
  if (!record_) return;
  progress_->finish();
  record_->write("preempted", {{"step", step_}, {"epoch", epochs_done()}, {"checkpoint", checkpoint_}});
  std::printf("preempted at step %lld: saved in %s\n", static_cast<long long>(step_), checkpoint_.c_str());
}

void Report::end_epoch(const Score& score) {
  if (!record_) return;
  const double seconds = seconds_between(epoch_begin_, steps_end_);
  const double speed = static_cast<double>(epoch_samples_) / seconds;
  seconds_ += seconds;
  samples_ += epoch_samples_;
  if (whole_epoch_) speeds_.push_back(speed);
  record_->write("epoch", {{"step", step_},
                           {"epoch", sampler_->epoch()},
                           {"test_loss", score.loss},
                           {"test_accuracy", score.accuracy},
                           {"seconds", seconds},
                           {"samples_per_second", speed},
                           {"checkpoint", checkpoint_}});
  record_->write_communication();
  char text[160];
  std::snprintf(text, sizeof text, "epoch %lld: test loss %.4f, accuracy %.2f %%, %.0f samples/s",
                static_cast<long long>(sampler_->epoch()), score.loss, 100 * score.accuracy, speed);
  progress_->line(text);
  progress_->skip_time();
}

void Report::end(const Score& score) {
  if (!record_) return;
  progress_->finish();
  const std::filesystem::path weights = out_ / "weights.safetensors";
  const double speed = seconds_ > 0 ? static_cast<double>(samples_) / seconds_ : 0;
  // The first epoch also warms up; the others have the speed of a long run.
  if (speeds_.size() > 1) speeds_.erase(speeds_.begin());
  std::sort(speeds_.begin(), speeds_.end());
  const double steady = speeds_.empty() ? 0 : speeds_[speeds_.size() / 2];
  record_->write("end", {{"step", step_},
                         {"epoch", sampler_->epoch()},
                         {"test_loss", score.loss},
                         {"test_accuracy", score.accuracy},
                         {"training_seconds", seconds_},
                         {"samples_per_second", speed},
                         {"steady_samples_per_second", steady},
                         {"record", record_->file()},
                         {"checkpoint", checkpoint_},
                         {"weights", weights}});
  std::printf("accuracy    %.2f %% of %lld test images\n", 100 * score.accuracy, static_cast<long long>(test_images_));
  std::printf("throughput  %.0f samples/s in training, on %s\n", steady > 0 ? steady : speed,
              processes(processes_).c_str());
  std::printf("record      %s\n", record_->file().c_str());
  std::printf("checkpoint  %s\nweights     %s\n", checkpoint_.c_str(), weights.c_str());
}
