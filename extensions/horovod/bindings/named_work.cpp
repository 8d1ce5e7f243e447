// cohort._core.NamedWork, the thread that reports its end to Python, and NamedResult: an array made by the engine, for
// any array library.
#include "arguments.h"
#include "errors.h"
#include "horovod/bindings/named.h"

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

/// Converts to seconds of Python's time.monotonic(); None for a time not reached yet.
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

namespace {

/// Python references owned here, and released only with the GIL.
struct Callback {
  PyObject* function;
  PyObject* work;
};

// Called with the GIL held.
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
  // Runs on the engine's thread, or on this one, which does not wait for functions in the queue.
  auto& to = CompletionThread<Callback>::get();
  operation.handle().on_done([&to, call] { to.push(call); });
}

void Callbacks::stop() {
  const py::gil_scoped_release release;
  CompletionThread<Callback>::stop();
}

namespace {

constexpr auto kCapsule = "dltensor";

/// Owns a result's memory behind its DLPack tensor. Not a Python object, since the consumer may free it on any thread.
struct Exported {
  dlpack::ManagedTensor managed{};
  std::shared_ptr<void> owner;
  std::vector<std::int64_t> shape;
};

/// Returns the format in the letters of Python's module struct.
std::string format_of(DType dtype) {
  switch (dtype) {
    case DType::Float32: return "f";
    case DType::Float64: return "d";
    case DType::Float16: return "e";
    case DType::Int8: return "b";
    case DType::Int16: return "h";
    case DType::Int32: return "i";
    case DType::Int64: return "q";
    case DType::UInt8: return "B";
    case DType::BFloat16:  // has no letter; gives its bits as integers
    case DType::UInt16: return "H";
    case DType::UInt32: return "I";
    case DType::UInt64: return "Q";
    case DType::Bool: return "?";
    case DType::Complex64: return "Zf";
    case DType::Complex128: return "Zd";
  }
  return "B";
}

py::buffer_info buffer_of(NamedResult& result) {
  std::vector<py::ssize_t> shape(result.shape.begin(), result.shape.end());
  std::vector<py::ssize_t> strides(shape.size());
  auto stride = static_cast<py::ssize_t>(size_of(result.dtype));
  for (std::size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= shape[i];
  }
  const auto dimensions = static_cast<py::ssize_t>(shape.size());
  return {result.data,
          static_cast<py::ssize_t>(size_of(result.dtype)),
          format_of(result.dtype),
          dimensions,
          std::move(shape),
          std::move(strides)};
}

py::object to_dlpack(const NamedResult& result, const py::args&, const py::kwargs&) {
  auto made = std::make_unique<Exported>();
  made->owner = result.owner;
  made->shape = result.shape;
  made->managed.tensor = {result.data,
                          {dlpack::kCpu, 0},
                          static_cast<std::int32_t>(made->shape.size()),
                          dlpack_type(result.dtype),
                          made->shape.data(),
                          nullptr,
                          0};
  made->managed.manager = made.get();
  made->managed.deleter = [](dlpack::ManagedTensor* tensor) { delete static_cast<Exported*>(tensor->manager); };
  PyObject* const capsule = PyCapsule_New(&made->managed, kCapsule, [](PyObject* unused) {
    // A consumer of the tensor renames the capsule.
    if (PyCapsule_IsValid(unused, kCapsule) == 0) return;
    auto* const tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(unused, kCapsule));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(made.release());
  return py::reinterpret_steal<py::object>(capsule);
}

py::tuple shape_of_result(const NamedResult& result) { return py::tuple(py::cast(result.shape)); }

std::size_t bytes_of_result(const NamedResult& result) {
  return static_cast<std::size_t>(result.count()) * size_of(result.dtype);
}

}  // namespace

std::int64_t NamedResult::count() const noexcept {
  std::int64_t elements = 1;
  for (const std::int64_t length : shape) elements *= length;
  return elements;
}

void bind_named_result(py::module_& module) {
  py::class_<NamedResult>(module, "NamedResult", py::buffer_protocol(),
                          "An array that an operation by name has made: for anything that takes the buffer protocol or "
                          "DLPack, without a copy. It may be written. The buffer protocol has no bfloat16: it shows "
                          "uint16.")
      .def_buffer(&buffer_of)
      .def_property_readonly("shape", &shape_of_result, "Lengths of its dimensions.")
      .def_property_readonly(
          "dtype", [](const NamedResult& result) { return std::string(to_string(result.dtype)); },
          "\"float32\", \"bfloat16\", ...")
      .def_property_readonly("nbytes", &bytes_of_result)
      .def("__len__",
           [](const NamedResult& result) {
             if (result.shape.empty()) throw py::type_error("a NamedResult without dimensions has no length");
             return result.shape.front();
           })
      .def("__dlpack__", &to_dlpack)
      .def("__dlpack_device__", [](const NamedResult&) { return py::make_tuple(static_cast<int>(dlpack::kCpu), 0); })
      .def(
          "as_torch",
          [](const py::object& self) {
            const auto& result = py::cast<const NamedResult&>(self);
            return torch_over(self, result.dtype, result.shape);
          },
          "A torch tensor over it.");
}

}  // namespace cohort::python
