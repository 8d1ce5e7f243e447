// What Python is told of finished operations, on a thread of its own.
#include "completion_thread.h"
#include "named.h"

namespace cohort::python {
namespace {

/// References that are owned, and given back with the GIL only.
struct Callback {
  PyObject* function;
  PyObject* work;
};

// The GIL is held.
void make(const Callback& call) {
  PyObject* const result = PyObject_CallOneArg(call.function, call.work);
  if (result == nullptr) PyErr_WriteUnraisable(call.function);
  Py_XDECREF(result);
  Py_DECREF(call.function);
  Py_DECREF(call.work);
}

void tell(const std::deque<Callback>& done) {
  const py::gil_scoped_acquire gil;
  for (const Callback& call : done) make(call);
}

}  // namespace

void Callbacks::add(const py::object& work, NamedOperation& operation, const py::object& function) {
  Callback call{function.ptr(), work.ptr()};
  Py_INCREF(call.function);
  Py_INCREF(call.work);
  if (operation.done()) {
    make(call);
    return;
  }
  // The engine's thread calls it, or this one, which does not wait for what the queue does.
  auto& to = CompletionThread<Callback>::get();
  operation.handle().on_done([&to, call] { to.push(call); });
}

void Callbacks::stop() {
  const py::gil_scoped_release release;
  CompletionThread<Callback>::stop();
}

}  // namespace cohort::python
