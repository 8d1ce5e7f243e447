// Tells whether dicts still hold the same objects. Every step checks this for the dicts in which modules keep their
// parameters, buffers and parts.
#include "bindings.h"

namespace cohort::python {

void bind_slots(py::module_& module) {
  module.def(
      "holds_same",
      [](const py::list& dicts, const py::list& values) {
        py::ssize_t at = 0;
        const py::ssize_t count = PyList_GET_SIZE(values.ptr());
        for (const py::handle one : dicts) {
          if (!PyDict_Check(one.ptr())) throw py::type_error("holds_same: a list of dicts is wanted");
          PyObject* key = nullptr;
          PyObject* value = nullptr;
          for (py::ssize_t position = 0; PyDict_Next(one.ptr(), &position, &key, &value) != 0; ++at) {
            if (at == count || PyList_GET_ITEM(values.ptr(), at) != value) return false;
          }
        }
        return at == count;
      },
      py::arg("dicts"), py::arg("values"),
      "Whether the values of the dicts, one after the other, are these very objects.");
}

}  // namespace cohort::python
