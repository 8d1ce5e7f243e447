#include "comm/gpu/fold_launcher.h"

#include "comm/gpu/fold_kernels.h"

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace cohort::comm::cuda {
namespace {

static_assert(FoldLauncher::kMostInputs == FoldArguments::kMostInputs);
constexpr unsigned kThreads = 256;     // per block, as the kernels are compiled
constexpr unsigned kBlocks = 8;        // per multiprocessor
constexpr std::size_t kVector = 16;    // bytes of a vector
constexpr std::size_t kPerThread = 2;  // least vectors per thread before more blocks are started

/// True for complex numbers that are folded by their real and imaginary parts: all reductions except products.
bool by_parts(DType dtype, ReduceOp op) { return is_complex(dtype) && op != ReduceOp::Product; }
bool by_bytes(DType dtype, ReduceOp op) { return op >= ReduceOp::BitAnd && dtype != DType::Bool; }

DType part_of(DType dtype) {
  if (!is_complex(dtype)) return dtype;
  return dtype == DType::Complex64 ? DType::Float32 : DType::Float64;
}

std::string kernel_of(DType dtype, ReduceOp op) {
  const bool product = op == ReduceOp::Product;
  const bool extreme = op == ReduceOp::Min || op == ReduceOp::Max;
  const std::string extreme_name = op == ReduceOp::Min ? "_min" : "_max";
  if (dtype == DType::Bool) {
    const bool all = product || op == ReduceOp::Min || op == ReduceOp::BitAnd;
    return op == ReduceOp::BitXor ? "bool_xor" : all ? "bool_and" : "bool_or";
  }
  if (by_bytes(dtype, op))
    return op == ReduceOp::BitAnd ? "bytes_and" : op == ReduceOp::BitOr ? "bytes_or" : "bytes_xor";
  if (is_scalable(dtype)) {
    const auto type = std::string(to_string(by_parts(dtype, op) ? part_of(dtype) : dtype));
    return type + (product ? "_multiply" : extreme ? extreme_name : "_add");
  }
  const auto type = std::string(to_string(dtype));
  if (extreme) return type + extreme_name;
  if (op == ReduceOp::Average) return type + "_average";
  // The kernel is the same for signed and unsigned types.
  return (type.front() == 'u' ? type : "u" + type) + (product ? "_multiply" : "_add");
}

}  // namespace

FoldLauncher& FoldLauncher::on(Gpu& gpu) {
  static std::mutex mutex;
  static auto* const known = new std::map<Gpu*, std::unique_ptr<FoldLauncher>>();
  const std::lock_guard lock(mutex);
  auto& one = (*known)[&gpu];
  if (!one) one.reset(new FoldLauncher(gpu));
  return *one;
}

FoldLauncher::FoldLauncher(Gpu& gpu) : gpu_(gpu) {
  void* const kernels = gpu.load_kernels(kFoldKernels);
  const auto find = [&](const std::string& name) { return gpu.find_kernel(kernels, ("cohort_" + name).c_str()); };
  FoldArguments nothing{};
  nothing.input_count = nothing.divisor = 1;
  const Stream stream = gpu.make_stream();
  for (std::size_t d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (std::size_t o = 0; o < kReduceOpCount; ++o) {
      if (!supports(dtype, static_cast<ReduceOp>(o))) continue;
      folds_[d][o] = find(kernel_of(dtype, static_cast<ReduceOp>(o)));
      gpu.launch(folds_[d][o], 1, kThreads, &nothing, stream);
    }
    if (!is_floating(dtype)) continue;
    looks_[d] = find(std::string(to_string(dtype)) + "_finite");
    gpu.launch(looks_[d], 1, kThreads, &nothing, stream);
  }
  gpu.end_stream(stream);
}

void FoldLauncher::launch(void* kernel, const void* arguments, std::size_t bytes, Stream stream) const {
  const std::size_t wanted = (bytes / kVector / kPerThread + kThreads - 1) / kThreads;
  const auto most = static_cast<std::size_t>(kBlocks * gpu_.processors());
  gpu_.launch(kernel, static_cast<unsigned>(std::clamp<std::size_t>(wanted, 1, most)), kThreads, arguments, stream);
}

void FoldLauncher::fold(const FoldJob& job, Stream stream) const {
  const std::size_t bytes = static_cast<std::size_t>(job.count) * size_of(job.dtype);
  if (bytes == 0) return;
  void* const output = job.outputs.front();
  if (job.inputs.empty()) return gpu_.zero(output, bytes, stream);
  if (job.inputs.size() > kMostInputs)
    raise(ErrorCode::Internal, "fold: {} inputs on a GPU, where {} are the most", job.inputs.size(), kMostInputs);
  FoldArguments own{};
  auto together = reinterpret_cast<std::uintptr_t>(output);
  for (std::size_t k = 0; k < job.inputs.size(); ++k) {
    own.inputs[k] = job.inputs[k];
    own.scales[k] = job.scales.empty() ? 1 : job.scales[k];
    own.single_scales[k] = static_cast<float>(own.scales[k]);
    together |= reinterpret_cast<std::uintptr_t>(job.inputs[k]);
  }
  own.output = output;
  own.count = by_bytes(job.dtype, job.op)   ? bytes
              : by_parts(job.dtype, job.op) ? 2 * static_cast<std::size_t>(job.count)
                                            : static_cast<std::size_t>(job.count);
  own.postscale = job.postscale;
  own.input_count = static_cast<int>(job.inputs.size());
  own.divisor = job.op != ReduceOp::Average ? 1 : job.divisor == 0 ? own.input_count : static_cast<int>(job.divisor);
  own.aligned = together % kVector == 0 ? 1 : 0;
  launch(folds_[static_cast<std::size_t>(job.dtype)][static_cast<std::size_t>(job.op)], &own, bytes, stream);
}

void FoldLauncher::look(const ConstBuffer& values, std::uint32_t* flag, Stream stream) const {
  if (!is_scalable(values.dtype) || values.count == 0) return;
  FoldArguments own{};
  own.inputs[0] = values.data;
  own.output = flag;
  own.count = static_cast<std::size_t>(values.count) * (is_complex(values.dtype) ? 2 : 1);
  own.input_count = own.divisor = 1;
  own.aligned = reinterpret_cast<std::uintptr_t>(values.data) % kVector == 0 ? 1 : 0;
  launch(looks_[static_cast<std::size_t>(part_of(values.dtype))], &own, values.bytes(), stream);
}

}  // namespace cohort::comm::cuda
