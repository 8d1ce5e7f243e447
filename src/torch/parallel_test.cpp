// Tensor-parallel layers on ranks that are threads: equal to the bit to one process that folds the same parts in the
// same order, and within tolerance to one with whole weights. SyncBatchNorm equals one process with all batches.
#include <cohort/error.h>
#include <cohort/mesh.h>
#include <cohort/torch/autograd.h>
#include <cohort/torch/nn.h>
#include <cohort/torch/parallel.h>
#include <cohort/torch/tensor.h>

#include <gtest/gtest.h>

#include "comm/testing/worlds.h"
#include "torch/test_models.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/normalization.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace cohort {
namespace {

using nn::Features;
using namespace cohort::testing;  // NOLINT: the tests' own vocabulary

constexpr std::int64_t kVocabulary = 24, kWidth = 8, kHidden = 16, kOut = 24;

// This rank's part of a whole tensor.
at::Tensor part(const at::Tensor& whole, std::int64_t dim, int rank, int size) {
  return whole.detach().chunk(size, dim)[static_cast<std::size_t>(rank)].clone(at::MemoryFormat::Contiguous);
}

struct Weights {
  at::Tensor embedding = pattern({kVocabulary, kWidth}, 1) * 0.5;
  at::Tensor up = pattern({kHidden, kWidth}, 2) * 0.5, up_bias = pattern({kHidden}, 3) * 0.5;
  at::Tensor down = pattern({kWidth, kHidden}, 4) * 0.5, down_bias = pattern({kWidth}, 5) * 0.5;
  at::Tensor out = pattern({kOut, kWidth}, 6) * 0.5;
  std::vector<at::Tensor> all() const { return {embedding, up, up_bias, down, down_bias, out}; }
  static constexpr int kCut[] = {0, 0, 0, 1, -1, 0};  // dimension by which each is cut; -1: whole
};

std::vector<at::Tensor> parts_of(const Weights& weights, int rank, int size) {
  std::vector<at::Tensor> parts;
  const std::vector<at::Tensor> all = weights.all();
  for (std::size_t i = 0; i < all.size(); ++i) {
    parts.push_back(Weights::kCut[i] < 0 ? all[i].clone() : part(all[i], Weights::kCut[i], rank, size));
  }
  return parts;
}

struct ModelImpl : torch::nn::Module {
  ModelImpl(Communicator& comm, std::optional<std::int64_t> sequence_dim) : sequence(sequence_dim) {
    embedding = register_module(
        "embedding", nn::VocabParallelEmbedding(
                         comm, nn::VocabParallelEmbeddingOptions{
                                   .num_embeddings = kVocabulary, .embedding_dim = kWidth, .sequence_dim = sequence}));
    up = register_module(
        "up",
        nn::ColumnParallelLinear(comm, nn::ColumnParallelLinearOptions{
                                           .in_features = kWidth, .out_features = kHidden, .sequence_dim = sequence}));
    down = register_module("down", nn::RowParallelLinear(comm, nn::RowParallelLinearOptions{.in_features = kHidden,
                                                                                            .out_features = kWidth,
                                                                                            .sequence_dim = sequence}));
    out = register_module(
        "out", nn::ColumnParallelLinear(
                   comm, nn::ColumnParallelLinearOptions{
                             .in_features = kWidth, .out_features = kOut, .bias = false, .sequence_dim = sequence}));
    loss = register_module("loss", nn::ParallelCrossEntropy(comm));
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({kWidth})));
    to(at::kDouble);
    if (sequence) nn::sum_gradients(comm, *norm);
    const std::vector<at::Tensor> values = parts_of(Weights(), comm.rank(), comm.size());
    const at::NoGradGuard no_grad;
    for (std::size_t i = 0; i < values.size(); ++i) cut()[i].copy_(values[i]);
  }
  std::vector<at::Tensor> cut() const {
    return {embedding->weight, up->weight, up->bias, down->weight, down->bias, out->weight};
  }
  at::Tensor forward(const at::Tensor& ids, const at::Tensor& targets) {
    return loss(out(norm(down(at::tanh(up(embedding(ids)))))), targets);
  }
  std::optional<std::int64_t> sequence;
  nn::VocabParallelEmbedding embedding{nullptr};
  nn::ColumnParallelLinear up{nullptr}, out{nullptr};
  nn::RowParallelLinear down{nullptr};
  torch::nn::LayerNorm norm{nullptr};
  nn::ParallelCrossEntropy loss{nullptr};
};
TORCH_MODULE(Model);

at::Tensor ids_of(int salt, std::int64_t rows = 2) {
  return (at::arange(rows * 4, at::kLong) * 7 + salt).remainder(kVocabulary).reshape({rows, 4});
}

std::vector<at::Tensor> gradients_of(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> gradients;
  for (const at::Tensor& tensor : tensors) gradients.push_back(tensor.grad());
  return gradients;
}

at::Tensor folded(const std::vector<at::Tensor>& terms) {
  at::Tensor sum = terms[0];
  for (std::size_t i = 1; i < terms.size(); ++i) sum = sum + terms[i];
  return sum;
}

// One process that computes all ranks' parts. Parts are used in descending order where ranks' gradients are summed in
// ascending order, since autograd comes to them in reverse.
struct Reference {
  std::vector<std::vector<at::Tensor>> parts;  // by rank
  std::vector<at::Tensor> norm;
  at::Tensor loss;
};
Reference reference_of(int size, const at::Tensor& ids, const at::Tensor& targets) {
  Reference reference;
  const auto p = static_cast<std::size_t>(size);
  for (int rank = 0; rank < size; ++rank) {
    reference.parts.push_back(parts_of(Weights(), rank, size));
    for (at::Tensor& tensor : reference.parts.back()) tensor.requires_grad_(true);
    reference.parts.back()[4] = reference.parts.front()[4];  // the bias is whole, so there is only one
  }
  reference.norm = {at::ones({kWidth}, at::kDouble).requires_grad_(true),
                    at::zeros({kWidth}, at::kDouble).requires_grad_(true)};
  const auto& parts = reference.parts;
  const auto own = [&](const at::Tensor& values, std::int64_t whole, std::size_t rank) {
    const std::int64_t n = whole / size, begin = static_cast<std::int64_t>(rank) * n;
    const at::Tensor elsewhere = values.lt(begin).logical_or(values.ge(begin + n));
    return std::make_pair((values - begin).masked_fill(elsewhere, 0), elsewhere);
  };
  std::vector<at::Tensor> rows(p), hidden(p), partial, logits(p), sums(p);
  for (std::size_t r = p; r-- > 0;) {
    const auto [index, elsewhere] = own(ids, kVocabulary, r);
    rows[r] = at::embedding(parts[r][0], index).masked_fill(elsewhere.unsqueeze(-1), 0);
  }
  const at::Tensor embedded = folded(rows);
  for (std::size_t r = p; r-- > 0;) hidden[r] = at::tanh(at::linear(embedded, parts[r][1], parts[r][2]));
  for (std::size_t r = 0; r < p; ++r) partial.push_back(at::linear(hidden[r], parts[r][3]));
  const at::Tensor y = at::layer_norm(folded(partial) + parts[0][4], {kWidth}, reference.norm[0], reference.norm[1]);
  for (std::size_t r = p; r-- > 0;) logits[r] = at::linear(y, parts[r][5]);
  const at::Tensor highest = std::get<0>(at::cat(logits, -1).detach().max(-1));
  for (std::size_t r = p; r-- > 0;) {
    const auto [index, elsewhere] = own(targets, kOut, r);
    const at::Tensor shifted = logits[r] - highest.unsqueeze(-1);
    const at::Tensor picked = shifted.gather(-1, index.unsqueeze(-1)).squeeze(-1).masked_fill(elsewhere, 0);
    sums[r] = at::stack({shifted.exp().sum(-1), picked});
  }
  const at::Tensor sum = folded(sums);
  reference.loss = (sum[0].log() - sum[1]).sum() / targets.numel();
  reference.loss.backward();
  return reference;
}

TEST(TensorParallel, AsOneProcessThatFoldsTheSameParts) {
  const at::Tensor ids = ids_of(0), targets = ids_of(3);
  for (const int size : {1, 2, 4}) {
    run_on_threads(size, [&](Communicator comm) {
      const Reference same = reference_of(size, ids, targets);
      const Reference whole = reference_of(1, ids, targets);
      for (const auto& sequence : {std::optional<std::int64_t>(), std::optional<std::int64_t>(1)}) {
        Model model(comm, sequence);
        const at::Tensor loss = model(ids, targets);
        loss.backward();
        const std::vector<at::Tensor> own = gradients_of(model->cut());
        const std::vector<at::Tensor> norm = gradients_of({model->norm->weight, model->norm->bias});
        expect_equal({loss}, {same.loss});
        if (!sequence) {
          expect_equal(own, gradients_of(same.parts[static_cast<std::size_t>(comm.rank())]));
          expect_equal(norm, gradients_of(same.norm));
        }
        std::vector<at::Tensor> expected = gradients_of(whole.parts[0]);
        for (std::size_t i = 0; i < expected.size(); ++i) {
          if (Weights::kCut[i] >= 0) expected[i] = part(expected[i], Weights::kCut[i], comm.rank(), size);
        }
        expect_close(own, expected, 1e-12);
        expect_close(norm, gradients_of(whole.norm), 1e-12);
        expect_close({loss}, {whole.loss}, 1e-12);
      }
    });
  }
}

TEST(TensorParallel, WithDataParallelOnAMesh) {
  const auto trained = [](Communicator& comm, int dp, int tp) {
    Mesh mesh(comm, {{"dp", dp}, {"tp", tp}});
    Model model(mesh.along("tp"), std::nullopt);
    nn::DistributedDataParallel ddp(model, mesh.along("dp"));
    torch::optim::SGD optimizer(ddp.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const std::int64_t rows = 4 / dp, begin = mesh.coordinate("dp") * rows;
    for (int step = 0; step < 3; ++step) {
      ddp.zero_grad();
      const at::Tensor ids = ids_of(step, 4).narrow(0, begin, rows);
      ddp(ids, (ids + 5).remainder(kOut)).backward();
      optimizer.step();
    }
    std::vector<at::Tensor> all = model->cut();
    for (std::size_t i = 0; i < all.size(); ++i) {
      const int dim = Weights::kCut[i];
      all[i] = dim < 0 ? all[i].detach() : autograd::all_gather(mesh.along("tp"), all[i].detach(), dim);
    }
    return all;
  };
  std::vector<at::Tensor> alone;
  run_on_threads(1, [&](Communicator comm) { alone = trained(comm, 1, 1); });
  run_on_threads(4, [&](Communicator comm) { expect_close(trained(comm, 2, 2), alone, 1e-11); });
}

TEST(TensorParallel, WholeInputsAndOutputs) {
  run_on_threads(3, [](Communicator comm) {
    nn::ColumnParallelLinear column(
        comm, nn::ColumnParallelLinearOptions{.in_features = 4, .out_features = 6, .output = Features::Whole});
    nn::RowParallelLinear row(
        comm, nn::RowParallelLinearOptions{.in_features = 6, .out_features = 5, .input = Features::Whole});
    column->to(at::kDouble);
    row->to(at::kDouble);
    const auto whole = [&](const at::Tensor& own, std::int64_t dim) {
      return autograd::all_gather(comm, own.detach(), dim).requires_grad_(true);
    };
    const at::Tensor w = whole(column->weight, 0), b = whole(column->bias, 0), v = whole(row->weight, 1);
    const at::Tensor c = row->bias.detach().clone().requires_grad_(true);
    const at::Tensor x = pattern({3, 4}, 1).requires_grad_(true), x1 = pattern({3, 4}, 1).requires_grad_(true);
    const at::Tensor y = row(at::sin(column(x))), y1 = at::linear(at::sin(at::linear(x1, w, b)), v, c);
    y.square().sum().backward();
    y1.square().sum().backward();
    expect_close({y, x.grad(), column->weight.grad(), column->bias.grad(), row->weight.grad(), row->bias.grad()},
                 {y1, x1.grad(), part(w.grad(), 0, comm.rank(), 3), part(b.grad(), 0, comm.rank(), 3),
                  part(v.grad(), 1, comm.rank(), 3), c.grad()},
                 1e-12);
  });
}

TEST(TensorParallel, AnyNumberOfRanksBeginsWithTheSameModel) {
  const auto begins = [](Communicator& comm) {
    const at::Generator generator = at::detail::createCPUGenerator(comm.rank() == 0 ? 5 : 99);
    nn::VocabParallelEmbedding embedding(
        comm, nn::VocabParallelEmbeddingOptions{.num_embeddings = 8, .embedding_dim = 3, .generator = generator});
    nn::ColumnParallelLinear column(
        comm, nn::ColumnParallelLinearOptions{.in_features = 3, .out_features = 12, .generator = generator});
    nn::RowParallelLinear row(
        comm, nn::RowParallelLinearOptions{.in_features = 12, .out_features = 3, .generator = generator});
    const auto whole = [&](const at::Tensor& own, std::int64_t dim) {
      return autograd::all_gather(comm, own.detach(), dim).contiguous();
    };
    return std::vector<at::Tensor>{whole(embedding->weight, 0), whole(column->weight, 0), whole(column->bias, 0),
                                   whole(row->weight, 1), row->bias.detach()};
  };
  std::vector<at::Tensor> alone;
  run_on_threads(1, [&](Communicator comm) { alone = begins(comm); });
  for (const int size : {2, 4}) {
    run_on_threads(size, [&](Communicator comm) { expect_equal(begins(comm), alone); });
  }
  // torch's distributions: uniform between -1 / sqrt(in) and 1 / sqrt(in), and normal.
  EXPECT_LE(alone[3].abs().max().item<double>(), 1 / std::sqrt(12.0));
  EXPECT_GT(alone[3].abs().max().item<double>(), 0.8 / std::sqrt(12.0));
  EXPECT_GT(alone[0].abs().max().item<double>(), 1);
}

TEST(TensorParallel, TellsItsShards) {
  run_on_threads(2, [](Communicator comm) {
    Model model(comm, std::nullopt);
    std::map<std::string, Shard> all;
    for (const auto& item : model->named_modules()) {
      if (const auto* const module = dynamic_cast<const nn::HasShards*>(item.value().get())) {
        for (const auto& [name, shard] : module->shards()) all[item.key() + "." + name] = shard;
      }
    }
    const std::int64_t r = comm.rank();
    const std::map<std::string, Shard> expected = {
        {"embedding.weight", {{24, 8}, {r * 12, 0}, {12, 8}, 0, 96}},
        {"up.weight", {{16, 8}, {r * 8, 0}, {8, 8}, 0, 64}},
        {"up.bias", {{16}, {r * 8}, {8}, 0, 8}},
        {"down.weight", {{8, 16}, {0, r * 8}, {8, 8}, 0, 64}},
        {"out.weight", {{24, 8}, {r * 12, 0}, {12, 8}, 0, 96}},
    };
    EXPECT_EQ(all, expected);
  });
}

// Losses, first and second derivatives equal torch's for the whole logits.
TEST(TensorParallel, CrossEntropyIsTorchs) {
  const at::Tensor targets = at::tensor({5, 0, -100, 3, 2, 1}, at::kLong).reshape({2, 3});
  for (const double scale : {1.0, 1e4}) {
    const at::Tensor values = pattern({2, 3, 6}, 1) * scale;
    for (const auto reduction : {at::Reduction::Mean, at::Reduction::Sum, at::Reduction::None}) {
      const auto derivatives = [&](const at::Tensor& loss, const at::Tensor& logits) {
        const at::Tensor first = torch::autograd::grad({loss.sum()}, {logits}, {}, true, true)[0];
        const at::Tensor second = torch::autograd::grad({(first * at::cos(logits)).square().sum()}, {logits})[0];
        return std::vector<at::Tensor>{loss.detach(), first.detach(), second};
      };
      const at::Tensor whole = values.clone().requires_grad_(true);
      at::Tensor loss = at::cross_entropy_loss(whole.reshape({6, 6}), targets.reshape({6}), {}, reduction);
      if (reduction == at::Reduction::None) loss = loss.reshape({2, 3});
      const std::vector<at::Tensor> expected = derivatives(loss, whole);
      for (const int size : {1, 2, 3}) {
        run_on_threads(size, [&](Communicator comm) {
          nn::ParallelCrossEntropy cross_entropy(comm, nn::ParallelCrossEntropyOptions{.reduction = reduction});
          const at::Tensor logits = part(values, 2, comm.rank(), size).requires_grad_(true);
          // The penalty's sum runs over all ranks' logits.
          const at::Tensor own = cross_entropy(logits, targets);
          const at::Tensor first = torch::autograd::grad({own.sum()}, {logits}, {}, true, true)[0];
          const at::Tensor penalty = autograd::reduce_from(comm, (first * at::cos(logits)).square().sum());
          const at::Tensor second = torch::autograd::grad({penalty}, {logits})[0];
          expect_close({own, first, second},
                       {expected[0], part(expected[1], 2, comm.rank(), size), part(expected[2], 2, comm.rank(), size)},
                       1e-11);
        });
      }
    }
  }
  run_on_threads(2, [](Communicator comm) {
    nn::ParallelCrossEntropy cross_entropy(comm);
    const at::Tensor loss = cross_entropy(at::full({1, 3}, 1000, at::kHalf), at::zeros({1}, at::kLong));
    EXPECT_EQ(loss.scalar_type(), at::kFloat);
    EXPECT_NEAR(loss.item<float>(), std::log(6.0), 1e-6);
  });
}

std::string refused(ErrorCode code, const std::function<void()>& call) { return comm::testing::what_of(call, code); }

TEST(TensorParallel, WhatCannotBeIsRefusedOnAllRanks) {
  run_on_threads(2, [](Communicator comm) {
    const auto says = [](ErrorCode code, const std::function<void()>& call, const std::string& text) {
      const std::string said = refused(code, call);
      EXPECT_NE(said.find(text), std::string::npos) << said;
    };
    using Embedding = nn::VocabParallelEmbeddingOptions;
    says(
        ErrorCode::InvalidArgument,
        [&] { nn::VocabParallelEmbedding(comm, Embedding{.num_embeddings = 25, .embedding_dim = 4}); },
        "VocabParallelEmbedding: 25 cannot be cut into 2 equal parts");
    says(
        ErrorCode::Mismatch,
        [&] { nn::VocabParallelEmbedding(comm, Embedding{.num_embeddings = 8, .embedding_dim = 4 + comm.rank()}); },
        "different sizes: 4 on rank 0, 5 on rank 1");
    says(
        ErrorCode::InvalidArgument,
        [&] { nn::RowParallelLinear(comm, nn::RowParallelLinearOptions{.in_features = 0, .out_features = 1}); },
        "a size of 0");
    says(
        ErrorCode::InvalidArgument,
        [&] { nn::ColumnParallelLinear(comm, nn::ColumnParallelLinearOptions{.in_features = 2, .out_features = 3}); },
        "3 cannot be cut");
    // Indices and targets that no rank has are refused with torch's own message.
    nn::VocabParallelEmbedding embedding(comm, Embedding{.num_embeddings = 8, .embedding_dim = 4});
    nn::ParallelCrossEntropy cross_entropy(comm);
    const at::Tensor logits = at::ones({1, 4});
    for (const std::int64_t id : {-1, 8, 1000}) {
      EXPECT_ANY_THROW(embedding(at::full({1}, id, at::kLong))) << id;
      EXPECT_ANY_THROW(cross_entropy(logits, at::full({1}, id, at::kLong))) << id;
      comm.all_reduce(at::ones({1})).wait();  // both were refused
    }
    says(
        ErrorCode::InvalidArgument, [&] { cross_entropy(logits, at::zeros({2}, at::kLong)); }, "one target for each");
  });
  (void)refused(ErrorCode::InvalidArgument, [] { nn::ParallelCrossEntropy{Communicator()}; });
}

// --- what is whole ---

TEST(TensorParallel, ReplicateMakesWhatIsWholeRankZeros) {
  run_on_threads(2, [](Communicator comm) {
    struct NetImpl : torch::nn::Module {
      explicit NetImpl(Communicator& tp, std::int64_t width = 4) {
        plain = register_module("plain", torch::nn::Linear(width, 4));
        norm = register_module("norm", torch::nn::BatchNorm1d(4));
        row = register_module(
            "row", nn::RowParallelLinear(tp, nn::RowParallelLinearOptions{.in_features = 4, .out_features = 4}));
      }
      torch::nn::Linear plain{nullptr};
      torch::nn::BatchNorm1d norm{nullptr};
      nn::RowParallelLinear row{nullptr};
    };
    NetImpl net(comm);
    {
      const at::NoGradGuard no_grad;
      for (at::Tensor& tensor : net.parameters()) tensor.fill_(1 + comm.rank());
      for (at::Tensor& tensor : net.buffers()) tensor.fill_(1 + comm.rank());
    }
    nn::replicate(comm, net);
    for (const auto& item : net.named_parameters()) {
      const int expected = item.key() == "row.weight" ? 1 + comm.rank() : 1;
      EXPECT_TRUE(item.value().eq(expected).all().item<bool>()) << item.key();
    }
    for (const at::Tensor& tensor : net.buffers()) EXPECT_TRUE(tensor.eq(1).all().item<bool>());
    NetImpl other(comm, 4 + comm.rank());
    const std::string said = refused(ErrorCode::Mismatch, [&] { nn::replicate(comm, other); });
    EXPECT_NE(said.find("'plain.weight' of Float [4, 5]"), std::string::npos) << said;
  });
}

TEST(TensorParallel, LayersSayThatWhatHasToBeTheSameDiffers) {
  run_on_threads(2, [](Communicator comm) {
    nn::ColumnParallelLinear column(comm, nn::ColumnParallelLinearOptions{.in_features = 4, .out_features = 4});
    nn::RowParallelLinear row(comm, nn::RowParallelLinearOptions{.in_features = 4, .out_features = 4});
    const at::Tensor x = pattern({8, 4}, 1, at::kFloat);
    const at::Tensor rounded = x + 1e-6 * comm.rank(), other = x + 0.5 * comm.rank();
    (void)column(rounded);  // the first forward is compared
    for (int forward = 1; forward < 64; ++forward) (void)column(other);
    const std::string said = refused(ErrorCode::Mismatch, [&] { (void)column(other); });
    EXPECT_NE(said.find("ColumnParallelLinear: the ranks' input differs"), std::string::npos) << said;
    nn::ColumnParallelLinear sized(comm, nn::ColumnParallelLinearOptions{.in_features = 4, .out_features = 4});
    const std::string sizes = refused(ErrorCode::Mismatch, [&] { (void)sized(x.slice(0, 0, 4 + comm.rank())); });
    EXPECT_NE(sizes.find("elements: 16 on rank 0, 20 on rank 1"), std::string::npos) << sizes;
    {
      const at::NoGradGuard no_grad;
      row->bias.add_(comm.rank());
      (void)row(x.slice(1, 0, 2));  // without gradients nothing is compared
    }
    const std::string bias = refused(ErrorCode::Mismatch, [&] { (void)row(x.slice(1, 0, 2)); });
    EXPECT_NE(bias.find("RowParallelLinear: the ranks' bias differs"), std::string::npos) << bias;
  });
}

TEST(TensorParallel, DropoutOfPartsDrawsAMaskForEachRankAndKeepsGeneratorsInStep) {
  run_on_threads(2, [](Communicator comm) {
    const auto dropout = [&](double p, std::uint64_t seed) {
      return nn::ParallelDropout(comm,
                                 nn::ParallelDropoutOptions{.p = p, .generator = at::detail::createCPUGenerator(seed)});
    };
    const at::Tensor x = at::ones({100, 100});
    nn::ParallelDropout first = dropout(0.25, 5);
    const at::Tensor one = first(x), two = first(x);
    EXPECT_FALSE(at::equal(one, two));
    EXPECT_TRUE(at::equal(one, dropout(0.25, 5)(x))) << "it comes from the generator alone";
    EXPECT_NEAR(one.mean().item<double>(), 1, 0.03);
    EXPECT_NEAR(one.max().item<double>(), 1 / 0.75, 1e-6);
    const at::Tensor all = autograd::all_gather(comm, one.unsqueeze(0));
    EXPECT_NEAR(all[0].ne(0).eq(all[1].ne(0)).to(at::kDouble).mean().item<double>(), 0.625, 0.03) << "independent";
    const at::Tensor grad_of = x.clone().requires_grad_(true);
    dropout(0.25, 5)(grad_of).sum().backward();
    EXPECT_TRUE(at::equal(grad_of.grad(), one));
    EXPECT_EQ(dropout(1, 5)(x).abs().max().item<double>(), 0);
    EXPECT_TRUE(at::equal(dropout(0, 5)(x), x));
    first->eval();
    EXPECT_TRUE(at::equal(first(x), x));
    EXPECT_NE(refused(ErrorCode::InvalidArgument, [&] { dropout(1.5, 5); }).find("a probability of 1.5"),
              std::string::npos);
  });
}

// --- batch normalization ---

struct Case {
  std::vector<std::int64_t> rows;  // by rank
  std::vector<std::int64_t> rest;  // sizes after the channels
  torch::nn::BatchNormOptions options;
};

TEST(SyncBatchNorm, IsThatOfOneProcessWithAllBatches) {
  const auto options = [] { return torch::nn::BatchNormOptions(3); };
  const std::vector<Case> cases = {
      {{4}, {}, options()},
      {{3, 1, 4}, {}, options().momentum(0.3)},
      {{2, 0, 3}, {5}, options().momentum(c10::nullopt)},
      {{1, 2}, {2, 3}, options().affine(false).eps(1e-2)},
      {{2, 2}, {}, options().track_running_stats(false)},
  };
  for (const Case& each : cases) {
    run_on_threads(static_cast<int>(each.rows.size()), [&](Communicator comm) {
      const torch::nn::BatchNormOptions& o = each.options;
      nn::SyncBatchNorm norm(comm, o);
      norm->to(at::kDouble);
      at::Tensor weight, bias, mean, var;
      if (o.affine()) {
        const at::NoGradGuard no_grad;
        norm->weight.copy_(pattern({3}, 1) + 2);
        norm->bias.copy_(pattern({3}, 2));
        weight = norm->weight.detach().clone().requires_grad_(true);
        bias = norm->bias.detach().clone().requires_grad_(true);
      }
      if (o.track_running_stats()) mean = at::zeros({3}, at::kDouble), var = at::ones({3}, at::kDouble);
      std::int64_t all_rows = 0, begin = 0;
      for (std::size_t rank = 0; rank < each.rows.size(); ++rank) {
        if (static_cast<int>(rank) < comm.rank()) begin += each.rows[rank];
        all_rows += each.rows[rank];
      }
      const std::int64_t rows = each.rows[static_cast<std::size_t>(comm.rank())];
      for (int step = 0; step < 3; ++step) {
        std::vector<std::int64_t> sizes{all_rows, 3};
        sizes.insert(sizes.end(), each.rest.begin(), each.rest.end());
        const at::Tensor values = pattern(sizes, step) * 3 + 1000;
        const at::Tensor whole = values.clone().requires_grad_(true);
        const at::Tensor own = values.narrow(0, begin, rows).clone().requires_grad_(true);
        const double factor = o.momentum() ? *o.momentum() : 1.0 / (step + 1);
        const at::Tensor expected = at::batch_norm(whole, weight, bias, mean, var, true, factor, o.eps(), false);
        const at::Tensor y = norm(own);
        at::sin(expected).sum().backward();
        at::sin(y).sum().backward();
        expect_close({y, own.grad()}, {expected.narrow(0, begin, rows), whole.grad().narrow(0, begin, rows)}, 1e-8);
      }
      if (o.affine()) {
        expect_close({autograd::all_reduce(comm, norm->weight.grad()), autograd::all_reduce(comm, norm->bias.grad())},
                     {weight.grad(), bias.grad()}, 1e-8);
      }
      if (!o.track_running_stats()) return;
      expect_close({norm->running_mean, norm->running_var}, {mean, var}, 1e-9);
      EXPECT_EQ(norm->num_batches_tracked.item<std::int64_t>(), 3);
      norm->eval();
      const at::Tensor x = pattern({2, 3}, comm.rank());
      expect_close({norm(x)}, {at::batch_norm(x, weight, bias, mean, var, false, 0, o.eps(), false)}, 1e-9);
    });
  }
}

TEST(SyncBatchNorm, InEvaluationIsOfThisRankAlone) {
  run_on_threads(2, [](Communicator comm) {
    for (const bool tracks : {true, false}) {
      nn::SyncBatchNorm norm(comm, torch::nn::BatchNormOptions(3).track_running_stats(tracks));
      torch::nn::BatchNorm1d same(torch::nn::BatchNormOptions(3).track_running_stats(tracks));
      norm->eval();
      same->eval();
      if (comm.rank() != 0) continue;
      const at::Tensor x = pattern({4, 3}, 1, at::kFloat) + 10;
      expect_equal({norm(x)}, {same(x)});
      if (!tracks) {
        EXPECT_ANY_THROW(norm(x.slice(0, 0, 1)));
      }
    }
    comm.barrier().wait();
  });
}

TEST(SyncBatchNorm, RefusalsAndHalves) {
  run_on_threads(2, [](Communicator comm) {
    nn::SyncBatchNorm norm(comm, torch::nn::BatchNormOptions(3));
    const at::Tensor none = at::ones({comm.rank() == 0 ? 1 : 0, 3});
    EXPECT_NE(refused(ErrorCode::InvalidArgument, [&] { (void)norm(none); }).find("more than one value"),
              std::string::npos);
    EXPECT_NE(refused(ErrorCode::InvalidArgument,
                      [&] {
                        (void)norm(at::ones({2, 4}));
                      })
                  .find("and 4 channels"),
              std::string::npos);
    const at::Tensor x = pattern({4, 3}, comm.rank(), at::kBFloat16).requires_grad_(true);
    const at::Tensor y = norm(x);
    EXPECT_EQ(y.scalar_type(), at::kBFloat16);
    y.sum().backward();
    EXPECT_EQ(x.grad().scalar_type(), at::kBFloat16);
    const at::Tensor z = norm(x).sum();
    EXPECT_NE(refused(ErrorCode::InvalidArgument, [&] { z.backward({}, false, true); }).find("double backward"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace cohort
