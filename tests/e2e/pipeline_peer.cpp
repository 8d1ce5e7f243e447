// A rank of a pipeline that trains until it ends: it says which process it is, and writes why it ended to error.RANK.
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/torch/pipeline.h>

#include <torch/nn/modules/linear.h>

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <string>

int main() {
  std::signal(SIGTERM, SIG_IGN);  // what the command sends when another has died: first it is said why
  at::set_num_threads(1);
  cohort::Communicator comm = cohort::init();
  torch::nn::Sequential net;
  for (int i = 0; i < comm.size(); ++i) net->push_back(torch::nn::Linear(64, 64));
  cohort::nn::Pipeline pipeline(net, comm,
                                {.schedule = cohort::pipeline::Schedule::ZeroBubble,
                                 .micro_batches = 8,
                                 .loss = [](const at::Tensor& y, const at::Tensor& t) { return at::mse_loss(y, t); }});
  const at::Tensor batch = at::ones({64, 64});
  const std::string rank = std::to_string(comm.rank());
  try {
    for (int step = 0;; ++step) {
      pipeline.zero_grad();
      (void)pipeline.step(batch, batch);
      if (step == 2) std::printf("rank %s is process %d\n", rank.c_str(), ::getpid());
      std::fflush(stdout);
    }
  } catch (const cohort::Error& error) {
    std::ofstream(".error." + rank) << to_string(error.code()) << ": " << error.what();
    std::rename((".error." + rank).c_str(), ("error." + rank).c_str());
  }
  return 1;
}
