// A small method of training, on ranks that are threads; and the errors that it gets if it forgets a part.
#include "train/step/method.h"

#include "base/result.h"
#include "comm/api/communicator_impl.h"

#include <cohort/error.h>

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace cohort::step {
namespace {

using Floats = std::vector<float>;

enum class Forgets : std::uint8_t { Nothing, Trained, Agreement, Decision, Kept };

/// Averages gradients that are rounded to whole numbers, and adds the rounding errors to the next gradients.
class Rounding {
 public:
  Rounding(const Communicator& comm, float rate, Forgets forgets = Forgets::Nothing)
      : ranks_(ranks_of(comm)),
        rate_(rate),
        forgets_(forgets),
        transaction_({.name = std::string("Rounding"),
                      .trained = Meanings{.frozen = Meaning::Rebased,
                                          .thawed = Meaning::Refused,
                                          .added = Meaning::Refused,
                                          .removed = Meaning::Refused,
                                          .replaced = Meaning::Refused,
                                          .cast = Meaning::Refused,
                                          .moved = Meaning::Refused},
                      .agreed = Difference{"Rounding", "options", "give the same on all ranks"},
                      .decided = DecidedBy{"averages"},
                      .kept = KeptNames{"error"}}) {
    transaction_.agreement().set("Rounding", "rate", std::to_string(rate));
    if (forgets != Forgets::Kept) transaction_.keep("error", error_);
  }

  void step(Floats& values, Floats gradient) {
    if (forgets_ != Forgets::Trained)
      transaction_.trained().update({{.name = "w", .identity = &values, .type = "float32"}}, "Rounding",
                                    "make another");
    Floats& error = (*error_)["w"].values;
    error.resize(gradient.size());
    Floats sent = gradient;
    for (std::size_t i = 0; i < sent.size(); ++i) sent[i] = std::round(gradient[i] + error[i]);
    error_->prepare();
    for (std::size_t i = 0; i < sent.size(); ++i) error[i] += gradient[i] - sent[i];
    AllReduceOptions options{.op = ReduceOp::Average};
    if (forgets_ != Forgets::Agreement) options.tag = transaction_.agreement().tag();
    try {
      ranks_->run("all_reduce", sent, [&](Communicator& comm, auto span) { return comm.all_reduce(span, options); });
    } catch (const Error& failed) {
      transaction_.end(Decision::by_error(Outcome::Lost));
      transaction_.agreement().explain(*ranks_, failed);
      throw;
    }
    const bool finite = std::ranges::all_of(sent, [](float value) { return std::isfinite(value); });
    const Outcome outcome = finite ? Outcome::Accepted : Outcome::NotFinite;
    transaction_.end(forgets_ == Forgets::Decision ? Decision::none() : Decision::by_averages(outcome));
    for (std::size_t i = 0; finite && i < values.size(); ++i) values[i] -= rate_ * sent[i];
  }

 private:
  struct Lost {
    Floats values;
    void clear() { values.clear(); }
  };
  std::shared_ptr<Ranks> ranks_;
  float rate_;
  Forgets forgets_;
  std::shared_ptr<KeptByName<Lost>> error_ = std::make_shared<KeptByName<Lost>>();
  Transaction transaction_;
};

std::string refused(ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was refused";
  return {};
}

TEST(Transaction, KeepsWhatRoundingLosesAndDropsItWithAStepThatIsNotFinite) {
  run_on_threads(2, [](Communicator comm) {
    Rounding method(comm, 1);
    Floats values(2);
    for (int step = 0; step < 4; ++step) method.step(values, {0.25F, 1});
    EXPECT_EQ(values, (Floats{-1, -4}));
    method.step(values, {0.25F, comm.rank() == 0 ? std::numeric_limits<float>::quiet_NaN() : 1.0F});
    EXPECT_EQ(values, (Floats{-1, -4}));
    for (int step = 0; step < 4; ++step) method.step(values, {0.25F, 1});
    EXPECT_EQ(values, (Floats{-2, -8}));
  });
}

TEST(Transaction, WhatAMethodForgetsIsRefusedByNameInItsFirstStep) {
  for (const auto& [forgets, said] : {std::pair(Forgets::Trained, "what is trained was not looked at"),
                                      {Forgets::Agreement, "what must agree has not travelled"},
                                      {Forgets::Decision, "it was not decided by the averages"},
                                      {Forgets::Kept, "'error', which it keeps, was not shown"}}) {
    run_on_threads(2, [forgets = forgets, said = said](Communicator comm) {
      Rounding method(comm, 1, forgets);
      Floats values(2);
      const std::string text = refused(ErrorCode::Internal, [&] { method.step(values, {1, 1}); });
      EXPECT_NE(text.find(std::string("Rounding: its first step has ended, and ") + said), std::string::npos) << text;
      EXPECT_EQ(values, Floats(2));
    });
  }
}

TEST(Transaction, OptionsThatDifferAreNamedOnAllRanks) {
  run_on_threads(3, [](Communicator comm) {
    Rounding method(comm, comm.rank() == 2 ? 0.5F : 0.25F);
    Floats values(2);
    const std::string text = refused(ErrorCode::Mismatch, [&] { method.step(values, {1, 1}); });
    EXPECT_NE(text.find("rank 0 has rate of Rounding = 0.250000, rank 2 has rate of Rounding = 0.500000"),
              std::string::npos)
        << text;
  });
}

TEST(Transaction, WhatIsTrainedElsewhereIsRefusedByName) {
  run_on_threads(1, [](Communicator comm) {
    Rounding method(comm, 1);
    Floats values(2), other(2);
    method.step(values, {1, 1});
    const std::string text = refused(ErrorCode::InvalidArgument, [&] { method.step(other, {1, 1}); });
    EXPECT_NE(text.find("parameter 'w' was replaced -- make another"), std::string::npos) << text;
    method.step(values, {1, 1});
  });
}

TEST(Trained, EachChangeIsOneEvent) {
  const Given<Meaning> in = Meaning::TakenIn;
  Trained trained({in, in, in, in, in, in, in});
  int a = 0, b = 0;
  const Shown base{.name = "a", .identity = &a, .type = "float32", .device = "cpu", .sizes = {2}};
  EXPECT_TRUE(trained.update({base}, "", "").empty());
  const auto change = [&](const std::function<void(Shown&)>& edit) {
    Shown now = base;
    edit(now);
    const auto changes = trained.update({now}, "", "");
    trained.update({base}, "", "");
    return changes.size() == 1 ? changes[0].text() : fmt::format("{} changes", changes.size());
  };
  EXPECT_EQ(change([](Shown&) {}), "0 changes");
  EXPECT_EQ(change([](Shown& one) { one.requires_grad = false; }), "'a' was frozen");
  EXPECT_EQ(change([&](Shown& one) { one.identity = &b; }), "'a' was replaced");
  EXPECT_EQ(change([](Shown& one) { one.sizes = {3}; }), "'a' was replaced");
  EXPECT_EQ(change([](Shown& one) { one.type = "float16"; }), "'a' was cast from float32 to float16");
  EXPECT_EQ(change([](Shown& one) { one.device = "cuda:0"; }), "'a' was moved from cpu to cuda:0");
  EXPECT_EQ(change([](Shown& one) { one.name = "c"; }), "2 changes");
}

TEST(Agreement, SumsOverRanksTellWhetherDigestsAreAlike) {
  run_on_threads(3, [](Communicator comm) {
    Agreement agreement({"X::step", "things", "do the same"});
    const auto ranks = ranks_of(comm);
    for (const bool differ : {false, true}) {
      agreement.set("group 0", "lr", differ && comm.rank() == 1 ? "2" : "1");
      Agreement::Sums sums = agreement.sums();
      comm.all_reduce(std::span(sums)).wait();
      if (!differ) {
        agreement.require(*ranks, sums);
        agreement.require(*ranks);
        continue;
      }
      const char* const said = "rank 0 has lr of group 0 = 1, rank 1 has lr of group 0 = 2 -- do the same";
      const std::string text = refused(ErrorCode::Mismatch, [&] { agreement.require(*ranks, sums, "X::clip"); });
      EXPECT_NE(text.find(std::string("X::clip: the ranks' things differ -- ") + said), std::string::npos) << text;
      EXPECT_NE(refused(ErrorCode::Mismatch, [&] { agreement.require(*ranks); }).find(said), std::string::npos);
    }
  });
}

TEST(Agreement, AMismatchIsExplainedWhereAllRanksHadBroughtATag) {
  run_on_threads(3, [](Communicator comm) {
    const auto ranks = ranks_of(comm);
    Agreement agreement({"X", "options", "do the same"});
    agreement.set("group 0", "lr", comm.rank() == 1 ? "2" : "1");
    for (const bool other : {true, false}) {  // the third rank runs another operation, and would exchange nothing
      AllReduceOptions options;
      if (!other || comm.rank() != 2) options.tag = agreement.tag();
      float value = 1;
      const auto step = [&] {
        try {
          comm.all_reduce(std::span(&value, 1), options).wait();
        } catch (const Error& error) {
          EXPECT_EQ(error.context().tagged, !other);
          if (options.tag != 0) agreement.explain(*ranks, error);
          throw;
        }
      };
      const std::string text = refused(ErrorCode::Mismatch, step);
      EXPECT_EQ(text.find("rank 1 has lr of group 0 = 2") != std::string::npos, !other) << text;
    }
    comm.barrier().wait();  // nobody is in another operation
  });
}

TEST(Message, SaysWhatAnyRankUsedAndWhichWordsDiffer) {
  run_on_threads(2, [](Communicator comm) {
    const auto ranks = ranks_of(comm);
    Message message(70, 2, 3);
    message.use(comm.rank() == 0 ? 3 : 69);
    if (comm.rank() == 1) message.say(1);
    message.show(0, 7);
    message.show(1, static_cast<std::uint64_t>(comm.rank()));
    message.exchange(*ranks);
    EXPECT_TRUE(message.used(3) && message.used(69) && !message.used(4));
    EXPECT_TRUE(message.said(1) && !message.said(0));
    EXPECT_TRUE(!message.differs(0) && message.differs(1) && message.shown(1) && !message.shown(2));
  });
}

TEST(Ranks, ValuesKeepTheirLengthAfterAnError) {
  run_on_threads(2, [](Communicator comm) {
    const auto ranks = ranks_of(comm);
    std::vector<std::uint64_t> values(3, 7);
    EXPECT_THROW(ranks->run("all_reduce", values,
                            [&](Communicator& each, auto span) {
                              return each.all_reduce(span.first(comm.rank() == 0 ? 1 : 2));
                            }),
                 Error);
    EXPECT_EQ(values.size(), 3U);
    comm.barrier().wait();
  });
}

}  // namespace
}  // namespace cohort::step
