#include "arguments.h"

#include "errors.h"

#include <cctype>
#include <cmath>
#include <string>

namespace cohort::python {
namespace py = pybind11;

std::optional<std::chrono::milliseconds> milliseconds_of(py::handle seconds, const char* operation) {
  if (seconds.is_none()) return std::nullopt;
  const bool is_delta =
      !PyFloat_Check(seconds.ptr()) && !PyLong_Check(seconds.ptr()) && py::hasattr(seconds, "total_seconds");
  const py::object number = is_delta ? seconds.attr("total_seconds")() : py::reinterpret_borrow<py::object>(seconds);
  const double value = PyFloat_AsDouble(number.ptr());
  if (PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse(operation, "the timeout is " + std::string(py::repr(seconds)) +
                          "; it has to be a number of seconds, a datetime.timedelta, or None for the default");
  }
  constexpr double kMost = 1e12;  // the core refuses what is too long; here it only has to fit
  if (std::isnan(value)) refuse(operation, "the timeout is not a number");
  return std::chrono::milliseconds(
      static_cast<std::chrono::milliseconds::rep>(std::ceil(std::fmin(std::fmax(value * 1e3, -1), kMost))));
}

ReduceOp reduce_op_of(py::handle op, const char* operation) {
  // Names that were understood before; there are few, and it is never destroyed.
  static PyObject* const known = PyDict_New();
  if (PyUnicode_CheckExact(op.ptr()) != 0) {
    if (PyObject* const found = PyDict_GetItem(known, op.ptr())) return static_cast<ReduceOp>(PyLong_AsLong(found));
  }
  if (py::isinstance<ReduceOp>(op)) return py::cast<ReduceOp>(op);
  if (PyUnicode_Check(op.ptr()) != 0) {
    // "sum" and "Sum", "bit_and" and "BitAnd".
    const auto plain = [](std::string_view name) {
      std::string letters;
      for (const char letter : name) {
        if (letter != '_') letters += static_cast<char>(std::tolower(static_cast<unsigned char>(letter)));
      }
      return letters;
    };
    std::string wanted = plain(py::cast<std::string>(op));
    if (wanted == "mean") wanted = "average";
    for (int i = 0; i < kReduceOpCount; ++i) {
      if (wanted != plain(to_string(static_cast<ReduceOp>(i)))) continue;
      const py::int_ number(i);
      if (PyDict_Size(known) < 64 && PyDict_SetItem(known, op.ptr(), number.ptr()) != 0) throw py::error_already_set();
      return static_cast<ReduceOp>(i);
    }
  }
  refuse(operation, "the reduction is " + std::string(py::repr(op)) +
                        "; it is a cohort.ReduceOp or one of 'sum', 'average', 'min', 'max', 'product', 'bit_and', "
                        "'bit_or', 'bit_xor'");
}

}  // namespace cohort::python
