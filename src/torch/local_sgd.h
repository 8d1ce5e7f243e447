// Internals of LocalSGD and DiLoCo, for local_sgd.cpp and for their part in elastic.cpp.
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
    at::Tensor global;    // 1-D: the parameters after the last synchronisation, equal on all ranks
    at::Tensor momentum;  // momentum of the outer optimizer; undefined if it has none
    // The next three are the same on all ranks.
    std::int64_t synchronisations = 0;
    std::int64_t synchronised_at = 0;  // step of the last synchronisation
    std::int64_t sent_at = 0;          // step at which the synchronisation under way began
    // The fields below are this rank's own.
    double samples = 0;  // samples since the last synchronisation
    double sent = 0;     // the part of `samples` before the synchronisation under way
    // Versions of the parameters, by autograd's count of changes in place, when all ranks last had the same values.
    std::vector<std::int64_t> versions;
  };

  /// The synchronisation under way, which the transaction may drop.
  class UnderWay final : public step::Kept {
   public:
    explicit UnderWay(LocalCore& core) : core_(core) {}

   private:
    void clear() override { core_.drop(); }
    LocalCore& core_;
  };

  LocalCore(torch::nn::Module& of, torch::optim::Optimizer& inner, const Options& how);
  /// Number of steps between synchronisations, as of `step`.
  std::int64_t period(std::int64_t step) const noexcept;
  bool due() const noexcept { return since >= period(steps); }
  /// Starts and completes the synchronisations that are due.
  void go_on();
  void start(std::size_t number);
  void complete(double alpha);
  /// Sets this rank's parameters to the synchronised ones, mixed with its own by the weight `alpha`.
  void take(Fragment& fragment, double alpha);
  /// Takes the parameters, which are the same on all ranks, as the last synchronised ones, without momentum.
  void begin();
  void note(Fragment& fragment);
  /// Throws InvalidArgument if parameters are trained that would never be averaged.
  void require_held(const char* where);
  /// Throws InvalidArgument for parameters that something other than the optimizer has changed since the last
  /// synchronisation.
  void require_unwritten() const;
  /// Checks a step's number of samples. An impossible one is a fault, recorded if other ranks may start an average.
  double taken(double samples);
  [[noreturn]] void raise_fault(const std::string& what) const;
  /// Called on all ranks.
  [[noreturn]] void raise_non_finite(const Fragment& fragment);
  /// Values averaged with a fragment: a 1, which becomes 0 if no rank had samples, and, with fragment 0, buffers.
  at::Tensor besides(std::size_t number) const;
  /// Describes the buffers among these values, by name and shape.
  std::string described_buffers() const;
  void average_buffers_anew(bool samples);
  /// Drops the synchronisation under way, as if it had not begun.
  void drop() noexcept;
  /// State that is the same on all ranks, by name; not copied.
  std::vector<std::pair<std::string, at::Tensor>> outer() const;

  torch::nn::Module& module;
  torch::optim::Optimizer& optimizer;
  const Options options;
  Communicator comm;
  std::function<void()> advance;  // set by an elastic State, whose `step` then synchronises

  std::vector<Fragment> fragments;
  std::vector<at::Tensor> buffers() const;  // buffers of floating types, averaged with fragment 0
  std::vector<at::Tensor> kept;             // parameters that are not trained: the same on all ranks, and never changed
  // The next four are the same on all ranks.
  std::int64_t steps = 0;
  std::int64_t since = 0;  // steps since the last synchronisation
  std::int64_t turn = 0;   // number of synchronisations that were due
  std::uint64_t version = 0;
  // Error text for all ranks about this rank's impossible number of samples (empty: none), and the text under way.
  std::string fault, fault_sent;
  // State of the synchronisation under way.
  std::optional<std::size_t> under_way;  // number of the fragment; the same on all ranks
  at::Tensor difference, rest;
  std::string rest_of;  // described_buffers() of `rest`
  std::vector<Work> works;
  std::shared_ptr<UnderWay> travels = std::make_shared<UnderWay>(*this);
  step::Transaction transaction;
};

}  // namespace cohort::optim
