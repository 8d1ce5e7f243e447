// Gradients that are not finite and parameters that drift apart, on ranks that are threads. All name the first one.
#include <cohort/error.h>
#include <cohort/torch/finite.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>

#include "torch/test_models.h"

#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <set>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using nn::NonFinite;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

DistributedDataParallelOptions raising() {
  DistributedDataParallelOptions options = small_buckets();
  options.non_finite = NonFinite::Raise;
  return options;
}

// Puts a value into a gradient when autograd makes it, once.
struct Spoiler {
  explicit Spoiler(torch::nn::Module& module) {
    for (const auto& item : module.named_parameters()) {
      item.value().register_hook([this, name = item.key()](const at::Tensor& gradient) {
        if (name != parameter) return gradient;
        at::Tensor changed = gradient.clone();
        changed.view({-1})[index] = value;
        parameter.clear();
        return changed;
      });
    }
  }
  void next(const std::string& name, std::int64_t at, double with) {
    parameter = name;
    index = at;
    value = with;
  }
  std::string parameter;
  std::int64_t index = 0;
  double value = 0;
};

void backward(DistributedDataParallel<MlpImpl>& model, int step, at::ScalarType type = at::kDouble) {
  const Communicator& comm = model.communicator();
  const Batch batch = batch_of(step, 4 * comm.size(), type);
  const std::int64_t begin = 4 * comm.rank();
  loss_of(model(batch.x.slice(0, begin, begin + 4)), batch.y.slice(0, begin, begin + 4)).backward();
}

NonFiniteGradient expect_non_finite(const std::function<void()>& call, std::string* text = nullptr) {
  try {
    call();
  } catch (const NonFiniteError& error) {
    EXPECT_EQ(error.code(), ErrorCode::NonFinite);
    EXPECT_EQ(error.context().peer, error.gradient().rank);
    if (text != nullptr) *text = error.what();
    return error.gradient();
  }
  ADD_FAILURE() << "no NonFiniteError";
  return {};
}

TEST(DdpChecks, TheFirstBadGradientIsNamedOnEveryRankAndTrainingGoesOn) {
  constexpr int kRanks = 3;
  std::mutex mutex;
  std::map<int, std::set<std::string>> texts;  // texts of each step's errors, by step
  run_on_threads(kRanks, [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    Mlp alone = with_values(Mlp(), 0);
    Spoiler spoiler(*net);
    DistributedDataParallel model(net, comm, raising());
    torch::optim::SGD ours(model.parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    torch::optim::SGD other(alone->parameters(), torch::optim::SGDOptions(0.2).momentum(0.9));
    for (int step = 0; step < 7; ++step) {
      model.zero_grad();
      if (step % 2 == 0) {
        backward(model, step);
        ours.step();
        const Batch batch = batch_of(step, 4 * kRanks);
        for (at::Tensor& parameter : alone->parameters()) parameter.mutable_grad().reset();
        loss_of(alone->forward(batch.x), batch.y).backward();
        other.step();
        continue;
      }
      const int culprit = step % kRanks;
      const double value = step == 1 ? kNaN : -kInf;
      if (comm.rank() == culprit) spoiler.next("second.weight", 50 + step, value);
      std::string text;
      const NonFiniteGradient found = expect_non_finite([&] { backward(model, step); }, &text);
      EXPECT_EQ(found.rank, culprit);
      EXPECT_EQ(found.host, comm.host());
      EXPECT_EQ(found.parameter, "second.weight");
      EXPECT_EQ(found.element.index, 50 + step);
      EXPECT_EQ(found.element.position, (std::vector<std::int64_t>{(50 + step) / 17, (50 + step) % 17}));
      EXPECT_EQ(std::isnan(found.element.value), step == 1);
      EXPECT_EQ(found.step, step);
      for (const at::Tensor& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
      ours.step();  // changes nothing
      const std::lock_guard lock(mutex);
      texts[step].insert(text);
    }
    expect_close(model.parameters(), alone->parameters(), 1e-11);
    EXPECT_EQ(model.stats().steps, 7);
    EXPECT_EQ(model.stats().non_finite_steps, 3);
  });
  for (const auto& [step, said] : texts) {
    ASSERT_EQ(said.size(), 1U);
    EXPECT_NE(said.begin()->find("parameter 'second.weight' of [17, 17], element"), std::string::npos) << *said.begin();
  }
}

TEST(DdpChecks, TheFirstBucketWinsThenTheLowestRank) {
  run_on_threads(3, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    Spoiler spoiler(*net);
    DistributedDataParallel model(net, comm, raising());
    for (int step = 0; step < 2; ++step) {
      backward(model, step);
      model.zero_grad();
    }
    spoiler.next(comm.rank() == 2 ? "last.weight" : "first.weight", 2, kNaN);
    NonFiniteGradient found = expect_non_finite([&] { backward(model, 2); });
    EXPECT_EQ(found.rank, 2);
    EXPECT_EQ(found.parameter, "last.weight");
    spoiler.next("second.bias", 7 - comm.rank(), kInf);
    found = expect_non_finite([&] { backward(model, 3); });
    EXPECT_EQ(found.rank, 0);
    EXPECT_EQ(found.element.index, 7);
  });
}

TEST(DdpChecks, AllTypesAndGradientsThatAreReadWhereTheyAre) {
  struct Kind {
    at::ScalarType type;
    std::int64_t hidden;
  };
  for (const Kind kind :
       {Kind{at::kDouble, 17}, Kind{at::kFloat, 17}, Kind{at::kBFloat16, 17}, Kind{at::kFloat, 1500}}) {
    if (TORCH_VERSION_MAJOR < 2 && kind.type == at::kBFloat16) continue;  // libtorch 1.13 has no loss for them
    run_on_threads(2, [&](Communicator comm) {
      Mlp net = with_values(Mlp(kind.type, kind.hidden), 0);
      Spoiler spoiler(*net);
      DistributedDataParallel model(net, comm, raising());
      backward(model, 0, kind.type);
      model.zero_grad();
      const std::int64_t index = kind.hidden * kind.hidden - 2;
      if (comm.rank() == 1) spoiler.next("second.weight", index, kNaN);
      const NonFiniteGradient found = expect_non_finite([&] { backward(model, 1, kind.type); });
      EXPECT_EQ(found.rank, 1);
      EXPECT_EQ(found.element.index, index);
      backward(model, 2, kind.type);
    });
  }
}

// Large gradients are not checked before they are reduced. Instead, each rank checks its part of the average.
TEST(DdpChecks, LargeGradientsAreKnownByTheirAverages) {
  static constexpr std::int64_t kHidden = 1500;
  static constexpr std::int64_t kElements = kHidden * kHidden;
  run_on_threads(3, [](Communicator comm) {
    Mlp net = with_values(Mlp(at::kFloat, kHidden), 0);
    Spoiler spoiler(*net);
    DistributedDataParallel model(net, comm, raising());
    int step = 0;
    const auto train = [&] { backward(model, step++, at::kFloat); };
    const auto expect_found = [&](int rank, std::int64_t index, const std::string& parameter = "second.weight") {
      const NonFiniteGradient found = expect_non_finite(train);
      EXPECT_EQ(found.rank, rank);
      EXPECT_EQ(found.element.index, index);
      EXPECT_EQ(found.parameter, parameter);
      for (const at::Tensor& each : model.parameters()) EXPECT_FALSE(each.grad().defined());
    };
    train();
    model.zero_grad();
    for (int culprit = 0; culprit < 3; ++culprit) {
      for (const std::int64_t index : {std::int64_t{0}, kElements / 2, kElements - 1}) {
        if (comm.rank() == culprit) spoiler.next("second.weight", index, culprit == 1 ? -kInf : kNaN);
        expect_found(culprit, index);
      }
    }
    // The lowest of several ranks is named, and the bucket that is reduced first, even if it is small.
    if (comm.rank() > 0) spoiler.next("second.weight", 100 - comm.rank(), kNaN);
    expect_found(1, 99);
    spoiler.next(comm.rank() == 2 ? "last.bias" : "second.weight", 0, kNaN);
    expect_found(2, 0, "last.bias");

    // On one rank the gradient is accumulated, and so lies at its place. All ranks learn of either rank's bad gradient.
    for (const int culprit : {0, 1}) {
      if (comm.rank() == 1) {
        const auto guard = model.no_sync();
        backward(model, step, at::kFloat);
      }
      if (comm.rank() == culprit) spoiler.next("second.weight", 7, kInf);
      expect_found(culprit, 7);
    }

    // Finite gradients whose sum is not finite raise no error.
    const auto raised = model.stats().non_finite_steps;
    spoiler.next("second.weight", 5, 3e38);
    train();
    EXPECT_EQ(model.stats().non_finite_steps, raised);
    EXPECT_TRUE(std::isinf(net->named_parameters()["second.weight"].grad().view({-1})[5].item<float>()));
    model.zero_grad();
    train();
    model.zero_grad();

    if (comm.rank() == 0) {
      model.join();
      return;
    }
    for (const std::int64_t index : {std::int64_t{0}, kElements / 2, kElements - 1}) {
      if (comm.rank() == 2) spoiler.next("second.weight", index, kNaN);
      expect_found(2, index);
    }
    train();
    model.join();
  });
}

TEST(DdpChecks, AccumulationZeroSamplesAndRanksThatHaveJoined) {
  run_on_threads(3, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    Spoiler spoiler(*net);
    DistributedDataParallel model(net, comm, raising());
    {
      const auto guard = model.no_sync();
      if (comm.rank() == 1) spoiler.next("first.bias", 3, kInf);
      backward(model, 0);  // raises nothing, since nothing is reduced yet
    }
    EXPECT_EQ(expect_non_finite([&] { backward(model, 1); }).rank, 1);

    if (comm.rank() == 2) {
      model.set_sample_count(0);  // its gradients are dropped
      spoiler.next("first.bias", 0, kNaN);
    }
    backward(model, 2);
    model.zero_grad();
    if (comm.rank() == 1) spoiler.next("first.bias", 1, kNaN);
    EXPECT_EQ(
        expect_non_finite([&] { comm.rank() == 2 ? void(model.step_without_samples()) : backward(model, 3); }).rank, 1);

    if (comm.rank() == 0) {
      model.join();
      return;
    }
    if (comm.rank() == 2) spoiler.next("last.bias", 1, kNaN);
    EXPECT_EQ(expect_non_finite([&] { backward(model, 4); }).rank, 2);
    backward(model, 5);
    model.join();
  });
}

TEST(DdpChecks, UnlessAskedANaNSpreads) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    Spoiler spoiler(*net);
    DistributedDataParallel model(net, comm, small_buckets());
    if (comm.rank() == 0) spoiler.next("last.bias", 0, kNaN);
    backward(model, 0);
    EXPECT_TRUE(std::isnan(net->last->bias.grad()[0].item<double>()));
  });
}

TEST(FirstNonFinite, OfATensorIsInTheOrderOfItsDimensions) {
  const at::Tensor plain = pattern({4, 5, 6}, 0);
  EXPECT_FALSE(first_non_finite(plain).has_value());
  for (const at::Tensor& view : {plain, plain.permute({2, 0, 1}), plain.slice(1, 1, 5, 2)}) {
    const at::Tensor tensor = view.clone();  // keeps the strides of a dense tensor
    tensor[1][0][1] = kNaN;
    tensor[1][1][0] = kInf;
    const auto found = first_non_finite(tensor);
    ASSERT_TRUE(found.has_value());
    EXPECT_EQ(found->position, (std::vector<std::int64_t>{1, 0, 1}));
    EXPECT_EQ(found->index, tensor.size(1) * tensor.size(2) + 1);
  }
  EXPECT_TRUE(first_non_finite(at::scalar_tensor(kNaN))->position.empty());
  EXPECT_FALSE(first_non_finite(at::arange(3)).has_value());
  EXPECT_FALSE(first_non_finite(at::full({3}, 3.4e38)).has_value());
  EXPECT_EQ(first_non_finite(at::full({3}, 3.4e38), {.wire_format = WireFormat::BFloat16})->index, 0);
  EXPECT_THROW(first_non_finite(at::Tensor()), Error);
  EXPECT_THROW(first_non_finite(at::eye(2).to_sparse()), Error);
}

// Flips a bit, as a memory error would.
void flip(const at::Tensor& tensor, std::size_t element, std::size_t bit) {
  auto* const byte = static_cast<std::uint8_t*>(tensor.data_ptr()) + element * tensor.element_size() + bit / 8;
  *byte = static_cast<std::uint8_t>(*byte ^ (1U << (bit % 8)));
}

std::string mismatch_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::Mismatch) << error.what();
    return error.what();
  }
  return "no error";
}

TEST(SameParameters, OneFlippedBitIsNamedInEveryType) {
  const std::vector<at::ScalarType> types = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16,     at::kLong,
                                             at::kInt,   at::kShort,  at::kChar, at::kComplexFloat, at::kBool};
  for (const int ranks : {2, 4}) {
    run_on_threads(ranks, [&](Communicator comm) {
      for (std::size_t t = 0; t < types.size(); ++t) {
        std::vector<NamedTensor> tensors;
        for (const at::ScalarType type : types) {
          tensors.push_back({at::toString(type), (pattern({3, 40}, 1) * 50).to(type)});
        }
        require_same_parameters(comm, tensors);
        const int odd = static_cast<int>(t) % ranks;
        const std::size_t bit = types[t] == at::kBool ? 0 : (13 * t + 3) % (8 * tensors[t].tensor.element_size());
        if (comm.rank() == odd) flip(tensors[t].tensor, 47, bit);
        const std::string text = mismatch_of([&] { require_same_parameters(comm, tensors, {.step = 12}); });
        EXPECT_NE(text.find(std::string(at::toString(types[t])) + " of [3, 40], element 47 at [1, 7]"),
                  std::string::npos)
            << text;
        EXPECT_NE(text.find("after 12 steps"), std::string::npos) << text;
        const std::string begin =
            ranks == 2 ? "the ranks' parameters differ" : "rank " + std::to_string(odd) + " differs from the others";
        EXPECT_EQ(text.rfind(begin, 0), 0U) << text;
      }
    });
  }
}

TEST(SameParameters, AreComparedEverySoManySteps) {
  run_on_threads(3, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallelOptions options = small_buckets();
    options.compare_parameters_every = 3;
    DistributedDataParallel model(net, comm, options);
    const auto step = [&](int number) {
      model.zero_grad();
      backward(model, number);
    };
    for (int number = 0; number < 7; ++number) step(number);
    EXPECT_EQ(model.stats().parameter_comparisons, 2);
    if (comm.rank() == 1) flip(net->second->weight, 20, 3);
    step(7);
    step(8);
    const std::string text = mismatch_of([&] { step(9); });
    EXPECT_NE(
        text.find("rank 1 differs from the others after 9 steps -- parameter 'second.weight' of [17, 17], element "
                  "20 at [1, 3]: rank 1"),
        std::string::npos)
        << text;
    if (comm.rank() == 1) flip(net->second->weight, 20, 3);
    model.require_same_parameters();
    step(9);
  });
}

TEST(SameParameters, RanksThatHaveJoinedAreLeftOut) {
  run_on_threads(4, [](Communicator comm) {
    std::vector<NamedTensor> tensors = {{"w", at::full({5}, 1.0)}};
    if (comm.rank() == 0) {
      flip(tensors[0].tensor, 0, 1);
      (void)comm.join();
      return;
    }
    require_same_parameters(comm, tensors);
    if (comm.rank() == 2) flip(tensors[0].tensor, 4, 0);
    const std::string text = mismatch_of([&] { require_same_parameters(comm, tensors); });
    EXPECT_EQ(text.rfind("rank 2 differs from the others -- w of [5], element 4 at [4]", 0), 0U) << text;
    (void)comm.join();
  });
}

}  // namespace
}  // namespace cohort
