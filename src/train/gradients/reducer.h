// Reduction of gradients, for any framework: autograd makes a gradient, it is written once into its bucket, a full
// bucket is reduced while the backward goes on, and the end of the backward waits for all reductions. The design
// follows PyTorch's c10d Reducer (Li et al. 2020, arXiv 2006.15704). It differs in three ways: buckets lie in
// communicator memory, gradients are written before AccumulateGrad, and weights are declared. A language adds an
// Autograd, for access to its gradients, and hooks that call the Reducer. One thread per rank calls it.
#pragma once

#include "train/gradients/accumulation.h"
#include "train/gradients/autograd.h"
#include "train/gradients/buckets.h"
#include "train/gradients/division.h"
#include "train/gradients/non_finite.h"
#include "train/gradients/reductions.h"
#include "train/gradients/residuals.h"
#include "train/gradients/step_checks.h"
#include "train/gradients/virtual_part.h"
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
  std::size_t bucket = 0;  ///< the bucket's number in the plan, the same on all ranks
  ConstBuffer values;      ///< this rank's values, at `result` or where autograd made the gradient
  Buffer result;           ///< gets the average over ranks
  double weight = 0;       ///< weight of this rank's values; 0: the values must not be read
  std::uint32_t tag = 0;   ///< identifies this bucket of this reducer, the same on all ranks
  WireFormat wire_format = WireFormat::None;
  float* residual = nullptr;  ///< residuals of `values`; null without error feedback
  bool check_finite = false;  ///< true if the reduction has to set Work::finite
  /// Number of elements by rank, for a divided gradient: each rank's `result` gets its own part of the average.
  std::span<const std::int64_t> counts = {};
};

/// Function that reduces gradients: the only extension point for hooks (compression, local steps) and for other
/// devices. Starts the reduction and does not wait. Called in the same order on all ranks.
using Reduce = std::function<Work(Communicator&, const BucketView&)>;
/// Computes the exact weighted average.
Work reduce_by_average(Communicator& comm, const BucketView& view);

/// Argument of a user's hook: a whole bucket, in host memory, with all of its gradients at their places.
struct HookedBucket {
  std::size_t number = 0;          ///< the bucket's number in the plan, the same on all ranks
  bool last = false;               ///< true for the backward's last bucket
  bool last_step_refused = false;  ///< see Transaction::last_refused
  const Bucket& bucket;            ///< gets the result; the gaps between gradients are cleared afterwards
  /// Factor by which the hook first multiplies the values, so that the plain mean is the weighted average. 1 if all
  /// weights are equal. 0: this rank has no samples, and the hook clears the values without reading them.
  double share = 1;
  double total = 1;  ///< sum of all ranks' weights
};
/// Replaces `Reduce`, under the same rules, and may use operations that are not the communicator's. The returned
/// Pendings are waited for once, at the end of the backward, on its thread, in the order of the buckets.
using Hook = std::function<std::unique_ptr<step::Pending>(const HookedBucket&)>;

class Reducer {
 public:
  /// `autograd` outlives the Reducer. Call `lay_out` next. `shards`: how training state is divided; may be null.
  /// `transaction`: shared with the model's earlier and later reducers; null: the Reducer makes its own.
  Reducer(std::shared_ptr<step::Ranks> ranks, std::vector<Parameter> parameters,
          const nn::DistributedDataParallelOptions& options, Autograd& autograd, Reduce reduce = reduce_by_average,
          std::shared_ptr<Shards> shards = nullptr, std::shared_ptr<step::Transaction> transaction = nullptr);

  /// Collective. Compares the ranks' parameters if that has not been done yet, and makes the buckets.
  void lay_out();
  /// Sets the hook. Throws InvalidArgument after the first backward, if there is a hook already, or if hooks are not
  /// supported: for gradients that are divided, are in GPU memory, or have a wire format.
  void use_hook(Hook hook);
  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  nn::BucketSlot slot_of(const std::string& name) const;

  /// Division of training state; empty if training state is not divided.
  Division& division() noexcept { return division_; }
  const Division& division() const noexcept { return division_; }
  bool divides_gradients() const noexcept { return division_.divides_gradients(); }
  /// Forbids writes to parameters from now on, if the options ask for that. The parameters have been moved before.
  void protect_parameters();
  Buffer place_of(std::size_t parameter) const;
  std::size_t parameter_count() const noexcept { return parameters_.size(); }

  /// Null without virtual ranks.
  VirtualPart* virtual_part() noexcept { return virtual_.get(); }
  /// True from the first forward after a reduction to the next reduction.
  bool in_step() const noexcept { return accumulation_.has_forward() || (virtual_ && virtual_->ranks().in_step()); }
  /// True after a backward that has left averages, which with virtual ranks is only that of this rank's last one.
  bool step_complete() const noexcept { return step_complete_; }
  /// See DataParallelCore::mean_loss. Throws InvalidArgument without virtual ranks.
  std::optional<double> mean_loss(double loss);

  Accumulation& accumulation() noexcept { return accumulation_; }
  /// Notes a forward with gradients on: see Accumulation::add_forward. `rows`: the first dimension of its first tensor,
  /// if it has one; used for the status page and a warning, not as a weight.
  /// `batch`: if `wants_batch`, a digest of the forward's tensors. `epoch`: the sampler's, the same on all ranks.
  void add_forward(std::optional<std::int64_t> declared, std::optional<std::int64_t> rows,
                   std::optional<std::uint64_t> batch = std::nullopt, std::optional<std::int64_t> epoch = std::nullopt);
  /// True if the next forward begins one of the first steps, in which the ranks' batches are compared.
  bool wants_batch() const noexcept;
  /// True while a backward is under way, also during a forward within the backward (activation checkpointing).
  bool in_backward() const noexcept { return in_backward_ && !pass_.expired(); }
  /// Collective. Reorders the buckets, once, by the order in which gradients arrived.
  void prepare_synchronising_pass();
  /// Throws Aborted if a synchronising backward began and did not end.
  void require_whole();

  // --- a backward, as the hooks see it ---

  /// Begins a backward when autograd reaches an output of the wrapped module, or a parameter. Does nothing if begun.
  void begin_backward();
  /// Notes a gradient of the backward. Returns false if it has to be dropped because this rank declared 0 samples.
  bool receive(std::size_t parameter);
  /// Returns whether the reduction may read a gradient where it is, provided that it has the strides of its place.
  bool can_read(std::size_t parameter) const;
  /// Makes the reduction read the parameter's gradient from `gradient`, which lives as long as `keep`.
  void read_from(std::size_t parameter, const void* gradient, std::shared_ptr<const void> keep);
  /// True if `read_from` has named a gradient to read from in this backward.
  bool reads(std::size_t parameter) const { return unread_[parameter] != nullptr; }
  /// Returns whether this backward has made a gradient of the parameter.
  bool received(std::size_t parameter) const { return in_backward_ && states_[parameter].received; }
  /// Between backwards: returns whether the gradient has a part that no reduction has summed over the ranks (no_sync).
  bool is_local(std::size_t parameter) const { return !in_backward() && states_[parameter].used; }
  /// Notes that the gradient has been accumulated, and is in its place or at the address given to `read_from`.
  void arrive(std::size_t parameter);
  /// Ends the backward: reduces the remaining buckets and waits. For GPU averages, autograd's current stream waits
  /// instead. Throws NonFiniteError on all ranks if the options ask for it, and Mismatch on all ranks if ranks are at
  /// different places of the program or their parameters have drifted apart (step_checks.cpp).
  void finish();

  /// Takes part without a backward: with weight 0, or with accumulated gradients. Returns false if no rank had samples.
  bool reduce_without_backward();

  // --- members ---

  /// Replaces another Reducer of the same model, and takes over its accumulated counts and its residuals.
  void go_on_from(const Reducer& before);

  /// Returns the number of the world's synchronised steps that this rank has taken part in or learned of.
  std::int64_t progress() const noexcept { return progress_; }
  /// Collective; called when all have joined. Returns the lowest rank with most steps; also their number if ranks
  /// differ.
  std::pair<int, std::optional<std::int64_t>> most_advanced();
  /// Collective. All ranks take over the bucket order of rank `source`, and `progress`, its progress.
  void take_plan_of(int source, std::int64_t progress);

  nn::ReducerStats& stats() noexcept { return stats_; }

  step::Transaction& transaction() noexcept { return *transaction_; }

  /// Returns this rank's residuals by parameter name; empty without error feedback.
  std::map<std::string, std::span<float>> residuals() const;

 private:
  struct State {
    std::size_t bucket = 0;
    std::size_t position = 0;
    bool received = false;             // in this backward: a gradient has arrived
    bool ready = false;                // in this backward: the gradient is complete
    bool used = false;                 // true if the gradient was used since the last reduction
    std::shared_ptr<const void> keep;  // owns the gradient, if the reduction does not read it at its place
    bool kept = false;                 // the parameter's earlier gradient is saved, in case no rank uses it
  };
  // Buckets.
  void build_buckets(std::vector<int> order);
  void use_plan(BucketPlan plan);
  bool any_on_gpu() const noexcept;
  // A backward.
  void start_pass();
  void end_virtual_rank();
  void drop_used();
  void forget_pass();
  void forget_unread();
  void complete_unused(std::size_t parameter);
  void settle_unused();
  // The exchange.
  void launch_ready();
  void launch_next();
  void launch_rest();
  void launch(BucketView view, std::shared_ptr<const void> keep, std::size_t held = 0);
  void launch_hook(std::size_t number);
  void divide(BucketView& view);
  bool wait_for_all();
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
  TotalWeight total_weight_;              // for a hook
  std::vector<State> states_;             // states of the parameters
  std::vector<const void*> unread_;       // by parameter: the address given to `read_from`, or null
  std::shared_ptr<Residuals> residuals_;  // null without error feedback
  std::unique_ptr<VirtualPart> virtual_;  // null without virtual ranks
  std::vector<Bucket> buckets_;
  BucketPlan plan_;
  std::vector<int> order_;     // order of parameters from which the plan was made
  std::vector<int> arrivals_;  // parameters in the order of their gradients in the first synchronising backward
  bool reordered_ = false;
  std::int64_t first_step_ = 0;  // the progress with which this reducer began
  std::int64_t progress_ = 0;
  Accumulation accumulation_;
  StepMessage message_;
  StepChecks checks_;
  FiniteSearch finite_;
  std::uint32_t number_ = 0;        // this reducer's number among the reducers of these ranks
  std::int64_t shown_samples_ = 0;  // samples of the next reduction, for the status page
  bool in_backward_ = false;
  std::weak_ptr<void> pass_;          // the backward under way; expired while in_backward_ is set: the backward failed
  std::vector<std::size_t> pending_;  // by bucket: number of gradients still to come
  std::size_t next_bucket_ = 0;
  BucketTimes bucket_times_;
  Reductions works_;
  bool any_samples_ = false;
  bool step_complete_ = false;
  nn::ReducerStats stats_;
};

}  // namespace cohort::gradients
