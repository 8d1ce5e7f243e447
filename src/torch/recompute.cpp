#include <cohort/torch/recompute.h>

#include "base/result.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
// clang-format off
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
// clang-format on

#include <algorithm>
#include <array>
#include <mutex>
#include <unordered_set>

namespace cohort::nn {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;
using NodePointer = decltype(Edge::function);  // libtorch 2.13 has another kind of pointer

template <class T, class Pointer = NodePointer>
Pointer made_node(T** node) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<Node>>) {
    return Pointer(*node = new T());
  } else {
    auto made = c10::make_intrusive<T>();
    *node = made.get();
    return made;
  }
}

thread_local int recomputations = 0;

struct Recomputing {
  Recomputing() { ++recomputations; }
  ~Recomputing() { --recomputations; }
  Recomputing(const Recomputing&) = delete;
  Recomputing& operator=(const Recomputing&) = delete;
};

// Disables autocast's cache, since a cached weight would connect later graphs to one that has been cut.
class NoAutocastCache {
 public:
  NoAutocastCache() { at::autocast::set_autocast_cache_enabled(false); }
  ~NoAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  NoAutocastCache(const NoAutocastCache&) = delete;
  NoAutocastCache& operator=(const NoAutocastCache&) = delete;

 private:
  bool before_ = at::autocast::is_autocast_cache_enabled();
};

// The types that autocast casts to. Older libtorchs' ThreadLocalState lacks them, and a GPU's backward runs on another
// thread.
using AutocastTypes = std::array<at::ScalarType, 2>;

#if TORCH_VERSION_MAJOR > 2 || (TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR >= 4)
AutocastTypes autocast_types() {
  return {at::autocast::get_autocast_dtype(at::kCPU), at::autocast::get_autocast_dtype(at::kCUDA)};
}
void set_autocast_types(const AutocastTypes& types) {
  at::autocast::set_autocast_dtype(at::kCPU, types[0]);
  at::autocast::set_autocast_dtype(at::kCUDA, types[1]);
}
#else
AutocastTypes autocast_types() {
  return {at::autocast::get_autocast_cpu_dtype(), at::autocast::get_autocast_gpu_dtype()};
}
void set_autocast_types(const AutocastTypes& types) {
  at::autocast::set_autocast_cpu_dtype(types[0]);
  at::autocast::set_autocast_gpu_dtype(types[1]);
}
#endif

class WithAutocastTypes {
 public:
  explicit WithAutocastTypes(const AutocastTypes& types) { set_autocast_types(types); }
  ~WithAutocastTypes() { set_autocast_types(before_); }
  WithAutocastTypes(const WithAutocastTypes&) = delete;
  WithAutocastTypes& operator=(const WithAutocastTypes&) = delete;

 private:
  AutocastTypes before_ = autocast_types();
};

// ------------------------------------------------------------------------------------------------- random state

using RandomState = std::vector<std::pair<at::Generator, at::Tensor>>;

at::Tensor state_of(at::Generator generator) {
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

RandomState random_state(const std::vector<at::Tensor>& inputs) {
  std::vector<at::Generator> generators{at::detail::getDefaultCPUGenerator()};
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.is_cuda()) continue;
    const at::Generator& generator = at::globalContext().defaultGenerator(input.device());
    if (std::find(generators.begin(), generators.end(), generator) == generators.end()) {
      generators.push_back(generator);
    }
  }
  RandomState states;
  for (const at::Generator& generator : generators) states.emplace_back(generator, state_of(generator));
  return states;
}

class WithRandomState {
 public:
  explicit WithRandomState(const RandomState& state) {
    for (const auto& [generator, unused] : state) before_.emplace_back(generator, state_of(generator));
    set(state);
  }
  ~WithRandomState() { set(before_); }
  WithRandomState(const WithRandomState&) = delete;
  WithRandomState& operator=(const WithRandomState&) = delete;

 private:
  static void set(const RandomState& states) {
    for (auto [generator, state] : states) {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
  }
  RandomState before_;
};

// ------------------------------------------------------------------------------------------------- a run of the
// function

// An edge that leads out of the function's graph: to a leaf, an input, or a tensor that existed before.
struct Way {
  Edge to;
  std::vector<std::pair<NodePointer, std::size_t>> from;  // nodes, and the number of their edge
  std::vector<std::size_t> outputs;                       // outputs that are tensors that existed before
};

struct Run {
  std::vector<at::Tensor> inputs;  // leaves of this run's graph
  std::vector<at::Tensor> outputs;
  std::vector<Way> ways;  // ways to the inputs come first
};

bool wants_gradient(const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }

// Recognises nodes made since construction, since a thread numbers its nodes in order.
class MadeHere {
 public:
  MadeHere() : begin_(at::sequence_number::peek()), thread_(at::RecordFunction::currentThreadId()) {}
  void end() { end_ = at::sequence_number::peek(); }
  bool operator()(const Node& node) const {
    return node.thread_id() == thread_ && node.sequence_nr() >= begin_ && node.sequence_nr() < end_;
  }

 private:
  std::uint64_t begin_, end_ = 0, thread_;
};

Way& way_to(std::vector<Way>& ways, const Edge& edge) {
  const auto found = std::find_if(ways.begin(), ways.end(), [&](const Way& way) { return way.to == edge; });
  return found != ways.end() ? *found : ways.emplace_back(Way{edge, {}, {}});
}

Run run_with_graph(const detail::TensorFunction& function, const std::vector<at::Tensor>& inputs) {
  const at::AutoGradMode with_graph(true);
  const NoAutocastCache no_cache;
  Run run;
  for (const at::Tensor& input : inputs) {
    run.inputs.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
  }
  for (const at::Tensor& input : run.inputs) {
    run.ways.push_back({wants_gradient(input) ? torch::autograd::impl::gradient_edge(input) : Edge(), {}, {}});
  }
  MadeHere made_here;
  run.outputs = function(run.inputs);
  std::vector<NodePointer> reached;
  std::unordered_set<const Node*> known;
  const auto reach = [&](const Edge& edge) {
    if (!made_here(*edge.function)) return false;
    if (known.insert(edge.function.get()).second) reached.push_back(edge.function);
    return true;
  };
  std::vector<Edge> roots;
  for (const at::Tensor& output : run.outputs) {
    roots.push_back(wants_gradient(output) ? torch::autograd::impl::gradient_edge(output) : Edge());
  }
  made_here.end();
  for (std::size_t i = 0; i < roots.size(); ++i) {
    if (roots[i].is_valid() && !reach(roots[i])) way_to(run.ways, roots[i]).outputs.push_back(i);
  }
  for (std::size_t i = 0; i < reached.size(); ++i) {
    const NodePointer node = reached[i];
    for (std::size_t j = 0; j < node->num_outputs(); ++j) {
      const Edge& edge = node->next_edge(j);
      if (edge.is_valid() && !reach(edge)) way_to(run.ways, edge).from.emplace_back(node, j);
    }
  }
  return run;
}

// ------------------------------------------------------------------------------------------------- backward

// Replaces the end of an edge that led out of the graph. Gradients that arrive here are summed, and passed once to the
// whole graph's own edge.
struct Collected final : Node {
  variable_list apply(variable_list&& gradients) override {
    gradient = gradients.at(0);
    return {};
  }
  at::Tensor gradient;
};

struct Recomputation final : Node {
  variable_list apply(variable_list&& gradients) override;
  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    saved.clear();
    function = nullptr;
  }
  std::string name() const override { return "CohortCheckpoint"; }

  detail::TensorFunction function;
  std::vector<torch::autograd::SavedVariable> saved;
  std::vector<std::size_t> outputs;     // indices, among all outputs, of the outputs with a gradient
  std::vector<Edge> outside;            // edges that lead out, besides the inputs'
  std::vector<std::uint32_t> versions;  // versions of the leaves among these
  RandomState random;
  at::ThreadLocalState state;
  AutocastTypes types = autocast_types();

 private:
  Run run_again(const variable_list& gradients);
};

std::uint32_t version_of(const Edge& edge) {
  const auto* const leaf = dynamic_cast<const AccumulateGrad*>(edge.function.get());
  return leaf != nullptr ? static_cast<std::uint32_t>(leaf->variable._version()) : 0;
}

[[noreturn]] void refuse_run(const char* why) { raise(ErrorCode::InvalidArgument, "nn::checkpoint: {}", why); }

Run Recomputation::run_again(const variable_list& gradients) {
  std::vector<at::Tensor> inputs;
  for (const auto& input : saved) inputs.push_back(input.unpack());
  for (std::size_t i = 0; i < outside.size(); ++i) {
    if (version_of(outside[i]) != versions[i]) {
      refuse_run("a parameter was changed between forward and backward -- step the optimizer after the backward");
    }
  }
  const Recomputing recomputing_now;
  const WithRandomState same_random(random);
  const at::ThreadLocalStateGuard same_modes(state);
  const WithAutocastTypes same_types(types);
  Run run = run_with_graph(function, inputs);
  const bool same_outside = run.ways.size() == inputs.size() + outside.size() &&
                            std::all_of(outside.begin(), outside.end(), [&](const Edge& edge) {
                              return std::any_of(run.ways.begin() + static_cast<std::ptrdiff_t>(inputs.size()),
                                                 run.ways.end(), [&](const Way& way) { return way.to == edge; });
                            });
  std::vector<std::size_t> with_gradient;
  for (std::size_t i = 0; i < run.outputs.size(); ++i) {
    if (wants_gradient(run.outputs[i])) with_gradient.push_back(i);
  }
  bool same_outputs = with_gradient == outputs;
  for (std::size_t i = 0; same_outputs && i < outputs.size(); ++i) {
    const at::Tensor& output = run.outputs[outputs[i]];
    same_outputs = !gradients[i].defined() ||
                   (gradients[i].sizes() == output.sizes() && gradients[i].scalar_type() == output.scalar_type());
  }
  if (!same_outside || !same_outputs) {
    refuse_run(
        "the function did something else when it was run again, for the backward -- it has to use the same "
        "tensors, and to give outputs of the same shapes and types");
  }
  return run;
}

variable_list Recomputation::apply(variable_list&& gradients) {
  if (at::GradMode::is_enabled()) refuse_run("double backward (create_graph) is not supported");
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!function) refuse_run("a second backward through the same graph -- use retain_graph in the first");
  }
  Run run = run_again(gradients);
  variable_list results(num_outputs());
  std::vector<Edge> roots;
  variable_list given;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!gradients[i].defined()) continue;
    roots.push_back(torch::autograd::impl::gradient_edge(run.outputs[outputs[i]]));
    given.push_back(gradients[i]);
  }
  const std::size_t inputs = run.inputs.size();
  const auto result_of = [&](std::size_t way) {
    const auto edge = std::find(outside.begin(), outside.end(), run.ways[way].to);
    return way < inputs ? way : inputs + static_cast<std::size_t>(edge - outside.begin());
  };
  std::vector<NodePointer> nodes;
  std::vector<std::pair<Collected*, std::size_t>> collected;  // each with the number of its result
  for (std::size_t i = 0; i < run.ways.size(); ++i) {
    const Way& way = run.ways[i];
    if (!way.to.is_valid()) continue;
    Edge here;  // empty if the gradient is not needed, as by autograd::grad for other tensors
    if (task_should_compute_output(result_of(i))) {
      nodes.push_back(made_node(&collected.emplace_back(nullptr, result_of(i)).first));
      if (const auto* const leaf = dynamic_cast<const AccumulateGrad*>(way.to.function.get())) {
        nodes.back()->add_input_metadata(leaf->variable);
      } else {
        nodes.back()->add_input_metadata(way.to.function->input_metadata(way.to.input_nr).zeros_like());
      }
      here = Edge(nodes.back(), 0);
    }
    // Does not use set_next_edge, which requires nodes without incoming edges to ensure that numbers fall along edges.
    // They do here.
    for (const auto& [node, edge] : way.from) node->next_edges()[edge] = here;
    for (std::size_t root = 0; root < roots.size(); ++root) {
      if (roots[root] == way.to) roots[root] = here;
    }
  }
  for (std::size_t root = roots.size(); root-- > 0;) {
    if (roots[root].is_valid()) continue;
    roots.erase(roots.begin() + static_cast<std::ptrdiff_t>(root));
    given.erase(given.begin() + static_cast<std::ptrdiff_t>(root));
  }
  run = {};  // so that the backward frees nodes that it has passed
  if (!roots.empty()) {
    torch::autograd::Engine::get_default_engine().execute(std::exchange(roots, {}), given, /*keep_graph=*/false,
                                                          /*create_graph=*/false, /*accumulate_grad=*/true);
  }
  for (const auto& [node, result] : collected) results[result] = std::move(node->gradient);
  return results;
}

}  // namespace

bool recomputing() noexcept { return recomputations > 0; }

namespace detail {

// The first run has a graph, too, which shows the tensors that the function uses, so that their gradients pass through
// the whole graph, as without recomputation. That graph is freed before this returns, so memory never exceeds the
// backward's.
std::vector<at::Tensor> checkpoint(const TensorFunction& function, const std::vector<at::Tensor>& inputs) {
  if (!at::GradMode::is_enabled()) return function(inputs);
  Recomputation* node = nullptr;
  const NodePointer owner = made_node(&node);
  node->random = random_state(inputs);
  for (const at::Tensor& input : inputs) node->saved.emplace_back(input, /*is_output=*/false);
  const Run run = run_with_graph(function, inputs);
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < run.ways.size(); ++i) {
    if (i < inputs.size()) {
      edges.push_back(wants_gradient(inputs[i]) ? torch::autograd::impl::gradient_edge(inputs[i]) : Edge());
      continue;
    }
    edges.push_back(run.ways[i].to);
    node->outside.push_back(run.ways[i].to);
    node->versions.push_back(version_of(run.ways[i].to));
  }
  node->set_next_edges(std::move(edges));
  node->function = function;
  std::vector<at::Tensor> outputs;
  for (std::size_t i = 0; i < run.outputs.size(); ++i) {
    const at::Tensor& output = run.outputs[i];
    outputs.push_back(output.defined() ? output.detach() : output);
    if (!wants_gradient(output)) continue;
    node->outputs.push_back(i);
    torch::autograd::set_history(outputs.back(), owner);
  }
  return outputs;
}

}  // namespace detail
}  // namespace cohort::nn
