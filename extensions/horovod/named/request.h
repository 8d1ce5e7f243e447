// A user's request to an Engine, and the properties that ranks compare. Plain values. A Request's buffers belong to the
// caller, who has to keep them alive and unchanged until the operation is done. Any thread may use its own.
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
  AllGather,      ///< concatenates along dimension 0, whose size may differ between ranks
  Broadcast,      ///< in place in `output`
  ReduceScatter,  ///< along dimension 0; if not divisible, the first ranks get one row more
  AllToAll,       ///< sends rows to ranks by `splits`
  Barrier,
  Join,   ///< made by Engine::join
  Group,  ///< made by Engine::form_group
};
inline constexpr int kKindCount = 8;

/// Returns "all_reduce", ..., "form_group".
std::string_view name_of(Kind kind) noexcept;

/// Function that returns memory for an output of this shape, on the input's device. The size is known only when all
/// ranks have requested the operation. Work queued on the input's stream before that may still use the memory. Called
/// on the engine's thread; must not call the engine. An exception ends the communicator, as others wait for this rank.
using OutputAllocator = std::function<void*(std::span<const std::int64_t> shape)>;

/// A request. On GPU memory, the operation runs after the work that is in the stream at the time of the request.
struct Request {
  std::string name;  ///< 1 to 4096 bytes; only one operation of a name at a time
  Kind kind = Kind::AllReduce;
  /// Dimensions of `input` (of `output` for broadcast), whose product is its count. Empty: a scalar.
  std::vector<std::int64_t> shape = {};
  /// This rank's input. A broadcast uses only the root's input, which may be `output`.
  ConstBuffer input = {};
  /// all_reduce and broadcast: buffer for the result, with the input's count and dtype; may be the input.
  Buffer output = {};
  /// all_gather, reduce_scatter, all_to_all: memory for the result. Unset: the Outcome owns it.
  OutputAllocator allocate = {};
  ReduceOp op = ReduceOp::Average;
  int root = 0;  ///< broadcast: the root's rank in the engine's communicator
  /// Factors before and after the reduction. Integers are scaled in double precision, rounded toward zero and clamped.
  double prescale = 1;
  double postscale = 1;
  /// all_reduce and reduce_scatter of float32, Sum or Average: the format between hosts. Not fused, since a block
  /// belongs to one tensor.
  WireFormat wire_format = WireFormat::None;
  /// all_to_all: rows for each rank, adding up to shape[0]. Empty: equal parts.
  std::vector<std::int64_t> splits = {};
  /// all_gather and broadcast: refuses the operation while some ranks have joined, as all_to_all always does.
  bool needs_all_ranks = false;
};

/// Properties on which ranks must agree, except for dimension 0 and `splits` of kinds in which these may differ.
struct Signature {
  Kind kind = Kind::Barrier;
  DType dtype = DType::Float32;
  ReduceOp op = ReduceOp::Sum;
  std::int32_t root = 0;
  double prescale = 1;
  double postscale = 1;
  std::vector<std::int64_t> shape = {};
  std::vector<std::int64_t> splits = {};  ///< form_group: the ranks
  bool needs_all_ranks = false;
  DeviceType device = DeviceType::CPU;  ///< GPU numbers are not compared
  WireFormat wire_format = WireFormat::None;

  bool operator==(const Signature&) const = default;
  std::int64_t count() const noexcept;  ///< elements
};

/// Returns "all_reduce(float32[2, 3], sum)": all compared properties except for the device.
std::string to_string(const Signature& signature);

/// Returns the device of the request's memory; the host if the request has no memory.
Device device_of(const Request& request) noexcept;

/// Checks a request for a world of `size` ranks, and returns its signature; InvalidArgument for an invalid request.
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

/// Result of an operation, beyond the request's buffers. Fields that do not apply are empty.
struct Outcome {
  void* data = nullptr;                            ///< all_gather, reduce_scatter, all_to_all: the result
  std::shared_ptr<void> owner = {};                ///< keeps `data` alive if the engine allocated it
  DType dtype = DType::Float32;                    ///< of the result
  std::vector<std::int64_t> shape = {};            ///< of the result
  std::vector<std::int64_t> received_splits = {};  ///< all_to_all: rows from each rank; all_gather: rows of each rank
  int last_joined = -1;                            ///< join: the rank that joined last
  Communicator group = {};                         ///< form_group: belongs to no world on ranks that are not in it
};

class Wakeup;

/// An operation's state, shared by Handles and the engine, which ends it once. Waiting calls Wakeup::urge.
class State final : public comm::UnfinishedWork {
 public:
  /// `name`: for messages.
  State(std::shared_ptr<Wakeup> engine, std::string name);
  /// Logs an error that nobody has received, except for Aborted, which the caller of shutdown expects.
  ~State() override;
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  void wait() override;
  bool wait_for(std::chrono::nanoseconds limit) override;
  void on_done(std::function<void()> callback) override;
  bool at_home() const noexcept override;

  /// Written by the engine before `end`.
  Outcome result;
  /// Times when all ranks had requested the operation (unset if they never did), and when it ended, for timelines.
  std::chrono::steady_clock::time_point agreed_at = {};
  std::chrono::steady_clock::time_point ended_at = {};
  void end(std::optional<Error> error);

 private:
  void tell_timeline() const noexcept;

  const int process_;
  const std::chrono::steady_clock::time_point asked_at_;  // set if there is a timeline
  const std::shared_ptr<Wakeup> engine_;
  const std::string name_;
  std::mutex mutex_;
  std::condition_variable ended_;
};

/// Handle of an operation that an Engine carries out: callers can wait for it and then get its Outcome. Copies share
/// the operation; any thread may call, several may wait. A Handle may outlive its engine.
class Handle {
 public:
  explicit Handle(std::shared_ptr<State> state) noexcept : state_(std::move(state)) {}

  /// Blocks until the operation is done, at the latest after the engine's timeout. Throws cohort::Error: Mismatch
  /// (ranks requested different operations), Timeout (some never requested it), Aborted (the engine was shut down), or
  /// the error that ended the communicator. May be called again, with the same result.
  void wait() { work().wait(); }
  /// Like `wait`, for at most `limit`; returns false if the operation is not done by then.
  bool wait_for(std::chrono::nanoseconds limit) { return state_->wait_for(limit) && (wait(), true); }
  bool done() const noexcept { return state_->done(); }
  /// Waits like wait_for, but leaves the error for a later call. Returns true if the operation is done.
  bool block(std::optional<std::chrono::nanoseconds> limit) {
    if (limit) return state_->wait_for(*limit);
    state_->wait();
    return true;
  }
  /// Calls `callback` on the engine's thread when done, or now if done. It must not throw, block or call the engine.
  void on_done(std::function<void()> callback) { state_->on_done(std::move(callback)); }
  /// Returns the error of an operation that is done; null if it succeeded. The error then counts as reported.
  const Error* failure() const noexcept {
    const auto& error = state_->outcome();
    if (!error) return nullptr;
    state_->reported = true;
    return &*error;
  }
  bool at_home() const noexcept { return state_->at_home(); }
  /// Waits, then returns the outcome.
  const Outcome& outcome() {
    wait();
    return state_->result;
  }
  /// Return times of an operation that is done: see State.
  std::chrono::steady_clock::time_point agreed_at() const noexcept { return state_->agreed_at; }
  std::chrono::steady_clock::time_point ended_at() const noexcept { return state_->ended_at; }
  /// Returns the same operation as a Work.
  Work work() const { return Work(state_); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace cohort::named
