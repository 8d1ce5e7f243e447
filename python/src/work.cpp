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
