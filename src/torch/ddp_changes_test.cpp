// Parameters and buffers of a wrapped module that are cast, added or replaced, and batches that are equal on all ranks.
// Every gradient of rank R's batch is R + 1.
#include <cohort/error.h>
#include <cohort/torch/nn.h>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <gtest/gtest.h>

#include "comm/api/communicator_impl.h"
#include "torch/test_models.h"

#include <cmath>
#include <optional>
#include <string>

namespace cohort {
namespace {

using nn::DistributedDataParallel;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

struct GrowingImpl : torch::nn::Module {
  at::Tensor w = register_parameter("w", at::ones({3}));
  at::Tensor v = register_parameter("v", at::ones({}));
  at::Tensor extra;
  bool grows_in_forward = false;
  at::Tensor forward(const at::Tensor& x) {
    if (grows_in_forward && !extra.defined()) grow(0);
    const at::Tensor sum = (w * x).sum() + v * x.mean();
    return extra.defined() ? sum + (extra * x).sum() : sum;
  }
  void grow(double value) { extra = register_parameter("extra", at::full({3}, value)); }
  void replace() {  // replaces parameters, like programs that densify or prune
    w = w.detach().clone().requires_grad_();
    parameters_["w"] = w;
  }
};
TORCH_MODULE(Growing);

constexpr double kMean = 1.5;  // mean of two ranks' gradients

at::Tensor batch(const Communicator& comm, at::ScalarType type = at::kFloat) {
  return at::full({3}, comm.rank() + 1.0, type);
}

void check(const Growing& net, double factor = 1) {
  for (const auto& item : net->named_parameters()) {
    const at::Tensor& gradient = item.value().grad();
    ASSERT_TRUE(gradient.defined()) << item.key();
    EXPECT_TRUE(at::allclose(gradient, at::full_like(gradient, kMean * factor))) << item.key() << ": " << gradient;
  }
}

void check_step(const Growing& net, DistributedDataParallel<GrowingImpl>& model, double factor = 1) {
  model(batch(model.communicator(), net->w.scalar_type())).backward();
  check(net, factor);
}

TEST(DdpChangesTest, ACastThereAndBackChangesNothing) {
  for (const bool keeps_gradients : {false, true}) {
    run_on_threads(2, [&](Communicator comm) {
      Growing net;
      DistributedDataParallel model(net, comm);
      for (const at::ScalarType type : {at::kHalf, at::kDouble}) {
        check_step(net, model);
        if (!keeps_gradients) model.zero_grad();
        net->to(type);
        net->to(at::kFloat);
        check_step(net, model, keeps_gradients ? 2 : 1);
        model.zero_grad();
        net->to(type);
        net->to(at::kFloat);
        {
          const nn::NoSyncGuard local = model.no_sync();
          model(batch(comm)).backward();
        }
        check_step(net, model, 2);
        model.zero_grad();
      }
      EXPECT_EQ(model.stats().steps, 6);
    });
  }
}

TEST(DdpChangesTest, AParameterThatIsFrozenBetweenForwardAndBackwardGetsNoGradient) {
  for (const bool on_all : {true, false}) {
    run_on_threads(2, [&](Communicator comm) {
      Growing net;
      DistributedDataParallel model(net, comm);
      check_step(net, model);
      model.zero_grad();
      const at::Tensor loss = model(batch(comm));
      if (on_all || comm.rank() == 0) net->w.requires_grad_(false);
      loss.backward();
      EXPECT_EQ(net->v.grad().item<float>(), kMean);
      const bool has_gradient = net->w.grad().defined() && net->w.grad().abs().sum().item<float>() != 0;
      EXPECT_EQ(has_gradient, !on_all);  // else it has the other rank's gradient
      net->w.requires_grad_(true);
      model.zero_grad();
      check_step(net, model);
    });
  }
}

TEST(DdpChangesTest, AStepThatIsRefusedMovesNoFrozenParameterEither) {
  for (const bool attached_anew : {false, true}) {
    run_on_threads(2, [&](Communicator comm) {
      Growing net;
      DistributedDataParallel model(net, comm, {.non_finite = nn::NonFinite::Raise});
      torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
      check_step(net, model);
      optimizer.step();
      optimizer.zero_grad(/*set_to_none=*/false);
      net->w.requires_grad_(false);
      if (attached_anew) net->grow(0);
      const at::Tensor before = net->w.clone();
      const at::Tensor bad = batch(comm) * (comm.rank() == 0 ? NAN : 1);
      EXPECT_THROW(model(bad).backward(), NonFiniteError);
      optimizer.step();
      EXPECT_TRUE(at::equal(net->w, before)) << net->w;
    });
  }
}

TEST(DdpChangesTest, WhatStaysCastIsTakenIn) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    check_step(net, model);
    model.zero_grad();
    net->to(at::kDouble);
    for (int step = 0; step < 2; ++step) {
      check_step(net, model);
      EXPECT_EQ(net->w.grad().scalar_type(), at::kDouble);
      model.zero_grad();
    }
    (void)model(batch(comm, at::kDouble));
    net->to(at::kFloat);
    EXPECT_THROW((void)model(batch(comm)), Error);  // between a forward and its reduction
  });
}

TEST(DdpChangesTest, GradientsWhoseDataIsReplaced) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    for (int step = 0; step < 4; ++step) {
      check_step(net, model);
      for (const at::Tensor& parameter : net->parameters())
        parameter.mutable_grad().set_data(parameter.grad().detach() * 0.5);
      if (step == 2) check_step(net, model, 1.5);
      model.zero_grad();
    }
  });
}

TEST(DdpChangesTest, ParametersThatAreAddedOrReplacedAreAveragedFromTheirFirstStep) {
  enum class How { Added, Replaced, AddedBeforeNoSync };
  for (const How how : {How::Added, How::Replaced, How::AddedBeforeNoSync}) {
    run_on_threads(2, [&](Communicator comm) {
      Growing net;
      DistributedDataParallel model(net, comm);
      for (int step = 0; step < 3; ++step) {
        check_step(net, model);
        model.zero_grad();
      }
      if (how == How::Replaced) {
        net->replace();
      } else {
        net->grow(comm.rank());
      }
      if (how == How::AddedBeforeNoSync) {
        const nn::NoSyncGuard local = model.no_sync();
        model(batch(comm)).backward();
        model(batch(comm)).backward();
      }
      check_step(net, model, how == How::AddedBeforeNoSync ? 3 : 1);
      if (how != How::Replaced) {
        EXPECT_TRUE(at::equal(net->extra, at::zeros({3})));  // rank 0's value
      }
      model.zero_grad();
      check_step(net, model);
      EXPECT_EQ(model.stats().steps, 5);
    });
  }
}

TEST(DdpChangesTest, AChangeOnOneRankAloneIsNamedByAll) {
  for (const std::string how : {"thawed", "added", "replaced"}) {
    run_on_threads(2, [&](Communicator comm) {
      Growing net;
      net->v.set_requires_grad(how != "thawed");
      DistributedDataParallel model(net, comm);
      model(batch(comm)).backward();
      model.zero_grad();
      if (comm.rank() == 1 && how == "thawed") net->v.set_requires_grad(true);
      if (comm.rank() == 1 && how == "added") net->grow(1);
      if (comm.rank() == 1 && how == "replaced") net->replace();
      std::string text;
      for (int tries = 0; tries < 2; ++tries) {
        try {
          model(batch(comm)).backward();
          ADD_FAILURE() << how;
        } catch (const Error& error) {
          EXPECT_EQ(error.code(), ErrorCode::Mismatch);
          text = error.what();
        }
        for (const at::Tensor& parameter : net->parameters()) EXPECT_FALSE(parameter.grad().defined());
      }
      EXPECT_NE(text.find("rank 1 brought all_reduce(uint64["), std::string::npos) << how << ": " << text;
      EXPECT_NE(text.find("to compare models and options"), std::string::npos) << how << ": " << text;
      if (comm.rank() == 0 && how == "thawed") net->v.set_requires_grad(true);
      if (comm.rank() == 0 && how == "added") net->grow(0);
      if (comm.rank() == 0 && how == "replaced") net->replace();
      check_step(net, model);
      if (comm.rank() == 0) return;
      EXPECT_NE(text.find("rank 1 compares its models"), std::string::npos) << how << ": " << text;
      if (how == "replaced") return;
      const std::string name = how == "thawed" ? "now has parameter 'v'" : "now has parameter 'extra'";
      EXPECT_NE(text.find(name), std::string::npos) << text;
    });
  }
}

TEST(DdpChangesTest, AParameterWhoseDataGetsAnotherSizeIsTakenIn) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    for (const std::int64_t rows : {1, 2, 5}) {
      net->w.set_data(at::ones({rows, 3}));
      for (int step = 0; step < 2; ++step) {
        check_step(net, model);
        EXPECT_EQ(net->w.grad().size(0), rows);
        model.zero_grad();
      }
    }
  });
}

TEST(DdpChangesTest, AParameterThatStaysGathersNoHooks) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    const auto hooks = [&] { return torch::autograd::impl::grad_accumulator(net->v)->post_hooks().size(); };
    const std::size_t before = hooks();
    for (int i = 0; i < 3; ++i) {
      net->replace();
      check_step(net, model);
      model.zero_grad();
    }
    EXPECT_EQ(hooks(), before);
  });
}

TEST(DdpChangesTest, AParameterThatComesTooLateIsRefused) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    net->grows_in_forward = true;
    std::string error;
    try {
      model(batch(comm)).backward();
    } catch (const Error& raised) {
      error = raised.what();
    }
    EXPECT_NE(error.find("'extra' was added or unfrozen after the forward"), std::string::npos) << error;
    net->zero_grad();
    check_step(net, model);  // in a forward the change is noticed
  });
}

TEST(DdpChangesTest, BuffersThatAreAddedAreMadeEqual) {
  run_on_threads(2, [](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    check_step(net, model);
    const at::Tensor seen = net->register_buffer("seen", at::full({2}, comm.rank() + 1.0));
    const auto part =
        net->register_module("part", torch::nn::BatchNorm1d(torch::nn::BatchNorm1dOptions(2).affine(false)));
    part->running_mean.fill_(comm.rank() + 1.0);
    model.zero_grad();
    check_step(net, model);
    EXPECT_TRUE(at::equal(seen, at::ones({2})));
    EXPECT_TRUE(at::equal(part->running_mean, at::ones({2})));
    seen.fill_(comm.rank() + 1.0);
    model.sync_buffers();
    EXPECT_TRUE(at::equal(seen, at::ones({2})));
    model.require_same_parameters();
  });
}

// Returns what is written to stderr while two ranks are given these batches. `none`: rank 1 has no samples in the
// second.
std::string told(bool equal_first, bool equal_second, bool none = false) {
  ::testing::internal::CaptureStderr();
  run_on_threads(2, [&](Communicator comm) {
    Growing net;
    DistributedDataParallel model(net, comm);
    int step = 0;
    for (const bool equal : {equal_first, equal_second, true, true}) {
      if (none) model.set_sample_count(step++ == 1 && comm.rank() == 1 ? 0 : 3);
      model(equal ? at::ones({3}) : batch(comm)).backward();
      model.zero_grad();
    }
  });
  return ::testing::internal::GetCapturedStderr();
}

TEST(DdpChangesTest, BatchesThatAreTheSameOnAllRanksAreToldOnce) {
  const std::string text = told(true, true);
  const std::size_t at = text.find("all ranks were given the same 3 samples");
  ASSERT_NE(at, std::string::npos) << text;
  EXPECT_EQ(text.find("all ranks were given", at + 1), std::string::npos) << text;
  EXPECT_EQ(told(true, false).find("all ranks were given"), std::string::npos);
  EXPECT_EQ(told(false, true).find("all ranks were given"), std::string::npos);
  EXPECT_EQ(told(false, false, true).find("all ranks were given"), std::string::npos);
}

}  // namespace
}  // namespace cohort
