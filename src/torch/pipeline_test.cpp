// Pipelines on ranks that are threads: gradients equal those of one process with any schedule; messages between stages;
// errors, and their effect on the other stages.
#include <cohort/error.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/pipeline.h>

#include <gtest/gtest.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/embedding.h>

#include "comm/testing/worlds.h"
#include "torch/split_backward.h"
#include "torch/test_models.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>

namespace cohort {
namespace {

using nn::Pipeline;
using nn::PipelineOptions;
using pipeline::Schedule;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

/// A layer that is a function.
struct FunctionImpl : torch::nn::Module {
  explicit FunctionImpl(std::function<at::Tensor(const at::Tensor&)> what) : function(std::move(what)) {}
  at::Tensor forward(const at::Tensor& x) { return function(x); }
  std::function<at::Tensor(const at::Tensor&)> function;
};
TORCH_MODULE(Function);

/// Ten layers, one of them BatchNorm, whose result depends on the micro-batch.
torch::nn::Sequential ten_layers(at::ScalarType type) {
  torch::nn::Sequential net(torch::nn::Linear(5, 17), torch::nn::Tanh(), torch::nn::Linear(17, 16),
                            torch::nn::BatchNorm1d(16), torch::nn::ReLU(), torch::nn::Linear(16, 16),
                            torch::nn::Linear(torch::nn::LinearOptions(16, 9).bias(false)), torch::nn::Tanh(),
                            torch::nn::BatchNorm1d(9), torch::nn::Linear(9, 3));
  net->to(type);
  return with_values(net, 0);
}

/// Tensors by their names in the whole model, of all ranks together.
struct Collected {
  std::mutex mutex;
  std::map<std::string, at::Tensor> tensors;
  void add(const torch::nn::Module& module, bool gradients = false) {
    const std::lock_guard lock(mutex);
    for (const auto& item : module.named_parameters()) {
      const at::Tensor& tensor = gradients ? item.value().grad() : item.value();
      tensors[item.key()] = tensor.defined() ? tensor.detach().clone() : at::Tensor();
    }
    for (const auto& item : module.named_buffers()) tensors["buffer " + item.key()] = item.value().detach().clone();
  }
};

void expect_same(const Collected& a, const Collected& b, const std::string& what) {
  ASSERT_EQ(a.tensors.size(), b.tensors.size()) << what;
  for (const auto& [name, tensor] : a.tensors) {
    ASSERT_EQ(b.tensors.count(name), 1U) << name;
    const at::Tensor& other = b.tensors.at(name);
    ASSERT_EQ(tensor.defined(), other.defined()) << what << ", " << name;
    if (tensor.defined()) {
      EXPECT_TRUE(at::equal(tensor, other)) << what << ", " << name;
    }
  }
}

/// Runs the micro-batches of a batch one after the other in this process.
double step_alone(torch::nn::Sequential& net, const Batch& batch, int micro_batches) {
  const auto x = batch.x.tensor_split(micro_batches), y = batch.y.tensor_split(micro_batches);
  double sum = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    const at::Tensor loss = loss_of(net->forward(x[i]), y[i]);
    (loss / micro_batches).backward();
    sum += loss.item<double>();
  }
  return sum / micro_batches;
}

struct Case {
  Schedule schedule;
  int ranks, chunks;
};

void PrintTo(const Case& one, std::ostream* out) {
  *out << pipeline::to_string(one.schedule) << " p=" << one.ranks << " v=" << one.chunks;
}

class PipelineGradients : public ::testing::TestWithParam<Case> {};

TEST_P(PipelineGradients, AreThoseOfOneProcessToTheBit) {
  constexpr int kMicroBatches = 8;
  const Case one = GetParam();
  for (const at::ScalarType type : {at::kDouble, at::kFloat}) {
    // Batches of 16 rows, then some that do not divide evenly, then 16. Shapes change with step and micro-batch.
    const std::vector<std::int64_t> rows = {16, 16, 21, 17, 16};
    torch::nn::Sequential alone = ten_layers(type);
    torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    std::vector<double> losses;
    Collected gradients, after;
    for (std::size_t step = 0; step < rows.size(); ++step) {
      for (at::Tensor& parameter : alone->parameters()) parameter.mutable_grad().reset();
      losses.push_back(step_alone(alone, batch_of(static_cast<int>(step), rows[step], type), kMicroBatches));
      optimizer.step();
    }
    gradients.add(*alone, true);
    after.add(*alone);
    const Batch test = batch_of(99, 16, type);
    alone->eval();
    const at::Tensor expected = alone->forward(test.x).detach();

    Collected our_gradients, ours;
    run_on_threads(one.ranks, [&](Communicator comm) {
      Pipeline model(ten_layers(type), comm,
                     {.schedule = one.schedule, .micro_batches = kMicroBatches, .chunks = one.chunks, .loss = loss_of});
      std::optional<torch::optim::SGD> sgd;
      if (!model.parameters().empty()) sgd.emplace(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
      const bool first = comm.rank() == 0, last = comm.rank() == comm.size() - 1;
      const auto here = [](bool is, const at::Tensor& tensor) { return is ? tensor : at::Tensor(); };
      for (std::size_t step = 0; step < rows.size(); ++step) {
        const Batch batch = batch_of(static_cast<int>(step), rows[step], type);
        model.zero_grad();
        EXPECT_EQ(model.step(here(first, batch.x), here(last, batch.y)), losses[step]);
        if (sgd) sgd->step();
      }
      our_gradients.add(*model.module(), true);
      ours.add(*model.module());
      model.eval();
      const at::Tensor output = model.forward(here(first, test.x));
      EXPECT_EQ(output.defined(), last);
      if (last) {
        EXPECT_TRUE(at::allclose(output, expected, 1e-5, 1e-6));
      }
      const double loss = model.evaluate(here(first, test.x), here(last, test.y));
      EXPECT_NEAR(loss, loss_of(expected, test.y).item<double>(), 1e-5);
    });
    const std::string what = at::toString(type);
    expect_same(our_gradients, gradients, "gradients of " + what);
    expect_same(ours, after, "parameters of " + what);
  }
}

INSTANTIATE_TEST_SUITE_P(Schedules, PipelineGradients,
                         ::testing::Values(Case{Schedule::GPipe, 1, 1}, Case{Schedule::GPipe, 2, 1},
                                           Case{Schedule::GPipe, 4, 1}, Case{Schedule::OneFOneB, 1, 1},
                                           Case{Schedule::OneFOneB, 2, 1}, Case{Schedule::OneFOneB, 4, 1},
                                           Case{Schedule::Interleaved, 1, 1}, Case{Schedule::Interleaved, 1, 2},
                                           Case{Schedule::Interleaved, 2, 1}, Case{Schedule::Interleaved, 2, 2},
                                           Case{Schedule::Interleaved, 4, 1}, Case{Schedule::Interleaved, 4, 2},
                                           Case{Schedule::ZeroBubble, 1, 1}, Case{Schedule::ZeroBubble, 2, 1},
                                           Case{Schedule::ZeroBubble, 4, 1}));

// ---------------------------------------------------------------------------------------------------- two parts

/// Uses one parameter twice, one beside all others and one under a hook; the graph forks and joins.
struct TangledImpl : torch::nn::Module {
  TangledImpl() {
    first = register_module("first", torch::nn::Linear(5, 5));
    second = register_module("second", torch::nn::Linear(5, 5));
    position = register_parameter("position", at::zeros({5}));
    scale = register_parameter("scale", at::zeros({5}));
    unused = register_parameter("unused", at::zeros({5}));
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor h = at::tanh(second(first(x + position)));
    h = at::tanh(first(h)) * (scale * scale) + h * scale.sum();
    if (hooks && h.requires_grad()) h.register_hook([](const at::Tensor& gradient) { return gradient * 2; });
    at::Tensor joined = at::cat({h, x.detach(), second(h)}, 1);
    return at::layer_norm(joined, {15});
  }
  bool hooks = false;
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor position, scale, unused;
};
TORCH_MODULE(Tangled);

TEST(SplitBackward, GivesTheBitsOfOneBackward) {
  for (const bool hooks : {false, true}) {
    Tangled whole = with_values(Tangled(), 1), split = with_values(Tangled(), 1);
    whole->hooks = split->hooks = hooks;
    int calls = 0;
    if (hooks) {
      split->position.register_hook([&](const at::Tensor&) { ++calls; });
    }
    for (int i = 0; i < 3; ++i) {
      const at::Tensor x = pattern({4, 5}, i), seed = pattern({4, 15}, i + 7);
      const at::Tensor a = x.clone().requires_grad_(), b = x.clone().requires_grad_();
      torch::autograd::backward({whole->forward(a)}, {seed});
      const std::vector<at::Tensor> before =
          split->position.grad().defined() ? copies({split->position.grad()}) : std::vector<at::Tensor>();
      nn::SplitBackward parts;
      EXPECT_TRUE(at::equal(parts.of_input(split->forward(b), seed, b), a.grad()));
      EXPECT_FALSE(b.grad().defined());
      EXPECT_EQ(split->position.grad().defined(), !before.empty());
      if (!before.empty()) {
        EXPECT_TRUE(at::equal(split->position.grad(), before[0])) << "not before the second part";
      }
      parts.of_parameters();
      for (const auto& item : whole->named_parameters()) {
        const at::Tensor other = split->named_parameters()[item.key()].grad();
        ASSERT_EQ(item.value().grad().defined(), other.defined()) << item.key();
        if (other.defined()) {
          EXPECT_TRUE(at::equal(item.value().grad(), other)) << item.key();
        }
      }
    }
    EXPECT_EQ(calls, hooks ? 3 : 0);
  }
}

/// An identity that counts its backwards.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x, std::int64_t counter) {
    context->saved_data["counter"] = counter;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    ++*reinterpret_cast<int*>(context->saved_data["counter"].toInt());
    return {gradients[0], at::Tensor()};
  }
};

TEST(SplitBackward, DoesNothingTwice) {
  torch::nn::Linear first(5, 5), second(5, 5);
  int on_path[3] = {}, beside = 0;
  const auto counted = [](const at::Tensor& x, int& counter) {
    return Counted::apply(x, static_cast<std::int64_t>(reinterpret_cast<std::intptr_t>(&counter)));
  };
  const at::Tensor x = at::ones({2, 5}).requires_grad_();
  at::Tensor y = second(counted(first(counted(x, on_path[0])), on_path[1]));
  y = counted(y, on_path[2]) * counted(second->bias, beside);
  nn::SplitBackward parts;
  parts.of_input(y, at::ones({2, 5}), x);
  for (const int count : on_path) EXPECT_EQ(count, 1);
  EXPECT_EQ(beside, 1) << "the bias is used twice, so its gradient is computed in the first part";
  parts.of_parameters();
  for (const int count : on_path) EXPECT_EQ(count, 1);
  EXPECT_EQ(beside, 1);
  for (const at::Tensor& parameter : {first->weight, second->weight, second->bias}) {
    EXPECT_TRUE(parameter.grad().defined());
  }
}

TEST(SplitBackward, RefusesOrKeepsAHookOnAParameterThatIsUsedTwice) {
  Tangled net = with_values(Tangled(), 1);
  net->second->weight.register_hook([](const at::Tensor& gradient) { return gradient * 3; });
  const at::Tensor x = pattern({4, 5}, 1).requires_grad_();
  nn::SplitBackward parts;
  if (TORCH_VERSION_MAJOR >= 2) {
    EXPECT_THROW(parts.of_input(net->forward(x), pattern({4, 15}, 2), x), Error);
    return;
  }
  parts.of_input(net->forward(x), pattern({4, 15}, 2), x);
  parts.of_parameters();
  const at::Tensor split = net->second->weight.grad().clone();
  net->second->weight.mutable_grad().reset();
  torch::autograd::backward({net->forward(x)}, {pattern({4, 15}, 2)});
  EXPECT_TRUE(at::equal(split, net->second->weight.grad()));
}

TEST(SplitBackward, OfWhatHasNoInputOrNothingElse) {
  torch::nn::Linear net = with_values(torch::nn::Linear(3, 2), 0);
  nn::SplitBackward parts;
  EXPECT_FALSE(parts.of_input(net->forward(at::ones({2, 3})), at::ones({2, 2}), at::ones({2, 3})).defined());
  EXPECT_FALSE(net->weight.grad().defined());
  parts.of_parameters();
  EXPECT_TRUE(at::equal(net->weight.grad(), at::full({2, 3}, 2.0F)));
  const at::Tensor x = at::ones({2}).requires_grad_();
  nn::SplitBackward same;
  EXPECT_TRUE(at::equal(same.of_input(x, at::full({2}, 4.0F), x), at::full({2}, 4.0F)));
  same.of_parameters();
  EXPECT_FALSE(x.grad().defined());
}

// ---------------------------------------------------------------------------------------------------- stages

const auto kSame = [](const at::Tensor& x) { return x; };
const auto kMean = [](const at::Tensor& output, const at::Tensor&) { return output.to(at::kDouble).mean(); };

TEST(PipelineStages, PassTensorsOfAnyShapeAndTypeThatMayChange) {
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::ZeroBubble}) {
    const auto make = [&](int* call) {
      torch::nn::Sequential net(
          Function(kSame),                        // integers go to the next stage
          torch::nn::Embedding(11, 4),            // [n, 3] to [n, 3, 4]
          Function([call](const at::Tensor& x) {  // has another shape each time, and is sometimes empty
            const std::int64_t columns = (*call)++ % 3;
            return x.flatten(1).slice(1, 0, columns * 2).to(at::kBFloat16);
          }),
          Function([](const at::Tensor& x) {
            return at::cat({x.to(at::kFloat), at::ones({x.size(0), 1})}, 1);
          }));
      return with_values(net, 3);
    };
    const at::Tensor input = at::arange(24, at::kLong).remainder(11).reshape({8, 3});
    int call = 0;
    torch::nn::Sequential alone = make(&call);
    std::vector<double> losses;
    for (int step = 0; step < 3; ++step) {
      double sum = 0;
      for (const at::Tensor& x : input.tensor_split(4)) {
        const at::Tensor loss = kMean(alone->forward(x), {});
        (loss / 4).backward();
        sum += loss.item<double>();
      }
      losses.push_back(sum / 4);
    }
    run_on_threads(4, [&](Communicator comm) {
      int own_call = 0;
      Pipeline model(make(&own_call), comm, {.schedule = schedule, .micro_batches = 4, .loss = kMean});
      for (int step = 0; step < 3; ++step) {
        EXPECT_EQ(model.step(comm.rank() == 0 ? input : at::Tensor(), comm.rank() == 3 ? input : at::Tensor()),
                  losses[static_cast<std::size_t>(step)]);
      }
      if (comm.rank() != 1) return;
      EXPECT_EQ(model.named_parameters().keys(), (std::vector<std::string>{"1.weight"}));
      EXPECT_TRUE(at::equal(model.parameters()[0].grad(), alone->parameters()[0].grad()));
    });
  }
}

TEST(PipelineStages, WithoutAGradientAskForNone) {
  // Stage 1 cuts the graph, so stages before it get no gradient, as in one process.
  run_on_threads(3, [](Communicator comm) {
    torch::nn::Sequential net(torch::nn::Linear(5, 5), Function([](const at::Tensor& x) { return x.detach(); }),
                              torch::nn::Linear(5, 3));
    for (const Schedule schedule : {Schedule::GPipe, Schedule::ZeroBubble}) {
      Pipeline model(net, comm, {.schedule = schedule, .micro_batches = 2, .loss = loss_of});
      model.zero_grad();
      const Batch batch = batch_of(1, 4, at::kFloat);
      (void)model.step(batch.x, batch.y);
      for (const at::Tensor& parameter : model.parameters()) {
        EXPECT_EQ(parameter.grad().defined(), comm.rank() == 2);
      }
    }
  });
}

std::string refusal(const std::function<void()>& call, ErrorCode code) { return comm::testing::what_of(call, code); }

TEST(PipelineStages, AreCutByHandByCostOrByMeasuring) {
  using Cuts = std::vector<std::int64_t>;
  run_on_threads(2, [](Communicator comm) {
    const auto cuts = [&](PipelineOptions options) {
      options.micro_batches = 2;
      return Pipeline(ten_layers(at::kFloat), comm, options).cuts();
    };
    EXPECT_EQ(cuts({}), Cuts{5});
    EXPECT_EQ(cuts({.cuts = {7}}), Cuts{7});
    EXPECT_EQ(cuts({.costs = {9, 1, 1, 1, 1, 1, 1, 1, 1, 1}}), Cuts{1});
    EXPECT_EQ(cuts({.schedule = Schedule::Interleaved, .chunks = 2, .cuts = {1, 2, 5}}), (Cuts{1, 2, 5}));
    const auto refused = [&](const PipelineOptions& options, const std::string& why) {
      const std::string said = refusal([&] { cuts(options); }, ErrorCode::InvalidArgument);
      EXPECT_NE(said.find(why), std::string::npos) << said;
    };
    refused({.cuts = {7, 3}}, "they ascend");
    refused({.cuts = {10}}, "no stage is empty");
    refused({.cuts = {2, 4}}, "2 cuts make 3 stages, and 2 ranks with 1 chunks have 2");
    refused({.cuts = {2}, .costs = {1}}, "give one");
    refused({.costs = {1, 2}}, "2 costs of 10 layers");
    refused({.chunks = 2}, "use Interleaved");
    refused({.schedule = Schedule::Interleaved, .chunks = 6}, "10 layers cannot be cut into 12 stages");

    // Rank 0 measures, so the layer that sleeps gets a stage for itself. Measuring leaves no trace.
    std::vector<nn::PipelineLayer> layers;
    for (int i = 0; i < 4; ++i) layers.emplace_back([] { return torch::nn::BatchNorm1d(5); });
    layers.emplace_back([] {
      return Function([](const at::Tensor& x) {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));  // far longer than any other layer
        return x;
      });
    });
    at::set_num_threads(1);  // with more threads, a BatchNorm is slow on a busy machine
    Pipeline measured(layers, comm, {.micro_batches = 4, .sample = comm.rank() == 0 ? at::ones({4, 5}) : at::Tensor()});
    EXPECT_EQ(measured.cuts(), Cuts{4});
    EXPECT_NE(measured.plan().find("layers 0-3 | 4"), std::string::npos) << measured.plan();
    layers[2] = [] {
      return Function([](const at::Tensor&) -> at::Tensor { throw std::logic_error("no such layer"); });
    };
    try {  // throws on all ranks, whichever rank measures
      Pipeline(layers, comm, {.micro_batches = 4, .sample = comm.rank() == 0 ? at::ones({4, 5}) : at::Tensor()});
      FAIL();
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(comm.rank() == 0 ? "no such layer" : "failed on rank 0"),
                std::string::npos)
          << error.what();
    }
    torch::nn::Sequential net(torch::nn::BatchNorm1d(5), torch::nn::BatchNorm1d(5));
    Pipeline whole(net, comm,
                   {.micro_batches = 1, .sample = comm.rank() == 0 ? pattern({4, 5}, 0, at::kFloat) : at::Tensor()});
    EXPECT_EQ(net[0]->as<torch::nn::BatchNorm1d>()->num_batches_tracked.item<std::int64_t>(), 0);
    for (at::Tensor& parameter : net->parameters()) {
      EXPECT_FALSE(parameter.grad().defined());
      parameter.mutable_grad() = at::full_like(parameter, 15.25);
    }
    Pipeline again(net, comm,
                   {.micro_batches = 1, .sample = comm.rank() == 0 ? pattern({4, 5}, 0, at::kFloat) : at::Tensor()});
    for (const at::Tensor& parameter : net->parameters()) EXPECT_TRUE(parameter.grad().eq(15.25).all().item<bool>());
  });
}

/// Like the last layer of a language model that uses the embedding's weight.
struct TiedHeadImpl : torch::nn::Module {
  explicit TiedHeadImpl(const torch::nn::Embedding& tied) { embedding = register_module("embedding", tied); }
  at::Tensor forward(const at::Tensor& x) { return at::linear(x, embedding->weight); }
  torch::nn::Embedding embedding{nullptr};
};
TORCH_MODULE(TiedHead);

TEST(PipelineStages, RefuseWhatTwoOfThemShareWhereLayersAreMadeByFunctions) {
  run_on_threads(3, [](Communicator comm) {
    const torch::nn::Embedding embedding(11, 6);
    const torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(6).affine(false));
    const auto middle = [] { return torch::nn::Linear(6, 6); };
    const auto refused = [&](const std::vector<nn::PipelineLayer>& layers, const PipelineOptions& options) {
      return refusal([&] { Pipeline(layers, comm, options); }, ErrorCode::InvalidArgument);
    };
    const std::vector<nn::PipelineLayer> tied = {[=] { return embedding; }, middle,
                                                 [=] { return TiedHead(embedding); }};
    for (const std::optional<std::uint64_t> seed : {std::optional<std::uint64_t>(), std::optional<std::uint64_t>(1)}) {
      EXPECT_EQ(refused(tied, {.micro_batches = 2, .seed = seed})
                    .find("Pipeline: parameter '2.embedding.weight' of stage 2 is '0.weight' of stage 0 as well"),
                0U);
    }
    const std::vector<nn::PipelineLayer> buffer = {[=] { return norm; }, middle, [=] { return norm; }};
    EXPECT_NE(refused(buffer, {.micro_batches = 2}).find("buffer '2.running_mean' of stage 2 is '0.running_mean'"),
              std::string::npos);
    torch::nn::Sequential whole({{"first", torch::nn::AnyModule(norm)},
                                 {"middle", torch::nn::AnyModule(torch::nn::Linear(6, 6))},
                                 {"last", torch::nn::AnyModule(norm)}});
    const std::string said = refusal([&] { Pipeline(whole, comm, {.micro_batches = 2}); }, ErrorCode::InvalidArgument);
    EXPECT_NE(said.find("buffer 'last.running_mean' of stage 2"), std::string::npos) << said;

    // Layers that are made anew, given away, or shared within a stage are not refused.
    const auto given_away = std::make_shared<torch::nn::Linear>(6, 6);
    const std::vector<nn::PipelineLayer> sound = {[=] { return embedding; }, [=] { return TiedHead(embedding); },
                                                  middle, [=] { return torch::nn::Linear(std::move(*given_away)); }};
    EXPECT_EQ(Pipeline(sound, comm, {.micro_batches = 2, .cuts = {2, 3}}).cuts().size(), 2U);

    // An exception of a function, on the rank that keeps the layer, is reported to all ranks.
    const std::vector<nn::PipelineLayer> broken = {
        middle, []() -> torch::nn::Linear { throw std::logic_error("no memory"); }, middle};
    try {
      Pipeline(broken, comm, {.micro_batches = 2});
      FAIL();
    } catch (const std::exception& error) {
      EXPECT_NE(std::string(error.what()).find(comm.rank() == 1 ? "no memory" : "rank 1 could not make a layer"),
                std::string::npos)
          << error.what();
    }
  });
}

TEST(PipelineStages, MayBeginWithALayerThatChangesItsInputInPlace) {
  const auto make = [] {
    const auto relu = [] { return torch::nn::ReLU(torch::nn::ReLUOptions(true)); };
    torch::nn::Sequential net(torch::nn::Linear(5, 9), relu(), torch::nn::Linear(9, 9), relu(),
                              torch::nn::Linear(9, 3));
    net->to(at::kDouble);
    return with_values(net, 0);
  };
  torch::nn::Sequential alone = make();
  const Batch batch = batch_of(1, 8);
  const double loss = step_alone(alone, batch, 4);
  Collected expected;
  expected.add(*alone, true);
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::ZeroBubble}) {
    Collected ours;
    run_on_threads(3, [&](Communicator comm) {
      Pipeline model(make(), comm, {.schedule = schedule, .micro_batches = 4, .loss = loss_of, .cuts = {1, 3}});
      EXPECT_EQ(model.step(batch.x, batch.y), loss);
      EXPECT_EQ(model.evaluate(batch.x, batch.y), loss);
      ours.add(*model.module(), true);
      // Measuring runs each layer separately.
      EXPECT_EQ(Pipeline(make(), comm, {.micro_batches = 4, .sample = batch.x}).cuts().size(), 2U);
    });
    expect_same(ours, expected, std::string(pipeline::to_string(schedule)));
  }
}

TEST(PipelineStages, AreAsBeforeWhereMeasuringThrows) {
  run_on_threads(2, [](Communicator comm) {
    struct ThrowsAgainImpl : torch::nn::Module {
      ThrowsAgainImpl() { norm = register_module("norm", torch::nn::BatchNorm1d(5)); }
      at::Tensor forward(const at::Tensor& x) {
        if (++calls == 2) throw std::logic_error("the second time");
        return norm(x);
      }
      torch::nn::BatchNorm1d norm{nullptr};
      int calls = 0;
    };
    const auto layer = std::make_shared<ThrowsAgainImpl>();
    torch::nn::Sequential net(torch::nn::Linear(5, 5), layer);
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad() = at::full_like(parameter, 3);
    EXPECT_ANY_THROW(Pipeline(net, comm, {.micro_batches = 1, .sample = batch_of(1, 4, at::kFloat).x}));
    for (const at::Tensor& parameter : net->parameters()) {
      ASSERT_TRUE(parameter.grad().defined());
      EXPECT_TRUE(at::equal(parameter.grad(), at::full_like(parameter, 3)));
    }
    EXPECT_EQ(layer->norm->num_batches_tracked.item<std::int64_t>(), 0);
  });
}

TEST(PipelineStages, AreRefusedASampleThatIsNotOnRankZero) {
  run_on_threads(2, [](Communicator comm) {
    const at::Tensor sample = comm.rank() == 1 ? at::ones({4, 5}) : at::Tensor();
    for (const PipelineOptions& options : {PipelineOptions{.micro_batches = 2, .sample = sample},
                                           PipelineOptions{.micro_batches = 2, .cuts = {1}, .sample = sample}}) {
      const std::string said =
          refusal([&] { Pipeline(ten_layers(at::kFloat), comm, options); }, ErrorCode::InvalidArgument);
      EXPECT_NE(said.find("not on rank 0"), std::string::npos) << said;
    }
    const at::Tensor rank0 = comm.rank() == 0 ? at::ones({4, 5}) : at::Tensor();
    const std::string said =
        refusal([&] { Pipeline(ten_layers(at::kFloat), comm, {.micro_batches = 2, .cuts = {1}, .sample = rank0}); },
                ErrorCode::InvalidArgument);
    EXPECT_NE(said.find("give one"), std::string::npos) << said;
  });
}

TEST(PipelineStages, RefuseAParameterThatTwoOfThemShareAndOptionsThatDiffer) {
  run_on_threads(2, [](Communicator comm) {
    torch::nn::Linear tied(5, 5);
    torch::nn::Sequential net({{"embedding", torch::nn::AnyModule(tied)},
                               {"middle", torch::nn::AnyModule(torch::nn::Linear(5, 5))},
                               {"head", torch::nn::AnyModule(tied)}});
    const std::string said =
        refusal([&] { Pipeline(net, comm, {.micro_batches = 2, .cuts = {1}}); }, ErrorCode::InvalidArgument);
    EXPECT_NE(said.find("parameter 'head.weight' of stage 1 is 'embedding.weight' of stage 0"), std::string::npos)
        << said;
    const std::string differs = refusal(
        [&] { Pipeline(ten_layers(at::kFloat), comm, {.micro_batches = 2 + comm.rank()}); }, ErrorCode::Mismatch);
    EXPECT_NE(differs.find("micro_batches=2"), std::string::npos) << differs;
    const std::string none = refusal([&] { Pipeline(ten_layers(at::kFloat), comm, {}); }, ErrorCode::InvalidArgument);
    EXPECT_NE(none.find("0 micro-batches"), std::string::npos) << none;
  });
}

TEST(PipelineStages, ThatThrowEndTheStepOnAllRanksWithTheirReason) {
  struct Failure {
    const char* what;
    int rank;
    std::string says;
  };
  const std::vector<Failure> failures = {
      {"shape", 2, "Pipeline: rank 2 (host "},
      {"shape", 2, "stage 2, forward of micro-batch 0 -- mat1 and mat2 shapes cannot be multiplied"},
      {"backward", 1, "stage 1, backward of micro-batch 1 -- no gradient today"},
      {"none", 0, "the batch -- the input is of [0, 5], and is cut into 4 micro-batches"},
      {"rows", 3, "stage 3, forward of micro-batch 3 -- the micro-batch has 0 rows of the input, and 1 of the target"},
      {"fewer targets", 3,
       "stage 3, forward of micro-batch 0 -- the micro-batch has 2 rows of the input, and 1 of the target"},
      {"detached", 3, "stage 3, forward of micro-batch 0 -- the loss does not require a gradient"},
      {"target", 3, "the batch -- the target is undefined"},
      {"loss", 3, "stage 3, forward of micro-batch 0 -- the loss is no scalar"}};
  for (const Failure& failure : failures) {
    const std::string what = failure.what;
    const auto begin = std::chrono::steady_clock::now();
    std::mutex mutex;
    int told = 0;
    run_on_threads(4, [&](Communicator comm) {
      torch::nn::Sequential net(
          torch::nn::Linear(5, 5), Function([&, calls = 0](const at::Tensor& x) mutable {
            if (what == "backward" && ++calls == 2) {
              x.register_hook([](const at::Tensor&) -> at::Tensor { throw std::runtime_error("no gradient today"); });
            }
            return x * 2;
          }),
          torch::nn::Linear(what == "shape" ? 7 : 5, 5), torch::nn::Linear(5, 3));
      Pipeline model(net, comm, {.micro_batches = 4, .loss = [&](const at::Tensor& output, const at::Tensor& target) {
                                   const at::AutoGradMode mode(what != "detached");
                                   return what == "loss" ? output : loss_of(output, target);
                                 }});
      Batch batch = batch_of(1, what == "rows" ? 4 : 8, at::kFloat);
      if (what == "fewer targets") batch.y = batch.y.slice(0, 0, 4);
      const std::string said = refusal(
          [&] {
            const int rows = what == "none" ? 0 : what == "rows" ? 3 : 8;
            (void)model.step(batch.x.slice(0, 0, rows), what == "target" ? at::Tensor() : batch.y);
          },
          ErrorCode::Aborted);
      EXPECT_NE(said.find(failure.says), std::string::npos) << comm.rank() << ": " << said;
      const std::lock_guard lock(mutex);
      ++told;
    });
    EXPECT_EQ(told, 4);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20)) << what;
  }
}

TEST(PipelineStages, PassOverMicroBatchesWithoutRows) {
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::Interleaved, Schedule::ZeroBubble}) {
    run_on_threads(2, [&](Communicator comm) {
      const bool interleaved = schedule == Schedule::Interleaved;
      Pipeline model(ten_layers(at::kDouble), comm,
                     {.schedule = schedule, .micro_batches = 4, .chunks = interleaved ? 2 : 1, .loss = loss_of});
      torch::nn::Sequential alone = ten_layers(at::kDouble);
      model.eval();
      alone->eval();
      for (const int rows : {8, 3, 1, 8}) {
        const Batch batch = batch_of(rows, rows);
        for (at::Tensor& parameter : alone->parameters()) parameter.mutable_grad().reset();
        const double loss = step_alone(alone, batch, std::min(rows, 4));
        EXPECT_EQ(model.evaluate(batch.x, batch.y), loss) << rows;
        const at::Tensor output = model.forward(batch.x);
        if (comm.rank() == 1) {
          EXPECT_TRUE(at::allclose(output, alone->forward(batch.x))) << rows;
        }
        model.zero_grad();
        EXPECT_EQ(model.step(batch.x, batch.y), loss) << rows;
        for (const auto& item : model.named_parameters()) {
          EXPECT_TRUE(at::equal(item.value().grad(), alone->named_parameters()[item.key()].grad())) << item.key();
        }
      }
    });
  }
}

// ---------------------------------------------------------------------------------------------------- data parallel

TEST(PipelineAndDataParallel, GiveTheGradientOfOneProcessAndEqualReplicas) {
  for (const Schedule schedule : {Schedule::OneFOneB, Schedule::ZeroBubble}) {
    constexpr int kMicroBatches = 4, kSteps = 3;
    const auto make = [](double salt) {
      torch::nn::Sequential net(torch::nn::Linear(5, 17), torch::nn::Tanh(), torch::nn::Linear(17, 8),
                                torch::nn::Linear(8, 3));
      net->to(at::kDouble);
      return with_values(net, salt);
    };
    torch::nn::Sequential alone = make(0);
    torch::optim::SGD optimizer(alone->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    for (int step = 0; step < kSteps; ++step) {
      for (at::Tensor& parameter : alone->parameters()) parameter.mutable_grad().reset();
      const Batch batch = batch_of(step, 16);
      loss_of(alone->forward(batch.x), batch.y).backward();
      optimizer.step();
    }
    std::array<Collected, 2> replicas;
    run_on_threads(4, [&](Communicator comm) {
      const int replica = comm.rank() / 2;
      Communicator stages = comm.split({.color = replica});
      Communicator same_stage = comm.split({.color = comm.rank() % 2});
      Pipeline model(make(replica * 50.0), stages,
                     {.schedule = schedule, .micro_batches = kMicroBatches, .loss = loss_of});
      nn::DistributedDataParallel<torch::nn::Module> ddp(model.module(), same_stage, small_buckets());
      torch::optim::SGD sgd(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
      for (int step = 0; step < kSteps; ++step) {
        const Batch batch = batch_of(step, 16);
        ddp.zero_grad();
        {
          const auto local = ddp.no_sync();
          (void)model.step(batch.x.slice(0, replica * 8, replica * 8 + 8),
                           batch.y.slice(0, replica * 8, replica * 8 + 8));
        }
        EXPECT_TRUE(ddp.step_without_samples());
        sgd.step();
      }
      ddp.require_same_parameters();
      replicas[static_cast<std::size_t>(replica)].add(*model.module());
    });
    expect_same(replicas[0], replicas[1], "replicas");
    for (const auto& item : alone->named_parameters()) {
      EXPECT_TRUE(at::allclose(replicas[0].tensors.at(item.key()), item.value(), 1e-11, 1e-11)) << item.key();
    }
  }
}

}  // namespace
}  // namespace cohort
