// The journey of a gradient: autograd makes it, a hook writes it once into its bucket, a full bucket is reduced while
// backward goes on, and the end of backward waits for the rest. The design follows PyTorch's c10d Reducer (Li et al.
// 2020, arXiv 2006.15704); buckets in communicator memory, writing before AccumulateGrad, exact weights and flags that
// travel with the buckets are ours. One thread per rank calls it; autograd calls its hooks on that thread too (CPU).
#pragma once

#include "torch/bucket.h"
#include "torch/non_finite.h"

#include <cohort/torch/nn.h>

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace cohort::nn {

struct ForwardRecord {
  std::int64_t samples = 0;
  bool sync = true;
  bool hooked = false;   // its outputs tell when a backward begins
  bool fired = false;    // a backward has come to it
  bool counted = false;  // its samples are in the accumulated count
  bool reduced = false;  // a synchronising backward has used it up
  // That made its outputs. They may be gone.
  std::vector<torch::autograd::Node*> nodes;
};

struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

class Reducer : public std::enable_shared_from_this<Reducer> {
 public:
  Reducer(Communicator comm, std::vector<NamedParameter> parameters, const DistributedDataParallelOptions& options);

  /// Hooks into autograd. Throws InvalidArgument if another living reducer has done so.
  void attach();

  bool in_no_sync() const noexcept { return no_sync_depth_ > 0; }
  void enter_no_sync() noexcept { ++no_sync_depth_; }
  void leave_no_sync() noexcept { --no_sync_depth_; }

  /// Collective when `sync`: brings the buckets into the order in which gradients came, once.
  void prepare_synchronising_pass();
  std::shared_ptr<ForwardRecord> begin_forward(std::int64_t samples, bool sync);
  void end_forward(const std::shared_ptr<ForwardRecord>& record, const std::vector<at::Tensor>& outputs);
  bool reduce_without_backward();

  /// Synchronised steps of the world, as far as this rank has taken part or been told.
  std::int64_t progress() const noexcept { return progress_; }
  /// Collective: all ranks take over the order of `source`, whose progress was `progress`.
  void take_plan_of(int source, std::int64_t progress);

  /// Throws Aborted if a synchronising backward began and did not end.
  void require_whole();
  void zero_grad();
  ReducerStats stats() const { return stats_; }
  BucketSlot slot_of(const std::string& name) const;
  void count_parameter_comparison() noexcept { ++stats_.parameter_comparisons; }

 private:
  friend class BeforeAccumulate;
  friend class AfterAccumulate;
  using VariableList = torch::autograd::variable_list;
  using Node = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  struct Parameter {
    std::string name;
    at::Tensor tensor;
    Node accumulator;  // autograd holds it only weakly, and the hooks with it
    std::size_t bucket = 0;
    std::size_t position = 0;
    bool received = false;     // in this backward: AccumulateGrad was given a gradient
    bool ready = false;        // in this backward: nothing more will come
    bool used = false;         // since the last reduction
    at::Tensor unread;         // the gradient, if the reduction reads it instead of what lies at its place
    bool was_defined = false;  // unused: had a gradient before the reduction,
    at::Tensor kept;           // this one
  };

  // Hooks.
  VariableList before_accumulate(std::size_t index, const VariableList& gradients);
  void after_accumulate(std::size_t index);
  bool accumulates() const;
  static std::optional<bool> takes_part(const ForwardRecord& record);
  void begin_backward(const std::shared_ptr<ForwardRecord>& record, const std::string& origin);
  void count_samples();
  void finish_backward();

  void build_buckets(std::vector<int> order);
  void start_pass();
  void tell_bucket_ready(std::size_t bucket) const;
  const Parameter& parameter_at(std::size_t bucket, std::size_t position) const {
    return parameters_[static_cast<std::size_t>(plan_[bucket][position])];
  }
  const at::Tensor& place_of(const Parameter& parameter) const;
  bool lies_in_place(const Parameter& parameter, const at::Tensor& gradient) const;
  void move_into_place(Parameter& parameter);
  void mark_ready(std::size_t index);
  void launch_next();
  bool looks_at_averages() const;
  FiniteOptions finite_options() const;
  void look_for_non_finite(std::size_t bucket);
  void look_for_non_finite_again();
  void note_non_finite(std::size_t bucket, std::optional<std::size_t> position);
  void raise_non_finite();
  void complete_unused(Parameter& parameter);
  void launch_rest();
  bool wait_for_all();
  void settle_unused();
  std::vector<std::shared_ptr<ForwardRecord>> live_records();

  Communicator comm_;
  DistributedDataParallelOptions options_;
  std::vector<Parameter> parameters_;
  std::vector<Bucket> buckets_;
  BucketPlan plan_;
  std::vector<int> order_;     // that the plan was made from
  std::vector<int> arrivals_;  // parameters in the order of their gradients in the first synchronising backward
  bool reordered_ = false;
  std::int64_t progress_ = 0;
  int no_sync_depth_ = 0;

  std::vector<std::weak_ptr<ForwardRecord>> records_;  // a pass whose graph is gone does not count
  std::vector<std::shared_ptr<ForwardRecord>> unhooked_records_;
  std::int64_t accumulated_samples_ = 0;  // of passes in no_sync

  enum class Phase { Idle, Backward };
  Phase phase_ = Phase::Idle;
  struct Pass {};
  std::weak_ptr<Pass> pass_;  // the backward under way; expired in Phase::Backward: it failed
  std::vector<std::shared_ptr<ForwardRecord>> taking_part_;  // in this backward,
  std::vector<std::shared_ptr<ForwardRecord>> undecided_;    // and what may turn out to
  bool led_ = false;                                         // by a forward: this backward
  bool sync_ = false;                                        // this backward reduces
  bool discard_ = false;                                     // this backward has no samples: what it yields is dropped
  std::int64_t samples_ = 0;
  std::vector<std::size_t> pending_;  // per bucket
  std::size_t next_bucket_ = 0;
  std::vector<Work> works_;
  bool any_samples_ = false;
  std::optional<LocalNonFinite> non_finite_;  // the first of this rank, in this step
  ReducerStats stats_;
};

}  // namespace cohort::nn
