// A worker of an elastic training with libtorch, which is lost where it is told to: ELASTIC_KILL
// "WORKER@STEP:PHASE,..." with the phases forward, backward, applied (between the optimizer's step and State::step) and
// step; with ELASTIC_SEED at random, one time in 300, but never all of a world, and with ELASTIC_RANK_0_STAYS not
// rank 0; ELASTIC_ENDS_WITH_0: it ends so instead. ELASTIC_DILOCO: steps between synchronisations, instead of
// DistributedDataParallel; phase applied of the last is before it. ELASTIC_VIRTUAL: virtual ranks, with dropout. Ends
// with a line of what it has trained: steps, and the digest of the parameters with a key that all know.
//
//   elastic_training_peer SAMPLES BATCH EPOCHS MILLISECONDS-A-STEP
#include <gtest/gtest.h>

#include "torch/test_models.h"

#include <cohort/digest.h>
#include <cohort/torch/elastic.h>
#include <cohort/torch/local_sgd.h>
#include <cohort/torch/nn.h>

#include <fmt/format.h>
#include <torch/nn/modules/dropout.h>
#include <torch/optim/adam.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <thread>

namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int rank = 0, size = 1;

void lost_at(std::int64_t step, const char* phase) {
  if (const std::string seed = variable("ELASTIC_SEED"); !seed.empty()) {
    const auto draw = [&](const std::string& what) { return std::hash<std::string>()(seed + what); };
    const bool is_last = rank == 0 && !variable("ELASTIC_RANK_0_STAYS").empty();
    const bool stays =
        is_last || draw(std::to_string(step)) % static_cast<std::size_t>(size) == static_cast<std::size_t>(rank);
    if (!stays && draw(fmt::format("{} {} {}", variable("COHORT_WORKER"), step, phase)) % 300 == 0) std::raise(SIGKILL);
  }
  static const std::string plan = "," + variable("ELASTIC_KILL") + ",";
  if (plan.find(fmt::format(",{}@{}:{},", variable("COHORT_WORKER"), step, phase)) == plan.npos) return;
  if (!variable("ELASTIC_ENDS_WITH_0").empty()) ::_exit(0);
  std::raise(SIGKILL);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const std::int64_t samples = std::atoll(argv[1]), batch = std::atoll(argv[2]), epochs = std::atoll(argv[3]);
  const auto pause = std::chrono::milliseconds(std::atoi(argv[4]));
  at::set_num_threads(1);
  // A newcomer has other weights, and is to have none of them in the end.
  auto net = cohort::testing::with_values(cohort::testing::Mlp(), std::atof(variable("COHORT_WORKER").c_str()));
  torch::optim::Adam optimizer(net->parameters(), 1e-3);
  const int every = std::atoi(variable("ELASTIC_DILOCO").c_str());
  const std::int64_t virtual_ranks = std::atoll(variable("ELASTIC_VIRTUAL").c_str());
  cohort::data::DistributedSampler sampler(samples, {.batch_size = batch, .virtual_ranks = virtual_ranks});
  // Learning that is as fast as Adam's alone, so that sums can be compared.
  cohort::optim::DiLoCo diloco(*net, optimizer,
                               {.sync_every = std::max(every, 1),
                                .outer_momentum = 0.5,
                                .fragments = every > 0 ? 2 : 1,
                                .fragment_sync_delay = every > 0 ? 1 : 0,
                                .fragment_update_alpha = 0.5});
  std::int64_t taken = 0;
  cohort::elastic::State state;
  if (every > 0) {
    state.add("diloco", diloco);
  } else {
    state.add("model", *net).add("optimizer", optimizer, *net);
  }
  state.add("sampler", sampler);
  std::int64_t step = 0;
  net->parameters().back().register_hook([&step](const at::Tensor& gradient) {
    lost_at(step, "backward");
    return gradient;
  });
  double loss_sum = 0;
  state.add("loss", loss_sum);
  const auto train = [&](cohort::elastic::World& world) {
    rank = world.rank();
    size = world.size();
    std::printf("world %d of %d in epoch %ld\n", world.rank(), world.size(),
                static_cast<long>(world.epoch().value_or(0)));
    std::fflush(stdout);
    using Model = cohort::nn::DistributedDataParallel<cohort::testing::MlpImpl>;
    std::optional<Model> model;
    if (every == 0) {
      model.emplace(
          net, world.communicator(),
          cohort::nn::DistributedDataParallelOptions{
              .bucket_bytes = 1200, .first_bucket_bytes = 300, .sampler = &sampler, .virtual_ranks = virtual_ranks});
    }
    for (; sampler.epoch() < epochs; sampler.next_epoch()) {
      while (const auto indices = sampler.next_batch()) {
        step = state.steps() + 1;
        std::this_thread::sleep_for(pause);
        const at::Tensor at = at::tensor(*indices, at::kLong).to(at::kDouble).reshape({-1, 1});
        const at::Tensor x = at::sin(at * 0.37 + at::arange(5, at::kDouble)),
                         y = at::cos(at * 0.11 + at::arange(3, at::kDouble));
        lost_at(step, "forward");
        optimizer.zero_grad();
        if (virtual_ranks > 0) {
          if (indices->empty())
            model->step_without_samples();
          else
            cohort::testing::loss_of(at::dropout((*model)(x), 0.1, true), y).backward();
          const bool complete = model->step_complete();
          if (complete) optimizer.step();
          sampler.step();
          if (!complete) continue;
        } else {
          const bool any = !indices->empty() || every == 0;
          if (any) cohort::testing::loss_of(model ? (*model)(x) : net(x), y).backward();
          optimizer.step();
        }
        ++taken;
        if (every > 0) diloco.step(static_cast<double>(indices->size()));
        lost_at(step, "applied");
        state.step();
        lost_at(step, "step");
      }
    }
    if (every > 0) diloco.synchronize();
  };
  cohort::elastic::Options options;
  if (variable("ELASTIC_NO_SAVE").empty()) {
    options.save = [&](cohort::elastic::World&) {
      std::printf("saved after step %ld\n", static_cast<long>(state.steps()));
    };
  }
  const int status = cohort::elastic::run(state, train, options);
  std::printf("took %ld steps\n", static_cast<long>(taken));
  cohort::DigestKey key;
  key.fill(7);
  cohort::Digest digest{};
  double sum = 0;
  for (const at::Tensor& parameter : net->parameters()) {
    const cohort::Digest one = cohort::digest_of(
        {parameter.data_ptr(), static_cast<std::int64_t>(parameter.nbytes()), cohort::DType::UInt8}, key);
    digest[0] = digest[0] * 31 + one[0] + one[1];
    sum += parameter.abs().sum().item<double>();
  }
  std::printf("ended with %d after %ld steps: %016lx %.9f\n", status, static_cast<long>(state.steps()),
              static_cast<unsigned long>(digest[0]), sum);
  return status;
}
