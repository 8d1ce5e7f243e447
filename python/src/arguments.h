// What Python gives for the core's options: numbers of seconds, names of reductions. Needs the GIL.
#pragma once

#include <cohort/dtype.h>

#include <pybind11/pybind11.h>

#include <chrono>
#include <optional>

namespace cohort::python {

/// Seconds as a number or a datetime.timedelta, rounded up to milliseconds; None is nullopt. Throws InvalidArgument.
std::optional<std::chrono::milliseconds> milliseconds_of(pybind11::handle seconds, const char* operation);

/// A ReduceOp, or its name ("sum", "Sum"). Throws InvalidArgument.
ReduceOp reduce_op_of(pybind11::handle op, const char* operation);

}  // namespace cohort::python
