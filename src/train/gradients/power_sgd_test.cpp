// PowerSGD on ranks that are threads: its results to the bit, the bytes it sends and the state it keeps. Tests with a
// framework train models.
#include "train/gradients/power_sgd.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cohort::gradients {
namespace {

using Floats = std::vector<float>;

// Returns values in [-1, 1], the same on every machine.
Floats pattern(std::int64_t count, int salt) {
  Floats values;
  for (std::int64_t i = 0; i < count; ++i) {
    values.push_back(static_cast<float>((i * i * 37 + i * (salt * 11 + 5) + salt * salt) % 201 - 100) / 100);
  }
  return values;
}

struct Model {  // two matrices, and one that is too small
  std::array<char, 3> parameters{};
  std::vector<PowerSGD::Matrix> gradients = {
      {&parameters[0], 0, 24, 40}, {&parameters[1], 960, 6, 1}, {&parameters[2], 966, 31, 17}};
  static constexpr std::int64_t kCount = 966 + 31 * 17;
};

nn::PowerSGDOptions of_rank(std::int64_t rank, std::int64_t start = 0) {
  return {.matrix_approximation_rank = rank, .start_powerSGD_iter = start, .min_compression_rate = 0.1};
}

Floats run(PowerSGD& state, Communicator& comm, Model& model, Floats values) {
  const auto ranks = step::ranks_of(comm);
  state.start(*ranks, Buffer(std::span<float>(values)), model.gradients, nullptr);
  state.finish(*ranks);
  return values;
}

void expect_near(const Floats& ours, const Floats& theirs, double tolerance) {
  ASSERT_EQ(ours.size(), theirs.size());
  for (std::size_t i = 0; i < ours.size(); ++i) ASSERT_NEAR(ours[i], theirs[i], tolerance) << i;
}

Floats mean_over(Communicator& comm, Floats values) {
  comm.all_reduce(Buffer(std::span<float>(values)), {.op = ReduceOp::Average}).wait();
  return values;
}

void expect_same_bits(Communicator& comm, const Floats& values) {
  Floats all(values.size() * static_cast<std::size_t>(comm.size()));
  comm.all_gather(ConstBuffer(std::span<const float>(values)), Buffer(std::span<float>(all))).wait();
  for (std::size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint32_t>(all[i]), std::bit_cast<std::uint32_t>(values[i % values.size()])) << i;
  }
}

TEST(PowerSGD, FullRankIsTheAverage) {
  run_on_threads(3, [](Communicator comm) {
    Model model;
    PowerSGD state(of_rank(64, 2));
    for (int step = 0; step < 5; ++step) {
      const Floats mine = pattern(Model::kCount, 10 * step + comm.rank());
      const Floats result = run(state, comm, model, mine);
      expect_near(result, mean_over(comm, mine), step < 2 ? 0 : 1e-5);
      expect_same_bits(comm, result);
    }
    EXPECT_EQ(state.iteration(), 5);
  });
}

// With rank r, (n + m) r values are sent for a matrix, and whole gradients if that saves nothing.
TEST(PowerSGD, LosesNothingOverStepsAndSendsWhatTheFormulaSays) {
  run_on_threads(2, [](Communicator comm) {
    Model model;
    PowerSGD state({.matrix_approximation_rank = 2, .start_powerSGD_iter = 0});
    const Floats mine = pattern(Model::kCount, comm.rank());
    const Floats mean = mean_over(comm, mine);
    Floats sum(mine.size());
    const int steps = 60;
    for (int step = 0; step < steps; ++step) {
      const Floats result = run(state, comm, model, mine);
      for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += result[i] / steps;
    }
    expect_same_bits(comm, sum);
    double error = 0, size = 0;
    for (std::size_t i = 0; i < sum.size(); ++i) {
      error += std::pow(sum[i] - mean[i], 2);
      size += std::pow(mean[i], 2);
    }
    EXPECT_LT(error, 0.05 * size) << "with error feedback the mean over steps is the average";
    const std::int64_t whole = 6;
    EXPECT_EQ(state.compression_stats().first, steps * Model::kCount);
    EXPECT_EQ(state.compression_stats().second, steps * ((24 + 40) * 2 + whole + (31 + 17) * 2));
  });
}

TEST(PowerSGD, LowerRanksThanItsOwnAreExact) {
  run_on_threads(2, [](Communicator comm) {
    const std::vector<PowerSGD::Matrix> gradients = {{&comm, 0, 30, 50}};
    PowerSGD state(of_rank(4));
    const auto ranks = step::ranks_of(comm);
    for (int step = 0; step < 6; ++step) {
      Floats values(1500);
      const Floats u = pattern(30, step), v = pattern(50, step + 3);
      if (step != 2) {  // one step without any gradient
        for (std::size_t i = 0; i < values.size(); ++i) values[i] = u[i / 50] * v[i % 50];
      }
      const Floats mean = values;
      state.start(*ranks, Buffer(std::span<float>(values)), gradients, nullptr);
      state.finish(*ranks);
      expect_near(values, mean, 1e-5);
    }
  });
}

// Nothing is kept of the other matrices either, which may be as large as the one that overflowed.
TEST(PowerSGD, NothingIsKeptOfAStepThatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // The bad value is in a matrix, in a gradient too small for one, or where only P Q' overflows.
  for (const auto& [where, value] : {std::pair(77, kInfinity), std::pair(962, kInfinity), std::pair(77, 3e38F)}) {
    run_on_threads(2, [&, at = static_cast<std::size_t>(where), bad = value](Communicator comm) {
      Model model;
      PowerSGD state({.matrix_approximation_rank = 2, .start_powerSGD_iter = 0});
      for (int step = 0; step < 4; ++step) {
        Floats mine = pattern(Model::kCount, step + comm.rank());
        if (step == 1) {
          for (float& one : mine) one *= 1e20F;
          if (comm.rank() == 1 || std::isfinite(bad)) mine[at] = bad;
        }
        const Floats result = run(state, comm, model, mine);
        expect_same_bits(comm, result);
        if (step == 1) {
          for (const auto& [key, kept] : state.kept()) EXPECT_TRUE(kept.error.empty() && kept.q.empty()) << key;
          continue;
        }
        for (const float one : result) ASSERT_LT(std::abs(one), 100) << "step " << step;
      }
    });
  }
}

TEST(PowerSGD, BucketsBesideItThatAreNotFiniteCountToo) {
  run_on_threads(2, [](Communicator comm) {
    Model model;
    PowerSGD state(of_rank(2));
    const auto ranks = step::ranks_of(comm);
    for (int step = 0; step < 2; ++step) {
      Floats values = pattern(Model::kCount, step + comm.rank());
      std::vector<double> other(5, step == 1 && comm.rank() == 0 ? std::nan("") : 1);
      state.start(*ranks, Buffer(std::span<float>(values)), model.gradients, nullptr);
      state.start(*ranks, Buffer(std::span<double>(other)), {{&other, 0, 5, 1, "other"}}, nullptr);
      state.finish(*ranks);
      EXPECT_EQ(state.kept().at("#0").error.empty(), step == 1);
    }
    EXPECT_EQ(state.iteration(), 2);
    run(state, comm, model, pattern(Model::kCount, comm.rank()));
    EXPECT_FALSE(state.kept().at("#0").q.empty());
    state.drop_residuals();
    EXPECT_TRUE(state.kept().at("#0").error.empty());
    expect_same_bits(comm, run(state, comm, model, pattern(Model::kCount, comm.rank())));
  });
}

TEST(PowerSGD, GoesByNamesWhereThereAreSome) {
  run_on_threads(2, [](Communicator comm) {
    Model model;
    for (std::size_t i = 0; i < 3; ++i) model.gradients[i].name = std::string(1, "abc"[i]);
    PowerSGD state(of_rank(2));
    for (int step = 0; step < 2; ++step) run(state, comm, model, pattern(Model::kCount, step + comm.rank()));
    PowerSGD other(of_rank(2));
    other.restore(state.iteration(), state.kept());
    Model again = model;  // its gradients come in another order
    std::swap(again.gradients[0], again.gradients[2]);
    const Floats mine = pattern(Model::kCount, comm.rank());
    EXPECT_EQ(run(state, comm, model, mine), run(other, comm, again, mine));
    const auto refused = [&](const std::string& why) {
      PowerSGD third(of_rank(2));
      third.restore(state.iteration(), state.kept());
      try {
        run(third, comm, again, mine);
        ADD_FAILURE() << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      }
    };
    again.gradients[0].name = "d";
    refused("parameter 'c' is for none of the gradients");
    again.gradients[0].name = "a";
    refused("parameter 'a' is of a 24 x 40 matrix");
  });
}

// Some libraries that are made for speed change this mode when they are loaded.
TEST(PowerSGD, DoesNotDependOnHowAThreadTreatsDenormals) {
#if defined(__x86_64__)
  run_on_threads(2, [](Communicator comm) {
    const unsigned before = _mm_getcsr();
    if (comm.rank() == 1) _mm_setcsr(before | 0x8040);  // flush to zero, denormals are zero
    Model model;
    PowerSGD state(of_rank(2));
    for (int step = 0; step < 3; ++step) {
      Floats mine = pattern(Model::kCount, step);
      for (float& one : mine) one = std::ldexp(one, -130);
      const Floats result = run(state, comm, model, mine);
      _mm_setcsr(before);
      expect_same_bits(comm, result);
      if (comm.rank() == 1) _mm_setcsr(before | 0x8040);
    }
    _mm_setcsr(before);
  });
#endif
}

TEST(PowerSGD, GoesOnFromWhatItKept) {
  run_on_threads(2, [](Communicator comm) {
    Model model;
    PowerSGD state(of_rank(2, 1));
    for (int step = 0; step < 3; ++step) run(state, comm, model, pattern(Model::kCount, step + comm.rank()));
    PowerSGD other(of_rank(2, 1));
    other.restore(state.iteration(), state.kept());
    Model again;  // another process, with other addresses
    for (int step = 3; step < 5; ++step) {
      const Floats mine = pattern(Model::kCount, step + comm.rank());
      EXPECT_EQ(run(state, comm, model, mine), run(other, comm, again, mine));
    }
    again.gradients[0].rows = 40;
    again.gradients[0].columns = 24;
    run(other, comm, again, pattern(Model::kCount, 1));  // a shape changes in training, and the kept state does not fit
  });
}

TEST(PowerSGD, AStepThatHasFailedLeavesWhatWasKept) {
  run_on_threads(2, [](Communicator comm) {
    Model model;
    PowerSGD state(of_rank(1)), other(of_rank(1));
    const auto ranks = step::ranks_of(comm);
    for (int step = 0; step < 3; ++step) {
      const Floats mine = pattern(Model::kCount, step + comm.rank());
      Floats lost = pattern(Model::kCount, step + comm.rank() + 7);
      state.start(*ranks, Buffer(std::span<float>(lost)), model.gradients, nullptr);
      state.forget();
      EXPECT_EQ(run(state, comm, model, mine), run(other, comm, model, mine));
      ASSERT_EQ(state.kept().size(), other.kept().size());
      for (const auto& [key, kept] : state.kept()) {
        EXPECT_EQ(kept.error, other.kept().at(key).error);
        EXPECT_EQ(kept.q, other.kept().at(key).q);
      }
    }
  });
}

TEST(PowerSGD, RanksThatDifferInOptionsOrInWhatTheyKeptAreTold) {
  const auto expect_mismatch = [](const std::function<PowerSGD(int)>& of) {
    run_on_threads(2, [&](Communicator comm) {
      Model model;
      PowerSGD state = of(comm.rank());
      try {
        run(state, comm, model, pattern(Model::kCount, comm.rank()));
        ADD_FAILURE() << "ranks differ";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Mismatch) << error.what();
      }
    });
  };
  const auto with = [&](const std::function<void(nn::PowerSGDOptions&)>& change) {
    for (const std::int64_t start : {0, 5}) {
      expect_mismatch([&](int rank) {
        nn::PowerSGDOptions options = of_rank(2, start);
        if (rank == 1) change(options);
        return PowerSGD(options);
      });
    }
  };
  with([](nn::PowerSGDOptions& options) { options.random_seed = 1; });
  with([](nn::PowerSGDOptions& options) { options.warm_start = false; });
  with([](nn::PowerSGDOptions& options) { options.use_error_feedback = false; });
  with([](nn::PowerSGDOptions& options) { options.orthogonalization_epsilon = 1e-3; });
  with([](nn::PowerSGDOptions& options) { options.min_compression_rate = 0.2; });
  with([](nn::PowerSGDOptions& options) { options.start_powerSGD_iter += 1; });
  expect_mismatch([](int rank) {
    PowerSGD state(of_rank(2));
    state.restore(rank, {});
    return state;
  });
  expect_mismatch([](int rank) {
    PowerSGD state(of_rank(2));
    Floats q = pattern(80, 1 + rank);
    state.restore(3, {{"#0", {.rows = 24, .columns = 40, .error = {}, .q = std::move(q)}}});
    return state;
  });
}

TEST(PowerSGD, WhatCannotHaveBeenKeptIsNotRestored) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  const float nan = std::nanf("");
  PowerSGD state(of_rank(2));
  state.restore(3, {{"a", {.rows = 4, .columns = 5, .error = Floats(20), .q = Floats(10)}}});
  const auto refused = [&](std::int64_t iteration, const PowerSGD::Kept& kept) {
    EXPECT_THROW(state.restore(iteration, {{"b", kept}}), Error);
    EXPECT_EQ(state.iteration(), 3);
    EXPECT_EQ(state.kept().count("a"), 1U);
  };
  refused(-5, {.rows = 4, .columns = 5, .error = Floats(20), .q = {}});
  refused(3, {.rows = 4, .columns = 5, .error = Floats(19), .q = {}});
  refused(3, {.rows = 4, .columns = 5, .error = {}, .q = Floats(12)});
  refused(3, {.rows = 0, .columns = 0, .error = {}, .q = Floats(12)});
  refused(3, {.rows = -4, .columns = -5, .error = Floats(20), .q = Floats(10)});
  refused(3, {.rows = kMost, .columns = 5, .error = Floats(20), .q = Floats(10)});
  refused(3, {.rows = 4, .columns = 5, .error = Floats(20, nan), .q = {}});
  refused(3, {.rows = 4, .columns = 5, .error = {}, .q = Floats(10, nan)});
}

TEST(PowerSGD, OrthonormalColumnsAreSoToTheLastDigitsAndHaveKnownBits) {
  Floats columns = pattern(5 * 301, 1);
  for (std::size_t i = 0; i < 301; ++i) columns[2 * 301 + i] = columns[i] * 3 - columns[301 + i];  // depends
  orthogonalize(columns.data(), 301, 5, 0);
  std::uint64_t bits = 0;
  for (std::size_t a = 0; a < 5; ++a) {
    for (std::size_t b = 0; b <= a; ++b) {
      double sum = 0;
      for (std::size_t i = 0; i < 301; ++i) sum += double{columns[a * 301 + i]} * columns[b * 301 + i];
      EXPECT_NEAR(sum, a == b && a != 2 ? 1 : 0, 1e-6);
    }
  }
  for (const float value : columns) bits = bits * 31 + std::bit_cast<std::uint32_t>(value);
  EXPECT_EQ(bits, 2529819928972766583U) << "on all machines and with all compilers";
}

TEST(PowerSGD, RefusesWhatMeansNothing) {
  EXPECT_THROW(PowerSGD({.matrix_approximation_rank = 0}), Error);
  EXPECT_THROW(PowerSGD({.min_compression_rate = 0}), Error);
  for (const double epsilon : {-1.0, 0.1, 1e30, std::numeric_limits<double>::infinity(), std::nan("")})
    EXPECT_THROW(PowerSGD({.orthogonalization_epsilon = epsilon}), Error);
}

}  // namespace
}  // namespace cohort::gradients
