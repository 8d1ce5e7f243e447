// Each rule against its formula in double precision, a thousand steps, zeros and tiny gradients among them. (Against
// torch itself: python/tests/test_ps.py.)
#include "ps/optimizer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

namespace cohort::ps {
namespace {

/// One element in doubles, by the text-book.
struct Reference {
  double weight = 0, first = 0, second = 0;

  void step(const optim::Sgd& r, double g, int t) {
    g += r.weight_decay * weight;
    if (r.momentum != 0) first = t == 1 ? g : r.momentum * first + (1 - r.dampening) * g;
    weight -= r.lr * (r.momentum == 0 ? g : r.nesterov ? g + r.momentum * first : first);
  }
  void step(const optim::Adagrad& r, double g, int t) {
    g += r.weight_decay * weight;
    first += g * g;
    weight -= r.lr / (1 + (t - 1) * r.lr_decay) * g / (std::sqrt(first) + r.eps);
  }
  template <class Adam>
  void adam(const Adam& r, double g, int t) {
    first = r.beta1 * first + (1 - r.beta1) * g;
    second = r.beta2 * second + (1 - r.beta2) * g * g;
    weight -= r.lr * (first / (1 - std::pow(r.beta1, t))) / (std::sqrt(second / (1 - std::pow(r.beta2, t))) + r.eps);
  }
  void step(const optim::Adam& r, double g, int t) { adam(r, g + r.weight_decay * weight, t); }
  void step(const optim::AdamW& r, double g, int t) {
    weight *= 1 - r.lr * r.weight_decay;
    adam(r, g, t);
  }
  void step(const optim::Ftrl& r, double g, int) {
    const double sigma = (std::sqrt(second + g * g) - std::sqrt(second)) / r.lr;
    first += g - sigma * weight;
    second += g * g;
    weight = std::fabs(first) <= r.l1
                 ? 0
                 : -(first - std::copysign(r.l1, first)) / ((r.beta + std::sqrt(second)) / r.lr + r.l2);
  }
};

template <class Rule>
void compare(const Rule& rule, double tolerance) {
  constexpr std::size_t kDim = 13;
  std::mt19937 random(5);
  std::normal_distribution<float> normal(0.1F, 1);
  const Optimizer optimizer = rule;
  ASSERT_TRUE(check(optimizer));
  std::vector<float> weights(kDim), slots(slots_of(optimizer, kDim)), gradient(kDim);
  begin_slots(optimizer, slots.data(), kDim);
  std::vector<Reference> reference(kDim);
  for (std::size_t i = 0; i < kDim; ++i) {
    weights[i] = normal(random);
    reference[i].weight = weights[i];
    if constexpr (std::is_same_v<Rule, optim::Adagrad>) reference[i].first = rule.initial_accumulator_value;
  }
  for (int t = 1; t <= 1000; ++t) {
    for (std::size_t i = 0; i < kDim; ++i) {
      gradient[i] = t % 50 == 0 ? 0 : normal(random);
      if (i == 0) gradient[i] = 0;  // never a gradient
      if (i == 1) gradient[i] = std::numeric_limits<float>::denorm_min() * static_cast<float>(t);
    }
    step(optimizer, {weights.data(), slots.data(), kDim, static_cast<std::uint32_t>(t)}, gradient.data());
    for (std::size_t i = 0; i < kDim; ++i) {
      reference[i].step(rule, gradient[i], t);
      ASSERT_NEAR(weights[i], reference[i].weight, tolerance * (1 + std::fabs(reference[i].weight)))
          << "element " << i << " at step " << t;
    }
  }
}

TEST(Optimizer, Sgd) {
  compare(optim::Sgd{.lr = 0.01}, 1e-5);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .weight_decay = 1e-3}, 1e-4);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .dampening = 0.5}, 1e-4);
  compare(optim::Sgd{.lr = 0.01, .momentum = 0.9, .nesterov = true}, 1e-4);
}
TEST(Optimizer, Adagrad) {
  compare(optim::Adagrad{.lr = 0.05}, 1e-5);
  compare(optim::Adagrad{.lr = 0.05, .lr_decay = 0.01, .weight_decay = 1e-3, .initial_accumulator_value = 0.1}, 1e-5);
}
TEST(Optimizer, Adam) {
  compare(optim::Adam{.lr = 0.01}, 1e-4);
  compare(optim::Adam{.lr = 0.01, .beta1 = 0.8, .beta2 = 0.99, .weight_decay = 1e-3}, 1e-4);
}
TEST(Optimizer, AdamW) { compare(optim::AdamW{.lr = 0.01, .weight_decay = 0.1}, 1e-4); }
TEST(Optimizer, Ftrl) {
  compare(optim::Ftrl{.lr = 0.1}, 1e-4);
  compare(optim::Ftrl{.lr = 0.1, .beta = 0.5, .l1 = 1, .l2 = 0.1}, 1e-4);
}

TEST(Optimizer, RowAdagradHasOneAccumulatorForTheRow) {
  for (const std::size_t dim : {1U, 3U, 8U, 64U, 67U}) {
    const optim::RowAdagrad rule{.lr = 0.1, .initial_accumulator_value = 0.5};
    std::vector<float> weights(dim, 1), slots(slots_of(rule, dim)), gradient(dim);
    ASSERT_EQ(slots.size(), 1U);
    begin_slots(rule, slots.data(), dim);
    double sum = 0.5;
    std::vector<double> reference(dim, 1);
    std::mt19937 random(9);
    std::normal_distribution<float> normal;
    for (std::uint32_t t = 1; t <= 1000; ++t) {
      double squares = 0;
      for (float& one : gradient) {
        one = normal(random);
        squares += static_cast<double>(one) * one;
      }
      step(rule, {weights.data(), slots.data(), dim, t}, gradient.data());
      sum += squares / static_cast<double>(dim);
      for (std::size_t i = 0; i < dim; ++i) {
        reference[i] -= rule.lr * gradient[i] / (std::sqrt(sum) + rule.eps);
        ASSERT_NEAR(weights[i], reference[i], 1e-4);
      }
    }
  }
}

TEST(Optimizer, AnotherRateForOneStep) {
  float weight = 1;
  const float gradient = 1;
  step(optim::Sgd{.lr = 0.5}, {&weight, nullptr, 1, 1}, &gradient, 0.25);
  EXPECT_EQ(weight, 0.75F);
}

}  // namespace
}  // namespace cohort::ps
