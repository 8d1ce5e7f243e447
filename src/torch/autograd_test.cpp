// Differentiable collectives, on ranks that are threads: compares gradients and second derivatives with finite
// differences of the sum of all ranks' losses, and with one process.
#include <cohort/error.h>
#include <cohort/torch/autograd.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>

#include "torch/test_models.h"

#include <torch/csrc/autograd/autograd.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace cohort {
namespace {

using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

using Function = std::function<at::Tensor(const at::Tensor&)>;

at::Tensor gradient_of(const at::Tensor& loss, const at::Tensor& x, bool create_graph = false) {
  return torch::autograd::grad({loss}, {x}, {}, create_graph, create_graph)[0];
}

double total(Communicator& comm, const at::Tensor& loss) {
  at::Tensor sum = loss.detach().clone();
  comm.all_reduce(sum).wait();
  return sum.item<double>();
}

// Expects the derivatives of the sum over ranks of `loss`, by each element of each rank's x.
void expect_gradient(Communicator& comm, const at::Tensor& values, const Function& loss, const std::string& what) {
  const at::Tensor x = values.detach().clone(at::MemoryFormat::Contiguous).requires_grad_(true);
  const at::Tensor gradient = gradient_of(loss(x), x).reshape({-1});
  constexpr double kStep = 1e-5;
  for (int owner = 0; owner < comm.size(); ++owner) {
    at::Tensor elements = at::tensor(x.numel());
    comm.broadcast(elements, {.root = owner}).wait();
    for (std::int64_t i = 0; i < elements.item<std::int64_t>(); ++i) {
      double sums[2];
      for (int side = 0; side < 2; ++side) {
        at::Tensor moved = values.detach().clone(at::MemoryFormat::Contiguous);
        if (owner == comm.rank()) moved.view({-1})[i] += side == 0 ? kStep : -kStep;
        sums[side] = total(comm, loss(moved.requires_grad_(true)));
      }
      if (owner != comm.rank()) continue;
      EXPECT_NEAR(gradient[i].item<double>(), (sums[0] - sums[1]) / (2 * kStep), 1e-7)
          << what << ", element " << i << " of rank " << owner << " of " << comm.size();
    }
  }
}

// Expects the first and second derivatives.
void expect_gradients(Communicator& comm, const at::Tensor& values, const Function& function, const std::string& what) {
  const double salt = comm.rank() + 1;
  const Function loss = [&](const at::Tensor& x) {
    const at::Tensor y = function(x);
    return (at::sin(y) * pattern(y.sizes(), 10 * salt)).sum();
  };
  expect_gradient(comm, values, loss, what);
  expect_gradient(
      comm, values,
      [&](const at::Tensor& x) { return (gradient_of(loss(x), x, true) * pattern(x.sizes(), 20 * salt)).sum(); },
      what + " twice");
}

TEST(Autograd, GradientsAreThoseOfTheSumOfAllRanksLosses) {
  for (const int ranks : {3}) {
    run_on_threads(ranks, [](Communicator comm) {
      const std::int64_t p = comm.size();
      const at::Tensor x = pattern({2, 2}, comm.rank());
      const at::Tensor wide = pattern({2 * p, 2}, comm.rank());
      expect_gradients(
          comm, x, [&](const auto& v) { return autograd::all_reduce(comm, v); }, "all_reduce");
      expect_gradients(
          comm, x, [&](const auto& v) { return autograd::all_reduce(comm, v, ReduceOp::Average); }, "average");
      const int root = comm.size() - 1;
      expect_gradients(
          comm, x, [&](const auto& v) { return autograd::reduce(comm, v, root); }, "reduce");
      expect_gradients(
          comm, x, [&](const auto& v) { return autograd::broadcast(comm, v, root); }, "broadcast");
      for (const std::int64_t dim : {0, 1, -1}) {
        expect_gradients(
            comm, x, [&](const auto& v) { return autograd::all_gather(comm, v, dim); }, "all_gather");
        expect_gradients(
            comm, dim == 0 ? wide : wide.t(), [&](const auto& v) { return autograd::reduce_scatter(comm, v, dim); },
            "reduce_scatter");
      }
      expect_gradients(
          comm, wide, [&](const auto& v) { return autograd::all_to_all(comm, v); }, "all_to_all");
      // Rank r sends s + 1 rows to rank s; the last rank sends none.
      std::vector<std::int64_t> to, from;
      for (std::int64_t peer = 0; peer < p; ++peer) {
        to.push_back(comm.rank() == p - 1 ? 0 : peer + 1);
        from.push_back(peer == p - 1 ? 0 : comm.rank() + 1);
      }
      std::int64_t rows = 0;
      for (const std::int64_t one : to) rows += one;
      expect_gradients(
          comm, pattern({rows, 2}, comm.rank()), [&](const auto& v) { return autograd::all_to_all(comm, v, to, from); },
          "all_to_all_v");
    });
  }
}

TEST(Autograd, ResultsAreThoseOfTheCollectives) {
  run_on_threads(3, [](Communicator comm) {
    const at::Tensor x = pattern({3, 2}, comm.rank());
    const at::Tensor all = all_gather(comm, x);
    expect_equal({autograd::all_gather(comm, x, 1)}, {at::cat({all[0], all[1], all[2]}, 1)});
    expect_equal({autograd::all_reduce(comm, x)}, {all[0] + all[1] + all[2]});
    expect_equal({autograd::reduce_scatter(comm, x)}, {(all[0] + all[1] + all[2]).narrow(0, comm.rank(), 1)});
    expect_equal({autograd::reduce(comm, x, 1)},
                 {comm.rank() == 1 ? all[0] + all[1] + all[2] : at::zeros({3, 2}, at::kDouble)});
    expect_equal({autograd::broadcast(comm, x, 2)}, {all[2]});
    expect_equal({autograd::all_to_all(comm, x)}, {all.select(1, comm.rank())});
    expect_equal({autograd::scatter_to(comm, x, 0)}, {x.narrow(0, comm.rank(), 1)});
    expect_equal({x}, {pattern({3, 2}, comm.rank())});
    EXPECT_FALSE(autograd::all_reduce(comm, x).requires_grad());
    // Integers have no gradient, and need none.
    expect_equal({autograd::all_reduce(comm, at::ones({2}, at::kLong))}, {at::full({2}, 3, at::kLong)});
  });
}

TEST(Autograd, ResultsMayBeChangedInPlace) {
  run_on_threads(2, [](Communicator comm) {
    const auto expect_new = [&](const Function& function, const std::string& what) {
      const at::Tensor x = pattern({4, 4}, comm.rank()).requires_grad_(true);
      const at::Tensor expected = gradient_of(at::relu(function(x)).sum(), x);
      at::Tensor y = function(x);
      ASSERT_NO_THROW(y.relu_()) << what;
      EXPECT_TRUE(at::equal(gradient_of(y.sum(), x), expected)) << what;
      expect_equal({x}, {pattern({4, 4}, comm.rank())});
    };
    expect_new([&](const auto& x) { return autograd::all_reduce(comm, x); }, "all_reduce");
    expect_new([&](const auto& x) { return autograd::reduce(comm, x); }, "reduce");
    expect_new([&](const auto& x) { return autograd::broadcast(comm, x); }, "broadcast");
    expect_new([&](const auto& x) { return autograd::all_to_all(comm, x); }, "all_to_all");
    expect_new([&](const auto& x) { return autograd::reduce_from(comm, x); }, "reduce_from");
    for (const std::int64_t dim : {0, 1}) {
      expect_new([&](const auto& x) { return autograd::all_gather(comm, x, dim); }, "all_gather");
      expect_new([&](const auto& x) { return autograd::reduce_scatter(comm, x, dim); }, "reduce_scatter");
      expect_new([&](const auto& x) { return autograd::scatter_to(comm, x, dim); }, "scatter_to");
      expect_new([&](const auto& x) { return autograd::gather_from(comm, x, dim); }, "gather_from");
    }
  });
}

// A layer is cut into two parts, which together give the results of one process; second derivatives too.
TEST(Autograd, OneLossForAllIsCountedOnce) {
  const auto penalty = [](const at::Tensor& y, const at::Tensor& x) {
    const at::Tensor loss = at::sin(y).sum();
    return loss + gradient_of(loss, x, true).square().sum();
  };
  const at::Tensor a = pattern({4, 6}, 1), b = pattern({6, 3}, 2), values = pattern({2, 4}, 3);
  const at::Tensor x1 = values.clone().requires_grad_(true);
  const at::Tensor a1 = a.clone().requires_grad_(true), b1 = b.clone().requires_grad_(true);
  const at::Tensor whole = penalty(at::tanh(x1.mm(a1)).mm(b1), x1);
  whole.backward();
  for (const int ranks : {1, 2, 3}) {
    run_on_threads(ranks, [&](Communicator comm) {
      const std::int64_t part = 6 / comm.size(), begin = comm.rank() * part;
      for (const bool put_together : {false, true}) {
        const at::Tensor x = values.clone().requires_grad_(true);
        const at::Tensor ap = a.narrow(1, begin, part).clone().requires_grad_(true);
        at::Tensor hidden = at::tanh(autograd::copy_to(comm, x).mm(ap));
        if (put_together) hidden = autograd::scatter_to(comm, autograd::gather_from(comm, hidden, 1), -1);
        const at::Tensor bp = b.narrow(0, begin, part).clone().requires_grad_(true);
        const at::Tensor loss = penalty(autograd::reduce_from(comm, hidden.mm(bp)), x);
        loss.backward();
        expect_close({loss, x.grad(), ap.grad(), bp.grad()},
                     {whole, x1.grad(), a1.grad().narrow(1, begin, part), b1.grad().narrow(0, begin, part)}, 1e-11);
      }
    });
  }
}

// Rank r changes its value and sends it to rank r + 1; the last rank has the loss. Also a ring in which all ranks first
// send more than is buffered.
TEST(Autograd, SendAndRecvSendGradientsBack) {
  run_on_threads(3, [](Communicator comm) {
    const at::Tensor x = pattern({50}, comm.rank()).requires_grad_(true);
    at::Tensor value = at::sin(x), token;
    if (comm.rank() > 0) {
      value = value * autograd::recv(comm, comm.rank() - 1, {.sizes = {50}, .options = at::kDouble, .tag = 5});
    }
    if (comm.rank() < 2) {
      autograd::send(comm, value, comm.rank() + 1, 5).backward();
    } else {
      value.sum().backward();
    }
    std::vector<at::Tensor> xs;
    for (int rank = 0; rank < 3; ++rank) xs.push_back(pattern({50}, rank).requires_grad_(true));
    (at::sin(xs[0]) * at::sin(xs[1]) * at::sin(xs[2])).sum().backward();
    expect_close({x.grad()}, {xs[static_cast<std::size_t>(comm.rank())].grad()}, 1e-14);

    constexpr std::int64_t kMany = 1 << 20;
    const at::Tensor mine = pattern({kMany}, comm.rank()).requires_grad_(true);
    const int next = (comm.rank() + 1) % 3, before = (comm.rank() + 2) % 3;
    for (const bool chained : {false, true}) {
      at::Tensor sent = autograd::send(comm, mine * 2, next);
      EXPECT_EQ(sent.item<float>(), 0);
      at::Tensor came = autograd::recv(
          comm, before, {.sizes = {kMany}, .options = at::kDouble, .after = chained ? sent : at::Tensor()});
      at::Tensor loss = came.square().sum();
      if (!chained) loss = loss + sent;
      mine.mutable_grad().reset();
      loss.backward();
      expect_close({came, mine.grad()}, {2 * pattern({kMany}, before), 8 * mine.detach()}, 1e-14);
    }
    {
      const at::NoGradGuard no_grad;  // no gradient comes back
      const at::Tensor sent = autograd::send(comm, mine, next);
      const at::Tensor came = autograd::recv(comm, before, {.sizes = {kMany}, .options = at::kDouble});
      expect_equal({came}, {pattern({kMany}, before)});
      EXPECT_FALSE(came.requires_grad() || sent.requires_grad());
    }
  });
}

ErrorCode refused(const std::function<void()>& call, const std::string& text = {}) {
  try {
    call();
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(text), std::string::npos) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "not refused: " << text;
  return ErrorCode::Internal;
}

TEST(Autograd, WhatDiffersIsRefusedOnAllRanksAndTheWorldGoesOn) {
  run_on_threads(3, [](Communicator comm) {
    const bool odd = comm.rank() == 1;
    const at::Tensor x = at::ones({odd ? 6 : 3, 2}, at::kDouble).requires_grad_(true);
    const at::Tensor typed = at::ones({3, 2}, odd ? at::kFloat : at::kDouble);
    EXPECT_EQ(refused([&] { (void)autograd::all_reduce(comm, x); }), ErrorCode::Mismatch);
    EXPECT_EQ(refused([&] { (void)autograd::all_gather(comm, x); }), ErrorCode::Mismatch);
    EXPECT_EQ(refused([&] { (void)autograd::reduce_scatter(comm, x); }), ErrorCode::Mismatch);
    EXPECT_EQ(refused([&] { (void)autograd::all_to_all(comm, x); }), ErrorCode::Mismatch);
    EXPECT_EQ(refused([&] { (void)autograd::all_reduce(comm, typed); }), ErrorCode::Mismatch);
    EXPECT_EQ(refused([&] { (void)autograd::gather_from(comm, typed, 1); }), ErrorCode::Mismatch);
    // The ranks' functions differ only in the backward.
    const at::Tensor y = odd ? autograd::reduce_from(comm, x.narrow(0, 0, 3)) : autograd::all_reduce(comm, x);
    EXPECT_EQ(y.sum().item<double>(), 18);

    const auto invalid = [](const std::function<void()>& call, const std::string& text) {
      EXPECT_EQ(refused(call, text), ErrorCode::InvalidArgument);
    };
    invalid([&] { (void)autograd::all_reduce(comm, x, ReduceOp::Max); }, "max is not differentiable here");
    invalid([&] { (void)autograd::all_reduce(comm, at::Tensor()); }, "undefined tensor");
    invalid([&] { (void)autograd::all_gather(comm, x, 2); }, "no dimension 2 in a tensor of 2");
    invalid([&] { (void)autograd::all_gather(comm, at::ones({})); }, "no dimension 0 in a tensor of 0");
    invalid([&] { (void)autograd::reduce_scatter(comm, x, 1); }, "has 2 elements, which are not 3 equal parts");
    invalid([&] { (void)autograd::send(comm, x, 0, 1 << 30); }, "tag 1073741824 -- from 0, below 2^30");
    const at::Tensor leaf = at::ones({2}).requires_grad_(true);
    const at::Tensor sent = autograd::send(comm, leaf, (comm.rank() + 1) % 3);
    const at::Tensor came = autograd::recv(comm, (comm.rank() + 2) % 3, {.sizes = {2}, .after = sent});
    invalid([&] { (void)gradient_of(sent, leaf, true); }, "double backward");
    invalid([&] { (void)gradient_of(came.sum(), leaf, true); }, "double backward");
  });
}

}  // namespace
}  // namespace cohort
