// Arithmetic of the kernels that fold on a GPU (fold_kernels.cu): Codecs convert numbers in memory to values, Steps
// fold a value into a total. Compiled for GPUs as well, so it includes no library headers.
//
// A Codec defines how a vector of 16 bytes is converted to kValues values for computing, and how one element (Part) is
// converted. Integers stay packed, several lanes in a word. A Step folds one more value into the total.
#pragma once

#include "comm/gpu/fold_kernels.h"

#ifdef __CUDA__
#define COHORT_DEVICE __attribute__((device)) __attribute__((always_inline)) inline
#else
#define COHORT_DEVICE inline
#endif
#define COHORT_UNROLL _Pragma("GCC unroll 16")
#ifdef __clang__
#undef COHORT_UNROLL
#define COHORT_UNROLL _Pragma("unroll")
#endif

namespace cohort::comm::cuda {
namespace {

using Word = unsigned;
using Index = unsigned long long;
using Words = Word __attribute__((vector_size(16)));
constexpr int kWords = 4;

template <class To, class From>
COHORT_DEVICE To bits_of(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// --- steps ---

// kOften: the step is common enough for a loop that loads several vectors together.
struct Add {
  static constexpr bool kOften = true;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return static_cast<T>(total + value);
  }
};
struct Multiply {
  static constexpr bool kOften = false;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return static_cast<T>(total * value);
  }
};
struct Min {
  static constexpr bool kOften = false;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return value < total ? value : total;
  }
};
struct Max {
  static constexpr bool kOften = false;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return total < value ? value : total;
  }
};
// If a value is NaN, the result is NaN; of equal values (+0 and -0), the first rank's is kept.
struct MinFloat {
  static constexpr bool kOften = false;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return value < total || value != value ? value : total;
  }
};
struct MaxFloat {
  static constexpr bool kOften = false;
  template <class T>
  static COHORT_DEVICE T apply(T total, T value) {
    return total < value || value != value ? value : total;
  }
};
struct And {
  static constexpr bool kOften = false;
  static COHORT_DEVICE Word apply(Word total, Word value) { return total & value; }
};
struct Or {
  static constexpr bool kOften = false;
  static COHORT_DEVICE Word apply(Word total, Word value) { return total | value; }
};
struct Xor {
  static constexpr bool kOften = false;
  static COHORT_DEVICE Word apply(Word total, Word value) { return total ^ value; }
};

// --- codecs ---

template <class T>
struct Scales;
template <>
struct Scales<float> {
  static COHORT_DEVICE float of(const FoldArguments& job, int k) { return job.single_scales[k]; }
};
template <>
struct Scales<double> {
  static COHORT_DEVICE double of(const FoldArguments& job, int k) { return job.scales[k]; }
};

/// Finishes the total of real numbers (scaling, division); factors of 1 change no bit.
template <class T>
COHORT_DEVICE T finished(T total, const FoldArguments& job) {
  if (job.divisor != 1) total = total / static_cast<T>(job.divisor);
  return total * static_cast<T>(job.postscale);
}

COHORT_DEVICE float one_nan(float value) { return value != value ? bits_of<float>(0x7FC00000u) : value; }
COHORT_DEVICE double one_nan(double value) { return value != value ? bits_of<double>(0x7FF8000000000000ull) : value; }
COHORT_DEVICE bool is_finite(float value) { return (bits_of<Word>(value) & 0x7F800000u) != 0x7F800000u; }
COHORT_DEVICE bool is_finite(double value) {
  constexpr unsigned long long kExponent = 0x7FF0000000000000ull;
  return (bits_of<unsigned long long>(value) & kExponent) != kExponent;
}

/// Accesses the words of a vector as values of four or eight bytes.
template <class Value>
struct Plain {
  static constexpr int kValues = 16 / sizeof(Value);
  static COHORT_DEVICE Value get(const Words& words, int i) {
    if constexpr (sizeof(Value) == 4) {
      return bits_of<Value>(static_cast<Word>(words[i]));
    } else {
      const unsigned long long low = words[2 * i], high = words[2 * i + 1];
      return bits_of<Value>(low | high << 32);
    }
  }
  static COHORT_DEVICE void set(Words& words, int i, Value value) {
    if constexpr (sizeof(Value) == 4) {
      words[i] = bits_of<Word>(value);
    } else {
      const auto both = bits_of<unsigned long long>(value);
      words[2 * i] = static_cast<Word>(both);
      words[2 * i + 1] = static_cast<Word>(both >> 32);
    }
  }
};

template <class T>
struct Floats {
  using Part = T;
  using Value = T;
  using Scale = T;
  static constexpr bool kOften = true;
  static constexpr int kValues = Plain<T>::kValues;
  static COHORT_DEVICE Scale scale(const FoldArguments& job, int k) { return Scales<T>::of(job, k); }
  static COHORT_DEVICE Value get(const Words& words, int i) { return Plain<T>::get(words, i); }
  static COHORT_DEVICE void set(Words& words, int i, Value value) { Plain<T>::set(words, i, one_nan(value)); }
  static COHORT_DEVICE Value load(const Part* from) { return *from; }
  static COHORT_DEVICE void store(Part* to, Value value) { *to = one_nan(value); }
  static COHORT_DEVICE Value scaled(Value value, Scale by) { return value * by; }
  static COHORT_DEVICE Value finish(Value total, const FoldArguments& job) { return finished(total, job); }
};

struct BFloat16 {
  static COHORT_DEVICE float widen(Word half) { return bits_of<float>(half << 16); }
  /// Rounds to nearest, ties to even.
  static COHORT_DEVICE Word narrow(float value) {
    const Word bits = bits_of<Word>(value);
    return value != value ? 0x7FC0u : (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
  }
};
struct Float16 {
#ifdef __CUDA__
  // A GPU's own conversions are exact, and round to nearest even.
  static COHORT_DEVICE float widen(Word half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(static_cast<unsigned short>(half)));
    return wide;
  }
  static COHORT_DEVICE Word narrow(float value) {
    unsigned short half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return value != value ? 0x7E00u : half;
  }
#else
  static COHORT_DEVICE float widen(Word half) {
    const Word sign = (half & 0x8000u) << 16;
    // Multiplying by a power of two is exact, even for denormals.
    const Word magnitude = bits_of<Word>(bits_of<float>((half & 0x7FFFu) << 13) * bits_of<float>(239u << 23));
    return bits_of<float>(sign | magnitude | ((half & 0x7C00u) == 0x7C00u ? 0x7F800000u : 0u));
  }
  /// Rounds to nearest, ties to even. After F. Giesen (public domain), as in fold_halves.cpp.
  static COHORT_DEVICE Word narrow(float value) {
    const Word bits = bits_of<Word>(value);
    const Word magnitude = bits & 0x7FFFFFFFu;
    const Word normal = (magnitude + 0xC8000FFFu + (magnitude >> 13 & 1u)) >> 13;  // ((15 - 127) << 23) + 0xFFF
    const Word small = bits_of<Word>(bits_of<float>(magnitude) + 0.5f) - bits_of<Word>(0.5f);
    const Word result = magnitude < 113u << 23 ? small : magnitude > 0x477FFFFFu ? 0x7C00u : normal;
    return value != value ? 0x7E00u : result | (bits >> 16 & 0x8000u);
  }
#endif
};

template <class Format>
struct Halves {
  using Part = unsigned short;
  using Value = float;
  using Scale = float;
  static constexpr bool kOften = true;
  static constexpr int kValues = 8;
  static COHORT_DEVICE Scale scale(const FoldArguments& job, int k) { return job.single_scales[k]; }
  static COHORT_DEVICE Value get(const Words& words, int i) {
    return Format::widen(i % 2 == 0 ? words[i / 2] & 0xFFFFu : words[i / 2] >> 16);
  }
  static COHORT_DEVICE void set(Words& words, int i, Value value) {
    const Word half = Format::narrow(value);
    words[i / 2] = i % 2 == 0 ? half : words[i / 2] | half << 16;
  }
  static COHORT_DEVICE Value load(const Part* from) { return Format::widen(*from); }
  static COHORT_DEVICE void store(Part* to, Value value) { *to = static_cast<Part>(Format::narrow(value)); }
  static COHORT_DEVICE Value scaled(Value value, Scale by) { return value * by; }
  static COHORT_DEVICE Value finish(Value total, const FoldArguments& job) { return finished(total, job); }
};

/// Products of complex numbers; sums are computed on their parts.
template <class T>
struct Complexes {
  struct Value {
    T real, imaginary;
    friend COHORT_DEVICE Value operator*(const Value& x, const Value& y) {
      return {x.real * y.real - x.imaginary * y.imaginary, x.real * y.imaginary + x.imaginary * y.real};
    }
  };
  using Part = Value;
  using Scale = T;
  static constexpr bool kOften = false;
  static constexpr int kValues = Plain<T>::kValues / 2;
  static COHORT_DEVICE Scale scale(const FoldArguments& job, int k) { return Scales<T>::of(job, k); }
  static COHORT_DEVICE Value get(const Words& words, int i) {
    return {Plain<T>::get(words, 2 * i), Plain<T>::get(words, 2 * i + 1)};
  }
  static COHORT_DEVICE void set(Words& words, int i, const Value& value) {
    Plain<T>::set(words, 2 * i, one_nan(value.real));
    Plain<T>::set(words, 2 * i + 1, one_nan(value.imaginary));
  }
  static COHORT_DEVICE Value load(const Part* from) { return *from; }
  static COHORT_DEVICE void store(Part* to, const Value& value) {
    *to = {one_nan(value.real), one_nan(value.imaginary)};
  }
  static COHORT_DEVICE Value scaled(const Value& value, Scale by) { return {value.real * by, value.imaginary * by}; }
  static COHORT_DEVICE Value finish(const Value& total, const FoldArguments& job) {
    return {finished(total.real, job), finished(total.imaginary, job)};
  }
};

struct NoScale {};

/// Words of four bytes, unconverted.
struct Whole {
  using Scale = NoScale;
  static constexpr bool kOften = false;
  static constexpr int kValues = kWords;
  static COHORT_DEVICE Scale scale(const FoldArguments&, int) { return {}; }
  static COHORT_DEVICE Word scaled(Word value, Scale) { return value; }
  static COHORT_DEVICE Word finish(Word total, const FoldArguments&) { return total; }
};
struct Bits : Whole {
  using Part = unsigned char;
  using Value = Word;
  static COHORT_DEVICE Word get(const Words& words, int i) { return words[i]; }
  static COHORT_DEVICE void set(Words& words, int i, Word value) { words[i] = value; }
  static COHORT_DEVICE Word load(const Part* from) { return *from; }
  static COHORT_DEVICE void store(Part* to, Word value) { *to = static_cast<Part>(value); }
};
/// Each byte is 0 or 1, which the steps preserve.
struct Bools : Bits {
  static COHORT_DEVICE Word get(const Words& words, int i) { return ones(words[i]); }
  static COHORT_DEVICE Word load(const Part* from) { return ones(*from); }

 private:
  static COHORT_DEVICE Word ones(Word bytes) {
    return ((((bytes & 0x7F7F7F7Fu) + 0x7F7F7F7Fu) | bytes) & 0x80808080u) >> 7;
  }
};

template <int kBytes>
struct SignedOf;
template <>
struct SignedOf<1> {
  using Type = signed char;
};
template <>
struct SignedOf<2> {
  using Type = short;
};
template <>
struct SignedOf<4> {
  using Type = int;
};
template <>
struct SignedOf<8> {
  using Type = long long;
};
/// Types in which a lane is stored and computed; small types are computed as int or unsigned.
template <class T, bool kLong = sizeof(T) == 8>
struct LaneOf {
  using Held = Word;
  static constexpr bool kSigned = static_cast<T>(-1) < static_cast<T>(0);
  template <bool kOfSigned, class Signed, class Unsigned>
  struct Choose {
    using Type = Signed;
  };
  template <class Signed, class Unsigned>
  struct Choose<false, Signed, Unsigned> {
    using Type = Unsigned;
  };
  using Wide = typename Choose<kSigned, int, unsigned>::Type;
};
template <class T>
struct LaneOf<T, true> {
  using Held = unsigned long long;
  using Wide = T;
};

/// Integers of type T, packed as lanes in a word.
template <class T>
struct Lanes {
  using Held = typename LaneOf<T>::Held;
  using Wide = typename LaneOf<T>::Wide;
  static constexpr int kBits = 8 * static_cast<int>(sizeof(T));
  static constexpr int kLanes = static_cast<int>(sizeof(Held) / sizeof(T));

  /// Calls `apply(lane)` or `apply(lane, lane)` for each lane.
  template <class Apply, class... Value>
  static COHORT_DEVICE Held each(const Apply& apply, Value... values) {
    if constexpr (kLanes == 1) {
      return static_cast<Held>(apply(static_cast<Wide>(static_cast<T>(values))...));
    } else {
      Held all = 0;
      COHORT_UNROLL
      for (int i = 0; i < kLanes; ++i) {
        const Held lane = static_cast<Held>(apply(static_cast<Wide>(static_cast<T>(values >> (i * kBits)))...));
        all |= (lane & ((Held{1} << kBits) - 1)) << (i * kBits);
      }
      return all;
    }
  }
};

template <class T>
struct Integers {
  using Part = T;
  using Value = typename Lanes<T>::Held;
  using Scale = NoScale;
  static constexpr bool kOften = sizeof(T) >= 4;
  static constexpr int kValues = Plain<Value>::kValues;
  static COHORT_DEVICE Scale scale(const FoldArguments&, int) { return {}; }
  static COHORT_DEVICE Value get(const Words& words, int i) { return Plain<Value>::get(words, i); }
  static COHORT_DEVICE void set(Words& words, int i, Value value) { Plain<Value>::set(words, i, value); }
  static COHORT_DEVICE Value load(const Part* from) { return static_cast<Value>(*from); }
  static COHORT_DEVICE void store(Part* to, Value value) { *to = static_cast<Part>(value); }
  static COHORT_DEVICE Value scaled(Value value, Scale) { return value; }
  static COHORT_DEVICE Value finish(Value total, const FoldArguments&) { return total; }
};

/// Averages of integers. Sums wrap around, so they use unsigned lanes; only the division depends on the sign.
template <class T>
struct Averages : Integers<T> {
  static constexpr bool kOften = false;
  using Value = typename Integers<T>::Value;
  static COHORT_DEVICE Value finish(Value total, const FoldArguments& job) {
    using Wide = typename Lanes<T>::Wide;
    const Wide divisor = static_cast<Wide>(job.divisor);
    return Lanes<T>::each([divisor](Wide lane) { return static_cast<Wide>(lane / divisor); }, total);
  }
};

/// Folds one more value, either one number or all lanes of a word.
template <class Step, class Codec>
struct Folding {
  static COHORT_DEVICE typename Codec::Value apply(const typename Codec::Value& total,
                                                   const typename Codec::Value& value) {
    return Step::apply(total, value);
  }
};
template <class Step, class T>
struct Folding<Step, Integers<T>> {
  using Held = typename Lanes<T>::Held;
  using Wide = typename Lanes<T>::Wide;
  static COHORT_DEVICE Held apply(Held total, Held value) {
    return Lanes<T>::each([](Wide x, Wide y) { return Step::apply(x, y); }, total, value);
  }
};
template <class T>
struct Folding<Add, Averages<T>> {
  using Wide = typename LaneOf<T>::Held;
  static COHORT_DEVICE typename Lanes<T>::Held apply(Wide total, Wide value) {
    return Lanes<T>::each([](auto x, auto y) { return static_cast<Wide>(x) + static_cast<Wide>(y); }, total, value);
  }
};

}  // namespace
}  // namespace cohort::comm::cuda
