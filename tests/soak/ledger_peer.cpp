// Trains a model that counts: one parameter per sample, from which every step takes 1 for each sample in its batch, so
// that the parameters say how often each sample was used. Beside it a ledger: a line per optimizer step and rank, with
// the samples of this rank, written before anything can be saved that contains the step. Saves often, goes on from the
// newest checkpoint with any number of ranks, and saves and ends when it is preempted. usage:
//   ledger_peer FOLDER ATTEMPT size=N epochs=E batch=B save-every=K pace-ms=P
#include <cohort/torch.h>

#include <fcntl.h>
#include <unistd.h>

#include <torch/optim/sgd.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

namespace {

/// Numbers of samples [n] to their parameters [n].
struct CountersImpl : torch::nn::Module {
  explicit CountersImpl(std::int64_t size) : counters(register_parameter("counters", at::zeros({size}, at::kDouble))) {}
  at::Tensor forward(const at::Tensor& samples) { return counters.index_select(0, samples); }
  at::Tensor counters;
};
TORCH_MODULE(Counters);

/// Whole lines, each there once `write` has returned, also if the process is killed then.
class Ledger {
 public:
  explicit Ledger(const std::string& path)
      : fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
    if (fd_ < 0) throw cohort::Error(cohort::ErrorCode::Io, "cannot write the ledger " + path);
  }
  ~Ledger() { ::close(fd_); }
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  void write(const std::string& line) const {
    const std::string whole = line + "\n";
    if (::write(fd_, whole.data(), whole.size()) != static_cast<ssize_t>(whole.size()))
      throw cohort::Error(cohort::ErrorCode::Io, "cannot write into the ledger");
  }

 private:
  int fd_;
};

std::string as_json(const std::vector<std::int64_t>& values) {
  std::string text = "[";
  for (const std::int64_t value : values) text += (text.size() > 1 ? "," : "") + std::to_string(value);
  return text + "]";
}

int train(const std::string& folder, const std::string& attempt, std::map<std::string, std::int64_t> numbers) {
  cohort::Preemption preemption;
  cohort::Communicator comm = cohort::init();
  torch::manual_seed(1);  // else libtorch draws a seed, and checkpoints hold the generator's state
  Counters net(numbers["size"]);
  cohort::data::DistributedSampler sampler(numbers["size"], comm, {.batch_size = numbers["batch"], .seed = 11});
  cohort::nn::DistributedDataParallel model(net, comm, {.sampler = &sampler});
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(1));
  cohort::CheckpointFolder checkpoints(comm, {.folder = folder + "/checkpoints"});

  std::int64_t step = 0;
  if (const auto from = checkpoints.load_latest(*net, &optimizer)) {
    step = from->progress.step;
    sampler.load_state(*from->progress.sampler);
  }
  const auto save = [&] {
    checkpoints.save(*net, &optimizer, {.step = step, .epoch = sampler.epoch(), .sampler = sampler.state()});
  };
  const Ledger ledger(folder + "/ledger/" + attempt + "." + std::to_string(comm.rank()));
  ledger.write("{\"from\":" + std::to_string(step) + ",\"ranks\":" + std::to_string(comm.size()) + "}");
  for (; sampler.epoch() < numbers["epochs"]; sampler.next_epoch()) {
    while (const auto samples = sampler.next_batch()) {
      const std::int64_t begin = sampler.cursor();
      // The gradient is the average over all ranks' samples: times their number it is 1 for each.
      for (auto& group : optimizer.param_groups())
        static_cast<torch::optim::SGDOptions&>(group.options()).lr(static_cast<double>(sampler.global_batch()));
      const at::Tensor loss = model(at::tensor(*samples, at::kLong)).mean();
      model.zero_grad();
      loss.backward();
      optimizer.step();
      sampler.step();
      ++step;
      ledger.write("{\"step\":" + std::to_string(step) + ",\"epoch\":" + std::to_string(sampler.epoch()) +
                   ",\"begin\":" + std::to_string(begin) + ",\"end\":" + std::to_string(sampler.cursor()) +
                   ",\"samples\":" + as_json(*samples) + "}");
      const bool make_room = preemption.requested(comm);
      if (make_room || step % numbers["save-every"] == 0) save();
      if (make_room) return cohort::kRequeueStatus;
      std::this_thread::sleep_for(std::chrono::milliseconds(numbers["pace-ms"]));
    }
  }
  save();
  if (comm.rank() == 0) {
    // Uses of each sample: the sums of 1s are exact to far less than a half.
    std::vector<std::int64_t> used;
    for (std::int64_t i = 0; i < numbers["size"]; ++i)
      used.push_back(static_cast<std::int64_t>(std::llround(-net->counters[i].item<double>())));
    Ledger(folder + "/used.json").write(as_json(used));
  }
  return 0;
}

}  // namespace

int main(int argc, char** arguments) {
  std::map<std::string, std::int64_t> numbers;
  for (int i = 3; i < argc; ++i) {
    const std::string_view word = arguments[i];
    const auto equals = word.find('=');
    numbers[std::string(word.substr(0, equals))] = std::atoll(arguments[i] + equals + 1);
  }
  try {
    return train(arguments[1], arguments[2], numbers);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ledger_peer: %s\n", error.what());
    return 1;
  }
}
