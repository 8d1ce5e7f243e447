// The options of Communicator's operations. Plain values; an unset field means the communicator's default. `timeout`
// counts from the call, for each operation.
#pragma once

#include <cohort/dtype.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>

namespace cohort {

/// Selects how GPU buffers are reduced if NCCL is used. Fast: NCCL folds elements in its own order, so the result's
/// bits depend on the size and on where ranks are. Exact: the result has the CPU's bits; NCCL moves the ranks' inputs,
/// and the GPUs fold them in order. Sums that NCCL cannot do are always exact. The same on all ranks.
enum class GpuSums : std::uint8_t { Fast, Exact };

struct BarrierOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Scaling: every x is multiplied by `prescale` before the reduction and the result by `postscale` after it, each
/// rounded to the type in which elements are accumulated (float32 for 16-bit floats). Both factors are finite, and the
/// same on all ranks. Only for floating and complex types.
struct AllReduceOptions {
  ReduceOp op = ReduceOp::Sum;
  /// This rank's weight, finite and >= 0, typically its number of samples; with ReduceOp::Average only. The result is
  /// sum(weight * x) / sum(weight); a rank of weight 0 is skipped, and its NaN has no effect; equal weights give the
  /// bits of the plain average. All zero: the result is zero. Give it on all ranks or on none.
  std::optional<double> weight = {};
  double prescale = 1;
  double postscale = 1;
  /// Format in which float32 travels between hosts; Int8 cuts network traffic to a quarter. Each host's sum is rounded
  /// to the format, the hosts' sums are added in float32, and with more than two hosts the result is rounded once more;
  /// all ranks get the same bits. NaN and infinities stay what they are. Sum and Average of float32 only; the same on
  /// all ranks. On one host nothing is rounded.
  WireFormat wire_format = WireFormat::None;
  /// Memory for error feedback, with Int8 and Int4: one float for each element of the sum, initially zero. The caller
  /// keeps it from step to step for the same sum. Each operation stores this rank's rounding error there, and the next
  /// one adds it; weights and `postscale` may change meanwhile. On one host nothing is stored.
  float* residual = nullptr;
  /// Makes `Work::finite()` say whether the result is free of NaN and infinities. On one host that costs next to
  /// nothing, since each rank checks the part of the result that it makes. Ranks may differ in this option; only those
  /// that set it get the answer.
  bool check_finite = false;
  /// Distinguishes operations of the same shape and type: ranks that give different tags get Mismatch.
  std::uint32_t tag = 0;
  std::optional<GpuSums> gpu_sums = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Like AllReduceOptions; only the rank `root` receives the result.
struct ReduceOptions {
  int root = 0;
  ReduceOp op = ReduceOp::Sum;
  std::optional<double> weight = {};
  double prescale = 1;
  double postscale = 1;
  std::optional<GpuSums> gpu_sums = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ReduceScatterOptions {
  ReduceOp op = ReduceOp::Sum;
  std::optional<double> weight = {};  ///< as in AllReduceOptions
  double prescale = 1;
  double postscale = 1;
  WireFormat wire_format = WireFormat::None;  ///< as in AllReduceOptions
  float* residual = nullptr;                  ///< as in AllReduceOptions, for the whole input; not with GPU buffers
  std::optional<GpuSums> gpu_sums = {};
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllGatherOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct BroadcastOptions {
  int root = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct GatherOptions {
  int root = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct ScatterOptions {
  int root = 0;
  std::optional<std::chrono::milliseconds> timeout = {};
};

struct AllToAllOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
};

/// Messages between two ranks are matched by tag, and messages with the same tag in the order of their start.
struct SendOptions {
  int tag = 0;  ///< at least 0
  std::optional<std::chrono::milliseconds> timeout = {};
};
using RecvOptions = SendOptions;

/// Peer of a recv that accepts the first message from any rank. (Not -1, since a wrong calculation of a neighbour's
/// rank can give -1.)
inline constexpr int kAnySource = std::numeric_limits<int>::min();

/// Color of a rank that is to be in no group.
inline constexpr int kNoColor = -1;

struct SplitOptions {
  int color = 0;  ///< ranks of the same color form a group; kNoColor: this rank is in none
  int key = 0;    ///< ranks of a group are numbered by ascending key, and by rank where keys are equal
  std::optional<std::chrono::milliseconds> timeout = {};
  bool background = false;  ///< as in GroupOptions
};

struct GroupOptions {
  std::optional<std::chrono::milliseconds> timeout = {};
  /// True for a thread beside the program, such as a logging thread. Its operations do not show that the program makes
  /// progress, so `cohort run` ignores them when it looks for ranks that wait for each other.
  bool background = false;
};

}  // namespace cohort
