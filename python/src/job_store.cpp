// Values of any length, through the store of the job that started this process: what `cohort.run` sends to ranks that
// cannot read its folder, and what they return; where servers listen; functions that a coordinator schedules.
#include "bindings.h"

#include "net/store.h"

#include <pybind11/stl.h>

#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace cohort::python {
namespace {

store::Store::Deadline deadline_of(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::milliseconds(static_cast<std::int64_t>(std::ceil(seconds * 1000)));
}

class JobStore {
 public:
  explicit JobStore(double timeout) : store_(store::connect_job_store(deadline_of(timeout))) {}
  void put(const std::string& key, const py::bytes& value) {
    const std::string text = value;
    const py::gil_scoped_release release;
    store::set_large(*store_, key, text);
  }
  py::bytes wait(const std::string& key, double timeout) {
    std::string value;
    {
      const py::gil_scoped_release release;
      value = store::get_large(*store_, key, deadline_of(timeout));
    }
    return value;
  }
  std::optional<py::bytes> get(const std::string& key, double timeout) {
    std::optional<std::string> value;
    {
      const py::gil_scoped_release release;
      value = store::try_get_large(*store_, key, deadline_of(timeout));
    }
    if (!value) return std::nullopt;
    return py::bytes(*value);
  }
  void remove(const std::string& key) {
    const py::gil_scoped_release release;
    store::delete_large(*store_, key);
  }

 private:
  std::shared_ptr<store::Store> store_;
};

}  // namespace

void bind_job_store(py::module_& module) {
  py::class_<JobStore>(module, "JobStore",
                       "A connection to the store of this process's job. One call at a time.\n\n"
                       "timeout: seconds to connect. Raises Unavailable where there is no job of `cohort run`.")
      .def(py::init([](double timeout) {
             const py::gil_scoped_release release;
             return std::make_unique<JobStore>(timeout);
           }),
           py::arg("timeout"))
      .def("put", &JobStore::put, py::arg("key"), py::arg("value"), "Bytes of any length.")
      .def("get", &JobStore::get, py::arg("key"), py::arg("timeout"), "None if nothing is there.")
      .def("wait", &JobStore::wait, py::arg("key"), py::arg("timeout"),
           "What is put there, once it is. Raises Timeout.")
      .def("remove", &JobStore::remove, py::arg("key"));
}

}  // namespace cohort::python
