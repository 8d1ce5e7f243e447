// The journey of a gradient, whatever the framework: autograd makes it, it is written once into its bucket, a full
// bucket is reduced while backward goes on, and the end of backward waits for the rest. The design follows PyTorch's
// c10d Reducer (Li et al. 2020, arXiv 2006.15704); buckets in communicator memory, writing before AccumulateGrad and
// exact weights are ours. An Autograd is what a language has to add: hooks that call this, and gradients as it knows
// them. One thread per rank calls it.
#pragma once

#include "gradients/bucket.h"
#include "gradients/forwards.h"
#include "gradients/non_finite.h"
#include "gradients/ranks.h"

#include <cohort/gradients.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::gradients {

/// What the core asks of the framework. Called from within the core's functions only; may throw.
class Autograd {
 public:
  virtual ~Autograd() = default;
  /// There are new buckets: gradients that exist are put into their places.
  virtual void take_places() = 0;
  /// Puts the gradient into its place, if there is one and it lies elsewhere. False: there is none.
  virtual bool put_in_place(std::size_t parameter) = 0;
  /// The parameter's gradient is what lies in its place.
  virtual void give(std::size_t parameter) = 0;
  /// No parameter has a gradient any more.
  virtual void drop_all() = 0;
  /// What lies in its place is zero.
  virtual void clear(std::size_t parameter) = 0;
  /// Remembers what lies in its place, for `put_back`, until `drop_kept`.
  virtual void keep(std::size_t parameter) = 0;
  virtual void put_back(std::size_t parameter) = 0;
  virtual void drop_kept() = 0;
  /// See Forwards::TakesPart.
  virtual std::optional<bool> takes_part(const Forward& forward) = 0;
  /// Calls Reducer::finish at the end of the backward under way. `pass` is let go then, or where the backward fails.
  virtual void call_at_end(std::shared_ptr<void> pass) = 0;

  // Of a GPU's memory.

  /// Zeroed.
  virtual Memory allocate(const Device& gpu, std::size_t bytes) = 0;
  /// What is called from here has its work in this stream.
  virtual void* stream_of(const Device& gpu) = 0;
  /// Whether what lies in these places is.
  virtual bool are_finite(std::span<const int> parameters) = 0;
  /// What lies in its place, as it lies.
  virtual std::vector<std::byte> copy_to_host(std::size_t parameter) = 0;
};

/// What is reduced as one: the small gradients of a bucket, or one large gradient of it.
struct BucketView {
  std::size_t bucket = 0;  ///< its number in the plan, the same on all ranks
  ConstBuffer values;      ///< this rank's; `result`, or where autograd made it
  Buffer result;           ///< gets the average over ranks
  double weight = 0;       ///< of this rank's values: its samples. 0: they are not to be read
  std::optional<DType> wire_dtype = {};
  bool check_finite = false;  ///< whether Work::finite of the reduction is to say
};

/// How gradients are reduced: the one place for hooks (compression, local steps) and for other devices. Starts, and
/// does not wait. Called in the same order on all ranks.
using Reduce = std::function<Work(Communicator&, const BucketView&)>;
/// The exact average, weighted by samples.
Work reduce_by_average(Communicator& comm, const BucketView& view);

class Reducer {
 public:
  /// `autograd` outlives this. `lay_out` has to follow.
  Reducer(std::shared_ptr<Ranks> ranks, std::vector<Parameter> parameters,
          const nn::DistributedDataParallelOptions& options, Autograd& autograd, Reduce reduce = reduce_by_average);

  /// Makes the buckets.
  void lay_out();
  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  nn::BucketSlot slot_of(const std::string& name) const;
  Buffer place_of(std::size_t parameter) const;

  Forwards& forwards() noexcept { return forwards_; }
  /// Collective: brings the buckets into the order in which gradients came, once.
  void prepare_synchronising_pass();
  /// Throws Aborted if a synchronising backward began and did not end.
  void require_whole();

  // --- a backward, as the hooks see it ---

  /// It has come to an output of this forward.
  void begin_backward(const std::shared_ptr<Forward>& forward);
  /// It brings a gradient. False: it is to be dropped.
  bool receive(std::size_t parameter);
  /// Whether the reduction may take a gradient that lies as its place does from where it is.
  bool can_read(std::size_t parameter) const;
  /// It does: from `gradient`, which lives as long as `keep`.
  void read_from(std::size_t parameter, const void* gradient, std::shared_ptr<const void> keep);
  /// Whether this backward has brought one.
  bool received(std::size_t parameter) const { return in_backward_ && states_[parameter].received; }
  /// It has been accumulated, and is in its place or where `read_from` said.
  void arrive(std::size_t parameter);
  /// Its end: reduces what is left and waits, for a GPU's averages in the stream that autograd's work is in then.
  /// Throws NonFiniteError on all ranks if that was asked for.
  void finish();

  /// Instead of a backward: takes part with weight 0, or with what was accumulated. False if no rank had samples.
  bool reduce_without_backward();

  // --- members ---

  /// Synchronised steps of the world, as far as this rank has taken part or been told.
  std::int64_t progress() const noexcept { return progress_; }
  /// Collective, when all have joined: the lowest rank of those with the most steps, if there are differences.
  std::pair<int, std::optional<std::int64_t>> most_advanced();
  /// Collective: all ranks take over the order of `source`, whose progress was `progress`.
  void take_plan_of(int source, std::int64_t progress);
  /// From now on with these ranks, in buckets of their memory: also after a failure, since nobody of them is owed
  /// anything. Gradients stay as they are. New members take over a plan then: `take_plan_of`.
  void rebind(std::shared_ptr<Ranks> ranks);
  void rebind(Communicator comm) { rebind(ranks_of(std::move(comm))); }

  nn::ReducerStats& stats() noexcept { return stats_; }

 private:
  struct State {
    std::size_t bucket = 0;
    std::size_t position = 0;
    bool received = false;             // in this backward: a gradient has come
    bool ready = false;                // in this backward: nothing more will come
    bool used = false;                 // since the last reduction
    const void* unread = nullptr;      // the gradient, if the reduction reads it instead of what lies at its place
    std::shared_ptr<const void> keep;  // it
    bool kept = false;                 // the gradient that it had is, for if nobody uses it
  };

  void build_buckets(std::vector<int> order);
  void use_plan(BucketPlan plan, Ranks& ranks);
  void begin(const std::shared_ptr<Forward>& forward, const std::string& origin);
  void start_pass();
  void forget_pass();
  void tell_bucket_ready(std::size_t bucket);
  /// The timeline.
  void tell_when_reduced(Work& work, const BucketView& view) const;
  void launch_ready();
  void launch_next();
  void launch(BucketView view, std::shared_ptr<const void> keep);
  void launch_rest();
  void complete_unused(std::size_t parameter);
  bool wait_for_all();
  void exchange_flags();
  void settle_unused();
  bool flag(std::size_t number) const { return (flags_[number / 64] >> (number % 64) & 1U) != 0; }
  std::size_t samples_flag() const { return parameters_.size(); }
  std::size_t non_finite_flag() const { return parameters_.size() + 1; }

  bool looks_at_averages() const;
  FiniteOptions finite_options() const;
  const void* gradient_of(std::size_t parameter) const;
  void look_for_non_finite(std::size_t bucket);
  void look_on_gpu(std::size_t bucket);
  void look_for_non_finite_again();
  void note_non_finite(std::size_t bucket, std::size_t parameter);
  void note_non_finite(std::size_t bucket, std::size_t parameter, NonFiniteElement element);
  void raise_non_finite();

  std::shared_ptr<Ranks> ranks_;
  const nn::DistributedDataParallelOptions options_;
  const std::vector<Parameter> parameters_;
  Autograd& autograd_;
  const Reduce reduce_;
  std::vector<State> states_;  // of the parameters
  std::vector<Bucket> buckets_;
  BucketPlan plan_;
  std::vector<int> order_;     // that the plan was made from
  std::vector<int> arrivals_;  // parameters in the order of their gradients in the first synchronising backward
  bool reordered_ = false;
  std::int64_t progress_ = 0;
  Forwards forwards_;
  bool in_backward_ = false;
  std::weak_ptr<void> pass_;          // the backward under way; expired while in_backward_: it failed
  std::vector<std::size_t> pending_;  // per bucket
  std::size_t next_bucket_ = 0;
  // A message of their own, once the averages are there: a bit for each parameter that a rank with samples used, then
  // one for such a rank, one for one that has found a value that is not finite.
  std::vector<std::uint64_t> flags_;
  std::vector<std::chrono::steady_clock::time_point> ready_at_;  // by bucket; empty without a timeline
  struct Launched {
    std::unique_ptr<Pending> work;
    Device device;  // of the result
  };
  std::vector<Launched> works_;
  bool any_samples_ = false;
  std::optional<LocalNonFinite> non_finite_;  // the first of this rank, in this step
  nn::ReducerStats stats_;
};

}  // namespace cohort::gradients
