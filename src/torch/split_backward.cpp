#include "torch/split_backward.h"

#include "base/result.h"

// clang-format off
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
// clang-format on

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace cohort::nn {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Edge;
using torch::autograd::Engine;
using torch::autograd::Node;
using NodePointer = decltype(Edge::function);  // its type differs between libtorch 1.13 and 2.13

// Returns whether a node has hooks. They would run twice: when its gradient is computed, and when the node runs later.
template <class N>
bool has_hooks(N& node) {
  if constexpr (requires { node.tensor_pre_hooks(); }) {
    return !node.tensor_pre_hooks().empty() || !node.retains_grad_hooks().empty() || !node.pre_hooks().empty() ||
           !node.post_hooks().empty();
  } else {
    return !node.pre_hooks().empty() || !node.post_hooks().empty();
  }
}
template <class N>
bool has_tensor_hooks(N& node) {
  if constexpr (requires { node.tensor_pre_hooks(); }) {
    return !node.tensor_pre_hooks().empty();
  } else {
    return false;  // 1.13 calls them when it accumulates
  }
}

/// Divides a graph's nodes into those that lead to one leaf, the input, and the others.
class Graph {
 public:
  Graph(const NodePointer& root, const Node* input) : input_(input) {
    struct Visit {
      NodePointer node;
      std::size_t next = 0;
    };
    std::vector<Visit> path{{root}};
    leads_[root.get()] = root.get() == input;
    while (!path.empty()) {
      Visit& visit = path.back();
      if (visit.next < visit.node->next_edges().size()) {
        const NodePointer& next = visit.node->next_edges()[visit.next++].function;
        if (next && leads_.emplace(next.get(), next.get() == input).second) path.push_back({next});
        continue;
      }
      bool leads = leads_[visit.node.get()];
      for (const Edge& edge : visit.node->next_edges()) leads = leads || this->leads(edge);
      leads_[visit.node.get()] = leads;
      if (leads && visit.node.get() != input) on_path_.push_back(visit.node);
      path.pop_back();
    }
  }
  bool leads(const NodePointer& node) const { return leads_.at(node.get()); }
  /// Nodes on a path to the input; nodes nearer to the output come later.
  const std::vector<NodePointer>& on_path() const noexcept { return on_path_; }

  /// The leaves that `node` reaches through nodes that are on no path to the input.
  std::vector<NodePointer> leaves_beside(const NodePointer& node) const {
    std::vector<NodePointer> leaves, open;
    std::unordered_set<const Node*> seen;
    const auto open_next = [&](const NodePointer& from) {
      for (const Edge& edge : from->next_edges()) {
        if (edge.function && !leads(edge) && seen.insert(edge.function.get()).second) open.push_back(edge.function);
      }
    };
    for (open_next(node); !open.empty();) {
      const NodePointer next = std::move(open.back());
      open.pop_back();
      if (dynamic_cast<AccumulateGrad*>(next.get()) != nullptr) leaves.push_back(next);
      open_next(next);
    }
    return leaves;
  }

 private:
  bool leads(const Edge& edge) const { return edge.function && leads_.at(edge.function.get()); }

  const Node* input_;
  std::unordered_map<const Node*, bool> leads_;
  std::vector<NodePointer> on_path_;
};

}  // namespace

// A node on a path from the output to the input that also leads to parameters is run twice: now for the input's
// gradient, and later for the parameters' gradients, from the gradient that has now reached the node. If several such
// nodes lead to one parameter (used twice), or the node has hooks, the parameter's gradient is computed now, and
// accumulated later.
at::Tensor SplitBackward::of_input(const at::Tensor& output, const at::Tensor& gradient, const at::Tensor& input) {
  const Edge root = torch::autograd::impl::gradient_edge(output);
  const at::Tensor seed = gradient.defined() ? gradient : at::ones_like(output);
  NodePointer goal;
  if (input.requires_grad()) goal = torch::autograd::impl::grad_accumulator(input);
  const Graph graph(root.function, goal.get());
  if (!goal || !graph.leads(root.function)) {
    parts_.push_back({{root}, {seed}, {}});
    return {};
  }
  struct Beside {
    NodePointer node;
    std::vector<NodePointer> leaves;
  };
  std::vector<Beside> nodes;
  std::unordered_map<const Node*, int> uses;  // number of uses, by leaf
  for (const NodePointer& node : graph.on_path()) {
    Beside beside{node, graph.leaves_beside(node)};
    for (const NodePointer& leaf : beside.leaves) uses[leaf.get()] += has_hooks(*node) ? 2 : 1;
    if (!beside.leaves.empty()) nodes.push_back(std::move(beside));
  }
  torch::autograd::edge_list wanted{Edge(goal, 0)};
  for (const Beside& beside : nodes) {
    Part part;
    for (const NodePointer& leaf : beside.leaves) {
      if (uses[leaf.get()] == 1) {
        part.leaves.emplace_back(leaf, 0);
      } else if (uses[leaf.get()] > 1) {
        if (has_tensor_hooks(*leaf)) {
          raise(ErrorCode::InvalidArgument,
                "the backward of a parameter of {} that is used more than once, and has hooks, cannot be split -- use "
                "another schedule than ZeroBubble",
                c10::str(static_cast<AccumulateGrad&>(*leaf).variable.sizes()));
        }
        parts_.push_back({{Edge(leaf, 0)}, {}, {}});
        wanted.emplace_back(leaf, 0);
        uses[leaf.get()] = 0;
      }
    }
    if (part.leaves.empty()) continue;
    for (std::uint32_t i = 0; i < beside.node->num_inputs(); ++i) part.roots.emplace_back(beside.node, i);
    wanted.insert(wanted.end(), part.roots.begin(), part.roots.end());
    parts_.push_back(std::move(part));
  }
  const auto gradients = Engine::get_default_engine().execute(
      {root}, {seed}, /*keep_graph=*/true, /*create_graph=*/false, /*accumulate_grad=*/false, wanted);
  auto next = gradients.begin() + 1;
  for (Part& part : parts_) {
    torch::autograd::edge_list roots;
    for (Edge& edge : part.roots) {
      at::Tensor known = *next++;
      if (!known.defined()) continue;
      roots.push_back(std::move(edge));
      part.gradients.push_back(std::move(known));
    }
    part.roots = std::move(roots);
  }
  return gradients.front();
}

void SplitBackward::of_parameters() {
  for (Part& part : std::exchange(parts_, {})) {
    if (part.roots.empty()) continue;
    Engine::get_default_engine().execute(part.roots, part.gradients, /*keep_graph=*/false, /*create_graph=*/false,
                                         /*accumulate_grad=*/true, part.leaves);
  }
}

}  // namespace cohort::nn
