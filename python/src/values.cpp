// What is asked of values and not of ranks: whether all are finite.
#include "array_types.h"
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include <cohort/finite.h>

#include <pybind11/stl.h>

#include <optional>

namespace cohort::python {

void bind_values(py::module_& module) {
  module.def(
      "first_non_finite",
      [](const py::object& data, const py::object& wire_dtype) -> std::optional<std::int64_t> {
        const Array array(data, Access::Read, {"first_non_finite", "data"});
        FiniteOptions options;
        if (!wire_dtype.is_none()) {
          options.wire_dtype = named_dtype(py::str(wire_dtype));
          if (!options.wire_dtype) refuse("first_non_finite", "the wire_dtype is no type that is known");
        }
        const ConstBuffer buffer = array.const_buffer();
        const py::gil_scoped_release release;
        return first_non_finite(buffer, options);
      },
      py::arg("data"), py::arg("wire_dtype") = py::none(),
      "The number of the first element that is NaN or infinite (or becomes so as bfloat16), or None.");
}

}  // namespace cohort::python
