// A small GPT as a list of layers, each a function of a tensor, for cohort::nn::Pipeline. The matrices of a layer are
// divided over the ranks of `tp`.
#pragma once

#include <cohort/torch/parallel.h>
#include <cohort/torch/pipeline.h>
#include <cohort/torch/recompute.h>

#include <torch/torch.h>

#include <cmath>
#include <vector>

struct Shape {
  int64_t layers = 4, width = 128, heads = 4, context = 64;
  int64_t vocabulary = 96;  ///< printable ASCII and the end of a line
  bool recompute = false;   ///< activations of a block are computed again in the backward instead of kept
};

/// Characters [batch, context] to [batch, context, width].
struct EmbeddingImpl : torch::nn::Module {
  EmbeddingImpl(cohort::Communicator tp, const Shape& shape)
      : characters(register_module("characters",
                                   cohort::nn::VocabParallelEmbedding(
                                       tp, cohort::nn::VocabParallelEmbeddingOptions{.num_embeddings = shape.vocabulary,
                                                                                     .embedding_dim = shape.width}))),
        positions(register_parameter("positions", torch::randn({shape.context, shape.width}) * 0.02)) {
    const torch::NoGradGuard no_grad;
    characters->weight.mul_(0.02);
  }
  torch::Tensor forward(const torch::Tensor& indices) { return characters(indices) + positions; }

  cohort::nn::VocabParallelEmbedding characters;
  torch::Tensor positions;
};
TORCH_MODULE(Embedding);

/// Attention and a perceptron, each behind a LayerNorm and beside the residual.
struct BlockImpl : torch::nn::Module {
  BlockImpl(cohort::Communicator tp, const Shape& of) : shape(of), heads(of.heads / tp.size()) {
    const auto column = [&](int64_t out) {
      return cohort::nn::ColumnParallelLinear(
          tp, cohort::nn::ColumnParallelLinearOptions{.in_features = shape.width, .out_features = out});
    };
    const auto row = [&](int64_t in) {
      return cohort::nn::RowParallelLinear(
          tp, cohort::nn::RowParallelLinearOptions{.in_features = in, .out_features = shape.width});
    };
    first = register_module("first", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
    second = register_module("second", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})));
    attend = register_module("attend", column(3 * shape.width));  // queries, keys, values of each head
    project = register_module("project", row(shape.width));
    up = register_module("up", column(4 * shape.width));
    down = register_module("down", row(4 * shape.width));
    mask = torch::full({shape.context, shape.context}, -INFINITY).triu(1);
  }
  torch::Tensor attention(const torch::Tensor& x) {
    const int64_t size = shape.width / shape.heads;
    const auto parts = attend(x).view({x.size(0), x.size(1), heads, 3, size}).permute({3, 0, 2, 1, 4}).unbind();
    const torch::Tensor scores = torch::matmul(parts[0], parts[1].transpose(-2, -1)) / std::sqrt(double(size));
    const torch::Tensor mixed = torch::matmul(torch::softmax(scores + mask.to(scores.options()), -1), parts[2]);
    return project(mixed.transpose(1, 2).reshape({x.size(0), x.size(1), heads * size}));
  }
  torch::Tensor whole(const torch::Tensor& x) {
    const torch::Tensor y = x + attention(first(x));
    return y + down(torch::gelu(up(second(y))));
  }
  torch::Tensor forward(const torch::Tensor& x) {
    if (!shape.recompute) return whole(x);
    return cohort::nn::checkpoint([this](const torch::Tensor& input) { return whole(input); }, x);
  }

  Shape shape;
  int64_t heads;  // on this rank
  torch::nn::LayerNorm first{nullptr}, second{nullptr};
  cohort::nn::ColumnParallelLinear attend{nullptr}, up{nullptr};
  cohort::nn::RowParallelLinear project{nullptr}, down{nullptr};
  torch::Tensor mask;
};
TORCH_MODULE(Block);

/// To logits, split over the vocabulary.
struct HeadImpl : torch::nn::Module {
  HeadImpl(cohort::Communicator tp, const Shape& shape)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({shape.width})))),
        logits(register_module("logits", cohort::nn::ColumnParallelLinear(
                                             tp, cohort::nn::ColumnParallelLinearOptions{
                                                     .in_features = shape.width, .out_features = shape.vocabulary}))) {}
  torch::Tensor forward(const torch::Tensor& x) { return logits(norm(x)); }

  torch::nn::LayerNorm norm;
  cohort::nn::ColumnParallelLinear logits;
};
TORCH_MODULE(Head);

inline std::vector<cohort::nn::PipelineLayer> layers_of(const cohort::Communicator& tp, const Shape& shape) {
  std::vector<cohort::nn::PipelineLayer> layers;
  layers.emplace_back([=] { return Embedding(tp, shape); });
  for (int64_t i = 0; i < shape.layers; ++i) layers.emplace_back([=] { return Block(tp, shape); });
  layers.emplace_back([=] { return Head(tp, shape); });
  return layers;
}
