#include <cohort/torch/pipeline.h>

#include "base/log.h"
#include "base/result.h"
#include "torch/pipeline_layers.h"
#include "torch/reducer.h"
#include "torch/split_backward.h"
#include "train/pipeline/schedule.h"
#include "train/step/agreement.h"
#include "train/step/ranks.h"

#include <cohort/torch/tensor.h>

#include <fmt/ranges.h>
#include <torch/csrc/autograd/autograd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <deque>
#include <exception>
#include <limits>
#include <map>

namespace cohort::nn {

using pipeline::Action;
using pipeline::Kind;

namespace {

// ------------------------------------------------------------------------------------------------- messages

/// Header sent before a tensor: 1 if there is a tensor, its type, 1 if it requires a gradient, 1 if it is on a GPU, the
/// number of sizes, the number of input rows of the micro-batch, and the sizes.
using Header = std::array<std::int64_t, 21>;
constexpr std::size_t kSizesAt = 6;

Header header_of(const at::Tensor& tensor, bool takes_gradient, std::int64_t rows) {
  Header header{};
  if (!tensor.defined()) return header;
  if (tensor.layout() != at::kStrided || tensor.dim() > static_cast<std::int64_t>(header.size() - kSizesAt)) {
    raise(ErrorCode::InvalidArgument, "between stages go dense tensors of at most {} dimensions",
          header.size() - kSizesAt);
  }
  header = {1,
            static_cast<std::int64_t>(tensor.scalar_type()),
            takes_gradient ? 1 : 0,
            tensor.is_cuda() ? 1 : 0,
            tensor.dim(),
            rows};
  for (std::int64_t d = 0; d < tensor.dim(); ++d) header[kSizesAt + static_cast<std::size_t>(d)] = tensor.size(d);
  return header;
}

/// Makes a tensor as the header describes, or undefined if the header has none; on `device`, else on the current device
/// of its kind.
at::Tensor empty_as(const Header& header, const std::optional<at::Device>& device) {
  if (header[0] == 0) return {};
  const at::IntArrayRef sizes(header.data() + kSizesAt, static_cast<std::size_t>(header[4]));
  const at::Device where = device.value_or(at::Device(header[3] != 0 ? at::kCUDA : at::kCPU));
  return at::empty(sizes, at::TensorOptions(where).dtype(static_cast<at::ScalarType>(header[1])));
}

bool has_bytes(const at::Tensor& tensor) { return tensor.defined() && tensor.nbytes() > 0; }

/// Sends tensors from stage to stage. Each message is a header and, with another tag, the tensor. The receive is
/// started early, with the shape of the last message of this number. If the shape has changed, the header shows it, the
/// sender completes the receive with zeros, and sends the tensor with a third tag. Both sides remember the same shapes.
class Messages {
 public:
  explicit Messages(Communicator comm) : comm_(std::move(comm)) {}

  void expect(int number, int peer, const std::optional<at::Device>& device) {
    Arriving& arriving = arriving_[number];
    arriving.header = std::make_unique<Header>();
    arriving.told = comm_.recv(std::span(*arriving.header), peer, {.tag = 3 * number});
    const auto known = known_.find(number);
    if (known == known_.end()) return;
    arriving.tensor = empty_as(known->second, device);
    if (has_bytes(arriving.tensor)) arriving.filled = receive(arriving.tensor, peer, 3 * number + 1);
  }

  struct Received {
    at::Tensor tensor;
    bool takes_gradient = false;
    std::int64_t rows = 0;
  };
  Received take(int number, int peer, const std::optional<at::Device>& device) {
    Arriving& arriving = arriving_.at(number);
    arriving.told.wait();
    const Header header = *arriving.header;
    wait_for(arriving.filled, arriving.tensor);
    const auto [known, first] = known_.try_emplace(number, header);
    if (first || known->second != header) {
      known->second = header;
      arriving.tensor = empty_as(header, device);
      if (has_bytes(arriving.tensor)) {
        arriving.filled = receive(arriving.tensor, peer, 3 * number + 2);
        wait_for(arriving.filled, arriving.tensor);
      }
    }
    Received received{std::move(arriving.tensor), header[2] != 0, header[5]};
    arriving_.erase(number);
    return received;
  }

  void send(int number, int peer, const at::Tensor& tensor, bool takes_gradient, std::int64_t rows) {
    const at::Tensor plain = tensor.defined() ? tensor.detach().contiguous() : tensor;
    Sent& sent = sent_.emplace_back(Sent{plain, std::make_unique<Header>(header_of(plain, takes_gradient, rows)), {}});
    const auto [known, first] = known_.try_emplace(number, *sent.header);
    sent.works.push_back(comm_.send(std::span<const std::int64_t>(*sent.header), peer, {.tag = 3 * number}));
    const bool changed = !first && known->second != *sent.header;
    if (changed) {
      sent.filler = empty_as(known->second, std::nullopt);
      if (has_bytes(sent.filler)) {
        sent.filler.zero_();
        sent.works.push_back(comm_.send(to_buffer(sent.filler), peer, {.tag = 3 * number + 1}));
      }
      known->second = *sent.header;
    }
    if (has_bytes(plain)) {
      sent.works.push_back(comm_.send(to_buffer(plain), peer, {.tag = 3 * number + (first || changed ? 2 : 1)}));
    }
    while (!sent_.empty() && std::all_of(sent_.front().works.begin(), sent_.front().works.end(),
                                         [](const Work& work) { return work.done(); })) {
      finish_oldest();
    }
  }
  void finish() {
    while (!sent_.empty()) finish_oldest();
  }
  /// Drops all operations; called after the communicator has ended.
  void drop() noexcept {
    const auto drop_one = [](Work& work) {
      try {
        work.wait();
      } catch (const std::exception&) {  // the error is known already
      }
    };
    for (Sent& sent : sent_) std::for_each(sent.works.begin(), sent.works.end(), drop_one);
    for (auto& [number, arriving] : arriving_) {
      drop_one(arriving.told);
      drop_one(arriving.filled);
    }
    sent_.clear();
    arriving_.clear();
  }

 private:
  struct Arriving {
    std::unique_ptr<Header> header;
    at::Tensor tensor;
    Work told, filled;
  };
  struct Sent {
    at::Tensor tensor;
    std::unique_ptr<Header> header;
    std::vector<Work> works;
    at::Tensor filler = {};
  };

  Work receive(const at::Tensor& tensor, int peer, int tag) {
    return comm_.recv(to_buffer(tensor), peer, {.tag = tag});
  }
  static void wait_for(Work& work, const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda()) {
      work.synchronize(buffer_device(tensor));
    } else {
      work.wait();
    }
  }
  void finish_oldest() {
    for (Work& work : sent_.front().works) work.wait();
    sent_.pop_front();
  }

  Communicator comm_;
  std::map<int, Header> known_;  // header last sent or received, by message number
  std::map<int, Arriving> arriving_;
  std::deque<Sent> sent_;
};

struct Stage {
  int number = 0;
  std::int64_t first_layer = 0;
  std::vector<torch::nn::AnyModule> layers;
};

}  // namespace

// ------------------------------------------------------------------------------------------------- construction

struct Pipeline::State {
  State(const std::vector<NamedLayer>& layers, Communicator communicator, const PipelineOptions& opts);

  void choose_cuts(const std::vector<NamedLayer>& layers);
  bool any_sample();
  void keep_layers(const std::vector<NamedLayer>& layers);
  bool is_last() const { return comm.rank() == comm.size() - 1; }

  Communicator comm;
  PipelineOptions options;
  pipeline::Layout layout;
  std::vector<std::int64_t> cuts;
  std::string plan;
  std::vector<Stage> stages;  // stages of this rank, by chunk
  std::shared_ptr<torch::nn::Module> module = std::make_shared<torch::nn::Module>("PipelineStage");
  std::array<Messages, 2> messages;  // one for steps, one for passes without gradients
  std::int64_t steps = 0;
};

Pipeline::State::State(const std::vector<NamedLayer>& layers, Communicator communicator, const PipelineOptions& opts)
    : comm(std::move(communicator)), options(opts), messages{Messages(comm), Messages(comm)} {
  if (!comm) raise(ErrorCode::InvalidArgument, "Pipeline: the communicator is empty");
  layout = {options.schedule, comm.size(), options.micro_batches, options.chunks};
  std::vector<std::string> lines = {
      fmt::format("options schedule={}, micro_batches={}, chunks={}, cuts=[{}], costs=[{}], seed={}",
                  pipeline::to_string(options.schedule), options.micro_batches, options.chunks,
                  fmt::join(options.cuts, ", "), fmt::join(options.costs, ", "),
                  options.seed ? std::to_string(*options.seed) : "none"),
      fmt::format("{} layers", layers.size())};
  for (const NamedLayer& layer : layers) lines.push_back("layer " + layer.name);
  step::require_same_on_all_ranks(*step::ranks_of(comm), lines, "Pipeline");
  check(layout);
  if (3.0 * 4 * layout.stages() * layout.micro_batches > std::numeric_limits<int>::max()) {
    raise(ErrorCode::InvalidArgument, "Pipeline: {} stages of {} micro-batches are more than there are tags for",
          layout.stages(), layout.micro_batches);
  }
  choose_cuts(layers);
  keep_layers(layers);
}

/// True on all ranks if a sample is given. Rank 0 needs it; the others may have one, too.
bool Pipeline::State::any_sample() {
  std::array<std::int64_t, 2> given = {options.sample.defined() ? 1 : 0,
                                       options.sample.defined() && comm.rank() == 0 ? 1 : 0};
  comm.all_reduce(std::span(given), {.op = ReduceOp::Max}).wait();
  if (given[0] > given[1]) {
    raise(ErrorCode::InvalidArgument, "Pipeline: a sample is given, and not on rank 0, which measures with it");
  }
  return given[0] > 0;
}

void Pipeline::State::choose_cuts(const std::vector<NamedLayer>& layers) {
  const auto stage_count = static_cast<std::size_t>(layout.stages());
  const bool measured = any_sample();
  std::vector<double> costs(layers.size(), 1);
  if (!options.cuts.empty()) {
    if (!options.costs.empty() || measured) {
      raise(ErrorCode::InvalidArgument, "Pipeline: cuts and costs, or a sample, are given -- give one");
    }
    cuts = options.cuts;
    std::int64_t before = 0;
    for (const std::int64_t cut : cuts) {
      if (cut <= std::exchange(before, cut) || cut >= static_cast<std::int64_t>(layers.size())) {
        raise(ErrorCode::InvalidArgument, "Pipeline: cuts [{}] of {} layers -- they ascend, and no stage is empty",
              fmt::join(cuts, ", "), layers.size());
      }
    }
    if (cuts.size() + 1 != stage_count) {
      raise(ErrorCode::InvalidArgument, "Pipeline: {} cuts make {} stages, and {} ranks with {} chunks have {}",
            cuts.size(), cuts.size() + 1, layout.ranks, layout.chunks, stage_count);
    }
  } else {
    if (!options.costs.empty()) {
      if (measured || options.costs.size() != layers.size()) {
        raise(ErrorCode::InvalidArgument, "Pipeline: {} costs of {} layers{}", options.costs.size(), layers.size(),
              measured ? ", and a sample to measure them with" : "");
      }
      costs = options.costs;
    } else {
      std::exception_ptr failed;  // error of a layer; it is sent to the other ranks, which would wait otherwise
      try {
        if (comm.rank() == 0 && options.sample.defined()) costs = measured_costs(layers, options.sample);
      } catch (...) {
        failed = std::current_exception();
        costs.assign(layers.size(), std::numeric_limits<double>::quiet_NaN());
      }
      comm.broadcast(std::span(costs)).wait();
      if (failed) std::rethrow_exception(failed);
      if (std::isnan(costs.front()))
        raise(ErrorCode::Aborted, "Pipeline: a layer has failed on rank 0, which measures them -- its error says why");
    }
    cuts = pipeline::cut_by_cost(costs, layout.stages());
  }
  options.sample.reset();
  plan = describe(layout, costs, cuts);
  if (comm.rank() == 0) log::info("plan", "{}", plan);
}

void Pipeline::State::keep_layers(const std::vector<NamedLayer>& layers) {
  std::vector<int> stage_of;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const auto number = static_cast<std::int64_t>(i);
    stage_of.push_back(static_cast<int>(std::upper_bound(cuts.begin(), cuts.end(), number) - cuts.begin()));
  }
  std::vector<torch::nn::AnyModule> own = made_layers(comm, layers, stage_of, options.seed);
  auto next = own.begin();
  for (std::size_t i = 0; i < layers.size(); ++i) {
    if (stage_of[i] % layout.ranks != comm.rank()) continue;
    if (stages.empty() || stages.back().number != stage_of[i]) {
      stages.push_back({stage_of[i], static_cast<std::int64_t>(i), {}});
    }
    module->register_module(layers[i].name, next->ptr());
    stages.back().layers.push_back(std::move(*next++));
  }
}

// ------------------------------------------------------------------------------------------------- a pass

/// Runs one step, or one pass without gradients.
class Pipeline::Run {
 public:
  enum class Pass : std::uint8_t { Step, Loss, Output };

  Run(State& state, Pass pass, const at::Tensor& input, const at::Tensor& target)
      : state_(state),
        comm_(state.comm),
        pass_(pass),
        messages_(state.messages[pass == Pass::Step ? 0 : 1]),
        device_(device_of(*state.module)),
        actions_(pass == Pass::Step ? actions_of(state.layout, state.comm.rank())
                                    : forwards_of(state.layout, state.comm.rank())),
        input_(input),
        target_(target) {
    if (pass == Pass::Step && state.options.seed) states_.emplace(device_.value_or(at::Device(at::kCPU)));
  }

  void all() {
    std::string where = "the batch";
    try {
      cut_batches();
      for (next_ = 0; next_ < actions_.size(); ++next_) {
        const Action& action = actions_[next_];
        expect_ahead();
        where = fmt::format("stage {}, {} of micro-batch {}", action.stage, to_string(action.kind), action.micro_batch);
        perform(action);
      }
      messages_.finish();
      share_loss();
    } catch (const Error& error) {
      const bool over = error.code() == ErrorCode::PeerLost || error.code() == ErrorCode::Aborted ||
                        error.code() == ErrorCode::Timeout;
      if (!over) fail(where, error.what());
      messages_.drop();
      throw;
    } catch (const c10::Error& error) {
      fail(where, error.what_without_backtrace());
    } catch (const std::exception& error) {
      fail(where, error.what());
    }
  }
  double loss() const noexcept { return loss_; }
  at::Tensor output() const { return outputs_.empty() ? at::Tensor() : at::cat(outputs_); }

 private:
  /// State of a micro-batch in a stage, from its forward to the end of its backward.
  struct Alive {
    at::Tensor input, output;
    std::int64_t rows = 0;  // rows of the input's micro-batch
    SplitBackward split;
  };

  bool trains() const noexcept { return pass_ == Pass::Step; }
  bool is_first(const Action& action) const noexcept { return action.stage == 0; }
  bool is_last(const Action& action) const noexcept { return action.stage == state_.layout.stages() - 1; }
  struct Route {
    int number, peer;
  };
  /// Route of the message that the action waits for, or that it sends.
  Route route(const Action& action, bool sends) const {
    const bool forward = action.kind == Kind::Forward;
    const int other = action.stage + (forward == sends ? 1 : -1);
    const int direction = (forward ? 0 : 1) + (trains() ? 0 : 2);
    const int edge = direction * state_.layout.stages() + std::min(action.stage, other);
    return {edge * state_.layout.micro_batches + action.micro_batch, other % state_.layout.ranks};
  }
  bool receives(const Action& action) const {
    if (action.kind == Kind::Forward) return !is_first(action);
    return action.kind != Kind::BackwardWeight && !is_last(action);
  }

  void cut_batches() {
    const auto cut = [&](const at::Tensor& batch, const char* what) {
      const std::int64_t parts = state_.layout.micro_batches;
      if (!batch.defined() || batch.dim() == 0 || batch.size(0) == 0) {
        raise(ErrorCode::InvalidArgument, "the {} is {}, and is cut into {} micro-batches", what,
              batch.defined() ? fmt::format("of [{}]", fmt::join(batch.sizes().vec(), ", ")) : "undefined", parts);
      }
      return batch.detach().tensor_split(parts);
    };
    if (comm_.rank() == 0) inputs_ = cut(input_, "input");
    if (!state_.is_last() || pass_ == Pass::Output) return;
    if (!state_.options.loss) raise(ErrorCode::InvalidArgument, "no loss in the options on this, the last rank");
    targets_ = cut(target_, "target");
    with_rows_ = std::min<std::int64_t>(state_.layout.micro_batches, target_.size(0));
  }

  /// Starts the receives of this action and of the next two that have a receive.
  void expect_ahead() {
    for (; ahead_ < actions_.size() && (ahead_ <= next_ || waiting_ < 3); ++ahead_) {
      const Action& action = actions_[ahead_];
      if (!receives(action)) continue;
      const auto [number, peer] = route(action, false);
      if (peer == comm_.rank()) continue;
      messages_.expect(number, peer, device_);
      ++waiting_;
    }
  }
  Messages::Received take(const Action& action) {
    const auto [number, peer] = route(action, false);
    if (peer == comm_.rank()) return std::move(here_.extract(number).mapped());
    --waiting_;
    return messages_.take(number, peer, device_);
  }
  void send(const Action& action, const at::Tensor& tensor, bool takes_gradient, std::int64_t rows) {
    const auto [number, peer] = route(action, true);
    if (peer != comm_.rank()) return messages_.send(number, peer, tensor, takes_gradient, rows);
    here_[number] = {tensor.defined() ? tensor.detach() : tensor, takes_gradient, rows};
  }

  void perform(const Action& action) {
    const auto key = std::pair(action.stage, action.micro_batch);
    if (action.kind == Kind::Forward) {
      const at::AutoGradMode grad_mode(trains());
      forward(action, alive_[key]);
      if (!trains()) alive_.erase(key);
    } else {
      backward(action, alive_.at(key));
      if (action.kind != Kind::BackwardInput) alive_.erase(key);
    }
  }

  void forward(const Action& action, Alive& alive) {
    const auto micro_batch = static_cast<std::size_t>(action.micro_batch);
    if (is_first(action)) {
      alive.input = std::exchange(inputs_[micro_batch], {});
      alive.rows = alive.input.size(0);
      if (alive.rows == 0) alive.input.reset();  // all stages skip an empty micro-batch
    } else {
      Messages::Received received = take(action);
      alive.input = std::move(received.tensor);
      alive.rows = received.rows;
      if (received.takes_gradient && trains()) alive.input.requires_grad_(true);
    }
    if (is_last(action) && pass_ != Pass::Output && alive.rows != targets_[micro_batch].size(0)) {
      raise(ErrorCode::InvalidArgument,
            "the micro-batch has {} rows of the input, and {} of the target -- both need the same number of rows",
            alive.rows, targets_[micro_batch].size(0));
    }
    if (!alive.input.defined()) {
      if (!is_last(action)) send(action, {}, false, 0);
      return;
    }
    Stage& stage = state_.stages[static_cast<std::size_t>(action.stage / state_.layout.ranks)];
    alive.output = passed_on(alive.input);
    std::int64_t number = stage.first_layer;
    for (torch::nn::AnyModule& layer : stage.layers) {
      if (states_) {
        states_->seed(mixed_seed(*state_.options.seed, {state_.steps, action.micro_batch, number}));
      }
      alive.output = layer.forward(alive.output);
      if (!alive.output.defined()) raise(ErrorCode::InvalidArgument, "layer {} returned no tensor", number);
      ++number;
    }
    if (!is_last(action)) {
      send(action, alive.output, alive.output.requires_grad(), alive.rows);
    } else if (pass_ == Pass::Output) {
      outputs_.push_back(alive.output);
    } else {
      const at::Tensor loss = state_.options.loss(alive.output, targets_[micro_batch]);
      if (!loss.defined() || loss.numel() != 1) {
        raise(ErrorCode::InvalidArgument, "the loss is no scalar -- let it be the mean, or the sum, over its rows");
      }
      if (trains() && !loss.requires_grad()) {  // throws the same error as autograd in one process
        raise(ErrorCode::InvalidArgument,
              "the loss does not require a gradient, so that nothing would be trained -- compute it from the model's "
              "output with gradients on: no NoGradGuard, detach() or item() in the loss");
      }
      outputs_.push_back(loss.detach());
      if (trains()) alive.output = loss / with_rows_;
    }
  }

  void backward(const Action& action, Alive& alive) {
    if (action.kind == Kind::BackwardWeight) return alive.split.of_parameters();
    at::Tensor gradient;
    if (!is_last(action)) gradient = take(action).tensor;
    at::Tensor of_input;
    if (alive.output.requires_grad() && (is_last(action) || gradient.defined())) {
      if (action.kind == Kind::BackwardInput) {
        of_input = alive.split.of_input(alive.output, gradient, alive.input);
      } else {
        torch::autograd::backward({alive.output}, {gradient});
        of_input = alive.input.grad();
      }
    }
    if (!is_first(action)) send(action, of_input, false, 0);
  }

  void share_loss() {
    if (pass_ == Pass::Output) return;
    if (state_.is_last()) {
      for (const at::Tensor& loss : outputs_) loss_ += loss.item<double>();
      loss_ /= static_cast<double>(with_rows_);
    }
    comm_.broadcast(std::span(&loss_, 1), {.root = comm_.size() - 1}).wait();
  }

  [[noreturn]] void fail(const std::string& where, const char* why) {
    ErrorContext context;
    context.rank = comm_.rank();
    context.host = comm_.host();
    context.operation = "Pipeline";
    context.cause = why;
    const std::string text =
        fmt::format("Pipeline: rank {} (host {}), {} -- {}", comm_.rank(), comm_.host(), where, why);
    comm_.abort(text);
    messages_.drop();
    throw Error(ErrorCode::Aborted, text, context);
  }

  State& state_;
  Communicator& comm_;
  const Pass pass_;
  Messages& messages_;
  const std::optional<at::Device> device_;
  const std::vector<Action> actions_;
  const at::Tensor input_, target_;
  std::optional<GeneratorStates> states_;
  std::vector<at::Tensor> inputs_, targets_, outputs_;  // each by micro-batch; outputs may be losses
  std::map<std::pair<int, int>, Alive> alive_;          // by stage and micro-batch
  std::map<int, Messages::Received> here_;              // messages between stages of this rank
  std::size_t next_ = 0, ahead_ = 0;                    // action under way, and first one whose receive is not started
  int waiting_ = 0;                                     // number of started receives
  std::int64_t with_rows_ = 0;                          // number of micro-batches whose target has rows
  double loss_ = 0;
};

// ------------------------------------------------------------------------------------------------- interface

namespace {

std::vector<NamedLayer> layers_of(const torch::nn::Sequential& model) {
  if (model.is_empty()) raise(ErrorCode::InvalidArgument, "Pipeline: the model is empty");
  std::vector<NamedLayer> layers;
  const auto names = model->named_children().keys();
  for (const torch::nn::AnyModule& layer : *model) {
    layers.push_back({names.at(layers.size()), [layer] { return layer; }, true});
  }
  return layers;
}

std::vector<NamedLayer> layers_of(const std::vector<PipelineLayer>& functions) {
  std::vector<NamedLayer> layers;
  for (const PipelineLayer& layer : functions) {
    layers.push_back({std::to_string(layers.size()), [layer] { return layer.make(); }, false});
  }
  return layers;
}

}  // namespace

Pipeline::Pipeline(const torch::nn::Sequential& model, Communicator comm, const PipelineOptions& options)
    : state_(std::make_unique<State>(layers_of(model), std::move(comm), options)) {}
Pipeline::Pipeline(const std::vector<PipelineLayer>& layers, Communicator comm, const PipelineOptions& options)
    : state_(std::make_unique<State>(layers_of(layers), std::move(comm), options)) {}
Pipeline::~Pipeline() = default;
Pipeline::Pipeline(Pipeline&&) noexcept = default;

double Pipeline::step(const at::Tensor& input, const at::Tensor& target) {
  Run run(*state_, Run::Pass::Step, input, target);
  run.all();
  ++state_->steps;
  return run.loss();
}

double Pipeline::evaluate(const at::Tensor& input, const at::Tensor& target) {
  Run run(*state_, Run::Pass::Loss, input, target);
  run.all();
  return run.loss();
}

at::Tensor Pipeline::forward(const at::Tensor& input) {
  Run run(*state_, Run::Pass::Output, input, {});
  run.all();
  return run.output();
}

const std::shared_ptr<torch::nn::Module>& Pipeline::module() const noexcept { return state_->module; }
std::vector<at::Tensor> Pipeline::parameters() const { return state_->module->parameters(); }
torch::OrderedDict<std::string, at::Tensor> Pipeline::named_parameters() const {
  return state_->module->named_parameters();
}
void Pipeline::zero_grad() {
  for (at::Tensor& parameter : state_->module->parameters()) parameter.mutable_grad().reset();
}
void Pipeline::train(bool on) { state_->module->train(on); }
void Pipeline::eval() { state_->module->eval(); }
const std::vector<std::int64_t>& Pipeline::cuts() const noexcept { return state_->cuts; }
const std::string& Pipeline::plan() const noexcept { return state_->plan; }
std::int64_t Pipeline::steps() const noexcept { return state_->steps; }
void Pipeline::set_steps(std::int64_t steps) { state_->steps = steps; }

}  // namespace cohort::nn
