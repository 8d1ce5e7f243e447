#include "bench/gpus.h"

#include "base/result.h"
#include "comm/cuda/driver.h"
#include "comm/cuda/nccl.h"

#include <set>
#include <vector>

namespace cohort::app::bench {
namespace {

int number_of_gpus() {
  const auto count = comm::cuda::Gpu::count();
  if (!count) raise(ErrorCode::Unavailable, "--device cuda: {}", count.error().what());
  if (*count == 0) {
    raise(ErrorCode::Unavailable,
          "--device cuda: there is a CUDA driver, but this process sees no GPU -- CUDA_VISIBLE_DEVICES says which it "
          "sees; `nvidia-smi -L` lists those of the machine");
  }
  return *count;
}

}  // namespace

void check_gpus() { number_of_gpus(); }

RankGpu gpu_of(const Communicator& comm) {
  RankGpu own;
  // All of the host's ranks alike: where some of them have to share, those that need not would only blur the times.
  own.index = comm.local_size() <= number_of_gpus() ? comm.local_rank() : 0;
  own.uuid = comm::cuda::Gpu::at(own.index).uuid();
  own.software = value_or_throw(comm::cuda::Gpu::look());
  const auto& nccl = comm::cuda::Nccl::find();
  own.software += nccl ? fmt::format("; NCCL {} ({})", comm::cuda::Nccl::text_of(nccl->version), nccl->path)
                       : fmt::format("; no NCCL: {}", nccl.error().what());
  return own;
}

int different_gpus(Communicator& comm, const RankGpu& own) {
  std::vector<decltype(own.uuid)> all(static_cast<std::size_t>(comm.size()));
  const auto bytes = static_cast<std::int64_t>(own.uuid.size());
  comm.all_gather(ConstBuffer(own.uuid.data(), bytes, DType::UInt8),
                  Buffer(all.data(), bytes * comm.size(), DType::UInt8))
      .wait();
  const std::set<decltype(own.uuid)> found(all.begin(), all.end());
  return static_cast<int>(found.size());
}

}  // namespace cohort::app::bench
