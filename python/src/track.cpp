// cohort.track: the record of a run, its picture, and the progress bar, from the C++ implementation.
#include "arguments.h"
#include "arrays.h"
#include "bindings.h"
#include "errors.h"

#include <cohort/track.h>

#include <pybind11/stl.h>
#include <pybind11/stl/filesystem.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cohort::python {
namespace {

track::Value value_of(const std::string& name, py::object value) {
  if (py::hasattr(value, "item")) value = value.attr("item")();  // converts numbers of NumPy and torch
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

double number_of(const std::string& name, py::handle value) {
  py::object number = py::reinterpret_borrow<py::object>(value);
  if (PyFloat_Check(value.ptr()) == 0 && PyLong_Check(value.ptr()) == 0 && py::hasattr(value, "item")) {
    number = value.attr("item")();
  }
  const double found = PyFloat_AsDouble(number.ptr());
  if (found != -1.0 || PyErr_Occurred() == nullptr) return found;
  PyErr_Clear();
  refuse("log", "'" + name + "' is a " + std::string(py::str(py::type::of(value).attr("__name__"))) +
                    " -- numbers can be logged");
}

track::Reduce reduce_of(const py::object& name) {
  if (name.is_none()) return track::Reduce::No;
  const std::string wanted = py::str(name);
  if (wanted == "mean" || wanted == "average") return track::Reduce::Mean;
  if (wanted == "max") return track::Reduce::Max;
  if (wanted == "min") return track::Reduce::Min;
  if (wanted == "sum") return track::Reduce::Sum;
  if (wanted == "each") return track::Reduce::Each;
  refuse("log", "reduce is '" + wanted + "' -- mean, max, min, sum and each are those that there are");
}

/// cohort.track's access to a record, which outlives this object.
class PyMetrics {
 public:
  PyMetrics(std::shared_ptr<track::RunRecord> record, const PyCommunicator* world) : record_(std::move(record)) {
    if (world == nullptr) {
      metrics_ = std::make_unique<track::Metrics>(record_.get());
      return;
    }
    metrics_ = world->member().call<std::unique_ptr<track::Metrics>>("log", [this](Communicator& communicator) {
      return std::make_unique<track::Metrics>(record_.get(), track::MetricsOptions{.communicator = communicator});
    });
  }
  ~PyMetrics() {
    const py::gil_scoped_release release;
    metrics_.reset();
  }
  PyMetrics(const PyMetrics&) = delete;
  PyMetrics& operator=(const PyMetrics&) = delete;

  void log(std::int64_t step, const py::dict& values, const py::object& reduce) {
    // The keyword arguments keep their names alive meanwhile.
    std::vector<track::Metric> numbers;
    numbers.reserve(values.size());
    for (const auto& [key, value] : values) {
      Py_ssize_t size = 0;
      const char* const name = PyUnicode_AsUTF8AndSize(key.ptr(), &size);
      if (name == nullptr) throw py::error_already_set();
      const std::string_view shown(name, static_cast<std::size_t>(size));
      numbers.emplace_back(shown, number_of(std::string(shown), value));
    }
    metrics_->log(step, numbers, reduce_of(reduce));
  }
  void flush() {
    const py::gil_scoped_release release;
    metrics_->flush();
  }
  void close(std::optional<double> patience) {
    const py::gil_scoped_release release;
    metrics_->close(patience ? std::optional(std::chrono::milliseconds(static_cast<std::int64_t>(*patience * 1e3)))
                             : std::nullopt);
  }

 private:
  std::shared_ptr<track::RunRecord> record_;
  std::unique_ptr<track::Metrics> metrics_;
};

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
          py::arg("event"),
          "write(event, **fields): appends a line: numbers (also of NumPy and torch), texts, truth values, paths. It "
          "is in "
          "the kernel's hands on return; a full disk raises Io and leaves the file as it was.")
      .def(
          "_write_weights",
          [](track::RunRecord& self, std::int64_t step, const std::vector<std::pair<std::string, py::object>>& named) {
            std::vector<Array> arrays;
            std::vector<track::Weight> weights;
            for (const auto& [name, array] : named) {
              arrays.emplace_back(array, Access::Read, Role{"write_weights", name.c_str()});
              weights.push_back({name, arrays.back().const_buffer()});
            }
            const py::gil_scoped_release release;
            self.write_weights(step, weights);
          },
          py::arg("step"), py::arg("named"))
      .def("write_communication", &track::RunRecord::write_communication, py::call_guard<py::gil_scoped_release>(),
           "Appends what `observe` has seen since the last time: number, bytes and seconds of each operation, seconds "
           "waited "
           "for peers, steps. Nothing if nothing was seen.")
      .def(
          "step",
          [](track::RunRecord& self, std::int64_t step, std::int64_t samples, double seconds, double exposed) {
            self.on_step({step, samples, seconds, exposed});
          },
          py::arg("step"), py::arg("samples"), py::arg("seconds"), py::arg("exposed_communication_seconds") = 0.0,
          "One step as the training loop saw it; `samples` of all ranks.")
      .def(
          "observe",
          [](const std::shared_ptr<track::RunRecord>& self, const PyCommunicator& world) {
            world.member().observe(self);
          },
          py::arg("world"), "What this Communicator does from now on is added up.")
      .def_property_readonly(
          "file", [](const track::RunRecord& self) { return self.file(); }, "Its path.");
  py::class_<PyMetrics>(module, "Metrics")
      .def(py::init([](std::shared_ptr<track::RunRecord> record, const PyCommunicator* world) {
             return std::make_unique<PyMetrics>(std::move(record), world);
           }),
           py::arg("record").none(true), py::arg("world").none(true) = py::none())
      .def("log", &PyMetrics::log, py::arg("step"), py::arg("values"), py::arg("reduce") = py::none())
      .def("flush", &PyMetrics::flush)
      .def("close", &PyMetrics::close, py::arg("patience") = py::none());
  py::class_<track::Progress>(
      module, "Progress",
      "A bar on stdout: one line that is drawn over on a terminal, plain lines elsewhere (`terminal` says which it "
      "is), at "
      "most one for each `interval` seconds (0.1, or 2). A run that resumes another says how many steps and whole "
      "epochs "
      "were done, and on another number of ranks also how many steps its first epoch has left. For the training loop's "
      "thread.")
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
      .def("update", &track::Progress::update, py::arg("step"), py::arg("loss"), py::arg("samples"),
           "After each step: steps done in all, the latest loss, samples of this step over all ranks.")
      .def("skip_time", &track::Progress::skip_time,
           "Leaves the time since the last step out of the speed: it was an evaluation or a checkpoint.")
      .def(
          "line",
          [](track::Progress& self, const std::string& text) {
            flush_python();  // so that earlier output appears first
            self.line(text);
          },
          py::arg("text"), "A line that stays, above the bar.")
      .def("finish", &track::Progress::finish, "Takes the bar away. Further calls do nothing.");
}

}  // namespace cohort::python
