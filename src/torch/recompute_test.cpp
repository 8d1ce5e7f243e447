// Recomputation: the same bits as without it, in less memory, alone and under DistributedDataParallel.
#include <cohort/error.h>
#include <cohort/torch/autograd.h>
#include <cohort/torch/recompute.h>

#include <gtest/gtest.h>

#include "torch/test_models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace cohort {
namespace {

using nn::checkpoint;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

void seed(std::uint64_t value) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_current_seed(value);
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) {
    gradients.push_back(tensor.grad().defined() ? tensor.grad().clone() : at::zeros({}));
    tensor.mutable_grad().reset();
  }
  return gradients;
}

// Expects the same loss and gradients of `run` with and without checkpoints.
void expect_same(const std::vector<at::Tensor>& leaves, const std::function<at::Tensor(bool)>& run) {
  std::vector<std::vector<at::Tensor>> results;
  for (const bool with : {false, true}) {
    seed(7);
    const at::Tensor loss = run(with);
    at::rand({3});  // the random state has moved on before the backward
    loss.backward();
    std::vector<at::Tensor> result = gradients_of(leaves);
    result.push_back(loss.detach());
    result.push_back(at::rand({1}));  // recomputation does not move the random state
    results.push_back(std::move(result));
  }
  expect_equal(results[0], results[1]);
}

template <class Function, class... Inputs>
auto maybe(bool with, Function function, Inputs... inputs) {
  return with ? checkpoint(function, inputs...) : function(inputs...);
}

TEST(Checkpoint, TheSameBits) {
  Mlp net = with_values(Mlp(), 0);
  const at::Tensor x = pattern({4, 5}, 1).requires_grad_(true);
  std::vector<at::Tensor> leaves = net->parameters();
  leaves.push_back(x);
  const auto forward = [&](const at::Tensor& h) { return net->forward(h); };
  expect_same(leaves, [&](bool with) { return maybe(with, forward, x).square().sum(); });
  // Dropout drops the same elements.
  expect_same(leaves, [&](bool with) {
    return maybe(
               with, [&](const at::Tensor& h) { return at::dropout(net->forward(h), 0.5, true); }, x)
        .square()
        .sum();
  });
  // Checkpoints that are nested, or follow one another, with shared parameters, and with inputs that need no gradient.
  expect_same(leaves, [&](bool with) {
    const auto inner = [&](const at::Tensor& h) { return at::dropout(at::tanh(net->second(h)), 0.5, true); };
    const auto outer = [&net, inner, with](const at::Tensor& h) {
      return at::tanh(maybe(with, inner, at::tanh(net->first(h))) * 2);
    };
    const at::Tensor h = maybe(with, outer, pattern({4, 5}, 2));
    return maybe(with, inner, h).sum() + maybe(with, forward, x).sum();
  });
  // Tensors that the function uses besides its inputs; outputs that are an input, a parameter, or an existing tensor.
  expect_same(leaves, [&](bool with) {
    const at::Tensor scale = at::exp(net->first->bias).sum();
    const auto [same, parameter, there, y] = maybe(
        with,
        [&net, scale](const at::Tensor& h) {
          return std::make_tuple(h, net->last->bias, scale, net->forward(h) * scale);
        },
        x);
    return (same * 3).sum() + (parameter * 5).sum() + there + at::sin(y).sum();
  });
  // All kinds of inputs and outputs.
  expect_same(leaves, [&](bool with) {
    using Nested = std::pair<std::vector<at::Tensor>, std::optional<at::Tensor>>;
    const auto function = [&](const Nested& in, double factor, const at::Tensor& none) {
      EXPECT_FALSE(none.defined());
      const at::Tensor sum = in.first[0] * factor + in.first[1];
      return std::make_tuple(Nested{{net->forward(sum), at::ones({2}, at::kLong)}, std::nullopt}, at::Tensor(), sum);
    };
    const auto [nested, none, sum] = maybe(with, function, Nested{{x, x * 2}, x}, 0.5, at::Tensor());
    EXPECT_FALSE(none.defined() || nested.second.has_value() || nested.first[1].requires_grad());
    return nested.first[0].sum() + sum.square().sum();
  });
  {
    const at::NoGradGuard no_grad;
    int runs = 0;
    EXPECT_FALSE(checkpoint([&](const at::Tensor& h) { return ++runs, net->forward(h); }, x).requires_grad());
    EXPECT_EQ(runs, 1);
  }
}

TEST(Checkpoint, GradRetainGraphAndHooks) {
  Mlp net = with_values(Mlp(), 0);
  const at::Tensor x = pattern({4, 5}, 1).requires_grad_(true);
  int hooks = 0, runs = 0, again = 0;
  net->second->weight.register_hook([&](const at::Tensor& gradient) { return ++hooks, gradient * 2; });
  const auto forward = [&](const at::Tensor& h) {
    ++runs;
    again += nn::recomputing() ? 1 : 0;
    return net->forward(h);
  };
  const auto grad = [&](const at::Tensor& loss, bool retain) {
    return torch::autograd::grad({loss}, {x, net->second->weight}, {}, retain);
  };
  const std::vector<at::Tensor> plain = grad(net->forward(x).square().sum(), false);
  hooks = 0;
  const at::Tensor loss = checkpoint(forward, x).square().sum();
  expect_equal(grad(loss, true), plain);
  expect_equal(grad(loss, false), plain);
  EXPECT_EQ(std::make_tuple(runs, again), std::make_tuple(3, 2));
  // autograd::grad computes only the requested part of a backward: the input's gradient, or the weights' gradients.
  const at::Tensor split = checkpoint(forward, x).square().sum();
  expect_equal(torch::autograd::grad({split}, {x}, {}, true), {plain[0]});
  expect_equal(torch::autograd::grad({split}, {net->second->weight}, {}, false), {plain[1]});
  runs = again = 0;
  for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
  hooks = 0;
  std::vector<at::Tensor> hooked;
  for (const bool with : {false, true}) {
    maybe(with, forward, x).square().sum().backward();
    hooked.push_back(gradients_of({net->second->weight})[0]);
  }
  EXPECT_EQ(hooks, 2);
  expect_equal({hooked[1]}, {hooked[0]});
}

std::string refused(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

TEST(Checkpoint, WhatWouldBeWrongIsRefused) {
  Mlp net = with_values(Mlp(), 0);
  const at::Tensor x = pattern({4, 5}, 1).requires_grad_(true);
  const auto says = [](const at::Tensor& loss, const char* text, bool create_graph = false) {
    const std::string said = refused([&] { loss.backward({}, false, create_graph); });
    EXPECT_NE(said.find(text), std::string::npos) << said;
  };
  const auto forward = [&](const at::Tensor& h) { return net->forward(h); };
  says(checkpoint(forward, x).sum(), "double backward", true);
  at::Tensor loss = checkpoint(forward, x).sum();
  loss.backward();
  says(loss, "a second backward");
  loss = checkpoint(forward, x).sum();
  {
    const at::NoGradGuard no_grad;
    net->first->weight.mul_(2);
  }
  says(loss, "a parameter was changed");
  const char* const else_text = "the function did something else";
  const auto differs = [&](const std::function<at::Tensor(const at::Tensor&)>& first, const auto& again) {
    says(checkpoint([=](const at::Tensor& h) { return nn::recomputing() ? again(h) : first(h); }, x).sum(), else_text);
  };
  const auto twice = [](const at::Tensor& h) { return h * 2; };
  differs(forward, [&](const at::Tensor& h) { return net->forward(h).sum(1); });
  differs(twice, [](const at::Tensor& h) { return h.detach(); });
  differs(twice, [&](const at::Tensor& h) { return h * net->first->bias.sum(); });
  differs([&](const at::Tensor& h) { return h * x.sum(); }, twice);
  differs([&](const at::Tensor& h) { return h * x.sum(); },
          [&](const at::Tensor& h) { return h * net->first->bias.sum(); });
  // An input that was changed in place gives autograd's own error.
  const at::Tensor h = x * 2;
  loss = checkpoint(forward, h).sum();
  h.add_(1);
  EXPECT_THROW(loss.backward(), c10::Error);
  // An exception of the function in its second run is passed on, and changes nothing.
  loss = checkpoint(
             [](const at::Tensor& in) {
               if (nn::recomputing()) throw std::runtime_error("no");
               return in * 2;
             },
             x)
             .sum();
  EXPECT_THROW(loss.backward(), std::runtime_error);
  EXPECT_FALSE(nn::recomputing());
}

// Keeps a tensor for its backward, and counts the kept tensors.
struct Live {
  std::atomic<int> now{0}, most{0};
};

class Counted : public torch::autograd::Function<Counted> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, Live* live) {
    live->most = std::max<int>(live->most, ++live->now);
    const auto values = std::make_shared<std::vector<double>>(static_cast<std::size_t>(x.numel()));
    at::Tensor kept = at::from_blob(
        values->data(), x.sizes(), [values, live](void*) { --live->now; }, at::kDouble);
    kept.copy_(x);
    context->save_for_backward({kept});
    return x.square();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    return {gradients[0] * 2 * context->get_saved_variables()[0], {}};
  }
};

TEST(Checkpoint, KeepsInputsAlone) {
  constexpr int kBlocks = 6, kPerBlock = 5;
  Live live;
  const auto most = [&](bool with) {
    live.most = 0;
    const at::Tensor x = pattern({8}, 1).requires_grad_(true);
    at::Tensor h = x;
    for (int block = 0; block < kBlocks; ++block) {
      h = maybe(
          with,
          [&](at::Tensor in) {
            for (int i = 0; i < kPerBlock; ++i) in = Counted::apply(in, &live);
            return in;
          },
          h);
    }
    EXPECT_EQ(live.now, with ? 0 : kBlocks * kPerBlock);
    h.sum().backward();
    EXPECT_EQ(live.now, 0);
    return live.most.load();
  };
  EXPECT_EQ(most(false), kBlocks * kPerBlock);
  EXPECT_EQ(most(true), kPerBlock);
}

struct Blocks : torch::nn::Module {
  explicit Blocks(bool recompute) : with(recompute) {
    first = register_module("first", Mlp());
    last = register_module("last", Mlp());
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor y = maybe(
        with, [this](const at::Tensor& h) { return first->forward(h); }, x);
    const at::Tensor wide = at::cat({y, y.narrow(1, 0, 2)}, 1);
    const auto block = [this](const at::Tensor& h) { return last->forward(h); };
    return maybe(with, block, maybe(with, block, wide).repeat({1, 2}).narrow(1, 0, 5));  // shared
  }
  bool with;
  Mlp first{nullptr}, last{nullptr};
};

enum class Around { Blocks, Model, NoForward };

// Checkpoints in and around a DistributedDataParallel, and a loss that uses only parameters.
TEST(Checkpoint, UnderDistributedDataParallel) {
  for (const Around around : {Around::Blocks, Around::Model, Around::NoForward}) {
    run_on_threads(2, [&](Communicator comm) {
      std::vector<std::vector<at::Tensor>> results;
      for (const bool with : {false, true}) {
        auto net = std::make_shared<Blocks>(with && around == Around::Blocks);
        with_values(torch::nn::ModuleHolder<Blocks>(net), 0);
        nn::DistributedDataParallel<Blocks> model(net, comm, small_buckets());
        torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
        for (int step = 0; step < 4; ++step) {
          model.zero_grad();
          const Batch batch = batch_of(10 * step + comm.rank(), 4);
          const auto forward = [&](const at::Tensor& x) {
            return around == Around::NoForward ? net->forward(x) : model(x);
          };
          loss_of(maybe(with && around != Around::Blocks, forward, batch.x), batch.y).backward();
          optimizer.step();
        }
        EXPECT_EQ(model.stats().steps, 4);
        model.require_same_parameters();
        results.push_back(copies(net->parameters()));
      }
      expect_equal(results[0], results[1]);
    });
  }
}

// Collectives in the function are repeated, in the same way on all ranks.
TEST(Checkpoint, WithCollectives) {
  run_on_threads(3, [](Communicator comm) {
    const at::Tensor x = pattern({4, 5}, comm.rank()).requires_grad_(true);
    Mlp net = with_values(Mlp(), 0);
    std::vector<at::Tensor> leaves = net->parameters();
    leaves.push_back(x);
    std::vector<std::vector<at::Tensor>> results;
    for (const bool with : {false, true}) {
      const auto block = [&](const at::Tensor& h) {
        return autograd::all_gather(comm, net->forward(autograd::all_reduce(comm, h)));
      };
      maybe(with, block, at::sin(x)).square().sum().backward();
      results.push_back(gradients_of(leaves));
    }
    expect_equal(results[0], results[1]);
  });
}

}  // namespace
}  // namespace cohort
