// DistributedDataParallel on ranks that are threads: unused parameters, uneven ends, other types, errors.
#include <cohort/error.h>
#include <cohort/observer.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "torch/test_models.h"

#include <atomic>
#include <cmath>
#include <functional>
#include <map>
#include <new>
#include <stdexcept>
#include <utility>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using nn::DistributedDataParallelOptions;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

struct BranchesImpl : torch::nn::Module {
  BranchesImpl() {
    for (const char* name : {"common", "left", "right", "never"}) {
      at::Tensor parameter = register_parameter(name, at::ones({3}, at::kFloat));
      parts[name] = parameter;
    }
  }
  at::Tensor forward(const at::Tensor& x, bool left) { return x * parts["common"] * parts[left ? "left" : "right"]; }
  std::map<std::string, at::Tensor> parts;
};

TEST(DdpTest, UnusedParameters) {
  run_on_threads(3, [](Communicator comm) {
    auto net = std::make_shared<BranchesImpl>();
    DistributedDataParallel<BranchesImpl> model(net, comm, by_rows({.bucket_bytes = 16, .first_bucket_bytes = 16}));
    const auto gradient = [&](const char* name) { return net->parts[name].grad(); };
    const at::Tensor x = at::full({2, 3}, 6.0);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model(x, comm.rank() == 1).mean().backward();  // true on rank 1 only
      EXPECT_TRUE(at::allclose(gradient("common"), at::full({3}, 2.0)));
      EXPECT_TRUE(at::allclose(gradient("left"), at::full({3}, 2.0 / 3)));
      EXPECT_TRUE(at::allclose(gradient("right"), at::full({3}, 4.0 / 3)));
      EXPECT_FALSE(gradient("never").defined());
    }
    // A parameter that no rank uses, but that has an earlier gradient, keeps it to the bit.
    const at::Tensor kept = at::tensor({0.1F, 0.2F, 0.3F});
    net->parts["never"].mutable_grad() = kept.clone();
    model.zero_grad();
    net->parts["never"].mutable_grad() = kept.clone();
    model(x, true).mean().backward();
    EXPECT_TRUE(at::equal(gradient("never"), kept));
    EXPECT_FALSE(gradient("right").defined());
    EXPECT_TRUE(at::allclose(gradient("left"), at::full({3}, 2.0)));
    // The only rank that uses the parameter has no samples, so it counts as unused.
    model.zero_grad();
    model(comm.rank() == 1 ? at::empty({0, 3}) : x, comm.rank() == 1).mean().backward();
    EXPECT_FALSE(gradient("left").defined());
    EXPECT_TRUE(at::allclose(gradient("right"), at::full({3}, 2.0)));
  });
}

TEST(DdpTest, ABackwardThatTouchesNoParameterTakesPart) {
  struct PassingImpl : torch::nn::Module {
    PassingImpl() { weight = register_parameter("weight", at::ones({2})); }
    at::Tensor forward(const at::Tensor& x, bool use) { return use ? x * weight : x * 2; }
    at::Tensor weight;
  };
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<PassingImpl>();
    DistributedDataParallel<PassingImpl> model(net, comm);
    const at::Tensor x = at::full({1, 2}, 4.0).requires_grad_();
    model(x, comm.rank() == 0).sum().backward();
    EXPECT_TRUE(at::equal(net->weight.grad(), at::full({2}, 2.0)));
  });
}

// ------------------------------------------------------------------------------------------ uneven ends

TEST(DdpTest, StepsWithoutSamplesKeepRanksInStepUntilAllHaveEnded) {
  std::vector<std::vector<at::Tensor>> results(3);
  run_on_threads(3, [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm, small_buckets());
    torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    for (int step = 0; step < 2 + 2 * comm.rank(); ++step) {
      model.zero_grad();
      const Batch batch = batch_of(step, 3);
      loss_of(model(batch.x.slice(0, comm.rank(), comm.rank() + 1)), batch.y.slice(0, comm.rank(), comm.rank() + 1))
          .backward();
      optimizer.step();
    }
    model.zero_grad();
    while (model.step_without_samples()) {
      optimizer.step();
      model.zero_grad();
    }
    for (const at::Tensor& parameter : model.parameters()) EXPECT_FALSE(parameter.grad().defined());
    EXPECT_EQ(model.stats().steps, 7);
    results[static_cast<std::size_t>(comm.rank())] = copies(model.parameters());
  });
  Mlp net = with_values(Mlp(), 0);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 6; ++step) {
    const int first = step < 2 ? 0 : step < 4 ? 1 : 2;  // lowest of the ranks still active
    const Batch batch = batch_of(step, 3);
    for (at::Tensor& parameter : net->parameters()) parameter.mutable_grad().reset();
    loss_of(net->forward(batch.x.slice(0, first)), batch.y.slice(0, first)).backward();
    optimizer.step();
  }
  for (const auto& rank : results) {
    expect_equal(rank, results[0]);
    expect_close(rank, copies(net->parameters()), 1e-11);
  }
}

TEST(DdpTest, JoinServesTheOthersAndTakesTheirModel) {
  std::vector<std::vector<at::Tensor>> results(3);
  run_on_threads(3, [&](Communicator comm) {
    torch::nn::BatchNorm1d norm(5);
    DistributedDataParallel model(norm, comm);
    torch::optim::SGD optimizer(model.parameters(), 0.1);
    const int steps = comm.rank() == 0   ? 1
                      : comm.rank() == 1 ? 4
                                         : 3;  // rank 0 ends first, and buffers then come from rank 1
    for (int step = 0; step < steps; ++step) {
      model.zero_grad();
      at::pow(model(pattern({6, 5}, step + comm.rank() * 0.3, at::kFloat)), 3).mean().backward();
      optimizer.step();
    }
    EXPECT_EQ(model.join(), 1);
    for (const auto& item : model.state_dict())
      results[static_cast<std::size_t>(comm.rank())].push_back(item.value().clone());
    // All ranks go on with training, with the same buckets and the same model.
    for (int step = 0; step < 2; ++step) {
      model.zero_grad();
      at::pow(model(pattern({6, 5}, step + comm.rank() * 0.3, at::kFloat)), 3).mean().backward();
    }
    const at::Tensor gradient = norm->weight.grad().clone();
    broadcast(comm, gradient).wait();
    EXPECT_TRUE(at::equal(gradient, norm->weight.grad()));
    EXPECT_EQ(model.join(), 0);  // no rank lacks a step now
  });
  for (const auto& rank : results) expect_equal(rank, results[1]);
  EXPECT_EQ(results[0].back().item<std::int64_t>(), 4);  // num_batches_tracked
}

// ------------------------------------------------------------------------------------------ types, buffers, names

TEST(DdpTest, MixedTypes) {
  struct MixedImpl : torch::nn::Module {
    MixedImpl() {
      for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
        for (int i = 0; i < 3; ++i) {
          parts.push_back(register_parameter("p" + std::to_string(parts.size()), at::ones({4}, type)));
        }
      }
    }
    at::Tensor forward(const at::Tensor& x) {
      at::Tensor sum = x.to(at::kDouble).sum() * 0;
      for (const at::Tensor& part : parts) sum = sum + (x.to(part.scalar_type()) * part).to(at::kDouble).mean();
      return sum;
    }
    std::vector<at::Tensor> parts;
  };
  run_on_threads(2, [](Communicator comm) {
    auto net = std::make_shared<MixedImpl>();
    DistributedDataParallel<MixedImpl> model(net, comm, by_rows({.bucket_bytes = 20, .first_bucket_bytes = 8}));
    EXPECT_GE(model.stats().buckets, 8);
    for (int step = 0; step < 3; ++step) {
      model.zero_grad();
      model(at::full({comm.rank() == 0 ? 1 : 3, 4}, comm.rank() == 0 ? 8.0 : 16.0)).backward();
      for (const at::Tensor& part : net->parts) {
        EXPECT_EQ(part.grad().scalar_type(), part.scalar_type());
        EXPECT_TRUE(at::equal(part.grad().to(at::kDouble), at::full({4}, (1 * 2.0 + 3 * 4.0) / 4, at::kDouble)));
      }
    }
  });
}

TEST(DdpTest, BuffersAreRankZerosInSynchronisingForwards) {
  run_on_threads(2, [](Communicator comm) {
    torch::nn::BatchNorm1d norm(torch::nn::BatchNorm1dOptions(5).momentum(0.5));
    norm->running_mean.fill_(comm.rank() * 10.0);
    DistributedDataParallel model(norm, comm);
    EXPECT_TRUE(at::equal(norm->running_mean, at::zeros({5})));  // at construction
    const at::Tensor x = at::full({4, 5}, comm.rank() == 0 ? 2.0 : 100.0) + pattern({4, 5}, 0, at::kFloat) * 0;
    // With two forwards before one backward, the second forward's broadcast must not invalidate the first forward.
    (model(x).sum() + model(x).sum()).backward();
    EXPECT_TRUE(at::allclose(norm->running_mean, at::full({5}, comm.rank() == 0 ? 1.5 : 50.5)));
    {
      const at::NoGradGuard no_grad;  // does not communicate, so one rank may evaluate without the others
      if (comm.rank() == 1) (void)model(x);
      const auto guard = model.no_sync();
      const at::AutoGradMode grad(true);
      if (comm.rank() == 1) (void)model(x);
    }
    model.sync_buffers();
    EXPECT_TRUE(at::allclose(norm->running_mean, at::full({5}, 1.5)));
    EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 2);
  });
}

TEST(DdpTest, NamesHaveNoPrefix) {
  run_on_threads(1, [](Communicator comm) {
    Mlp net;
    DistributedDataParallel model(net, comm);
    EXPECT_EQ(model.module().get(), net.get());
    EXPECT_TRUE(model.state_dict().contains("first.weight"));
    EXPECT_EQ(model.state_dict().size(), 6U);
    EXPECT_TRUE(model.state_dict()["last.bias"].is_same(net->last->bias));
  });
}

// ------------------------------------------------------------------------------------------ what is refused

template <class Make>
void expect_models_refused(Make make, const std::vector<std::string>& words) {
  std::atomic<int> refused = 0;
  run_on_threads(3, [&](Communicator comm) {
    try {
      DistributedDataParallel model(make(comm.rank()), comm);
      ADD_FAILURE() << "accepted on rank " << comm.rank();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      for (const std::string& word : words) {
        EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what() << "\nlacks " << word;
      }
      ++refused;
    }
    comm.barrier().wait();  // the world stays usable
  });
  EXPECT_EQ(refused, 3);
}

TEST(DdpTest, ModelsThatDifferAreRefusedByNameOnEveryRank) {
  expect_models_refused([](int rank) { return Mlp(at::kDouble, rank == 2 ? 8 : 9); },
                        {"rank 0", "'first.weight' of Double [9, 5]", "rank 2", "[8, 5]"});
  expect_models_refused([](int rank) { return Mlp(rank == 1 ? at::kFloat : at::kDouble); },
                        {"Double", "Float", "rank 1"});
  expect_models_refused(
      [](int rank) {
        Mlp net;
        if (rank == 1) net->register_buffer("extra", at::zeros({2}));
        return net;
      },
      {"nothing more", "buffer 'extra'"});
  expect_models_refused(
      [](int rank) {
        Mlp net;
        if (rank == 1) net->second->bias.set_requires_grad(false);
        return net;
      },
      {"'second.bias'", "frozen"});
}

template <class Body>
void expect_error(ErrorCode code, const std::string& word, Body&& body) {
  try {
    body();
    ADD_FAILURE() << "no error about " << word;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
  }
}

TEST(DdpTest, MisuseIsAnErrorAndNotASilence) {
  run_on_threads(2, [](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    auto model = std::make_unique<DistributedDataParallel<MlpImpl>>(net, comm);
    const Batch batch = batch_of(0, 4);
    expect_error(ErrorCode::InvalidArgument, "already wrapped", [&] { DistributedDataParallel again(net, comm); });
    expect_error(ErrorCode::InvalidArgument, "no_sync", [&] {
      const auto guard = model->no_sync();
      model->step_without_samples();
    });
    // Without a reducer, autograd alone handles the gradients again.
    model.reset();
    net->zero_grad();
    loss_of(net->forward(batch.x), batch.y).backward();
    EXPECT_TRUE(net->last->bias.grad().defined());
    DistributedDataParallel anew(net, comm);
    loss_of(anew(batch.x), batch.y).backward();
  });
  run_on_threads(1, [](Communicator comm) {
    Mlp net;
    for (at::Tensor& parameter : net->parameters()) parameter.set_requires_grad(false);
    expect_error(ErrorCode::InvalidArgument, "no parameter", [&] { DistributedDataParallel model(net, comm); });
    EXPECT_THROW((DistributedDataParallel<MlpImpl>(nullptr, comm)), Error);
  });
}

struct Failing : torch::autograd::Function<Failing> {
  static at::Tensor forward(torch::autograd::AutogradContext*, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::tensor_list backward(torch::autograd::AutogradContext*, torch::autograd::tensor_list) {
    throw std::runtime_error("the user's own");
  }
};

struct FailingNetImpl : torch::nn::Module {
  FailingNetImpl() {
    first = register_module("first", torch::nn::Linear(5, 4));
    last = register_module("last", torch::nn::Linear(4, 3));
  }
  at::Tensor forward(const at::Tensor& x, bool fail) {
    const at::Tensor hidden = first(x);
    return last(fail ? Failing::apply(hidden) : hidden);
  }
  torch::nn::Linear first{nullptr}, last{nullptr};
};

TEST(DdpTest, AFailedBackwardIsNotForgotten) {
  std::atomic<int> aborted = 0;
  const auto body = [&](Communicator comm) {
    DistributedDataParallel<FailingNetImpl> model(std::make_shared<FailingNetImpl>(), comm);
    const at::Tensor x = at::ones({2, 5});
    if (comm.rank() == 0) {
      const at::Tensor loss = model(x, false).sum();
      const at::Tensor other = model(x, false).sum();                                     // the same as on the peer
      expect_error(ErrorCode::Aborted, "as the message says", [&] { loss.backward(); });  // the peer never comes
      ++aborted;
      return;
    }
    const at::Tensor loss = model(x, true).sum();
    const at::Tensor other = model(x, false).sum();
    EXPECT_THROW(loss.backward(), std::runtime_error);
    expect_error(ErrorCode::Aborted, "out of step", [&] { other.backward(); });
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model(x, false); });
    comm.abort("as the message says");
  };
  run_on_threads(2, body);
  EXPECT_EQ(aborted, 1);
}

// Throws at the bucket with number `index`, on the rank that has this observer.
struct Throwing : Observer {
  explicit Throwing(std::function<void()> what) : what_(std::move(what)) {}
  void on_bucket_ready(const BucketEvent& event) override {
    if (event.index == index) what_();
  }
  int index = -1;

 private:
  std::function<void()> what_;
};

// The end of the backward fails on one rank before it has started reductions for which the others wait.
void expect_the_end_to_be_remembered(const std::function<void()>& failure) {
  std::atomic<int> aborted = 0;
  run_on_threads(2, [&](Communicator comm) {
    auto net = std::make_shared<BranchesImpl>();
    Throwing observer(failure);
    DistributedDataParallel<BranchesImpl> model(
        net, comm, {.bucket_bytes = 16, .first_bucket_bytes = 16, .observer = comm.rank() == 1 ? &observer : nullptr});
    observer.index = model.slot_of("never").bucket;  // unused, so that only the end of backward completes it
    const at::Tensor x = at::ones({2, 3});
    const at::Tensor loss = model(x, true).mean();
    const at::Tensor other = model(x, true).mean() * 100;
    if (comm.rank() == 0) {
      expect_error(ErrorCode::Aborted, "as the message says", [&] { loss.backward(); });
      ++aborted;
      return;
    }
    EXPECT_ANY_THROW(loss.backward());
    observer.index = -1;
    expect_error(ErrorCode::Aborted, "out of step", [&] { other.backward(); });
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model(x, true); });
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model.step_without_samples(); });
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model.join(); });
    comm.abort("as the message says");
  });
  EXPECT_EQ(aborted, 1);
}

TEST(DdpTest, AFailureAtTheEndOfBackwardIsNotForgotten) {
  expect_the_end_to_be_remembered([] { throw std::runtime_error("the observer's own"); });
  expect_the_end_to_be_remembered([] { throw std::bad_alloc(); });
  // An error of Cohort that comes from no collective of this model.
  expect_the_end_to_be_remembered([] { throw Error(ErrorCode::Timeout, "the observer's own", {}); });
}

TEST(DdpTest, AStepWithoutSamplesThatFailsIsNotForgotten) {
  std::atomic<int> aborted = 0;
  run_on_threads(2, [&](Communicator comm) {
    Throwing observer([] { throw std::runtime_error("the observer's own"); });
    DistributedDataParallel<BranchesImpl> model(std::make_shared<BranchesImpl>(), comm,
                                                {.observer = comm.rank() == 1 ? &observer : nullptr});
    observer.index = 0;
    const at::Tensor x = at::ones({2, 3});
    if (comm.rank() == 0) {
      const at::Tensor loss = model(x, true).mean();
      expect_error(ErrorCode::Aborted, "as the message says", [&] { loss.backward(); });
      ++aborted;
      return;
    }
    EXPECT_THROW((void)model.step_without_samples(), std::runtime_error);
    observer.index = -1;
    expect_error(ErrorCode::Aborted, "out of step", [&] { (void)model.step_without_samples(); });
    comm.abort("as the message says");
  });
  EXPECT_EQ(aborted, 1);
}

// A failure in no_sync affects no other rank.
TEST(DdpTest, ALocalBackwardThatFailsIsOver) {
  run_on_threads(2, [&](Communicator comm) {
    const auto net = std::make_shared<FailingNetImpl>();
    DistributedDataParallel<FailingNetImpl> model(net, comm);
    const at::Tensor x = at::ones({2, 5});
    const at::Tensor held = model(x, false).sum();
    if (comm.rank() == 1) {
      const auto guard = model.no_sync();
      const at::Tensor loss = model(x, true).sum();
      EXPECT_THROW(loss.backward(), std::runtime_error);
      model.zero_grad();
    }
    held.backward();  // a backward before the next forward
    EXPECT_EQ(model.stats().steps, 1);
    const at::Tensor gradient = net->first->weight.grad().clone();
    broadcast(comm, gradient).wait();
    EXPECT_TRUE(at::equal(gradient, net->first->weight.grad()));
  });
}

TEST(DdpTest, ErrorsOfReductionsComeOutOfBackward) {
  std::atomic<int> mismatches = 0;
  run_on_threads(2, [&](Communicator comm) {
    Mlp net = with_values(Mlp(), 0);
    DistributedDataParallel model(net, comm);
    const Batch batch = batch_of(0, 4);
    const at::Tensor loss = loss_of(model(batch.x), batch.y);
    try {
      if (comm.rank() == 0) {
        loss.backward();
      } else {
        comm.barrier().wait();
      }
    } catch (const Error& error) {
      if (error.code() == ErrorCode::Mismatch) ++mismatches;
    }
    model.zero_grad();
    comm.barrier().wait();
  });
  EXPECT_EQ(mismatches, 2);
}

}  // namespace
}  // namespace cohort
