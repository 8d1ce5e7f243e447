// Proximal policy optimisation (Schulman et al. 2017, arXiv:1707.06347) on any number of processes. Each has one
// learner and several actors, which are threads. A policy network and a value network learn side by side.
#include <cohort/torch.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <future>
#include <memory>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace {

constexpr double kDiscount = 0.98, kTrace = 0.9, kClip = 0.2;  // gamma, lambda and epsilon of the papers
constexpr int64_t kSteps = 256, kLongest = 500;                // of an actor in an iteration; of an episode
constexpr int64_t kEpochs = 6, kMinibatch = 256;               // a minibatch is of all ranks together
// Columns of an actor's notes of its steps, which begin with the 4 numbers of a state.
constexpr int64_t kNext = 4, kAction = 8, kLogProb = 9, kFallen = 10, kReturn = 11, kColumns = 12;

struct Options {
  int64_t actors = 8, iterations = 50;
  uint64_t seed = 1;
  double until = 195;
  bool ahead = false;
};

/// A cart with a pole on it, pushed to the left or right 50 times a second. The equations are those of Barto, Sutton
/// and Anderson, "Neuronlike adaptive elements that can solve difficult learning control problems" (1983), without
/// friction. The reward of each step is 1.
struct CartPole {
  std::array<float, 4> state = {};  // place and speed of the cart, angle of the pole and its speed
  int64_t steps = 0;

  void begin(std::mt19937& random) {
    for (float& value : state) value = std::uniform_real_distribution<float>(-0.05F, 0.05F)(random);
    steps = 0;
  }
  /// Returns true if the pole has fallen, or the cart has left the track.
  bool push(bool right) {
    constexpr float gravity = 9.8F, pole = 0.1F, all = 1.1F, half_length = 0.5F, seconds = 0.02F;  // masses in kg
    auto& [x, speed, angle, turning] = state;
    const float sine = std::sin(angle), cosine = std::cos(angle);
    const float force = ((right ? 10.F : -10.F) + pole * half_length * turning * turning * sine) / all;
    const float turned = (gravity * sine - cosine * force) / (half_length * (4.F / 3.F - pole * cosine * cosine / all));
    x += seconds * speed;
    speed += seconds * (force - pole * half_length * turned * cosine / all);
    angle += seconds * turning;
    turning += seconds * turned;
    ++steps;
    return std::abs(x) > 2.4F || std::abs(angle) > 0.2095F;  // 12 degrees
  }
};

torch::nn::Sequential network(int64_t outputs) {
  return torch::nn::Sequential(torch::nn::Linear(4, 64), torch::nn::Tanh(), torch::nn::Linear(64, 64),
                               torch::nn::Tanh(), torch::nn::Linear(64, outputs));
}

/// Plays one episode after the other; the next call goes on in the middle of one.
struct Actor {
  std::mt19937 random;
  CartPole game;

  explicit Actor(uint64_t seed) : random(static_cast<uint32_t>(seed)) { game.begin(random); }
  /// Returns notes [kSteps, kColumns]: the state, the next one, the action and its logarithm of a probability, whether
  /// the pole has fallen, and the return of an episode that has ended with this step, else 0.
  at::Tensor play(const std::shared_ptr<torch::nn::SequentialImpl>& policy) {
    const torch::NoGradGuard no_grad;  // The mode is each thread's own.
    at::Tensor notes = torch::zeros({kSteps, kColumns});
    for (int64_t step = 0; step < kSteps; ++step) {
      float* const note = notes.data_ptr<float>() + step * kColumns;
      std::copy(game.state.begin(), game.state.end(), note);
      const at::Tensor log_probs = torch::log_softmax(policy->forward(notes[step].narrow(0, 0, kNext)), 0);
      const float* const log_prob = log_probs.data_ptr<float>();
      const bool right = std::uniform_real_distribution<float>()(random) < std::exp(log_prob[1]);
      const bool fallen = game.push(right);
      std::copy(game.state.begin(), game.state.end(), note + kNext);
      note[kAction] = right ? 1 : 0;
      note[kLogProb] = log_prob[right ? 1 : 0];
      note[kFallen] = fallen ? 1 : 0;
      if (!fallen && game.steps < kLongest) continue;
      note[kReturn] = static_cast<float>(game.steps);
      game.begin(random);
    }
    return notes;
  }
};

/// Advantages (Schulman et al. 2016, arXiv:1506.02438), and what the value network is to say, from notes [actors,
/// kSteps, kColumns]. An episode that is cut off is worth what that network says of its last state.
std::pair<at::Tensor, at::Tensor> estimate(const at::Tensor& notes, torch::nn::Sequential& value) {
  const torch::NoGradGuard no_grad;
  const at::Tensor values = value->forward(notes.narrow(2, 0, kNext)).squeeze(2);
  const at::Tensor next = value->forward(notes.narrow(2, kNext, kNext)).squeeze(2);
  const at::Tensor advantages = 1 + kDiscount * next * (1 - notes.select(2, kFallen)) - values;
  const at::Tensor factors = kDiscount * kTrace * notes.select(2, kReturn).eq(0);
  for (int64_t step = notes.size(1) - 2; step >= 0; --step)
    advantages.select(1, step).add_(factors.select(1, step) * advantages.select(1, step + 1));
  return {advantages.flatten(), (advantages + values).flatten()};
}

void train(const Options& options) {
  cohort::Communicator comm = cohort::init();
  torch::set_num_threads(1);  // The actors are threads already.
  if (options.actors % comm.size() != 0 || kMinibatch % comm.size() != 0)
    throw std::runtime_error("the number of processes has to divide 256 and the number of actors");
  const int64_t own = options.actors / comm.size(), part = kMinibatch / comm.size();
  torch::manual_seed(options.seed);
  torch::nn::Sequential policy_net = network(2), value_net = network(1);
  cohort::nn::DistributedDataParallel policy(policy_net, comm), value(value_net, comm);
  std::vector<at::Tensor> parameters = policy.parameters();
  for (const at::Tensor& parameter : value.parameters()) parameters.push_back(parameter);
  torch::optim::Adam optimizer(parameters, torch::optim::AdamOptions(1e-3));

  // An actor is numbered among those of all ranks, so that what it draws does not depend on the number of processes.
  std::vector<Actor> actors;
  for (int64_t i = 0; i < own; ++i)
    actors.emplace_back(1000003 * options.seed + static_cast<uint64_t>(comm.rank() * own + i));
  std::vector<std::future<at::Tensor>> playing;
  const auto begin_to_play = [&] {
    // Actors have a copy, since the learner may change the policy meanwhile.
    const auto copy = std::dynamic_pointer_cast<torch::nn::SequentialImpl>(policy_net->clone());
    playing.clear();
    for (Actor& actor : actors)  // A thread each; its future has the notes, or its exception.
      playing.push_back(std::async(std::launch::async, &Actor::play, &actor, copy));
  };

  // Each rank has an order of its own for its own samples.
  auto shuffle =
      torch::make_generator<torch::CPUGeneratorImpl>(1000003 * options.seed + static_cast<uint64_t>(comm.rank()));
  double mean_return = 0;
  if (options.ahead) begin_to_play();
  for (int64_t iteration = 1; iteration <= options.iterations && mean_return < options.until; ++iteration) {
    if (!options.ahead) begin_to_play();
    std::vector<at::Tensor> parts;
    for (std::future<at::Tensor>& actor : playing) parts.push_back(actor.get());
    if (options.ahead) begin_to_play();

    const at::Tensor notes = torch::stack(parts), all = notes.flatten(0, 1);
    auto [advantages, targets] = estimate(notes, value_net);
    // Advantages are normalised over all ranks: with a mean of its own, each rank would follow another objective.
    const at::Tensor returns = all.select(1, kReturn);
    std::array<double, 5> sums = {advantages.sum().item<double>(), advantages.square().sum().item<double>(),
                                  static_cast<double>(advantages.numel()), returns.sum().item<double>(),
                                  returns.gt(0).sum().item<double>()};
    comm.all_reduce(std::span(sums)).wait();
    const double mean = sums[0] / sums[2];
    advantages = (advantages - mean) / std::sqrt(sums[1] / sums[2] - mean * mean);
    if (sums[4] > 0) mean_return = sums[3] / sums[4];  // the same on all ranks, which so end together
    if (comm.rank() == 0) std::printf("iteration %ld: mean return %.1f\n", iteration, mean_return);
    std::fflush(stdout);

    for (int64_t epoch = 0; epoch < kEpochs; ++epoch) {
      // All ranks have equally many samples, and so make equally many steps.
      for (const at::Tensor& rows : torch::randperm(all.size(0), shuffle, torch::kLong).split(part)) {
        const at::Tensor batch = all.index_select(0, rows), states = batch.narrow(1, 0, kNext);
        const at::Tensor log_probs = torch::log_softmax(policy(states), 1);
        const at::Tensor chosen = log_probs.gather(1, batch.narrow(1, kAction, 1).to(torch::kLong)).squeeze(1);
        const at::Tensor ratio = (chosen - batch.select(1, kLogProb)).exp();
        const at::Tensor advantage = advantages.index_select(0, rows);
        const at::Tensor gain = torch::min(ratio * advantage, ratio.clamp(1 - kClip, 1 + kClip) * advantage).mean();
        const at::Tensor entropy = -(log_probs.exp() * log_probs).sum(1).mean();
        const at::Tensor error = torch::mse_loss(value(states).squeeze(1), targets.index_select(0, rows));
        optimizer.zero_grad();
        (0.5 * error - gain - 0.01 * entropy).backward();  // through both networks; each averages its gradients
        optimizer.step();
      }
    }
  }
  if (comm.rank() == 0) std::puts(mean_return < options.until ? "not learned yet" : "learned");
  policy.require_same_parameters();
  value.require_same_parameters();
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app("Learns to balance a pole on a cart, by proximal policy optimisation.");
  app.add_option("--actors", options.actors, "threads that play, of all ranks together")->check(CLI::PositiveNumber);
  app.add_option("--iterations", options.iterations, "at most");
  app.add_option("--until", options.until, "the mean return of an iteration's episodes that ends the training");
  app.add_option("--seed", options.seed);
  app.add_flag("--ahead", options.ahead, "actors play the next iteration's samples while the learner learns");
  CLI11_PARSE(app, argc, argv);
  try {
    train(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ppo: %s\n", error.what());
    return 1;
  }
}
