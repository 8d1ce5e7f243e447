#include "ps/optimizer.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cohort::ps {
namespace {

using namespace optim;

float as_float(double value) noexcept { return static_cast<float>(value); }

void apply(const Sgd& rule, const RowView& row, const float* __restrict gradient, double lr) noexcept {
  float* __restrict weights = row.weights;
  float* __restrict buffer = row.slots;
  const float rate = as_float(lr), momentum = as_float(rule.momentum), fresh = as_float(1 - rule.dampening);
  const float decay = as_float(rule.weight_decay);
  if (rule.momentum == 0) {
    for (std::size_t i = 0; i < row.dim; ++i) weights[i] -= rate * (gradient[i] + decay * weights[i]);
    return;
  }
  const bool first = row.step == 1;
  for (std::size_t i = 0; i < row.dim; ++i) {
    const float wanted = gradient[i] + decay * weights[i];
    const float kept = first ? wanted : momentum * buffer[i] + fresh * wanted;
    buffer[i] = kept;
    weights[i] -= rate * (rule.nesterov ? wanted + momentum * kept : kept);
  }
}

void apply(const Adagrad& rule, const RowView& row, const float* __restrict gradient, double lr) noexcept {
  float* __restrict weights = row.weights;
  float* __restrict sums = row.slots;
  const float rate = as_float(lr / (1 + (row.step - 1) * rule.lr_decay));
  const float decay = as_float(rule.weight_decay), eps = as_float(rule.eps);
  for (std::size_t i = 0; i < row.dim; ++i) {
    const float wanted = gradient[i] + decay * weights[i];
    sums[i] += wanted * wanted;
    weights[i] -= rate * wanted / (std::sqrt(sums[i]) + eps);
  }
}

void apply(const RowAdagrad& rule, const RowView& row, const float* __restrict gradient, double lr) noexcept {
  float* __restrict weights = row.weights;
  constexpr std::size_t kLanes = 8;  // partial sums, added in a fixed order: vectorised, with the same bits everywhere
  float lanes[kLanes] = {};
  std::size_t i = 0;
  for (; i + kLanes <= row.dim; i += kLanes) {
    for (std::size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += gradient[i + lane] * gradient[i + lane];
  }
  for (; i < row.dim; ++i) lanes[i % kLanes] += gradient[i] * gradient[i];
  float squares = 0;
  for (const float lane : lanes) squares += lane;
  row.slots[0] += squares / static_cast<float>(row.dim);
  const float scale = as_float(lr) / (std::sqrt(row.slots[0]) + as_float(rule.eps));
  for (i = 0; i < row.dim; ++i) weights[i] -= scale * gradient[i];
}

/// A step of Adam or AdamW: weight decay is part of the gradient, or separate.
template <class Rule>
void apply_adam(const Rule& rule, const RowView& row, const float* __restrict gradient, double lr,
                double decay_of_gradient) noexcept {
  float* __restrict weights = row.weights;
  float* __restrict means = row.slots;
  float* __restrict squares = row.slots + row.dim;
  const double step = row.step;
  const float beta1 = as_float(rule.beta1), fresh1 = as_float(1 - rule.beta1);
  const float beta2 = as_float(rule.beta2), fresh2 = as_float(1 - rule.beta2);
  const float size = as_float(lr / (1 - std::pow(rule.beta1, step)));
  const float root = as_float(std::sqrt(1 - std::pow(rule.beta2, step)));
  const float eps = as_float(rule.eps), decay = as_float(decay_of_gradient);
  for (std::size_t i = 0; i < row.dim; ++i) {
    const float wanted = gradient[i] + decay * weights[i];
    means[i] = beta1 * means[i] + fresh1 * wanted;
    squares[i] = beta2 * squares[i] + fresh2 * wanted * wanted;
    weights[i] -= size * (means[i] / (std::sqrt(squares[i]) / root + eps));
  }
}

void apply(const Adam& rule, const RowView& row, const float* gradient, double lr) noexcept {
  apply_adam(rule, row, gradient, lr, rule.weight_decay);
}

void apply(const AdamW& rule, const RowView& row, const float* gradient, double lr) noexcept {
  const float shrink = as_float(1 - lr * rule.weight_decay);
  for (std::size_t i = 0; i < row.dim; ++i) row.weights[i] *= shrink;
  apply_adam(rule, row, gradient, lr, 0);
}

void apply(const Ftrl& rule, const RowView& row, const float* __restrict gradient, double lr) noexcept {
  float* __restrict weights = row.weights;
  float* __restrict z = row.slots;
  float* __restrict n = row.slots + row.dim;
  const float alpha = as_float(lr), beta = as_float(rule.beta), l1 = as_float(rule.l1), l2 = as_float(rule.l2);
  for (std::size_t i = 0; i < row.dim; ++i) {
    const float sum = n[i] + gradient[i] * gradient[i];
    z[i] += gradient[i] - (std::sqrt(sum) - std::sqrt(n[i])) / alpha * weights[i];
    n[i] = sum;
    const float beyond = std::max(std::fabs(z[i]) - l1, 0.0F);
    weights[i] = beyond > 0 ? -std::copysign(beyond, z[i]) / ((beta + std::sqrt(sum)) / alpha + l2) : 0.0F;
  }
}

struct Field {
  const char* name;
  double value;
  bool zero_allowed;
  double below;
};

}  // namespace

std::size_t slots_of(const Optimizer& optimizer, std::size_t dim) noexcept {
  struct Count {
    std::size_t dim;
    std::size_t operator()(const Sgd& rule) const { return rule.momentum == 0 ? 0 : dim; }
    std::size_t operator()(const Adagrad&) const { return dim; }
    std::size_t operator()(const RowAdagrad&) const { return 1; }
    std::size_t operator()(const Adam&) const { return 2 * dim; }
    std::size_t operator()(const AdamW&) const { return 2 * dim; }
    std::size_t operator()(const Ftrl&) const { return 2 * dim; }
  };
  return std::visit(Count{dim}, optimizer);
}

void begin_slots(const Optimizer& optimizer, float* slots, std::size_t dim) noexcept {
  double first = 0;
  if (const auto* rule = std::get_if<Adagrad>(&optimizer)) first = rule->initial_accumulator_value;
  if (const auto* rule = std::get_if<RowAdagrad>(&optimizer)) first = rule->initial_accumulator_value;
  std::fill_n(slots, slots_of(optimizer, dim), as_float(first));
}

void step(const Optimizer& optimizer, const RowView& row, const float* gradient, std::optional<double> lr) noexcept {
  std::visit([&](const auto& rule) { apply(rule, row, gradient, lr.value_or(rule.lr)); }, optimizer);
}

Result<void> check(const Optimizer& optimizer) {
  constexpr double kAny = INFINITY;
  struct List {
    std::vector<Field> operator()(const Sgd& r) const {
      return {
          {"lr", r.lr, true, kAny}, {"momentum", r.momentum, true, kAny}, {"weight_decay", r.weight_decay, true, kAny}};
    }
    std::vector<Field> operator()(const Adagrad& r) const {
      return {{"lr", r.lr, true, kAny},
              {"lr_decay", r.lr_decay, true, kAny},
              {"weight_decay", r.weight_decay, true, kAny},
              {"initial_accumulator_value", r.initial_accumulator_value, true, kAny},
              {"eps", r.eps, true, kAny}};
    }
    std::vector<Field> operator()(const RowAdagrad& r) const {
      return {{"lr", r.lr, true, kAny},
              {"initial_accumulator_value", r.initial_accumulator_value, true, kAny},
              {"eps", r.eps, true, kAny}};
    }
    std::vector<Field> adam(double lr, double beta1, double beta2, double eps, double decay) const {
      return {{"lr", lr, true, kAny},
              {"beta1", beta1, true, 1},
              {"beta2", beta2, true, 1},
              {"eps", eps, true, kAny},
              {"weight_decay", decay, true, kAny}};
    }
    std::vector<Field> operator()(const Adam& r) const { return adam(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay); }
    std::vector<Field> operator()(const AdamW& r) const { return adam(r.lr, r.beta1, r.beta2, r.eps, r.weight_decay); }
    std::vector<Field> operator()(const Ftrl& r) const {
      return {
          {"lr", r.lr, false, kAny}, {"beta", r.beta, false, kAny}, {"l1", r.l1, true, kAny}, {"l2", r.l2, true, kAny}};
    }
  };
  for (const Field& field : std::visit(List{}, optimizer)) {
    if (!(field.value >= 0) || !(field.value < field.below) || (!field.zero_allowed && field.value == 0)) {
      return fail(ErrorCode::InvalidArgument, "the optimizer's {} is {} -- it has to be {} and below {}", field.name,
                  field.value, field.zero_allowed ? "at least 0" : "above 0", field.below);
    }
  }
  if (const auto* sgd = std::get_if<Sgd>(&optimizer)) {
    if (!std::isfinite(sgd->dampening))
      return fail(ErrorCode::InvalidArgument, "the optimizer's dampening is not finite");
    if (sgd->nesterov && (sgd->momentum == 0 || sgd->dampening != 0)) {
      return fail(ErrorCode::InvalidArgument, "Nesterov's rule needs a momentum and no dampening");
    }
  }
  return {};
}

}  // namespace cohort::ps
