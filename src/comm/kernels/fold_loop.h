// The loop of all kernels of `fold`, over a Codec and a Step. Only the files fold_*.cpp include this header, once per
// instruction set, which is why the guard toggles.
//
// A Codec converts between elements in memory and the Values of the computation. It has Element, Accumulator,
// kScalable, the tag D of a vector of elements, `widen` and `narrow` between such a vector and a Value, `one_nan`,
// which replaces any NaN by the one NaN of results, and Value's arithmetic. A Step folds one more Value into the total.
#if defined(COHORT_COMM_KERNELS_FOLD_LOOP_H) == defined(HWY_TARGET_TOGGLE)
#ifdef COHORT_COMM_KERNELS_FOLD_LOOP_H
#undef COHORT_COMM_KERNELS_FOLD_LOOP_H
#else
#define COHORT_COMM_KERNELS_FOLD_LOOP_H
#endif

#include "comm/kernels/fold.h"

#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

HWY_BEFORE_NAMESPACE();
namespace cohort::comm::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Finishes a total: divides, then multiplies. Instead of dividing by a power of two, multiplies by its inverse, which
// gives the same bits.
template <class Codec>
class Finish {
  using T = typename Codec::Accumulator;
  using Value = typename Codec::Value;

 public:
  explicit Finish(const FoldJob& job) {
    if (job.op == ReduceOp::Average) {
      const auto divisor = job.divisor == 0 ? job.inputs.size() : static_cast<std::size_t>(job.divisor);
      exact_ = (divisor & (divisor - 1)) == 0;
      divides_ = divisor != 1;
      divisor_ = exact_ ? 1 / static_cast<T>(divisor) : static_cast<T>(divisor);
    }
    multiplies_ = job.postscale != 1;
    postscale_ = static_cast<T>(job.postscale);
    any_ = divides_ || multiplies_;
  }
  HWY_INLINE bool any() const { return any_; }
  HWY_INLINE Value apply(Value value) const {
    if (divides_) value = exact_ ? Codec::multiply(value, divisor_) : Codec::divide(value, divisor_);
    return multiplies_ ? Codec::multiply(value, postscale_) : value;
  }

 private:
  bool any_ = false;
  bool divides_ = false;
  bool exact_ = false;
  bool multiplies_ = false;
  T divisor_ = 1;
  T postscale_ = 1;
};

// Finishes totals of integers that are not averaged: there is nothing to do.
struct NoFinish {
  HWY_INLINE bool any() const { return false; }
  template <class Value>
  HWY_INLINE Value apply(Value value) const {
    return value;
  }
};

// The loop over a job. `kInputs`: the number of inputs, or 0 for any number.
template <class Codec, class Step, std::size_t kInputs, bool kScaled>
class Loop {
  using Element = typename Codec::Element;
  using D = typename Codec::D;
  using Value = typename Codec::Value;
  using T = typename Codec::Accumulator;

 public:
  explicit HWY_INLINE Loop(const FoldJob& job) : job_(job) {
    for (std::size_t k = 0; k < kInputs; ++k) from_[k] = static_cast<const Element*>(job.inputs[k]);
  }

  template <class Finishing>
  HWY_INLINE void run(const Finishing& finish) const {
    const D d;
    const std::size_t lanes = hn::Lanes(d);
    const std::size_t count = static_cast<std::size_t>(job_.count) * size_of(job_.dtype) / sizeof(Element);
    Element* const first = static_cast<Element*>(job_.outputs[0]);
    const std::size_t outputs = job_.outputs.size();
    std::size_t i = 0;
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
      if constexpr (Codec::kPrefetch != 0) prefetch(i + Codec::kPrefetch, 4 * lanes);
      const Element* from = input(0) + i;
      Value a = load(0, from);
      Value b = load(0, from + lanes);
      Value c = load(0, from + 2 * lanes);
      Value e = load(0, from + 3 * lanes);
      for (std::size_t k = 1; k < inputs(); ++k) {
        from = input(k) + i;
        a = Codec::template fold<Step>(a, load(k, from));
        b = Codec::template fold<Step>(b, load(k, from + lanes));
        c = Codec::template fold<Step>(c, load(k, from + 2 * lanes));
        e = Codec::template fold<Step>(e, load(k, from + 3 * lanes));
      }
      if (finish.any()) {
        a = finish.apply(a);
        b = finish.apply(b);
        c = finish.apply(c);
        e = finish.apply(e);
      }
      Codec::one_nan(a, b, c, e);
      const auto raw_a = Codec::narrow(a);
      const auto raw_b = Codec::narrow(b);
      const auto raw_c = Codec::narrow(c);
      const auto raw_e = Codec::narrow(e);
      Element* to = first + i;
      for (std::size_t o = 1;; ++o) {
        hn::StoreU(raw_a, d, to);
        hn::StoreU(raw_b, d, to + lanes);
        hn::StoreU(raw_c, d, to + 2 * lanes);
        hn::StoreU(raw_e, d, to + 3 * lanes);
        if (o >= outputs) break;
        to = static_cast<Element*>(job_.outputs[o]) + i;
      }
    }
    for (; i + lanes <= count; i += lanes) {
      Value total = load(0, input(0) + i);
      for (std::size_t k = 1; k < inputs(); ++k) {
        total = Codec::template fold<Step>(total, load(k, input(k) + i));
      }
      if (finish.any()) total = finish.apply(total);
      Codec::one_nan(total);
      const auto raw = Codec::narrow(total);
      for (std::size_t o = 0; o < outputs; ++o) hn::StoreU(raw, d, static_cast<Element*>(job_.outputs[o]) + i);
    }
    if (i < count) partial(finish, i, count - i);
  }

 private:
  HWY_INLINE std::size_t inputs() const { return kInputs != 0 ? kInputs : job_.inputs.size(); }
  HWY_INLINE const Element* input(std::size_t k) const {
    if constexpr (kInputs != 0) {
      return from_[k];
    } else {
      return static_cast<const Element*>(job_.inputs[k]);
    }
  }
  // Prefetches elements of all inputs. Addresses beyond the end do no harm.
  HWY_INLINE void prefetch(std::size_t i, std::size_t elements) const {
    constexpr std::size_t kLine = 64 / sizeof(Element);
    for (std::size_t k = 0; k < inputs(); ++k) {
      for (std::size_t j = 0; j < elements; j += kLine) hwy::Prefetch(input(k) + i + j);
    }
  }
  HWY_INLINE Value load(std::size_t k, const Element* from) const { return scaled(k, Codec::load(from)); }
  HWY_INLINE Value scaled(std::size_t k, Value value) const {
    if constexpr (kScaled) {
      return Codec::multiply(value, static_cast<T>(job_.scales[k]));
    } else {
      static_cast<void>(k);
      return value;
    }
  }

  // Folds less than a vector, with the instructions for whole vectors, on a masked or a padded vector.
  template <class Finishing>
  HWY_INLINE void partial(const Finishing& finish, std::size_t i, std::size_t rest) const {
    const D d;
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
    const auto mask = hn::FirstN(d, rest);
    const auto load_rest = [&](std::size_t k)
                               HWY_ATTR { return scaled(k, Codec::widen(hn::MaskedLoad(mask, d, input(k) + i))); };
#else
    const std::size_t bytes = rest * sizeof(Element);
    HWY_ALIGN Element padded[HWY_MAX_BYTES / sizeof(Element)] = {};
    const auto load_rest = [&](std::size_t k) HWY_ATTR {
      std::memcpy(padded, input(k) + i, bytes);
      return scaled(k, Codec::widen(hn::LoadU(d, padded)));
    };
#endif
    Value total = load_rest(0);
    for (std::size_t k = 1; k < inputs(); ++k) total = Codec::template fold<Step>(total, load_rest(k));
    if (finish.any()) total = finish.apply(total);
    Codec::one_nan(total);
    const auto raw = Codec::narrow(total);
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL
    for (void* const output : job_.outputs) hn::BlendedStore(raw, mask, d, static_cast<Element*>(output) + i);
#else
    hn::StoreU(raw, d, padded);
    for (void* const output : job_.outputs) std::memcpy(static_cast<Element*>(output) + i, padded, bytes);
#endif
  }

  const FoldJob& job_;
  const Element* from_[kInputs != 0 ? kInputs : 1] = {};
};

// The loop over a job in the order of a tree, with up to kFoldBlock inputs.
template <class Codec, class Step>
class TreeLoop {
  using Element = typename Codec::Element;
  using D = typename Codec::D;
  using Value = typename Codec::Value;

 public:
  static void run(const FoldJob& job, const Finish<Codec>& finish) {
    const D d;
    const std::size_t lanes = hn::Lanes(d);
    const std::size_t count = static_cast<std::size_t>(job.count) * size_of(job.dtype) / sizeof(Element);
    std::size_t i = 0;
    for (; i + lanes <= count; i += lanes) {
      const auto raw = vector(job, finish, [&](std::size_t k) HWY_ATTR {
        return Codec::load(static_cast<const Element*>(job.inputs[k]) + i);
      });
      for (void* const output : job.outputs) hn::StoreU(raw, d, static_cast<Element*>(output) + i);
    }
    if (i == count) return;
    const std::size_t bytes = (count - i) * sizeof(Element);
    HWY_ALIGN Element padded[HWY_MAX_BYTES / sizeof(Element)] = {};
    const auto raw = vector(job, finish, [&](std::size_t k) HWY_ATTR {
      std::memcpy(padded, static_cast<const Element*>(job.inputs[k]) + i, bytes);
      return Codec::widen(hn::LoadU(d, padded));
    });
    hn::StoreU(raw, d, padded);
    for (void* const output : job.outputs) std::memcpy(static_cast<Element*>(output) + i, padded, bytes);
  }

 private:
  template <class Load>
  static HWY_INLINE auto vector(const FoldJob& job, const Finish<Codec>& finish, const Load& load) {
    Value total = range<kFoldBlock>(job, load, 0, job.inputs.size());
    if (finish.any()) total = finish.apply(total);
    Codec::one_nan(total);
    return Codec::narrow(total);
  }
  // Folds the inputs [first, first + count), with 0 < count <= kMost.
  template <std::size_t kMost, class Load>
  static HWY_INLINE Value range(const FoldJob& job, const Load& load, std::size_t first, std::size_t count) {
    if constexpr (kMost == 1) {
      if (job.scales.empty()) return load(first);
      return Codec::multiply(load(first), static_cast<typename Codec::Accumulator>(job.scales[first]));
    } else {
      constexpr std::size_t kHalf = kMost / 2;
      if (count <= kHalf) return range<kHalf>(job, load, first, count);
      return Codec::template fold<Step>(range<kHalf>(job, load, first, kHalf),
                                        range<kHalf>(job, load, first + kHalf, count - kHalf));
    }
  }
};

// Folds any number of inputs, with one loop. If no step rounds, every order gives the same bits.
template <class Codec, class Step>
void fold_any(const FoldJob& job) {
  if constexpr (Codec::kScalable) {
    const Finish<Codec> finish(job);
    if constexpr (Step::kRounds) {
      if (job.order == FoldOrder::Tree) return TreeLoop<Codec, Step>::run(job, finish);
    }
    if (job.scales.empty()) return Loop<Codec, Step, 0, false>(job).run(finish);
    return Loop<Codec, Step, 0, true>(job).run(finish);
  } else {
    Loop<Codec, Step, 0, false>(job).run(NoFinish());
  }
}

// Folds, with special loops for the most important numbers of inputs.
template <class Codec, class Step>
void fold_few(const FoldJob& job) {
  if (job.order == FoldOrder::Tree) return fold_any<Codec, Step>(job);
  const Finish<Codec> finish(job);
  if (!job.scales.empty()) return Loop<Codec, Step, 0, true>(job).run(finish);
  switch (job.inputs.size()) {
    case 1: return Loop<Codec, Step, 1, false>(job).run(finish);
    case 2: return Loop<Codec, Step, 2, false>(job).run(finish);
    case 3: return Loop<Codec, Step, 3, false>(job).run(finish);
    case 4: return Loop<Codec, Step, 4, false>(job).run(finish);
    default: return Loop<Codec, Step, 0, false>(job).run(finish);
  }
}

struct AddStep {
  static constexpr bool kRounds = true;
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Add(total, value);
  }
};
struct MultiplyStep {
  static constexpr bool kRounds = true;
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::Mul(total, value);
  }
};
// Keeps a NaN, and of equal values (+0 and -0) the first rank's. Compares explicitly, since min instructions differ.
struct MinFloatStep {
  static constexpr bool kRounds = false;
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::IfThenElse(hn::Or(hn::Lt(value, total), hn::IsNaN(value)), value, total);
  }
};
struct MaxFloatStep {
  static constexpr bool kRounds = false;
  template <class V>
  static HWY_INLINE V apply(V total, V value) {
    return hn::IfThenElse(hn::Or(hn::Lt(total, value), hn::IsNaN(value)), value, total);
  }
};

}  // namespace cohort::comm::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();
#endif
