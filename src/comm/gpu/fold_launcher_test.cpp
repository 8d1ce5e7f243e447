// Folds by the kernels for GPUs, compiled for the host, against the plain reference: the same bits, element by element.
#include "comm/gpu/fold_launcher.h"
#include "comm/testing/gpu_folds.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

namespace cohort::comm::testing {
namespace {

void fail(const std::string& text) { ADD_FAILURE() << text; }

TEST(GpuFolds, GiveTheReferencesBits) {
  GpuFolds gpu(cuda::Gpu::at(0));
  EXPECT_GT(try_folds(gpu, fail), 5000);
}

TEST(GpuFolds, RoundAllHalvesToNearestEven) {
  GpuFolds gpu(cuda::Gpu::at(0));
  EXPECT_EQ(try_halves(gpu, fail), 40);
}

TEST(GpuFolds, TakeManyInputs) {
  GpuFolds gpu(cuda::Gpu::at(1));
  std::vector<Bytes> inputs;
  for (std::size_t k = 0; k < cuda::FoldLauncher::kMostInputs; ++k)
    inputs.push_back(interesting(DType::BFloat16, 40, k));
  for (const ReduceOp op : {ReduceOp::Average, ReduceOp::Max})
    EXPECT_EQ(gpu.fold(DType::BFloat16, op, inputs, 40, {}, 0), reference_fold(DType::BFloat16, op, inputs, 40));
}

template <class T>
Bytes with(T value, std::size_t at, std::size_t count) {
  Bytes bytes(count * sizeof(T));
  std::memcpy(bytes.data() + at * sizeof(T), &value, sizeof(T));
  return bytes;
}

TEST(GpuFolds, FindWhatIsNotFinite) {
  GpuFolds gpu(cuda::Gpu::at(0));
  constexpr std::size_t kCount = 101;
  for (std::size_t at = 0; at < kCount; ++at) {
    for (const std::size_t skew : {0u, 1u}) {
      const auto found = [&](DType dtype, const Bytes& values) { return gpu.has_non_finite(dtype, values, skew); };
      EXPECT_TRUE(found(DType::Float32, with(std::numeric_limits<float>::quiet_NaN(), at, kCount)));
      EXPECT_FALSE(found(DType::Float32, with(std::numeric_limits<float>::max(), at, kCount)));
      EXPECT_TRUE(found(DType::Complex64, with(-std::numeric_limits<float>::infinity(), at, 2 * kCount)));
      EXPECT_TRUE(found(DType::Float64, with(std::numeric_limits<double>::infinity(), at, kCount)));
      EXPECT_FALSE(found(DType::Complex128, with(-std::numeric_limits<double>::max(), at, 2 * kCount)));
      EXPECT_TRUE(found(DType::Float16, with(std::uint16_t{0x7C00}, at, kCount)));
      EXPECT_FALSE(found(DType::Float16, with(std::uint16_t{0xFBFF}, at, kCount)));
      EXPECT_TRUE(found(DType::BFloat16, with(std::uint16_t{0xFF81}, at, kCount)));
      EXPECT_FALSE(found(DType::BFloat16, with(std::uint16_t{0x7C00}, at, kCount)));
      EXPECT_FALSE(found(DType::Int32, with(-1, at, kCount)));
    }
  }
}

}  // namespace
}  // namespace cohort::comm::testing
