// cohort.Memory, and functions that only need arrays: whether all values are finite, and the order of an epoch's
// samples, as computed by the C++ sampler.
#include "arguments.h"
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include "base/permutation.h"

#include <cohort/communicator.h>
#include <cohort/finite.h>

#include <pybind11/stl.h>

#include <optional>
#include <vector>

namespace cohort::python {
namespace {

DType dtype_of(const py::object& dtype) {
  // numpy.float32 is a class, whose text is "<class 'numpy.float32'>".
  const std::string name(py::isinstance<py::type>(dtype) ? py::str(dtype.attr("__name__")) : py::str(dtype));
  if (const std::optional<DType> known = named_dtype(name)) return *known;
  refuse("Memory", "there is no type " + name + " -- " + known_dtypes());
}

std::vector<py::ssize_t> shape_of(const Memory& memory, DType dtype, const py::object& shape) {
  const auto most = static_cast<py::ssize_t>(memory.bytes() / size_of(dtype));
  if (shape.is_none()) return {most};
  std::vector<py::ssize_t> lengths;
  if (PyLong_Check(shape.ptr()) != 0) {
    lengths.push_back(py::cast<py::ssize_t>(shape));
  } else {
    for (const py::handle length : shape) lengths.push_back(py::cast<py::ssize_t>(length));
  }
  py::ssize_t count = 1;
  for (const py::ssize_t length : lengths) {
    if (length < 0 || __builtin_mul_overflow(count, length, &count)) refuse("Memory", "the shape has no meaning");
  }
  if (count > most) {
    refuse("Memory", "the shape has " + std::to_string(count) + " elements, and " + std::to_string(memory.bytes()) +
                         " bytes hold " + std::to_string(most));
  }
  return lengths;
}

// `memory` is the Python object: arrays made from it keep it alive.
py::object as_numpy(const py::object& memory, const py::object& dtype, const py::object& shape) {
  const auto& own = py::cast<const Memory&>(memory);
  const DType type = dtype_of(dtype);
  const std::vector<py::ssize_t> lengths = shape_of(own, type, shape);
  if (type == DType::BFloat16) {
    refuse("Memory", "NumPy has no bfloat16 -- view it as uint16, or as_torch('bfloat16')");
  }
  py::ssize_t count = 1;
  for (const py::ssize_t length : lengths) count *= length;
  const py::module_ numpy = py::module_::import("numpy");
  const std::string name(to_string(type));
  if (count == 0) return numpy.attr("empty")(py::tuple(py::cast(lengths)), name);
  return numpy.attr("frombuffer")(memory, name, count).attr("reshape")(py::tuple(py::cast(lengths)));
}

py::object as_torch(const py::object& memory, const py::object& dtype, const py::object& shape) {
  const DType type = dtype_of(dtype);
  return torch_over(memory, type, shape_of(py::cast<const Memory&>(memory), type, shape));
}

}  // namespace

void bind_memory(py::module_& module) {
  py::class_<Memory>(module, "Memory", py::buffer_protocol(),
                     "Memory that collectives read and write in place, without staging copies. A buffer of bytes for "
                     "numpy.frombuffer, torch.frombuffer and memoryview; it lives until the last array over it is "
                     "gone, after the communicator too. Zero-filled when new.")
      .def_buffer([](Memory& memory) {
        return py::buffer_info(memory.data(), 1, py::format_descriptor<std::uint8_t>::format(),
                               static_cast<py::ssize_t>(memory.bytes()));
      })
      .def("__len__", &Memory::bytes)
      .def_property_readonly("nbytes", &Memory::bytes, "Bytes, as asked for.")
      .def(
          "data_ptr", [](const Memory& memory) { return reinterpret_cast<std::uintptr_t>(memory.data()); },
          "The address, aligned to at least 4096 bytes.")
      .def("as_numpy", &as_numpy, py::arg("dtype"), py::arg("shape") = py::none(),
           "A NumPy array over it; by default one dimension of as many elements as fit.")
      .def("as_torch", &as_torch, py::arg("dtype"), py::arg("shape") = py::none(),
           "A torch tensor over it; by default one dimension of as many elements as fit.");
  module.def(
      "first_non_finite",
      [](const py::object& data, const py::object& wire_format) -> std::optional<std::int64_t> {
        const Array array(data, Access::Read, {"first_non_finite", "data"});
        FiniteOptions options;
        options.wire_format = wire_format_of("first_non_finite", wire_format);
        const ConstBuffer buffer = array.const_buffer();
        const py::gil_scoped_release release;
        return first_non_finite(buffer, options);
      },
      py::arg("data"), py::arg("wire_format") = py::none(),
      "The number of the first element that is NaN or infinite (or becomes so as bfloat16), or None.");
  module.def(
      "permute",
      [](const py::object& order, std::uint64_t seed, std::int64_t epoch) {
        const Array array(order, Access::Write, {"permute", "order"});
        const Buffer buffer = array.buffer();
        if (buffer.dtype != DType::Int64) refuse("permute", "the order is of 64-bit integers");
        const py::gil_scoped_release release;
        permute({static_cast<std::int64_t*>(buffer.data), static_cast<std::size_t>(buffer.count)}, seed, epoch);
      },
      py::arg("order"), py::arg("seed"), py::arg("epoch"),
      "Fills an array of int64 with the permutation of an epoch: cohort::data::permutation of C++.");
}

}  // namespace cohort::python
