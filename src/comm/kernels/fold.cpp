#include "comm/kernels/fold.h"

#include "base/result.h"
#include "comm/kernels/arrays.h"
#include "comm/kernels/float_environment.h"

#include <hwy/highway.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

namespace cohort::comm {
namespace {

constexpr std::int64_t kLargestDivisor = 1 << 24;
constexpr std::size_t kTargets = HWY_MAX_DYNAMIC_TARGETS + 2;  // number of Highway's target indices

FoldKernel find_kernel(DType dtype, ReduceOp op) {
  if (dtype == DType::Float16 || dtype == DType::BFloat16) return find_half_kernel(dtype, op);
  return is_scalable(dtype) ? find_float_kernel(dtype, op) : find_integer_kernel(dtype, op);
}

// Looks up each kernel only once, so that a small fold finds it with one load.
FoldKernel kernel_for(DType dtype, ReduceOp op) {
  static std::atomic<FoldKernel> found[kTargets][kDTypeCount][kReduceOpCount];
  if (static_cast<std::size_t>(dtype) >= kDTypeCount || static_cast<std::size_t>(op) >= kReduceOpCount) return nullptr;
  const std::size_t target = hwy::GetChosenTarget().GetIndex();  // 0 until the first dispatch has chosen one
  std::atomic<FoldKernel>& slot = found[target][static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  FoldKernel kernel = slot.load(std::memory_order_relaxed);
  if (kernel == nullptr) {
    kernel = find_kernel(dtype, op);
    if (target != 0) slot.store(kernel, std::memory_order_relaxed);
  }
  return kernel;
}

[[noreturn]] void refuse(const FoldJob& job) {
  if (!supports(job.dtype, job.op)) {
    raise(ErrorCode::InvalidArgument, "fold: {} has no {}", to_string(job.dtype), to_string(job.op));
  }
  if (job.divisor < 0 || job.divisor > kLargestDivisor) {
    raise(ErrorCode::InvalidArgument, "fold: a divisor of {}; it has to be from 0 to {}", job.divisor, kLargestDivisor);
  }
  if (!is_scalable(job.dtype)) {
    raise(ErrorCode::InvalidArgument, "fold: factors do not go with elements of type {}", to_string(job.dtype));
  }
  raise(ErrorCode::InvalidArgument, "fold: {} scales for {} inputs", job.scales.size(), job.inputs.size());
}

bool has_wrong_factors(const FoldJob& job) {
  const bool factors = !job.scales.empty() || job.postscale != 1;
  return factors && (!is_scalable(job.dtype) || (!job.scales.empty() && job.scales.size() != job.inputs.size()));
}

constexpr std::size_t kInputsAtOnce = 64;

void look_at(const void* results, std::int64_t count, const FoldJob& job) {
  if (job.non_finite != nullptr && !*job.non_finite) *job.non_finite = has_non_finite(results, count, job.dtype);
}

// Calls `fold_block(part, offset)` for each block of `bytes` bytes of the job's results; the block begins at byte
// `offset`. `part` has the job's outputs, or only `output` if that is given. Up to kInputsAtOnce inputs and outputs.
template <class Body>
void for_each_block(const FoldJob& job, std::size_t bytes, void* output, const Body& fold_block) {
  const std::size_t element = size_of(job.dtype);
  const std::size_t per_block = bytes / element;
  const std::size_t count = static_cast<std::size_t>(job.count);
  const void* inputs[kInputsAtOnce];
  void* outputs[kInputsAtOnce];
  FoldJob part = job;
  part.inputs = {inputs, job.inputs.size()};
  part.outputs = {outputs, output != nullptr ? 1 : job.outputs.size()};
  for (std::size_t begin = 0; begin < count; begin += per_block) {
    const std::size_t offset = begin * element;
    for (std::size_t k = 0; k < job.inputs.size(); ++k) {
      inputs[k] = static_cast<const std::byte*>(job.inputs[k]) + offset;
    }
    for (std::size_t o = 0; o < part.outputs.size(); ++o) {
      outputs[o] = output != nullptr ? output : static_cast<std::byte*>(job.outputs[o]) + offset;
    }
    part.count = static_cast<std::int64_t>(std::min(per_block, count - begin));
    fold_block(part, offset);
  }
}

// Folds through a buffer that stays in the first-level cache. Streaming in the kernels themselves would need a second
// loop in each of them, and would not be faster.
void fold_non_temporal(const FoldJob& job, FoldKernel kernel) {
  constexpr std::size_t kBlock = 4096;
  alignas(64) std::byte block[kBlock];
  for_each_block(job, kBlock, block, [&](const FoldJob& part, std::size_t offset) {
    kernel(part);
    look_at(block, part.count, job);
    const std::size_t bytes = static_cast<std::size_t>(part.count) * size_of(job.dtype);
    for (void* const to : job.outputs) {
      // An output that is also an input has just been read into the caches, and would have to be evicted to stream it.
      const bool in_place = std::find(job.inputs.begin(), job.inputs.end(), to) != job.inputs.end();
      copy_unfenced(static_cast<std::byte*>(to) + offset, block, bytes,
                    in_place ? Stores::Cached : Stores::NonTemporal);
    }
  });
  fence(Stores::NonTemporal);
}

// Works in blocks only if results are checked for non-finite values: each block is then checked while it is in the
// first-level cache.
void fold_cached(const FoldJob& job, FoldKernel kernel) {
  constexpr std::size_t kBlock = 16384;
  const bool few = job.inputs.size() <= kInputsAtOnce && job.outputs.size() <= kInputsAtOnce;
  if (job.non_finite == nullptr || !few) {
    kernel(job);
    look_at(job.outputs[0], job.count, job);
    return;
  }
  for_each_block(job, kBlock, nullptr, [&](const FoldJob& part, std::size_t) {
    kernel(part);
    look_at(part.outputs[0], part.count, job);
  });
}

constexpr std::size_t kTreeStretch = 1024;  // bytes of each input that are folded at once in the order of a tree

// Folds a stretch of the job's inputs, which begins at byte `offset`, to `output`: block by block, then the blocks.
void fold_stretch(FoldJob job, std::size_t offset, void* output, FoldKernel kernel) {
  const std::size_t inputs = job.inputs.size();
  alignas(64) std::byte sums[kFoldBlock][kTreeStretch];
  const void* from[kFoldBlock];
  std::size_t block = 1;
  while (block * kFoldBlock < inputs) block *= kFoldBlock;
  const std::size_t blocks = (inputs + block - 1) / block;
  for (std::size_t b = 0; b < blocks; ++b) {
    from[b] = static_cast<const std::byte*>(job.inputs[b]) + offset;
    if (block == 1) continue;
    FoldJob part = job;
    part.op = job.op == ReduceOp::Average ? ReduceOp::Sum : job.op;
    part.postscale = 1;
    part.inputs = job.inputs.subspan(b * block, std::min(block, inputs - b * block));
    if (!job.scales.empty()) part.scales = job.scales.subspan(b * block, part.inputs.size());
    fold_stretch(part, offset, sums[b], kernel_for(part.dtype, part.op));
    from[b] = sums[b];
  }
  if (job.divisor == 0) job.divisor = static_cast<std::int64_t>(inputs);
  if (block > 1) job.scales = {};
  job.inputs = {from, blocks};
  job.outputs = {&output, 1};
  kernel(job);
}

void fold_tree(const FoldJob& job, FoldKernel kernel) {
  const std::size_t element = size_of(job.dtype);
  const std::size_t bytes = static_cast<std::size_t>(job.count) * element;
  alignas(64) std::byte result[kTreeStretch];
  for (std::size_t offset = 0; offset < bytes; offset += kTreeStretch) {
    FoldJob part = job;
    const std::size_t here = std::min(kTreeStretch, bytes - offset);
    part.count = static_cast<std::int64_t>(here / element);
    fold_stretch(part, offset, result, kernel);
    look_at(result, part.count, job);
    for (void* const output : job.outputs) std::memcpy(static_cast<std::byte*>(output) + offset, result, here);
  }
}

}  // namespace

void fold(const FoldJob& job) {
  const FoldKernel kernel = kernel_for(job.dtype, job.op);
  if (kernel == nullptr || has_wrong_factors(job) || static_cast<std::uint64_t>(job.divisor) > kLargestDivisor) {
    refuse(job);
  }
  if (job.count == 0 || job.outputs.empty()) return;
  if (job.inputs.empty()) {
    for (void* const output : job.outputs)
      std::memset(output, 0, static_cast<std::size_t>(job.count) * size_of(job.dtype));
    return;
  }
  const FloatEnvironment environment;
  if (job.order == FoldOrder::Tree && job.inputs.size() > kFoldBlock) {
    fold_tree(job, kernel);
  } else if (job.stores == Stores::NonTemporal && job.inputs.size() <= kInputsAtOnce) {
    fold_non_temporal(job, kernel);
  } else {
    fold_cached(job, kernel);
  }
}

Weighting weigh(std::span<const double> weights) {
  Weighting result;
  weigh(weights, result);
  return result;
}

void weigh(std::span<const double> weights, Weighting& into) {
  into.members.clear();
  into.fractions.clear();
  double largest = 0;
  bool equal = true;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    if (weights[i] <= 0) continue;
    if (!into.members.empty()) equal = equal && weights[i] == largest;
    largest = std::max(largest, weights[i]);
    into.members.push_back(static_cast<int>(i));
  }
  if (equal) return;
  double total = 0;  // sum of weights relative to the largest, so that it cannot overflow
  for (const int member : into.members) total += weights[static_cast<std::size_t>(member)] / largest;
  for (const int member : into.members) {
    into.fractions.push_back(weights[static_cast<std::size_t>(member)] / largest / total);
  }
}

}  // namespace cohort::comm
