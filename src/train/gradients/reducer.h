// The journey of a gradient, whatever the framework: autograd makes it, it is written once into its bucket, a full
// bucket is reduced while backward goes on, and the end of backward waits for the rest. The design follows PyTorch's
// c10d Reducer (Li et al. 2020, arXiv 2006.15704); buckets in communicator memory, writing before AccumulateGrad and
// declared weights are ours. An Autograd is what a language has to add: hooks that call this, and gradients as it knows
// them. One thread per rank calls it.
#pragma once

#include "train/gradients/buckets.h"
#include "train/gradients/non_finite.h"
#include "train/gradients/ranks.h"
#include "train/gradients/residuals.h"
#include "train/gradients/sharding.h"
#include "train/gradients/write_protection.h"

#include <cohort/gradients.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::gradients {

/// Whether a backward reduces, and how many samples stand behind what it reduces: no_sync, accumulation, and the counts
/// that forwards declare. Nothing is derived from shapes or graphs: a rank that declares nothing weighs as much as any
/// other, as in torch's DistributedDataParallel.
class Accumulation {
 public:
  bool in_no_sync() const noexcept { return no_sync_depth_ > 0; }
  void enter_no_sync() noexcept { ++no_sync_depth_; }
  void leave_no_sync() noexcept { --no_sync_depth_; }

  /// Of a forward for which the part that knows cannot say it: an error if a backward is for that one alone.
  static constexpr std::int64_t kUnknown = -1;

  /// A forward with gradients on. `declared`: its number of samples, where a part that knows has said it. Several
  /// before one backward have one number: nothing says whose it would be.
  void add_forward(std::optional<std::int64_t> declared) noexcept;

  /// A backward begins. One that follows no new forward (a second one through a retained graph, a penalty) is of as
  /// many samples as the one before it.
  void begin() noexcept;
  /// It has ended: what it was for is reduced, or waits for the next one that reduces.
  void end() noexcept;
  /// A reduction without a backward: this rank has no samples but those accumulated.
  void begin_without() noexcept;

  // Of the backward under way, or the last one.

  /// It reduces: outside of no_sync, and not only for forwards of no_sync.
  bool sync() const noexcept { return sync_; }
  /// Its rank has declared that it has no samples: what it yields is dropped.
  bool discards() const noexcept { return samples_ == 0; }
  /// There has been a forward since the last reduction.
  bool has_forward() const noexcept { return sync_forward_ || local_forward_; }
  /// The samples declared for what is reduced; nullopt where none were.
  std::optional<std::int64_t> declared() const noexcept;
  /// Of what is reduced, in the average over ranks. 0: this rank has nothing.
  double weight() const noexcept;
  /// The weight of what is reduced is not known: some of it has a number of samples and some has none, forwards of one
  /// backward have different ones, or it is unknown.
  bool is_mixed() const noexcept { return conflict_ || (undeclared_ && total_ > 0); }

 private:
  int no_sync_depth_ = 0;
  bool sync_forward_ = false;   // since the last reduction: outside of no_sync
  bool local_forward_ = false;  // inside
  bool fresh_ = false;          // since the last backward
  std::optional<std::int64_t> fresh_samples_;
  bool fresh_conflict_ = false;

  std::optional<std::int64_t> samples_;  // of the backward under way, or the last one
  bool sync_ = false;

  std::int64_t total_ = 0;  // declared for what is reduced next
  bool counted_ = false;    // anything, be it 0
  bool undeclared_ = false;
  bool conflict_ = false;
};

/// What the core asks of the framework. Called from within the core's functions only; may throw.
class Autograd {
 public:
  virtual ~Autograd() = default;
  /// There are new buckets: gradients that exist are put into their places.
  virtual void take_places() = 0;
  /// Puts the gradient into its place, if there is one and it lies elsewhere. False: there is none.
  virtual bool put_in_place(std::size_t parameter) = 0;
  /// The parameter's gradient is what lies in its place. Of divided gradients: that of its pieces is what lies in
  /// theirs (and is added to what they have), and it has none itself.
  virtual void give(std::size_t parameter) = 0;
  /// No parameter has a gradient any more.
  virtual void drop_all() = 0;
  /// What lies in its place is zero.
  virtual void clear(std::size_t parameter) = 0;
  /// Remembers what lies in its place, for `put_back`, until `drop_kept`.
  virtual void keep(std::size_t parameter) = 0;
  virtual void put_back(std::size_t parameter) = 0;
  virtual void drop_kept() = 0;
  /// Of pieces that have a gradient: it is kept from the reductions that come, which write to where it lies.
  virtual void put_aside() {}
  /// Calls Reducer::finish at the end of the backward under way. `pass` is let go then, or where the backward fails.
  virtual void call_at_end(std::shared_ptr<void> pass) = 0;

  // Of the parameters' values, which are compared over the ranks.

  /// The values of these, each in one piece of memory; empty where the host cannot read them so.
  virtual std::vector<std::span<const std::byte>> values_of(std::span<const int> parameters) = 0;
  /// Collective: throws Mismatch on every rank if the values of these differ, as `require_same_parameters`.
  virtual void compare(std::span<const int> parameters, std::int64_t step) = 0;

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
  double weight = 0;       ///< of this rank's values. 0: they are not to be read
  std::uint32_t tag = 0;   ///< of this bucket of this reducer, the same on all ranks
  WireFormat wire_format = WireFormat::None;
  float* residual = nullptr;  ///< of `values`, where there is error feedback
  bool check_finite = false;  ///< whether Work::finite of the reduction is to say
  /// Of a divided gradient: elements by rank. Each rank's `result` gets its own part of the average.
  std::span<const std::int64_t> counts = {};
};

/// How gradients are reduced: the one place for hooks (compression, local steps) and for other devices. Starts, and
/// does not wait. Called in the same order on all ranks.
using Reduce = std::function<Work(Communicator&, const BucketView&)>;
/// The exact average by weights.
Work reduce_by_average(Communicator& comm, const BucketView& view);

/// What a hook of the user's is given: a whole bucket, in the host's memory, with all of its gradients at their places.
struct HookedBucket {
  std::size_t number = 0;          ///< in the plan, the same on all ranks
  bool last = false;               ///< of the backward
  bool last_step_refused = false;  ///< as Reducer::last_step_refused
  const Bucket& bucket;            ///< gets the result; what lies between gradients is cleared afterwards
  /// What the values are to be multiplied by first: the plain mean over ranks is the average by weights then. 1 where
  /// all weights are equal. 0: this rank has no samples, and its values are to be cleared without being read.
  double share = 1;
};
/// In place of `Reduce`, under the same rules, with operations that need not be the communicator's: what it returns is
/// waited for once, at the end of the backward, on its thread, in the order of the buckets.
using Hook = std::function<std::unique_ptr<Pending>(const HookedBucket&)>;

class Reducer {
 public:
  /// `autograd` outlives this. `lay_out` has to follow. `shards`: how training state is divided, if it is.
  Reducer(std::shared_ptr<Ranks> ranks, std::vector<Parameter> parameters,
          const nn::DistributedDataParallelOptions& options, Autograd& autograd, Reduce reduce = reduce_by_average,
          std::shared_ptr<Shards> shards = nullptr);

  /// Makes the buckets.
  void lay_out();
  /// Throws InvalidArgument after the first backward, where there is one, or where a hook could not be right: gradients
  /// that are divided, in a GPU's memory, or have a type for the wire.
  void use_hook(Hook hook);
  const std::vector<Bucket>& buckets() const noexcept { return buckets_; }
  nn::BucketSlot slot_of(const std::string& name) const;

  // Where training state is divided; empty elsewhere.

  const std::shared_ptr<Shards>& shards() const noexcept { return shards_; }
  /// Gradients of a parameter are divided as they come, and may have no place.
  bool divides_gradients() const noexcept { return shards_ != nullptr && shards_->divides_gradients(); }
  /// Of what is reduced together, in the order of reductions. The parameters lie there once they have been put.
  const std::vector<Region>& regions() const noexcept { return regions_; }
  /// This rank's, by ascending parameter.
  const std::vector<Piece>& pieces() const noexcept { return pieces_; }
  /// Where the parameter's values are to lie.
  Buffer home_of(std::size_t parameter) const { return homes_[parameter]; }
  /// Keeps `home_of` alive.
  const Memory& homes() const noexcept { return parameter_memory_; }
  /// Where the average of a piece lies after a backward, if gradients are divided.
  Buffer average_of(const Piece& piece) const;
  const Memory& averages() const noexcept { return average_memory_; }
  /// From now on parameters are not to be written, if that was asked for: they have been put where they are to lie.
  void protect_parameters();
  /// For a step of the optimizer.
  void allow_writes();
  void forbid_writes();
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
  /// What was read from last in this backward, if that has been said.
  bool reads(std::size_t parameter) const { return states_[parameter].unread != nullptr; }
  /// Whether this backward has brought one.
  bool received(std::size_t parameter) const { return in_backward_ && states_[parameter].received; }
  /// It has been accumulated, and is in its place or where `read_from` said.
  void arrive(std::size_t parameter);
  /// Its end: reduces what is left and waits, for a GPU's averages in the stream that autograd's work is in then.
  /// Throws NonFiniteError on all ranks if that was asked for, Mismatch on all ranks if they are at different places or
  /// their parameters have drifted apart (step_checks.cpp).
  void finish();

  /// Instead of a backward: takes part with weight 0, or with what was accumulated. False if no rank had samples.
  bool reduce_without_backward();

  // --- members ---

  /// This takes the place of another one over the same model, which has taken so many steps. `residuals`: its copies.
  void go_on_from(std::int64_t progress, const nn::ReducerStats& stats,
                  const std::map<std::string, std::vector<float>>& residuals = {}, bool last_step_refused = false);

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

  /// The last synchronised step ended in an error on all ranks, and nobody has its gradients. What a hook has kept of
  /// it is to be dropped.
  bool last_step_refused() const noexcept { return last_step_refused_; }

  /// By parameter's name, of this rank; empty without error feedback.
  std::map<std::string, std::span<float>> residuals() const;

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
  void build_regions();
  void use_plan(BucketPlan plan, Ranks& ranks);
  void start_pass();
  void forget_pass();
  void tell_bucket_ready(std::size_t bucket);
  /// The timeline.
  void tell_when_reduced(Work& work, const BucketView& view) const;
  void launch_ready();
  void launch_next();
  void launch(BucketView view, std::shared_ptr<const void> keep);
  bool any_on_gpu() const noexcept;
  double share_of_hook();
  void divide(BucketView& view);
  /// For so many bytes of a gradient that is held until it has been reduced.
  void await_room(std::size_t bytes);
  void launch_rest();
  void complete_unused(std::size_t parameter);
  bool wait_for_all();
  bool keeps_losses() const noexcept;
  bool averages_are_finite() const;
  void exchange_flags(bool averages_finite);
  void refuse_step();
  void drop_residuals();
  void settle_unused();

  // The message beside the gradients: a bit for each parameter that a rank with samples used, then these; then words
  // that are the same on all ranks, each with its complement, so that the ranks' bitwise "or" shows a difference.
  enum Flag : std::size_t {
    Samples,
    NonFinite,
    Declared,
    Undeclared,
    Mixed,
    AfterForward,
    WithoutForward,
    AverageNotFinite,
    kFlags
  };
  enum Word : std::size_t { Rows, Values, Batches, kWords };
  bool flag(std::size_t number) const { return (flags_[number / 64] >> (number % 64) & 1U) != 0; }
  bool flag(Flag which) const { return flag(parameters_.size() + which); }
  std::size_t flag_words() const { return (parameters_.size() + kFlags + 63) / 64; }
  bool differs(Word word) const;
  void check_step(const Accumulation& reduced);
  void raise_different(const Accumulation& reduced);
  void tell_of_rows();
  void note_batch(std::uint64_t digest);
  void show_batches();
  void tell_of_batches();
  void sample_values();
  std::size_t compared_bytes(std::size_t sample, std::size_t bytes) const;
  void compare_values();

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
  Hook hook_;
  std::shared_ptr<std::vector<double>> total_weight_;  // of all ranks, for a hook
  std::unique_ptr<Pending> totalling_;                 // it
  const std::shared_ptr<Shards> shards_;
  std::vector<State> states_;             // of the parameters
  std::unique_ptr<Residuals> residuals_;  // where there is error feedback
  std::vector<Bucket> buckets_;
  BucketPlan plan_;
  std::vector<int> order_;     // that the plan was made from
  std::vector<int> arrivals_;  // parameters in the order of their gradients in the first synchronising backward
  bool reordered_ = false;
  std::int64_t first_step_ = 0;  // the progress with which this reducer began
  std::vector<Region> regions_;
  std::vector<Piece> pieces_;
  std::vector<Buffer> homes_;  // of the parameters
  std::vector<std::size_t>
      own_averages_;  // of the regions: where in the memory of averages this rank's part is, in bytes
  Memory parameter_memory_;
  Memory average_memory_;
  std::unique_ptr<WriteProtection> protection_;  // of the memory of parameters
  Memory nothing_;                               // what a rank without samples brings
  std::int64_t progress_ = 0;
  Accumulation accumulation_;
  std::uint32_t number_ = 0;          // among the reducers of these ranks
  std::optional<std::int64_t> rows_;  // of the last forward
  std::int64_t shown_samples_ = 0;    // of what is reduced next
  bool told_of_rows_ = false;
  std::uint64_t batches_ = 0;  // a digest of the first of each of the first steps
  int batches_seen_ = 0;
  std::vector<int> sampled_;                  // parameters of which values are compared in this step,
  std::vector<std::uint64_t> sampled_words_;  // some bytes of each, as many words for each, then how many it has,
  std::optional<std::uint64_t> digest_;       // and the digest of these; of a step's first forward
  std::int64_t compare_values_from_ = 0;      // this step on; later where differences are of rounding alone
  bool in_backward_ = false;
  std::weak_ptr<void> pass_;          // the backward under way; expired while in_backward_: it failed
  std::vector<std::size_t> pending_;  // per bucket
  std::size_t next_bucket_ = 0;
  std::size_t next_region_ = 0;  // where gradients are divided
  std::vector<std::uint64_t> flags_;
  std::vector<std::chrono::steady_clock::time_point> ready_at_;  // by bucket; empty without a timeline
  struct Launched {
    std::unique_ptr<Pending> work;
    Device device;  // of the result
    std::size_t held =
        0;  // bytes of the gradient that it reads where autograd made it, if nobody needs that afterwards
  };
  std::vector<Launched> works_;
  bool any_samples_ = false;
  bool last_step_refused_ = false;
  std::optional<LocalNonFinite> non_finite_;  // the first of this rank, in this step
  nn::ReducerStats stats_;
};

}  // namespace cohort::gradients
