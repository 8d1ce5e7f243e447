// The world of operations by name, their results in GPU memory, and a program's questions about GPUs.
#include "errors.h"
#include "horovod/bindings/named.h"

#include "horovod/named/execution.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>

namespace cohort::python {
namespace {

// Worlds that Python has dropped and that still serve operations. Never destroyed, as in member.cpp.
std::vector<std::shared_ptr<NamedWorld>>& lingering_worlds() {
  static auto* const all = new std::vector<std::shared_ptr<NamedWorld>>();
  return *all;
}

}  // namespace

// --- NamedOperation ---

void NamedOperation::check_home() const {
  if (home_ == fork_generation()) return;
  refuse("wait", "this operation belongs to the process that started it, and this is a forked child of it");
}

bool NamedOperation::wait(std::optional<std::chrono::nanoseconds> limit) {
  check_home();
  if (!handle_.done() && !wait_until([&](auto slice) { return handle_.block(slice); }, end_of(limit))) return false;
  end();
  if (const Error* const failed = handle_.failure()) throw *failed;
  return true;
}

void NamedOperation::end() {
  let_go();
  // Releases the result, because GPU memory is too scarce for results that the program has dropped.
  const std::shared_ptr<NamedWorld> keeper = std::exchange(keeper_, {}).lock();
  if (result_ && keeper) keeper->let_go_of_done();
}

std::optional<Error> NamedOperation::error() const {
  check_home();
  if (!handle_.done()) return std::nullopt;
  const Error* const failed = handle_.failure();
  return failed != nullptr ? std::optional(*failed) : std::nullopt;
}

const named::Outcome& NamedOperation::outcome(const char* what) {
  check_home();
  if (!handle_.done()) refuse(what, "the operation is not done -- wait() for it before asking what came of it");
  return handle_.outcome();
}

// --- NamedWorld ---

std::shared_ptr<NamedWorld> NamedWorld::make(std::shared_ptr<Member> member, named::EngineOptions options) {
  sweep();
  auto world = std::make_shared<NamedWorld>(member);
  world->communicator_ = member->give_over("NamedEngine", world);
  world->engine_ = std::make_shared<named::Engine>(world->communicator_, std::move(options));
  return world;
}

named::Engine& NamedWorld::engine(const char* operation) const {
  if (home_ != fork_generation()) {
    refuse(operation, "this NamedEngine belongs to the process that made it, and this is a forked child of it");
  }
  if (!engine_) refuse(operation, "this NamedEngine has been shut down -- make a new one, of another communicator");
  return *engine_;
}

named::Engine::Statistics NamedWorld::statistics() const {
  return engine_ && home_ == fork_generation() ? engine_->statistics() : last_;
}

void NamedWorld::publish(std::uint64_t number) const {
  static_cast<void>(engine("publish"));
  python::publish(number, engine_);
}

Memory NamedWorld::allocate(std::size_t bytes) const {
  static_cast<void>(engine("allocate"));
  Communicator communicator = communicator_;
  const py::gil_scoped_release release;
  return communicator.allocate(bytes);
}

std::shared_ptr<NamedOperation> NamedWorld::keep(named::Handle handle, std::vector<Array> arrays,
                                                 std::shared_ptr<GpuResult> result) {
  auto operation =
      std::make_shared<NamedOperation>(std::move(handle), std::move(arrays), std::move(result), weak_from_this());
  running_.keep(operation);
  if (operation->gpu()) {
    Held::let_go_at_end(operation, [&](std::function<void()> call) { operation->handle().on_done(std::move(call)); });
  }
  return operation;
}

void NamedWorld::end() {
  if (!engine_) return;
  // From here on every call is refused, so that nobody uses the engine while it ends.
  const std::shared_ptr<named::Engine> engine = std::move(engine_);
  Communicator communicator = std::exchange(communicator_, {});
  std::optional<py::error_already_set> interrupt;
  try {
    run_interruptibly<void>(
        [engine] { engine->shutdown(); },
        [communicator, rank = member_->rank]() mutable {
          communicator.abort("rank " + std::to_string(rank) + " was interrupted while its NamedEngine was shut down");
        });
  } catch (py::error_already_set& raised) {
    interrupt.emplace(raised);
  }
  last_ = engine->statistics();
  running_.reap();
  if (interrupt) throw std::move(*interrupt);
}

void NamedWorld::shutdown() {
  if (home_ == fork_generation()) end();
}

void NamedWorld::leave(const LeaveOptions& options) {
  if (!engine_ || home_ != fork_generation()) return;
  std::optional<Clock::time_point> until;
  if (options.grace) until = Clock::now() + *options.grace;
  std::optional<py::error_already_set> interrupt;
  bool abort = options.failed;
  try {
    // Operations unfinished at the end of the grace period fail with Aborted on all ranks, as after `shutdown`.
    if (!options.failed) running_.finish(until);
  } catch (py::error_already_set& raised) {
    interrupt.emplace(raised);
    abort = true;
  }
  if (abort && engine_) {
    Communicator communicator = communicator_;
    const py::gil_scoped_release release;
    communicator.abort(options.reason);
  }
  end();
  if (interrupt) throw std::move(*interrupt);
}

void NamedWorld::let_go(std::shared_ptr<NamedWorld> world) {
  if (world->home_ != fork_generation() || !world->engine_) return;
  lingering_worlds().push_back(std::move(world));
  sweep();
}

// Ends idle worlds when the others notice, and releases worlds that have ended.
void NamedWorld::sweep() {
  for (const auto& world : std::exchange(lingering_worlds(), {})) {
    const bool at_home = world->home_ == fork_generation();
    const bool idle = at_home && !world->running_.any();
    if (idle && world->engine_) world->engine_->begin_shutdown();
    if (idle && (!world->engine_ || world->engine_->ended())) {
      world->end();
    } else {
      lingering_worlds().push_back(world);
    }
  }
}

void NamedWorld::forget_all() {
  const auto gone = std::exchange(lingering_worlds(), {});
  Callbacks::stop();
  const py::gil_scoped_release release;
  stop_completions();
}

GpuResult::GpuResult(const char* operation, const ConstBuffer& input) : dtype_(input.dtype), device_(input.device) {
  try {
    py::module_::import("torch");
  } catch (const py::error_already_set& failed) {
    refuse(operation, "what it makes in a GPU's memory is a torch tensor, and torch cannot be imported here: " +
                          std::string(failed.what()) + " -- pass an array of the host's memory");
  }
}

void* GpuResult::allocate(std::span<const std::int64_t> shape) {
  const py::gil_scoped_acquire gil;
  try {
    const py::module_ torch = py::module_::import("torch");
    const py::object device = torch.attr("device")("cuda", device_.index);
    const auto make = [&] {
      tensor_ = torch.attr("empty")(py::tuple(py::cast(std::vector<std::int64_t>(shape.begin(), shape.end()))),
                                    py::arg("dtype") = torch.attr(std::string(to_string(dtype_)).c_str()),
                                    py::arg("device") = device);
    };
    // torch allocates memory for one stream, here the one in which the program continues.
    if (device_.stream == nullptr) {
      make();
    } else {
      const py::object cuda = torch.attr("cuda");
      const auto address = reinterpret_cast<std::uintptr_t>(device_.stream);
      const py::object in_stream =
          cuda.attr("stream")(cuda.attr("ExternalStream")(address, py::arg("device") = device));
      in_stream.attr("__enter__")();
      const auto leave = [&] { in_stream.attr("__exit__")(py::none(), py::none(), py::none()); };
      try {
        make();
      } catch (...) {  // there may be no memory, and this thread has to continue
        leave();
        throw;
      }
      leave();
    }
    return reinterpret_cast<void*>(py::cast<std::uintptr_t>(tensor_.attr("data_ptr")()));
  } catch (const py::error_already_set& failed) {
    throw std::runtime_error(failed.what());
  }
}

void bind_named_gpus(py::module_& module) {
  module.def("gpu_count", &named::gpu_count, "How many NVIDIA GPUs this process sees; 0 without a driver.");
  module.def(
      "nccl_version", &named::nccl_version,
      "The version of the NCCL that carries out operations of GPUs' memory, 23007 for 2.30.7; 0: there is none.");
}

}  // namespace cohort::python
