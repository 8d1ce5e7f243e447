// Operations by name for compiled programs: frameworks' op libraries (XLA's, TensorFlow's) call them from their own
// threads, without Python and its lock. They link neither Cohort nor Python: `_core.named_calls()` gives them this
// table of functions in a capsule. All of them and `_core` come from one build, which kNamedCallsVersion ensures. Plain
// C structs; memory pointed to has to live until `submit` returns, buffers until `done`.
#pragma once

#include <cohort/dtype.h>

#include <cstddef>
#include <cstdint>

namespace cohort::python {

inline constexpr std::uint32_t kNamedCallsVersion = 1;
inline constexpr auto* kNamedCallsCapsule = "cohort.named_calls";

/// The numbers of named::Kind.
enum class NamedKind : std::uint8_t { AllReduce = 0, AllGather, Broadcast, ReduceScatter, AllToAll, Barrier };

/// One operation; named::Request documents its fields.
struct NamedCall {
  NamedKind kind = NamedKind::AllReduce;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Average;
  bool needs_all_ranks = false;
  std::int32_t root = 0;
  double prescale = 1, postscale = 1;
  const char* name = nullptr;
  std::size_t name_bytes = 0;
  const std::int64_t* shape = nullptr;  ///< the input's
  std::size_t dimensions = 0;
  const void* input = nullptr;  ///< for a broadcast only the root's is read; it may be `output`
  void* output = nullptr;       ///< all_reduce (may be `input`) and broadcast; others: see NamedGroup::allocate
  const std::int64_t* splits = nullptr;
  std::size_t split_count = 0;
};

/// Result of an operation that makes its output.
struct NamedMade {
  const std::int64_t* shape = nullptr;
  std::size_t dimensions = 0;
  const std::int64_t* received_splits = nullptr;  ///< all_gather and all_to_all: rows of each rank
  std::size_t received_count = 0;
};

/// Result of a group. Valid only during `done`.
struct NamedReply {
  const char* failure = nullptr;    ///< null: all succeeded. Else the text of the first error
  int code = 0;                     ///< the number of its cohort::ErrorCode
  const NamedMade* made = nullptr;  ///< one for each operation; null after a failure
};

/// Operations called together. All or none are accepted, and `done` is called once for all.
struct NamedGroup {
  std::uint64_t engine = 0;  ///< the number under which it was published
  const NamedCall* calls = nullptr;
  std::size_t count = 0;
  /// The time that `submit` may wait for the operations before other threads take over. A caller that would wait in any
  /// case saves two switches of threads by that.
  std::int64_t patience_ns = 0;
  /// Returns memory for the output of operation `index`; needed by all_gather, reduce_scatter and all_to_all. Called on
  /// the engine's thread, and must not call back. Null ends the world, since the other ranks count on this rank.
  void* (*allocate)(void* context, std::size_t index, const std::int64_t* shape, std::size_t dimensions) = nullptr;
  /// Called exactly once, even if nothing was begun: by the caller before `submit` returns, or later on a dedicated
  /// thread. It may submit; it must not wait for operations.
  void (*done)(void* context, const NamedReply& reply) = nullptr;
  void* context = nullptr;
};

struct NamedCalls {
  std::uint32_t version = kNamedCallsVersion;
  std::uint32_t size = sizeof(NamedCall) + sizeof(NamedGroup) + sizeof(NamedReply) + sizeof(NamedMade);
  void (*submit)(const NamedGroup& group) noexcept = nullptr;

  /// Returns null, or the reason why a library cannot use the table of this `_core`.
  const char* problem() const noexcept {
    const NamedCalls own;
    if (version == own.version && size == own.size) return nullptr;
    return "cohort._core and this library beside it are of different builds -- install Cohort anew";
  }
};

}  // namespace cohort::python
