// Two ranks that are threads, with different data, train a layer: the replicas must stay equal to the bit, and learn.
#include <cohort/torch.h>
#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <vector>

torch::Tensor sum_of(cohort::Communicator& comm, const torch::Tensor& tensor);  // part/part.cpp

int main() {
  std::vector<torch::Tensor> weights(2);
  std::vector<float> losses(2);
  std::vector<int64_t> sums(2);
  cohort::run_on_threads(2, [&](cohort::Communicator comm) {
    const auto me = static_cast<std::size_t>(comm.rank());
    const torch::Tensor inputs = torch::eye(8).slice(0, comm.rank() * 4, comm.rank() * 4 + 4);
    const torch::Tensor targets = inputs.sum(1, true) * 2;
    torch::nn::Linear layer(8, 1);
    cohort::nn::DistributedDataParallel model(layer, comm);
    torch::optim::SGD optimizer(model.parameters(), 0.5);
    for (int step = 0; step < 50; ++step) {
      model.zero_grad();
      const torch::Tensor loss = torch::mse_loss(model(inputs), targets);
      loss.backward();
      optimizer.step();
      losses[me] = loss.item<float>();
    }
    weights[me] = layer->weight.detach().clone();

    // As in Python: the communicator's collectives take tensors.
    const torch::Tensor sum = sum_of(comm, torch::full({3}, comm.rank() + 1));
    comm.broadcast(sum, {.root = 1}).wait();
    const torch::Tensor all = comm.all_gather(sum);
    const torch::Tensor part = torch::empty({3}, all.options());
    comm.reduce_scatter(all.flatten(), part).wait();
    sums[me] = part.sum().item<int64_t>();
  });
  const bool equal = torch::equal(weights[0], weights[1]);
  std::printf("replicas %s, loss %.6f and %.6f\n", equal ? "equal" : "DIFFERENT", losses[0], losses[1]);
  if (sums != std::vector<int64_t>{18, 18}) return 2;
  return equal && losses[0] < 0.1F && losses[1] < 0.1F ? 0 : 1;
}
