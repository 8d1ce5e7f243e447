#include "arguments.h"
#include "bindings.h"
#include "errors.h"

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

bool wait(const PyWork& work, const py::object& timeout) {
  if (!work.operation) return true;
  const std::shared_ptr<Operation> operation = work.operation;
  return operation->wait(milliseconds_of(timeout, "wait"));
}

/// A CUstream, or what a library has in place of one; None: torch's current one, without torch the default one.
void* stream_of(const py::object& stream, int gpu) {
  py::object address = stream;
  if (stream.is_none()) {
    const auto modules = py::module_::import("sys").attr("modules").cast<py::dict>();
    if (!modules.contains("torch")) return nullptr;
    address = py::object(modules["torch"]).attr("cuda").attr("current_stream")(gpu).attr("cuda_stream");
  } else if (py::hasattr(stream, "cuda_stream")) {
    address = stream.attr("cuda_stream");  // torch's
  } else if (py::hasattr(stream, "__cuda_stream__")) {
    address = py::object(stream.attr("__cuda_stream__")()).cast<py::tuple>()[1];
  } else if (py::hasattr(stream, "ptr")) {
    address = stream.attr("ptr");  // CuPy's
  }
  if (!PyLong_Check(address.ptr())) {
    refuse("synchronize", "stream is a CUDA stream of torch's or CuPy's, or its address -- and not " +
                              std::string(py::str(py::type::handle_of(stream).attr("__name__"))));
  }
  return reinterpret_cast<void*>(address.cast<std::uintptr_t>());
}

void synchronize(const PyWork& work, const py::object& stream) {
  const std::shared_ptr<Operation> operation = work.operation;
  const std::optional<int> gpu = operation ? operation->gpu() : std::nullopt;
  const Device device = gpu ? Device{DeviceType::CUDA, *gpu, stream_of(stream, *gpu)} : Device{};
  if (operation) operation->synchronize(device);
}

py::object error(const PyWork& work) {
  if (!work.operation) return py::none();
  const std::optional<Error> failed = work.operation->error();
  return failed ? to_python(*failed) : py::none();
}

std::optional<bool> finite(const PyWork& work) {
  if (!work.operation) return std::nullopt;
  const std::shared_ptr<Operation> operation = work.operation;
  const py::gil_scoped_release release;
  return operation->finite();
}

}  // namespace

void bind_work(py::module_& module) {
  py::class_<PyWork>(module, "Work",
                     "An operation under way, as `async_op=True` returns it. It goes on unattended, and keeps its "
                     "arrays alive, also if this object is dropped. Any thread may use it.")
      .def("wait", &wait, py::arg("timeout") = py::none(),
           "Blocks until the operation has finished and returns True. Raises its error: Mismatch, PeerLost, Aborted, "
           "Timeout. After `timeout` seconds (a number or a timedelta) it gives up waiting, not the operation, and "
           "returns False. A KeyboardInterrupt ends the waiting, not the operation.")
      .def("synchronize", &synchronize, py::arg("stream") = py::none(),
           "Of GPU memory that NCCL carries out: blocks until all ranks have agreed on the operation and the GPU has "
           "been given it, and puts what `stream` is given from now on after its result, which the host does not wait "
           "for. `stream` is torch's, CuPy's, or an address; default: torch's current one, without torch the default "
           "one. Tensors of torch's that came in this stream are kept no longer: torch reuses memory in its order. Of "
           "all other operations it is `wait()`. Raises what `wait()` does if the operation has failed by then. "
           "If it fails later (a rank is lost, within a second; NCCL or the stream hangs until the deadline) the world "
           "ends, the stream goes on, and what is in the array is undefined: `wait()`, `error()`, `done()`, and the "
           "next "
           "operation of this communicator, say so.")
      .def(
          "done", [](const PyWork& work) { return !work.operation || work.operation->done(); },
          "True once the operation has finished, with or without an error. Never blocks.")
      .def("error", &error, "The error of a finished operation; None while it runs and when it succeeded.")
      .def(
          "finite", &finite,
          "Of a successful all_reduce with check_finite=True: False if the result (of a list, any of them) holds a NaN "
          "or an infinity; the same on all ranks that ask, if it is asked before the result is changed: over several "
          "hosts, and in a world of one, it is read here. None for everything else. Never blocks.")
      .def(
          "source", [](const PyWork& work) { return work.operation ? work.operation->source() : std::nullopt; },
          "Of a successful recv from any source: the rank, in its communicator, whose message it took. None for "
          "everything else. Never blocks.");
}

}  // namespace cohort::python
