// For tests: folds by a GPU's kernels against the plain reference, and counts of elements with other bits. Also run on
// real GPUs (tools/gpu/gpu-day). One thread per GPU.
#pragma once

#include "comm/gpu/fold_launcher.h"
#include "comm/testing/reference_fold.h"

#include <fmt/format.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

namespace cohort::comm::testing {

/// Memory of a GPU for inputs and a result, and its kernels.
class GpuFolds {
 public:
  explicit GpuFolds(cuda::Gpu& gpu) : gpu_(gpu), folds_(cuda::FoldLauncher::on(gpu)), stream_(gpu.make_stream()) {}
  ~GpuFolds() {
    gpu_.end_stream(stream_);
    for (void* const memory : memories_) gpu_.free(memory);
  }
  GpuFolds(const GpuFolds&) = delete;
  GpuFolds& operator=(const GpuFolds&) = delete;

  /// Input k lies `k * skew` elements behind an address that is aligned to 64 bytes, and the result replaces input 0.
  Bytes fold(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, std::int64_t count, const Factors& factors,
             std::size_t skew) {
    const std::size_t unit = is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype);
    Bytes result(static_cast<std::size_t>(count) * size_of(dtype));
    std::vector<const void*> from;
    for (std::size_t k = 0; k < inputs.size(); ++k) from.push_back(put(k, inputs[k], skew * k * unit));
    if (from.empty()) from.push_back(put(0, result, 0));
    void* const to = const_cast<void*>(from.front());
    FoldJob job;
    job.dtype = dtype;
    job.op = op;
    if (!inputs.empty()) job.inputs = from;
    job.outputs = {&to, 1};
    job.count = count;
    job.scales = factors.scales;
    job.divisor = factors.divisor;
    job.postscale = factors.postscale;
    folds_.fold(job, stream_);
    get(result.data(), to, result.size());
    return result;
  }
  bool has_non_finite(DType dtype, const Bytes& values, std::size_t skew) {
    std::uint32_t found = 0;
    void* const flag = put(1, Bytes(sizeof found), 0);
    const void* const data = put(0, values, skew * size_of(dtype));
    folds_.look({data, static_cast<std::int64_t>(values.size() / size_of(dtype)), dtype},
                static_cast<std::uint32_t*>(flag), stream_);
    get(&found, flag, sizeof found);
    return found != 0;
  }

 private:
  static constexpr auto kNever = std::chrono::steady_clock::time_point::max();
  void* put(std::size_t k, const Bytes& bytes, std::size_t offset) {
    if (memories_.size() <= k) {
      memories_.resize(k + 1);
      sizes_.resize(k + 1);
    }
    if (sizes_[k] < bytes.size() + offset) {
      if (memories_[k] != nullptr) gpu_.free(memories_[k]);
      sizes_[k] = 2 * (bytes.size() + offset) + 64;
      memories_[k] = gpu_.allocate(sizes_[k], kNever);
    }
    void* const to = static_cast<std::byte*>(memories_[k]) + offset;
    if (!bytes.empty()) gpu_.wait(*gpu_.copy_to_device(to, bytes.data(), bytes.size(), *gpu_.mark(nullptr)), kNever);
    return to;
  }
  void get(void* to, const void* from, std::size_t bytes) {
    if (bytes > 0) gpu_.wait(*gpu_.copy_to_host(to, from, bytes, *gpu_.mark(stream_)), kNever);
  }

  cuda::Gpu& gpu_;
  const cuda::FoldLauncher& folds_;
  const cuda::Stream stream_;
  std::vector<void*> memories_;
  std::vector<std::size_t> sizes_;
};

inline std::int64_t different_elements(const Bytes& a, const Bytes& b, std::size_t element) {
  std::int64_t count = 0;
  for (std::size_t at = 0; at < a.size(); at += element)
    count += std::memcmp(a.data() + at, b.data() + at, element) != 0 ? 1 : 0;
  return count;
}

/// All types, reductions, scalings, and several counts of inputs and elements. Reports each wrong fold; returns the
/// number of folds.
inline int try_folds(GpuFolds& gpu, const std::function<void(const std::string&)>& tell) {
  int folds = 0;
  for (int d = 0; d < kDTypeCount; ++d) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto dtype = static_cast<DType>(d);
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op)) continue;
      for (const std::size_t ranks : {0u, 1u, 2u, 3u, 7u}) {
        for (const std::int64_t count : {1, 5, 64, 1003, 5000}) {
          std::vector<Bytes> inputs;
          for (std::size_t k = 0; k < ranks; ++k) inputs.push_back(interesting(dtype, count, 100 * ranks + k));
          Factors factors[3];
          factors[1].divisor = 5;
          if (is_scalable(dtype)) {
            for (std::size_t k = 0; k < ranks; ++k) factors[2].scales.push_back(0.3 + static_cast<double>(k));
            factors[2].divisor = 1;
            factors[2].postscale = -1.0 / 3;
          }
          for (const Factors& one : factors) {
            if (count == 5000 && (ranks < 2 || &one == &factors[1])) continue;
            for (const std::size_t skew : {0u, 1u}) {
              ++folds;
              const Bytes right = reference_fold(dtype, op, inputs, count, one);
              const Bytes result = gpu.fold(dtype, op, inputs, count, one, skew);
              const std::int64_t wrong = different_elements(result, right, size_of(dtype));
              if (wrong == 0) continue;
              tell(fmt::format("{} {} of {} inputs of {} elements, scaling {}, skew {}: {} are wrong", to_string(dtype),
                               to_string(op), ranks, count, &one - factors, skew, wrong));
            }
          }
        }
      }
    }
  }
  return folds;
}

/// Tries all halves, multiplied by factors that round each in different ways, and the sum of each with another.
inline int try_halves(GpuFolds& gpu, const std::function<void(const std::string&)>& tell) {
  constexpr std::int64_t kAll = 65536;
  int folds = 0;
  for (const DType dtype : {DType::Float16, DType::BFloat16}) {
    std::vector<Bytes> inputs(2, Bytes(2 * kAll));
    for (std::uint32_t i = 0; i < kAll; ++i) {
      const std::uint16_t own = static_cast<std::uint16_t>(i), other = static_cast<std::uint16_t>(i * 40503u + 12345u);
      std::memcpy(inputs[0].data() + 2 * i, &own, 2);
      std::memcpy(inputs[1].data() + 2 * i, &other, 2);
    }
    for (const double scale :
         {1.0, 1.0 / 3, 0.75, 1.0 / 4096 * 1.0009765625, 1.2e-4, 3.0, 4099.0, 1e30, 1e-30, 1e-41}) {
      for (const std::size_t ranks : {std::size_t{1}, std::size_t{2}}) {
        ++folds;
        Factors factors;
        factors.scales.assign(ranks, scale);
        const std::vector<Bytes> some(inputs.begin(), inputs.begin() + static_cast<std::ptrdiff_t>(ranks));
        const Bytes right = reference_fold(dtype, ReduceOp::Sum, some, kAll, factors);
        const Bytes result = gpu.fold(dtype, ReduceOp::Sum, some, kAll, factors, 0);
        if (const std::int64_t wrong = different_elements(result, right, 2); wrong > 0)
          tell(fmt::format("{} times {}, {} inputs: {} are wrong", to_string(dtype), scale, ranks, wrong));
      }
    }
  }
  return folds;
}

}  // namespace cohort::comm::testing
