// A user's request to an Engine, and the part of it that ranks compare. Plain values; a Request's buffers belong to the
// caller, who keeps them alive and leaves them alone until the operation is done. Any thread may use its own.
#pragma once

#include "base/records.h"
#include "base/result.h"
#include "comm/api/work_state.h"

#include <cohort/buffer.h>
#include <cohort/communicator.h>
#include <cohort/dtype.h>
#include <cohort/error.h>
#include <cohort/work.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
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
/// Work queued on the input's stream by then may still use that memory. Called on the engine's thread: it must not call
/// the engine. An exception from it ends the communicator, since the other ranks count on this one.
using OutputAllocator = std::function<void*(std::span<const std::int64_t> shape)>;

/// A GPU's memory comes after what its stream has when the operation is asked for.
struct Request {
  std::string name;  ///< 1 to 4096 bytes; one operation of a name at a time
  Kind kind = Kind::AllReduce;
  /// Dimensions of `input` (of `output` for broadcast); their product is its count. Empty: a scalar.
  std::vector<std::int64_t> shape = {};
  /// Input of this rank. A broadcast uses only the root's, which may be `output`.
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
  /// all_reduce and reduce_scatter of float32, Sum or Average: the format between hosts. Not fused: blocks are of one
  /// tensor.
  WireFormat wire_format = WireFormat::None;
  /// all_to_all: rows for each rank, adding up to shape[0]. Empty: equal parts.
  std::vector<std::int64_t> splits = {};
  /// all_gather and broadcast: refused while some ranks have joined, as all_to_all always is.
  bool needs_all_ranks = false;
};

/// Properties that ranks must agree on (except for dimension 0 and `splits` where they may differ).
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
  WireFormat wire_format = WireFormat::None;

  bool operator==(const Signature&) const = default;
  std::int64_t count() const noexcept;  ///< elements
};

/// "all_reduce(float32[2, 3], sum)": everything that is compared but for the device.
std::string to_string(const Signature& signature);

/// Device of the request's memory: the host if it has none.
Device device_of(const Request& request) noexcept;

/// Checks a request against `size` ranks. InvalidArgument for an invalid one; nothing was done.
Result<Signature> signature_of(const Request& request, int size);

inline constexpr std::size_t kLongestName = 4096;
inline constexpr std::size_t kMostDimensions = 64;
inline constexpr std::size_t kMostSplits = std::size_t{1} << 20;

/// For base/records.h. Bytes from a peer that are no signature are Corrupt.
void visit_fields(auto& m, auto& a, const Signature*) {
  constexpr std::string_view kNone = "a description of an operation that does not exist";
  a(codec::below(m.kind, kKindCount, kNone), codec::below(m.dtype, kDTypeCount, kNone),
    codec::below(m.op, kReduceOpCount, kNone), m.needs_all_ranks, codec::below(m.device, 2, kNone),
    codec::below(m.wire_format, kWireFormatCount, kNone), m.root, m.prescale, m.postscale,
    codec::most(m.shape, kMostDimensions), codec::most(m.splits, kMostSplits));
  a.demand(m.count() >= 0, "a shape that no array has");
}

/// Result of an operation beyond the buffers it was given. Fields that do not apply are empty.
struct Outcome {
  void* data = nullptr;                            ///< all_gather, reduce_scatter, all_to_all: the result
  std::shared_ptr<void> owner = {};                ///< keeps `data` if the engine allocated it
  DType dtype = DType::Float32;                    ///< of the result
  std::vector<std::int64_t> shape = {};            ///< of the result
  std::vector<std::int64_t> received_splits = {};  ///< all_to_all: rows from each rank; all_gather: of each rank
  int last_joined = -1;                            ///< join: the rank that joined last
  Communicator group = {};                         ///< form_group: belongs to no world on ranks that are not in it
};

class Wakeup;

/// Shared by Handles and the engine, which ends it once. A waiting thread urges the engine.
class State final : public comm::UnfinishedWork {
 public:
  /// `name`: for messages.
  State(std::shared_ptr<Wakeup> engine, std::string name);
  /// An error that nobody was given is logged, but for Aborted: who shuts down knows.
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

  /// The engine's, before it ends.
  Outcome result;
  /// Times when all ranks had requested it (unset if they never did), and when it ended: for timelines.
  std::chrono::steady_clock::time_point agreed_at = {};
  std::chrono::steady_clock::time_point ended_at = {};
  void end(std::optional<Error> error);

 private:
  void tell_timeline() const noexcept;

  const int process_;
  const std::chrono::steady_clock::time_point asked_at_;  // if there is a timeline
  const std::shared_ptr<Wakeup> engine_;
  const std::string name_;
  std::mutex mutex_;
  std::condition_variable ended_;
};

/// Handle of an operation that an Engine carries out: it can be waited for, and then gives its Outcome. Handles are
/// shared by copying; any thread may call, several may wait. A Handle outlives its engine.
class Handle {
 public:
  explicit Handle(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

  /// Blocks until the operation is done; the engine's timeout makes sure of it. Throws cohort::Error: Mismatch (ranks
  /// requested different operations), Timeout (some never requested it), Aborted (the engine was shut down), or the
  /// error that ended the communicator. May be called again, with the same answer.
  void wait() { work().wait(); }
  /// Like `wait`, for at most `limit`; false if it is not done by then.
  bool wait_for(std::chrono::nanoseconds limit) { return state_->wait_for(limit) && (wait(), true); }
  bool done() const noexcept { return state_->done(); }
  /// Waits likewise, but leaves the error for a later call. True if the operation is done.
  bool block(std::optional<std::chrono::nanoseconds> limit) {
    if (limit) return state_->wait_for(*limit);
    state_->wait();
    return true;
  }
  /// Calls `callback` on the engine's thread once it is done, or at once. It must not throw, block or call the engine.
  void on_done(std::function<void()> callback) { state_->on_done(std::move(callback)); }
  /// The error of an operation that is done; null if it succeeded. Counts as reported once asked for.
  const Error* failure() const noexcept {
    const auto& error = state_->outcome();
    if (!error) return nullptr;
    state_->reported = true;
    return &*error;
  }
  bool at_home() const noexcept { return state_->at_home(); }
  /// Waits, then gives the outcome.
  const Outcome& outcome() {
    wait();
    return state_->result;
  }
  /// Times of an operation that is done: see State.
  std::chrono::steady_clock::time_point agreed_at() const noexcept { return state_->agreed_at; }
  std::chrono::steady_clock::time_point ended_at() const noexcept { return state_->ended_at; }
  /// The same operation as a Work.
  Work work() const { return Work(state_); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cohort::named
