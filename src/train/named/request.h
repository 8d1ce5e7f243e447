// What a user asks an Engine for, and the part of it that ranks compare. Plain values; a Request's buffers belong to
// the caller, who keeps them alive and leaves them alone until the operation is done. Any thread may use its own.
#pragma once

#include "base/records.h"
#include "base/result.h"

#include <cohort/buffer.h>
#include <cohort/dtype.h>

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::named {

/// The numbers travel between ranks of one build only.
enum class Kind : std::uint8_t {
  AllReduce = 0,
  AllGather,      ///< concatenates along dimension 0, which may differ
  Broadcast,      ///< in place in `output`
  ReduceScatter,  ///< along dimension 0; where it does not divide, the first ranks get one row more
  AllToAll,       ///< rows go to ranks as `splits` says
  Barrier,
  Join,   ///< made by Engine::join
  Group,  ///< made by Engine::form_group
};
inline constexpr int kKindCount = 8;

/// "all_reduce", ..., "form_group".
std::string_view name_of(Kind kind) noexcept;

/// Gives memory for an output of this shape, on the input's device; its size is known only once all ranks have come.
/// What the input's stream has by then may still use that memory. Called on the engine's thread: it must not call the
/// engine. What it throws ends the communicator, since the other ranks count on this one.
using OutputAllocator = std::function<void*(std::span<const std::int64_t> shape)>;

/// A GPU's memory comes after what its stream has when the operation is asked for.
struct Request {
  std::string name;  ///< 1 to 4096 bytes; one operation of a name at a time
  Kind kind = Kind::AllReduce;
  /// Dimensions of `input` (of `output` for broadcast); their product is its count. Empty: a scalar.
  std::vector<std::int64_t> shape = {};
  /// What this rank brings. Of a broadcast only the root's counts, and may be `output`.
  ConstBuffer input = {};
  /// all_reduce and broadcast: where the result goes, of the input's count and dtype; it may be the input.
  Buffer output = {};
  /// all_gather, reduce_scatter, all_to_all: memory for the result. Unset: the Outcome owns it.
  OutputAllocator allocate = {};
  ReduceOp op = ReduceOp::Average;
  int root = 0;  ///< of a broadcast, a rank of the engine's communicator
  /// Integers are scaled in double precision, rounded toward zero and to the nearest that the type holds.
  double prescale = 1;
  double postscale = 1;
  /// all_to_all: rows for each rank, adding up to shape[0]. Empty: equal parts.
  std::vector<std::int64_t> splits = {};
  /// all_gather and broadcast: refused while some ranks have joined, as all_to_all always is.
  bool needs_all_ranks = false;
};

/// What ranks must agree on (but for dimension 0 and `splits` where they may differ).
struct Signature {
  Kind kind = Kind::Barrier;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::int32_t root = 0;
  double prescale = 1;
  double postscale = 1;
  std::vector<std::int64_t> shape = {};
  std::vector<std::int64_t> splits = {};  ///< of form_group: the ranks
  bool needs_all_ranks = false;
  DeviceType device = DeviceType::CPU;  ///< which GPU of its own is each rank's matter

  bool operator==(const Signature&) const = default;
  std::int64_t count() const noexcept;  ///< elements
};

/// "all_reduce(float32[2, 3], sum)": everything that is compared but for the device.
std::string to_string(const Signature& signature);

/// Where a request has its memory: the host's, if it has none.
Device device_of(const Request& request) noexcept;

/// Checks a request against `size` ranks. InvalidArgument with what has no meaning; nothing was done.
Result<Signature> signature_of(const Request& request, int size);

inline constexpr std::size_t kLongestName = 4096;
inline constexpr std::size_t kMostDimensions = 64;
inline constexpr std::size_t kMostSplits = std::size_t{1} << 20;

/// For base/records.h. Of bytes from a peer: Corrupt if they are no signature.
void visit_fields(auto& m, auto& a, const Signature*) {
  constexpr std::string_view kNone = "a description of an operation that does not exist";
  a(codec::below(m.kind, kKindCount, kNone), codec::below(m.dtype, kDTypeCount, kNone),
    codec::below(m.op, kReduceOpCount, kNone), m.needs_all_ranks, codec::below(m.device, 2, kNone), m.root, m.prescale,
    m.postscale, codec::most(m.shape, kMostDimensions), codec::most(m.splits, kMostSplits));
  a.demand(m.count() >= 0, "a shape that no array has");
}

}  // namespace cohort::named
