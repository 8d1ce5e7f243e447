// Tests the core without a framework, on ranks that are threads: the end of a step, the flags' message, new members.
#include "train/gradients/reducer.h"

#include "base/result.h"
#include "comm/api/communicator_impl.h"
#include "train/gradients/test_autograd.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>

namespace cohort::gradients {
namespace {

TEST(GradientReducer, AveragesBySamplesAndSaysWhoWasUsed) {
  run_on_threads(3, [](const Communicator& comm) {
    Fake model(comm, {vector_of("a", 5), vector_of("b", 70), vector_of("never", 2)}, kSmall);
    for (int step = 0; step < 3; ++step) {
      model.drop_all();
      model.begin(comm.rank());  // 0, 1, 2
      model.bring(1, comm.rank() == 0 ? std::nanf("") : 3.0F * static_cast<float>(comm.rank()));
      if (comm.rank() == 2) model.bring(0, 1.5F);
      model.end();
      EXPECT_EQ(model.defined, (std::vector<bool>{true, true, false}));
      for (const float value : model.gradient(1)) EXPECT_FLOAT_EQ(value, (1 * 3.0F + 2 * 6.0F) / 3);
      for (const float value : model.gradient(0)) EXPECT_FLOAT_EQ(value, 1.0F);
    }
    EXPECT_EQ(model.core.stats().steps, 3);
    EXPECT_FALSE(model.core.reduce_without_backward());
  });
}

TEST(GradientReducer, AHookIsTheOneExitAndFlagsDoNotPassThroughIt) {
  run_on_threads(2, [](const Communicator& comm) {
    std::vector<std::size_t> seen;
    const Reduce halving = [&](Communicator& ranks, const BucketView& view) {
      seen.push_back(view.bucket);
      auto* const values = static_cast<float*>(view.result.data);
      for (std::int64_t i = 0; i < view.result.count; ++i) values[i] /= 2;
      return reduce_by_average(ranks, view);
    };
    Fake model(comm, {vector_of("a", 5), vector_of("b", 7)}, kSmall, halving);
    model.begin(1);
    if (comm.rank() == 1) model.bring(1, 8);
    model.end();
    EXPECT_EQ(seen, (std::vector<std::size_t>{0, 1}));
    EXPECT_EQ(model.defined, (std::vector<bool>{false, true}));
    EXPECT_FLOAT_EQ(model.gradient(1)[6], 2);
  });
}

class Later final : public step::Pending {
 public:
  explicit Later(Work work) : work_(std::move(work)) {}
  void wait() override { work_.wait(); }
  void synchronize(const Device& /*stream*/) override { wait(); }
  std::optional<bool> finite() const override { return std::nullopt; }

 private:
  Work work_;
};

TEST(GradientReducer, AUsersHookGetsWholeBucketsAndMeansAreByWeights) {
  run_on_threads(3, [](Communicator comm) {
    constexpr std::int64_t kLarge = (std::int64_t{8} << 20) / 4;
    Fake model(comm, {vector_of("a", 5), vector_of("large", kLarge), vector_of("b", 17)});
    const auto gap_in = [](const Bucket& bucket) {
      return bucket.offset(0) / sizeof(float) + static_cast<std::size_t>(bucket.place(0).count);
    };
    std::vector<std::size_t> last;
    double share = 0;
    model.core.use_hook([&](const HookedBucket& hooked) {
      const Bucket& bucket = hooked.bucket;
      share = hooked.share;
      if (hooked.last) last.push_back(hooked.number);
      const std::span<float> values(static_cast<float*>(bucket.memory().data()), bucket.bytes() / sizeof(float));
      for (float& value : values) value = share == 0 ? 0 : value * static_cast<float>(share) + 0;
      values[gap_in(bucket)] += 1000;  // a hook over the whole bucket may write into the gaps
      return std::make_unique<Later>(comm.all_reduce(Buffer(values), {.op = ReduceOp::Average}));
    });
    for (const bool equal : {false, true}) {
      for (int step = 0; step < 2; ++step) {
        model.drop_all();
        model.begin(equal ? 7 : comm.rank());
        EXPECT_FALSE(model.core.can_read(1));
        for (const std::size_t parameter : {2U, 1U, 0U}) {
          model.bring(parameter, !equal && comm.rank() == 0 ? std::nanf("") : 3.0F * static_cast<float>(comm.rank()));
        }
        model.end();
        EXPECT_EQ(share, equal ? 1 : comm.rank());
        for (const std::size_t parameter : {0U, 1U, 2U}) {
          for (const float value : model.gradient(parameter)) {
            ASSERT_FLOAT_EQ(value, equal ? 3.0F : (1 * 3.0F + 2 * 6.0F) / 3);
          }
        }
        for (const Bucket& bucket : model.core.buckets()) {
          const auto* const values = static_cast<const float*>(bucket.memory().data());
          EXPECT_EQ(values[gap_in(bucket)], 0) << "what lies between gradients";
        }
      }
    }
    EXPECT_EQ(last.size(), 4);
    EXPECT_FALSE(model.core.reduce_without_backward());  // no rank has samples
    EXPECT_EQ(share, 0);
  });
}

TEST(GradientReducer, HooksAreRegisteredOnceBeforeTraining) {
  run_on_threads(1, [](Communicator comm) {
    const Hook hook = [&](const HookedBucket& hooked) {
      const Bucket& bucket = hooked.bucket;
      return std::make_unique<Later>(comm.all_reduce(bucket.small()));
    };
    const auto refused_by = [&](Reducer& core, const std::string& why) {
      try {
        core.use_hook(hook);
        ADD_FAILURE() << why;
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::InvalidArgument);
        EXPECT_NE(std::string(error.what()).find(why), std::string::npos) << error.what();
      }
    };
    const auto refused = [&](Fake& model, const std::string& why) { refused_by(model.core, why); };
    Fake model(comm, {vector_of("a", 5)});
    model.core.use_hook(hook);
    refused(model, "there is one already");
    Parameter elsewhere = vector_of("b", 5);  // on a GPU, unlike the first parameter
    elsewhere.device = {DeviceType::CUDA, 0};
    Reducer mixed(step::ranks_of(comm), {vector_of("a", 5), elsewhere}, {}, model);
    refused_by(mixed, "are not for hooks");
    Fake trained(comm, {vector_of("a", 5)});
    trained.begin(1);
    refused(trained, "there has been a backward");
    trained.bring(0, 1);
    trained.end();
    refused(trained, "there has been a backward");
    nn::DistributedDataParallelOptions options;
    options.wire_format = WireFormat::BFloat16;
    Fake narrow(comm, {vector_of("a", 5)}, options);
    refused(narrow, "leave out");
  });
}

TEST(GradientReducer, ALargeGradientIsReadWhereItWasMade) {
  run_on_threads(2, [](const Communicator& comm) {
    constexpr std::int64_t kCount = (std::int64_t{8} << 20) / 4;
    nn::DistributedDataParallelOptions options;
    options.non_finite = nn::NonFinite::Raise;
    Fake model(comm, {vector_of("large", kCount), vector_of("small", 3)}, options);
    const auto made = std::make_shared<std::vector<float>>(kCount, static_cast<float>(comm.rank()));
    const auto step = [&] {
      model.begin(1);
      model.bring(1, 1);
      ASSERT_TRUE(model.core.receive(0));
      ASSERT_TRUE(model.core.can_read(0));
      ASSERT_FALSE(model.core.can_read(1));
      model.core.read_from(0, made->data(), made);
      model.defined[0] = true;
      model.core.arrive(0);
      model.end();
    };
    step();
    EXPECT_FLOAT_EQ(model.gradient(0)[kCount - 1], 0.5F);
    EXPECT_EQ(made.use_count(), 1);
    if (comm.rank() == 1) (*made)[77] = std::numeric_limits<float>::infinity();
    try {
      step();
      ADD_FAILURE() << "no NonFiniteError";
    } catch (const NonFiniteError& error) {
      EXPECT_EQ(error.gradient().rank, 1);
      EXPECT_EQ(error.gradient().parameter, "large");
      EXPECT_EQ(error.gradient().element.index, 77);
      EXPECT_EQ(error.gradient().step, 1);
    }
    EXPECT_EQ(model.defined, (std::vector<bool>{false, false}));
  });
}

// Runs steps on two ranks until one throws; the step, and the error of this rank.
std::pair<int, std::string> first_error(Fake& model, int steps, const std::function<void(int)>& before) {
  for (int step = 0; step < steps; ++step) {
    try {
      before(step);
      model.begin(std::nullopt);
      model.bring(0, 1);
      model.end();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::Mismatch);
      return {step, error.what()};
    }
  }
  return {steps, ""};
}

TEST(GradientReducer, ReplicasThatDriftApartAreNamedWhenTheirParameterComesByTurn) {
  run_on_threads(2, [](Communicator comm) {
    std::vector<Parameter> parameters;
    parameters.reserve(20);
    for (int i = 0; i < 20; ++i) parameters.push_back(vector_of(std::to_string(i), 100));
    const auto changes = [&](std::size_t which, float change) {
      return [&comm, which, change](Fake& model) {
        return [&, which, change](int step) {
          if (step == 3 && comm.rank() == 1) std::ranges::fill(model.values[which], 1 + change);
        };
      };
    };
    for (const std::size_t which : {0U, 7U, 19U}) {
      Fake model(comm, parameters);
      const auto [step, text] = first_error(model, 20, changes(which, 0.01F)(model));
      EXPECT_GE(step, 3);
      EXPECT_LT(step, 3 + 3) << "three turns of 8 parameters";
    }
    // A parameter that one rank cannot read is skipped, and the others are compared. Another size on one rank is drift.
    for (const std::size_t left : {0U, 1U}) {
      Fake resized(comm, parameters);
      const auto change = [&](int step) {
        if (step == 1 && comm.rank() == 1) resized.values[3].resize(left);
        if (step == 9 && comm.rank() == 1) std::ranges::fill(resized.values[9], 2.0F);
      };
      const int found = first_error(resized, 20, change).first, from = left == 0 ? 9 : 1;
      EXPECT_GE(found, from);
      EXPECT_LT(found, from + 3);
    }
    // A difference in the last digits is logged, and is no error. Nothing is compared if the check is switched off.
    Fake rounding(comm, parameters);
    EXPECT_EQ(first_error(rounding, 20, changes(0, 1e-6F)(rounding)).first, 20);
    nn::DistributedDataParallelOptions off;
    off.check_replicas = false;
    Fake unchecked(comm, parameters, off);
    EXPECT_EQ(first_error(unchecked, 20, changes(0, 0.01F)(unchecked)).first, 20);
  });
}

TEST(GradientReducer, RanksAtDifferentPlacesOfTheirProgramAreNamed) {
  using Step = std::function<void(Fake&)>;
  const Step declared = [](Fake& model) { model.begin(7); };
  const Step undeclared = [](Fake& model) { model.begin(std::nullopt); };
  const Step no_forward = [](Fake& model) { model.core.begin_backward(); };
  const Step mixed = [](Fake& model) {
    model.core.accumulation().enter_no_sync();
    model.begin(3);
    model.end();
    model.core.accumulation().leave_no_sync();
    model.begin(std::nullopt);
  };
  const std::vector<std::tuple<Step, Step, std::string>> cases = {
      {declared, undeclared, "rank 0 has said of how many samples its backward is (7), and rank 1 has not"},
      {mixed, mixed, "rank 0 brings gradients whose number of samples is not known"},
      {undeclared, no_forward, "and rank 1's follows none since its last step"},
      {undeclared, undeclared, ""},
      {no_forward, no_forward, ""},  // a second backward through one graph
  };
  run_on_threads(2, [&](const Communicator& comm) {
    for (const auto& [first, second, words] : cases) {
      Fake model(comm, {vector_of("a", 5)});
      model.begin(std::nullopt);
      model.bring(0, 1);
      model.end();
      (comm.rank() == 0 ? first : second)(model);
      model.bring(0, 2 * static_cast<float>(comm.rank()));
      std::string text;
      try {
        model.end();
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::Mismatch);
        text = error.what();
      }
      if (words.empty()) {
        EXPECT_EQ(text, "");
        EXPECT_FLOAT_EQ(model.gradient(0)[0], 1);
      } else {
        EXPECT_NE(text.find(words), std::string::npos) << text;
        EXPECT_EQ(model.defined, (std::vector<bool>{false}));
      }
    }
  });
}

// Runs ranks that are threads, as if on two hosts.
void run_on_two_hosts(const std::function<void(Communicator)>& body) {
  comm::run_on_threads_of(comm::form_on_threads(comm::usual_backend(true), {0, 1}, 2, {}), body);
}

/// Runs a step: on one rank, parameter 0 has gradients up to `most`, and parameter 1 has `other`.
void step_with(Fake& model, int rank, float most, float other) {
  model.drop_all();
  model.begin(1);
  ASSERT_TRUE(model.core.receive(0));
  const std::span<float> gradient = model.gradient(0);
  for (std::size_t i = 0; i < gradient.size(); ++i)
    gradient[i] = (rank == 0 ? most : 0.5F) * static_cast<float>(i % 17) / 16;
  model.defined[0] = true;
  model.core.arrive(0);
  model.bring(1, rank == 0 ? other : 1);
  model.end();
}

double size_of_losses(const Fake& model) {
  double most = 0;
  for (const auto& [name, values] : model.core.residuals()) {
    for (const float value : values) most = std::max(most, std::abs(static_cast<double>(value)));
  }
  return most;
}

// All averages of the step except one are finite, and their rounding errors are as large as the averages.
TEST(GradientReducer, NothingIsKeptOfAStepThatIsNotFinite) {
  for (const nn::NonFinite mode : {nn::NonFinite::Raise, nn::NonFinite::Ignore}) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{1} << 20}) {
      run_on_two_hosts([&](const Communicator& comm) {
        nn::DistributedDataParallelOptions options{.bucket_bytes = bytes, .first_bucket_bytes = bytes};
        options.wire_format = WireFormat::Int4;
        options.non_finite = mode;
        Fake model(comm, {vector_of("a", 3000), vector_of("b", 70)}, options);
        step_with(model, comm.rank(), 1, 1);
        EXPECT_GT(size_of_losses(model), 0);
        EXPECT_FALSE(model.core.transaction().last_refused());
        bool refused = false;
        try {
          step_with(model, comm.rank(), 1e30F, std::numeric_limits<float>::infinity());
        } catch (const NonFiniteError&) {
          refused = true;
        }
        EXPECT_EQ(refused, mode == nn::NonFinite::Raise);
        EXPECT_EQ(model.core.transaction().last_refused(), refused);
        EXPECT_EQ(size_of_losses(model), 0);
        step_with(model, comm.rank(), 1, 1);
        for (const float value : model.gradient(0)) ASSERT_LT(std::abs(value), 2);
        EXPECT_FALSE(model.core.transaction().last_refused());
      });
    }
  }
}

TEST(GradientReducer, NothingIsKeptOfAStepThatIsRefusedForItsPlace) {
  run_on_two_hosts([](const Communicator& comm) {
    nn::DistributedDataParallelOptions options = kSmall;
    options.wire_format = WireFormat::Int8;
    options.error_feedback = true;
    Fake model(comm, {vector_of("a", 3000), vector_of("b", 70)}, options);
    step_with(model, comm.rank(), 1, 1);
    EXPECT_GT(size_of_losses(model), 0);
    model.begin(comm.rank() == 0 ? std::optional<std::int64_t>() : 3);  // one declares samples, the other does not
    model.bring(0, 0.3F);
    model.bring(1, 0.3F);
    EXPECT_THROW(model.end(), Error);
    EXPECT_TRUE(model.core.transaction().last_refused());
    EXPECT_EQ(size_of_losses(model), 0);
  });
}

TEST(GradientReducer, BucketsTakeTheOrderOfGradientsAlsoWhereAnotherTookThePlace) {
  run_on_threads(2, [](const Communicator& comm) {
    const auto train = [](Fake& model) {
      for (int step = 0; step < 2; ++step) {
        model.core.prepare_synchronising_pass();
        model.drop_all();
        model.begin(1);
        for (const std::size_t parameter : {0U, 2U, 1U}) model.bring(parameter, 1);
        model.end();
      }
    };
    const auto order = [](const Fake& model) {
      std::vector<int> all;
      for (const Bucket& bucket : model.core.buckets()) all.push_back(bucket.members().front());
      return all;
    };
    const std::vector<Parameter> parameters = {vector_of("a", 5), vector_of("b", 5), vector_of("c", 5)};
    Fake model(comm, parameters, kSmall);
    EXPECT_EQ(order(model), (std::vector<int>{2, 1, 0}));
    train(model);
    EXPECT_EQ(order(model), (std::vector<int>{0, 2, 1}));
    Fake next(comm, parameters, kSmall);
    next.core.go_on_from(model.core);
    train(next);
    EXPECT_EQ(order(next), (std::vector<int>{0, 2, 1}));
  });
}

TEST(GradientReducer, OperationsOfTwoReducersAreNotTakenForOneAnother) {
  run_on_threads(2, [](const Communicator& comm) {
    Fake one(comm, {vector_of("a", 500000)}), other(comm, {vector_of("a", 500000)});
    Fake& first = comm.rank() == 0 ? one : other;
    first.begin(std::nullopt);
    first.bring(0, 1);
    EXPECT_THROW(first.end(), Error);
  });
}

TEST(NonFinite, TheFirstIsThatOfTheDimensionsAndNotOfTheMemory) {
  std::vector<float> values(6, 1);
  const Parameter columns = {.name = "t", .dtype = DType::Float32, .sizes = {2, 3}, .strides = {1, 2}};
  EXPECT_FALSE(first_in(values.data(), columns, {}));
  values[1] = std::nanf("");                            // [1, 0]
  values[4] = -std::numeric_limits<float>::infinity();  // [0, 2]
  const auto found = first_in(values.data(), columns, {});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->index, 2);
  EXPECT_EQ(found->position, (std::vector<std::int64_t>{0, 2}));
  EXPECT_LT(found->value, 0);
}

}  // namespace
}  // namespace cohort::gradients
