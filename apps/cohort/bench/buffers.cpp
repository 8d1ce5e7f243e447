#include "bench/buffers.h"

#include "base/result.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace cohort::app::bench {
namespace {

constexpr std::size_t kPage = 4096;

}  // namespace

void Region::Free::operator()(void* data) const noexcept { std::free(data); }

std::byte* Region::get(Communicator& comm, MemoryKind kind, std::size_t bytes, int gpu) {
  bytes = std::max((bytes + kPage - 1) / kPage * kPage, kPage);
  if (kind != MemoryKind::Heap) {
    Memory& memory = kind == MemoryKind::Cuda ? gpu_ : arena_;
    if (!memory || memory.bytes() < bytes) {
      memory = Memory();
      memory = comm.allocate(bytes, kind == MemoryKind::Cuda ? Device{DeviceType::CUDA, gpu} : Device{});
    }
    return static_cast<std::byte*>(memory.data());
  }
  if (heap_bytes_ < bytes) {
    heap_.reset();
    heap_bytes_ = 0;
    heap_.reset(std::aligned_alloc(kPage, bytes));
    if (heap_ == nullptr) raise(ErrorCode::Unavailable, "bench: no {} bytes of memory -- choose a smaller -e", bytes);
    heap_bytes_ = bytes;
    std::memset(heap_.get(), 0, bytes);
  }
  return static_cast<std::byte*>(heap_.get());
}

Buffers place_buffers(Communicator& comm, Regions& regions, MemoryKind kind, Collective collective, const Shape& shape,
                      DType dtype, bool in_place) {
  const std::size_t element = size_of(dtype);
  const auto bytes = [element](std::int64_t count) { return static_cast<std::size_t>(count) * element; };
  const std::size_t own_part = bytes(shape.own_part);
  Buffers buffers;
  if (!in_place) {
    buffers.input = regions.first.get(comm, kind, bytes(shape.input), regions.gpu);
    buffers.output = regions.second.get(comm, kind, bytes(shape.output), regions.gpu);
    return buffers;
  }
  buffers.input = buffers.output =
      regions.first.get(comm, kind, bytes(std::max(shape.input, shape.output)), regions.gpu);
  switch (collective) {
    case Collective::AllGather:
    case Collective::AllGatherV:
    case Collective::Gather: buffers.input += own_part; break;
    case Collective::Scatter:
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV: buffers.output += own_part; break;
    default: break;
  }
  return buffers;
}

void drop_from_caches(const void* data, std::size_t bytes) {
#if defined(__x86_64__)
  // Surer than any detour over other memory, whatever the size of the last cache.
  for (std::size_t at = 0; at < bytes; at += 64) _mm_clflush(static_cast<const char*>(data) + at);
  _mm_mfence();
#else
  // Twice the largest cache that the system reports pushes it out.
  (void)data;
  (void)bytes;
  static const std::size_t kSweep = 2 * static_cast<std::size_t>(std::max(::sysconf(_SC_LEVEL3_CACHE_SIZE), 32L << 20));
  static thread_local std::vector<char> sweep(kSweep);
  for (std::size_t at = 0; at < kSweep; at += 64) sweep[at] = static_cast<char>(sweep[at] + 1);
#endif
}

}  // namespace cohort::app::bench
