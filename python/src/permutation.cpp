// The order of an epoch's samples, as the C++ sampler has it.
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include "base/permutation.h"

namespace cohort::python {

void bind_permutation(py::module_& module) {
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
