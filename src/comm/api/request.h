// One call of a collective as it was asked for, checked: what a Communicator hands to its backend. Plain values; the
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

/// The numbers travel between ranks of one build only.
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
  Split,   ///< an all_gather of what ranks need to form groups
  Joined,  ///< the rank has no more input and serves the others
  Send,
  Recv,
};

/// "all_reduce", ...
std::string_view name_of(Kind kind) noexcept;

constexpr bool is_reduction(Kind kind) noexcept { return kind >= Kind::AllReduce && kind <= Kind::ReduceScatterV; }

/// True if a program may load these bytes as code: pickles travel as uint8, and nothing says which bytes are one.
constexpr bool may_be_object(DType dtype) noexcept { return dtype == DType::UInt8; }

/// Kind of an operation's memory, as far as ranks have to agree on it.
enum class MemoryKind : std::uint8_t {
  Host,
  Device,
  DeviceFast,  ///< a reduction whose bits may be those of the devices' own library
};

/// "", " of a GPU's memory", ...
std::string_view name_of(MemoryKind kind) noexcept;

/// Elements per rank, of the variants that have them.
struct Counts {
  std::vector<std::int64_t> input;   ///< all_to_all_v: to each rank; the others: of each rank
  std::vector<std::int64_t> output;  ///< all_to_all_v: from each rank
};

/// Result of a round that is all that ranks do: they agree on an operation, which is then carried out elsewhere.
struct Round {
  bool everyone = false;  ///< no rank has joined
  /// Shares in a weighted average, by rank: weight over the sum of all. Empty: all weights equal, or there are none.
  std::vector<double> shares = {};
  /// The ranks whose input counts, ascending (all, but for those of weight 0), and by what each is multiplied, where
  /// weights differ.
  std::vector<int> contributors = {};
  std::vector<double> fractions = {};
};

// Borrowed buffers: blocks of a result that a plane has left in the memory of the ranks that provided them, which this
// rank reads in place. Only for a caller that asks for it (Request::borrowed), takes the blocks from there itself, and
// ensures that the others do not write there meanwhile: to the plane they may once the operation is over. Plain values.
struct Borrowed {
  std::size_t at = 0;  ///< bytes from the result's beginning
  const std::byte* data = nullptr;
  std::size_t bytes = 0;
  std::shared_ptr<const sys::Mapping> memory = {};  ///< of a peer, as long as somebody keeps it; null: this rank's own
};

/// An operation of the host's memory; of a device's, only what ranks agree on.
struct Request {
  Kind kind = Kind::Barrier;
  ReduceOp op = ReduceOp::Sum;
  DType dtype = DType::Float32;
  bool weighted = false;
  WireFormat wire_format = WireFormat::None;  ///< of float32, between hosts
  float* residual = nullptr;                  ///< as AllReduceOptions::residual
  MemoryKind memory = MemoryKind::Host;
  std::int32_t root = 0;  ///< of rooted operations; of send and recv the peer, or kAnySource
  std::int32_t tag = 0;
  const void* input = nullptr;
  void* output = nullptr;
  std::int64_t input_count = 0;  ///< elements
  std::int64_t output_count = 0;
  double weight = 1;
  double prescale = 1;
  double postscale = 1;
  std::shared_ptr<const Counts> counts;
  std::uint64_t group = 0;               ///< digest of all operations of the group that it is part of; 0: of none
  std::chrono::milliseconds timeout{0};  ///< 0: the communicator's own
  std::shared_ptr<FiniteCheck> finite_check = {};  ///< where somebody asks whether the result is finite
  Round* round = nullptr;                          ///< not null: ranks agree on it, and no more
  std::vector<Borrowed>* borrowed = nullptr;  ///< not null: what only moves need not be copied, where it is noted here

  std::size_t input_bytes() const noexcept { return static_cast<std::size_t>(input_count) * size_of(dtype); }
  std::size_t output_bytes() const noexcept { return static_cast<std::size_t>(output_count) * size_of(dtype); }
  /// The larger of the two.
  std::size_t payload() const noexcept {
    return static_cast<std::size_t>(input_count > output_count ? input_count : output_count) * size_of(dtype);
  }
};

/// A program's request, for memory of any device.
struct DeviceRequest : Request {
  Device device = {};  ///< of both buffers, with the output's stream
  void* input_stream = nullptr;
  std::optional<GpuSums> gpu_sums = {};  ///< not set: COHORT_GPU_SUMS
};

// How the elements of a buffer are divided among ranks: contiguous slices. Pure.
struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const noexcept { return end - begin; }
};

/// Slice `part` of `parts` of `count` elements of `element` bytes, whose first lies `address` bytes into memory.
/// Borders lie on cache lines.
inline Slice slice_of(std::int64_t count, std::size_t element, int part, int parts, std::uint64_t address,
                      std::size_t unit = 64) noexcept {
  const auto per_line = static_cast<std::int64_t>(unit / element);
  const auto lead = static_cast<std::int64_t>(address % unit / element);  // elements before it in its line
  const std::int64_t lines = (count + lead + per_line - 1) / per_line;
  const auto border = [&](std::int64_t index) {
    const std::int64_t line = lines / parts * index + lines % parts * index / parts;
    return std::clamp(line * per_line - lead, std::int64_t{0}, count);
  };
  return {border(part), part + 1 == parts ? count : border(part + 1)};
}

/// Part `part` of parts of these counts, one after the other.
inline Slice part_of(std::span<const std::int64_t> counts, int part) noexcept {
  std::int64_t begin = 0;
  for (int before = 0; before < part; ++before) begin += counts[static_cast<std::size_t>(before)];
  return {begin, begin + counts[static_cast<std::size_t>(part)]};
}

/// The part of a reduce_scatter that a rank keeps, in elements of the input.
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
