// Parameters of a module on parameter servers: every worker reads them, and pushes its gradients. <cohort/ps.h>
// describes the servers. One thread at a time.
#pragma once

#include <cohort/torch/torch_api.h>

#include <cohort/ps.h>

#include <string>
#include <vector>

namespace cohort::ps {

struct DistributedOptimizerOptions {
  Optimizer optimizer = optim::Sgd{};  ///< not RowAdagrad
  Consistency consistency = {};
  std::string prefix = {};  ///< of the variables' names on the servers
};

/// Keeps a module's parameters on the servers, and steps them there.
///
///   auto client = cohort::ps::Client::connect();
///   cohort::ps::DistributedOptimizer optimizer(client, net->named_parameters(),
///                                              {.optimizer = cohort::ps::optim::Sgd{.lr = 0.1}});
///   ...  optimizer.zero_grad();  loss.backward();  optimizer.step();
///
/// All workers make one. The parameters become worker 0's, or, if training is under way, the servers'. With Mode::Sync
/// the gradients of all workers are averaged into one step; in other modes each worker's gradients are a step of their
/// own. Buffers (running means of a batch normalization) remain each worker's own. Python has the same as
/// cohort.ps.torch.DistributedOptimizer.
class DistributedOptimizer {
 public:
  /// `named_parameters`: float32, contiguous, on the CPU, with the same names and shapes at all workers; a parameter
  /// with several names counts under the first. The client must outlive the optimizer. Throws InvalidArgument for other
  /// parameters, and as Client::variable.
  DistributedOptimizer(Client& client, const torch::OrderedDict<std::string, at::Tensor>& named_parameters,
                       const DistributedOptimizerOptions& options = {});

  /// Copies the servers' values to the parameters. Waits as the consistency says.
  void pull();
  void zero_grad(bool set_to_none = true);
  /// Pushes the gradients, ends this worker's clock, and reads the parameters for the next step. Parameters without a
  /// gradient are not stepped. Throws InvalidArgument for a sparse gradient, NonFinite naming the parameter, and as
  /// Work::wait and Client::clock.
  void step(const PushOptions& options = {});

 private:
  struct Served {
    std::string name;
    at::Tensor parameter;
    Variable variable;
  };
  Client& client_;
  double scale_ = 1;
  std::vector<Served> served_;
};

}  // namespace cohort::ps
