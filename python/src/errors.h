// cohort::Error becomes an exception of cohort/errors.py: one class for each ErrorCode, with the context as attributes.
// Needs the GIL.
#pragma once

#include <cohort/error.h>

#include <pybind11/pybind11.h>

#include <string>

namespace cohort::python {

/// From now on every cohort::Error that leaves this module is raised as its Python class.
void translate_errors();

/// For functions that Python calls without pybind11: the current C++ exception becomes Python's.
void raise_current() noexcept;

/// The exception object for an error.
pybind11::object to_python(const Error& error);

/// And back, without its text: of an exception of these classes.
Error from_python(const pybind11::object& exception);

/// Throws InvalidArgument: "OPERATION: WHY".
[[noreturn]] void refuse(const std::string& operation, const std::string& why);

}  // namespace cohort::python
