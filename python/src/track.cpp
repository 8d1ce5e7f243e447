// cohort.track: the record of a run, its picture, and the progress bar, as C++ has them.
#include "arguments.h"
#include "bindings.h"
#include "errors.h"

#include <cohort/track.h>

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>

namespace cohort::python {
namespace {

track::Value value_of(const std::string& name, py::object value) {
  if (py::hasattr(value, "item")) value = value.attr("item")();  // NumPy's and torch's numbers
  if (PyBool_Check(value.ptr()) != 0) return {value.cast<bool>()};
  if (PyFloat_Check(value.ptr()) != 0) return {value.cast<double>()};
  if (PyLong_Check(value.ptr()) != 0) return {value.cast<std::int64_t>()};
  if (py::isinstance<py::str>(value) || py::hasattr(value, "__fspath__")) return {py::str(value).cast<std::string>()};
  refuse("RunRecord", "'" + name + "' is a " + std::string(py::str(py::type::of(value).attr("__name__"))) +
                          " -- numbers, texts, truth values and paths can be written");
}

track::Fields fields_of(const py::dict& named) {
  track::Fields fields;
  for (const auto& [key, value] : named) {
    const std::string name{py::str(key)};
    fields.emplace_back(name, value_of(name, py::reinterpret_borrow<py::object>(value)));
  }
  return fields;
}

/// An interval in seconds; nullopt for None.
std::optional<std::chrono::milliseconds> interval_of(const py::object& seconds) {
  return milliseconds_of(seconds, "Progress");
}

void flush_python() { py::module_::import("sys").attr("stdout").attr("flush")(); }

}  // namespace

void bind_track(py::module_& module) {
  py::class_<track::RunRecord, std::shared_ptr<track::RunRecord>>(module, "RunRecord")
      .def(py::init([](const std::filesystem::path& file, const std::string& program, int world_size,
                       const py::dict& parameters) {
             const track::RunRecordOptions options{program, world_size, fields_of(parameters)};
             const py::gil_scoped_release release;
             return std::make_shared<track::RunRecord>(file, options);
           }),
           py::arg("file"), py::kw_only(), py::arg("program") = "", py::arg("world_size") = 1,
           py::arg("parameters") = py::dict())
      .def(
          "write",
          [](track::RunRecord& self, const std::string& event, const py::kwargs& fields) {
            const track::Fields all = fields_of(fields);
            const py::gil_scoped_release release;
            self.write(event, all);
          },
          py::arg("event"))
      .def("write_communication", &track::RunRecord::write_communication, py::call_guard<py::gil_scoped_release>())
      .def(
          "step",
          [](track::RunRecord& self, std::int64_t step, std::int64_t samples, double seconds, double exposed) {
            self.on_step({step, samples, seconds, exposed});
          },
          py::arg("step"), py::arg("samples"), py::arg("seconds"), py::arg("exposed_communication_seconds") = 0.0)
      .def(
          "observe",
          [](const std::shared_ptr<track::RunRecord>& self, const PyCommunicator& world) {
            world.member().observe(self);
          },
          py::arg("world"))
      .def_property_readonly("file", [](const track::RunRecord& self) { return self.file(); });
  module.def("plot", &track::plot, py::arg("record_file"), py::arg("svg_file"),
             py::call_guard<py::gil_scoped_release>());
  py::class_<track::Progress>(module, "Progress")
      .def(py::init([](std::int64_t steps_per_epoch, std::int64_t epochs, std::int64_t first_step,
                       std::int64_t first_epoch, std::optional<std::int64_t> steps_left_in_first_epoch,
                       std::optional<bool> terminal, const py::object& interval) {
             return std::make_unique<track::Progress>(
                 track::ProgressOptions{.steps_per_epoch = steps_per_epoch,
                                        .epochs = epochs,
                                        .first_step = first_step,
                                        .first_epoch = first_epoch,
                                        .steps_left_in_first_epoch = steps_left_in_first_epoch,
                                        .terminal = terminal,
                                        .interval = interval_of(interval)});
           }),
           py::kw_only(), py::arg("steps_per_epoch") = 0, py::arg("epochs") = 0, py::arg("first_step") = 0,
           py::arg("first_epoch") = 0, py::arg("steps_left_in_first_epoch") = py::none(),
           py::arg("terminal") = py::none(), py::arg("interval") = py::none())
      .def("update", &track::Progress::update, py::arg("step"), py::arg("loss"), py::arg("samples"))
      .def("skip_time", &track::Progress::skip_time)
      .def(
          "line",
          [](track::Progress& self, const std::string& text) {
            flush_python();  // what was printed before comes before
            self.line(text);
          },
          py::arg("text"))
      .def("finish", &track::Progress::finish);
}

}  // namespace cohort::python
