// cohort._core.NamedResult: an array that the engine has made, for whatever library wants to look at it.
#include "dlpack.h"
#include "errors.h"
#include "named.h"

#include <pybind11/stl.h>

namespace cohort::python {
namespace {

constexpr auto kCapsule = "dltensor";

/// What a DLPack tensor of a result keeps alive: no Python, since its consumer may free it anywhere.
struct Exported {
  dlpack::ManagedTensor managed{};
  std::shared_ptr<void> owner;
  std::vector<std::int64_t> shape;
};

dlpack::DataType dlpack_type(DType dtype) noexcept {
  const auto bits = static_cast<std::uint8_t>(8 * size_of(dtype));
  if (dtype == DType::Bool) return {dlpack::kBool, bits, 1};
  if (dtype == DType::BFloat16) return {dlpack::kBFloat, bits, 1};
  if (is_complex(dtype)) return {dlpack::kComplex, bits, 1};
  if (is_floating(dtype)) return {dlpack::kFloat, bits, 1};
  return {dtype >= DType::UInt8 ? dlpack::kUInt : dlpack::kInt, bits, 1};
}

/// In the letters of the module struct.
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
    case DType::BFloat16:  // there is no letter: its bits
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
    // Who takes the tensor renames the capsule.
    if (PyCapsule_IsValid(unused, kCapsule) == 0) return;
    auto* const tensor = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(unused, kCapsule));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) throw py::error_already_set();
  static_cast<void>(made.release());
  return py::reinterpret_steal<py::object>(capsule);
}

py::tuple shape_of_result(const NamedResult& result) { return py::tuple(py::cast(result.shape)); }

// `self` is the Python object: what is made of it keeps it alive.
py::object result_as_numpy(const py::object& self) {
  const auto& result = py::cast<const NamedResult&>(self);
  const std::string name(to_string(result.dtype));
  const py::module_ numpy = py::module_::import("numpy");
  if (result.dtype == DType::BFloat16) {
    refuse("NamedResult",
           "NumPy has no bfloat16 -- numpy.asarray(result) gives its bits as uint16, as_torch() a tensor");
  }
  if (result.count() == 0) return numpy.attr("empty")(shape_of_result(result), name);
  return numpy.attr("frombuffer")(self, name).attr("reshape")(shape_of_result(result));
}

py::object result_as_torch(const py::object& self) {
  const auto& result = py::cast<const NamedResult&>(self);
  const py::module_ torch = py::module_::import("torch");
  const py::object type = torch.attr(std::string(to_string(result.dtype)).c_str());
  if (result.count() == 0) return torch.attr("empty")(shape_of_result(result), py::arg("dtype") = type);
  return torch.attr("frombuffer")(self, py::arg("dtype") = type, py::arg("count") = result.count())
      .attr("view")(shape_of_result(result));
}

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
      .def("as_numpy", &result_as_numpy, "A NumPy array over it. Refused (InvalidArgument) for bfloat16.")
      .def("as_torch", &result_as_torch, "A torch tensor over it.");
}

}  // namespace cohort::python
