// The kernels of reductions on a GPU, with the same bits as comm/kernels/fold.h. Written in a subset of C++ that clang
// compiles to PTX (tools/gpu/write-fold-kernels), and any compiler compiles for the host, where tests compare the bits.
// No fused multiply-add, no flushed denormals, IEEE division; on both, 16-bit floats are rounded to nearest even.
#include "comm/gpu/fold_codecs.h"

namespace cohort::comm::cuda {
namespace {

/// Folds `kAtOnce` vectors: number `at`, and further ones at distance `step`.
template <class Codec, class Step, int kAtOnce>
COHORT_DEVICE void fold_vectors(const FoldArguments& job, Index at, Index step) {
  constexpr int kValues = Codec::kValues;
  typename Codec::Value totals[kAtOnce][kValues];
  const auto load = [&](int k, Words(&raw)[kAtOnce]) {
    const auto* const from = static_cast<const Words*>(job.inputs[k]) + at;
    COHORT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) raw[u] = from[static_cast<Index>(u) * step];
  };
  Words raw[kAtOnce];
  load(0, raw);
  auto scale = Codec::scale(job, 0);
  COHORT_UNROLL
  for (int u = 0; u < kAtOnce; ++u) {
    COHORT_UNROLL
    for (int i = 0; i < kValues; ++i) totals[u][i] = Codec::scaled(Codec::get(raw[u], i), scale);
  }
  for (int k = 1; k < job.input_count; ++k) {
    load(k, raw);
    scale = Codec::scale(job, k);
    COHORT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) {
      COHORT_UNROLL
      for (int i = 0; i < kValues; ++i) {
        totals[u][i] = Folding<Step, Codec>::apply(totals[u][i], Codec::scaled(Codec::get(raw[u], i), scale));
      }
    }
  }
  auto* const to = static_cast<Words*>(job.output) + at;
  COHORT_UNROLL
  for (int u = 0; u < kAtOnce; ++u) {
    Words result = {};
    COHORT_UNROLL
    for (int i = 0; i < kValues; ++i) Codec::set(result, i, Codec::finish(totals[u][i], job));
    to[static_cast<Index>(u) * step] = result;
  }
}

template <class Codec, class Step>
COHORT_DEVICE void fold_element(const FoldArguments& job, Index at) {
  using Part = typename Codec::Part;
  auto total = Codec::scaled(Codec::load(static_cast<const Part*>(job.inputs[0]) + at), Codec::scale(job, 0));
  for (int k = 1; k < job.input_count; ++k) {
    const auto value = Codec::scaled(Codec::load(static_cast<const Part*>(job.inputs[k]) + at), Codec::scale(job, k));
    total = Folding<Step, Codec>::apply(total, value);
  }
  Codec::store(static_cast<Part*>(job.output) + at, Codec::finish(total, job));
}

/// Body of a kernel for thread `own` of `threads`.
template <class Codec, class Step>
COHORT_DEVICE void fold(const FoldArguments& job, Index own, Index threads) {
  constexpr Index kPerVector = 16 / sizeof(typename Codec::Part);
  // Enough concurrent loads to keep the memory busy, without needing more registers.
  constexpr int kAtOnce = Codec::kValues > 4 ? 2 : 4;
  const Index vectors = job.aligned != 0 ? job.count / kPerVector : 0;
  Index at = own;
  if constexpr (Step::kOften && Codec::kOften) {
    for (; at + (kAtOnce - 1) * threads < vectors; at += kAtOnce * threads)
      fold_vectors<Codec, Step, kAtOnce>(job, at, threads);
  }
  for (; at < vectors; at += threads) fold_vectors<Codec, Step, 1>(job, at, threads);
  for (at = vectors * kPerVector + own; at < job.count; at += threads) fold_element<Codec, Step>(job, at);
}

template <class Codec>
COHORT_DEVICE void look(const FoldArguments& job, Index own, Index threads) {
  using Part = typename Codec::Part;
  constexpr Index kPerVector = 16 / sizeof(Part);
  constexpr int kAtOnce = 2;
  const auto* const values = static_cast<const Part*>(job.inputs[0]);
  const Index vectors = job.aligned != 0 ? job.count / kPerVector : 0;
  bool finite = true;
  const auto look_at = [&](const Words& words) {
    COHORT_UNROLL
    for (int i = 0; i < Codec::kValues; ++i) finite = finite && is_finite(Codec::get(words, i));
  };
  const auto* const from = static_cast<const Words*>(job.inputs[0]);
  Index at = own;
  for (; at + (kAtOnce - 1) * threads < vectors; at += kAtOnce * threads) {
    Words raw[kAtOnce];
    COHORT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) raw[u] = from[at + static_cast<Index>(u) * threads];
    COHORT_UNROLL
    for (int u = 0; u < kAtOnce; ++u) look_at(raw[u]);
  }
  for (; at < vectors; at += threads) look_at(from[at]);
  for (at = vectors * kPerVector + own; at < job.count; at += threads)
    finite = finite && is_finite(Codec::load(values + at));
  if (!finite) *static_cast<Word*>(job.output) = 1;
}

}  // namespace

#ifdef __CUDA__
#define COHORT_KERNEL(name, body)                                                                                \
  extern "C" __attribute__((global)) __attribute__((launch_bounds(256))) void cohort_##name(FoldArguments job) { \
    const Index own =                                                                                            \
        static_cast<Index>(__nvvm_read_ptx_sreg_ctaid_x()) * static_cast<Index>(__nvvm_read_ptx_sreg_ntid_x()) + \
        static_cast<Index>(__nvvm_read_ptx_sreg_tid_x());                                                        \
    const Index threads =                                                                                        \
        static_cast<Index>(__nvvm_read_ptx_sreg_nctaid_x()) * static_cast<Index>(__nvvm_read_ptx_sreg_ntid_x()); \
    body(job, own, threads);                                                                                     \
  }
#else
#define COHORT_KERNEL(name, body)                                                                               \
  extern "C" void cohort_##name(const FoldArguments& job, unsigned long long own, unsigned long long threads);  \
  extern "C" void cohort_##name(const FoldArguments& job, unsigned long long own, unsigned long long threads) { \
    body(job, own, threads);                                                                                    \
  }
#endif
#define COHORT_FOLD_KERNEL(name, ...) COHORT_KERNEL(name, (fold<__VA_ARGS__>))
#define COHORT_FINITE_KERNEL(name, ...) COHORT_KERNEL(name, (look<__VA_ARGS__>))

COHORT_FOLD_KERNELS(COHORT_FOLD_KERNEL)
COHORT_FINITE_KERNELS(COHORT_FINITE_KERNEL)

}  // namespace cohort::comm::cuda
