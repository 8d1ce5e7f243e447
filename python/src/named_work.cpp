#include "arguments.h"
#include "errors.h"
#include "named.h"

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

using Shared = std::shared_ptr<NamedOperation>;

py::object named_error(const NamedOperation& work) {
  const std::optional<Error> failed = work.error();
  return failed ? to_python(*failed) : py::none();
}

py::object result(NamedOperation& work) {
  const named::Outcome& outcome = work.outcome("result");
  if (const GpuResult* const made = work.gpu_result()) return made->tensor();
  if (!outcome.owner) return py::none();
  return py::cast(NamedResult{outcome.owner, outcome.data, outcome.dtype, outcome.shape});
}

/// In seconds of Python's time.monotonic(); None for what has not been.
py::object seconds_at(const NamedOperation& work, std::chrono::steady_clock::time_point at) {
  if (!work.done() || at == std::chrono::steady_clock::time_point()) return py::none();
  return py::float_(std::chrono::duration<double>(at.time_since_epoch()).count());
}

}  // namespace

void bind_named_work(py::module_& module) {
  py::class_<NamedOperation, Shared>(
      module, "NamedWork",
      "An operation by name that is under way. It goes on unattended, and keeps its arrays alive, also if this object "
      "is dropped. Any thread may use it, several may wait. What is said of its outcome raises InvalidArgument before "
      "it is done, and its error if it failed.")
      .def(
          "wait",
          [](const Shared& work, const py::object& timeout) { return work->wait(milliseconds_of(timeout, "wait")); },
          py::arg("timeout") = py::none(),
          "Blocks until the operation is done on this rank and returns True. Raises its error: Mismatch (ranks brought "
          "different things), Timeout (some never brought it), Aborted (the engine was shut down), PeerLost. After "
          "`timeout` seconds (a number or a timedelta) it gives up waiting, not the operation, and returns False. A "
          "KeyboardInterrupt ends the waiting, not the operation.")
      .def("done", &NamedOperation::done, "True once it is over, with or without an error. Never blocks.")
      .def("error", &named_error,
           "The error of an operation that has failed; None while it runs and when it succeeded.")
      .def(
          "add_done_callback",
          [](const py::object& self, const py::object& function) {
            Callbacks::add(self, py::cast<NamedOperation&>(self), function);
          },
          py::arg("fn"),
          "Calls fn(work) once it is done, on a thread of its own; at once, if it is, so several may come in any "
          "order. "
          "What it raises is reported as unraisable.")
      .def_property_readonly("result", &result,
                             "What all_gather, reduce_scatter and all_to_all have made: a NamedResult, of a GPU's "
                             "memory a torch tensor; None of other operations.")
      .def_property_readonly(
          "received_splits", [](NamedOperation& work) { return work.outcome("received_splits").received_splits; },
          "Rows from each rank, of all_to_all and all_gather; else [].")
      .def_property_readonly(
          "last_joined", [](NamedOperation& work) { return work.outcome("last_joined").last_joined; },
          "Of join: the rank that joined last, the same on all ranks; else -1.")
      .def_property_readonly(
          "agreed_at", [](NamedOperation& work) { return seconds_at(work, work.handle().agreed_at()); },
          "When all ranks had asked for it, in seconds of time.monotonic(); None until it is done, and if they never "
          "did.")
      .def_property_readonly(
          "ended_at", [](NamedOperation& work) { return seconds_at(work, work.handle().ended_at()); },
          "When it was done; None until then.");
}

}  // namespace cohort::python
