// Converts cohort::Error to an exception of cohort/errors.py: one class for each ErrorCode, with the context as
// attributes. Needs the GIL.
#pragma once

#include <cohort/error.h>

#include <pybind11/pybind11.h>

#include <string>

namespace cohort::python {

/// Makes every cohort::Error that leaves this module raise its Python class.
void translate_errors();

/// For functions that Python calls without pybind11: sets the current C++ exception as Python's.
void raise_current() noexcept;

/// Returns the exception object for an error.
pybind11::object to_python(const Error& error);

/// Converts an exception of these classes back to an error, without its text.
Error from_python(const pybind11::object& exception);

/// Throws InvalidArgument: "OPERATION: WHY".
[[noreturn]] void refuse(const std::string& operation, const std::string& why);

}  // namespace cohort::python
