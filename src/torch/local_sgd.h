// Internals of LocalSGD and DiLoCo, for local_sgd.cpp and for the elastic State's part of it.
#pragma once

#include "train/step/method.h"

#include <cohort/torch/local_sgd.h>
#include <cohort/work.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort::optim {

class LocalCore {
 public:
  using Options = LocalSteps::Options;
  struct Fragment {
    std::vector<at::Tensor> parameters;
    at::Tensor global;    // 1-D: what all ranks had after the last synchronisation
    at::Tensor momentum;  // of the outer optimizer; undefined without
    // Alike on all ranks.
    std::int64_t synchronisations = 0;
    std::int64_t synchronised_at = 0;  // steps that the last one has been of
    std::int64_t sent_at = 0;          // and the one under way is of
    // This rank's.
    double samples = 0;  // since the last one
    double sent = 0;     // of these, those before the one under way
    // Versions of its parameters, as autograd counts changes in place, while they are those that all ranks have.
    std::vector<std::int64_t> versions;
  };

  /// Values that travel, for the transaction.
  class UnderWay final : public step::Kept {
   public:
    explicit UnderWay(LocalCore& core) : core_(core) {}

   private:
    void clear() override { core_.drop(); }
    LocalCore& core_;
  };

  LocalCore(torch::nn::Module& of, torch::optim::Optimizer& inner, const Options& how);
  /// Steps between synchronisations, at that step.
  std::int64_t period(std::int64_t step) const noexcept;
  bool due() const noexcept { return since >= period(steps); }
  /// Starts and completes what is due.
  void go_on();
  void start(std::size_t number);
  void complete(double alpha);
  /// This rank's parameters become the synchronised ones, but for so much of its own.
  void take(Fragment& fragment, double alpha);
  /// The parameters, which are the same on all ranks, become the last synchronised ones; there is no momentum yet.
  void begin();
  void note(Fragment& fragment);
  /// Throws InvalidArgument for parameters that are trained and would never be averaged.
  void require_held(const char* where);
  /// Throws InvalidArgument for those that others than the optimizer have changed since the last synchronisation.
  void require_unwritten() const;
  /// A step's number of samples: one that cannot be becomes a fault where others may be on their way to an average.
  double taken(double samples);
  [[noreturn]] void raise_fault(const std::string& what) const;
  /// On all ranks.
  [[noreturn]] void raise_non_finite(const Fragment& fragment);
  /// Values averaged besides a fragment: a one, which becomes 0 where no rank had samples, and buffers with the first.
  at::Tensor besides(std::size_t number) const;
  /// Drops what was under way, as if it had not begun.
  void drop() noexcept;
  /// State that all ranks have alike, by name: the tensors themselves.
  std::vector<std::pair<std::string, at::Tensor>> outer() const;

  torch::nn::Module& module;
  torch::optim::Optimizer& optimizer;
  const Options options;
  Communicator comm;
  std::function<void()> advance;  // an elastic State's: then it is its `step` that synchronises

  std::vector<Fragment> fragments;
  std::vector<at::Tensor> buffers() const;  // of floating types: averaged with fragment 0
  std::vector<at::Tensor> kept;             // parameters that are not trained: alike, and stay
  // Alike on all ranks.
  std::int64_t steps = 0;
  std::int64_t since = 0;  // steps since the last synchronisation
  std::int64_t turn = 0;   // synchronisations that were due
  std::uint64_t version = 0;
  // This rank's: a number of samples that cannot be, which all ranks are to hear of; empty: none. And that under way.
  std::string fault, fault_sent;
  // Under way.
  std::optional<std::size_t> under_way;  // a fragment; alike on all ranks
  at::Tensor difference, rest;
  std::vector<Work> works;
  std::shared_ptr<UnderWay> travels = std::make_shared<UnderWay>(*this);
  step::Transaction transaction;
};

}  // namespace cohort::optim
