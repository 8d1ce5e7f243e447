// Arguments of the kernels that fold on a GPU, and the list of these kernels. Included by their source
// (fold_kernels.cu), which is compiled for GPUs as well, so it includes nothing. Plain data.
#pragma once

namespace cohort::comm::cuda {

/// One fold, like FoldJob (comm/kernels/fold.h), in a form that can be passed by value: at most 4 KiB.
struct FoldArguments {
  static constexpr int kMostInputs = 192;

  const void* inputs[kMostInputs];  // aligned to their elements
  double scales[kMostInputs];       // 1: no factor
  float single_scales[kMostInputs];
  void* output;              // the same memory as an input or disjoint from all of them
  unsigned long long count;  // in the kernel's units: elements, parts of complex numbers, or bytes
  double postscale;
  int input_count;  // 1 or more
  int divisor;      // from 1 to 2^24; 1: nothing is divided
  int aligned;      // not 0: inputs and output are aligned to 16 bytes
};

static_assert(sizeof(FoldArguments) == 3880);  // with every compiler

}  // namespace cohort::comm::cuda

/// Calls KERNEL(name, codec, step) for each kernel that folds.
#define COHORT_FOLD_KERNELS(KERNEL)                               \
  KERNEL(float32_add, Floats<float>, Add)                         \
  KERNEL(float32_multiply, Floats<float>, Multiply)               \
  KERNEL(float32_min, Floats<float>, MinFloat)                    \
  KERNEL(float32_max, Floats<float>, MaxFloat)                    \
  KERNEL(float64_add, Floats<double>, Add)                        \
  KERNEL(float64_multiply, Floats<double>, Multiply)              \
  KERNEL(float64_min, Floats<double>, MinFloat)                   \
  KERNEL(float64_max, Floats<double>, MaxFloat)                   \
  KERNEL(float16_add, Halves<Float16>, Add)                       \
  KERNEL(float16_multiply, Halves<Float16>, Multiply)             \
  KERNEL(float16_min, Halves<Float16>, MinFloat)                  \
  KERNEL(float16_max, Halves<Float16>, MaxFloat)                  \
  KERNEL(bfloat16_add, Halves<BFloat16>, Add)                     \
  KERNEL(bfloat16_multiply, Halves<BFloat16>, Multiply)           \
  KERNEL(bfloat16_min, Halves<BFloat16>, MinFloat)                \
  KERNEL(bfloat16_max, Halves<BFloat16>, MaxFloat)                \
  KERNEL(complex64_multiply, Complexes<float>, Multiply)          \
  KERNEL(complex128_multiply, Complexes<double>, Multiply)        \
  KERNEL(uint8_add, Integers<unsigned char>, Add)                 \
  KERNEL(uint16_add, Integers<unsigned short>, Add)               \
  KERNEL(uint32_add, Integers<unsigned>, Add)                     \
  KERNEL(uint64_add, Integers<unsigned long long>, Add)           \
  KERNEL(uint8_multiply, Integers<unsigned char>, Multiply)       \
  KERNEL(uint16_multiply, Integers<unsigned short>, Multiply)     \
  KERNEL(uint32_multiply, Integers<unsigned>, Multiply)           \
  KERNEL(uint64_multiply, Integers<unsigned long long>, Multiply) \
  KERNEL(int8_min, Integers<signed char>, Min)                    \
  KERNEL(int16_min, Integers<short>, Min)                         \
  KERNEL(int32_min, Integers<int>, Min)                           \
  KERNEL(int64_min, Integers<long long>, Min)                     \
  KERNEL(uint8_min, Integers<unsigned char>, Min)                 \
  KERNEL(uint16_min, Integers<unsigned short>, Min)               \
  KERNEL(uint32_min, Integers<unsigned>, Min)                     \
  KERNEL(uint64_min, Integers<unsigned long long>, Min)           \
  KERNEL(int8_max, Integers<signed char>, Max)                    \
  KERNEL(int16_max, Integers<short>, Max)                         \
  KERNEL(int32_max, Integers<int>, Max)                           \
  KERNEL(int64_max, Integers<long long>, Max)                     \
  KERNEL(uint8_max, Integers<unsigned char>, Max)                 \
  KERNEL(uint16_max, Integers<unsigned short>, Max)               \
  KERNEL(uint32_max, Integers<unsigned>, Max)                     \
  KERNEL(uint64_max, Integers<unsigned long long>, Max)           \
  KERNEL(int8_average, Averages<signed char>, Add)                \
  KERNEL(int16_average, Averages<short>, Add)                     \
  KERNEL(int32_average, Averages<int>, Add)                       \
  KERNEL(int64_average, Averages<long long>, Add)                 \
  KERNEL(uint8_average, Averages<unsigned char>, Add)             \
  KERNEL(uint16_average, Averages<unsigned short>, Add)           \
  KERNEL(uint32_average, Averages<unsigned>, Add)                 \
  KERNEL(uint64_average, Averages<unsigned long long>, Add)       \
  KERNEL(bytes_and, Bits, And)                                    \
  KERNEL(bytes_or, Bits, Or)                                      \
  KERNEL(bytes_xor, Bits, Xor)                                    \
  KERNEL(bool_and, Bools, And)                                    \
  KERNEL(bool_or, Bools, Or)                                      \
  KERNEL(bool_xor, Bools, Xor)

/// Calls KERNEL(name, codec) for each kernel that sets the unsigned `output` to 1 where a value of `inputs[0]` is not
/// finite.
#define COHORT_FINITE_KERNELS(KERNEL)       \
  KERNEL(float16_finite, Halves<Float16>)   \
  KERNEL(bfloat16_finite, Halves<BFloat16>) \
  KERNEL(float32_finite, Floats<float>)     \
  KERNEL(float64_finite, Floats<double>)
