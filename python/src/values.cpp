// What is asked of values and not of ranks: whether all are finite, and a digest of their bytes.
#include "array_types.h"
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include <cohort/digest.h>
#include <cohort/finite.h>

#include <pybind11/stl.h>

#include <cstring>
#include <optional>
#include <string_view>

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
  module.def(
      "digest_of",
      [](const py::object& data, const py::bytes& key) {
        const Array array(data, Access::Read, {"digest_of", "data"});
        const std::string_view given = key;
        DigestKey bytes;
        if (given.size() != bytes.size()) refuse("digest_of", "a key has 32 bytes");
        std::memcpy(bytes.data(), given.data(), bytes.size());
        const ConstBuffer buffer = array.const_buffer();
        Digest digest;
        {
          const py::gil_scoped_release release;
          digest = digest_of(buffer, bytes);
        }
        return py::bytes(reinterpret_cast<const char*>(digest.data()), sizeof digest);
      },
      py::arg("data"), py::arg("key"),
      "16 bytes: Poly1305 of the elements' bytes under a key of 32, which has to be drawn at random.");
}

}  // namespace cohort::python
