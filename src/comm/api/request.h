// One call of a collective, with its arguments checked, as a Communicator passes it to its backend. Plain values; the
// buffers belong to the caller.
#pragma once

#include <cohort/buffer.h>
#include <cohort/collective_options.h>
#include <cohort/dtype.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace cohort::sys {
class Mapping;
}

namespace cohort::comm {

class FiniteCheck;

/// Kind of an operation. The numbers are sent only between ranks of one build.
enum class Kind : std::uint8_t {
  None = 0,
  AllReduce,
  Reduce,
  ReduceScatter,
  ReduceScatterV,
  Broadcast,
  AllGather,
  AllGatherV,
  Gather,
  GatherV,
  Scatter,
  ScatterV,
  AllToAll,
  AllToAllV,
  Barrier,
  Split,   ///< an all_gather of the data that ranks need to form groups
  Joined,  ///< the rank has no more input and serves the others
  Send,
  Recv,
};

/// Name of the operation: "all_reduce", ...
std::string_view name_of(Kind kind) noexcept;

constexpr bool is_reduction(Kind kind) noexcept { return kind >= Kind::AllReduce && kind <= Kind::ReduceScatterV; }

/// True if a program may load these bytes as code. Pickles are sent as uint8, and nothing tells them from other bytes.
constexpr bool may_be_object(DType dtype) noexcept { return dtype == DType::UInt8; }

/// Kind of memory that an operation uses, as far as the ranks have to agree on it.
enum class MemoryKind : std::uint8_t {
  Host,
  Device,
  DeviceFast,  ///< memory of devices, for a reduction that may have the bits of the devices' own library
};

/// Text for messages: "", " of a GPU's memory", ...
std::string_view name_of(MemoryKind kind) noexcept;

/// Elements per rank, for the variants of operations with counts.
struct Counts {
  std::vector<std::int64_t> input;   ///< all_to_all_v: sent to each rank; other operations: each rank's part
  std::vector<std::int64_t> output;  ///< all_to_all_v: received from each rank
};

/// Result of a round in which ranks only agree on an operation; it is then carried out elsewhere.
struct Round {
  bool everyone = false;  ///< no rank has joined
  /// Shares in a weighted average, by rank: each weight divided by the sum of all weights. Empty if all ranks
  /// contribute with equal weights, or the operation has no weights.
  std::vector<double> shares = {};
  /// The ranks that contribute, ascending: all that have not joined, except those with weight 0. If the weights differ,
  /// `fractions` has the factor of each.
  std::vector<int> contributors = {};
  std::vector<double> fractions = {};
};

// Borrowed buffers: blocks of a result that a plane has left in the memory of the ranks that provided them, for this
// rank to read in place. Only for a caller that asks for them (Request::borrowed) and copies the blocks itself. The
// caller ensures that the other ranks do not write there meanwhile; the plane does not stop them after the operation.
// Plain values.
struct Borrowed {
  std::size_t at = 0;  ///< offset in the result, in bytes
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const sys::Mapping> memory = {};  ///< keeps a peer's memory mapped; null for this rank's own memory
};

/// AllReduceOptions::tag of comparisons of what ranks train together; messages say so.
constexpr std::uint32_t kComparisonTag = 0x7C0DE1F5;

/// An operation on host memory; for an operation on device memory, only what the ranks agree on.
struct Request {
  Kind kind = Kind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  DType dtype = DType::Float32;
  bool weighted = false;
  WireFormat wire_format = WireFormat::None;  ///< for float32, between hosts
  float* residual = nullptr;                  ///< see AllReduceOptions::residual
  MemoryKind memory = MemoryKind::Host;
  std::int32_t root = 0;  ///< rooted operations: the root; send and recv: the peer, or kAnySource
  std::int32_t tag = 0;
  const void* input = nullptr;
  void* output = nullptr;
  std::int64_t input_count = 0;  ///< elements
  std::int64_t output_count = 0;
  double weight = 1;
  double prescale = 1;
  double postscale = 1;
  std::shared_ptr<const Counts> counts;
  std::uint64_t group = 0;                         ///< digest of all operations of the request's group; 0: no group
  std::chrono::milliseconds timeout{0};            ///< 0: the communicator's timeout
  std::shared_ptr<FiniteCheck> finite_check = {};  ///< set if the caller asks whether the result is finite
  Round* round = nullptr;                          ///< not null: the ranks only agree on the operation
  std::vector<Borrowed>* borrowed = nullptr;       ///< not null: blocks noted here need not be copied to the output

  std::size_t input_bytes() const noexcept { return static_cast<std::size_t>(input_count) * size_of(dtype); }
  std::size_t output_bytes() const noexcept { return static_cast<std::size_t>(output_count) * size_of(dtype); }
  /// The larger of `input_bytes` and `output_bytes`.
  std::size_t payload() const noexcept {
    return static_cast<std::size_t>(input_count > output_count ? input_count : output_count) * size_of(dtype);
  }
};

/// A program's request, on memory of any device.
struct DeviceRequest : Request {
  Device device = {};  ///< the device of both buffers, with the output's stream
  void* input_stream = nullptr;
  std::optional<GpuSums> gpu_sums = {};  ///< if not set, COHORT_GPU_SUMS decides
};

// Divides a buffer's elements among ranks, into contiguous slices. Pure.
struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const noexcept { return end - begin; }
};

/// Divides `count` elements of `element` bytes, beginning at `address`, into `parts` slices and returns slice `part`.
/// Borders lie on cache lines.
inline Slice slice_of(std::int64_t count, std::size_t element, int part, int parts, std::uint64_t address,
                      std::size_t unit = 64) noexcept {
  const auto per_line = static_cast<std::int64_t>(unit / element);
  const auto lead = static_cast<std::int64_t>(address % unit / element);  // elements of its first line before it
  const std::int64_t lines = (count + lead + per_line - 1) / per_line;
  const auto border = [&](std::int64_t index) {
    const std::int64_t line = lines / parts * index + lines % parts * index / parts;
    return std::clamp(line * per_line - lead, std::int64_t{0}, count);
  };
  return {border(part), part + 1 == parts ? count : border(part + 1)};
}

/// Returns part `part` of a buffer whose parts have these counts and follow each other.
inline Slice part_of(std::span<const std::int64_t> counts, int part) noexcept {
  std::int64_t begin = 0;
  for (int before = 0; before < part; ++before) begin += counts[static_cast<std::size_t>(before)];
  return {begin, begin + counts[static_cast<std::size_t>(part)]};
}

/// Returns the elements of a reduce_scatter's input that a rank keeps.
inline Slice kept_by(const Request& request, int rank) noexcept {
  if (request.kind == Kind::ReduceScatter) return {rank * request.output_count, (rank + 1) * request.output_count};
  return part_of(request.counts->input, rank);
}

inline const std::byte* at(const void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<const std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}
inline std::byte* at(void* base, std::int64_t elements, std::size_t element) noexcept {
  return static_cast<std::byte*>(base) + static_cast<std::size_t>(elements) * element;
}

}  // namespace cohort::comm
