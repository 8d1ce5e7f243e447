// Which DType the element types of torch, of the buffer protocol and of DLPack are. Needs the GIL.
#pragma once

#include "dlpack.h"

#include <cohort/dtype.h>

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

namespace cohort::python {

/// Of a torch.dtype, known by its text: torch is not imported.
std::optional<DType> tensor_dtype(pybind11::handle dtype);
/// Of one element of a Py_buffer: its format, in the letters of the module struct, and its size.
std::optional<DType> format_dtype(const char* format, Py_ssize_t itemsize) noexcept;
std::optional<DType> dlpack_dtype(const dlpack::DataType& type) noexcept;
/// By its name ("float32", "torch.float32") or as anything whose text ends like that (torch.float32).
std::optional<DType> named_dtype(const std::string& name) noexcept;

/// "it knows float32, float64, ...", for error messages.
std::string known_dtypes();

}  // namespace cohort::python
