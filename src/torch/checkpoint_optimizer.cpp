#include "torch/checkpoint_tensors.h"

#include "base/json.h"
#include "base/result.h"

#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <array>
#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <type_traits>
#include <unordered_map>
#include <utility>

// clang-format off
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>
// clang-format on

namespace cohort::checkpoint {
namespace {

namespace optim = torch::optim;
using States = std::remove_reference_t<decltype(std::declval<optim::Optimizer&>().state())>;

// Options and state of each optimizer. A visitor is called with a name and a reference to the field, and reads it or
// writes it. All names are those of libtorch.

template <class Visitor>
void visit(Visitor& visitor, optim::SGDOptions& options) {
  visitor("lr", options.lr());
  visitor("momentum", options.momentum());
  visitor("dampening", options.dampening());
  visitor("weight_decay", options.weight_decay());
  visitor("nesterov", options.nesterov());
}
template <class Visitor>
void visit(Visitor& visitor, optim::SGDParamState& state) {
  visitor("momentum_buffer", state.momentum_buffer());
}

template <class Visitor, class Options>
void visit_adam_options(Visitor& visitor, Options& options) {
  visitor("lr", options.lr());
  visitor("beta1", std::get<0>(options.betas()));
  visitor("beta2", std::get<1>(options.betas()));
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("amsgrad", options.amsgrad());
}
template <class Visitor, class State>
void visit_adam_state(Visitor& visitor, State& state) {
  visitor("step", state.step());
  visitor("exp_avg", state.exp_avg());
  visitor("exp_avg_sq", state.exp_avg_sq());
  visitor("max_exp_avg_sq", state.max_exp_avg_sq());
}
template <class Visitor>
void visit(Visitor& visitor, optim::AdamOptions& options) {
  visit_adam_options(visitor, options);
}
template <class Visitor>
void visit(Visitor& visitor, optim::AdamParamState& state) {
  visit_adam_state(visitor, state);
}
template <class Visitor>
void visit(Visitor& visitor, optim::AdamWOptions& options) {
  visit_adam_options(visitor, options);
}
template <class Visitor>
void visit(Visitor& visitor, optim::AdamWParamState& state) {
  visit_adam_state(visitor, state);
}

template <class Visitor>
void visit(Visitor& visitor, optim::AdagradOptions& options) {
  visitor("lr", options.lr());
  visitor("lr_decay", options.lr_decay());
  visitor("weight_decay", options.weight_decay());
  visitor("initial_accumulator_value", options.initial_accumulator_value());
  visitor("eps", options.eps());
}
template <class Visitor>
void visit(Visitor& visitor, optim::AdagradParamState& state) {
  visitor("sum", state.sum());
  visitor("step", state.step());
}

template <class Visitor>
void visit(Visitor& visitor, optim::RMSpropOptions& options) {
  visitor("lr", options.lr());
  visitor("alpha", options.alpha());
  visitor("eps", options.eps());
  visitor("weight_decay", options.weight_decay());
  visitor("momentum", options.momentum());
  visitor("centered", options.centered());
}
template <class Visitor>
void visit(Visitor& visitor, optim::RMSpropParamState& state) {
  visitor("step", state.step());
  visitor("square_avg", state.square_avg());
  visitor("momentum_buffer", state.momentum_buffer());
  visitor("grad_avg", state.grad_avg());
}

template <class Visitor>
void visit(Visitor& visitor, optim::LBFGSOptions& options) {
  visitor("lr", options.lr());
  visitor("max_iter", options.max_iter());
  visitor("max_eval", options.max_eval());
  visitor("tolerance_grad", options.tolerance_grad());
  visitor("tolerance_change", options.tolerance_change());
  visitor("history_size", options.history_size());
  visitor("line_search_fn", options.line_search_fn());
}
template <class Visitor>
void visit(Visitor& visitor, optim::LBFGSParamState& state) {
  visitor("func_evals", state.func_evals());
  visitor("n_iter", state.n_iter());
  visitor("t", state.t());
  visitor("prev_loss", state.prev_loss());
  visitor("d", state.d());
  visitor("H_diag", state.H_diag());
  visitor("prev_flat_grad", state.prev_flat_grad());
  visitor("old_dirs", state.old_dirs());
  visitor("old_stps", state.old_stps());
  visitor("ro", state.ro());
  visitor("al", state.al());
}

template <class T>
struct IsList : std::false_type {};
template <>
struct IsList<std::deque<at::Tensor>> : std::true_type {};
template <>
struct IsList<std::vector<at::Tensor>> : std::true_type {};

template <class T>
constexpr at::ScalarType kScalarType = std::is_same_v<T, double> ? at::kDouble
                                       : std::is_same_v<T, bool> ? at::kBool
                                                                 : at::kLong;

/// Converts a field to named tensors.
class Saver {
 public:
  Saver(OptimizerSnapshot& out, std::string prefix) : out_(out), prefix_(std::move(prefix)) {}

  template <class T>
  void operator()(std::string_view name, T& field) {
    save(prefix_ + std::string(name), field);
  }

 private:
  template <class T>
  void save(const std::string& name, const T& field) {
    if constexpr (std::is_arithmetic_v<T>) {
      at::Tensor number = at::empty({}, at::TensorOptions().dtype(kScalarType<T>));
      *static_cast<T*>(number.data_ptr()) = field;
      out_.tensors.add(name, number);
    } else if constexpr (std::is_same_v<T, at::Tensor>) {
      if (field.defined()) out_.tensors.add(name, field);
    } else if constexpr (std::is_same_v<T, std::string>) {
      out_.metadata[name] = field;
    } else if constexpr (IsList<T>::value) {
      save(name + "/size", static_cast<std::int64_t>(field.size()));
      for (std::size_t i = 0; i < field.size(); ++i) save(fmt::format("{}/{}", name, i), field[i]);
    } else if (field.has_value()) {  // an optional
      save(name, *field);
    }
  }

  OptimizerSnapshot& out_;
  std::string prefix_;
};

/// Converts a field to text.
struct Teller {
  std::vector<std::string>& lines;
  std::size_t group;

  template <class T>
  void operator()(std::string_view name, T& field) {
    if constexpr (std::is_arithmetic_v<T>)
      lines.push_back(fmt::format("{} = {} of parameter group {}", name, field, group));
  }
};

/// Contents of a file. Remembers which of them have been used.
struct Source {
  std::map<std::string, formats::TensorView> tensors;
  std::map<std::string, std::string> metadata;
  std::string name;

  [[noreturn]] void corrupt(const std::string& what) const {
    raise(ErrorCode::Corrupt, "{}: not a sound state of an optimizer -- {}", name, what);
  }
};

/// Converts named tensors to a field. A field that the file lacks becomes undefined or empty, if it can.
class Loader {
 public:
  /// The state's tensors are put on the device of `parameter`; nullptr: there are no tensors. `own_shapes`: true if
  /// they do not have the parameter's shape.
  Loader(Source& source, std::string prefix, const at::Tensor* parameter, bool own_shapes)
      : source_(source), prefix_(std::move(prefix)), parameter_(parameter), own_shapes_(own_shapes) {}

  template <class T>
  void operator()(std::string_view name, T& field) {
    load(prefix_ + std::string(name), field);
  }

 private:
  template <class T>
  void load(const std::string& name, T& field) {
    if constexpr (std::is_arithmetic_v<T>) {
      const auto view = take(name);
      if (!view) source_.corrupt(fmt::format("'{}' is missing", name));
      const at::Tensor number = to_tensor(*view, name);
      if (number.dim() != 0 || number.scalar_type() != kScalarType<T>)
        source_.corrupt(fmt::format("'{}' is of another type", name));
      field = *static_cast<const T*>(number.data_ptr());
    } else if constexpr (std::is_same_v<T, at::Tensor>) {
      const auto view = take(name);
      field = at::Tensor();
      if (!view) return;
      field = to_tensor(*view, name);
      if (parameter_ == nullptr) return;
      if (!own_shapes_ && field.sizes() != parameter_->sizes()) {
        source_.corrupt(fmt::format("'{}' has shape {} where its parameter has {}", name,
                                    formats::shape_text(view->shape), formats::shape_text(parameter_->sizes().vec())));
      }
      field = field.to(parameter_->device());
      // A module may have been cast since the optimizer's last step. Parameters of 16 bits may be stepped in float32.
      const at::ScalarType type = parameter_->scalar_type();
      if (field.is_floating_point() && (type == at::kFloat || type == at::kDouble)) field = field.to(type);
    } else if constexpr (std::is_same_v<T, std::string>) {
      field = source_.metadata.at(name);
    } else if constexpr (IsList<T>::value) {
      std::int64_t size = 0;
      load(name + "/size", size);
      if (size < 0 || size > 1'000'000) source_.corrupt(fmt::format("'{}' has {} elements", name, size));
      field.assign(static_cast<std::size_t>(size), at::Tensor());
      for (std::size_t i = 0; i < field.size(); ++i) load(fmt::format("{}/{}", name, i), field[i]);
    } else {  // an optional
      using Inner = typename T::value_type;
      field.reset();
      bool there = source_.tensors.contains(name);
      if constexpr (std::is_same_v<Inner, std::string>) there = source_.metadata.contains(name);
      if constexpr (IsList<Inner>::value) there = source_.tensors.contains(name + "/size");
      if (!there) return;
      Inner inner{};
      load(name, inner);
      field = std::move(inner);
    }
  }

  std::optional<formats::TensorView> take(const std::string& name) {
    auto node = source_.tensors.extract(name);
    if (node.empty()) return std::nullopt;
    return std::move(node.mapped());
  }

  Source& source_;
  std::string prefix_;
  const at::Tensor* parameter_;
  bool own_shapes_;
};

/// A key of Optimizer::state(): the parameter's address, in 1.13 as text.
template <class Key>
Key key_of(const at::Tensor& parameter) {
  if constexpr (std::is_same_v<Key, std::string>) {
    std::ostringstream text;
    text << parameter.unsafeGetTensorImpl();
    return text.str();
  } else {
    return parameter.unsafeGetTensorImpl();
  }
}

template <class Options, class State>
struct Kind {
  const char* name;
  bool own_shapes;  // the state's tensors do not have the parameter's shape

  void save(const optim::Optimizer& optimizer, const ParameterNames& names, OptimizerSnapshot& out) const {
    using Key = typename States::key_type;
    for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      const auto& group = optimizer.param_groups()[i];
      auto options = static_cast<const Options&>(group.options());  // copies, since libtorch's accessors are not const
      Saver save_option(out, fmt::format("group/{}/", i));
      visit(save_option, options);
      for (const at::Tensor& parameter : group.params()) {
        const auto found = optimizer.state().find(key_of<Key>(parameter));
        if (found == optimizer.state().end()) continue;  // no step yet
        auto state = static_cast<const State&>(*found->second);
        Saver save_state(out, fmt::format("state/{}/", names.at(parameter.unsafeGetTensorImpl())));
        visit(save_state, state);
      }
    }
  }

  std::vector<std::string> lines(const optim::Optimizer& optimizer) const {
    std::vector<std::string> all;
    for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      auto options = static_cast<const Options&>(optimizer.param_groups()[i].options());
      Teller teller{all, i};
      visit(teller, options);
    }
    return all;
  }

  std::function<void()> restore(optim::Optimizer& optimizer, const ParameterNames& names, Source& source) const {
    using Key = typename States::key_type;
    auto options = std::make_shared<std::vector<Options>>();
    auto states = std::make_shared<std::vector<std::pair<Key, std::unique_ptr<State>>>>();
    for (std::size_t i = 0; i < optimizer.param_groups().size(); ++i) {
      const auto& group = optimizer.param_groups()[i];
      options->push_back(static_cast<const Options&>(group.options()));
      Loader load_option(source, fmt::format("group/{}/", i), nullptr, false);
      visit(load_option, options->back());
      for (const at::Tensor& parameter : group.params()) {
        const std::string prefix = fmt::format("state/{}/", names.at(parameter.unsafeGetTensorImpl()));
        const auto first = source.tensors.lower_bound(prefix);
        bool has_state = first != source.tensors.end() && first->first.starts_with(prefix);
        // Only SGD's state can lack tensors, which is so without momentum.
        if (!has_state) continue;
        auto state = std::make_unique<State>();
        Loader load_state(source, prefix, &parameter, own_shapes);
        visit(load_state, *state);
        states->emplace_back(key_of<Key>(parameter), std::move(state));
      }
    }
    if (!source.tensors.empty()) source.corrupt(fmt::format("'{}' belongs to nothing", source.tensors.begin()->first));
    return [&optimizer, options, states] {
      for (std::size_t i = 0; i < options->size(); ++i)
        static_cast<Options&>(optimizer.param_groups()[i].options()) = (*options)[i];
      optimizer.state().clear();
      for (auto& [key, state] : *states) optimizer.state()[key] = std::move(state);
    };
  }
};

/// Calls `use` with the Kind that describes the optimizer.
template <class Use>
auto with_kind(const optim::Optimizer& optimizer, const Use& use) {
  if (dynamic_cast<const optim::SGD*>(&optimizer) != nullptr)
    return use(Kind<optim::SGDOptions, optim::SGDParamState>{"SGD", false});
  if (dynamic_cast<const optim::AdamW*>(&optimizer) != nullptr) {
    return use(Kind<optim::AdamWOptions, optim::AdamWParamState>{"AdamW", false});
  }
  if (dynamic_cast<const optim::Adam*>(&optimizer) != nullptr)
    return use(Kind<optim::AdamOptions, optim::AdamParamState>{"Adam", false});
  if (dynamic_cast<const optim::Adagrad*>(&optimizer) != nullptr) {
    return use(Kind<optim::AdagradOptions, optim::AdagradParamState>{"Adagrad", false});
  }
  if (dynamic_cast<const optim::RMSprop*>(&optimizer) != nullptr) {
    return use(Kind<optim::RMSpropOptions, optim::RMSpropParamState>{"RMSprop", false});
  }
  if (dynamic_cast<const optim::LBFGS*>(&optimizer) != nullptr) {
    return use(Kind<optim::LBFGSOptions, optim::LBFGSParamState>{"LBFGS", true});
  }
  raise(ErrorCode::InvalidArgument,
        "cannot save or load the optimizer -- it is none of SGD, Adam, AdamW, Adagrad, RMSprop, LBFGS -- pass nullptr "
        "and save its state yourself");
}

}  // namespace

ParameterNames names_of(const torch::nn::Module& module) {
  ParameterNames names;
  for (const auto& item : module.named_parameters()) names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  return names;
}

std::vector<std::vector<std::string>> group_members(const optim::Optimizer& optimizer, const ParameterNames& names) {
  std::vector<std::vector<std::string>> groups;
  for (const auto& group : optimizer.param_groups()) {
    auto& list = groups.emplace_back();
    for (const at::Tensor& parameter : group.params()) {
      const auto name = names.find(parameter.unsafeGetTensorImpl());
      if (name == names.end()) {
        raise(
            ErrorCode::InvalidArgument,
            "cannot save or load the optimizer -- it has a parameter of shape {} that is not the module's -- give "
            "the module whose parameters() it was made with; of optim::Sharded, give model_shards(module, &optimizer)",
            formats::shape_text(parameter.sizes().vec()));
      }
      list.push_back(name->second);
    }
  }
  return groups;
}

std::string groups_text(const std::vector<std::vector<std::string>>& groups) { return nlohmann::json(groups).dump(); }

std::vector<std::vector<std::string>> parse_groups(const std::string& text) {
  const auto json = parse_json_or_discard(text);
  std::vector<std::vector<std::string>> groups;
  for (const auto& group : json.is_array() ? json : nlohmann::json::array()) {
    groups.emplace_back();
    for (const auto& name : group.is_array() ? group : nlohmann::json::array())
      if (name.is_string()) groups.back().push_back(name.get<std::string>());
  }
  return groups;
}

std::vector<std::string> option_lines(const optim::Optimizer& optimizer) {
  try {
    return with_kind(optimizer, [&](const auto& kind) { return kind.lines(optimizer); });
  } catch (const Error&) {  // the optimizer is none of libtorch's
    std::vector<std::string> rates;
    for (const auto& group : optimizer.param_groups())
      rates.push_back(fmt::format("lr = {} of parameter group {}", group.options().get_lr(), rates.size()));
    return rates;
  }
}

OptimizerSnapshot snapshot(const optim::Optimizer& optimizer, const ParameterNames& names) {
  OptimizerSnapshot out;
  out.metadata["groups"] = groups_text(group_members(optimizer, names));
  with_kind(optimizer, [&](const auto& kind) {
    out.metadata["type"] = kind.name;
    kind.save(optimizer, names, out);
  });
  return out;
}

namespace {

/// Python's parameter groups may have values that the program added, which libtorch's cannot hold. Values of torch's
/// schedules are not needed. Other values are refused, since training would differ without them.
void refuse_added_values(const std::string& text, const std::string& source_name) {
  constexpr std::array<std::string_view, 6> kOfSchedules = {"initial_lr",   "max_lr",        "min_lr",
                                                            "max_momentum", "base_momentum", "swa_lr"};
  std::set<std::string> refused;
  const auto groups = parse_json_or_discard(text);
  if (!text.empty() && !groups.is_array()) refused.insert("no JSON: an infinity or NaN among them");
  for (const auto& group : groups.is_array() ? groups : nlohmann::json::array()) {
    if (!group.is_object()) continue;
    for (const auto& [name, value] : group.items()) {
      const bool is_of_schedule = std::find(kOfSchedules.begin(), kOfSchedules.end(), name) != kOfSchedules.end();
      if (!is_of_schedule && !value.is_null()) refused.insert(name);
    }
  }
  if (refused.empty()) return;
  raise(ErrorCode::InvalidArgument,
        "{}: does not fit the optimizer -- its parameter groups have values that Python's program added ({}), and "
        "libtorch's groups cannot hold them -- pass nullptr to start with a fresh optimizer, or save without them",
        source_name, fmt::join(refused, ", "));
}

}  // namespace

std::function<void()> restore(optim::Optimizer& optimizer, const ParameterNames& names,
                              const std::vector<formats::NamedTensor>& tensors,
                              const std::map<std::string, std::string>& metadata, const std::string& source_name) {
  Source source{{}, metadata, source_name};
  for (const auto& entry : tensors) {
    if (!entry.name.ends_with(kMasterField)) source.tensors.emplace(entry.name, entry.tensor);
  }
  const auto text = [&](const char* key) { return metadata.contains(key) ? metadata.at(key) : std::string(); };
  if (const std::string groups = groups_text(group_members(optimizer, names)); text("groups") != groups) {
    raise(ErrorCode::InvalidArgument,
          "{}: does not fit the optimizer -- its parameters are {} there and {} here -- make the optimizer as it was "
          "made then",
          source_name, text("groups"), groups);
  }
  refuse_added_values(text("group_values"), source_name);
  return with_kind(optimizer, [&](const auto& kind) {
    if (text("type") != kind.name) {
      raise(ErrorCode::InvalidArgument,
            "{}: does not fit the optimizer -- it is of {}, and this one is {} -- use that, or pass nullptr to start "
            "with a fresh one",
            source_name, text("type"), kind.name);
    }
    return kind.restore(optimizer, names, source);
  });
}

}  // namespace cohort::checkpoint
