#include "base/result.h"
#include "gradients/same_model.h"
#include "torch/gpu.h"
#include "torch/reducer.h"

#include <cohort/torch/nn.h>
#include <cohort/torch/same_parameters.h>
#include <cohort/torch/tensor.h>

#include <fmt/ranges.h>

#include <algorithm>
#include <cstring>
#include <unordered_set>

namespace cohort::nn {

namespace {

std::string describe(const char* kind, const std::string& name, const at::Tensor& tensor) {
  std::string strides;
  if (!tensor.is_contiguous()) strides = fmt::format(" with strides [{}]", fmt::join(tensor.strides().vec(), ", "));
  return fmt::format("{} '{}' of {} [{}]{}{}{}", kind, name, at::toString(tensor.scalar_type()),
                     fmt::join(tensor.sizes().vec(), ", "), strides, device_text(tensor),
                     tensor.requires_grad() ? "" : ", frozen");
}

struct Contents {
  std::vector<NamedParameter> trained;
  std::vector<at::Tensor> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<NamedTensor> named;  // the parameters, then the buffers
  std::vector<std::string> description;
};

Contents contents_of(const torch::nn::Module& module, const DistributedDataParallelOptions& options) {
  Contents contents;
  contents.description.push_back(
      fmt::format("options bucket_bytes={}, first_bucket_bytes={}, broadcast_buffers={}, "
                  "wire_dtype={}, non_finite={}, compare_parameters_every={}",
                  options.bucket_bytes, options.first_bucket_bytes, options.broadcast_buffers,
                  options.wire_dtype ? to_string(*options.wire_dtype) : "none",
                  options.non_finite == NonFinite::Raise ? "raise" : "ignore", options.compare_parameters_every));
  std::unordered_set<const void*> seen;  // a module registered twice lists its parameters twice
  for (const auto& item : module.named_parameters(/*recurse=*/true)) {
    const at::Tensor& tensor = item.value();
    if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
    contents.parameters.push_back(tensor);
    contents.named.push_back({"parameter '" + item.key() + "'", tensor});
    contents.description.push_back(describe("parameter", item.key(), tensor));
    if (!(tensor.is_cpu() || tensor.is_cuda()) || tensor.layout() != at::kStrided) {
      raise(ErrorCode::InvalidArgument,
            "DistributedDataParallel: parameter '{}' is not dense, or neither in the host's memory nor in CUDA's",
            item.key());
    }
    if (!tensor.requires_grad()) continue;
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
    contents.description.push_back(describe("buffer", item.key(), tensor));
  }
  if (contents.trained.empty()) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: no parameter of the module requires a gradient");
  }
  return contents;
}

}  // namespace

// ------------------------------------------------------------------------------------------------- no_sync

NoSyncGuard::NoSyncGuard(std::shared_ptr<Reducer> reducer) : reducer_(std::move(reducer)) {
  reducer_->core().forwards().enter_no_sync();
}
NoSyncGuard::~NoSyncGuard() {
  if (reducer_) reducer_->core().forwards().leave_no_sync();
}

// ------------------------------------------------------------------------------------------------- core

struct DataParallelCore::State {
  std::shared_ptr<torch::nn::Module> module;
  Communicator comm;
  DistributedDataParallelOptions options;
  std::vector<at::Tensor> everything;   // parameters and buffers
  std::vector<NamedTensor> named;       // the same, with their names
  std::vector<at::Tensor> buffers;      // in the host's memory
  std::vector<at::Tensor> gpu_buffers;  // in that of GPUs
  std::size_t buffer_bytes = 0;
  Memory staged_buffers;
  std::optional<std::int64_t> next_samples;
  std::int64_t compared_at = 0;  // the step of the last comparison
  std::shared_ptr<Reducer> reducer;

  void begin_synchronising_pass();
  void broadcast_buffers();
  void require_same_parameters(std::size_t tensors);
};

// What every pass that ends in a reduction begins with, on all ranks.
void DataParallelCore::State::begin_synchronising_pass() {
  reducer->core().prepare_synchronising_pass();
  if (options.broadcast_buffers) broadcast_buffers();
  const std::int64_t step = reducer->core().progress();
  const std::int64_t every = options.compare_parameters_every;
  if (every == 0 || step == 0 || step == compared_at || step % every != 0) return;
  compared_at = step;
  // Each rank's batches change its own buffers, unless they have just been made equal.
  require_same_parameters(options.broadcast_buffers ? named.size()
                                                    : named.size() - buffers.size() - gpu_buffers.size());
  ++reducer->core().stats().parameter_comparisons;
}

void DataParallelCore::State::require_same_parameters(std::size_t tensors) {
  const auto end = named.begin() + static_cast<std::ptrdiff_t>(tensors);
  cohort::require_same_parameters(comm, {named.begin(), end}, {.step = reducer->core().progress()});
}

// All buffers in one broadcast, as bytes. Every rank packs its own: if rank 0 has joined, the lowest active one's are
// sent. A GPU's go where they lie.
void DataParallelCore::State::broadcast_buffers() {
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
    if (buffer.is_contiguous()) {
      // Not through copy_: running statistics are not part of an earlier pass's gradient, and must not invalidate it.
      std::memcpy(buffer.data_ptr(), source, buffer.nbytes());
    } else {
      at::Tensor flat = at::empty(buffer.sizes(), buffer.options().requires_grad(false));
      std::memcpy(flat.data_ptr(), source, flat.nbytes());
      buffer.detach().copy_(flat);
    }
    source += buffer.nbytes();
  }
}

DataParallelCore::DataParallelCore(std::shared_ptr<torch::nn::Module> module, Communicator comm,
                                   const DistributedDataParallelOptions& options)
    : state_(std::make_unique<State>()) {
  if (module == nullptr) raise(ErrorCode::InvalidArgument, "DistributedDataParallel: the module is empty");
  if (!comm) raise(ErrorCode::InvalidArgument, "DistributedDataParallel: the communicator is empty");
  if (options.bucket_bytes == 0 || options.first_bucket_bytes == 0) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: a bucket of 0 bytes");
  }
  if (options.wire_dtype && *options.wire_dtype != DType::BFloat16) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: gradients cannot travel as {}, only as bfloat16",
          to_string(*options.wire_dtype));
  }
  if (options.compare_parameters_every < 0) {
    raise(ErrorCode::InvalidArgument, "DistributedDataParallel: compare_parameters_every={} -- 0 is never",
          options.compare_parameters_every);
  }
  Contents contents = contents_of(*module, options);
  const std::shared_ptr<gradients::Ranks> ranks = gradients::ranks_of(comm);
  gradients::require_same_on_all_ranks(*ranks, contents.description, "DistributedDataParallel");

  state_->module = std::move(module);
  state_->comm = comm;
  state_->options = options;
  for (const at::Tensor& buffer : contents.buffers) {
    (buffer.is_cuda() ? state_->gpu_buffers : state_->buffers).push_back(buffer);
  }
  state_->everything = contents.parameters;
  state_->everything.insert(state_->everything.end(), contents.buffers.begin(), contents.buffers.end());
  state_->named = contents.named;
  broadcast_parameters(comm, state_->everything);

  for (const at::Tensor& buffer : state_->buffers) state_->buffer_bytes += buffer.nbytes();
  if (state_->buffer_bytes > 0) state_->staged_buffers = comm.allocate(state_->buffer_bytes);
  state_->reducer = std::make_shared<Reducer>(ranks, contents.trained, options);
  state_->reducer->attach();
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
  if (samples < 0)
    raise(ErrorCode::InvalidArgument, "set_sample_count({}): a number of samples is not negative", samples);
  state_->next_samples = samples;
}

NoSyncGuard DataParallelCore::no_sync() { return NoSyncGuard(state_->reducer); }

std::shared_ptr<ForwardRecord> DataParallelCore::before_forward(std::optional<std::int64_t> samples) {
  const std::optional<std::int64_t> chosen = std::exchange(state_->next_samples, std::nullopt);
  if (!at::GradMode::is_enabled()) return nullptr;
  if (!chosen && !samples) {
    raise(ErrorCode::InvalidArgument,
          "forward was given no tensor from which to tell the number of samples -- call set_sample_count(n) before it");
  }
  const bool sync = !state_->reducer->core().forwards().in_no_sync();
  if (sync) {
    state_->begin_synchronising_pass();
  } else {
    state_->reducer->core().require_whole();
  }
  auto record = std::make_shared<ForwardRecord>();
  record->samples = chosen ? *chosen : *samples;
  record->sync = sync;
  return record;
}

void DataParallelCore::after_forward(const std::shared_ptr<ForwardRecord>& record,
                                     const std::vector<at::Tensor>& outputs) {
  if (record) state_->reducer->end_forward(record, outputs);
}

bool DataParallelCore::step_without_samples() {
  if (state_->reducer->core().forwards().in_no_sync()) {
    raise(ErrorCode::InvalidArgument, "step_without_samples inside no_sync: there is nothing to take part in");
  }
  state_->next_samples.reset();
  state_->begin_synchronising_pass();
  return state_->reducer->core().reduce_without_backward();
}

int DataParallelCore::join() {
  state_->reducer->core().require_whole();
  Communicator& comm = state_->comm;
  (void)comm.join();
  const auto [source, steps] = state_->reducer->core().most_advanced();
  if (steps) {
    broadcast_parameters(comm, state_->everything, {.root = source});
    state_->reducer->core().take_plan_of(source, *steps);  // so that training may go on together
  }
  return source;
}

void DataParallelCore::sync_buffers() { state_->broadcast_buffers(); }
void DataParallelCore::require_same_parameters() { state_->require_same_parameters(state_->named.size()); }

ReducerStats DataParallelCore::stats() const { return state_->reducer->core().stats(); }
BucketSlot DataParallelCore::slot_of(const std::string& name) const { return state_->reducer->core().slot_of(name); }

}  // namespace cohort::nn
