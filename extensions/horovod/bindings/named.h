// Operations by name for Python: an engine of horovod/named, its operations with their arrays, and its end with the
// world of its communicator. The engine's thread uses Python only to make a GPU tensor; finished operations are
// released by the next call from Python. Needs the GIL; waits without it.
#pragma once

#include "arrays.h"
#include "bindings.h"
#include "waiting.h"

#include "horovod/named/engine.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::python {

/// An operation's result in GPU memory. It is a torch tensor, since only torch's allocator knows which memory is free.
class GpuResult {
 public:
  /// Takes the type, device and stream of the input. Throws InvalidArgument without torch.
  GpuResult(const char* operation, const ConstBuffer& input);
  /// Implements named::OutputAllocator; runs on the engine's thread, without the GIL. Throws std::runtime_error.
  void* allocate(std::span<const std::int64_t> shape);
  const py::object& tensor() const noexcept { return tensor_; }

 private:
  const DType dtype_;
  const Device device_;
  py::object tensor_;
};

class NamedWorld;

/// cohort._core.NamedWork: an operation under way and its arrays.
class NamedOperation : public Held {
 public:
  /// `keeper` keeps the operation alive until it is done.
  NamedOperation(named::Handle handle, std::vector<Array> arrays, std::shared_ptr<GpuResult> result,
                 std::weak_ptr<NamedWorld> keeper)
      : Held(std::move(arrays), nullptr),
        handle_(std::move(handle)),
        result_(std::move(result)),
        keeper_(std::move(keeper)) {}

  /// Returns true when the operation has finished, and throws its error; false after `limit`. An interrupt only ends
  /// the waiting.
  bool wait(std::optional<std::chrono::nanoseconds> limit);
  bool done() const noexcept { return handle_.done(); }
  std::optional<Error> error() const;
  /// Returns the outcome of a finished operation. Throws InvalidArgument before the end, and the operation's error.
  const named::Outcome& outcome(const char* what);
  named::Handle& handle() noexcept { return handle_; }
  /// Returns null if the operation makes no result, or makes it in host memory.
  const GpuResult* gpu_result() const noexcept { return result_.get(); }

 private:
  void check_home() const;
  void end() override;

  const std::uint64_t home_ = fork_generation();
  named::Handle handle_;
  std::shared_ptr<GpuResult> result_;
  std::weak_ptr<NamedWorld> keeper_;
};

/// Python functions that are called on a separate thread as soon as operations are done.
class Callbacks {
 public:
  /// Calls `function(work)` when the operation is done; immediately, in the caller, if it is done already.
  static void add(const pybind11::object& work, NamedOperation& operation, const pybind11::object& function);
  /// Ends the thread, after it has reported finished operations. The thread is started again when needed.
  static void stop();
};

/// One rank's engine, and the world with which it ends.
class NamedWorld final : public Tenant, public std::enable_shared_from_this<NamedWorld> {
 public:
  /// Takes over the communicator of `member` when its unfinished operations have ended.
  static std::shared_ptr<NamedWorld> make(std::shared_ptr<Member> member, named::EngineOptions options);
  explicit NamedWorld(std::shared_ptr<Member> member) : member_(std::move(member)) {}

  Member& member() const noexcept { return *member_; }
  /// Throws InvalidArgument, naming the operation, after the end and in a forked child.
  named::Engine& engine(const char* operation) const;
  named::Engine::Statistics statistics() const;
  /// Allocates memory of the communicator, which the engine's reductions use without copies. Waits without the GIL.
  Memory allocate(std::size_t bytes) const;

  /// Registers the engine under this number, by which compiled programs find it (named_calls.h).
  void publish(std::uint64_t number) const;

  /// Keeps operations, and so their arrays, alive until they are done.
  std::shared_ptr<NamedOperation> keep(named::Handle handle, std::vector<Array> arrays,
                                       std::shared_ptr<GpuResult> result = {});
  /// Call it before keeping many operations; from time to time it releases finished ones.
  void tidy() { running_.tidy(); }
  /// Releases finished operations immediately.
  void let_go_of_done() { running_.reap(); }

  /// Ends the engine on all ranks, without waiting for outstanding operations.
  void shutdown();
  void leave(const LeaveOptions& options) override;
  bool has_left() const noexcept override { return engine_ == nullptr; }

  /// Called when Python has dropped the world, which serves outstanding operations and then ends.
  static void let_go(std::shared_ptr<NamedWorld> world);
  /// Called after Member::leave_all.
  static void forget_all();

 private:
  void end();
  static void sweep();

  const std::uint64_t home_ = fork_generation();
  const std::shared_ptr<Member> member_;
  Communicator communicator_;  // to abort with
  std::shared_ptr<named::Engine> engine_;
  named::Engine::Statistics last_;  // statistics of an engine that has ended
  Unfinished<NamedOperation> running_{64};
};

/// cohort._core.NamedResult: a result in host memory of all_gather, reduce_scatter or all_to_all.
struct NamedResult {
  std::shared_ptr<void> owner;
  void* data = nullptr;
  DType dtype = DType::Float32;
  std::vector<std::int64_t> shape;

  std::int64_t count() const noexcept;
};

/// Used by named_calls.h; registers an engine under a number. A later engine replaces an earlier one.
void publish(std::uint64_t number, const std::shared_ptr<named::Engine>& engine);
/// Called at the end, when finished operations have been reported.
void stop_completions();

/// Binds all of the extension.
void bind_horovod(pybind11::module_& module);
void bind_named_calls(pybind11::module_& module);
void bind_named_work(pybind11::module_& module);
void bind_named_result(pybind11::module_& module);
void bind_named_gpus(pybind11::module_& module);

}  // namespace cohort::python
