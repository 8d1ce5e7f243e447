// The bubble of each schedule of cohort::nn::Pipeline, with stages that sleep: forward, the backward of the input and
// that of the parameters take the same time, so that theory says how long ranks idle.
//
//   cohort run -np 4 pipeline_bubble [MILLISECONDS [MICRO-BATCHES [STEPS]]]
#include <cohort/init.h>
#include <cohort/torch/pipeline.h>

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using cohort::pipeline::Schedule;

double slept = 0;  // seconds, of this rank

void sleep_for(double seconds) {
  const auto begin = Clock::now();
  std::this_thread::sleep_until(begin +
                                std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  slept += std::chrono::duration<double>(Clock::now() - begin).count();
}

/// The identity, with a backward that sleeps.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, double seconds) {
    context->saved_data["seconds"] = seconds;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    sleep_for(context->saved_data["seconds"].toDouble());
    return {gradients[0], at::Tensor()};
  }
};

struct SleepingStageImpl : torch::nn::Module {
  explicit SleepingStageImpl(double seconds) : seconds_(seconds) {
    before_ = register_parameter("before", at::ones({256}));
    weight_ = register_parameter("weight", at::ones({256}));
  }
  at::Tensor forward(const at::Tensor& x) {
    sleep_for(seconds_);
    return Sleep::apply(x + before_, seconds_) + Sleep::apply(weight_, seconds_);
  }

 private:
  double seconds_;
  at::Tensor before_, weight_;
};
TORCH_MODULE(SleepingStage);

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int at, int otherwise) { return argc > at ? std::atoi(argv[at]) : otherwise; };
  const double seconds = number(1, 50) / 1000.0;
  const int micro_batches = number(2, 16), steps = number(3, 3);
  at::set_num_threads(1);
  cohort::Communicator comm = cohort::init();
  const at::Tensor batch = at::ones({4L * micro_batches, 256});
  for (const auto& [schedule, chunks] : {std::pair(Schedule::GPipe, 1), std::pair(Schedule::OneFOneB, 1),
                                         std::pair(Schedule::Interleaved, 2), std::pair(Schedule::ZeroBubble, 1)}) {
    std::vector<cohort::nn::PipelineLayer> layers;
    for (int i = 0; i < comm.size() * chunks; ++i) {
      layers.emplace_back([&, part = chunks] { return SleepingStage(seconds / part); });
    }
    cohort::nn::Pipeline pipeline(layers, comm,
                                  {.schedule = schedule,
                                   .micro_batches = micro_batches,
                                   .chunks = chunks,
                                   .loss = [](const at::Tensor& y, const at::Tensor&) { return y.mean(); }});
    const cohort::pipeline::Layout layout{schedule, comm.size(), micro_batches, chunks};
    const std::vector<cohort::pipeline::StageCost> costs(static_cast<std::size_t>(layout.stages()));
    const double theory = 100 * expect(layout, costs).bubble;
    std::vector<double> bubbles;
    double took = 0;
    for (int step = -1; step < steps; ++step) {  // the first: shapes are exchanged
      comm.barrier().wait();
      slept = 0;
      const auto begin = Clock::now();
      (void)pipeline.step(batch, batch);
      comm.barrier().wait();
      took = std::chrono::duration<double>(Clock::now() - begin).count();
      double busy = slept;
      comm.all_reduce(std::span(&busy, 1)).wait();
      if (step >= 0) bubbles.push_back(100 * (1 - busy / (comm.size() * took)));
    }
    std::sort(bubbles.begin(), bubbles.end());
    const double bubble = bubbles[bubbles.size() / 2];
    if (comm.rank() == 0) {
      std::printf(
          "%-16s %d ranks, %d chunks, %d micro-batches: a step %.3f s, bubble %.2f %%, theory %.2f %% (%+.1f %% of "
          "it)\n",
          std::string(to_string(schedule)).c_str(), comm.size(), chunks, micro_batches, took, bubble, theory,
          100 * (bubble / theory - 1));
      std::fflush(stdout);
    }
  }
  return 0;
}
