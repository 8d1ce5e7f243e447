// Operations by name for Python: an engine of train/named, its operations with their arrays, and how it ends with the
// world whose communicator it was given. The engine's thread touches Python for nothing but to make a GPU's tensor:
// what it has finished is let go of by the next call from Python. Needs the GIL; waits without it.
#pragma once

#include "arrays.h"
#include "bindings.h"
#include "waiting.h"

#include "train/named/engine.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace cohort::python {

/// An operation's result in GPU memory: a tensor of torch's, since only its allocator knows what is free there.
class GpuResult {
 public:
  /// Takes the type, device and stream of the input. Throws InvalidArgument without torch.
  GpuResult(const char* operation, const ConstBuffer& input);
  /// named::OutputAllocator: the engine's thread, without the GIL. Throws std::runtime_error.
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
  /// `keeper` keeps it until it is done.
  NamedOperation(named::Handle handle, std::vector<Array> arrays, std::shared_ptr<GpuResult> result,
                 std::weak_ptr<NamedWorld> keeper)
      : Held(std::move(arrays), nullptr),
        handle_(std::move(handle)),
        result_(std::move(result)),
        keeper_(std::move(keeper)) {}

  /// True once it has finished; throws its error. False after `limit`. An interrupt ends the waiting only.
  bool wait(std::optional<std::chrono::nanoseconds> limit);
  bool done() const noexcept { return handle_.done(); }
  std::optional<Error> error() const;
  /// The outcome of a finished operation. Throws InvalidArgument before the end, and the operation's error.
  const named::Outcome& outcome(const char* what);
  named::Handle& handle() noexcept { return handle_; }
  /// Null: what it makes is the host's, or nothing.
  const GpuResult* gpu_result() const noexcept { return result_.get(); }

 private:
  void check_home() const;
  void end() override;

  const std::uint64_t home_ = fork_generation();
  named::Handle handle_;
  std::shared_ptr<GpuResult> result_;
  std::weak_ptr<NamedWorld> keeper_;
};

/// Functions of Python that are called at once, on a thread of their own, when operations are done.
class Callbacks {
 public:
  /// `function(work)` once the operation is done; at once, in the caller, if it is.
  static void add(const pybind11::object& work, NamedOperation& operation, const pybind11::object& function);
  /// Ends the thread, once it has reported finished operations. It starts anew when it is needed.
  static void stop();
};

/// One rank's engine and the world that it ends with.
class NamedWorld final : public Tenant, public std::enable_shared_from_this<NamedWorld> {
 public:
  /// Takes over the communicator of `member`, once its unfinished operations have ended.
  static std::shared_ptr<NamedWorld> make(std::shared_ptr<Member> member, named::EngineOptions options);
  explicit NamedWorld(std::shared_ptr<Member> member) : member_(std::move(member)) {}

  Member& member() const noexcept { return *member_; }
  /// Throws InvalidArgument, naming the operation, after the end and in a forked child.
  named::Engine& engine(const char* operation) const;
  named::Engine::Statistics statistics() const;
  /// Memory of the communicator: reductions of the engine do not copy what lies there. Waits without the GIL.
  Memory allocate(std::size_t bytes) const;

  /// Compiled programs find the engine by this number from now on (named_calls.h).
  void publish(std::uint64_t number) const;

  /// Keeps operations, and so their arrays, until they are done.
  std::shared_ptr<NamedOperation> keep(named::Handle handle, std::vector<Array> arrays,
                                       std::shared_ptr<GpuResult> result = {});
  /// Call it before keeping many: lets go of finished operations, now and then.
  void tidy() { running_.tidy(); }
  /// At once.
  void let_go_of_done() { running_.reap(); }

  /// Ends the engine on all ranks, without waiting for what is outstanding.
  void shutdown();
  void leave(const LeaveOptions& options) override;
  bool has_left() const noexcept override { return engine_ == nullptr; }

  /// Python has dropped it: it serves what is outstanding, then ends.
  static void let_go(std::shared_ptr<NamedWorld> world);
  /// After Member::leave_all.
  static void forget_all();

 private:
  void end();
  static void sweep();

  const std::uint64_t home_ = fork_generation();
  const std::shared_ptr<Member> member_;
  Communicator communicator_;  // to abort with
  std::shared_ptr<named::Engine> engine_;
  named::Engine::Statistics last_;  // those of an engine that has ended
  Unfinished<NamedOperation> running_{64};
};

/// cohort._core.NamedResult: what all_gather, reduce_scatter and all_to_all have made in the host's memory.
struct NamedResult {
  std::shared_ptr<void> owner;
  void* data = nullptr;
  DType dtype = DType::Float32;
  std::vector<std::int64_t> shape;

  std::int64_t count() const noexcept;
};

/// For named_calls.h: the engine that a number stands for. A later one takes its place.
void publish(std::uint64_t number, const std::shared_ptr<named::Engine>& engine);
/// At the end: finished operations have been reported.
void stop_completions();

void bind_named(pybind11::module_& module);
void bind_named_calls(pybind11::module_& module);
void bind_named_work(pybind11::module_& module);
void bind_named_result(pybind11::module_& module);
void bind_named_gpus(pybind11::module_& module);

}  // namespace cohort::python
