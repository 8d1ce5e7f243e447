#include "train/gradients/reducer.h"

#include "base/result.h"
#include "telemetry/status_page.h"
#include "train/gradients/options.h"
#include "train/step/methods.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <numeric>
#include <tuple>
#include <utility>

namespace cohort::gradients {

Work reduce_by_average(Communicator& comm, const BucketView& view) {
  if (!view.counts.empty()) {
    return comm.reduce_scatter_v(
        view.values, view.result, view.counts,
        {.op = ReduceOp::Average, .weight = view.weight, .wire_format = view.wire_format, .residual = view.residual});
  }
  return comm.all_reduce(view.values, view.result,
                         {.op = ReduceOp::Average,
                          .weight = view.weight,
                          .wire_format = view.wire_format,
                          .residual = view.residual,
                          .check_finite = view.check_finite,
                          .tag = view.tag});
}

Reducer::Reducer(std::shared_ptr<step::Ranks> ranks, std::vector<Parameter> parameters,
                 const nn::DistributedDataParallelOptions& options, Autograd& autograd, Reduce reduce,
                 std::shared_ptr<Shards> shards, std::shared_ptr<step::Transaction> transaction)
    : ranks_(std::move(ranks)),
      options_(options),
      parameters_(std::move(parameters)),
      autograd_(autograd),
      reduce_(std::move(reduce)),
      transaction_(std::move(transaction)),
      division_(std::move(shards)),
      states_(parameters_.size()),
      unread_(parameters_.size()),
      message_(parameters_.size()),
      checks_(parameters_, autograd, options.check_replicas),
      finite_(parameters_, buckets_, unread_, options_, autograd),
      bucket_times_(options.observer) {
  if (!transaction_)
    transaction_ = std::make_shared<step::Transaction>(step::data_parallel(division_.shards() != nullptr));
  if (options_.error_feedback.value_or(options_.wire_format == WireFormat::Int4)) {
    residuals_ = std::make_shared<Residuals>();
    if (divides_gradients() && any_on_gpu())
      raise(
          ErrorCode::InvalidArgument,
          "DistributedDataParallel: there is no error feedback where gradients of a GPU's memory are divided over the "
          "ranks (sharding) -- give error_feedback=false, or another sharding");
  }
  transaction_->keep("residuals", residuals_);
  if (options_.virtual_ranks == 0) return;
  if (any_on_gpu())
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: virtual_ranks on a GPU -- on CPUs alone");
  virtual_ = std::make_unique<VirtualPart>(static_cast<int>(options_.virtual_ranks), ranks_, autograd_);
  hook_ = [this](const HookedBucket& hooked) {
    return virtual_->ranks().exchange(hooked.number, hooked.bucket, accumulation_.part_weight(), hooked.total);
  };
}

void Reducer::lay_out() {
  if (transaction_->trained().looks() == 0) {
    std::vector<step::Shown> shown;
    for (const Parameter& one : parameters_)
      shown.push_back({.name = one.name, .type = std::string(to_string(one.dtype)), .sizes = one.sizes});
    transaction_->trained().update(std::move(shown), "", "");
  }
  if (transaction_->agreement().uses() == 0) {
    std::vector<step::Option> options = agreed(options_);
    for (const Parameter& one : parameters_)
      options.push_back({.name = fmt::format("parameter '{}' of {} [{}]", one.name, to_string(one.dtype),
                                             fmt::join(one.sizes, ", "))});
    transaction_->agreement().set(std::move(options));
    transaction_->agreement().require(*ranks_);
  }
  // All ranks use rank 0's number, which distinguishes this reducer's operations from other reducers'.
  static std::atomic<std::uint32_t> reducers{0};
  std::vector<std::int64_t> number{++reducers & 0xFFFF};
  ranks_->run("broadcast", number, [](Communicator& comm, auto span) { return comm.broadcast(span); });
  number_ = static_cast<std::uint32_t>(number.front());
  // Order until the first backward has shown the actual one: the last layers' gradients come first.
  std::vector<int> order(parameters_.size());
  std::iota(order.rbegin(), order.rend(), 0);
  build_buckets(std::move(order));
  division_.lay_out(parameters_, buckets_, *ranks_, autograd_);
}

bool Reducer::any_on_gpu() const noexcept {
  return std::ranges::any_of(parameters_, [](const Parameter& one) { return one.device.type != DeviceType::CPU; });
}

namespace {

[[noreturn]] void refuse_hook(const char* why) { raise(ErrorCode::InvalidArgument, "register_comm_hook: {}", why); }
constexpr const char* kHookOfDivided =
    "sharding divides gradients as they come, so no rank has the whole that a hook is for -- Sharding::None or "
    "Optimizer, in Python sharding='none' or 'optimizer'";

[[noreturn]] void raise_out_of_step(const step::Ranks& ranks) {
  throw Error(
      ErrorCode::Aborted,
      fmt::format("DistributedDataParallel: rank {} is out of step with the others -- its last backward ended in an "
                  "exception before its reductions were complete -- abort the communicator and form a new one, or end "
                  "this process",
                  ranks.rank()),
      ranks.where("DistributedDataParallel"));
}

}  // namespace

void Reducer::use_hook(Hook hook) {
  if (virtual_) refuse_hook("virtual_ranks has an order of sums of its own -- leave one out");
  if (hook_) refuse_hook("there is one already -- a hook is registered once");
  if (progress_ > 0 || in_backward_) refuse_hook("there has been a backward -- register hooks before training");
  if (divides_gradients()) refuse_hook(kHookOfDivided);
  if (options_.wire_format != WireFormat::None)
    refuse_hook("what gradients travel as is up to the hook -- leave out wire_format");
  if (any_on_gpu()) refuse_hook("gradients in a GPU's memory are not for hooks");
  hook_ = std::move(hook);
}

// ---------------------------------------------------------------------------------------------------- buckets

namespace {

// Size from which a divided gradient counts as large. It is low because every rank holds all small gradients in full.
constexpr std::size_t kLargeOfDivided = std::size_t{1} << 20;

// Bytes of the longest block of a WireFormat. Elements that share a scale then belong to one parameter.
constexpr std::size_t kScaleUnit = 256 * sizeof(float);
static_assert(kScaleUnit % kShardUnit == 0);

}  // namespace

void Reducer::build_buckets(std::vector<int> order) {
  order_ = std::move(order);
  BucketPlan plan = plan_buckets(
      parameters_, order_, {.first_bucket_bytes = options_.first_bucket_bytes, .bucket_bytes = options_.bucket_bytes});
  if (plan != plan_) use_plan(std::move(plan));
}

// Changes nothing if memory cannot be allocated.
void Reducer::use_plan(BucketPlan plan) {
  std::vector<Bucket> fresh;
  BucketLayout layout;
  if (division_.shards()) layout.alignment = kShardUnit;
  if (options_.wire_format > WireFormat::BFloat16) layout.alignment = kScaleUnit;
  if (divides_gradients()) {
    layout.large_bytes = kLargeOfDivided;
    layout.holds_large = parameters_.front().device.type != DeviceType::CPU;
  }
  for (const std::vector<int>& members : plan) {
    Bucket& bucket = fresh.emplace_back(parameters_, members, layout);
    const std::size_t bytes = std::max<std::size_t>(bucket.bytes(), 1);
    bucket.use(bucket.on_gpu() ? autograd_.allocate(bucket.device(), bytes) : ranks_->allocate(bytes));
  }
  plan_ = std::move(plan);
  buckets_ = std::move(fresh);
  stats_.buckets = static_cast<int>(buckets_.size());
  stats_.bucket_bytes = 0;
  for (std::size_t number = 0; number < buckets_.size(); ++number) {
    stats_.bucket_bytes += buckets_[number].bytes();
    for (std::size_t position = 0; position < plan_[number].size(); ++position) {
      State& state = states_[static_cast<std::size_t>(plan_[number][position])];
      state.bucket = number;
      state.position = position;
    }
  }
  if (residuals_) residuals_->lay_out(buckets_);
  if (virtual_) virtual_->ranks().lay_out(buckets_.size());
  // Existing gradients keep their values, whether they are in their old places or from before the model was wrapped.
  autograd_.take_places();
}

void Reducer::protect_parameters() {
  if (options_.protect_parameters) division_.protect(parameters_, ranks_->rank());
}

void Reducer::prepare_synchronising_pass() {
  require_whole();
  if (reordered_ || progress_ == first_step_ || division_.shards()) return;
  reordered_ = true;
  if (parameters_.size() == 1) return;
  // All ranks use rank 0's order (the lowest active rank's, if 0 has joined). Parameters without a gradient come last.
  std::vector<std::int64_t> order(arrivals_.begin(), arrivals_.end());
  std::vector<bool> seen(parameters_.size(), false);
  for (const int index : arrivals_) seen[static_cast<std::size_t>(index)] = true;
  for (std::size_t i = parameters_.size(); i-- > 0;) {
    if (!seen[i]) order.push_back(static_cast<std::int64_t>(i));
  }
  ranks_->run("broadcast", order, [](Communicator& comm, auto span) { return comm.broadcast(span); });
  build_buckets(std::vector<int>(order.begin(), order.end()));
}

void Reducer::go_on_from(const Reducer& before) {
  progress_ = first_step_ = before.progress_;
  accumulation_ = before.accumulation_;
  const auto residuals = before.residuals();
  for (const auto& [name, here] : this->residuals()) {
    const auto old = residuals.find(name);
    if (old != residuals.end() && old->second.size() == here.size()) std::ranges::copy(old->second, here.begin());
  }
  const nn::ReducerStats own = std::exchange(stats_, before.stats_);
  stats_.buckets = own.buckets;
  stats_.bucket_bytes = own.bucket_bytes;
}

std::pair<int, std::optional<std::int64_t>> Reducer::most_advanced() {
  std::vector<std::int64_t> steps(static_cast<std::size_t>(ranks_->size()) + 1, progress_);
  ranks_->run("all_gather", steps, [](Communicator& comm, auto span) {
    return comm.all_gather(ConstBuffer(span.template first<1>()), span.subspan(1));
  });
  steps.erase(steps.begin());
  // The rank that joined last is not used, since it depends on timing which rank that is.
  const auto most = std::max_element(steps.begin(), steps.end());
  const bool differ = std::ranges::any_of(steps, [&](std::int64_t n) { return n != *most; });
  return {static_cast<int>(most - steps.begin()), differ ? std::optional(*most) : std::nullopt};
}

void Reducer::take_plan_of(int source, std::int64_t progress) {
  std::vector<std::int64_t> message(order_.begin(), order_.end());
  message.insert(message.end(), {std::int64_t{number_}, first_step_, std::int64_t{reordered_ ? 1 : 0}});
  ranks_->run("broadcast", message,
              [&](Communicator& comm, auto span) { return comm.broadcast(span, {.root = source}); });
  number_ = static_cast<std::uint32_t>(*(message.end() - 3));
  first_step_ = *(message.end() - 2);
  reordered_ = message.back() != 0;
  build_buckets(std::vector<int>(message.begin(), message.end() - 3));
  progress_ = progress;
}

std::map<std::string, std::span<float>> Reducer::residuals() const {
  std::map<std::string, std::span<float>> named;
  for (std::size_t i = 0; residuals_ && i < parameters_.size(); ++i) {
    if (const std::span<float> values = residuals_->of(i); !values.empty()) named.emplace(parameters_[i].name, values);
  }
  return named;
}

Buffer Reducer::place_of(std::size_t parameter) const {
  const State& state = states_[parameter];
  return buckets_[state.bucket].place(state.position);
}

nn::BucketSlot Reducer::slot_of(const std::string& name) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].name != name) continue;
    const Bucket& bucket = buckets_[states_[i].bucket];
    return {.bucket = static_cast<int>(states_[i].bucket),
            .begin = bucket.memory().data(),
            .bytes = bucket.bytes(),
            .offset = bucket.offset(states_[i].position)};
  }
  raise(ErrorCode::InvalidArgument, "the model has no parameter '{}' that requires a gradient", name);
}

// ---------------------------------------------------------------------------------------------------- backward

void Reducer::add_forward(std::optional<std::int64_t> declared, std::optional<std::int64_t> rows,
                          std::optional<std::uint64_t> batch, std::optional<std::int64_t> epoch) {
  if (batch) checks_.note_batch(*batch);
  if (!in_step()) checks_.sample_values(progress_, ranks_->size());
  if (virtual_) virtual_->ranks().begin_step();
  step_complete_ = false;
  accumulation_.add_forward(declared);
  checks_.note_forward(rows, epoch);
  shown_samples_ += declared && *declared >= 0 ? *declared : rows.value_or(0);
}

bool Reducer::wants_batch() const noexcept {
  return ranks_->size() > 1 && !in_step() && checks_.wants_batch(progress_);
}

void Reducer::begin_backward() {
  if (pass_.expired()) require_whole();
  if (in_backward_) return;
  if (virtual_) virtual_->require_forward(accumulation_);
  accumulation_.begin(!virtual_ || virtual_->ranks().is_last());
  start_pass();
  in_backward_ = true;
  auto pass = std::make_shared<char>();
  pass_ = pass;
  autograd_.call_at_end(std::move(pass));
}

void Reducer::start_pass() {
  for (State& state : states_) state.received = state.ready = false;
  forget_unread();
  step_complete_ = false;
  if (virtual_) virtual_->begin_pass(parameters_.size(), [this](std::size_t i) { return place_of(i); });
  if (!virtual_ || virtual_->ranks().due() == virtual_->ranks().block().begin) finite_.clear();
  finite_.set_looks_at_averages(ranks_->size() > 1 && ranks_->local_size() == ranks_->size() && !divides_gradients() &&
                                !hook_);
  if (progress_ == first_step_ && accumulation_.sync()) arrivals_.clear();
  pending_.clear();
  for (const std::vector<int>& members : plan_) pending_.push_back(members.size());
  next_bucket_ = 0;
  division_.begin_pass();
  if (divides_gradients() && accumulation_.sync()) autograd_.put_aside();
  if (!hook_ || !accumulation_.sync()) return;
  total_weight_.start(*ranks_, accumulation_.weight());
}

void Reducer::launch_hook(std::size_t number) {
  const double total = total_weight_.wait();
  works_.add(hook_({.number = number,
                    .last = next_bucket_ == buckets_.size(),
                    .last_step_refused = transaction_->last_refused(),
                    .bucket = buckets_[number],
                    .share = total == 0 ? 0 : accumulation_.weight() * ranks_->size() / total,
                    .total = total}),
             {});
}

// Accumulated gradients stay marked as used, since only a gradient that is the same on all ranks may be kept unreduced.
void Reducer::forget_pass() {
  autograd_.drop_kept();
  for (State& state : states_) state.kept = state.ready = state.received = false;
  forget_unread();
  finite_.clear();
}

void Reducer::forget_unread() {
  std::ranges::fill(unread_, nullptr);
  for (State& state : states_) state.keep.reset();
}

bool Reducer::receive(std::size_t parameter) {
  begin_backward();
  if (accumulation_.discards()) return false;
  State& state = states_[parameter];
  if (state.ready) {
    raise(ErrorCode::InvalidArgument,
          "parameter '{}' got a second gradient in one backward (rank {}) after it was handed to its reduction -- "
          "re-entrant backward (activation checkpointing) over shared parameters is not supported; C++'s "
          "cohort::nn::checkpoint and Python's torch.utils.checkpoint with use_reentrant=False are",
          parameters_[parameter].name, ranks_->rank());
  }
  state.received = true;
  return true;
}

bool Reducer::can_read(std::size_t parameter) const {
  const State& state = states_[parameter];
  const Bucket& bucket = buckets_[state.bucket];
  // Gradients in GPU memory are checked for non-finite values in their places.
  const bool looked_at = bucket.on_gpu() && finite_.raises();
  return accumulation_.sync() && bucket.is_large(state.position) && !looked_at && !hook_;
}

void Reducer::read_from(std::size_t parameter, const void* gradient, std::shared_ptr<const void> keep) {
  unread_[parameter] = gradient;
  states_[parameter].keep = std::move(keep);
}

void Reducer::arrive(std::size_t parameter) {
  State& state = states_[parameter];
  state.used = true;
  if (!accumulation_.sync()) return;
  if (progress_ == first_step_) arrivals_.push_back(static_cast<int>(parameter));
  state.ready = true;
  --pending_[state.bucket];
  if (pending_[state.bucket] == 0) bucket_times_.note_ready(state.bucket, buckets_);
  launch_ready();
}

// All ranks launch in the order of the plan, regardless of the order in which buckets fill.
void Reducer::launch_ready() {
  while (next_bucket_ < buckets_.size() && pending_[next_bucket_] == 0) launch_next();
}

void Reducer::launch_next() {
  const std::size_t number = next_bucket_;
  const Bucket& bucket = buckets_[number];
  if (accumulation_.part_weight() > 0) finite_.look(number, *ranks_);
  ++next_bucket_;
  if (hook_) return launch_hook(number);
  BucketView view{.bucket = number,
                  .values = {},
                  .result = {},
                  .weight = accumulation_.weight(),
                  .tag = number_ << 16 | static_cast<std::uint32_t>(number + 1),
                  // Set even if this rank needs no check, since all ranks have to pass the same options.
                  .check_finite = (finite_.looks_at_averages() && !bucket.on_gpu()) || keeps_losses()};
  if (bucket.dtype() == DType::Float32) view.wire_format = options_.wire_format;
  if (divides_gradients()) view.check_finite = false;
  void* const stream = bucket.on_gpu() ? autograd_.stream_of(bucket.device()) : nullptr;
  for (const std::size_t position : bucket.large()) {
    view.result = bucket.place(position);
    view.result.device.stream = stream;
    view.values = view.result;
    const auto parameter = static_cast<std::size_t>(bucket.members()[position]);
    if (unread_[parameter] != nullptr) view.values.data = unread_[parameter];
    if (residuals_) view.residual = residuals_->of(parameter).data();
    if (!divides_gradients()) {
      launch(view, states_[parameter].keep);
      continue;
    }
    divide(view);
    works_.await_room(view.values.bytes(), 2 * options_.bucket_bytes);
    // The gradient is not needed after its reduction.
    launch(view, std::exchange(states_[parameter].keep, nullptr), bucket.on_gpu() ? 0 : view.values.bytes());
  }
  view.check_finite = keeps_losses() && !divides_gradients();
  view.result = bucket.small();
  view.result.device.stream = stream;
  view.values = view.result;
  if (view.result.count == 0) return;
  view.residual = residuals_ && bucket.dtype() == DType::Float32 ? residuals_->of_small(number) : nullptr;
  if (divides_gradients()) divide(view);
  launch(view, nullptr);
}

void Reducer::divide(BucketView& view) {
  const Division::Part part = division_.next();
  if (view.values.data == nullptr) view.values = {division_.nothing(*ranks_), view.values.count, view.values.dtype};
  view.counts = part.region.counts;
  view.result = {part.result.data, part.result.count, view.result.dtype, view.result.device};
}

void Reducer::launch(BucketView view, std::shared_ptr<const void> keep, std::size_t held) {
  if (view.residual != nullptr) residuals_->prepare();
  using Kept = std::tuple<Memory, std::shared_ptr<const void>, std::shared_ptr<const void>>;
  auto work = ranks_->start(
      "all_reduce",
      [&](Communicator& comm) {
        Work started = reduce_(view.counts.empty() ? comm : division_.shards()->comm(), view);
        bucket_times_.note_reduction(started, view.bucket, view.result.bytes());
        return started;
      },
      std::make_shared<const Kept>(buckets_[view.bucket].memory(), std::move(keep),
                                   residuals_ ? residuals_->memory() : nullptr));
  works_.add(std::move(work), view.result.device, held);
}

// Handles a parameter without a gradient in this backward. Gradients accumulated before still count. A gradient left
// from an earlier step is the same on all ranks, so its average is itself.
void Reducer::complete_unused(std::size_t parameter) {
  State& state = states_[parameter];
  if (virtual_ && !state.used) return autograd_.clear(parameter);
  const bool has_gradient = autograd_.put_in_place(parameter);
  if (!has_gradient) {
    state.used = false;
    if (accumulation_.weight() > 0) autograd_.clear(parameter);
    return;
  }
  // The average of equal values may differ in the last bit, so the values are restored if no rank uses the parameter.
  if (state.used) return;
  autograd_.keep(parameter);
  state.kept = true;
}

void Reducer::launch_rest() {
  while (next_bucket_ < buckets_.size()) {
    for (const int index : plan_[next_bucket_]) {
      const auto parameter = static_cast<std::size_t>(index);
      if (!states_[parameter].ready) complete_unused(parameter);
    }
    if (pending_[next_bucket_] > 0) bucket_times_.note_ready(next_bucket_, buckets_);
    launch_next();
  }
}

// Returns whether all averages that were checked are finite.
bool Reducer::wait_for_all() {
  bool finite = true;
  try {
    if (virtual_) virtual_->ranks().advance();
    // A check for non-finite values makes the host wait in any case.
    works_.wait(autograd_, finite_.raises() || keeps_losses());
    if (hook_) {
      for (const Bucket& bucket : buckets_) bucket.clear_gaps();
    }
    const bool divided_are_finite = !keeps_losses() || !divides_gradients() || division_.averages_are_finite();
    finite = divided_are_finite && works_.are_finite();
    exchange_message(finite);  // comes last, since nothing more may be started after an error
  } catch (const Error&) {
    in_backward_ = hook_ != nullptr;  // a collective fails on all ranks, a hook perhaps on this rank only
    throw;
  }
  works_.clear();
  return finite;
}

// Returns whether the step keeps errors from rounding between hosts for the next step.
bool Reducer::keeps_losses() const noexcept { return residuals_ && ranks_->local_size() < ranks_->size(); }

void Reducer::exchange_message(bool averages_finite) {
  message_.clear();
  for (std::size_t i = 0; i < states_.size(); ++i) {
    if ((states_[i].used && accumulation_.part_weight() > 0) || (virtual_ && virtual_->used(i))) message_.use(i);
  }
  if (finite_.found()) message_.say(StepMessage::NonFinite);
  if (!averages_finite) message_.say(StepMessage::AverageNotFinite);
  checks_.show(message_, accumulation_, progress_, ranks_->size());
  message_.exchange(*ranks_);
}

void Reducer::settle_unused() {
  const bool mine = accumulation_.part_weight() > 0;
  for (std::size_t i = 0; i < states_.size(); ++i) {
    State& state = states_[i];
    if (divides_gradients()) {
      if (message_.used(i)) autograd_.give(i);
    } else if (!(state.used && mine)) {
      if (message_.used(i)) {
        autograd_.give(i);
      } else if (state.kept) {
        autograd_.put_back(i);
      }
    }
    state.kept = state.used = state.ready = state.received = false;
  }
  if (virtual_) virtual_->add_gradients_from_before(message_, [this](std::size_t i) { return place_of(i); });
  autograd_.drop_kept();
  any_samples_ = message_.said(StepMessage::Samples);
}

void Reducer::finish() {
  pass_.reset();
  const auto begin = std::chrono::steady_clock::now();
  // Until a synchronising backward ends well, the other ranks wait for its reductions. `require_whole` checks that.
  in_backward_ = accumulation_.sync();
  if (!in_backward_) return end_virtual_rank();
  bool averages_finite = true;
  try {
    launch_rest();
    averages_finite = wait_for_all();
  } catch (...) {
    works_.clear();
    forget_pass();
    autograd_.drop_all();  // a program that goes on must not step with this rank's own gradients
    accumulation_.end();
    if (virtual_) virtual_->drop(accumulation_);
    transaction_->end(step::Decision::by_error(step::Outcome::Refused));
    throw;
  }
  const bool not_finite = message_.said(StepMessage::AverageNotFinite);
  const bool may_raise = finite_.raises() && (not_finite || message_.said(StepMessage::NonFinite));
  if (finite_.raises() && !averages_finite && accumulation_.weight() > 0) finite_.look_again(*ranks_);
  forget_unread();
  settle_unused();
  in_backward_ = false;
  count_step(begin);
  const Accumulation reduced = accumulation_;
  accumulation_.end();
  if (virtual_) virtual_->end(reduced.part_weight(), accumulation_);
  try {
    checks_.look(*ranks_, message_, reduced, progress_ - 1);
    if (may_raise) finite_.raise(*ranks_, stats_, progress_ - 1);
  } catch (...) {
    if (virtual_) virtual_->drop(accumulation_);
    transaction_->end(step::Decision::by_error(step::Outcome::Refused));
    throw;
  }
  step_complete_ = true;
  // A program that skips a non-finite step, for example with a GradScaler, need not clean up the kept state.
  transaction_->end(step::Decision::by_message(!any_samples_ ? step::Outcome::NoSamples
                                               : not_finite  ? step::Outcome::NotFinite
                                                             : step::Outcome::Accepted));
}

// Adds the gradients of a virtual rank before this rank's last to the partial sums, and removes them.
void Reducer::end_virtual_rank() {
  if (!virtual_ || !accumulation_.ends_part()) return;
  const double weight = accumulation_.part_weight();
  try {
    for (std::size_t number = 0; number < buckets_.size(); ++number) {
      for (const int index : plan_[number])
        if (!states_[static_cast<std::size_t>(index)].used) autograd_.clear(static_cast<std::size_t>(index));
      if (weight > 0) finite_.look(number, *ranks_);
      virtual_->ranks().add(number, buckets_[number], weight);
    }
    for (std::size_t i = 0; i < states_.size(); ++i)
      if (states_[i].used) virtual_->note_used(i, weight);
    drop_used();
    accumulation_.end();
    virtual_->end(weight, accumulation_);
  } catch (...) {
    drop_used();
    virtual_->drop(accumulation_);
    throw;
  }
}

void Reducer::drop_used() {
  for (std::size_t i = 0; i < states_.size(); ++i)
    if (std::exchange(states_[i].used, false)) autograd_.drop(i);
}

std::optional<double> Reducer::mean_loss(double loss) {
  if (!virtual_) raise(ErrorCode::InvalidArgument, "mean_loss: for virtual_ranks -- take metrics::average");
  const bool waits = accumulation_.has_forward();
  return virtual_->ranks().mean_loss(loss, waits ? std::optional(accumulation_.coming_weight()) : std::nullopt);
}

void Reducer::count_step(std::chrono::steady_clock::time_point begin) {
  ++progress_;
  ++stats_.steps;
  status::StatusPage::own().count_step(std::exchange(shown_samples_, 0));
  stats_.exposed_communication_seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  stats_.exposed_communication_seconds_total += stats_.exposed_communication_seconds;
}

bool Reducer::reduce_without_backward() {
  accumulation_.begin_without(!virtual_ || virtual_->ranks().is_last());
  start_pass();
  finish();
  return any_samples_ || !step_complete_;
}

void Reducer::require_whole() {
  if (!in_backward_) return;
  if (!accumulation_.sync()) {
    in_backward_ = false;  // a failed local backward concerns no other rank
    if (!virtual_) return;
    virtual_->restart(accumulation_);
    return drop_used();
  }
  raise_out_of_step(*ranks_);
}

}  // namespace cohort::gradients
