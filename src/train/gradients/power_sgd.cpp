#include "train/gradients/power_sgd.h"

#include "base/parse.h"
#include "base/result.h"
#include "comm/kernels/float_environment.h"
#include "train/step/methods.h"

#include <cohort/finite.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

namespace cohort::gradients {

namespace {

// Partial sums, which compilers vectorise. The order of additions depends on kLanes only, not on the vector width.
constexpr std::int64_t kLanes = 16;

template <class Sum>
Sum dot(const float* a, const float* b, std::int64_t count) {
  std::array<Sum, kLanes> sums{};
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      sums[static_cast<std::size_t>(lane)] += static_cast<Sum>(a[i + lane]) * static_cast<Sum>(b[i + lane]);
    }
  }
  for (std::int64_t lane = 0; i + lane < count; ++lane) {
    sums[static_cast<std::size_t>(lane)] += static_cast<Sum>(a[i + lane]) * static_cast<Sum>(b[i + lane]);
  }
  for (std::size_t half = kLanes / 2; half > 0; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
  }
  return sums[0];
}

// y = y + factor x, each operation rounded.
void add(float* y, float factor, const float* x, std::int64_t count) {
  for (std::int64_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

std::uint64_t mix(std::uint64_t x) {  // splitmix64 (Steele et al. 2014)
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return x ^ x >> 31;
}

// Fills with values in [-1, 1], directly from bits, since the standard distributions differ between libraries.
void fill_randomly(float* values, std::int64_t count, std::uint64_t seed) {
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t bits = mix(seed + static_cast<std::uint64_t>(i));
    values[i] = static_cast<float>(static_cast<std::int32_t>(bits >> 32)) * 0x1p-31F;
  }
}

bool is_zero(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return value == 0; });
}

bool are_finite(const float* values, std::int64_t count) {
  return std::all_of(values, values + count, [](float value) { return std::isfinite(value); });
}

float* at(std::vector<float>& values, std::size_t begin) { return values.data() + begin; }

// Share of its norm below which a column counts as a combination of earlier columns, since float32 has seven digits.
constexpr double kDependent = 1e-6;

// A larger epsilon shrinks P, and the averages with it, until nothing is learnt. Torch's default is 0; 1e-8 is usual.
constexpr double kMostEpsilon = 1e-3;

}  // namespace

void orthogonalize(float* columns, std::int64_t rows, std::int64_t rank, double epsilon) {
  for (std::int64_t k = 0; k < rank; ++k) {
    float* const column = columns + k * rows;
    const double before = std::sqrt(dot<double>(column, column, rows));
    for (int pass = 0; pass < 2; ++pass) {  // one pass leaves rounding errors; two are enough
      for (std::int64_t other = 0; other < k; ++other) {
        const float* const previous = columns + other * rows;
        add(column, static_cast<float>(-dot<double>(column, previous, rows)), previous, rows);
      }
    }
    const double norm = std::sqrt(dot<double>(column, column, rows));
    const bool depends = norm <= before * kDependent;
    const double divisor = norm + epsilon;
    for (std::int64_t i = 0; i < rows; ++i) column[i] = depends ? 0 : static_cast<float>(column[i] / divisor);
  }
}

PowerSGD::PowerSGD(const nn::PowerSGDOptions& options)
    : options_(options), kept_(std::make_shared<step::KeptByName<Kept>>()), transaction_(step::power_sgd()) {
  if (options.matrix_approximation_rank < 1) {
    raise(ErrorCode::InvalidArgument, "PowerSGD: matrix_approximation_rank={} -- at least 1",
          options.matrix_approximation_rank);
  }
  if (options.start_powerSGD_iter < 0 || !(options.min_compression_rate > 0) ||
      !(options.orthogonalization_epsilon >= 0) || options.orthogonalization_epsilon > kMostEpsilon) {
    raise(ErrorCode::InvalidArgument,
          "PowerSGD: start_powerSGD_iter={}, min_compression_rate={}, orthogonalization_epsilon={} -- none of them is "
          "negative, the rate is not 0, and the epsilon is at most {}",
          options.start_powerSGD_iter, options.min_compression_rate, options.orthogonalization_epsilon, kMostEpsilon);
  }
  transaction_.keep("error and Q", kept_);
  const auto set = [&](const char* name, const auto& value) {
    transaction_.agreement().set("PowerSGD", name, fmt::format("{}", value));
  };
  set("matrix_approximation_rank", options.matrix_approximation_rank);
  set("start_powerSGD_iter", options.start_powerSGD_iter);
  set("min_compression_rate", options.min_compression_rate);
  set("use_error_feedback", options.use_error_feedback);
  set("warm_start", options.warm_start);
  set("orthogonalization_epsilon", options.orthogonalization_epsilon);
  set("random_seed", options.random_seed);
}

std::string PowerSGD::key_of(const Matrix& matrix) {
  std::string key = matrix.name;
  if (key.empty()) {
    key = fmt::format("#{}", numbers_.try_emplace(matrix.parameter, numbers_.size()).first->second);
  }
  Kept& kept = (*kept_)[key];
  const bool fits = kept.rows == matrix.rows && kept.columns == matrix.columns;
  if (kept_->claim(key) && !fits) {
    raise(ErrorCode::InvalidArgument,
          "PowerSGD: what was loaded of parameter '{}' is of a {} x {} matrix, and its gradient is one of {} x {} -- "
          "load what this model's training has saved, without the names of parameters that have changed",
          key, kept.rows, kept.columns, matrix.rows, matrix.columns);
  }
  if (!fits) kept = {.rows = matrix.rows, .columns = matrix.columns, .error = {}, .q = {}};
  return key;
}

// Makes the initial Q, the same on all ranks.
void PowerSGD::make_q(const Compressed& one, float* q) {
  const std::int64_t rows = one.matrix.columns;
  const auto randomly = [&](std::int64_t column) {
    const std::uint64_t step = mix(mix(options_.random_seed) + static_cast<std::uint64_t>(iteration_));
    const std::uint64_t seed = mix(mix(step ^ fnv1a(one.key)) + static_cast<std::uint64_t>(column));
    fill_randomly(q + column * rows, rows, seed);
  };
  const std::vector<float>& last = kept_->at(one.key).q;
  const bool warm = options_.warm_start && last.size() == static_cast<std::size_t>(rows * one.rank);
  for (std::int64_t column = 0; column < one.rank; ++column) {
    if (!warm) randomly(column);
  }
  if (warm) std::copy(last.begin(), last.end(), q);
  orthogonalize(q, rows, one.rank, options_.orthogonalization_epsilon);
  // A gradient of lower matrix rank than P leaves zero columns, which would stay zero.
  bool refilled = false;
  for (std::int64_t column = 0; column < one.rank; ++column) {
    if (!is_zero(q + column * rows, rows)) continue;
    randomly(column);
    refilled = true;
  }
  if (refilled) orthogonalize(q, rows, one.rank, options_.orthogonalization_epsilon);
}

std::unique_ptr<step::Pending> PowerSGD::average(step::Ranks& ranks, const Buffer& values,
                                                 std::shared_ptr<const void> keep, std::uint64_t same) {
  const std::uint32_t tag = transaction_.agreement().tag(mix(static_cast<std::uint64_t>(iteration_)) ^ same);
  const AllReduceOptions average{.op = ReduceOp::Average, .tag = tag};
  return ranks.start(
      "all_reduce", [&](Communicator& comm) { return comm.all_reduce(values, average); }, std::move(keep));
}

void PowerSGD::start(step::Ranks& ranks, const Buffer& bucket, std::vector<Matrix> gradients,
                     std::shared_ptr<const void> keep) {
  const comm::FloatEnvironment ieee;
  Step step{.bucket = bucket, .compressed = {}, .whole = {}};
  if (iteration_ < options_.start_powerSGD_iter || bucket.dtype != DType::Float32) {
    for (const Matrix& matrix : gradients) key_of(matrix);  // assigns the "#N" keys in the order of the first step
    step.rest_work = average(ranks, bucket, std::move(keep));
    steps_.push_back(std::move(step));
    return;
  }
  auto* const values = static_cast<float*>(bucket.data);
  std::size_t rest = 0, p = 0, q = 0;
  for (const Matrix& matrix : gradients) {
    const std::string key = key_of(matrix);
    const std::int64_t count = matrix.rows * matrix.columns;
    const std::int64_t rank = std::min({matrix.rows, matrix.columns, options_.matrix_approximation_rank});
    const std::int64_t sent = (matrix.rows + matrix.columns) * rank;
    before_ += count;
    if (count == 0 || static_cast<double>(sent) * options_.min_compression_rate >= static_cast<double>(count)) {
      after_ += count;
      rest += static_cast<std::size_t>(count);
      step.whole.push_back(matrix);
      continue;
    }
    after_ += sent;
    step.compressed.push_back({.matrix = matrix, .key = key, .rank = rank, .p = p, .q = q});
    p += static_cast<std::size_t>(matrix.rows * rank);
    q += static_cast<std::size_t>(matrix.columns * rank);
  }
  const auto floats = [](std::vector<float>& all) { return Buffer(std::span<float>(all)); };
  if (rest > 0) {
    step.rest = std::make_shared<std::vector<float>>();
    step.rest->reserve(rest);
    for (const Matrix& matrix : step.whole) {
      step.rest->insert(step.rest->end(), values + matrix.offset,
                        values + matrix.offset + matrix.rows * matrix.columns);
    }
    step.rest_work = average(ranks, floats(*step.rest), step.rest);
  }
  if (p > 0) {
    step.p = std::make_shared<std::vector<float>>(p);
    step.q = std::make_shared<std::vector<float>>(q);
    for (const Compressed& one : step.compressed) {
      const Matrix& matrix = one.matrix;
      const std::int64_t count = matrix.rows * matrix.columns;
      float* const m = values + matrix.offset;
      const std::vector<float>& error = kept_->at(one.key).error;
      if (options_.use_error_feedback && !error.empty()) add(m, 1, error.data(), count);
      make_q(one, at(*step.q, one.q));
      for (std::int64_t row = 0; row < matrix.rows; ++row) {
        for (std::int64_t k = 0; k < one.rank; ++k) {
          at(*step.p, one.p)[k * matrix.rows + row] =
              dot<float>(m + row * matrix.columns, at(*step.q, one.q) + k * matrix.columns, matrix.columns);
        }
      }
    }
    std::uint64_t same = 0;
    for (const float value : *step.q) same = mix(same ^ std::bit_cast<std::uint32_t>(value));
    q_ = mix(q_ ^ same);
    step.p_work = average(ranks, floats(*step.p), step.p, same);
  }
  steps_.push_back(std::move(step));
}

// Checks a bucket's averages, which are the same on all ranks. No element of P is above 1, so a bound for Q also bounds
// P Q'.
bool PowerSGD::is_finite(const Step& step) {
  if (!step.rest && !step.p) return !first_non_finite(step.bucket);
  if (step.rest && !are_finite(step.rest->data(), std::ssize(*step.rest))) return false;
  if (!step.p) return true;
  constexpr float kMost = std::numeric_limits<float>::max() / 2;
  return are_finite(step.p->data(), std::ssize(*step.p)) &&
         std::all_of(step.compressed.begin(), step.compressed.end(), [&](const Compressed& one) {
           const float* const q = at(*step.q, one.q);
           const float most = kMost / static_cast<float>(one.rank);
           return std::all_of(q, q + one.matrix.columns * one.rank, [&](float x) { return std::abs(x) <= most; });
         });
}

void PowerSGD::average_and_keep(const Compressed& one, const Step& step, bool accepted) {
  const Matrix& matrix = one.matrix;
  const std::int64_t count = matrix.rows * matrix.columns;
  float* const result = static_cast<float*>(step.bucket.data) + matrix.offset;
  const float* const p = at(*step.p, one.p);
  const float* const q = at(*step.q, one.q);
  // Some rank's contribution was not finite.
  if (!are_finite(p, matrix.rows * one.rank) || !are_finite(q, matrix.columns * one.rank)) {
    std::fill(result, result + count, std::numeric_limits<float>::quiet_NaN());
    return;
  }
  Kept& kept = (*kept_)[one.key];
  const bool keeps_error = accepted && options_.use_error_feedback;
  if (keeps_error) kept.error.assign(result, result + count);
  for (std::int64_t row = 0; row < matrix.rows; ++row) {
    float* const to = result + row * matrix.columns;
    std::fill(to, to + matrix.columns, 0.0F);
    for (std::int64_t k = 0; k < one.rank; ++k) {
      add(to, p[k * matrix.rows + row], q + k * matrix.columns, matrix.columns);
    }
  }
  if (keeps_error) {
    add(kept.error.data(), -1, result, count);
    if (!are_finite(kept.error.data(), count)) kept.error.clear();  // then only this rank's error has overflowed
  }
  if (accepted && options_.warm_start) kept.q.assign(q, q + matrix.columns * one.rank);
}

void PowerSGD::finish(step::Ranks& ranks) {
  if (steps_.empty()) return;
  const std::uint64_t q = std::exchange(q_, 0);
  try {
    finish_all(ranks);
  } catch (const Error& error) {
    step::Agreement agreement = transaction_.agreement();
    agreement.set("PowerSGD", "steps done", fmt::format("{}", iteration_));
    agreement.set("PowerSGD", "Q (a digest)", fmt::format("{:#x}", q));
    agreement.explain(ranks, error);
    throw;
  }
}

void PowerSGD::finish_all(step::Ranks& ranks) {
  const comm::FloatEnvironment ieee;
  std::vector<Step> steps = std::exchange(steps_, {});  // operations under way keep their memory alive
  for (Step& step : steps) {
    if (!step.p_work) continue;
    step.p_work->wait();
    std::fill(step.q->begin(), step.q->end(), 0.0F);
    for (const Compressed& one : step.compressed) {
      const Matrix& matrix = one.matrix;
      float* const p = at(*step.p, one.p);
      if (are_finite(p, matrix.rows * one.rank)) {
        orthogonalize(p, matrix.rows, one.rank, options_.orthogonalization_epsilon);
      }
      const float* const m = static_cast<const float*>(step.bucket.data) + matrix.offset;
      for (std::int64_t row = 0; row < matrix.rows; ++row) {
        for (std::int64_t k = 0; k < one.rank; ++k) {
          add(at(*step.q, one.q) + k * matrix.columns, p[k * matrix.rows + row], m + row * matrix.columns,
              matrix.columns);
        }
      }
    }
    step.q_work = average(ranks, Buffer(std::span<float>(*step.q)), step.q);
  }
  for (const Step& step : steps) {  // before any state changes, so that a failed step leaves the old state
    if (step.rest_work) step.rest_work->wait();
    if (step.q_work) step.q_work->wait();
  }
  if (const auto unclaimed = kept_->unclaimed()) {
    raise(
        ErrorCode::InvalidArgument,
        "PowerSGD: what was loaded of parameter '{}' is for none of the gradients of rank {}'s model -- load what this "
        "model's training has saved, without the names of parameters that are not trained now",
        *unclaimed, ranks.rank());
  }
  const bool compresses = std::any_of(steps.begin(), steps.end(), [](const Step& step) { return step.p != nullptr; });
  const bool accepted = compresses && std::all_of(steps.begin(), steps.end(), is_finite);
  if (accepted) kept_->prepare();
  for (const Step& step : steps) {
    const float* rest = step.rest ? step.rest->data() : nullptr;
    for (const Matrix& matrix : step.whole) {
      const std::int64_t count = matrix.rows * matrix.columns;
      std::copy(rest, rest + count, static_cast<float*>(step.bucket.data) + matrix.offset);
      rest += count;
    }
    for (const Compressed& one : step.compressed) average_and_keep(one, step, accepted);
  }
  if (compresses)
    transaction_.end(step::Decision::by_averages(accepted ? step::Outcome::Accepted : step::Outcome::NotFinite));
  ++iteration_;
}

void PowerSGD::restore(std::int64_t iteration, std::map<std::string, Kept> kept) {
  const auto refuse = [](const std::string& what) {
    raise(ErrorCode::InvalidArgument, "PowerSGD: what is loaded is damaged, or of something else: {}", what);
  };
  if (iteration < 0) refuse(fmt::format("{} steps done", iteration));
  for (const auto& [key, one] : kept) {
    const bool sound = !key.empty() && one.rows > 0 && one.columns > 0 &&
                       one.rows <= std::numeric_limits<std::int64_t>::max() / one.columns;
    if (!sound) refuse(fmt::format("'{}' is of a {} x {} matrix", key, one.rows, one.columns));
    if (!one.error.empty() && std::cmp_not_equal(one.error.size(), one.rows * one.columns))
      refuse(fmt::format("'{}', of {} x {}, has {} elements of error", key, one.rows, one.columns, one.error.size()));
    if (one.q.size() % static_cast<std::size_t>(one.columns) != 0)
      refuse(fmt::format("'{}', of {} x {}, has {} elements of q", key, one.rows, one.columns, one.q.size()));
    for (const std::vector<float>* const values : {&one.error, &one.q}) {
      if (!are_finite(values->data(), std::ssize(*values)))
        refuse(fmt::format("'{}' has {} that is not finite", key, values == &one.q ? "q" : "an error"));
    }
  }
  iteration_ = iteration;
  kept_->restore(std::move(kept));
  steps_.clear();
}

}  // namespace cohort::gradients
