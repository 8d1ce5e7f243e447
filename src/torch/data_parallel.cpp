#include "base/env.h"
#include "base/result.h"
#include "torch/module_slots.h"
#include "torch/reducer.h"
#include "torch/virtual_step.h"
#include "train/gradients/options.h"
#include "train/gradients/shares.h"
#include "train/step/methods.h"

#include <cohort/torch/data.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/recompute.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>

#include <ATen/Parallel.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <functional>
#include <string_view>
#include <unordered_set>

namespace cohort::nn {

namespace {

std::string text_of(const char* kind, const std::string& name, const at::Tensor& tensor) {
  std::string strides;
  if (!tensor.is_contiguous()) strides = fmt::format(" with strides [{}]", fmt::join(tensor.strides().vec(), ", "));
  return fmt::format("{} '{}' of {} [{}]{}{}{}", kind, name, at::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ", "), strides, device_text(tensor),
                     tensor.requires_grad() ? "" : ", frozen");
}

struct Contents {
  std::vector<NamedTensor> trained;
  std::vector<NamedTensor> frozen;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<NamedTensor> named;  // parameters first, then buffers
  std::vector<step::Option> description;
};

Contents contents_of(const torch::nn::Module& module, const DistributedDataParallelOptions& options) {
  Contents contents;
  const auto describe = [&](std::string line) { contents.description.push_back({.name = std::move(line)}); };
  contents.description = gradients::agreed(options);
  describe(options.samples ? "weights by a function" : "weights as declared");
  if (options.sampler != nullptr) {
    const data::DistributedSamplerOptions& sampler = options.sampler->options();
    describe(fmt::format(
        "a sampler of {} samples, batch_size={}, shuffle={}, seed={}, remainder={}, world_size={}, shares={}, "
        "virtual_ranks={}",
        options.sampler->size(), sampler.batch_size, sampler.shuffle, sampler.seed, static_cast<int>(sampler.remainder),
        sampler.world_size, sampler.shares.empty() ? env::text(env::kShares) : sampler.shares, sampler.virtual_ranks));
  }
  if (options.virtual_ranks > 0) describe(fmt::format("{} threads for torch's operations", at::get_num_threads()));
  std::unordered_set<const void*> seen;  // a module registered twice lists its parameters twice
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    contents.parameters.push_back(tensor);
    contents.named.push_back({"parameter '" + item.key() + "'", tensor});
    describe(text_of("parameter", item.key(), tensor));
    if (!(tensor.is_cpu() || tensor.is_cuda()) || tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument,
            "DistributedDataParallel: parameter '{}' is not dense, or neither in the host's memory nor in CUDA's",
            item.key());
    }
    if (!tensor.requires_grad()) {
      contents.frozen.push_back({item.key(), tensor});
      continue;
    }
    const at::ScalarType type = tensor.scalar_type();
    if (type != at::kFloat && type != at::kDouble && type != at::kHalf && type != at::kBFloat16) {
      raise(ErrorCode::InvalidArgument,
            "DistributedDataParallel: parameter '{}' is of {} -- only Float, Double, Half and BFloat16 can be averaged",
            item.key(), at::toString(type));
    }
    contents.trained.push_back({item.key(), tensor});
  }
  for (const auto& item : module.named_buffers(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    contents.buffers.push_back(tensor);
    contents.named.push_back({"buffer '" + item.key() + "'", tensor});
    describe(text_of("buffer", item.key(), tensor));
  }
  if (contents.trained.empty()) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: no parameter of the module requires a gradient");
  }
  return contents;
}

// Most elements of a batch's tensor that are digested. If a tensor has more, the digested ones are evenly spread.
constexpr std::int64_t kDigested = std::int64_t{1} << 22;

// Digest of the dense tensors in the batch; nullopt if there are none.
std::optional<std::uint64_t> digest_of(const std::vector<at::Tensor>& batch) {
  const at::NoGradGuard no_grad;
  std::optional<std::uint64_t> digest;
  for (const at::Tensor& tensor : batch) {
    if (tensor.layout() != at::kStrided || !(tensor.is_cpu() || tensor.is_cuda()) || tensor.numel() == 0) continue;
    const std::int64_t step = tensor.numel() / kDigested + 1;
    const at::Tensor flat = tensor.detach().reshape({-1}).slice(0, 0, tensor.numel(), step).cpu().contiguous();
    const std::string_view bytes(static_cast<const char*>(flat.data_ptr()), flat.nbytes());
    const std::string shape = fmt::format("{} {}", at::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), " "));
    for (const std::uint64_t part : {std::hash<std::string_view>{}(shape), std::hash<std::string_view>{}(bytes)})
      digest = (std::rotl(digest.value_or(0), 5) ^ part) * 0x9E3779B97F4A7C15ULL;
  }
  return digest;
}

}  // namespace

// ------------------------------------------------------------------------------------------------- no_sync

NoSyncGuard::NoSyncGuard(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->core().accumulation().enter_no_sync();
}
NoSyncGuard::~NoSyncGuard() {
  if (!reducer_) return;
  std::shared_ptr<Reducer> now = reducer_;
  while (std::shared_ptr<Reducer> next = now->successor()) now = std::move(next);
  now->core().accumulation().leave_no_sync();
}

// ------------------------------------------------------------------------------------------------- core

struct DataParallelCore::State {
  State() = default;
  ~State() {
    if (reducer) reducer->after_backward(nullptr);
  }
  State(const State&) = delete;
  State& operator=(const State&) = delete;

  std::shared_ptr<torch::nn::Module> module;
  Communicator comm;
  DistributedDataParallelOptions options;
  std::optional<data::DistributedSampler> sampler;
  std::optional<std::int64_t> sampler_cursor;  // the sampler's cursor at the last forward
  bool sampler_moves = false;
  std::optional<std::int64_t> local_cursor;  // the sampler's cursor at the last forward in no_sync
  std::vector<NamedTensor> frozen;
  Slots parameter_slots;
  Slots buffer_slots;
  std::vector<at::Tensor> everything;   // parameters and buffers
  std::size_t parameters = 0;           // number of parameters in `everything`
  std::vector<NamedTensor> named;       // `everything`, with names
  std::vector<at::Tensor> buffers;      // in host memory
  std::vector<at::Tensor> gpu_buffers;  // in GPU memory
  std::size_t buffer_bytes = 0;
  Memory staged_buffers;
  std::optional<std::int64_t> next_samples;
  std::int64_t compared_at = 0;  // step of the last comparison of parameters
  std::shared_ptr<step::Transaction> transaction;
  std::shared_ptr<Reducer> reducer;
  CommHook hook;
  std::unique_ptr<VirtualStep> virtual_step;  // null without virtual ranks

  void attach();
  void refuse_beside_virtual_ranks(const Contents& contents) const;
  void begin_virtual_rank();
  void end_virtual_rank(bool well);
  void take_buffers(const std::vector<at::Tensor>& tensors);
  void take_buffers_again_if_changed();
  bool parameters_changed() const;
  bool any_unfrozen() const;
  void attach_again_if_changed();
  void refuse_what_came_too_late();
  std::optional<std::int64_t> declared_samples(const std::vector<at::Tensor>& inputs);
  std::int64_t samples_of_batch();
  void begin_synchronising_pass();
  void broadcast_buffers();
  void require_same_parameters(std::size_t tensors);
};

// Collective: compares the models, makes them equal, and attaches the reducer.
void DataParallelCore::State::attach() {
  Contents contents = contents_of(*module, options);
  const std::shared_ptr<step::Ranks> ranks = step::ranks_of(comm);
  transaction->agreement().set(std::move(contents.description));
  transaction->agreement().require(*ranks);
  refuse_beside_virtual_ranks(contents);
  take_buffers(contents.buffers);
  parameter_slots.clear();
  visit_parameters(*module, [this](const at::Tensor& parameter) { parameter_slots.take(parameter); });
  parameters = contents.parameters.size();
  everything = std::move(contents.parameters);
  everything.insert(everything.end(), contents.buffers.begin(), contents.buffers.end());
  frozen = std::move(contents.frozen);
  named = std::move(contents.named);
  broadcast_parameters(comm, everything);
  const std::shared_ptr<Reducer> before = reducer;
  std::shared_ptr<gradients::Shards> shards;
  if (options.sharding != Sharding::None) shards = std::make_shared<gradients::Shards>(comm, options.sharding);
  if (before != nullptr) {
    before->after_backward(nullptr);
    before->detach();
  }
  reducer = std::make_shared<Reducer>(ranks, contents.trained, options, std::move(shards), transaction);
  if (hook) reducer->use_hook(hook, comm, module);
  reducer->set_frozen(frozen);
  reducer->attach();
  reducer->after_backward([this](bool ended) {
    if (virtual_step) end_virtual_rank(ended);
    if (ended) refuse_what_came_too_late();
  });
  if (virtual_step && sampler) reducer->core().accumulation().count_parts_once();
  if (before == nullptr) return;
  reducer->core().go_on_from(before->core());
  before->succeed_by(reducer);
}

// Refuses whatever lacks an order that is the same for any number of ranks. Refuses it on all ranks, since their models
// and options are the same.
void DataParallelCore::State::refuse_beside_virtual_ranks(const Contents& contents) const {
  constexpr auto kWrong = ErrorCode::InvalidArgument;
  const std::int64_t of_sampler = sampler ? sampler->options().virtual_ranks : options.virtual_ranks;
  if (of_sampler != options.virtual_ranks) {
    raise(kWrong, "DistributedDataParallel: virtual_ranks={}, and {} of its sampler -- give both the same",
          options.virtual_ranks, of_sampler);
  }
  if (options.virtual_ranks == 0) return;
  for (const NamedTensor& one : contents.named) {
    if (!one.tensor.is_cpu())
      raise(kWrong, "DistributedDataParallel: virtual_ranks with {} on a GPU -- on CPUs alone", one.name);
  }
  for (const auto& part : module->modules()) {
    if (part->name().find("SyncBatchNorm") != std::string::npos)
      raise(kWrong, "DistributedDataParallel: virtual_ranks with {}, which sums over ranks -- take BatchNorm",
            part->name());
  }
}

void DataParallelCore::State::take_buffers(const std::vector<at::Tensor>& tensors) {
  buffer_slots.clear();
  visit_buffers(*module, [this](const at::Tensor& buffer) { buffer_slots.take(buffer); });
  buffers.clear();
  gpu_buffers.clear();
  buffer_bytes = 0;
  if (virtual_step && !options.broadcast_buffers && !tensors.empty()) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: virtual_ranks begin with the same buffers -- leave broadcast_buffers on");
  }
  for (const at::Tensor& buffer : tensors) {
    (buffer.is_cuda() ? gpu_buffers : buffers).push_back(buffer);
    if (!buffer.is_cuda()) buffer_bytes += buffer.nbytes();
  }
  staged_buffers = buffer_bytes > 0 ? comm.allocate(buffer_bytes) : Memory();
}

void DataParallelCore::State::take_buffers_again_if_changed() {
  if (!buffer_slots.changed([this](const auto& visit) { visit_buffers(*module, visit); })) return;
  everything.resize(parameters);
  named.resize(parameters);
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : everything) seen.insert(parameter.unsafeGetTensorImpl());
  for (const auto& item : module->named_buffers(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    everything.push_back(tensor);
    named.push_back({"buffer '" + item.key() + "'", tensor});
  }
  take_buffers({everything.begin() + static_cast<std::ptrdiff_t>(parameters), everything.end()});
}

bool DataParallelCore::State::parameters_changed() const {
  return parameter_slots.changed([this](const auto& visit) { visit_parameters(*module, visit); });
}

bool DataParallelCore::State::any_unfrozen() const {
  return std::any_of(frozen.begin(), frozen.end(),
                     [](const NamedTensor& parameter) { return parameter.tensor.requires_grad(); });
}

// Attaches again if parameters were unfrozen, added, replaced, resized or cast: they would not be averaged otherwise.
void DataParallelCore::State::attach_again_if_changed() {
  if (!any_unfrozen() && !parameters_changed() && reducer->look_at_parameters())
    return transaction->trained().unchanged();
  transaction->trained().update(
      shown_of(*module), "DistributedDataParallel",
      "with Sharding parameters are fixed: wrap the module again, and make its optimizer anew");
  if (options.sharding != Sharding::None) {
    raise(
        ErrorCode::InvalidArgument,
        "DistributedDataParallel: parameters were unfrozen, added, replaced or cast, and with Sharding they are fixed "
        "-- wrap the module again, and make its optimizer anew");
  }
  if (reducer->core().in_step()) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: parameters were unfrozen, added, replaced or cast between a forward and its "
          "reduction -- do it after a step, before the next forward");
  }
  attach();
}

// Called at the end of a backward. Refuses parameters added or unfrozen since its forward, as they are not averaged.
void DataParallelCore::State::refuse_what_came_too_late() {
  if (!any_unfrozen() && !parameters_changed()) return;
  std::unordered_set<const void*> averaged;
  for (std::size_t i = 0; i < reducer->core().parameter_count(); ++i)
    averaged.insert(reducer->tensor_of(i).unsafeGetTensorImpl());
  for (const auto& item : module->named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !tensor.requires_grad() || !tensor.grad().defined()) continue;
    if (averaged.count(tensor.unsafeGetTensorImpl()) != 0) continue;
    reducer->drop_all();
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: parameter '{}' was added or unfrozen after the forward of this backward had begun, "
          "so rank {}'s gradient of it is its own -- do it before the forward, or run a forward that makes parameters "
          "in no_grad mode before wrapping",
          item.key(), comm.rank());
  }
}

std::int64_t DataParallelCore::State::samples_of_batch() {
  const std::int64_t cursor = sampler->cursor();
  sampler_moves = sampler_moves || (sampler_cursor && *sampler_cursor != cursor);
  sampler_cursor = cursor;
  const bool never_moved = !sampler_moves && reducer->core().progress() > 0;
  const std::int64_t samples = sampler->samples_of_batch(never_moved ? sampler_cursor : local_cursor);
  local_cursor = reducer->core().accumulation().in_no_sync() ? sampler_cursor : std::nullopt;
  return samples;
}

namespace {

std::int64_t number_of(std::int64_t samples, const char* who) {
  if (samples >= 0 && samples <= std::int64_t{1} << 53) return samples;  // weights are doubles, exact up to 2^53
  raise(ErrorCode::InvalidArgument, "{}: {} is no number of samples -- 0 to 2^53 is wanted", who, samples);
}

}  // namespace

std::optional<std::int64_t> DataParallelCore::State::declared_samples(const std::vector<at::Tensor>& inputs) {
  if (next_samples) return std::exchange(next_samples, std::nullopt);
  if (sampler) return virtual_step ? sampler->samples_of_batch(std::nullopt) : samples_of_batch();
  if (!options.samples) return std::nullopt;
  return number_of(options.samples(inputs), "DistributedDataParallel: samples()");
}

// Begins a forward with virtual ranks, or step_without_samples in place of one. Only the first of a step exchanges
// anything, also in no_sync.
void DataParallelCore::State::begin_virtual_rank() {
  const int due = reducer->core().virtual_part()->ranks().due();
  const int drawn = sampler ? sampler->virtual_rank() : -1;
  if (drawn >= 0 && drawn != due) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel: the sampler's oldest batch is of virtual rank {}, and virtual rank {} is due on "
          "rank {} -- train each batch that is drawn once, in order (or call step_without_samples() in its place), and "
          "call the sampler's step() after each; to give up a step that has begun, on all ranks, wrap the model again",
          drawn, due, comm.rank());
  }
  const bool begins = !reducer->core().in_step();
  if (begins) {
    begin_synchronising_pass();
  } else {
    attach_again_if_changed();
    take_buffers_again_if_changed();
  }
  VirtualStep::Place place{.cursor = reducer->core().progress()};
  if (sampler) place = {.seed = sampler->state().seed, .epoch = sampler->epoch(), .cursor = sampler->cursor()};
  virtual_step->begin_forward(*reducer, place, begins);
}

// Begins a pass that ends in a reduction. Called on all ranks.
void DataParallelCore::State::begin_synchronising_pass() {
  reducer->core().require_whole();
  reducer->check_parameters("DistributedDataParallel");
  attach_again_if_changed();
  reducer->core().prepare_synchronising_pass();
  if (sampler) sampler->begin_step();
  if (options.broadcast_buffers) broadcast_buffers();
  const std::int64_t step = reducer->core().progress();
  const std::int64_t every = options.compare_parameters_every;
  if (every == 0 || step == 0 || step == compared_at || step % every != 0) return;
  // Each rank's batches change its own buffers, unless they have just been made equal.
  require_same_parameters(options.broadcast_buffers ? named.size() : parameters);
  compared_at = step;
  ++reducer->core().stats().parameter_comparisons;
}

void DataParallelCore::State::require_same_parameters(std::size_t tensors) {
  const auto end = named.begin() + static_cast<std::ptrdiff_t>(tensors);
  cohort::require_same_parameters(comm, {named.begin(), end}, {.step = reducer->core().progress()});
}

// A step's buffers are those of rank 0, which may be lost before the next step begins, so all ranks get them.
void DataParallelCore::State::end_virtual_rank(bool well) {
  virtual_step->end_backward(reducer->core());
  if (well && reducer->core().step_complete() && options.broadcast_buffers) broadcast_buffers();
}

// Sends all buffers in one broadcast, as bytes. Every rank packs its own, since the lowest active rank's are sent if
// rank 0 has joined. GPU buffers are sent in place.
void DataParallelCore::State::broadcast_buffers() {
  take_buffers_again_if_changed();
  if (comm.size() == 1) return;
  if (!gpu_buffers.empty()) broadcast_parameters(comm, gpu_buffers);
  if (buffer_bytes == 0) return;
  auto* stage = static_cast<char*>(staged_buffers.data());
  for (const at::Tensor& buffer : buffers) {
    const at::Tensor flat = buffer.detach().contiguous();
    std::memcpy(stage, flat.data_ptr(), flat.nbytes());
    stage += flat.nbytes();
  }
  comm.broadcast(Buffer(staged_buffers.data(), static_cast<std::int64_t>(buffer_bytes), DType::UInt8)).wait();
  if (comm.rank() == 0) return;
  const char* source = static_cast<const char*>(staged_buffers.data());
  for (const at::Tensor& buffer : buffers) {
    assign_buffer(buffer, source);
    source += buffer.nbytes();
  }
}

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module, Communicator comm,
                                   const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (module == nullptr) raise(ErrorCode::InvalidArgument, "DistributedDataParallel: the module is empty");
  if (!comm) raise(ErrorCode::InvalidArgument, "DistributedDataParallel: the communicator is empty");
  if (options.sampler != nullptr && options.samples) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: sampler and samples both tell the samples -- give one");
  }
  state_->module = std::move(module);
  state_->comm = comm;
  state_->options = options;
  if (options.sampler != nullptr) {
    state_->options.sampler = &state_->sampler.emplace(*options.sampler);
    const data::DistributedSamplerOptions& sampler = options.sampler->options();
    if (sampler.rank != comm.rank() || sampler.world_size != comm.size()) {
      raise(
          ErrorCode::InvalidArgument,
          "DistributedDataParallel: the sampler is of rank {} of {}, this is rank {} of {} -- give it the communicator",
          sampler.rank, sampler.world_size, comm.rank(), comm.size());
    }
  }
  if (const std::int64_t threads = gradients::threads_of(options); threads > 0)
    at::set_num_threads(static_cast<int>(threads));
  if (options.virtual_ranks > 0) state_->virtual_step = std::make_unique<VirtualStep>(state_->module);
  state_->transaction = std::make_shared<step::Transaction>(step::data_parallel(options.sharding != Sharding::None));
  state_->transaction->trained().update(shown_of(*state_->module), "", "");
  state_->attach();
  if (options.sampler != nullptr) {
    options.sampler->bind(step::ranks_of(comm));
  } else if (comm.rank() == 0 && gradients::SampleShares(env::text(env::kShares)).uneven()) {
    gradients::warn_of_unused_shares();
  }
}

DataParallelCore::~DataParallelCore() = default;

Communicator& DataParallelCore::communicator() noexcept { return state_->comm; }

std::vector<at::Tensor> DataParallelCore::parameters() const { return state_->module->parameters(); }

torch::OrderedDict<std::string, at::Tensor> DataParallelCore::state_dict() const {
  torch::OrderedDict<std::string, at::Tensor> all;
  for (const auto& item : state_->module->named_parameters(/*recurse=*/true)) all.insert(item.key(), item.value());
  for (const auto& item : state_->module->named_buffers(/*recurse=*/true)) all.insert(item.key(), item.value());
  return all;
}

void DataParallelCore::train(bool on) { state_->module->train(on); }
void DataParallelCore::eval() { state_->module->eval(); }
void DataParallelCore::zero_grad() { state_->reducer->drop_all(); }

void DataParallelCore::set_sample_count(std::int64_t samples) {
  state_->next_samples = number_of(samples, "set_sample_count");
}

NoSyncGuard DataParallelCore::no_sync() { return NoSyncGuard(state_->reducer); }

bool DataParallelCore::before_forward(const std::vector<at::Tensor>& inputs) {
  gradients::Reducer& core = state_->reducer->core();
  // No pass begins in no_grad mode, or if a backward under way runs a forward again (checkpointing).
  if (!at::GradMode::is_enabled() || core.in_backward() || recomputing()) return false;
  if (state_->virtual_step) core.require_whole();  // before it is asked which virtual rank is due
  const std::optional<std::int64_t> declared = state_->declared_samples(inputs);
  std::optional<std::int64_t> rows;
  if (!inputs.empty() && inputs.front().dim() > 0) rows = inputs.front().size(0);
  const std::optional<std::uint64_t> batch = core.wants_batch() ? digest_of(inputs) : std::nullopt;
  if (state_->virtual_step) {
    state_->begin_virtual_rank();
  } else if (core.accumulation().in_no_sync()) {
    core.require_whole();
    state_->attach_again_if_changed();
  } else {
    state_->begin_synchronising_pass();
  }
  state_->reducer->core().add_forward(declared, rows, batch,
                                      state_->sampler ? std::optional(state_->sampler->epoch()) : std::nullopt);
  return true;
}

void DataParallelCore::after_forward(const std::vector<at::Tensor>& outputs) {
  if (state_->virtual_step) state_->virtual_step->end_forward();
  state_->reducer->watch(outputs);
}

bool DataParallelCore::step_without_samples() {
  if (state_->reducer->core().accumulation().in_no_sync()) {
    raise(ErrorCode::InvalidArgument, "step_without_samples inside no_sync: there is nothing to take part in");
  }
  state_->next_samples.reset();
  VirtualStep* const virtual_step = state_->virtual_step.get();
  if (virtual_step == nullptr) {
    state_->begin_synchronising_pass();
    return state_->reducer->core().reduce_without_backward();
  }
  state_->reducer->core().require_whole();
  state_->begin_virtual_rank();
  virtual_step->end_forward();
  bool any_samples = false;
  try {
    any_samples = state_->reducer->core().reduce_without_backward();
  } catch (...) {
    state_->end_virtual_rank(false);
    throw;
  }
  state_->end_virtual_rank(true);
  return any_samples;
}

bool DataParallelCore::step_complete() const noexcept { return state_->reducer->core().step_complete(); }
std::optional<double> DataParallelCore::mean_loss(double loss) { return state_->reducer->core().mean_loss(loss); }

void DataParallelCore::register_comm_hook(CommHook hook) {
  state_->reducer->use_hook(hook, state_->comm, state_->module);
  state_->hook = std::move(hook);
}

int DataParallelCore::join() {
  if (state_->virtual_step) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel::join: virtual_ranks are all trained in each step -- step_without_samples() takes "
          "the place of one without input");
  }
  if (state_->hook) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel::join: a hook on gradients is run by all ranks in every step -- "
          "step_without_samples() takes the place of a forward and backward without input");
  }
  if (state_->options.sharding != Sharding::None) {
    raise(ErrorCode::InvalidArgument,
          "DistributedDataParallel::join: with Sharding every rank is needed in every step -- step_without_samples() "
          "takes the place of a forward and backward without input");
  }
  state_->reducer->core().require_whole();
  Communicator& comm = state_->comm;
  (void)comm.join();
  const auto [source, steps] = state_->reducer->core().most_advanced();
  if (steps) {
    broadcast_parameters(comm, state_->everything, {.root = source});
    state_->reducer->core().take_plan_of(source, *steps);  // so that all ranks may continue training
  }
  return source;
}

void DataParallelCore::parameters_written() {
  if (!state_->reducer->core().division().shards()) return;
  state_->reducer->bring_home();
  state_->reducer->note_writes();
}

const std::shared_ptr<Reducer>& DataParallelCore::reducer() const noexcept { return state_->reducer; }
const std::shared_ptr<torch::nn::Module>& DataParallelCore::whole() const noexcept { return state_->module; }

void DataParallelCore::sync_buffers() { state_->broadcast_buffers(); }
void DataParallelCore::require_same_parameters() { state_->require_same_parameters(state_->named.size()); }

std::map<std::string, at::Tensor> DataParallelCore::residuals() const {
  std::map<std::string, at::Tensor> copies;
  for (const auto& [name, values] : state_->reducer->core().residuals())
    copies["residual." + name] = at::from_blob(values.data(), {static_cast<std::int64_t>(values.size())}).clone();
  return copies;
}

void DataParallelCore::load_residuals(const std::map<std::string, at::Tensor>& residuals) {
  for (const auto& [name, values] : state_->reducer->core().residuals()) {
    const auto saved = residuals.find("residual." + name);
    const auto count = static_cast<std::int64_t>(values.size());
    if (saved != residuals.end() && saved->second.numel() != count)
      raise(ErrorCode::InvalidArgument, "load_residuals: '{}' has {} elements, the parameter {}", saved->first,
            saved->second.numel(), count);
    at::Tensor here = at::from_blob(values.data(), {count});
    const torch::NoGradGuard no_grad;
    if (saved == residuals.end()) {
      here.zero_();
    } else {
      here.copy_(saved->second.reshape({-1}));
    }
  }
}

ReducerStats DataParallelCore::stats() const { return state_->reducer->core().stats(); }
BucketSlot DataParallelCore::slot_of(const std::string& name) const { return state_->reducer->core().slot_of(name); }

}  // namespace cohort::nn
