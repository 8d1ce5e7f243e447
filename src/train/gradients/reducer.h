// The journey of a gradient, whatever the framework: autograd makes it, it is written once into its bucket, a full
// bucket is reduced while backward goes on, and the end of backward waits for the rest. The design follows PyTorch's
// c10d Reducer (Li et al. 2020, arXiv 2006.15704); buckets in communicator memory, writing before AccumulateGrad and
// declared weights are ours. An Autograd is what a language has to add: hooks that call this, and gradients as it knows
// them. One thread per rank calls it.
#pragma once

#include "train/gradients/accumulation.h"
#include "train/gradients/autograd.h"
#include "train/gradients/buckets.h"
#include "train/gradients/division.h"
#include "train/gradients/non_finite.h"
#include "train/gradients/residuals.h"
#include "train/gradients/step_checks.h"
#include "train/step/method.h"
#include "train/step/ranks.h"

#include <cohort/gradients.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::gradients {

/// Unit of a reduction: the small gradients of a bucket, or one large gradient of it.
struct BucketView {
  std::size_t bucket = 0;  ///< its number in the plan, the same on all ranks
  ConstBuffer values;      ///< this rank's; `result`, or where autograd made it
  Buffer result;           ///< gets the average over ranks
  double weight = 0;       ///< of this rank's values. 0: they are not to be read
  std::uint32_t tag = 0;   ///< of this bucket of this reducer, the same on all ranks
  WireFormat wire_format = WireFormat::None;
  float* residual = nullptr;  ///< of `values`, where there is error feedback
  bool check_finite = false;  ///< whether Work::finite of the reduction is to say
  /// Elements by rank, for a divided gradient. Each rank's `result` gets its own part of the average.
  std::span<const std::int64_t> counts = {};
};

/// How gradients are reduced: the one place for hooks (compression, local steps) and for other devices. Starts, and
/// does not wait. Called in the same order on all ranks.
using Reduce = std::function<Work(Communicator&, const BucketView&)>;
/// The exact average by weights.
Work reduce_by_average(Communicator& comm, const BucketView& view);

/// Argument of a user's hook: a whole bucket, in the host's memory, with all of its gradients at their places.
struct HookedBucket {
  std::size_t number = 0;          ///< in the plan, the same on all ranks
  bool last = false;               ///< of the backward
  bool last_step_refused = false;  ///< as Reducer::last_step_refused
  const Bucket& bucket;            ///< gets the result; what lies between gradients is cleared afterwards
  /// Factor to multiply the values by first: the plain mean over ranks is the average by weights then. 1 where all
  /// weights are equal. 0: this rank has no samples, and its values are to be cleared without being read.
  double share = 1;
};
/// In place of `Reduce`, under the same rules, with operations that need not be the communicator's: what it returns is
/// waited for once, at the end of the backward, on its thread, in the order of the buckets.
using Hook = std::function<std::unique_ptr<step::Pending>(const HookedBucket&)>;

class Reducer {
 public:
  /// `autograd` outlives this. `lay_out` has to follow. `shards`: how training state is divided, if it is.
  /// `transaction`: of this model, also for the reducers before and after this one; null: one of its own.
  Reducer(std::shared_ptr<step::Ranks> ranks, std::vector<Parameter> parameters,
          const nn::DistributedDataParallelOptions& options, Autograd& autograd, Reduce reduce = reduce_by_average,
          std::shared_ptr<Shards> shards = nullptr, std::shared_ptr<step::Transaction> transaction = nullptr);

  /// Collective: compares what nobody has compared yet, and makes the buckets.
  void lay_out();
  /// Throws InvalidArgument after the first backward, where there is one, or where a hook could not be right: gradients
  /// that are divided, in a GPU's memory, or have a type for the wire.
  void use_hook(Hook hook);
  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  nn::BucketSlot slot_of(const std::string& name) const;

  /// Division of training state; empty where there is none.
  Division& division() noexcept { return division_; }
  const Division& division() const noexcept { return division_; }
  bool divides_gradients() const noexcept { return division_.divides_gradients(); }
  /// From now on parameters are not to be written, if that was asked for: they have been put where they are to lie.
  void protect_parameters();
  Buffer place_of(std::size_t parameter) const;
  std::size_t parameter_count() const noexcept { return parameters_.size(); }

  Accumulation& accumulation() noexcept { return accumulation_; }
  /// A forward with gradients on: see Accumulation::add_forward. `rows`: the first dimension of its first tensor, if it
  /// has one. It is shown, and compared for a warning; it is no weight.
  /// `batch`: where `wants_batch`, a digest of its tensors.
  void add_forward(std::optional<std::int64_t> declared, std::optional<std::int64_t> rows,
                   std::optional<std::uint64_t> batch = std::nullopt);
  /// The next forward is the first of one of the first steps, whose batches are compared.
  bool wants_batch() const noexcept;
  /// A backward is under way. A forward within it (of checkpointing) is a part of it.
  bool in_backward() const noexcept { return in_backward_ && !pass_.expired(); }
  /// Collective: brings the buckets into the order in which gradients came, once.
  void prepare_synchronising_pass();
  /// Throws Aborted if a synchronising backward began and did not end.
  void require_whole();

  // --- a backward, as the hooks see it ---

  /// It has come to an output of the wrapped module, or to a parameter. Nothing if that is known.
  void begin_backward();
  /// It brings a gradient. False: it is to be dropped, since its rank has declared that it has no samples.
  bool receive(std::size_t parameter);
  /// Whether the reduction may take a gradient that lies as its place does from where it is.
  bool can_read(std::size_t parameter) const;
  /// It does: from `gradient`, which lives as long as `keep`.
  void read_from(std::size_t parameter, const void* gradient, std::shared_ptr<const void> keep);
  /// True if `read_from` has named a gradient to read from in this backward.
  bool reads(std::size_t parameter) const { return unread_[parameter] != nullptr; }
  /// Whether this backward has brought one.
  bool received(std::size_t parameter) const { return in_backward_ && states_[parameter].received; }
  /// Between backwards: some of its gradient is of this rank alone (no_sync), since no reduction has come after it.
  bool is_local(std::size_t parameter) const { return !in_backward() && states_[parameter].used; }
  /// It has been accumulated, and is in its place or where `read_from` said.
  void arrive(std::size_t parameter);
  /// Its end: reduces what is left and waits, for a GPU's averages in the stream that autograd's work is in then.
  /// Throws NonFiniteError on all ranks if that was asked for, Mismatch on all ranks if they are at different places or
  /// their parameters have drifted apart (step_checks.cpp).
  void finish();

  /// Instead of a backward: takes part with weight 0, or with what was accumulated. False if no rank had samples.
  bool reduce_without_backward();

  // --- members ---

  /// This takes the place of another one over the same model, with what that has accumulated and lost to rounding.
  void go_on_from(const Reducer& before);

  /// Synchronised steps of the world, as far as this rank has taken part or been told.
  std::int64_t progress() const noexcept { return progress_; }
  /// Collective, when all have joined: the lowest rank of those with the most steps, if there are differences.
  std::pair<int, std::optional<std::int64_t>> most_advanced();
  /// Collective: all ranks take over the order of `source`, whose progress was `progress`.
  void take_plan_of(int source, std::int64_t progress);
  /// From now on with these ranks, in buckets of their memory: also after a failure, since nobody of them is owed
  /// anything. Gradients stay as they are. New members take over a plan then: `take_plan_of`.
  void rebind(std::shared_ptr<step::Ranks> ranks);
  void rebind(Communicator comm) { rebind(step::ranks_of(std::move(comm))); }

  nn::ReducerStats& stats() noexcept { return stats_; }

  step::Transaction& transaction() noexcept { return *transaction_; }

  /// By parameter's name, of this rank; empty without error feedback.
  std::map<std::string, std::span<float>> residuals() const;

 private:
  struct State {
    std::size_t bucket = 0;
    std::size_t position = 0;
    bool received = false;             // in this backward: a gradient has come
    bool ready = false;                // in this backward: nothing more will come
    bool used = false;                 // since the last reduction
    std::shared_ptr<const void> keep;  // what is read, if the reduction does not read what lies at its place
    bool kept = false;                 // the gradient that it had is, for if nobody uses it
  };
  struct Launched {
    std::unique_ptr<step::Pending> work;
    Device device;  // of the result
    // Bytes of the gradient that it reads where autograd made it, if nobody needs that afterwards.
    std::size_t held = 0;
  };

  // Buckets.
  void build_buckets(std::vector<int> order);
  void use_plan(BucketPlan plan, step::Ranks& ranks);
  bool any_on_gpu() const noexcept;
  // A pass.
  void start_pass();
  void forget_pass();
  void forget_unread();
  void complete_unused(std::size_t parameter);
  void settle_unused();
  // The exchange.
  void tell_bucket_ready(std::size_t bucket);
  void tell_when_reduced(Work& work, const BucketView& view) const;
  void launch_ready();
  void launch_next();
  void launch_rest();
  void launch(BucketView view, std::shared_ptr<const void> keep);
  double share_of_hook();
  void divide(BucketView& view);
  void await_room(std::size_t bytes);
  bool wait_for_all();
  bool averages_are_finite() const;
  void exchange_message(bool averages_finite);
  bool keeps_losses() const noexcept;
  void count_step(std::chrono::steady_clock::time_point begin);

  std::shared_ptr<step::Ranks> ranks_;
  const nn::DistributedDataParallelOptions options_;
  const std::vector<Parameter> parameters_;
  Autograd& autograd_;
  const Reduce reduce_;
  std::shared_ptr<step::Transaction> transaction_;
  Division division_;
  Hook hook_;
  std::shared_ptr<std::vector<double>> total_weight_;  // of all ranks, for a hook
  std::unique_ptr<step::Pending> totalling_;           // it
  std::vector<State> states_;                          // of the parameters
  std::vector<const void*> unread_;                    // by parameter: what the reduction reads in place of its place
  std::shared_ptr<Residuals> residuals_;               // where there is error feedback
  std::vector<Bucket> buckets_;
  BucketPlan plan_;
  std::vector<int> order_;     // that the plan was made from
  std::vector<int> arrivals_;  // parameters in the order of their gradients in the first synchronising backward
  bool reordered_ = false;
  std::int64_t first_step_ = 0;  // the progress with which this reducer began
  std::int64_t progress_ = 0;
  Accumulation accumulation_;
  StepMessage message_;
  StepChecks checks_;
  FiniteSearch finite_;
  std::uint32_t number_ = 0;        // among the reducers of these ranks
  std::int64_t shown_samples_ = 0;  // of what is reduced next
  bool in_backward_ = false;
  std::weak_ptr<void> pass_;          // the backward under way; expired while in_backward_: it failed
  std::vector<std::size_t> pending_;  // per bucket
  std::size_t next_bucket_ = 0;
  std::vector<std::chrono::steady_clock::time_point> ready_at_;  // by bucket; empty without a timeline
  std::vector<Launched> works_;
  bool any_samples_ = false;
  nn::ReducerStats stats_;
};

}  // namespace cohort::gradients
