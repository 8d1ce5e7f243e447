// A rank over C++'s wrappers: runs programs that the suite has generated, given as JSON, a line each, on stdin, and
// answers with a line on stdout. What a program means is said by writer.py and source.py; cpp.py makes of each program
// one that has nothing but what this knows.
#include <cohort/error.h>
#include <cohort/init.h>
#include <cohort/torch/comm_hooks.h>
#include <cohort/torch/local_sgd.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/sharded.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/utils/clip_grad.h>

#include <ATen/CPUGeneratorImpl.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace {

using cohort::nn::DistributedDataParallel;
using nlohmann::json;

constexpr std::int64_t kFeatures = 8;

struct GateImpl final : torch::nn::Module {
  GateImpl() : inner(register_module("inner", torch::nn::Linear(kFeatures, kFeatures))) {}
  at::Tensor forward(const at::Tensor& x) { return on ? x + inner(x) : x; }
  torch::nn::Linear inner;
  bool on = true;
};
TORCH_MODULE(Gate);

struct ScaleImpl final : torch::nn::Module {
  ScaleImpl()
      : by(register_parameter("by", at::ones({}, at::dtype(c10::get_default_dtype_as_scalartype())))),
        calls(register_buffer("calls", at::zeros({}, at::kLong))),
        mean(register_buffer("mean", at::zeros({kFeatures}, at::dtype(c10::get_default_dtype_as_scalartype())))) {}
  at::Tensor forward(const at::Tensor& x) {
    if (is_training()) {
      calls += 1;
      mean.lerp_(x.detach().mean(0).to(mean.scalar_type()), 0.1);
    }
    return (x - 0.1 * mean) * by;
  }
  at::Tensor by, calls, mean;
};
TORCH_MODULE(Scale);

struct NetImpl final : torch::nn::Module {
  explicit NetImpl(const json& pieces) {
    for (const json& piece : pieces) {
      const std::string name = piece.at("name"), kind = piece.at("kind");
      if (kind == "Linear") {
        add(name, torch::nn::Linear(kFeatures, kFeatures));
      } else if (kind == "BatchNorm") {
        add(name, torch::nn::BatchNorm1d(kFeatures));
      } else if (kind == "LayerNorm") {
        add(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({kFeatures})));
      } else if (kind == "Gate") {
        add(name, Gate());
      } else if (kind == "Scale") {
        add(name, Scale());
      } else if (kind == "Tanh") {
        calls.emplace_back([](const at::Tensor& x) { return x.tanh(); });
      } else {
        throw std::invalid_argument("no piece " + kind);
      }
    }
  }
  template <class Holder>
  void add(const std::string& name, Holder piece) {
    register_module(name, piece);
    calls.emplace_back([piece](const at::Tensor& x) mutable { return piece(x); });
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& call : calls) x = call(x);
    return x;
  }
  /// Undefined: a piece without parameters.
  std::shared_ptr<torch::nn::Module> piece(const std::string& name) const {
    const auto* found = named_children().find(name);
    return found == nullptr ? nullptr : *found;
  }
  std::vector<std::function<at::Tensor(const at::Tensor&)>> calls;
};
TORCH_MODULE(Net);

cohort::WireFormat wire_format_of(const json& name) {
  using cohort::WireFormat;
  if (name.is_null()) return WireFormat::None;
  return name == "bfloat16" ? WireFormat::BFloat16 : name == "int8" ? WireFormat::Int8 : WireFormat::Int4;
}

template <class T>
T option(const json& options, const char* name, T otherwise) {
  return options.contains(name) && !options[name].is_null() ? options[name].get<T>() : otherwise;
}

class Program {
 public:
  Program(const json& program, cohort::Communicator comm)
      : p_(program), o_(program.at("options")), method_(program.at("method")), comm_(std::move(comm)) {
    rank_ = replica_ = comm_.rank();
    first_ = rank_;
    last_ = rank_ + 1;
    if (const int parts = p_.value("virtual", 0); parts > 0) {
      const auto begin = [&](int rank) { return rank * (parts / comm_.size()) + std::min(rank, parts % comm_.size()); };
      first_ = begin(rank_);
      last_ = begin(rank_ + 1);
    }
    divided_ = method_ == "sharded" && o_.at("sharding") != "optimizer";
    dtype_ = p_.at("dtype") == "float64" ? at::kDouble : at::kFloat;
    torch::set_default_dtype(at::scalarTypeToTypeMeta(dtype_));
    const auto seed = p_.at("seed").get<std::int64_t>() % 1000;
    torch::manual_seed(static_cast<std::uint64_t>(seed + (p_.at("seeded_by_rank") ? 100 * rank_ : 0)));
    net_ = Net(p_.at("pieces"));
    for (const json& piece : p_.at("pieces")) {
      const auto module = net_->piece(piece.at("name"));
      if (piece.value("frozen", false) && module) freeze(*module, true);
      if (auto* gate = dynamic_cast<GateImpl*>(module.get()); gate != nullptr && piece.contains("off"))
        gate->on = piece["off"] == "nobody" || (piece["off"] == "rank" && rank_ != comm_.size() - 1);
    }
    for (const at::Tensor& one : net_->parameters()) {
      if (p_.at("optimizer").at("groups") != "trained" || one.requires_grad()) held_.push_back(one);
    }
    if (is_local()) {
      make_optimizer();
      wrap_local();
    } else {
      wrap();
      make_optimizer();
    }
    for (const auto& [name, tensor] : state()) snapshot_.emplace_back(tensor, tensor.detach().clone());
  }

  /// As far as it comes.
  void run() {
    for (const json& event : p_.at("events")) {
      if (event.at("kind") == "step") {
        step(event);
      } else {
        change(event);
      }
    }
    if (is_local()) {
      local_->synchronize();
      record();
    }
  }
  json states = json::array(), gradients = json::array();

 private:
  bool is_local() const { return method_ == "local_sgd" || method_ == "diloco"; }

  static void freeze(torch::nn::Module& module, bool frozen) {
    for (at::Tensor& one : module.parameters()) one.set_requires_grad(!frozen);
  }

  // ------------------------------------------------------------------------------------------------ making

  void wrap() {
    cohort::nn::DistributedDataParallelOptions options;
    options.bucket_bytes = option<std::size_t>(o_, "bucket_bytes", options.bucket_bytes);
    options.first_bucket_bytes = option<std::size_t>(o_, "first_bucket_bytes", options.first_bucket_bytes);
    options.broadcast_buffers = option(o_, "broadcast_buffers", true);
    options.compare_parameters_every = option<std::int64_t>(o_, "compare_parameters_every", 0);
    options.virtual_ranks = p_.value("virtual", 0);
    options.wire_format = wire_format_of(o_.value("wire_format", json()));
    if (o_.contains("error_feedback") && !o_["error_feedback"].is_null())
      options.error_feedback = o_["error_feedback"].get<bool>();
    if (o_.value("non_finite", "") == "raise") options.non_finite = cohort::nn::NonFinite::Raise;
    if (o_.value("weighted", "") == "samples")
      options.samples = [](const std::vector<at::Tensor>& inputs) { return inputs.at(0).size(0); };
    using cohort::nn::Sharding;
    const std::string sharding = method_ == "sharded" ? o_.at("sharding").get<std::string>() : "";
    options.sharding = sharding == "optimizer"    ? Sharding::Optimizer
                       : sharding == "gradients"  ? Sharding::Gradients
                       : sharding == "parameters" ? Sharding::Parameters
                                                  : Sharding::None;
    model_ = std::make_unique<DistributedDataParallel<NetImpl>>(net_, comm_, options);
    const std::string hook = o_.value("hook", "");
    if (hook == "allreduce") model_->register_comm_hook(cohort::nn::allreduce_hook());
    if (hook == "bf16_compress") model_->register_comm_hook(cohort::nn::bf16_compress_hook());
    if (hook == "fp16_compress") model_->register_comm_hook(cohort::nn::fp16_compress_hook());
    if (hook != "powerSGD") return;
    const bool feedback = o_["feedback"].is_null() || o_["feedback"].get<bool>();
    model_->register_comm_hook(
        cohort::nn::power_sgd_hook(std::make_shared<cohort::nn::PowerSGDState>(cohort::nn::PowerSGDOptions{
            .matrix_approximation_rank = 1, .start_powerSGD_iter = 2, .use_error_feedback = feedback})));
  }

  void wrap_local() {
    if (method_ == "local_sgd") {
      auto local = std::make_unique<cohort::optim::LocalSGD>(
          *net_, *optimizer_, comm_,
          cohort::optim::LocalSGDOptions{.sync_every = o_.at("sync_every"),
                                         .warm_up_steps = option<std::int64_t>(o_, "warm_up_steps", 0)});
      local_ = local.get();
      local_sgd_ = std::move(local);
      return;
    }
    cohort::optim::DiLoCoOptions options;
    options.sync_every = o_.at("sync_every");
    options.fragments = o_.at("fragments");
    options.fragment_sync_delay = o_.at("fragment_sync_delay");
    options.fragment_update_alpha = o_.at("fragment_update_alpha");
    options.outer_learning_rate = o_.at("outer_learning_rate");
    options.outer_momentum = o_.at("outer_momentum");
    options.nesterov = options.outer_momentum > 0;
    diloco_ = std::make_unique<cohort::optim::DiLoCo>(*net_, *optimizer_, comm_, options);
    local_ = diloco_.get();
  }

  template <class Optimizer, class Options>
  void make(const Options& options) {
    std::vector<torch::optim::OptimizerParamGroup> groups;
    if (p_.at("optimizer").at("groups") == "two") {
      std::vector<at::Tensor> wide, narrow;
      for (const at::Tensor& one : held_) (one.dim() > 1 ? wide : narrow).push_back(one);
      groups.emplace_back(wide);
      auto other = std::make_unique<Options>(options);
      other->lr(0.02);
      groups.emplace_back(narrow, std::move(other));
    } else {
      groups.emplace_back(held_);
    }
    at_rate_ = [this, options](const std::vector<at::Tensor>& of, double rate) {
      auto own = std::make_unique<Options>(options);
      own->lr(rate);
      const torch::optim::OptimizerParamGroup group(of, std::move(own));
      if (auto* sharded = dynamic_cast<cohort::optim::Sharded<Optimizer>*>(optimizer_.get()); sharded != nullptr) {
        sharded->add_param_group(group);
      } else {
        optimizer_->add_param_group(group);
      }
    };
    if (method_ == "sharded") {
      auto sharded = std::make_unique<cohort::optim::Sharded<Optimizer>>(*model_, groups, options);
      clip_ = [one = sharded.get()] { one->clip_grad_norm(0.5); };
      clear_ = [one = sharded.get()] { one->zero_grad(); };
      optimizer_ = std::move(sharded);
      return;
    }
    optimizer_ = std::make_unique<Optimizer>(groups, options);
    clip_ = [this] { torch::nn::utils::clip_grad_norm_(net_->parameters(), 0.5); };
    clear_ = [this] { optimizer_->zero_grad(p_.at("set_to_none").get<bool>()); };
  }

  void make_optimizer() {
    const json& given = p_.at("optimizer").at("options");
    const std::string kind = p_.at("optimizer").at("kind");
    const double rate = given.at("lr");
    const auto set = [&](const char* name, const auto& use) {
      if (given.contains(name)) use(given[name]);
    };
    const auto common = [&](auto& options) {
      set("weight_decay", [&](const json& value) { options.weight_decay(value.get<double>()); });
      if constexpr (requires { options.eps(1.0); })
        set("eps", [&](const json& value) { options.eps(value.get<double>()); });
      if constexpr (requires { options.amsgrad(true); })
        set("amsgrad", [&](const json& value) { options.amsgrad(value.get<bool>()); });
    };
    if (kind == "SGD") {
      torch::optim::SGDOptions options(rate);
      set("momentum", [&](const json& value) { options.momentum(value.get<double>()); });
      set("dampening", [&](const json& value) { options.dampening(value.get<double>()); });
      set("nesterov", [&](const json& value) { options.nesterov(value.get<bool>()); });
      common(options);
      make<torch::optim::SGD>(options);
    } else if (kind == "Adam") {
      torch::optim::AdamOptions options(rate);
      common(options);
      make<torch::optim::Adam>(options);
    } else if (kind == "AdamW") {
      torch::optim::AdamWOptions options(rate);
      common(options);
      make<torch::optim::AdamW>(options);
    } else {
      torch::optim::RMSpropOptions options(rate);
      set("centered", [&](const json& value) { options.centered(value.get<bool>()); });
      common(options);
      make<torch::optim::RMSprop>(options);
    }
  }

  // ------------------------------------------------------------------------------------------------ what it has

  static void visit(const torch::nn::Module& module, const std::string& before,
                    std::vector<std::pair<std::string, at::Tensor>>& all) {
    for (const auto& item : module.named_parameters(false)) all.emplace_back(before + item.key(), item.value());
    for (const auto& item : module.named_buffers(false)) all.emplace_back(before + item.key(), item.value());
    for (const auto& item : module.named_children()) visit(*item.value(), before + item.key() + ".", all);
  }
  /// In the order of Python's state_dict.
  std::vector<std::pair<std::string, at::Tensor>> state() const {
    std::vector<std::pair<std::string, at::Tensor>> all;
    visit(*net_, "", all);
    return all;
  }

  static std::string hex(const at::Tensor& tensor) {
    const at::Tensor wide = tensor.detach().to(at::kDouble).contiguous();
    const auto* bytes = static_cast<const unsigned char*>(wide.data_ptr());
    std::string text;
    for (std::size_t i = 0; i < wide.nbytes(); ++i) {
      text += "0123456789abcdef"[bytes[i] >> 4];
      text += "0123456789abcdef"[bytes[i] & 15];
    }
    return text;
  }

  void record() {
    json what = json::array();
    std::string values;
    const auto parameters = net_->named_parameters();
    for (const auto& [name, tensor] : state()) {
      const bool whole = tensor.scalar_type() == at::kLong;
      what.push_back({name, tensor.numel(),
                      whole                                 ? "int64"
                      : tensor.scalar_type() == at::kDouble ? "float64"
                                                            : "float32",
                      parameters.contains(name)});
      values += hex(tensor);
    }
    states.push_back({{"what", std::move(what)}, {"values", std::move(values)}});
  }

  void record_gradients() {
    if (divided_ || is_local() || !p_.at("lossy")) return;
    json all = json::object();
    for (const auto& item : net_->named_parameters()) {
      const at::Tensor& gradient = item.value().grad();
      all[item.key()] = gradient.defined() ? json({gradient.sizes().vec(), hex(gradient)}) : json();
    }
    gradients.push_back(std::move(all));
  }

  // ------------------------------------------------------------------------------------------------ a step

  void draw(double at) {
    const auto seed = static_cast<std::uint64_t>(static_cast<std::int64_t>(at * 10) * 100 + replica_);
    const at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    const auto count = p_.at("sizes").at(static_cast<std::size_t>(replica_)).get<std::int64_t>();
    const at::Tensor both = at::randn({2, count, kFeatures}, generator, at::dtype(at::kDouble)).to(dtype_);
    x_ = both[0];
    y_ = both[1];
  }

  at::Tensor forward(const at::Tensor& x) {
    if (how_ == "direct" || is_local()) return net_(x);
    if (o_.value("weighted", "") == "set_sample_count") model_->set_sample_count(x.size(0));
    return (*model_)(x);
  }

  at::Tensor loss_of(const at::Tensor& out) const { return (out - y_).pow(2).mean(); }

  void backward(const at::Tensor& loss, bool retain = false) {
    try {
      loss.backward({}, retain);
    } catch (const cohort::NonFiniteError&) {
      if (o_.value("non_finite", "") != "raise") throw;
    }
    record_gradients();
  }

  void freeze_piece(const json& event) {
    if (const auto piece = net_->piece(event.at("piece"))) freeze(*piece, true);
  }

  void passes(const json& event) {
    const int count = event.value("passes", 1);
    for (int number = 0; number < count; ++number) {
      if (number > 0) draw(t_ + 0.1 * number);
      if (number + 1 < count && !is_local()) {
        const cohort::nn::NoSyncGuard guard = model_->no_sync();
        (loss_of(forward(x_)) / count).backward();
        continue;
      }
      at::Tensor out = forward(x_), loss = loss_of(out);
      if (count > 1) loss = loss / count;
      if (how_ == "two_forwards") loss = loss + loss_of(forward(x_ * 0.5));
      if (how_ == "new_output") loss = loss + (out.detach() * out).mean();
      if (how_ == "freeze_between") freeze_piece(event);
      if (how_ == "retain") backward(loss, true);
      backward(loss);
      if (how_ == "twice") backward(loss_of(forward(x_ * 0.5)));
    }
  }

  void step(const json& event) {
    how_ = event.at("how");
    if (how_ == "zero_before") clear_or_default();
    for (replica_ = first_; replica_ < last_; ++replica_) train(event);
    replica_ = rank_;
    if (how_ == "no_batch") {
      optimizer_->step();
    } else {
      if (how_ == "freeze_after") freeze_piece(event);
      update(event);
    }
    if (how_ != "keep") clear_();
    record();
    ++t_;
  }

  /// One batch: that of the rank, or of one of its virtual ranks.
  void train(const json& event) {
    const bool here = event.contains("rank") && event["rank"] == replica_;
    draw(t_);
    if ((how_ == "nan" || how_ == "inf") && here)
      x_[0][0] = how_ == "nan" ? std::nan("") : std::numeric_limits<double>::infinity();
    if (how_ == "validate") {
      net_->eval();
      {
        const at::NoGradGuard no_grad;
        is_local() ? net_(x_) : (*model_)(x_);
      }
      net_->train(training_);
    }
    if (how_ != "no_batch") {
      passes(event);
      return;
    }
    if (here) {
      model_->step_without_samples();
    } else {
      loss_of(forward(x_)).backward();
    }
    record_gradients();
  }

  /// As without an argument.
  void clear_or_default() { method_ == "sharded" ? clear_() : optimizer_->zero_grad(); }

  void update(const json& event) {
    const auto piece = event.contains("piece") ? net_->piece(event["piece"]) : nullptr;
    if (how_ == "clip") clip_();
    if (how_ == "clip_value" && !divided_) torch::nn::utils::clip_grad_value_(net_->parameters(), 0.01);
    if ((how_ == "drop_gradient" || how_ == "grad_zeros") && !divided_ && piece) {
      for (at::Tensor& one : piece->parameters())
        one.mutable_grad() = how_ == "drop_gradient" ? at::Tensor() : at::zeros_like(one);
    }
    if (how_ != "skip") optimizer_->step();
    if (how_ == "step_twice" && !divided_) {
      after_step();
      optimizer_->step();
    }
    after_step();
    if (how_ != "clip_weights") return;
    const at::NoGradGuard no_grad;
    for (at::Tensor& one : net_->parameters()) one.clamp_(-0.5, 0.5);
  }

  void after_step() {
    if (!is_local()) return;
    o_.value("weighted", "").empty() ? local_->step() : local_->step(static_cast<double>(x_.size(0)));
  }

  // ------------------------------------------------------------------------------------------------ between steps

  void written() {
    if (is_local()) local_->parameters_written();
    if (method_ == "sharded") model_->parameters_written();
  }

  void change(const json& event) {
    const std::string kind = event.at("kind");
    const auto piece = event.contains("piece") ? net_->piece(event["piece"]) : nullptr;
    const bool here = event.contains("rank") && event["rank"] == rank_;
    const bool shared = o_.value("sharding", "") == "parameters";
    const at::NoGradGuard no_grad;
    if ((kind == "freeze" || kind == "thaw") && piece) freeze(*piece, kind == "freeze");
    if (kind == "add_group" || (kind == "thaw" && piece && event.at("optimizer") == "add_group")) add_group();
    if (kind == "rate" || (kind == "rate_one" && here)) {
      for (auto& group : optimizer_->param_groups()) group.options().set_lr(group.options().get_lr() * 0.5);
    }
    if (kind == "eval") net_->train(training_ = !training_);
    if (auto* gate = dynamic_cast<GateImpl*>(piece.get()); kind == "gate" && gate != nullptr)
      gate->on = rank_ != event.at("rank").get<int>();
    if (kind == "reassign_data" && piece) {
      for (at::Tensor& one : piece->parameters()) one.set_data(one.detach().clone());
    }
    if (kind == "reload") {
      if (shared) comm_.barrier().wait();
      for (auto& [tensor, value] : snapshot_) tensor.copy_(value);
      if (!event.value("unsaid", false)) written();
    }
    if (kind == "write" && !shared) {
      for (at::Tensor& one : net_->parameters()) one.mul_(0.9);
      written();
    }
    if (kind == "set_gradients" && method_ != "sharded") {
      for (at::Tensor& one : net_->parameters()) one.mutable_grad() = at::full_like(one, 0.01);
    }
  }

  void add_group() {
    std::vector<at::Tensor> fresh;
    for (const at::Tensor& one : net_->parameters()) {
      const auto same = [&](const at::Tensor& other) { return one.is_same(other); };
      if (one.requires_grad() && std::ranges::none_of(held_, same)) fresh.push_back(one);
    }
    if (fresh.empty()) return;
    held_.insert(held_.end(), fresh.begin(), fresh.end());
    at_rate_(fresh, 0.02);
  }

  const json& p_;
  const json& o_;
  const std::string method_;
  cohort::Communicator comm_;
  int rank_ = 0;
  int first_ = 0, last_ = 0;  // the rank's virtual ranks, or the rank
  int replica_ = 0;           // of them, the one that is trained
  bool divided_ = false, training_ = true;
  at::ScalarType dtype_ = at::kFloat;
  Net net_{nullptr};
  std::vector<at::Tensor> held_;
  std::unique_ptr<DistributedDataParallel<NetImpl>> model_;
  std::unique_ptr<torch::optim::Optimizer> optimizer_;
  std::unique_ptr<cohort::optim::LocalSGD> local_sgd_;
  std::unique_ptr<cohort::optim::DiLoCo> diloco_;
  cohort::optim::LocalSteps* local_ = nullptr;
  std::function<void()> clip_, clear_;
  std::function<void(const std::vector<at::Tensor>&, double)> at_rate_;
  std::vector<std::pair<at::Tensor, at::Tensor>> snapshot_;
  std::string how_;
  at::Tensor x_, y_;
  int t_ = 0;
};

json answer(const json& program, const cohort::Communicator& comm) {
  json error;
  std::optional<Program> run;
  try {
    run.emplace(program, comm);
    run->run();
  } catch (const cohort::Error& failed) {
    error = {{"type", std::string(cohort::to_string(failed.code()))}, {"text", failed.what()}, {"own", true}};
  } catch (const std::exception& failed) {
    error = {{"type", "std::exception"}, {"text", failed.what()}, {"own", false}};
  }
  return {{"states", run ? std::move(run->states) : json::array()},
          {"gradients", run ? std::move(run->gradients) : json::array()},
          {"error", error},
          {"rank", comm.rank()}};
}

}  // namespace

int main() {
  at::set_num_threads(1);
  const cohort::Communicator comm = cohort::init();
  for (std::string line; std::getline(std::cin, line);)
    std::cout << answer(json::parse(line), comm).dump(-1, ' ', false, json::error_handler_t::replace) << std::endl;
}
