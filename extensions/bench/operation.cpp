#include "bench/operation.h"

#include "base/result.h"
#include "comm/gpu/driver.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <complex>
#include <cstdlib>
#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

namespace cohort::app::bench {
namespace {

std::uint32_t mixed(int rank, std::int64_t index) {
  std::uint32_t bits = (static_cast<std::uint32_t>(index) + 1) * 2654435761U;
  bits ^= (static_cast<std::uint32_t>(rank) + 7) * 2246822519U;
  return (bits ^ bits >> 13) * 3266489917U >> 9;
}

// Returns few different, small numbers, so that a reduction over many ranks is exact in 16 bits.
int whole_number(DType dtype, ReduceOp op, int rank, std::int64_t index) {
  const std::uint32_t hash = mixed(rank, index);
  if (dtype == DType::Bool) return hash % 4 != 0 ? 1 : 0;
  switch (op) {
    case ReduceOp::Product:
      if (is_complex(dtype)) return static_cast<int>(hash % 4);  // a power of i
      return hash % 8 == 0 ? 2 : 1;
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor: return static_cast<int>(hash & 0x7F);
    default: return 1 + static_cast<int>(hash % 5);
  }
}

std::uint16_t bfloat16_of(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

// Converts 0 and positive normal numbers, since no others occur here.
std::uint16_t float16_of(float value) {
  if (value == 0) return 0;
  int exponent = 0;
  const float fraction = std::frexp(value, &exponent);  // 0.5 to 1
  auto mantissa = static_cast<std::uint32_t>(std::nearbyint(fraction * 2048));
  if (mantissa == 2048) {
    mantissa = 1024;
    ++exponent;
  }
  if (exponent > 16) return 0x7C00;
  return static_cast<std::uint16_t>(static_cast<std::uint32_t>(exponent + 14) << 10 | (mantissa & 0x3FF));
}

template <class T>
void put(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

void encode_real(std::byte* to, DType dtype, double value) {
  switch (dtype) {
    case DType::Float64: return put(to, value);
    case DType::Float16: return put(to, float16_of(static_cast<float>(value)));
    case DType::BFloat16: return put(to, bfloat16_of(static_cast<float>(value)));
    default: return put(to, static_cast<float>(value));
  }
}

void encode_complex(std::byte* to, DType dtype, std::complex<double> value) {
  const DType part = dtype == DType::Complex64 ? DType::Float32 : DType::Float64;
  encode_real(to, part, value.real());
  encode_real(to + size_of(part), part, value.imag());
}

void encode_integer(std::byte* to, DType dtype, std::int64_t value) {
  switch (size_of(dtype)) {
    case 1: return put(to, static_cast<std::uint8_t>(value));
    case 2: return put(to, static_cast<std::uint16_t>(value));
    case 4: return put(to, static_cast<std::uint32_t>(value));
    default: return put(to, value);
  }
}

/// Value that the type holds after wrapping around.
std::int64_t wrapped(DType dtype, std::int64_t value) {
  switch (dtype) {
    case DType::Int8: return static_cast<std::int8_t>(value);
    case DType::Int16: return static_cast<std::int16_t>(value);
    case DType::Int32: return static_cast<std::int32_t>(value);
    case DType::UInt8: return static_cast<std::uint8_t>(value);
    case DType::UInt16: return static_cast<std::uint16_t>(value);
    case DType::UInt32: return static_cast<std::uint32_t>(value);
    default: return value;
  }
}

std::complex<double> complex_number(ReduceOp op, int whole) {
  if (op != ReduceOp::Product) return {static_cast<double>(whole), static_cast<double>(whole % 2)};
  constexpr double kReal[] = {1, 0, -1, 0};
  constexpr double kImaginary[] = {0, 1, 0, -1};
  return {kReal[whole % 4], kImaginary[whole % 4]};
}

/// Rounds once, in the precision in which the type is accumulated.
double averaged(DType dtype, double sum, int ranks) {
  if (dtype == DType::Float64 || dtype == DType::Complex128) return sum / ranks;
  return static_cast<double>(static_cast<float>(sum) / static_cast<float>(ranks));
}

struct Ranks {
  int first, count;
};

std::int64_t reduced_integer(DType dtype, ReduceOp op, const Ranks& ranks, std::int64_t index) {
  std::int64_t result = whole_number(dtype, op, ranks.first, index);
  const bool logic = dtype == DType::Bool;
  for (int rank = ranks.first + 1; rank < ranks.first + ranks.count; ++rank) {
    const std::int64_t value = whole_number(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Average: result = logic ? (result | value) : wrapped(dtype, result + value); break;
      case ReduceOp::Product: result = wrapped(dtype, result * value); break;
      case ReduceOp::Min: result = std::min(result, value); break;
      case ReduceOp::Max: result = std::max(result, value); break;
      case ReduceOp::BitAnd: result &= value; break;
      case ReduceOp::BitOr: result |= value; break;
      case ReduceOp::BitXor: result ^= value; break;
    }
  }
  return op == ReduceOp::Average ? result / ranks.count : result;
}

double reduced_real(DType dtype, ReduceOp op, const Ranks& ranks, std::int64_t index) {
  double result = whole_number(dtype, op, ranks.first, index);
  for (int rank = ranks.first + 1; rank < ranks.first + ranks.count; ++rank) {
    const double value = whole_number(dtype, op, rank, index);
    switch (op) {
      case ReduceOp::Product: result *= value; break;
      case ReduceOp::Min: result = std::min(result, value); break;
      case ReduceOp::Max: result = std::max(result, value); break;
      default: result += value;
    }
  }
  return op == ReduceOp::Average ? averaged(dtype, result, ranks.count) : result;
}

// Uses the reductions' order and formula, so that zeros have the same sign.
std::complex<double> reduced_complex(DType dtype, ReduceOp op, const Ranks& ranks, std::int64_t index) {
  std::complex<double> result = complex_number(op, whole_number(dtype, op, ranks.first, index));
  for (int rank = ranks.first + 1; rank < ranks.first + ranks.count; ++rank) {
    const std::complex<double> value = complex_number(op, whole_number(dtype, op, rank, index));
    const double a = result.real(), b = result.imag(), c = value.real(), d = value.imag();
    result = op == ReduceOp::Product ? std::complex<double>(a * c - b * d, a * d + b * c) : result + value;
  }
  if (op == ReduceOp::Average) {
    return {averaged(dtype, result.real(), ranks.count), averaged(dtype, result.imag(), ranks.count)};
  }
  return result;
}

Tile tile_of(DType dtype, ReduceOp op, const Ranks& ranks) {
  const std::size_t element = size_of(dtype);
  Tile tile(static_cast<std::size_t>(kPeriod) * element);
  for (std::int64_t i = 0; i < kPeriod; ++i) {
    std::byte* const to = tile.data() + static_cast<std::size_t>(i) * element;
    if (is_complex(dtype)) {
      encode_complex(to, dtype, reduced_complex(dtype, op, ranks, i));
    } else if (is_floating(dtype)) {
      encode_real(to, dtype, reduced_real(dtype, op, ranks, i));
    } else {
      encode_integer(to, dtype, reduced_integer(dtype, op, ranks, i));
    }
  }
  return tile;
}

}  // namespace

Tile input_tile(DType dtype, ReduceOp op, int rank) { return tile_of(dtype, op, {rank, 1}); }
Tile reduced_tile(DType dtype, ReduceOp op, int ranks) { return tile_of(dtype, op, {0, ranks}); }

namespace {

/// Calls `piece(offset in the buffer, offset in the tile, bytes)` for each stretch of one period.
template <class Piece>
void for_each_piece(std::int64_t count, DType dtype, std::int64_t first, Piece piece) {
  const auto element = static_cast<std::int64_t>(size_of(dtype));
  for (std::int64_t at = 0; at < count;) {
    const std::int64_t place = (first + at) % kPeriod;
    const std::int64_t length = std::min(kPeriod - place, count - at);
    piece(static_cast<std::size_t>(at * element), static_cast<std::size_t>(place * element),
          static_cast<std::size_t>(length * element));
    at += length;
  }
}

}  // namespace

void fill(void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first) {
  std::byte* const to = static_cast<std::byte*>(data);
  for_each_piece(count, dtype, first, [&](std::size_t at, std::size_t place, std::size_t bytes) {
    std::memcpy(to + at, tile.data() + place, bytes);
  });
}

std::int64_t count_wrong(const void* data, std::int64_t count, DType dtype, const Tile& tile, std::int64_t first) {
  const std::byte* const found = static_cast<const std::byte*>(data);
  const std::size_t element = size_of(dtype);
  std::int64_t wrong = 0;
  for_each_piece(count, dtype, first, [&](std::size_t at, std::size_t place, std::size_t bytes) {
    if (std::memcmp(found + at, tile.data() + place, bytes) == 0) return;
    for (std::size_t i = 0; i < bytes; i += element) {
      wrong += std::memcmp(found + at + i, tile.data() + place + i, element) != 0 ? 1 : 0;
    }
  });
  return wrong;
}

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
  // Flushing lines is more reliable than reading other memory, whatever the size of the last cache.
  for (std::size_t at = 0; at < bytes; at += 64) _mm_clflush(static_cast<const char*>(data) + at);
  _mm_mfence();
#else
  // Writing twice the size of the largest reported cache evicts the data.
  (void)data;
  (void)bytes;
  static const std::size_t kSweep = 2 * static_cast<std::size_t>(std::max(::sysconf(_SC_LEVEL3_CACHE_SIZE), 32L << 20));
  static thread_local std::vector<char> sweep(kSweep);
  for (std::size_t at = 0; at < kSweep; at += 64) sweep[at] = static_cast<char>(sweep[at] + 1);
#endif
}

namespace {

constexpr int kGarbage = 0xA5;
constexpr auto kNever = std::chrono::steady_clock::time_point::max();  // nothing else is in the GPU's default stream

bool brings(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::Broadcast:
    case Collective::Scatter: return rank == operation.root;
    case Collective::PingPong: return rank < 2;
    default: return true;
  }
}

bool receives(const Operation& operation, int rank) {
  switch (operation.collective) {
    case Collective::Reduce:
    case Collective::Gather: return rank == operation.root;
    case Collective::PingPong: return rank < 2;
    case Collective::Barrier: return false;
    default: return true;
  }
}

std::size_t bytes_of(const Operation& operation, std::int64_t count) {
  return static_cast<std::size_t>(count) * size_of(operation.dtype);
}

/// Copies the mirror to the GPU's buffers. In place, the buffers share bytes, and so do those of the mirror.
void to_gpu(const Operation& operation) {
  if (operation.device.type != DeviceType::CUDA) return;
  auto& gpu = comm::cuda::Gpu::at(operation.device.index);
  const auto copy = [&](std::byte* to, const std::byte* from, std::int64_t count) {
    if (count == 0) return;
    gpu.wait(*gpu.copy_to_device(to, from, bytes_of(operation, count), *gpu.mark(nullptr)), kNever);
  };
  copy(operation.buffers.output, operation.mirror.output, operation.shape.output);
  copy(operation.buffers.input, operation.mirror.input, operation.shape.input);
}

/// Copies the output to the mirror.
void from_gpu(const Operation& operation) {
  if (operation.device.type != DeviceType::CUDA || operation.shape.output == 0) return;
  auto& gpu = comm::cuda::Gpu::at(operation.device.index);
  gpu.wait(*gpu.copy_to_host(operation.mirror.output, operation.buffers.output,
                             bytes_of(operation, operation.shape.output), *gpu.mark(nullptr)),
           kNever);
}

void ping_pong(Communicator& comm, const ConstBuffer& input, const Buffer& output) {
  if (comm.rank() == 0) {
    comm.send(input, 1).wait();
    comm.recv(output, 1).wait();
  } else if (comm.rank() == 1) {
    comm.recv(output, 0).wait();
    comm.send(input, 0).wait();
  }
}

void exchange(Communicator& comm, const ConstBuffer& input, const Buffer& output) {
  Work sent = comm.send(input, (comm.rank() + 1) % comm.size());
  comm.recv(output, (comm.rank() + comm.size() - 1) % comm.size()).wait();
  sent.wait();
}

}  // namespace

void call(Communicator& comm, const Operation& operation) {
  const Shape& shape = operation.shape;
  const ConstBuffer input(operation.buffers.input, shape.input, operation.dtype, operation.device);
  const Buffer output(operation.buffers.output, shape.output, operation.dtype, operation.device);
  const int root = operation.root;
  const bool is_root = comm.rank() == root;
  const ConstBuffer no_input(nullptr, 0, operation.dtype, operation.device);
  const Buffer no_output(nullptr, 0, operation.dtype, operation.device);
  const ReduceOptions to_root = {.root = root, .op = operation.op, .gpu_sums = operation.gpu_sums};
  const ReduceScatterOptions to_parts = {.op = operation.op, .gpu_sums = operation.gpu_sums};
  switch (operation.collective) {
    case Collective::AllReduce:
      comm.all_reduce(input, output, {.op = operation.op, .gpu_sums = operation.gpu_sums}).wait();
      break;
    case Collective::Reduce:
      if (operation.in_place) {
        comm.reduce(output, to_root).wait();
      } else {
        comm.reduce(input, is_root ? output : no_output, to_root).wait();
      }
      break;
    case Collective::Broadcast: comm.broadcast(output, {.root = root}).wait(); break;
    case Collective::AllGather: comm.all_gather(input, output).wait(); break;
    case Collective::AllGatherV: comm.all_gather_v(input, output, shape.input_parts).wait(); break;
    case Collective::Gather: comm.gather(input, is_root ? output : no_output, {.root = root}).wait(); break;
    case Collective::Scatter: comm.scatter(is_root ? input : no_input, output, {.root = root}).wait(); break;
    case Collective::ReduceScatter: comm.reduce_scatter(input, output, to_parts).wait(); break;
    case Collective::ReduceScatterV: comm.reduce_scatter_v(input, output, shape.input_parts, to_parts).wait(); break;
    case Collective::AllToAll: comm.all_to_all(input, output).wait(); break;
    case Collective::AllToAllV: comm.all_to_all_v(input, shape.input_parts, output, shape.output_parts).wait(); break;
    case Collective::PingPong: ping_pong(comm, input, output); break;
    case Collective::Exchange: exchange(comm, input, output); break;
    case Collective::Barrier: comm.barrier().wait(); break;
  }
}

void write_input(const Communicator& comm, const Operation& operation) {
  // In place, the output contains the input, so this writes the output first.
  if (operation.shape.output > 0)
    std::memset(operation.mirror.output, kGarbage, bytes_of(operation, operation.shape.output));
  if (brings(operation, comm.rank())) {
    fill(operation.mirror.input, operation.shape.input, operation.dtype,
         input_tile(operation.dtype, operation.op, comm.rank()));
  }
  to_gpu(operation);
}

void clear(const Operation& operation) {
  const auto zero = [&](std::byte* data, std::int64_t count) {
    if (count > 0) std::memset(data, 0, bytes_of(operation, count));
  };
  zero(operation.mirror.input, operation.shape.input);
  zero(operation.mirror.output, operation.shape.output);
  to_gpu(operation);
}

std::int64_t wrong_elements(const Communicator& comm, const Operation& operation) {
  const DType dtype = operation.dtype;
  const Shape& shape = operation.shape;
  const int rank = comm.rank();
  const int ranks = comm.size();
  if (!receives(operation, rank)) return 0;
  from_gpu(operation);
  const auto whole = [&](const Tile& tile, std::int64_t first) {
    return count_wrong(operation.mirror.output, shape.output, dtype, tile, first);
  };
  const auto input_of = [&](int source) { return input_tile(dtype, operation.op, source); };
  const std::size_t element = size_of(dtype);

  switch (operation.collective) {
    case Collective::AllReduce:
    case Collective::Reduce: return whole(reduced_tile(dtype, operation.op, ranks), 0);
    case Collective::ReduceScatter:
    case Collective::ReduceScatterV: return whole(reduced_tile(dtype, operation.op, ranks), shape.own_part);
    case Collective::Broadcast: return whole(input_of(operation.root), 0);
    case Collective::Scatter: return whole(input_of(operation.root), shape.own_part);
    case Collective::PingPong: return whole(input_of(1 - rank), 0);
    case Collective::Exchange: return whole(input_of((rank + ranks - 1) % ranks), 0);
    case Collective::Barrier: return 0;
    default: break;
  }
  // Compares the parts of all ranks, one after the other.
  std::int64_t wrong = 0;
  std::int64_t at = 0;
  for (int source = 0; source < ranks; ++source) {
    const std::int64_t count = shape.output_parts[static_cast<std::size_t>(source)];
    std::int64_t first = 0;
    if (operation.collective == Collective::AllToAll || operation.collective == Collective::AllToAllV) {
      const Shape theirs = shape_of(operation.collective, shape.bytes, dtype, source, ranks);
      for (int part = 0; part < rank; ++part) first += theirs.input_parts[static_cast<std::size_t>(part)];
    }
    wrong += count_wrong(operation.mirror.output + static_cast<std::size_t>(at) * element, count, dtype,
                         input_of(source), first);
    at += count;
  }
  return wrong;
}

}  // namespace cohort::app::bench
