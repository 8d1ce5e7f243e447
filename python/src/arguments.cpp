#include "arguments.h"

#include "errors.h"

#include <pybind11/stl.h>

#include <cctype>
#include <cmath>
#include <cstring>
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
  constexpr double kMost = 1e12;  // the core refuses times that are too long; here they only have to fit
  if (std::isnan(value)) refuse(operation, "the timeout is not a number");
  return std::chrono::milliseconds(
      static_cast<std::chrono::milliseconds::rep>(std::ceil(std::fmin(std::fmax(value * 1e3, -1), kMost))));
}

ReduceOp reduce_op_of(py::handle op, const char* operation) {
  // Caches converted names; there are few, and the dictionary is never destroyed.
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

namespace {

/// Returns the DType of a kind of numbers (DLPack's code) and a size.
std::optional<DType> find_dtype(std::uint8_t code, Py_ssize_t bytes) noexcept {
  for (int i = 0; i < kDTypeCount; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (dlpack_type(dtype).code == code && static_cast<Py_ssize_t>(size_of(dtype)) == bytes) return dtype;
  }
  return std::nullopt;
}

}  // namespace

dlpack::DataType dlpack_type(DType dtype) noexcept {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  if (dtype == DType::Bool) return {dlpack::kBool, bits, 1};
  if (dtype == DType::BFloat16) return {dlpack::kBFloat, bits, 1};
  if (is_complex(dtype)) return {dlpack::kComplex, bits, 1};
  if (is_floating(dtype)) return {dlpack::kFloat, bits, 1};
  return {dtype >= DType::UInt8 ? dlpack::kUInt : dlpack::kInt, bits, 1};
}

std::optional<DType> tensor_dtype(py::handle dtype) {
  // torch's dtypes are few and live forever, so each object's answer is cached.
  static PyObject* const known = PyDict_New();
  if (PyObject* const found = PyDict_GetItem(known, dtype.ptr())) return static_cast<DType>(PyLong_AsLong(found));
  const std::optional<DType> answer = named_dtype(py::str(dtype));
  if (answer) {
    const py::int_ number(static_cast<long>(*answer));
    if (PyDict_SetItem(known, dtype.ptr(), number.ptr()) != 0) throw py::error_already_set();
  }
  return answer;
}

std::optional<DType> format_dtype(const char* format, Py_ssize_t itemsize) noexcept {
  if (format == nullptr) return itemsize == 1 ? std::optional(DType::UInt8) : std::nullopt;
  const bool swapped = (*format == '>' || *format == '!') && itemsize > 1;
  if (std::strchr("@=<>!", *format) != nullptr && *format != '\0') ++format;
  const bool complex = *format == 'Z';
  if (complex) ++format;
  if (swapped || std::strlen(format) != 1) return std::nullopt;
  const auto is_one_of = [&](const char* letters) { return std::strchr(letters, *format) != nullptr; };
  if (complex) return is_one_of("fd") ? find_dtype(dlpack::kComplex, itemsize) : std::nullopt;
  if (is_one_of("efd")) return find_dtype(dlpack::kFloat, itemsize);
  if (is_one_of("bhilqn")) return find_dtype(dlpack::kInt, itemsize);
  if (is_one_of("BHILQN")) return find_dtype(dlpack::kUInt, itemsize);
  return *format == '?' ? find_dtype(dlpack::kBool, itemsize) : std::nullopt;
}

std::optional<DType> dlpack_dtype(const dlpack::DataType& type) noexcept {
  return type.lanes == 1 && type.bits % 8 == 0 ? find_dtype(type.code, type.bits / 8) : std::nullopt;
}

std::optional<DType> named_dtype(const std::string& name) noexcept {
  const std::string_view bare = std::string_view(name).substr(name.rfind('.') + 1);
  for (int i = 0; i < kDTypeCount; ++i) {
    if (bare == to_string(static_cast<DType>(i))) return static_cast<DType>(i);
  }
  return std::nullopt;
}

WireFormat wire_format_of(const char* function, const py::object& format) {
  if (format.is_none()) return WireFormat::None;
  const std::string text = py::str(format);
  const std::string_view bare = std::string_view(text).substr(text.rfind('.') + 1);
  std::string names;
  for (int i = 0; i < kWireFormatCount; ++i) {
    if (bare == to_string(static_cast<WireFormat>(i))) return static_cast<WireFormat>(i);
    names.append(i == 0 ? "" : ", ").append(to_string(static_cast<WireFormat>(i)));
  }
  refuse(function, "wire_format is no format that it knows: " + text + " -- it knows " + names);
}

std::string known_dtypes() {
  std::string names = "it knows ";
  for (int i = 0; i < kDTypeCount; ++i) names.append(i == 0 ? "" : ", ").append(to_string(static_cast<DType>(i)));
  return names;
}

py::object torch_over(const py::object& memory, DType dtype, const std::vector<std::int64_t>& shape) {
  const py::module_ torch = py::module_::import("torch");
  const py::object type = torch.attr(std::string(to_string(dtype)).c_str());
  const py::tuple lengths(py::cast(shape));
  std::int64_t count = 1;
  for (const std::int64_t length : shape) count *= length;
  if (count == 0) return torch.attr("empty")(lengths, py::arg("dtype") = type);
  return torch.attr("frombuffer")(memory, py::arg("dtype") = type, py::arg("count") = count).attr("view")(lengths);
}

}  // namespace cohort::python
