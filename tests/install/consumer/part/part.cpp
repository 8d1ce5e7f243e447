#include <cohort/torch.h>

torch::Tensor sum_of(cohort::Communicator& comm, const torch::Tensor& tensor);
torch::Tensor sum_of(cohort::Communicator& comm, const torch::Tensor& tensor) {
  torch::Tensor sum = tensor.clone();
  comm.all_reduce(sum).wait();
  return sum;
}
