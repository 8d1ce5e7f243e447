#include "torch/reducer.h"

#include "base/result.h"
#include "status/status_page.h"

#include <cohort/torch/tensor.h>

// clang-format off
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>
// clang-format on

#include <algorithm>
#include <chrono>
#include <cstring>
#include <numeric>
#include <utility>

namespace cohort::nn {

namespace {

using VariableList = torch::autograd::variable_list;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// Sparse tensors cannot be copied into dense ones, only added.
void assign(const at::Tensor& place, const at::Tensor& value) {
  if (value.layout() == at::kStrided) {
    place.copy_(value);
  } else {
    place.zero_();
    place.add_(value);
  }
}

}  // namespace

// Autograd owns the hooks and has no way to give them back in 1.13: they die with the node, and do nothing without a
// reducer.
class BeforeAccumulate final : public torch::autograd::FunctionPreHook {
 public:
  BeforeAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& gradients) override {
    const std::shared_ptr<Reducer> reducer = reducer_.lock();
    return reducer ? reducer->before_accumulate(index_, gradients) : gradients;
  }
  bool alive() const noexcept { return !reducer_.expired(); }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

class AfterAccumulate final : public torch::autograd::FunctionPostHook {
 public:
  AfterAccumulate(std::weak_ptr<Reducer> reducer, std::size_t index) : reducer_(std::move(reducer)), index_(index) {}
  VariableList operator()(const VariableList& outputs, const VariableList& /*inputs*/) override {
    if (const std::shared_ptr<Reducer> reducer = reducer_.lock()) reducer->after_accumulate(index_);
    return outputs;
  }

 private:
  std::weak_ptr<Reducer> reducer_;
  std::size_t index_;
};

namespace {

// Of the user's, called after the accumulation: they may read `.grad`.
bool has_hooks_after(torch::autograd::Node& accumulator) {
  const auto& hooks = accumulator.post_hooks();
  return std::any_of(hooks.begin(), hooks.end(),
                     [](const auto& hook) { return dynamic_cast<const AfterAccumulate*>(hook.get()) == nullptr; });
}

}  // namespace

Reducer::Reducer(Communicator comm, std::vector<NamedParameter> parameters,
                 const DistributedDataParallelOptions& options)
    : comm_(std::move(comm)), options_(options) {
  for (NamedParameter& parameter : parameters) {
    parameters_.emplace_back();
    parameters_.back().name = std::move(parameter.name);
    parameters_.back().tensor = std::move(parameter.tensor);
  }
  // Until the first backward has shown better: the last layers' gradients come first.
  std::vector<int> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  build_buckets(order);
}

void Reducer::attach() {
  for (Parameter& parameter : parameters_) {
    parameter.accumulator = torch::autograd::impl::grad_accumulator(parameter.tensor);
    for (const auto& hook : parameter.accumulator->pre_hooks()) {
      const auto* const other = dynamic_cast<const BeforeAccumulate*>(hook.get());
      if (other != nullptr && other->alive()) {
        raise(ErrorCode::InvalidArgument,
              "parameter '{}' is already wrapped by a DistributedDataParallel -- use that one, or destroy it first",
              parameter.name);
      }
    }
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].accumulator->add_pre_hook(std::make_unique<BeforeAccumulate>(weak_from_this(), i));
    parameters_[i].accumulator->add_post_hook(std::make_unique<AfterAccumulate>(weak_from_this(), i));
  }
}

// ---------------------------------------------------------------------------------------------------- buckets

void Reducer::build_buckets(std::vector<int> order) {
  order_ = std::move(order);
  std::vector<PlanParameter> described;
  for (const Parameter& parameter : parameters_) {
    described.push_back({.bytes = parameter.tensor.nbytes(), .type = parameter.tensor.scalar_type()});
  }
  BucketPlan plan = plan_buckets(
      described, order_, {.first_bucket_bytes = options_.first_bucket_bytes, .bucket_bytes = options_.bucket_bytes});
  if (plan == plan_) return;
  plan_ = std::move(plan);

  std::vector<Bucket> fresh;
  for (const std::vector<int>& members : plan_) {
    std::vector<at::Tensor> tensors;
    for (const int index : members) tensors.push_back(parameters_[static_cast<std::size_t>(index)].tensor);
    fresh.emplace_back(comm_, tensors);
  }
  buckets_ = std::move(fresh);
  stats_.buckets = static_cast<int>(buckets_.size());
  stats_.bucket_bytes = 0;
  for (std::size_t b = 0; b < buckets_.size(); ++b) {
    stats_.bucket_bytes += buckets_[b].bytes();
    for (std::size_t position = 0; position < plan_[b].size(); ++position) {
      Parameter& parameter = parameters_[static_cast<std::size_t>(plan_[b][position])];
      parameter.bucket = b;
      parameter.position = position;
      // Values that live gradients have in their old places, or had before the model was wrapped, go on living.
      if (parameter.tensor.grad().defined()) move_into_place(parameter);
    }
  }
}

void Reducer::prepare_synchronising_pass() {
  require_whole();
  if (reordered_ || progress_ == 0) return;
  reordered_ = true;
  if (parameters_.size() == 1) return;
  // Rank 0's order holds for all (the lowest active rank's, if 0 has joined). Parameters that got no gradient go last.
  std::vector<std::int64_t> order(arrivals_.begin(), arrivals_.end());
  std::vector<bool> seen(parameters_.size(), false);
  for (const int index : arrivals_) seen[static_cast<std::size_t>(index)] = true;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  comm_.broadcast(std::span(order)).wait();
  build_buckets(std::vector<int>(order.begin(), order.end()));
}

void Reducer::take_plan_of(int source, std::int64_t progress) {
  std::vector<std::int64_t> message(order_.begin(), order_.end());
  message.push_back(reordered_ ? 1 : 0);
  comm_.broadcast(std::span(message), {.root = source}).wait();
  reordered_ = message.back() != 0;
  message.pop_back();
  build_buckets(std::vector<int>(message.begin(), message.end()));
  progress_ = progress;
}

const at::Tensor& Reducer::place_of(const Parameter& parameter) const {
  return buckets_[parameter.bucket].gradient(parameter.position);
}

bool Reducer::lies_in_place(const Parameter& parameter, const at::Tensor& gradient) const {
  const at::Tensor& place = place_of(parameter);
  return gradient.layout() == at::kStrided && gradient.data_ptr() == place.data_ptr() &&
         gradient.strides() == place.strides();
}

void Reducer::move_into_place(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (lies_in_place(parameter, gradient)) return;
  const at::NoGradGuard no_grad;
  assign(place_of(parameter), gradient.detach());
  gradient = place_of(parameter);
  ++stats_.gradients_moved;
}

BucketSlot Reducer::slot_of(const std::string& name) const {
  for (const Parameter& parameter : parameters_) {
    if (parameter.name != name) continue;
    const Bucket& bucket = buckets_[parameter.bucket];
    return {.bucket = static_cast<int>(parameter.bucket),
            .begin = bucket.data(),
            .bytes = bucket.bytes(),
            .offset = bucket.offset(parameter.position)};
  }
  raise(ErrorCode::InvalidArgument, "the model has no parameter '{}' that requires a gradient", name);
}

// ---------------------------------------------------------------------------------------------------- forward

std::shared_ptr<ForwardRecord> Reducer::begin_forward(std::int64_t samples, bool sync) {
  auto record = std::make_shared<ForwardRecord>();
  record->samples = samples;
  record->sync = sync;
  return record;
}

void Reducer::end_forward(const std::shared_ptr<ForwardRecord>& record, const std::vector<at::Tensor>& outputs) {
  // The hooks keep the record alive as long as the graph lives, and say when a backward begins even if it then reaches
  // none of our parameters. A leaf would keep its hook for ever, so leaves get none.
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    record->hooked = true;
    record->nodes.push_back(&*output.grad_fn());
    output.register_hook([self = weak_from_this(), record](const at::Tensor& /*gradient*/) {
      if (const std::shared_ptr<Reducer> reducer = self.lock()) reducer->begin_backward(record, "an output");
    });
  }
  std::erase_if(records_, [](const std::weak_ptr<ForwardRecord>& old) { return old.expired(); });
  if (!record->hooked) unhooked_records_.assign(1, record);
  records_.push_back(record);
}

std::vector<std::shared_ptr<ForwardRecord>> Reducer::live_records() {
  std::vector<std::shared_ptr<ForwardRecord>> live;
  for (const std::weak_ptr<ForwardRecord>& entry : records_) {
    if (std::shared_ptr<ForwardRecord> record = entry.lock()) live.push_back(std::move(record));
  }
  return live;
}

// ---------------------------------------------------------------------------------------------------- backward

// False if the backward under way is an autograd::grad() for other tensors: it asks for nothing of ours, and is no
// step.
bool Reducer::accumulates() const {
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  if (chosen == nullptr || chosen->empty()) return true;  // for all leaves, even where ours are not among them
  return std::any_of(parameters_.begin(), parameters_.end(), [&](const Parameter& parameter) {
    const auto entry = chosen->find(parameter.accumulator.get());
    return entry != chosen->end() && entry->second.needed_;
  });
}

// Whether the backward under way will come to the record's outputs. Nullopt where only time will tell: another node may
// have taken the place of one that is gone. What gets a gradient through them gets it after that.
std::optional<bool> Reducer::takes_part(const ForwardRecord& record) {
  if (!record.hooked) return true;  // they were not found
  const auto* const chosen = torch::autograd::get_current_graph_task_exec_info();
  const auto* const nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (chosen == nullptr || nodes == nullptr) return std::nullopt;
  const bool may = std::any_of(record.nodes.begin(), record.nodes.end(), [&](torch::autograd::Node* node) {
    if (nodes->count(node) == 0) return false;
    const auto entry = chosen->find(node);
    return chosen->empty() || (entry != chosen->end() && entry->second.should_execute());
  });
  return may ? std::nullopt : std::optional(false);
}

void Reducer::begin_backward(const std::shared_ptr<ForwardRecord>& record, const std::string& origin) {
  if (record != nullptr && !accumulates()) return;
  if (pass_.expired()) require_whole();
  if (phase_ == Phase::Backward && (record == nullptr || !record->reduced)) {
    if (record == nullptr) return;
    record->fired = true;
    if (std::erase(undecided_, record) > 0) {
      taking_part_.push_back(record);
      count_samples();
    }
    return;
  }
  if (record != nullptr && record->reduced) {
    raise(ErrorCode::InvalidArgument,
          "a second backward through one forward (rank {}): its gradients have been reduced -- add the losses and call "
          "backward once, or run all but the last backward in no_sync()",
          comm_.rank());
  }
  const std::vector<std::shared_ptr<ForwardRecord>> live = live_records();
  const ForwardRecord* const leading = record != nullptr ? record.get() : live.empty() ? nullptr : live.back().get();
  if (leading == nullptr && !in_no_sync()) {
    raise(ErrorCode::InvalidArgument,
          "backward reached {} on rank {} without a forward through DistributedDataParallel, so it would not be "
          "reduced -- "
          "call the wrapper instead of module(), or do this in no_sync()",
          origin, comm_.rank());
  }
  sync_ = leading != nullptr && leading->sync && !in_no_sync();
  taking_part_.clear();
  undecided_.clear();
  for (const auto& entry : live) {
    if (entry == record) continue;
    const std::optional<bool> does = takes_part(*entry);
    if (does.value_or(true)) (does ? taking_part_ : undecided_).push_back(entry);
  }
  if (record != nullptr) {
    record->fired = true;
    taking_part_.push_back(record);
  }
  led_ = leading != nullptr;
  count_samples();
  start_pass();
  phase_ = Phase::Backward;
  const auto pass = std::make_shared<Pass>();  // dies with the callback, called or not
  pass_ = pass;
  torch::autograd::Engine::get_default_engine().queue_callback([self = weak_from_this(), pass] {
    if (const std::shared_ptr<Reducer> reducer = self.lock()) reducer->finish_backward();
  });
}

// Of what has come to a parameter by now: what is undecided then is no part of its gradient.
void Reducer::count_samples() {
  std::int64_t all = 0;
  samples_ = accumulated_samples_;
  for (const auto& record : taking_part_) {
    all += record->samples;
    if (!record->counted) samples_ += record->samples;
  }
  discard_ = led_ && all == 0;
}

void Reducer::start_pass() {
  for (Parameter& parameter : parameters_) {
    parameter.received = parameter.ready = false;
    parameter.unread.reset();
  }
  non_finite_.reset();
  pending_.clear();
  for (const std::vector<int>& members : plan_) pending_.push_back(members.size());
  next_bucket_ = 0;
}

// Writes the gradient before AccumulateGrad sees it, or keeps a large one for the reduction to read. Afterwards would
// be one write more wherever AccumulateGrad has to clone what it may not steal. Where a gradient exists already,
// AccumulateGrad adds to it in place.
VariableList Reducer::before_accumulate(std::size_t index, const VariableList& gradients) {
  if (gradients.empty() || !gradients[0].defined()) return gradients;
  Parameter& parameter = parameters_[index];
  begin_backward(nullptr, fmt::format("parameter '{}'", parameter.name));
  if (discard_) return {at::Tensor()};
  if (parameter.ready) {
    raise(ErrorCode::InvalidArgument,
          "parameter '{}' got a second gradient in one backward (rank {}) after it was handed to its reduction -- "
          "re-entrant backward (activation checkpointing) over shared parameters is not supported",
          parameter.name, comm_.rank());
  }
  parameter.received = true;
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  if (gradient.defined()) {
    move_into_place(parameter);
    return gradients;
  }
  if (at::GradMode::is_enabled())
    return gradients;  // create_graph: AccumulateGrad makes it, and it is copied afterwards
  VariableList incoming = gradients;
  if constexpr (TORCH_VERSION_MAJOR < 2) {
    // 1.13 runs the user's hooks on the parameter inside AccumulateGrad, which we are about to skip.
    for (const auto& hook : torch::autograd::impl::hooks(parameter.tensor)) incoming = (*hook)(incoming);
  }
  const at::NoGradGuard no_grad;
  if (sync_ && buckets_[parameter.bucket].can_read(parameter.position, incoming[0]) &&
      !has_hooks_after(*parameter.accumulator)) {
    parameter.unread = incoming[0];
  } else {
    assign(place_of(parameter), incoming[0]);
  }
  gradient = place_of(parameter);
  ++stats_.gradients_written;
  return {at::Tensor()};
}

void Reducer::after_accumulate(std::size_t index) {
  Parameter& parameter = parameters_[index];
  if (phase_ != Phase::Backward || !parameter.received) return;
  move_into_place(parameter);  // nothing to do except under create_graph
  parameter.used = true;
  if (progress_ == 0 && sync_) arrivals_.push_back(static_cast<int>(index));
  if (sync_) mark_ready(index);
}

void Reducer::mark_ready(std::size_t index) {
  Parameter& parameter = parameters_[index];
  parameter.ready = true;
  --pending_[parameter.bucket];
  if (pending_[parameter.bucket] == 0) tell_bucket_ready(parameter.bucket);
  // All ranks launch in the order of the plan, whatever the order in which buckets happen to fill. The weight has to be
  // known: in the end it is.
  while (undecided_.empty() && next_bucket_ < buckets_.size() && pending_[next_bucket_] == 0) launch_next();
}

void Reducer::tell_bucket_ready(std::size_t bucket) const {
  if (options_.observer == nullptr) return;
  options_.observer->on_bucket_ready({.index = static_cast<int>(bucket),
                                      .bytes = buckets_[bucket].bytes(),
                                      .ready = std::chrono::steady_clock::now()});
}

void Reducer::launch_next() {
  Bucket& bucket = buckets_[next_bucket_];
  const std::vector<int>& members = plan_[next_bucket_];
  for (std::size_t position = 0; position < members.size(); ++position) {
    bucket.set_flag(position, parameters_[static_cast<std::size_t>(members[position])].used);
  }
  bucket.set_flag(bucket.rank_flag(), samples_ > 0);
  look_for_non_finite(next_bucket_);
  bucket.set_flag(bucket.non_finite_flag(), non_finite_.has_value());
  ++next_bucket_;
  AllReduceOptions options{.op = ReduceOp::Average, .weight = static_cast<double>(samples_)};
  if (bucket.rest().dtype == DType::Float32) options.wire_dtype = options_.wire_dtype;
  AllReduceOptions large = options;
  large.check_finite = looks_at_averages();  // also where this rank has nothing unread: all learn the same
  for (const std::size_t position : bucket.large()) {
    const at::Tensor& unread = parameters_[static_cast<std::size_t>(members[position])].unread;
    const Buffer place = bucket.large_buffer(position);
    works_.push_back(unread.defined()
                         ? comm_.all_reduce(ConstBuffer(unread.data_ptr(), place.count, place.dtype), place, large)
                         : comm_.all_reduce(place, large));
  }
  works_.push_back(comm_.all_reduce(bucket.rest(), options));
}

// No gradient came for it in this backward. What it accumulated before still counts; a gradient that it merely has is
// the same on all ranks, and averages to itself.
void Reducer::complete_unused(Parameter& parameter) {
  at::Tensor& gradient = parameter.tensor.mutable_grad();
  parameter.was_defined = gradient.defined();
  if (!parameter.was_defined) {
    parameter.used = false;
    if (samples_ > 0) place_of(parameter).zero_();
    return;
  }
  move_into_place(parameter);
  // The average of equal values may differ from them in the last bit: if nobody uses the parameter it gets these back.
  if (!parameter.used) parameter.kept = gradient.detach().clone();
}

void Reducer::launch_rest() {
  const at::NoGradGuard no_grad;
  while (next_bucket_ < buckets_.size()) {
    for (const int index : plan_[next_bucket_]) {
      Parameter& parameter = parameters_[static_cast<std::size_t>(index)];
      if (!parameter.ready) complete_unused(parameter);
    }
    if (pending_[next_bucket_] > 0) tell_bucket_ready(next_bucket_);
    launch_next();
  }
}

// Whether all averages are finite, as far as they were looked at.
bool Reducer::wait_for_all() {
  try {
    for (Work& work : works_) work.wait();
  } catch (const Error&) {
    phase_ = Phase::Idle;  // of a collective: the others have it, too
    throw;
  }
  const bool finite =
      std::all_of(works_.begin(), works_.end(), [](const Work& work) { return work.finite().value_or(true); });
  works_.clear();
  return finite;
}

void Reducer::settle_unused() {
  const at::NoGradGuard no_grad;
  for (Parameter& parameter : parameters_) {
    const Bucket& bucket = buckets_[parameter.bucket];
    const bool used_somewhere = (parameter.used && samples_ > 0) || bucket.flag(parameter.position);
    if (used_somewhere) {
      parameter.tensor.mutable_grad() = place_of(parameter);
    } else if (parameter.kept.defined()) {
      place_of(parameter).copy_(parameter.kept);
    }
    parameter.kept.reset();
    parameter.used = parameter.ready = parameter.received = false;
  }
  any_samples_ = buckets_.front().flag(buckets_.front().rank_flag());
}

void Reducer::finish_backward() {
  pass_.reset();
  taking_part_.clear();
  undecided_.clear();
  const auto begin = std::chrono::steady_clock::now();
  for (const auto& record : live_records()) {
    if (!record->fired && record->hooked) continue;
    if (!record->counted) accumulated_samples_ += record->samples;
    record->counted = true;
    record->reduced = sync_;
    record->fired = false;
    std::erase_if(records_, [&](const std::weak_ptr<ForwardRecord>& entry) { return entry.lock() == record; });
  }
  unhooked_records_.clear();
  // From here until it has ended well a synchronising pass owes the others its reductions: `require_whole` says so.
  phase_ = sync_ ? Phase::Backward : Phase::Idle;
  if (!sync_) return;
  accumulated_samples_ = 0;
  bool averages_finite = true;
  try {
    launch_rest();
    averages_finite = wait_for_all();
  } catch (...) {
    works_.clear();  // waits for those under way
    for (Parameter& parameter : parameters_) {
      parameter.kept.reset();
      parameter.unread.reset();
      parameter.used = parameter.ready = parameter.received = false;
    }
    non_finite_.reset();
    throw;
  }
  const bool may_raise = !averages_finite || buckets_.back().flag(buckets_.back().non_finite_flag());
  if (!averages_finite) look_for_non_finite_again();
  for (Parameter& parameter : parameters_) parameter.unread.reset();
  settle_unused();
  phase_ = Phase::Idle;
  ++stats_.steps;
  status::StatusPage::own().count_step();
  ++progress_;
  stats_.exposed_communication_seconds = seconds_since(begin);
  stats_.exposed_communication_seconds_total += stats_.exposed_communication_seconds;
  if (may_raise) raise_non_finite();
}

bool Reducer::reduce_without_backward() {
  sync_ = true;
  discard_ = true;
  samples_ = accumulated_samples_;
  start_pass();
  finish_backward();
  return any_samples_;
}

void Reducer::require_whole() {
  if (phase_ == Phase::Idle) return;
  if (!sync_) {
    phase_ = Phase::Idle;  // a failed local pass concerns nobody else
    return;
  }
  ErrorContext where;
  where.rank = comm_.rank();
  where.host = comm_.host();
  where.operation = "DistributedDataParallel";
  throw Error(
      ErrorCode::Aborted,
      fmt::format("rank {} is out of step with the others -- its last backward ended in an exception before its "
                  "reductions were complete -- abort the communicator and form a new one, or end this process",
                  comm_.rank()),
      where);
}

void Reducer::zero_grad() {
  for (Parameter& parameter : parameters_) parameter.tensor.mutable_grad().reset();
}

}  // namespace cohort::nn
